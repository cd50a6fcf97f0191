"""Shadow models per minute: all in one pass against one after the other, in the same run and to the same result.

python benchmarks/shadows.py [--device cuda] [--shadows 16] [--out results.json]
"""

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ease.audit.shadows import shadow_shards, train_federations
from ease.audit.subjects import Subjects
from ease.federation.client import ClientData
from ease.federation.fedavg import average
from ease.federation.local import train
from ease.requests.request import ClientRequest
from ease.runs.config import load_config
from ease.runs.world import World

MODELS = {"projectors": ('model.lora="off"', "model.hidden=128"), "adapters": ()}


def measure(world: World, shadows: int, repeats: int) -> dict[str, float]:
    """Seconds of one federated round of all shadows, both ways, interleaved; best of `repeats`."""
    request = ClientRequest(clients=(world.shards[3].client,))
    subjects = Subjects.of(world, request, 512)
    federations = [
        shadow_shards(world.shards, request, subjects.candidates, subjects.candidates.included(n, 0))
        for n in range(shadows)
    ]
    streams = [f"shadow-{n}" for n in range(shadows)]
    training = world.config.training.model_copy(update={"rounds": 1})
    start = world.server.initial()
    clients = [
        [ClientData.of(shard, world.evaluator.activations, world.server.device) for shard in shards]
        for shards in federations
    ]

    def wait() -> float:
        if world.server.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times: dict[str, list[float]] = {"together": [], "sequential": []}
    for _ in range(repeats):
        began = wait()
        together = next(
            iter(
                train_federations(
                    world.server.model,
                    world.evaluator.activations,
                    world.server.device,
                    federations,
                    streams,
                    start,
                    training,
                    0,
                    0.07,
                )
            )
        )
        times["together"].append(wait() - began)
        began = wait()
        loop = []
        for stream, held in zip(streams, clients, strict=True):
            job = training.job(1, 0, 0.07, stream)
            updates = [train(world.server.model, start.to(world.server.device), one, job) for one in held]
            sent = [replace(update, delta=update.delta and update.delta.to("cpu")) for update in updates]
            loop.append(average(start, sent, training, 1))
        times["sequential"].append(wait() - began)
    difference = max(
        float((a.state[name] - b.state[name]).abs().max())
        for a, b in zip(together, loop, strict=True)
        for name in start.tensors
    )
    assert difference < 1e-3, f"the two ways differ by {difference}"
    rounds = world.config.training.rounds
    best = {name: min(values) for name, values in times.items()}
    return {
        "shadows_per_minute_together": 60 * shadows / (best["together"] * rounds),
        "shadows_per_minute_loop": 60 * shadows / (best["sequential"] * rounds),
        "ratio": best["sequential"] / best["together"],
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shadows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {"device": args.device, "torch": torch.__version__, "threads": torch.get_num_threads()}
    results |= {"machine": platform.processor() or platform.machine(), "shadows": args.shadows, "numpy": np.__version__}
    for name, settings in MODELS.items():
        world = World.open(load_config(None, (f'device="{args.device}"', *settings)))
        results[name] = measure(world, args.shadows, args.repeats)
        print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
