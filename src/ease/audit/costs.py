"""Costs relative to retraining: traffic, steps, time and operations."""

from collections.abc import Mapping

import numpy as np
from torch.utils.flop_counter import FlopCounterMode

from ease.audit.records import Price
from ease.data.examples import examples_at
from ease.federation.objectives import embed_states
from ease.model.losses import info_nce
from ease.runs.world import World


def prices(answer: Mapping[str, float], retrain: Mapping[str, float], flops_per_pair: float) -> dict[str, Price]:
    """All total costs of a result and of retraining, and their floating-point operations."""
    totals = [key for key in sorted(answer) if key.startswith("cost/") and "seconds/" not in key]
    found = {key.removeprefix("cost/"): Price.of(answer[key], retrain.get(key, 0.0)) for key in totals}
    passed = [of.get("cost/pairs_passed", of["cost/pairs_trained"]) * flops_per_pair for of in (answer, retrain)]
    return found | {"flops": Price.of(*passed)}


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Phase -> seconds."""
    return {key.removeprefix("cost/seconds/"): value for key, value in metrics.items() if "seconds/" in key}


def training_flops(world: World) -> float:
    """Floating-point operations per pair of a training step, forward and backward, counted by torch."""
    training, seen = world.config.training, world.evaluator
    examples = examples_at(seen.activations, seen.test[: training.batch_size], seen.device)
    positions = np.arange(len(examples))
    job = training.job(0, world.config.seed, world.config.model.temperature)
    tensors = {
        name: tensor.to(world.server.device).requires_grad_() for name, tensor in world.server.initial().tensors.items()
    }
    states = examples.batch(positions, np.zeros_like(positions))
    with FlopCounterMode(display=False) as counter:
        info_nce(*embed_states(world.server.model, tensors, states), job.temperature).backward()
    return float(counter.get_total_flops()) / len(positions)
