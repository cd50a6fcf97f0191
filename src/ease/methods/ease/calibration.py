"""How much of what the forget pairs wrote is to go, by what clients can measure: no retrained model, no test pair."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from ease.federation.history import History
from ease.federation.protocol import Federation
from ease.methods.base import Trained
from ease.methods.ease.levels import LEVELS
from ease.params import Params
from ease.requests.request import Request

Levels = Mapping[int, Mapping[str, Tensor]]
"""Client -> log-odds of its forget pairs and of the held-out pairs that resemble them [pairs]."""


@dataclass(frozen=True)
class Usual:
    """The share that requests of a kind need: not all, for later rounds make up for some of what is missing."""

    share: float
    spread: float
    """How much it differs between requests and worlds; a measurement is weighed against it by its error."""


LEAVING = {"sgd": Usual(0.81, 0.02), "adam": Usual(0.89, 0.03)}
"""Local optimiser -> where clients leave, after the usual recovery of a long training. Found with 20 rounds, where 0.01
more is right: 0.80 on scenes, 0.84 on Flickr8k, 0.82 to 0.84 with four clients or half of them a round; with Adam
0.90."""
REPLAYED = {"sgd": Usual(0.89, 0.02), "adam": Usual(0.92, 0.03)}
"""The same where clients replay: means of 0.88 to 0.92; with Adam 0.96 on scenes, 0.93 on Flickr8k, 0.91 on its
transformers."""
LEAVING_RECOVERY, REPLAYED_RECOVERY = 0.15, 0.2
"""The usual recovery, as a share of the training rounds."""
GIVEN_BACK = 0.75
"""Recovery of one training's length would give back so much: each further round asks for a larger share."""
MADE_UP_IN = 3.0
"""Rounds in which others make up for what is missing, but for a third. After one round all that was written is what has
to go; with five rounds the right shares were 0.94 to 1.05 (leaving: 0.88 to 1.01)."""
LOOKED_AT = 50
"""Rounds whose steps are compared, at most."""
MOST = 1.1
"""No larger share is subtracted. More than all is right where one round of recovery is a third of the training: 1.09 to
1.19 there; a recovery of half of it gives back less than it would by the rule above."""
MANY = 0.2
"""Share of the clients from which on it makes no difference how many hold forget pairs: where one of ten does, 0.85 is
right on scenes and 0.90 on Flickr8k, where three do 0.88 and 0.89."""
SCATTER = 1.5
"""Measured shares lay so many standard errors around the right ones: levels are not all that recall depends on."""
FEWEST = 3
"""With fewer pairs on either side nothing is measured."""
MOST_SPREADS = 4.0
"""How many spreads of held-out levels the mean of a client's pairs may lie away from where the server expects it."""
MEASURED_SPREAD = 0.1
"""How much shares that honest clients measure differ from the usual one by more than their error."""
MOST_ERRORS = 3.0
"""How many such spreads a measured share may lie away from the usual one and still be believed."""


@dataclass(frozen=True)
class Gap:
    """Mean log-odds of forget pairs minus those of held-out pairs; 0 means not told apart."""

    gap: float
    standard_error: float
    forget_pairs: int
    held_out_pairs: int


def measure_levels(
    trained: Trained, state: Params, request: Request, federation: Federation, clients: Sequence[int]
) -> Levels:
    """Ask clients for their levels under a state; the same pairs are compared each time."""
    job = trained.training.job(0, trained.seed, trained.temperature, "levels", request=request, objective=LEVELS)
    answers = federation.run(state, job, clients)
    return {answer.client: answer.values for answer in sorted(answers, key=lambda answer: answer.client)}


def membership_gap(levels: Levels, early: Levels | None = None) -> Gap | None:
    """The gap over all clients, or None when there are too few pairs on either side to speak of one.

    `early` are levels of the same pairs at a state where nobody is a member. Pairs differ, and these say how: the gap
    is what membership adds to them (analysis of covariance): its error is smaller, and who is compared matters less.
    """
    if early is not None:
        levels, early = comparable(levels, early)
    forget, held_out = (_all(levels, name) for name in ("forget", "kin"))
    if min(len(forget), len(held_out)) < FEWEST:
        return None
    member = torch.cat([torch.ones_like(forget), torch.zeros_like(held_out)])
    covariates = [] if early is None else [torch.cat([_all(early, name) for name in ("forget", "kin")])]
    gap, error = adjusted_gap(torch.cat([forget, held_out]), member, covariates)
    return Gap(gap, error, len(forget), len(held_out))


def adjusted_gap(level: Tensor, member: Tensor, covariates: Sequence[Tensor]) -> tuple[float, float]:
    """What membership (1 or 0) adds to levels beside covariates [pairs], and its standard error."""
    columns = [torch.ones_like(level), member, *(each - each.mean() for each in covariates)]
    design = torch.stack(columns, dim=1)
    inverse = torch.linalg.pinv(design.T @ design, hermitian=True)
    coefficients = inverse @ design.T @ level
    residual = level - design @ coefficients
    # Each side has its own spread, as for a difference of means.
    spread = torch.where(member > 0, residual[member > 0].var(), residual[member == 0].var())
    error = (inverse @ design.T @ (spread[:, None] * design) @ inverse)[1, 1].clamp_min(0).sqrt()
    return float(coefficients[1]), float(error)


