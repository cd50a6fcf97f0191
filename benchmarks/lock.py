"""What the Forget Lock costs: on the client as a share of a training step, on the server as a share of a round.

Run it with `python benchmarks/lock.py`, or `--quick` for a shorter training before. The directions are those
that `ease_paper` finds for a client request on the default model: generated scenes, tiny backbone, LoRA, projectors.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

REPEATS = 12
"""Times each figure is measured, the ways to be compared taking turns, so that a busy machine slows all of them."""


def in_turns(ways: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each way, turn by turn."""
    for way in ways:
        way()  # the first time loads and warms up
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, taken in zip(ways, seconds, strict=True):
            started = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started)
    return seconds


def measure(folder: Path, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Train the default model, decompose a client request, and time the lock on both sides."""
    from ease.federation.local import train
    from ease.federation.lock import Lock, pack_directions
    from ease.methods.ease_paper import EasePaper
    from ease.requests.request import ClientRequest
    from ease.runs.answers import trained_of
    from ease.runs.config import load_config
    from ease.runs.run import Run
    from ease.runs.world import World
    from ease.subspace import excise

    config = load_config(None, (f"training.rounds={rounds}",))
    world = World.open(config)
    run = Run.create(folder / "run", config)
    list(run.train(world))
    trained = trained_of(run)
    request = ClientRequest(clients=(0,))
    client = world.federation.data[max(world.federation.data, key=lambda c: len(world.federation.data[c].train))]
    plain = config.training.job(1, 0, trained.temperature, request=request, data="retain", epochs=1)
    steps = max(1, round(len(client.train) / plain.batch_size))
    rows = []
    for delta in (0.3, 1.0):
        *_, last = EasePaper(delta=delta).unlearn(trained, request, world.federation)
        assert last.bases is not None
        bases = last.bases
        lock = Lock(0.1, last.state, pack_directions(bases))
        locked = replace(plain, lock=lock)
        turns = in_turns(
            [
                partial(train, world.server.model, last.state, client, plain),
                partial(train, world.server.model, last.state, client, locked),
                partial(excise, trained.final, last.state, bases),
            ],
            repeats,
        )
        free, held, contraction = map(statistics.median, turns)
        pairs = sum(len(shard.train) for shard in world.shards if shard.client not in request.clients)
        a_round = free / len(client.train) * pairs * config.training.local_epochs
        rows.append(
            {
                "delta": delta,
                "directions": sum(basis.count for basis in bases.values()),
                "step_ms": 1000 * free / steps,
                "locked_step_ms": 1000 * held / steps,
                "client_share": statistics.median(b / a for a, b in zip(*turns[:2], strict=True)) - 1,
                "contraction_ms": 1000 * contraction,
                "server_share": contraction / a_round,
                "lock_bytes": sum(t.numel() * t.element_size() for t in lock.packed.values()),
                "model_bytes": trained.final.bytes,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 training rounds instead of 20: fewer directions")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"measurements of each figure (default {REPEATS})")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()

    import torch

    from ease.console import megabytes, screen, table

    torch.set_num_threads(options.threads)
    rounds = 4 if options.quick else 20
    with tempfile.TemporaryDirectory(prefix="ease-bench-") as folder:
        rows = measure(Path(folder), rounds, options.repeats)
    if options.json:
        print(json.dumps({"rounds": rounds, "threads": options.threads, "rows": rows}, allow_nan=False))
        return
    cells = [
        [
            f"delta {row['delta']}",
            str(row["directions"]),
            f"{row['step_ms']:.1f}",
            f"{row['locked_step_ms']:.1f}",
            f"{100 * row['client_share']:+.1f} %",
            f"{row['contraction_ms']:.1f}",
            f"{100 * row['server_share']:.2f} %",
            megabytes(row["lock_bytes"]),
        ]
        for row in rows
    ]
    heads = ["", "directions", "step ms", "locked ms", "share", "server ms", "of round", "sent"]
    caption = f"{rounds} rounds, {options.threads} threads; the model itself has {megabytes(rows[0]['model_bytes'])}"
    screen.print(table("The Forget Lock: client side per step, server side per round", heads, cells, caption))


if __name__ == "__main__":
    main()
