"""Measures a round in one process, over sockets and over Flower, and the bytes that cross beside those accounted for.

python benchmarks/engines.py --nodes 3 --engines sequential nodes cold flower
python benchmarks/engines.py --nodes 3 --engines flower --hidden 1024      # states of megabytes, for the bytes

Every engine trains the same small run; the hashes of all rounds must agree. `cold` is `nodes` without the warm worker:
for every message a client starts a process that imports torch and opens backbone and data. Over Flower all bytes
between its server and its nodes go through a counting relay, Flower's own messages and polling included; what it polls
while nothing happens is measured beside it.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ease.federation.fedavg import fedavg
from ease.federation.flower import Flower
from ease.federation.launch import FlowerServer, die_with_parent, free_port, start_supernode, stop
from ease.federation.middleware import Guarded
from ease.federation.remote import Remote, node_socket
from ease.runs.answers import open_world
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World

EASE = [sys.executable, "-c", "from ease.cli import main; main()"]
IDLE_SECONDS = 15.0
COLD = (
    "import sys; from pathlib import Path; from ease.commands.federation import make_node; "
    "from ease.runs.config import load_config; "
    "node = make_node(load_config(None, tuple(sys.argv[3:])), int(sys.argv[1]), Path(sys.argv[2]), quiet=True); "
    "sys.stdout.buffer.write(node.answer(sys.stdin.buffer.read()))"
)


@dataclass(frozen=True)
class Cold:
    """A line without warm workers: a process for each message."""

    folder: Path
    changes: tuple[str, ...]

    def exchange(self, messages: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        def answered(client: int, message: bytes) -> tuple[int, bytes]:
            command = [sys.executable, "-c", COLD, str(client), str(self.folder / str(client)), *self.changes]
            return client, subprocess.run(command, input=message, stdout=subprocess.PIPE, check=True).stdout

        with ThreadPoolExecutor(len(messages)) as pool:
            for done in as_completed([pool.submit(answered, *each) for each in messages.items()]):
                yield done.result()


@dataclass
class Relay:
    """Passes bytes on to a port of this machine, and counts them."""

    port: int
    own: int = field(default_factory=free_port)
    up: int = 0
    """From nodes to the server."""
    down: int = 0

    def __enter__(self) -> "Relay":
        self.line = socket.create_server(("127.0.0.1", self.own))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.line.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                threading.Thread(target=self._pass, args=(near, far, "up"), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, "down"), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 18):
                setattr(self, way, getattr(self, way) + len(data))
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def counted(self) -> tuple[int, int]:
        return self.down, self.up


def settings(nodes: int, rounds: int, hidden: int) -> tuple[str, ...]:
    small = (
        "data.train=240",
        "data.validation=0",
        "data.test=20",
        "gallery=20",
        f"model.hidden={hidden}",
        "model.embedding=32",
    )
    dealt = (f"partition.clients={nodes}", "partition.classes=3", "partition.scheme=iid")
    return (*small, *dealt, f"training.rounds={rounds}", "training.local_epochs=1", "training.batch_size=8")


def assigned(changes: tuple[str, ...]) -> list[str]:
    return [part for each in changes for part in ("--set", each)]


@contextmanager
def nodes_up(folder: Path, changes: tuple[str, ...]) -> Iterator[None]:
    """Nodes of a federation on this machine."""
    log = folder / "up.log"
    with log.open("wb") as file:
        command = [*EASE, "up", "--sockets", "--folder", str(folder / "fed"), *assigned(changes)]
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=die_with_parent)
    try:
        while "nodes are up" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.5)
        yield
    finally:
        stop(process)


@contextmanager
def flower_up(folder: Path, nodes: int) -> Iterator[Relay]:
    """Flower's server and nodes, in the clear, with the relay between."""
    with ExitStack() as ending:
        server = ending.enter_context(FlowerServer(folder, "127.0.0.1", free_port(), insecure=True))
        relay = ending.enter_context(Relay(server.port))
        for client in range(nodes):
            where = f"127.0.0.1:{relay.own}"
            ending.callback(stop, start_supernode(folder, client, node_socket(folder, client), where, None, None))
        while len(Flower(folder).nodes()) < nodes:
            time.sleep(0.5)
        yield relay