def _all(levels: Levels, name: str) -> Tensor:
    return torch.cat([torch.zeros(0), *(values[name] for values in levels.values())]).double()


def comparable(one: Levels, two: Levels) -> tuple[Levels, Levels]:
    """Levels of those clients alone that speak of as many pairs both times."""

    def counts(levels: Levels, client: int) -> list[int]:
        return [len(levels[client][name]) for name in ("forget", "kin")]

    both = [client for client in one if client in two and counts(one, client) == counts(two, client)]
    return {client: one[client] for client in both}, {client: two[client] for client in both}


def doubtful(before: Levels, early: Levels) -> dict[int, str]:
    """Client -> why its levels do not fit what the server knows; such levels must not decide how much is forgotten.

    `early` are levels at a state where nobody is a member, so that no client's pairs can stand far from the held-out
    ones of all. `before` are those of the trained model: it holds what it was trained on no less than what it was not.
    Middle and spread are medians, which one client does not move.
    """
    before, early = comparable(before, early)
    strangers = _all(early, "kin")
    if len(strangers) < FEWEST:
        return {}
    risen = _all(before, "kin") - strangers
    (middle, spread), (gain, gain_spread) = _middle(strangers), _middle(risen)
    found: dict[int, str] = {}
    for client, values in early.items():
        for name in ("forget", "kin"):
            away = float(values[name].double().mean()) - middle if len(values[name]) else 0.0
            if abs(away) > MOST_SPREADS * spread:
                found[client] = (
                    f"its {_NAMES[name]} pairs stand {away:+.1f} from held-out ones in a state that saw neither"
                )
        rise = (before[client]["forget"] - values["forget"]).double()
        if client not in found and len(rise) and float(rise.mean()) < gain - MOST_SPREADS * gain_spread:
            found[client] = (
                f"training changed its own pairs by {float(rise.mean()):+.1f} and held-out ones by {gain:+.1f}"
            )
    return found


_NAMES = {"forget": "forget", "kin": "held-out"}


def _middle(values: Tensor) -> tuple[float, float]:
    """Median and the spread of a normal distribution with the same median distance to it.

    Never less than one: pairs of one class resemble each other, and what differs by less misleads no one far.
    """
    middle = values.median()
    return float(middle), max(1.0, 1.4826 * float((values - middle).abs().median()))


def without(levels: Levels, clients: Collection[int]) -> Levels:
    """Levels of everyone else."""
    return {client: values for client, values in levels.items() if client not in clients}


def rounds_moved(history: History, rounds: int) -> float:
    """How many rounds like the one that moved the model most a training was.

    A small one that has learnt all it can hardly moves any more, and others make up for nothing while it stands still.
    """
    numbers = {round(1 + place * (rounds - 1) / LOOKED_AT) for place in range(LOOKED_AT + 1)}
    steps = [history.moved_length(number) for number in sorted(numbers)]
    return rounds * sum(steps) / (len(steps) * max(*steps, 1e-30))


def usual_recovery(leaving: bool) -> float:
    """How long recovery usually is, as a share of the training rounds."""
    return LEAVING_RECOVERY if leaving else REPLAYED_RECOVERY


def usual_share(leaving: bool, optimiser: str, moved: float, recovery: float, concerned: float = 1.0) -> Usual:
    """What requests of a kind need after so many rounds that `moved` the model, and a recovery of a share of all.

    Where pairs of few clients go (`concerned`, a share of them), the others make up for more of it, as when they leave.
    """
    few, many = LEAVING[optimiser], REPLAYED[optimiser]
    weight = 0.0 if leaving else min(1.0, concerned / MANY)
    as_leaving, as_replayed = few.share - GIVEN_BACK * LEAVING_RECOVERY, many.share - GIVEN_BACK * REPLAYED_RECOVERY
    made_up = as_leaving + weight * (as_replayed - as_leaving)
    written = made_up + (1 - made_up) * exp((1 - moved) / MADE_UP_IN)
    return Usual(min(MOST, written + GIVEN_BACK * recovery), (few if leaving else many).spread)


def disbelief(now: Gap | None, share: float, slope: float, usual: Usual) -> str:
    """Why a measured share is not followed; nothing when it may be.

    Recovery and the rounds make the share that closes the gap much the same everywhere. A measurement that lies far
    from it, seen by its own error, says more about who measured.
    """
    if now is None or slope <= 0:
        return ""
    measured, error = share + now.gap / slope, now.standard_error / slope
    if abs(measured - usual.share) <= MOST_ERRORS * (MEASURED_SPREAD**2 + error**2) ** 0.5:
        return ""
    return f"the levels ask for a share of {measured:.2f}, which no honest ones do: the usual share is subtracted"


def share_to_remove(now: Gap | None, share: float, slope: float, usual: Usual) -> tuple[float, float]:
    """The share that would close the gap, drawn towards the usual one by the error of the measurement; and its weight.

    `share` is gone already and `slope` says how much the gap falls for each unit of it. Without enough held-out pairs,
    or where nothing falls, the usual share it is.
    """
    if now is None or slope <= 0:
        return usual.share, 0.0
    measured, error = share + now.gap / slope, SCATTER * now.standard_error / slope
    weight = usual.spread**2 / (usual.spread**2 + error**2)
    return min(MOST, max(0.0, usual.share + weight * (measured - usual.share))), weight
