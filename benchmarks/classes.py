"""Pseudo-classes found without bringing pairs together, against k-means over all of them and against its own chance.

python benchmarks/classes.py [CONFIG.toml] [--set data.path=...] [--seeds 3]

Simulated clients are dealt by pooled classes; each then clusters its own pairs. Agreement is the adjusted Rand index
with pooled k-means (1: the same classes); `pooled, other seed` is how well pooled k-means agrees with itself. Inertia
is the sum of squared distances to the centres, as a multiple of that of pooled k-means.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.metrics import adjusted_rand_score

from ease.data.classes import SMALLEST_GROUP, federated_classes, pseudo_classes
from ease.data.partition import joint_embedding, partition
from ease.runs.config import RunConfig, load_config
from ease.runs.world import World


class Result(NamedTuple):
    agreement: float
    inertia: float
    steps: int = 0
    bytes_up: int = 0
    """Of one client."""
    bytes_down: int = 0
    seconds: float = 0.0


def measure(config: RunConfig, seeds: int) -> dict[str, list[Result]]:
    """Each way of clustering the training pairs of a configuration, once for each seed."""
    world = World.open(config)
    pool, settings = world.evaluator.pairs.indices("train"), config.partition
    image, text = world.evaluator.activations.pooled_image[pool], world.evaluator.activations.pooled_text[pool]
    joint = joint_embedding(image, text)

    def inertia(labels: np.ndarray, centres: np.ndarray) -> float:
        return float(((joint - centres[labels]) ** 2).sum())

    results: dict[str, list[Result]] = {}
    for seed in range(seeds):
        pooled, centres = pseudo_classes(image, text, settings.classes, seed)
        best = inertia(pooled, centres)
        other, other_centres = pseudo_classes(image, text, settings.classes, seeds + seed)
        chance = Result(adjusted_rand_score(pooled, other), inertia(other, other_centres) / best)
        results.setdefault("pooled, other seed", []).append(chance)
        dealt = partition("dirichlet", pooled, settings.clients, settings.beta, seed)
        for smallest in (1, SMALLEST_GROUP):
            began = time.perf_counter()
            found = federated_classes([joint[own] for own in dealt], settings.classes, seed, smallest)
            seconds = time.perf_counter() - began
            labels = np.empty(len(pool), np.int64)
            labels[np.concatenate(dealt)] = np.concatenate(found.labels)
            result = Result(
                agreement=adjusted_rand_score(pooled, labels),
                inertia=inertia(labels, found.centres) / best,
                steps=found.steps,
                bytes_up=found.bytes_up // len(dealt),
                bytes_down=found.bytes_down // len(dealt),
                seconds=seconds,
            )
            results.setdefault(f"federated, groups of {smallest} or more", []).append(result)
    pairs = f"{len(pool)} pairs, {settings.clients} clients, beta {settings.beta}, {settings.classes} classes"
    print(f"{config.data.name}: {pairs}, width {joint.shape[1]} ({joint.nbytes / 1e6:.1f} MB of embeddings)")
    return results


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, and the least and the most."""
    least, most = min(values), max(values)
    return f"{statistics.mean(values):.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    table = measure(load_config(given.config, tuple(given.assignments)), given.seeds)
    print("\n| classes | agreement with pooled | inertia | steps | a client sends | a client receives | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in table.items():
        print(
            f"| {name} | {spread([run.agreement for run in runs], 2)} | {spread([run.inertia for run in runs], 4)} "
            + (
                f"| {spread([run.steps for run in runs], 0)} "
                f"| {statistics.mean(run.bytes_up for run in runs) / 1e6:.2f} MB "
                f"| {statistics.mean(run.bytes_down for run in runs) / 1e6:.2f} MB "
                f"| {statistics.mean(run.seconds for run in runs):.1f} |"
                if runs[0].steps
                else "| | | | |"
            )
        )