def measured(
    folder: Path, engine: str, changes: tuple[str, ...], world: World, run: Run, relay: Relay | None
) -> dict[str, object]:
    """Seconds of each round, and bytes: those on the line, those that are accounted for, those of the network."""
    idle = (0.0, 0.0)
    if relay is not None:
        before = relay.counted()
        time.sleep(IDLE_SECONDS)
        idle = tuple((now - then) / IDLE_SECONDS for now, then in zip(relay.counted(), before, strict=True))  # type: ignore[assignment]
    metered, config = Guarded(world.federation, run.config.training, metered=True), run.config
    seconds, states, began = [], [], time.perf_counter()
    start, before = began, (0, 0) if relay is None else relay.counted()
    used = processor_seconds()
    for finished in fedavg(world.server.initial(), metered, config.training, config.seed, config.model.temperature):
        seconds.append(time.perf_counter() - began)
        finished.state.save(folder / "state.safetensors")
        states.append((folder / "state.safetensors").read_bytes())
        began = time.perf_counter()
    remote = world.federation
    reported: dict[str, object] = {
        "engine": engine,
        "first_round_seconds": round(seconds[0], 2),
        "later_round_seconds": round(statistics.median(seconds[1:]), 3),
        "own_processor_seconds_a_round": round((processor_seconds() - used) / len(seconds), 3),
        "state_bytes": len(states[0]),
        "accounted_bytes": (metered.cost.bytes_down, metered.cost.bytes_up),
        "line_bytes": (remote.sent, remote.received) if isinstance(remote, Remote) else (0, 0),
    }
    if relay is not None:
        crossed = [now - then for now, then in zip(relay.counted(), before, strict=True)]
        polled = [round(each * (time.perf_counter() - start)) for each in idle]
        reported |= {"network_bytes": crossed, "of_which_polling": polled}
    return {**reported, "states": states}


def processor_seconds() -> float:
    """Of this process and of those it started and that have ended."""
    return sum(
        resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def one(engine: str, folder: Path, nodes: int, changes: tuple[str, ...]) -> dict[str, object]:
    with ExitStack() as ending:
        relay = None
        if engine in ("nodes", "flower"):
            ending.enter_context(nodes_up(folder, changes))
        if engine == "flower":
            relay = ending.enter_context(flower_up(folder / "fed", nodes))
        kind = "nodes" if engine == "cold" else engine
        config = load_config(None, (*changes, f"engine={kind}", f"federation={folder / 'fed'}"))
        run = Run.create(folder / engine, config)
        world = run.hosted(open_world(run))
        if engine == "cold":
            world.federation.line = Cold(folder, changes)  # type: ignore[attr-defined]
        return measured(folder, engine, changes, world, run, relay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=64, help="width of the projectors: larger states")
    parser.add_argument("--engines", nargs="+", default=["sequential", "nodes", "cold", "flower"])
    options = parser.parse_args()
    changes, states = settings(options.nodes, options.rounds, options.hidden), None
    with tempfile.TemporaryDirectory(prefix="ease-", dir="/tmp") as name:
        os.environ.setdefault("EASE_CACHE", f"{name}/cache")
        for engine in options.engines:
            folder = Path(name) / f"for-{engine}"
            folder.mkdir()
            found = one(engine, folder, options.nodes, changes)
            same, states = states is None or states == found["states"], states or found["states"]
            reported = {key: value for key, value in found.items() if key != "states"}
            load = round(os.getloadavg()[0], 1)
            print(json.dumps({"nodes": options.nodes, **reported, "same_states": same, "load": load}), flush=True)


if __name__ == "__main__":
    main()
