"""Levels without a retrained model: how strongly unseen pairs are held, what each forget pair should fall to, and
whether the gap between forget and held-out pairs has closed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ease.data.density import fit_ridge
from ease.errors import UserError
from ease.federation.protocol import Federation
from ease.methods.base import Trained, forget_holders
from ease.methods.ease.levels import LEVELS
from ease.params import Params
from ease.requests.request import Request
from ease.seeding import generator

Levels = Mapping[int, Mapping[str, Tensor]]
"""Client -> what it measured: log-odds [pairs, draws] and densities of its forget and held-out pairs."""


@dataclass(frozen=True)
class Gap:
    """Mean log-odds of forget pairs minus those of held-out pairs of the same clients; 0 means not told apart."""

    gap: float
    standard_error: float
    forget_pairs: int
    held_out_pairs: int


def measure_levels(trained: Trained, state: Params, request: Request, federation: Federation, label: str) -> Levels:
    """Ask the holders of forget pairs for their levels under a state, which travels in half precision."""
    job = trained.training.job(
        0, trained.seed, trained.temperature, f"levels-{label}", request=request, objective=LEVELS
    )
    answers = federation.run(state.map(torch.Tensor.half), job, forget_holders(request, federation))
    return {answer.client: answer.values for answer in sorted(answers, key=lambda answer: answer.client)}


def membership_gap(levels: Levels) -> Gap | None:
    """The gap over all clients, or None when there are too few pairs on either side to speak of one."""
    forget = torch.cat([values["forget"] for values in levels.values()]).double().mean(1)
    held_out = torch.cat([values["kin"] for values in levels.values()]).double().mean(1)
    if len(forget) < 2 or len(held_out) < 2:
        return None
    error = (forget.var() / len(forget) + held_out.var() / len(held_out)).sqrt()
    return Gap(float(forget.mean() - held_out.mean()), float(error), len(forget), len(held_out))


def level_targets(levels: Levels) -> dict[int, Tensor]:
    """The same target for every forget pair: the mean level of held-out pairs."""
    mean = _held_out(levels).mean()
    return {client: mean.expand(len(values["forget"])).clone() for client, values in levels.items()}


def density_targets(levels: Levels, seed: int) -> dict[int, Tensor]:
    """A target for each forget pair: the level its neighbourhood predicts once the forget pairs are gone.

    Predictions alone would be too even: unseen pairs scatter around them, some far below. Each target therefore adds
    a residual drawn from the held-out pairs, so that the whole distribution is met and not only its mean.
    """
    held_out = _held_out(levels).double()
    features = torch.cat([values["held_out_density"] for values in levels.values()])
    ridge = fit_ridge(features, held_out.mean(1))
    residuals = shrink_noise(held_out - ridge.predict(features)[:, None])
    rng = generator(seed, "targets")
    targets = {}
    for client, values in levels.items():
        drawn = residuals[torch.from_numpy(rng.integers(len(residuals), size=len(values["forget"])))]
        targets[client] = (ridge.predict(values["forget_density"]) + drawn).float()
    return targets


def _held_out(levels: Levels) -> Tensor:
    """Levels of all clients' held-out pairs [pairs, draws]."""
    held_out = torch.cat([values["held_out"] for values in levels.values()])
    if len(held_out) < 2:
        raise UserError(
            f"the clients have {len(held_out)} held-out pairs to tell the level of unseen ones from: train with "
            "partition.validation_share above 0, or forget without the push (--set displacement=0)"
        )
    return held_out


def shrink_noise(residuals: Tensor) -> Tensor:
    """Mean residual of each pair, scaled to the spread that repeated draws agree on [pairs, draws] -> [pairs]."""
    mean = residuals.mean(1)
    repeatable = (residuals[:, 0] - residuals[:, 0].mean()) * (residuals[:, 1] - residuals[:, 1].mean())
    share = repeatable.mean().clamp_min(0) / mean.var().clamp_min(1e-12)
    return mean * share.clamp_max(1).sqrt()


def choose_depth(before: Gap, after: Gap) -> float:
    """How far to excise, 0 to 1, so that forget pairs do not fall significantly below held-out ones.

    The gap moves nearly in proportion to the depth, so two measurements give it.
    """
    lowest = -2 * after.standard_error
    if after.gap >= lowest or before.gap <= after.gap:
        return 1.0
    return min(1.0, max(0.0, (before.gap - lowest) / (before.gap - after.gap)))
