"""`ease node`, `server`, `up`, `status` and the keys of a federation."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
from pydantic import ConfigDict
from rich.console import RenderableType

import ease.audit.site_measures  # noqa: F401 - registers its objective
from ease import __version__
from ease.commands.requests import OVERDUE, PENDING
from ease.config import Config, read_toml, validate
from ease.console import labelled, megabytes, table
from ease.data.config import load_pairs
from ease.data.partition import Shard
from ease.errors import Disconnected, UserError
from ease.federation.credentials import (
    Authority,
    admit,
    expiry,
    fingerprint,
    make_authority,
    make_node_key,
    read_admitted,
    revoke,
    rotate_authority,
    server_hosts,
)
from ease.federation.flower import SERVER, Flower
from ease.federation.launch import FlowerServer, die_with_parent, free_port, start_supernode, stop
from ease.federation.node import Node, Policy, closed_pairs, listen, private_folder, serve
from ease.federation.question_log import question_log
from ease.federation.remote import Remote, Sockets, Transport, node_socket
from ease.federation.wire import Present
from ease.methods import import_all
from ease.model.backbones import Backbone, load_backbone
from ease.model.dual_encoder import DualEncoder, check_fits
from ease.operations.ledger.records import now
from ease.operations.ledger.states import OPEN
from ease.operations.ledger.store import Ledger
from ease.operations.lost_sites import read_lost_sites
from ease.runs.config import RunConfig, choose_device
from ease.runs.run import Run
from ease.runs.workers import default_processes
from ease.runs.world import World, activations_of, check_on_site

WATCHING = 5.0
"""Seconds between two checks of a federation."""
SLOW = 300.0
"""Seconds in which a node must have read its data."""
NO_RUN = "0" * 32
WARNING_DAYS = 60
"""Before a certificate ends; nodes have to be given the new one by hand."""
RETURNING = 3.0
"""Seconds after which a node that was turned away tries again."""


# --- a node ---


def make_node(config: RunConfig, client: int, folder: Path, policy: Path | None = None, quiet: bool = False) -> Node:
    """The worker of one client: its own shard of the configured data, and a folder of its own."""
    import_all()  # jobs may name the objective of any method
    rules = validate(Policy, read_toml(policy), str(policy)) if policy is not None else Policy()
    if config.partition.on_site:
        return make_node_on_site(config, client, folder, rules, quiet)
    world = World.open(config)
    shard = next((each for each in world.shards if each.client == client), None)
    if shard is None:
        known = ", ".join(str(each.client) for each in world.shards)
        raise UserError(f"--id {client}: no client of this configuration (its clients: {known})")
    return Node(
        world.server.model,
        shard,
        world.evaluator.activations,
        world.server.device,
        folder,
        world.server.backbone.fingerprint,
        __version__,
        rules,
        log=None if quiet else sys.stderr,
    )


def make_node_on_site(config: RunConfig, client: int, folder: Path, rules: Policy, quiet: bool) -> Node:
    """The worker of a client whose pairs no one else opens: its folder is all that it reads."""
    check_on_site(config)
    device = choose_device(config.device)
    backbone = load_backbone(config.model.backbone, device)
    check_fits(backbone, config.model)
    closed = closed_pairs(folder)
    pairs = load_pairs(config.data, backbone.image_size, backbone.crop, False, closed, closed.bars, owner="client")
    activations = activations_of(pairs, backbone, config, device)  # before adapters go into the backbone
    everything, sites = np.arange(len(pairs)), set(pairs.sites)
    nothing = np.arange(0)
    model = DualEncoder(backbone, config.model, config.seed).to(device)
    return Node(
        model,
        Shard(
            client,
            everything,
            nothing,
            pairs.ids,
            np.zeros(len(pairs), np.int64),
            nothing,
            name=sites.pop() if len(sites) == 1 else None,
        ),
        activations,
        device,
        folder,
        backbone.fingerprint,
        __version__,
        rules,
        pairs,
        lambda words: frozen_words(backbone, model, device, words),
        None if quiet else sys.stderr,
    )


def frozen_words(backbone: Backbone, model: DualEncoder, device: torch.device, words: str) -> np.ndarray:
    """Embedding of some words by the frozen text tower [width]."""
    tower, first = backbone.text, model.text.first
    with torch.no_grad():
        states, mask = tower.prefix(backbone.tokenize([words]).to(device), first)
        return tower(states, mask, first)[0].cpu().double().numpy()


class Question(Config):
    """One question that a node was asked."""

    model_config = ConfigDict(extra="allow")

    time: str
    kind: str
    objective: str = ""
    """Objective of a job. Empty for other questions."""
    run: str
    cohort: int
    bytes_in: int
    bytes_out: int
    refused: str
    """Why it was refused. Empty if it was answered."""
    times: int = 1
    """Number of questions that this line counts. More than one if the list grew too long and the older ones were added
    up."""


class QuestionsSummary(Config):
    """`ease node --audit`: what a node was asked, from its own list."""

    path: Path
    asked: tuple[Question, ...]

    def render(self) -> Iterator[RenderableType]:
        counts = Counter[tuple[str, str, str]]()
        for each in self.asked:
            counts[each.kind, each.objective, "refused" if each.refused else "answered"] += each.times
        rows = [[*what, str(times)] for what, times in sorted(counts.items())]
        title = f"{counts.total()} questions in {self.path}"
        yield table(title, ["kind", "objective", "", "times"], rows, text_columns=3)


def asked_of_node(folder: Path) -> QuestionsSummary:
    """The questions that the node of this folder received so far."""
    log = question_log(folder)
    asked = tuple(validate(Question, line, str(log.path)) for line in log.lines())
    return QuestionsSummary(path=log.path, asked=asked)


@dataclass(frozen=True)
class Upstream:
    """How a node reaches the server of its federation."""

    server: str
    """HOST:PORT"""
    key: Path | None
    certificate: Path | None


def run_node(
    config: RunConfig,
    client: int,
    folder: Path | None,
    path: Path | None,
    policy: Path | None,
    group: str | None,
    upstream: Upstream | None,
    quiet: bool,
) -> None:
    """Answer jobs for one client until the process is ended; with an upstream, also start Flower's end."""
    path = path or node_socket(config.federation_folder, client)
    folder = folder or path.with_suffix("")
    private_folder(folder)
    line = listen(path, _group(group))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as ending:
        ending.callback(path.unlink, missing_ok=True)
        ending.callback(line.close)
        node = make_node(config, client, folder, policy, quiet)
        if config.training.optimiser == "adam":
            torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # it imports for a second, and not in the first job
        if upstream is not None:
            ending.enter_context(connected(upstream, folder, client, path))
        if not quiet:
            print(f"client {client}: {len(node.shard.train)} pairs; listening at {path}", file=sys.stderr, flush=True)
        serve(node, line)


