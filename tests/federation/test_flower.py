"""The same federation over Flower, with real processes: equal bytes, whatever fails, and strangers stay out.

One set of nodes serves all tests: with keys over TLS, through a second server in the clear, and through a simulation.
"""

import grp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.federation.faulty_node import HUGE

from ease.errors import Disconnected
from ease.federation.check import refusal
from ease.federation.codec import encode_job
from ease.federation.credentials import Authority, admit, make_authority, make_node_key, public_key
from ease.federation.fedavg import fedavg
from ease.federation.flower import Flower
from ease.federation.launch import (
    CONNECTION,
    FlowerServer,
    descendants,
    die_with_parent,
    environment,
    flower_programs,
    free_port,
    start_supernode,
    stop,
)
from ease.federation.middleware import Guarded
from ease.federation.node import private_folder
from ease.federation.protocol import LocalJob, Middleware, Update
from ease.federation.remote import node_socket, spoken
from ease.federation.wire import JOB, Ask, Present, decode_present, encode
from ease.params import Params
from ease.runs.config import load_config
from ease.runs.world import World
from ease.storage import read_json, sha256

pytestmark = pytest.mark.engine

CLIENTS = (0, 1, 2)
PATIENCE = 300.0
FAULTY = Path(__file__).with_name("faulty_node.py")
HOSTILE = Path(__file__).with_name("hostile_bundle")
NOBODY = 65534
UNEQUAL = ("partition.scheme=dirichlet", "partition.beta=0.7", "training.rounds=2")


@dataclass
class Federation:
    """A server and three nodes with keys, each a process of its own."""

    folder: Path
    settings: tuple[str, ...]
    port: int = field(default_factory=free_port)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def ease(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE * 2)

    def begin(self, name: str, *arguments: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command(*arguments), stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def serve(self) -> None:
        self.begin("server", "server", self.folder, "--port", self.port)

    def join(self, client: int) -> None:
        keys, log = self.folder / "keys", self.folder / f"node-{client}.log"
        log.unlink(missing_ok=True)
        known = ("--key", keys / f"node-{client}", "--ca", keys / "ca.crt")
        place = ("--socket", node_socket(self.folder, client), "--server", f"127.0.0.1:{self.port}")
        rules = ("--policy", Path(__file__).parent / "small_jobs.toml")
        arguments = ("node", "--id", client, *rules, *place, *known, *self.strangers, *assigned(self.settings))
        with log.open("wb") as file:
            self.processes[f"node-{client}"] = subprocess.Popen(
                [sys.executable, str(FAULTY), str(self.folder), *map(str, arguments)],
                stdout=file,
                stderr=file,
                preexec_fn=die_with_parent,
            )

    @property
    def strangers(self) -> tuple[str, ...]:
        """As in docs/deploy.md: the group of the user that Flower runs as may speak to the node."""
        return ("--group", grp.getgrgid(NOBODY).gr_name) if os.getuid() == 0 else ()

    def pause(self, client: int, mark: str) -> None:
        """Make a node wait at the next job that has this in it, until `go_on`."""
        (self.folder / f"paused-{client}").unlink(missing_ok=True)
        (self.folder / f"pause-{client}").write_text(mark)

    def await_paused(self, client: int, process: "subprocess.Popen[str]") -> None:
        await_file(self.folder / f"paused-{client}", process)

    def go_on(self, client: int) -> None:
        (self.folder / f"pause-{client}").unlink(missing_ok=True)

    def await_nodes(self, count: int = len(CLIENTS)) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if len(Flower(self.folder).nodes()) == count and all(map(self._listens, CLIENTS)):
                    return
            except (Disconnected, TimeoutError):
                pass
            assert self.processes["server"].poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.5)
        raise AssertionError("\n".join(log.read_text() for log in sorted(self.folder.glob("*.log"))))

    def _listens(self, client: int) -> bool:
        return "listening" in (self.folder / f"node-{client}.log").read_text()

    def kill(self, name: str, alone: bool = False) -> None:
        """With what it started, as when the machine loses power; or the process alone."""
        process = self.processes.pop(name)
        for pid in (process.pid, *(() if alone else descendants(process.pid))):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            stop(process)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from ease.cli import main; main()", *map(str, arguments)]


