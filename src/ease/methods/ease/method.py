"""EASE: subtract the contribution of the forget data once, recover with plain FedAvg rounds, and lock its direction."""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from math import ceil
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from ease.config import Config
from ease.errors import TooFew
from ease.federation.fedavg import Round, TrainingConfig, average, participants
from ease.federation.protocol import Federation, Precision
from ease.methods.base import Need, Space, Step, Trained, Unlearner, exclusions, retained_clients, share_of
from ease.methods.columns import Change, single_direction
from ease.methods.ease.contribution import ForgetContribution, contribution_of
from ease.methods.ease.stored_sums import Source
from ease.methods.unlearning_base import UnlearningBase
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.subspace import Basis, excise, joined

CLIENT_RECOVERY, REPLAY_RECOVERY = 0.15, 0.2
"""Recovery rounds after client requests and after others, as shares of the training rounds."""
LARGEST_SHARE = 1.1
"""Bound for trainings of a few rounds, whose loss is still large. With 5 rounds, shares of up to 1.03 were right."""
LARGE_REQUEST = 0.25
"""Share of all training pairs above which retained recall falls short of retraining's by more than two points."""


class SharePrior(Config):
    """The fitted numbers of assets/share_prior.toml."""

    client: float
    class_: float = Field(alias="class")
    sample: float
    per_loss: float
    adam: float


class Ease(Unlearner):
    """Subtract what the forget pairs contributed to the model, then train a few rounds on retained pairs.

    The contribution is FedRecovery's residual (Zhang et al., TIFS 2023), summed over all rounds and scaled by a
    prior. The residual is the mean update of a round less that mean without the leaving client. EASE extends it by
    replay to classes and single pairs. Plain FedAvg rounds recover, and later training is locked along the
    contribution's direction. The algorithm of the EASE paper is `ease_paper`.
    """

    name: ClassVar[str] = "ease"
    title: ClassVar[str] = "EASE"
    source: ClassVar[str] = "this project, after FedRecovery and the EASE paper; docs/method.md"
    needs: ClassVar[frozenset[Need]] = frozenset({"history", "forget data", "leaving client"})
    tuned: ClassVar[Space] = {"share": ("auto", 0.7, 0.8, 0.9, 1.0), "recovery_share": ("auto", 0.1, 0.3)}
    method: Literal["ease"] = "ease"
    share: Annotated[float, Field(ge=0, le=1.2)] | Literal["auto"] = "auto"
    """Share of the contribution that is subtracted. `auto`: by the request's kind and the final training loss."""
    replay: float = Field(1.0, gt=0, le=1)
    """Class and sample requests: share of the training rounds that are replayed. Fewer are cheaper and less exact."""
    replay_precision: Precision = "auto"
    """Precision of matrix products in replays; `auto`: bfloat16 on processors with instructions for it."""
    contribution_source: Source = "leaving"
    """Client requests, if the server has not stored the updates: whether the leaving clients or the remaining ones
    report theirs."""
    recovery_share: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Recovery rounds as a share of the training rounds. `auto`: 0.15 for client requests and 0.2 for others, and up
    to a quarter more while the loss is above that of the last training rounds."""
    modalities: Literal["both", "image", "text"] = "both"
    """Branches to subtract from and to lock. With one branch, the other restores the pairs."""
    lock: bool = True
    """Keep later training from moving along the contribution's direction."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        self.check(trained.training)
        contribution = contribution_of(
            trained, request, federation, self.replay, self.contribution_source, self.replay_precision
        )
        goal = final_loss(trained)
        share = share_prior(request, trained.training.optimiser, goal or 0.0) if self.share == "auto" else self.share
        base = trained.base_state - share * self._chosen(contribution.total)
        # Along locked directions of closed requests the model stays where their recovery left it.
        state, _ = excise(base, trained.start, dict(trained.locked), drifted=trained.base_state)
        yield Step(state, "subtraction", notes=_notes(contribution, share))

        clients, training = retained_clients(request, federation), trained.training
        least, most = (each(training, request) - 1 for each in (self.rounds, self.most_rounds))
        for number in range(1, most + 1):
            job = trained.job(number, self.name, request=request, data="retain")
            drawn = participants(clients, training, trained.seed, number)
            # States travel in half precision. The returned changes are added to the full state.
            try:
                finished, ended = average(state, federation.run(halved(state), job, drawn), training, number), ""
            except TooFew as error:  # the pairs are subtracted: an erasure does not wait for sites that hold none
                finished, ended = Round(number, state, ()), f"recovery ended early: {error}"
            state, _ = excise(finished.state, state, dict(trained.locked))
            recovered = finished.loss is None or goal is None or finished.loss <= goal
            last = number == most or (number >= least and recovered) or bool(ended)
            yield Step(
                state,
                "recovery",
                finished.loss,
                {**exclusions(finished), **({"ended": ended} if ended else {})},
                bases=joined(self._directions(trained, contribution), trained.locked) if last and self.lock else None,
                base=UnlearningBase(base, contribution.reports) if last else None,
            )
            if last:
                return

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        usual = CLIENT_RECOVERY if isinstance(request, ClientRequest) else REPLAY_RECOVERY
        return 1 + share_of(training, usual if self.recovery_share == "auto" else self.recovery_share)

    def most_rounds(self, training: TrainingConfig, request: Request) -> int:
        """A quarter more recovery; robust aggregation never extends it, because clients report their own loss."""
        recovery = self.rounds(training, request) - 1
        extends = self.recovery_share == "auto" and training.aggregation == "mean"
        return 1 + recovery + (ceil(recovery / 4) if extends else 0)

    def estimated_work(
        self, training: TrainingConfig, request: Request, holders: float, replay_cost: float = 1.0
    ) -> float:
        """Recovery, and the rounds that clients train once more: replays, or updates that are not stored."""
        work = self.rounds(training, request) - 1.0  # the subtraction is not a round of training
        if not isinstance(request, ClientRequest):
            return work + holders * self.replay * training.rounds * replay_cost
        if self.contribution_source == "leaving":  # leaving clients repeat what is not stored
            work += holders * training.rounds * (1 - 1 / training.history_every)
        return work

    def advice(self, forget_share: float, cost: float) -> str:
        if forget_share > LARGE_REQUEST:
            return f"this is {forget_share:.0%} of all pairs: --method retrain keeps the others better"
        if cost > 1:
            return f"about {cost:.0%} of retraining's work: --method retrain costs less"
        return ""

    def reads_updates_of(self, request: Request, training: TrainingConfig, clients: int) -> frozenset[int] | None:
        """Client requests read the leaving clients' updates only: global states contain the sum of the others."""
        from_means = training.aggregation == "mean" and training.participation == 1
        if isinstance(request, ClientRequest) and from_means and 2 * len(request.clients) < clients:
            return frozenset(request.clients)
        return None

    def check(self, training: TrainingConfig) -> None:
        """Thinned histories are supported: clients repeat what is not stored."""
        self.check_strategy(training)

    def _chosen(self, change: Params) -> Params:
        """The change of the chosen branches; zero elsewhere."""
        kept = {name for b in change.blocks if self.modalities in ("both", b.modality) for name in b.tensors}
        return change.replace({name: t * 0 for name, t in change.tensors.items() if name not in kept})

    def _directions(self, trained: Trained, contribution: ForgetContribution) -> dict[str, Basis]:
        """One direction per block: the sum of the forget data's own updates."""
        own = contribution.own_updates
        change = Change(trained.base_state - own, own)
        blocks = [block for block in own.blocks if self.modalities in ("both", block.modality)]
        return {block.name: single_direction(change.column(block)) for block in blocks}