@contextmanager
def connected(upstream: Upstream, folder: Path, client: int, path: Path) -> Iterator[None]:
    """Flower's end, started again whenever it ends: as long as a key is not admitted, it is turned away."""
    ended, running = threading.Event(), list["subprocess.Popen[bytes]"]()

    def keep() -> None:
        said = False
        while not ended.is_set():
            running[:] = [start_supernode(folder, client, path, upstream.server, upstream.key, upstream.certificate)]
            running[0].wait()
            if not said and not ended.is_set():
                said = True  # once: it tries again every few seconds
                print(_turned_away(folder, client, upstream), file=sys.stderr, flush=True)
            ended.wait(RETURNING)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        for process in running:
            stop(process)
        thread.join(RETURNING)


def _turned_away(folder: Path, client: int, upstream: Upstream) -> str:
    """Why Flower's end stops, in one line for the person at the site."""
    log = folder / "flower" / f"node-{client}.log"
    return (
        f"client {client}: not connected to {upstream.server}, trying again. If the server runs, its operator has to "
        f"admit this node's key (`ease keys admit`), and --ca has to be the server's ca.crt; see {log}"
    )


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    import grp  # only on Unix, like the sockets

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UserError(f"--group {name}: no such group on this machine; make it or leave the option out") from None


# --- keys ---


