"""Many registered clients and a long history: seconds and memory of a round, and how soon a client can be forgotten.

python benchmarks/scale.py [--clients 10000] [--rounds 1000] [--write]

Fifty clients are drawn for each round, whose answers are checked, metered, averaged and written to disk as in a run,
waiting for the disk. `--write` draws docs/figures/scale.svg and writes the section `scale` of docs/benchmarks.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from marked import write_section
from matplotlib.figure import Figure
from synthetic import Setting

from ease.federation.engines import make_engine
from ease.federation.fedavg import fedavg
from ease.federation.history import History
from ease.federation.meter import Metered
from ease.federation.middleware import Guarded
from ease.federation.protocol import Federation
from ease.methods.base import Trained
from ease.methods.ease.contribution import contribution_of
from ease.requests.request import ClientRequest
from ease.show.figures import FIXED, INK, STYLE, encode
from ease.storage import write_atomic

DRAWN, PAIRS = 50, 8
"""Clients of a round, and pairs that a client holds on average."""
LOOKS = (100, 300, 1000)
"""Rounds after which a client request begins."""


def setting_of(clients: int, rounds: int) -> Setting:
    small = {"image": 64, "text": 64, "hidden": 32, "embedding": 32}
    share = {"clients": clients, "pairs": PAIRS * clients, "participation": min(1.0, DRAWN / clients)}
    return Setting(**small, **share, rounds=rounds, epochs=1, batch=8)


def request_seconds(history: History, setting: Setting, federation: Federation, rounds: int) -> dict[str, float]:
    """Seconds to sum the contribution of a client that took part as often as usual; best of three."""
    parts = [history.clients(number) for number in range(1, rounds + 1)]
    often = np.bincount([client for clients in parts for client in clients], minlength=setting.clients)
    usual = int(np.argmin(np.abs(often - max(1, round(rounds * DRAWN / setting.clients)))))
    trained = Trained(history, setting.training.model_copy(update={"rounds": rounds}), setting.temperature, 0)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        contribution_of(trained, ClientRequest(clients=(usual,)), federation)
        seconds.append(time.process_time() - began)
    return {"rounds": rounds, "took_part": int(often[usual]), "first": seconds[0], "best": min(seconds)}


def measure(clients: int, rounds: int) -> dict[str, Any]:
    """Processor seconds and resident bytes of every round, and seconds of requests along the way."""
    setting = setting_of(clients, rounds)
    began = time.perf_counter()
    world = setting.world()
    engine = make_engine("sequential", world.model, world.shards, world.activations, torch.device("cpu"))
    prepared = time.perf_counter() - began
    found: dict[str, Any] = {"clients": clients, "prepared": prepared, "seconds": [], "bytes": [], "requests": []}
    with tempfile.TemporaryDirectory(prefix="ease-scale-") as folder:
        history = History(Path(folder))
        start = world.model.initial()
        start.save(history.initial_path)
        sound = Guarded(engine, setting.training)
        rest = fedavg(start, Metered(sound), setting.training, setting.seed, setting.temperature)
        began = time.process_time()
        for finished in rest:
            history.append(replace(finished, rejected=sound.left_out()))
            found["seconds"].append(time.process_time() - began)
            found["bytes"].append(resident())
            if finished.number in LOOKS:
                found["requests"].append(request_seconds(history, setting, engine, finished.number))
            began = time.process_time()
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
        found["disk"] = sum(sizes)
    return found


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(values: list[float]) -> float:
    """Growth over the second half of the rounds, as a share of the median: the first ones warm up."""
    late = np.array(values[len(values) // 2 :])
    line = np.polyfit(np.arange(len(late)), late, 1)[0]
    return float(line * len(late) / np.median(late))


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Seconds and memory over rounds, a line for each number of registered clients."""
    colours = {
        run["clients"]: colour for run, colour in zip(runs, (FIXED["EASE"], INK, FIXED["Trained"]), strict=False)
    }
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(8.4, 3.2), layout="constrained")
        times, memory = drawn.subplots(1, 2)
        for run in runs:
            rounds = np.arange(1, len(run["seconds"]) + 1)
            width = max(1, len(rounds) // 50)
            middle = [statistics.median(run["seconds"][max(0, n - width) : n + width]) for n in range(len(rounds))]
            name, colour = f"{run['clients']:,} clients", colours[run["clients"]]
            times.plot(rounds, middle, color=colour, label=name)
            memory.plot(rounds, np.array(run["bytes"]) / 2**20, color=colour, label=name)
        times.set(
            xlabel="round",
            ylabel="processor seconds of a round",
            ylim=(0, None),
            title=f"{DRAWN} clients drawn each round",
        )
        memory.set(xlabel="round", ylabel="MiB resident", ylim=(0, None), title="memory")
        times.legend(loc="lower right")
    return drawn


def section(runs: list[dict[str, Any]]) -> str:
    """The part of docs/benchmarks.md."""
    head = ["registered clients", "rounds", "s a round", "growth", "MiB", "growth", "GB on disk", "s to prepare"]
    lines = [
        f"{DRAWN} clients drawn each round, {PAIRS} pairs each, projectors 64-32-32, loop engine, one thread, every "
        "file synced to disk (`python benchmarks/scale.py --write`). Seconds are those of the processor, so that "
        "the disk and what else the machine does do not count. Growth: that of a straight line over the second "
        "half of the rounds, as a share of the median.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for run in runs:
        late = slice(len(run["seconds"]) // 2, None)
        cells = [
            f"{run['clients']:,}",
            f"{len(run['seconds']):,}",
            f"{statistics.median(run['seconds'][late]):.3f}",
            f"{100 * slope(run['seconds']):+.0f} %",
            f"{statistics.median(run['bytes'][late]) / 2**20:.0f}",
            f"{100 * slope(run['bytes']):+.1f} %",
            f"{run['disk'] / 1e9:.2f}",
            f"{run['prepared']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Seconds to sum the contribution of a leaving client from the history, for a client that took part as "
        "often as usual. The record of every round is read (who took part); states and updates "
        "only of rounds it was in.",
        "",
        "| registered clients | rounds | took part in | s, first time | s, best of 3 |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        for each in run["requests"]:
            seconds = f"{each['first']:.2f} | {each['best']:.2f}"
            lines.append(f"| {run['clients']:,} | {each['rounds']:,} | {each['took_part']} | {seconds} |")
    lines += ["", "![seconds and memory of every round](figures/scale.svg)"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 10000])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument(
        "--results", type=Path, help="keep the measurements as JSON, and draw from those that are there"
    )
    parser.add_argument("--write", action="store_true", help="draw the figure and write the tables")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    known = json.loads(options.results.read_text()) if options.results and options.results.is_file() else []
    runs = {run["clients"]: run for run in known}
    for clients in options.clients:
        if clients not in runs:
            runs[clients] = measure(clients, options.rounds)
            if options.results:
                options.results.write_text(json.dumps(list(runs.values())))
    reported = section(list(runs.values()))
    print(reported)
    if options.write:
        docs = Path(__file__).parent.parent / "docs"
        write_atomic(docs / "figures/scale.svg", encode(figure(list(runs.values())), "svg"))
        write_section(docs / "benchmarks.md", "scale", reported)


if __name__ == "__main__":
    main()
