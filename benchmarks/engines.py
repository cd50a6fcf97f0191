"""Measures a round in one process, over sockets and over Flower, and the bytes that cross beside those accounted for.

python benchmarks/engines.py --nodes 3 --engines loop nodes flower

Every engine trains the same small run; the hashes of all rounds must agree. `cold` is what a client would pay for every
message without a warm worker: a new process that imports torch and opens backbone and data.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ease.federation.checked import checked
from ease.federation.fedavg import fedavg
from ease.federation.launch import die_with_parent, stop
from ease.federation.metered import Metered
from ease.federation.remote import Remote
from ease.runs.answers import open_world
from ease.runs.config import load_config
from ease.runs.run import Run

EASE = [sys.executable, "-c", "from ease.cli import main; main()"]


def settings(nodes: int, rounds: int) -> tuple[str, ...]:
    small = (
        "data.train=240",
        "data.validation=0",
        "data.test=20",
        "gallery=20",
        "model.hidden=64",
        "model.embedding=32",
    )
    dealt = (f"partition.clients={nodes}", "partition.classes=3", "partition.scheme=iid")
    return (*small, *dealt, f"training.rounds={rounds}", "training.local_epochs=1", "training.batch_size=8")


def assigned(changes: tuple[str, ...]) -> list[str]:
    return [part for each in changes for part in ("--set", each)]


def started(folder: Path, engine: str, changes: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    """A federation on this machine; it is up when this returns."""
    log = folder / "up.log"
    how = ("--sockets",) if engine == "nodes" else ()
    with log.open("wb") as file:
        command = [*EASE, "up", "--folder", str(folder / "fed"), *how, *assigned(changes)]
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=die_with_parent)
    while "nodes are up" not in log.read_text():
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.5)
    return process


def measured(folder: Path, engine: str, changes: tuple[str, ...]) -> dict[str, object]:
    """Seconds of each round, and bytes: those on the line, and those that are accounted for."""
    run = Run.create(folder / engine, load_config(None, (*changes, f"engine={engine}", f"federation={folder / 'fed'}")))
    world = run.hosted(open_world(run))
    metered, config = Metered(checked(world.federation, run.config.training)), run.config
    seconds, hashes, began = [], [], time.perf_counter()
    for finished in fedavg(world.server.initial(), metered, config.training, config.seed, config.model.temperature):
        seconds.append(time.perf_counter() - began)
        finished.state.save(folder / "state.safetensors")
        hashes.append((folder / "state.safetensors").read_bytes())
        began = time.perf_counter()
    remote = world.federation
    line = (remote.sent, remote.received) if isinstance(remote, Remote) else (0, 0)
    return {
        "engine": engine,
        "first_round_seconds": round(seconds[0], 2),
        "later_round_seconds": round(statistics.median(seconds[1:]), 3),
        "line_bytes": line,
        "accounted_bytes": (metered.cost.bytes_down, metered.cost.bytes_up),
        "states": hashes,
    }


def cold(changes: tuple[str, ...]) -> float:
    """Seconds until a new process has what a node needs."""
    code = (
        "import sys; from pathlib import Path; from ease.commands.federation import make_node; "
        "from ease.runs.config import load_config; make_node(load_config(None, tuple(sys.argv[1:])), 0, Path('.'))"
    )
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *changes], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--engines", nargs="+", default=["loop", "nodes", "flower"])
    options = parser.parse_args()
    changes, states = settings(options.nodes, options.rounds), None
    with tempfile.TemporaryDirectory(prefix="ease-", dir="/tmp") as name:
        os.environ.setdefault("EASE_CACHE", f"{name}/cache")
        for engine in options.engines:
            folder = Path(name) / f"for-{engine}"
            folder.mkdir()
            process = None if engine in ("loop", "cohort") else started(folder, engine, changes)
            try:
                found = measured(folder, engine, changes)
            finally:
                if process is not None:
                    stop(process)
            same, states = states is None or states == found["states"], states or found["states"]
            told = {key: value for key, value in found.items() if key != "states"}
            print(json.dumps({"nodes": options.nodes, **told, "same_states": same}), flush=True)
        print(json.dumps({"cold_seconds": round(cold(changes), 2)}))


if __name__ == "__main__":
    main()