class KeyFiles(Config):
    """`ease keys server`, `node`, `admit` and `rotate`: files, and what each is for."""

    files: dict[str, Path]
    """What it is -> the file."""

    def render(self) -> Iterator[RenderableType]:
        for name, path in self.files.items():
            yield f"{name}: {path}"


def server_keys(folder: Path, hosts: Sequence[str]) -> KeyFiles:
    made = make_authority(folder / "keys", hosts)
    return KeyFiles(
        files={"certificate, for every node": made.certificate, "private key of the server": made.server_key}
    )


def node_key(path: Path) -> KeyFiles:
    public = make_node_key(path)
    return KeyFiles(files={"private key, only for this node": path, "public key, for the server": public})


def admit_key(folder: Path, client: int, key: Path) -> KeyFiles:
    admit(folder, client, key)
    return KeyFiles(files={f"client {client} is the node with": key})


# --- the server, and a whole federation on one machine ---


def run_server(folder: Path, host: str, port: int, insecure: bool, quiet: bool) -> None:
    """Keep the server of a federation up until the process is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with FlowerServer(folder, host, port, insecure) as server:
        _tell(f"federation {folder}: server at {host}:{port}{', in the clear' if insecure else ''}", quiet)
        watch(server, quiet)


def watch(server: FlowerServer, quiet: bool) -> None:
    """Start the stub again when it ends, make new keys known, and end when Flower's server does."""
    while True:
        time.sleep(WATCHING)
        if not server.alive:
            raise UserError(
                f"{server.folder}: Flower's server has ended; see {server.folder / 'flower' / 'server.log'}"
            )
        server.register()
        if not server.connected():
            _tell("the stub at the server has ended; starting it again", quiet)
            server.connect()


def run_up(
    config: RunConfig,
    source: Sequence[str],
    folder: Path,
    port: int | None,
    insecure: bool,
    flower: bool,
    simulation: bool,
    quiet: bool,
) -> None:
    """A whole federation on this machine: keys where there are none, a server, and a node for each client."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    clients, authority = range(config.partition.clients), Authority(folder / "keys")
    with ExitStack() as ending:
        server, workers = None, list["subprocess.Popen[bytes]"]()
        if flower:
            if not insecure and not authority.certificate.is_file():
                make_authority(authority.folder, ("localhost", "127.0.0.1"))
            for client in clients if not insecure else ():
                key = authority.folder / f"node-{client}"
                admit(folder, client, key.with_name(f"{key.name}.pub") if key.exists() else make_node_key(key))
            simulated = len(clients) if simulation else 0
            server = ending.enter_context(FlowerServer(folder, "127.0.0.1", port or free_port(), insecure, simulated))
        for client in clients:
            command = [sys.executable, "-c", "from ease.cli import main; main()", "node", *source, "--id", str(client)]
            command += ["--socket", str(node_socket(folder, client)), *(("--quiet",) if quiet else ())]
            if server is not None and not simulation:
                command += ["--server", f"127.0.0.1:{server.port}"]
                keys = authority.folder / f"node-{client}", authority.certificate
                command += [] if insecure else ["--key", str(keys[0]), "--ca", str(keys[1])]
            workers.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, env=sharing(len(clients)), preexec_fn=die_with_parent
                )
            )
            ending.callback(stop, workers[-1])
        ending.callback(terminate, workers)  # all at once, before each is waited for
        _await_nodes(folder, clients, server)
        engine = "flower" if flower else "nodes"
        _tell(f"{len(clients)} nodes are up; in another shell:", quiet)
        _tell(f"ease train {' '.join(source)} --set engine={engine} --set federation={folder} --out runs/first", quiet)
        if server is not None:
            watch(server, quiet)
        while True:
            time.sleep(WATCHING)


def sharing(nodes: int) -> dict[str, str]:
    """The environment of nodes that share this machine: threads of their own for every core would fight for it."""
    return {"OMP_NUM_THREADS": str(max(1, default_processes("cpu") // nodes)), **os.environ}


def terminate(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()


def _await_nodes(folder: Path, clients: Sequence[int], server: FlowerServer | None) -> None:
    until = time.monotonic() + SLOW
    here = Remote(
        Sockets({each: node_socket(folder, each) for each in clients}), _none(clients), _none(clients), NO_RUN
    )
    while time.monotonic() < until:
        there = server is None or len(Flower(folder).nodes()) >= len(clients)
        if there and not any(isinstance(reply, str) for reply in here.present().values()):
            return
        time.sleep(0.5)
    raise UserError(f"{folder}: not all nodes came up within {SLOW:g} s; see {folder / 'flower'}")


def _none(clients: Sequence[int]) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(clients, ())


def _tell(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)


# --- status ---


HERE, LOST = ("ready", "working"), "gone for good"
"""States of a node that answers, and of one that nobody waits for any more."""


class NodeStatus(Config):
    """One client's node."""

    client: int
    state: str
    """`ready`, `working`, `gone for good` if the run records that, or why it does not answer."""
    jobs: int = 0
    refused: int = 0
    last: float | None = None
    """Seconds since it began its last job. Null if it never did."""
    parts: int = 0
    """Parts of jobs that it keeps."""