def assigned(settings: tuple[str, ...]) -> list[str]:
    return [part for each in settings for part in ("--set", each)]


@contextmanager
def started(settings: tuple[str, ...], cache: Path) -> Iterator[Federation]:
    flower_programs()  # missing is an error: whoever asks for these tests has it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(cache))
        # Not in pytest's own folder, which no other user may enter: one that Flower runs as must reach a socket.
        folder = Path(tempfile.mkdtemp(prefix="ease-", dir="/tmp"))
        folder.chmod(0o755)
        made = Federation(folder, settings)
        make_authority(made.folder / "keys", ("localhost", "127.0.0.1"))
        for client in CLIENTS:
            admit(made.folder, client, make_node_key(made.folder / "keys" / f"node-{client}"))
        try:
            made.serve()
            for client in CLIENTS:
                made.join(client)
            made.await_nodes()
            yield made
        finally:
            made.end()
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def federation(small: tuple[str, ...], shared_cache: Path) -> Iterator[Federation]:
    with started((*small, *UNEQUAL), shared_cache) as made:
        yield made


@pytest.fixture(scope="module")
def plain(federation: Federation) -> Iterator[Path]:
    """The folder of another server of the same nodes, without TLS and keys."""
    with another_server(federation, "plain", 0) as folder:
        port = int(read_json(folder / "server.json")["port"])
        ends = [
            start_supernode(folder, client, node_socket(folder, client), f"127.0.0.1:{port}", None, None)
            for client in CLIENTS
        ]
        try:
            until = time.monotonic() + PATIENCE
            while len(Flower(folder).nodes()) < len(CLIENTS):
                assert time.monotonic() < until
                time.sleep(0.5)
            yield folder
        finally:
            for process in ends:
                stop(process)


@contextmanager
def another_server(federation: Federation, name: str, simulated: int) -> Iterator[Path]:
    folder = federation.folder / name
    (folder / "nodes").mkdir(parents=True)
    for client in CLIENTS:
        node_socket(folder, client).symlink_to(node_socket(federation.folder, client))
    with FlowerServer(folder, "127.0.0.1", free_port(), insecure=True, simulated=simulated):
        yield folder


def hashes(run: Path) -> dict[str, str]:
    """Of every state of a run: its rounds, and those of its answers."""
    return {str(path.relative_to(run)): sha256(path) for path in sorted(run.rglob("*.safetensors"))}


@dataclass(frozen=True)
class Reference:
    """The run in one process: after its training, and after both requests."""

    run: Path
    trained: dict[str, str]
    answered: dict[str, str]
    requests: tuple[tuple[object, ...], ...]


