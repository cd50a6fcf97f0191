"""Levels without a retrained model: how strongly unseen pairs are held, what each forget pair should fall to, and
whether the gap between forget and held-out pairs has closed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ease.data.density import fit_ridge
from ease.data.request import ClientRequest, Request
from ease.federation.protocol import Federation
from ease.methods.base import Trained
from ease.params import Params
from ease.seeding import generator

Levels = Mapping[int, Mapping[str, Tensor]]
"""Client -> what it measured: log-odds and densities of its forget and held-out pairs."""


@dataclass(frozen=True)
class Gap:
    """Mean log-odds of forget pairs minus those of held-out pairs of the same clients; 0 means not told apart."""

    gap: float
    standard_error: float
    forget_pairs: int
    held_out_pairs: int


def measure_levels(trained: Trained, state: Params, request: Request, federation: Federation, label: str) -> Levels:
    """Ask the holders of forget pairs for their levels under a state, which travels in half precision."""
    holders = list(request.clients) if isinstance(request, ClientRequest) else federation.clients
    job = trained.training.job(
        0, trained.seed, trained.temperature, f"levels-{label}", request=request, objective="levels"
    )
    answers = federation.run(state.map(torch.Tensor.half), job, holders)
    return {answer.client: answer.values for answer in sorted(answers, key=lambda answer: answer.client)}


def membership_gap(levels: Levels) -> Gap | None:
    """The gap over all clients, or None when there are too few pairs on either side to speak of one."""
    forget = torch.cat([values["forget"] for values in levels.values()]).double()
    held_out = torch.cat([values["kin"] for values in levels.values()]).double()
    if len(forget) < 2 or len(held_out) < 2:
        return None
    error = (forget.var() / len(forget) + held_out.var() / len(held_out)).sqrt()
    return Gap(float(forget.mean() - held_out.mean()), float(error), len(forget), len(held_out))


def level_targets(levels: Levels) -> dict[int, Tensor]:
    """The same target for every forget pair: the mean level of held-out pairs."""
    mean = torch.cat([values["held_out"] for values in levels.values()]).mean()
    return {client: mean.expand(len(values["forget"])).clone() for client, values in levels.items()}


def density_targets(levels: Levels, seed: int) -> dict[int, Tensor]:
    """A target for each forget pair: the level its neighbourhood predicts once the forget pairs are gone.

    Predictions alone would be too even: unseen pairs scatter around them, some far below. Each target therefore adds
    a residual drawn from the held-out pairs, so that the whole distribution is met and not only its mean.
    """
    held_out = torch.cat([values["held_out"] for values in levels.values()])
    features = torch.cat([values["held_out_density"] for values in levels.values()])
    ridge = fit_ridge(features, held_out)
    residuals = held_out - ridge.predict(features)
    rng = generator(seed, "targets")
    targets = {}
    for client, values in levels.items():
        drawn = residuals[torch.from_numpy(rng.integers(len(residuals), size=len(values["forget"])))]
        targets[client] = (ridge.predict(values["forget_density"]) + drawn).float()
    return targets


def choose_delta(gaps: Mapping[float, Gap]) -> float:
    """The largest threshold that does not push the forget pairs below held-out ones by more than the error of the gap.

    Differs from the paper: a fixed threshold fails when one cosine lies just beyond it. With few held-out pairs the
    gap's error is wide, so of all thresholds that agree with "not told apart" the one that removes most is taken.
    """
    level = [delta for delta, gap in gaps.items() if gap.gap >= -2 * gap.standard_error]
    return max(level) if level else min(gaps, key=lambda delta: abs(gaps[delta].gap))