class WaitingRequest(Config):
    """A request that waits for an answer."""

    id: str
    state: str
    deadline: str


class RunStatus(Config):
    """A run of the federation."""

    run: Path
    round: int
    rounds: int
    bytes_down: int
    bytes_up: int
    queue: tuple[WaitingRequest, ...]
    overdue: int
    """How many of them are past their deadline."""


class FederationStatus(Config):
    """`ease status`: who is there, what they did, and what waits."""

    folder: Path
    server: str
    nodes: tuple[NodeStatus, ...]
    run: RunStatus | None
    certificate_until: str | None = None
    """The day on which the server's certificate ends. Null if there is none."""

    @property
    def exit_code(self) -> int:
        """1 if a node is silent or the certificate has ended, 5 if a request is overdue, 4 if one waits."""
        expired = self.certificate_until is not None and self.certificate_until <= now().date().isoformat()
        if expired or any(each.state not in (*HERE, LOST) for each in self.nodes):
            return 1
        if self.run is None or not self.run.queue:
            return 0
        return OVERDUE if self.run.overdue else PENDING

    def render(self) -> Iterator[RenderableType]:
        yield labelled("server", self.server)
        if self.certificate_until is not None:
            yield _expiry_line(self.certificate_until)
        rows = [
            [
                str(each.client),
                each.state,
                "never" if each.last is None else f"{each.last:.0f} s ago",
                str(each.jobs),
                str(each.refused),
                str(each.parts),
            ]
            for each in self.nodes
        ]
        yield table("Nodes", ["client", "state", "last job", "jobs", "refused", "parts kept"], rows, text_columns=3)
        if self.run is not None:
            rounds = f"round {self.run.round} of {self.run.rounds}"
            sent = f"{megabytes(self.run.bytes_down)} sent, {megabytes(self.run.bytes_up)} received"
            yield labelled("run", f"{self.run.run}: {rounds}; {sent}")
            late = f", {self.run.overdue} OVERDUE" if self.run.overdue else ""
            count = len(self.run.queue)
            yield labelled("queue", f"{count} request{'' if count == 1 else 's'}{late}")
            for each in self.run.queue:
                yield f"  {each.id}: {each.state}, until {each.deadline[:10]}"


def _expiry_line(until: str) -> RenderableType:
    left = (date.fromisoformat(until) - now().date()).days
    words = f"{until}, in {left} days" if left > 0 else f"{until}: it has ended; make a new one with ease keys rotate"
    return labelled("certificate until", words, "red" if left <= 0 else "yellow" if left < WARNING_DAYS else "dim")


class KeysList(Config):
    """`ease keys list` and `ease keys revoke`: the server's certificate, and each client's key."""

    certificate_until: str | None
    """The day on which the server's certificate ends. Null if there is none."""
    clients: dict[int, str]
    """Client -> fingerprint of its node's key."""

    def render(self) -> Iterator[RenderableType]:
        if self.certificate_until is not None:
            yield _expiry_line(self.certificate_until)
        rows = [[str(client), key] for client, key in self.clients.items()]
        yield table(f"{len(rows)} admitted keys", ["client", "fingerprint"], rows, text_columns=2)