@pytest.fixture(scope="module")
def here(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("here")
    succeed(
        federation.ease(
            "train", "--out", folder / "run", "--quiet", *assigned((*federation.settings, "engine=sequential"))
        )
    )
    trained = hashes(folder / "run")
    ids = [holding["train_ids"][0] for holding in read_json(folder / "run" / "membership.json")["clients"][:2]]
    (folder / "ids.txt").write_text("\n".join(ids))
    requests = (("--samples", folder / "ids.txt"), ("--client", 2))
    for request in requests:
        answer(folder / "run", *request)
    return Reference(folder / "run", trained, hashes(folder / "run"), requests)


ANSWER = """
import sys
from pathlib import Path
from ease.runs.answers import open_world, default_method
from ease.runs.forget import forget
from ease.runs.resolve import RequestOptions, parse_request
from ease.runs.run import Run

run, kind, what = Run.load(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
world = open_world(run)
wanted = RequestOptions(samples=Path(what)) if kind == "--samples" else RequestOptions(clients=[what])
list(forget(run, world, parse_request(world, wanted).request, default_method(run), observe=False))
"""
"""What `ease forget` does, less the quick look behind it, whose four exchanges would take Flower half a minute."""


def answer(run: Path, *request: object) -> None:
    reported = [sys.executable, "-c", ANSWER, str(run), *map(str, request)]
    succeed(subprocess.run(reported, capture_output=True, text=True, timeout=PATIENCE * 2))


def succeed(reported: "subprocess.CompletedProcess[str]") -> None:
    assert reported.returncode == 0, reported.stderr


@pytest.fixture(scope="module")
def runs(
    federation: Federation, plain: Path, here: Reference, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Training, a sample request with replay and a client request over every kind of line, all at once: they wait for
    Flower far more than they work."""
    out = tmp_path_factory.mktemp("runs")

    def over(name: str, folder: Path) -> Path:
        settings = (*federation.settings, "engine=flower", f"federation={folder}")
        succeed(federation.ease("train", "--out", out / name, "--quiet", *assigned(settings)))
        for request in here.requests:
            answer(out / name, *request)
        return out / name

    with another_server(federation, "simulation", len(CLIENTS)) as simulated, ThreadPoolExecutor(3) as pool:
        lines = {"TLS": federation.folder, "plain": plain, "simulation": simulated}
        return dict(zip(lines, pool.map(over, lines, lines.values()), strict=True))


@pytest.mark.parametrize("line", ["TLS", "plain", "simulation"])
def test_every_state_is_that_of_one_process(here: Reference, runs: dict[str, Path], line: str) -> None:
    """Training, a sample request with replay and a client request, of three clients of unequal size."""
    assert hashes(runs[line]) == here.answered and len(here.answered) > len(here.trained) + 4 >= 8
    sizes = read_json(runs[line] / "rounds" / "00001" / "round.json")["pairs"]
    assert len(set(sizes.values())) == 3
    objectives = {
        found for client in CLIENTS for found in re.findall(r"client \d: (\w+), round", read_log(runs, client))
    }
    assert {"align", "replay"} <= objectives


@pytest.mark.parametrize("more", [(), ("training.secure=true",)], ids=["plain", "secure"])
def test_exact_forgetting_gives_the_bytes_of_one_process(
    small: tuple[str, ...], shared_cache: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Sums of training, of a request for pairs of two clients and of a client that leaves."""
    solved = (
        *small,
        *UNEQUAL,
        "model.lora=off",
        "model.projector=closed_form",
        "training.rounds=1",
        "training.history=client",
    )
    with started((*solved, *more), shared_cache) as made:
        lines = {"here": (*solved, "engine=sequential"), "there": (*made.settings, "engine=flower")}
        found: dict[str, dict[str, str]] = {}
        for name, settings in lines.items():
            place = (f"federation={made.folder}",) if name == "there" else ()
            succeed(made.ease("train", "--out", tmp_path / name, "--quiet", *assigned((*settings, *place))))
            holdings = read_json(tmp_path / name / "membership.json")["clients"]
            (tmp_path / "ids.txt").write_text("\n".join(each["train_ids"][0] for each in holdings[:2]))
            for request in (("--samples", tmp_path / "ids.txt"), ("--client", 2)):
                answer(tmp_path / name, *request)
            found[name] = hashes(tmp_path / name)
        assert found["here"] == found["there"] and len(found["here"]) >= 6


def read_log(runs: dict[str, Path], client: int) -> str:
    return (Path(read_json(runs["TLS"] / "run.json")["config"]["federation"]) / f"node-{client}.log").read_text()


def test_bytes_on_the_wire_are_those_of_the_record(runs: dict[str, Path], federation: Federation) -> None:
    """Flower's own log of what it moved would be the best witness; it has none, so the node's disk is: every state
    that the record counts was sent once."""
    record = read_json(runs["TLS"] / "rounds" / "00002" / "round.json")
    parts = {client: federation.folder / "nodes" / str(client) / "parts" for client in CLIENTS}
    largest = {client: max(path.stat().st_size for path in folder.iterdir()) for client, folder in parts.items()}
    assert sum(largest.values()) == pytest.approx(record["bytes_down"], rel=0.05)


def test_a_node_that_is_killed_in_a_replay_keeps_its_request_open(
    here: Reference, runs: dict[str, Path], federation: Federation, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["TLS"], run, ignore=shutil.ignore_patterns("requests"))
    arguments = ("forget", run, *here.requests[0], "--quiet")
    federation.pause(0, '"objective":"replay"')
    forgetting = begun(*arguments)
    federation.await_paused(0, forgetting)
    federation.kill("node-0", alone=True)
    _, reported = forgetting.communicate(timeout=PATIENCE)
    assert (
        forgetting.returncode == 2 and "1 of 2 clients gave a sound answer and 2 are needed (client 0:" in reported
    ), reported
    assert not list(run.glob("requests/*/*/record.json"))  # it is not done, and no one says so
    federation.go_on(0)
    federation.join(0)
    federation.await_nodes()
    succeed(federation.ease(*arguments))
    found = hashes(run)
    assert found == {name: here.answered[name] for name in found} and len(found) > len(here.trained)


def test_a_server_that_is_killed_is_resumed_from(here: Reference, federation: Federation, tmp_path: Path) -> None:
    """Killed between two rounds, then inside one: nodes come back by themselves, and the same command ends as if
    nothing had happened."""
    out, settings = tmp_path / "run", (*federation.settings, "engine=flower", f"federation={federation.folder}")
    arguments = ("train", "--out", out, "--quiet", *assigned(settings))
    training = begun(*arguments)
    await_file(out / "rounds" / "00001" / "round.json", training)
    training.send_signal(signal.SIGSTOP)  # before it has asked anyone again, or just after
    federation.kill("server")
    training.send_signal(signal.SIGCONT)
    for again in (True, False):
        _, reported = training.communicate(timeout=PATIENCE)
        assert training.returncode == 2 and "ease server" in reported and "same command" in reported, reported
        federation.serve()
        federation.await_nodes()
        if again:
            federation.pause(1, '"round":2')
            training = begun(*arguments)
            federation.await_paused(1, training)
            federation.kill("server")
            federation.go_on(1)
    succeed(federation.ease(*arguments))
    assert hashes(out) == here.trained


def test_a_node_that_loses_power_in_a_round_is_left_out_and_returns(federation: Federation, tmp_path: Path) -> None:
    """No deadline is set, so that a busy machine changes nothing: Flower finds out within a minute or so."""
    out = tmp_path / "run"
    settings = (*federation.settings, "engine=flower", f"federation={federation.folder}", "training.rounds=3")
    federation.pause(1, '"round":2')
    training = begun("train", "--out", out, "--quiet", *assigned(settings))
    federation.await_paused(1, training)
    federation.kill("node-1")
    federation.go_on(1)
    await_file(out / "rounds" / "00002" / "round.json", training)
    federation.join(1)
    _, reported = training.communicate(timeout=PATIENCE * 2)
    assert training.returncode == 0, reported
    records = {number: read_json(out / "rounds" / f"{number:05d}" / "round.json") for number in (1, 2, 3)}
    left_out = {number: list(record.get("rejected", {})) for number, record in records.items()}
    assert left_out[1] == [] and left_out[2] == ["1"]
    federation.await_nodes()


LIES = {
    1: {"1": "garbled", "2": "not numbers"},
    2: {"1": "another shape", "2": "yesterday's"},
    3: {"1": "huge"},
    4: {"2": "foreign id"},
}
"""Round -> client -> what is wrong with its answer; beside a huge update two others tell what is usual."""
NAMED = {
    "garbled": "altered or cut",
    "not numbers": "non-finite",
    "another shape": "has shape",
    "foreign id": "answered as client 0",
    "yesterday's": "another message",
}


class AsTheyLie(Middleware):
    """The clients of one process, of which some are left out or exaggerate."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in self.inner.run(params, job, clients):
            lie = LIES.get(job.round, {}).get(str(update.client))
            if lie == "huge":
                yield replace(update, delta=update.change.map(lambda tensor: tensor * HUGE))
            elif lie is None:
                yield update
            else:
                yield refusal(update.client, lie)


def test_answers_that_are_wrong_are_named_and_the_state_is_right(federation: Federation, tmp_path: Path) -> None:
    """By real nodes, through Flower; the oracle is one process without those who lied, the huge update shortened."""
    settings = (*federation.settings, "training.rounds=4", "training.quorum=0.3")
    for client in ("1", "2"):
        reported = {str(number): lies[client] for number, lies in LIES.items() if client in lies}
        (federation.folder / f"lies-{client}.json").write_text(json.dumps(reported))
    out, over = tmp_path / "run", ("engine=flower", f"federation={federation.folder}")
    try:
        succeed(federation.ease("train", "--out", out, "--quiet", *assigned((*settings, *over))))
    finally:
        for client in ("1", "2"):
            (federation.folder / f"lies-{client}.json").unlink()
    config = load_config(None, (*settings, "engine=sequential"))
    world = World.open(config)
    sound = Guarded(AsTheyLie(world.federation), config.training)
    expected = fedavg(world.server.initial(), sound, config.training, config.seed, config.model.temperature)
    for number, finished in enumerate(expected, 1):
        record = read_json(out / "rounds" / f"{number:05d}" / "round.json")
        finished.state.save(tmp_path / "state.safetensors")
        assert sha256(tmp_path / "state.safetensors") == record["sha256"]["state.safetensors"]
        wrong = {client: lie for client, lie in LIES[number].items() if lie != "huge"}
        assert record.get("rejected", {}).keys() == wrong.keys()
        for client, lie in wrong.items():
            assert NAMED[lie] in record["rejected"][client]
        assert list(record.get("clipped", ())) == (["1"] if "huge" in LIES[number].values() else [])


def begun(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def await_file(path: Path, process: "subprocess.Popen[Any]") -> None:
    until = time.monotonic() + PATIENCE
    while not path.is_file():
        assert process.poll() is None and time.monotonic() < until, process.poll()
        time.sleep(0.05)


@pytest.mark.parametrize("stranger", ["no key that was admitted", "another authority", "in the clear"])
def test_strangers_stay_out(federation: Federation, tmp_path: Path, stranger: str) -> None:
    key, authority = tmp_path / "key", Authority(federation.folder / "keys")
    make_node_key(key)
    if stranger == "another authority":
        authority = make_authority(tmp_path / "keys", ("localhost", "127.0.0.1"))
        key = federation.folder / "keys" / "node-0"
    known = (None, None) if stranger == "in the clear" else (key, authority.certificate)
    process = start_supernode(tmp_path, 7, tmp_path / "7.sock", f"127.0.0.1:{federation.port}", *known)
    log = tmp_path / "flower" / "node-7.log"
    reasons = {
        "no key that was admitted": ("2004", "305"),
        "another authority": ("CERTIFICATE_VERIFY_FAILED",),
        "in the clear": ("disconnected", "retrying", "failed"),
    }
    try:
        until = time.monotonic() + 40
        while time.monotonic() < until and not any(each in log.read_text() for each in reasons[stranger]):
            time.sleep(0.3)
        assert any(each in log.read_text() for each in reasons[stranger]), log.read_text()
        assert len(Flower(federation.folder).nodes()) <= len(CLIENTS)
    finally:
        stop(process)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_hostile_app_gets_at_nothing(
    federation: Federation, plain: Path, local_job: Callable[..., LocalJob], world: World, tmp_path: Path
) -> None:
    """Whoever reaches Flower's control port can have its nodes run any app. This one runs under the user of Flower, as
    docs/deploy.md has it, and beside it under ours, which shows what that user is good for."""
    photos, home = federation.folder / "photos", federation.folder / "home-of-nobody"
    private_folder(photos)
    (photos / "a.png").write_bytes(b"a photograph")
    (home / "flower").mkdir(parents=True)
    for path in (home, home / "flower"):
        os.chown(path, NOBODY, NOBODY)
    socket_path, process = node_socket(federation.folder, 1), federation.processes["node-1"]
    port, log = read_json(plain / "server.json")["port"], tmp_path / "nobody.log"
    opened = opened_programs(federation.folder / "python")
    with log.open("wb") as file:
        supernode = subprocess.Popen(
            [
                *(f"{federation.folder}/python/bin/flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"),
                *("--port", str(free_port()), "--node-config", f'socket="{socket_path}"'),
            ],
            env={**environment(home), **opened, "HOME": str(home)},
            cwd=home,
            stdout=file,
            stderr=file,
            preexec_fn=become_nobody,
        )
    before = greeted(socket_path)
    try:
        until = time.monotonic() + PATIENCE
        while len(Flower(plain).nodes()) <= len(CLIENTS):
            assert supernode.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        result = tmp_path / "told.json"
        crafted = federation.folder / "crafted"
        job, parts = encode_job(local_job(objective="send_photographs"), world.server.initial())
        ask = Ask(kind="task", client=1, nonce="7" * 32, run="7" * 32, parts=tuple(sorted(parts)))
        crafted.write_bytes(encode(ask, {JOB: job, **parts}))
        kept = socket_path.with_suffix("")
        wanted = {"photo": photos / "a.png", "node": kept, "socket": socket_path, "job": crafted}
        settings = " ".join(f'{name}="{value}"' for name, value in {**wanted, "result": result}.items())
        bundle = shutil.copytree(HOSTILE, tmp_path / "bundle")
        reported = subprocess.run(
            [flower_programs() / "flwr", "run", bundle, CONNECTION, "--run-config", f"{settings} pid={process.pid}"],
            env=environment(plain),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert reported.returncode == 0, reported.stdout + reported.stderr
        await_file(result, supernode)
    finally:
        stop(supernode)
    found = read_json_list(result)
    (harmless,) = [each for each in found if each.get("uid") == NOBODY]
    controls = [each for each in found if each.get("uid") == 0]
    assert harmless["reached"] == [] and len(harmless["refused"]) == 10
    assert controls and all("read a photograph" in each["reached"] for each in controls)
    answers = harmless["answers"]
    assert len(answers) == 9 and all('"refused":"' in each for each in answers.values()), answers
    crafted_answers = [each["answers"]["a well-formed job"] for each in found]  # each sent the same message
    assert sum("'send_photographs' is not known here" in each for each in crafted_answers) == 1
    assert sum("this message came before" in each for each in crafted_answers) == len(found) - 1 > 0
    after = greeted(socket_path)
    assert after.jobs == before.jobs and after.refused >= before.refused + 9
    assert "refused: " in (federation.folder / "node-1.log").read_text()


def read_json_list(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    die_with_parent()


def opened_programs(folder: Path) -> dict[str, str]:
    """Copy Flower's programs to where another user can run them, with Python, which may lie in someone's home; what
    must stand in their environment."""
    python, programs = (flower_programs() / "python3").resolve(), folder / "bin"
    library = next((python.parent.parent / "lib").glob("python3.*"))
    left = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "tkinter", "ensurepip", "config-*")
    shutil.copytree(library, folder / "lib" / library.name, ignore=left)
    for shared in library.parent.glob("libpython*"):
        shutil.copy(shared, folder / "lib")
    programs.mkdir()
    shutil.copy(python, programs / "python3")
    for program in flower_programs().glob("fl*"):
        lines = program.read_text().splitlines()
        (programs / program.name).write_text("\n".join([f"#!{programs / 'python3'}", *lines[1:]]))
        (programs / program.name).chmod(0o755)
    modules = next((flower_programs().parent / "lib").glob("python3.*/site-packages"))
    found = {"PATH": f"{programs}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(folder / "lib")}
    return {**found, "PYTHONPATH": str(modules)}


def greeted(path: Path) -> Present:
    """What the node of client 1 tells of itself."""
    ask = Ask(kind="hello", client=1, nonce="0" * 32, run="0" * 32)
    reported = spoken(path, encode(ask), time.monotonic() + 30)
    assert isinstance(reported, bytes), reported
    return decode_present(reported)


def test_an_admitted_node_cannot_speak_for_another(federation: Federation) -> None:
    """A key is of one client: whatever its node says, its answers count as that client's."""
    line = Flower(federation.folder)
    line._found(set(CLIENTS), None)
    bound = line._identified()
    assert sorted(bound) == list(CLIENTS) and len(set(bound.values())) == 3
    keys = {each["node"]: each["key"] for each in line.nodes()}
    for client in CLIENTS:
        text = (federation.folder / "flower" / f"client-{client}.pub").read_bytes()
        assert keys[bound[client]] == public_key(text, "key").hex()


def test_status_lists_connected_clients(runs: dict[str, Path], federation: Federation) -> None:
    reported = federation.ease("status", federation.folder, "--run", runs["TLS"])
    assert reported.returncode == 0 and "3 nodes are connected" in reported.stdout and "round 2 of 2" in reported.stdout
    assert reported.stdout.count("ready") == 3


def test_nothing_phones_home(federation: Federation, environ_of: Callable[[int], dict[str, str]]) -> None:
    for process in federation.processes.values():
        for pid in descendants(process.pid):
            environment = environ_of(pid)
            if environment.get("FLWR_HOME"):
                assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
                assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1" and environment["UV_OFFLINE"] == "1"


@pytest.fixture
def environ_of() -> Callable[[int], dict[str, str]]:
    """The environment of a running process."""

    def read(pid: int) -> dict[str, str]:
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return {}
        return dict(part.split("=", 1) for part in content.decode(errors="replace").split("\0") if "=" in part)

    return read
