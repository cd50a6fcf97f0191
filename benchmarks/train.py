"""What federated training costs: pairs per second and peak memory, against the number of clients and of pairs.

Run it with `python benchmarks/train.py`, or `--quick` for a look within two minutes. Every row is measured in a
process of its own, so that its peak memory is its own.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLIENTS, PAIRS = (5, 10, 20, 40, 80), (500, 1000, 2000, 4000, 8000)
QUICK_CLIENTS, QUICK_PAIRS = (5, 10, 20), (500, 1000, 2000)
BASE = {"clients": 10, "pairs": 2000}
QUICK_BASE = {"clients": 10, "pairs": 1000}


def measure(pairs: int, clients: int, rounds: int, threads: int) -> dict[str, float]:
    """Train a default model of this size in this process, history included; preparation is timed apart."""
    import torch

    from ease.runs.config import load_config
    from ease.runs.run import Run
    from ease.runs.world import World

    torch.set_num_threads(threads)
    settings = {
        "data.train": pairs,
        "data.validation": 0,
        "data.test": 4,
        "partition.clients": clients,
        "partition.scheme": "iid",
        "training.rounds": rounds + 1,
    }
    config = load_config(None, tuple(f"{key}={value}" for key, value in settings.items()))
    started = time.perf_counter()
    world = World.open(config)
    prepared = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        training = Run.create(Path(folder) / "run", config).train(world)
        next(training)  # the first round loads the data and warms up
        started = time.perf_counter()
        for _ in training:
            pass
        seconds = (time.perf_counter() - started) / rounds
    trained = sum(len(shard.train) for shard in world.shards) * config.training.local_epochs
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "pairs": pairs,
        "clients": clients,
        "prepare_seconds": prepared,
        "round_seconds": seconds,
        "pairs_per_second": trained / seconds,
        "peak_bytes": kilobytes * (1 if sys.platform == "darwin" else 1024),
    }


def in_own_process(*arguments: int) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def exponent(rows: Sequence[dict[str, float]], size: str) -> float:
    """The slope of log seconds over log size: 1 means that twice the size takes twice the time."""
    x = [math.log(row[size]) for row in rows]
    y = [math.log(row["round_seconds"]) for row in rows]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - centre_x) ** 2 for a in x)


def machine(threads: int) -> dict[str, Any]:
    import numpy
    import torch

    from ease.console import megabytes

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": threads,
        "cores": os.cpu_count(),
        "memory": megabytes(memory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
    }


def show(title: str, rows: Sequence[dict[str, float]], caption: str) -> None:
    from ease.console import megabytes, screen, table

    cells = [
        [
            f"{row['clients']:.0f} clients, {row['pairs']:.0f} pairs",
            f"{row['pairs_per_second']:.0f}",
            f"{row['round_seconds']:.2f}",
            megabytes(row["peak_bytes"]),
            f"{row['prepare_seconds']:.1f}",
        ]
        for row in rows
    ]
    screen.print(table(title, ["", "pairs/s", "s per round", "peak memory", "s to prepare"], cells, caption))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes, under two minutes")
    parser.add_argument("--rounds", type=int, help="rounds to average over (default 5, quick 2)")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    clients, pairs, base = (QUICK_CLIENTS, QUICK_PAIRS, QUICK_BASE) if options.quick else (CLIENTS, PAIRS, BASE)
    rounds = options.rounds or (2 if options.quick else 5)

    with tempfile.TemporaryDirectory(prefix="ease-bench-") as cache:
        os.environ["EASE_CACHE"] = cache
        # Preparation is paid once for each number of pairs, so those rows come first and show it.
        by_pairs = [in_own_process(count, base["clients"], rounds, options.threads) for count in pairs]
        by_clients = [in_own_process(base["pairs"], count, rounds, options.threads) for count in clients]
    result = {
        "machine": machine(options.threads),
        "rounds": rounds,
        "by_pairs": by_pairs,
        "by_clients": by_clients,
        "exponent_pairs": exponent(by_pairs, "pairs"),
        "exponent_clients": exponent(by_clients, "clients"),
    }
    if options.json:
        print(json.dumps(result, allow_nan=False))
        return
    print("  ".join(f"{name} {value}" for name, value in result["machine"].items()))
    show("Against the number of pairs", by_pairs, f"seconds ~ pairs^{result['exponent_pairs']:.2f}")
    show("Against the number of clients", by_clients, f"seconds ~ clients^{result['exponent_clients']:.2f}")


if __name__ == "__main__":
    main()