@cache
def _prior() -> SharePrior:
    return SharePrior(**tomllib.loads((files("ease") / "assets" / "share_prior.toml").read_text()))


def share_prior(request: Request, optimiser: str, final_loss: float) -> float:
    """The share that a request needs.

    It is below 1 because later rounds, trained without the forget pairs, would have made up for a part of what is
    missing. A model that has not converged made up for less, so the share grows with the final training loss.
    """
    prior = _prior()
    kinds = {ClientRequest: prior.client, ClassRequest: prior.class_, SampleRequest: prior.sample}
    share = kinds[type(request)] + prior.per_loss * final_loss + (prior.adam if optimiser == "adam" else 0.0)
    return min(share, LARGEST_SHARE)


def final_loss(trained: Trained) -> float | None:
    """Mean loss of the last two training rounds, if it was recorded; a single round is noisy."""
    rounds = trained.training.rounds
    recorded = [trained.history.record(number).loss for number in range(max(1, rounds - 1), rounds + 1)]
    losses = [loss for loss in recorded if loss is not None]
    return fmean(losses) if losses else None


def halved(state: Params) -> Params:
    """A state in half precision, as it travels."""
    return state.map(lambda tensor: tensor.half() if tensor.dtype == torch.float32 else tensor)


def _notes(contribution: ForgetContribution, share: float) -> dict[str, Any]:
    replayed = {
        "replayed_rounds": contribution.replayed_rounds,
        "replaying_clients": contribution.replaying_clients,
    }
    return {"share": share, **(replayed if contribution.replaying_clients else {})}