def list_keys(folder: Path) -> KeysList:
    """List the keys of a federation, and when its certificate ends."""
    known = read_admitted(folder).clients
    clients = {int(each): fingerprint(known[each]) for each in sorted(known, key=int)}
    found = KeysList(certificate_until=_certificate_until(folder), clients=clients)
    if found.certificate_until is None and not found.clients:
        raise UserError(f"{folder}: no keys here; make them with `ease keys server` and `ease keys admit`")
    return found


def revoke_key(folder: Path, client: int) -> KeysList:
    """Take the key of a client's node back."""
    revoke(folder, client)
    known = read_admitted(folder).clients
    clients = {int(each): fingerprint(known[each]) for each in sorted(known, key=int)}
    return KeysList(certificate_until=_certificate_until(folder), clients=clients)


def rotate_keys(folder: Path) -> KeyFiles:
    """Make a new certificate for the same names; nodes need its ca.crt."""
    keys = folder / "keys"
    hosts = server_hosts(keys)
    made, aside = rotate_authority(keys, hosts, now().date().isoformat())
    return KeyFiles(files={"new certificate, for every node": made.certificate, "old keys": aside})


def _certificate_until(folder: Path) -> str | None:
    path = Authority(folder / "keys").server_certificate
    return expiry(path).date().isoformat() if path.is_file() else None


def federation_status(folder: Path, run: Path | None) -> FederationStatus:
    """Who is there, what they did, what waits, and until when the server's certificate holds."""
    found = _status(folder, run)
    lost = frozenset() if run is None else read_lost_sites(run).clients
    nodes = tuple(
        each.model_copy(update={"state": LOST}) if each.client in lost and each.state not in HERE else each
        for each in found.nodes
    )
    return found.model_copy(update={"nodes": nodes, "certificate_until": _certificate_until(folder)})


def _status(folder: Path, run: Path | None) -> FederationStatus:
    line: Transport
    if (folder / SERVER).is_file():
        line, server = Flower(folder), "answers"
        clients = sorted(read_admitted(folder).by_key().values())
        try:
            there = line.nodes()
            server = f"answers; {len(there)} nodes are connected"
        except (Disconnected, TimeoutError) as error:
            reasons = {client: str(error) or "no answer" for client in clients}
            return FederationStatus(folder=folder, server=str(error), nodes=_states(reasons), run=_run_status(run))
        clients = clients or sorted(int(path.stem) for path in (folder / "nodes").glob("*.sock"))
    else:
        clients = sorted(int(path.stem) for path in (folder / "nodes").glob("*.sock") if path.stem.isdigit())
        line, server = (
            Sockets({client: node_socket(folder, client) for client in clients}),
            "none; nodes of this machine",
        )
    if not clients:
        raise UserError(f"{folder}: no federation here; start one with `ease up` or `ease server`")
    remote = Remote(line, _none(clients), _none(clients), NO_RUN, deadline=30.0)
    return FederationStatus(folder=folder, server=server, nodes=_states(remote.present()), run=_run_status(run))


def _states(replies: Mapping[int, Present | str]) -> tuple[NodeStatus, ...]:
    return tuple(
        NodeStatus(client=client, state=each)
        if isinstance(each, str)
        else NodeStatus(
            client=client,
            state="working" if each.busy else "ready",
            jobs=each.jobs,
            refused=each.refused,
            last=each.last,
            parts=len(each.parts),
        )
        for client, each in sorted(replies.items())
    )


def _run_status(folder: Path | None) -> RunStatus | None:
    if folder is None:
        return None
    run = Run.load(folder)
    done = run.history.rounds()
    records = [run.history.record(number) for number in range(1, done + 1)]
    ledger, time_now = Ledger(folder), now()
    waiting = [each for each in ledger.entries() if each.state in OPEN]
    return RunStatus(
        run=folder,
        round=done,
        rounds=run.config.training.rounds,
        bytes_down=sum(record.bytes_down for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        queue=tuple(WaitingRequest(id=each.id, state=each.state, deadline=each.deadline) for each in waiting),
        overdue=sum(each.is_overdue(time_now) for each in waiting),
    )
