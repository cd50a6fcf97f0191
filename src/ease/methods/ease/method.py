"""EASE: take out what the forget data really wrote, in both modalities, recover, and keep it from coming back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.lock import Lock
from ease.federation.protocol import Federation, Precision
from ease.methods.base import Need, Space, Step, Trained, Unlearner, forget_holders, retained_clients, share_of, told_of
from ease.methods.ease.calibration import (
    Gap,
    Levels,
    disbelief,
    doubtful,
    measure_levels,
    membership_gap,
    rounds_moved,
    share_to_remove,
    usual_recovery,
    usual_share,
    without,
)
from ease.methods.ease.counterfactual import Written, written_by
from ease.methods.ease.evidence import Change, block_spectrum, canonical_basis
from ease.methods.ease.farewell import Teller
from ease.methods.ease.lock import client_lock, importance_lock
from ease.methods.foundation import Foundation
from ease.params import Params
from ease.requests.request import ClientRequest, Request
from ease.subspace import Basis, Spectrum, excise, joined

Spectra = Mapping[str, Spectrum]


class Ease(Unlearner):
    """Subtract what the forget pairs wrote, recover on retained pairs, look again and correct, then lock."""

    name: ClassVar[str] = "ease"
    title: ClassVar[str] = "EASE"
    source: ClassVar[str] = "EASE: entanglement-aware subspace excision, as described in docs/method.md"
    needs: ClassVar[frozenset[Need]] = frozenset({"history", "forget data", "leaving client"})
    tuned: ClassVar[Space] = {
        "share": ("auto", 0.8, 1.0),
        "momentum": (0.0, 0.3, 0.5),
        "recovery_share": ("auto", 0.25),
    }
    method: Literal["ease"] = "ease"
    reference: Literal["counterfactual", "initial", "trained"] = "counterfactual"
    """Where the forget data's directions return to: what the model would be had the pairs never been there, the state
    before training, or (the literal reading of the paper) the trained state."""
    share: Annotated[float, Field(ge=0, le=1.2)] | Literal["auto"] = "auto"
    """How much of what the forget pairs wrote is subtracted. `auto`: all of it, and before the last round as much is
    given back as brings forget pairs to the level of held-out ones."""
    replay: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = 1.0
    """Class and sample requests: share of the training rounds that are repeated without the forget pairs. `auto`: all
    where at most a third of the clients is concerned, else half of them, at most 32: cheaper, and further from what
    retraining gives."""
    replay_precision: Precision = "auto"
    """In which projectors multiply in replays; `auto`: in bfloat16 where the processor does so by itself, which is two
    to three times as fast. What is replayed is a difference, and stays the same to a few per cent of its length."""
    farewell: Teller = "leaving"
    """Client requests: who tells what the leaving clients wrote where the server has not stored it, they themselves or,
    if they are gone or what they kept is lost, all the others. `nobody`: what is stored stands for the rest."""
    recovery_share: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Rounds of recovery on retained data, as a share of the training rounds. `auto`: until the loss of a round is that
    of the last rounds of training, and one more. Usually that is 0.15 when clients leave and 0.2 for other requests; it
    is at most twice as many, at least two rounds, and one where that is the usual number."""
    momentum: float = Field(0.3, ge=0, lt=1)
    """Of the server in recovery, but for the last round: what later rounds would have made up for comes sooner."""
    modalities: Literal["both", "image", "text"] = "both"
    """Where to subtract; one side alone leaves the other to bring the pair back."""
    delta: Annotated[float, Field(ge=0, le=1)] | Literal["soft"] = "soft"
    """Weight of a canonical direction: `soft`, 1 - cosine² to what retained data did, so that none flips; or a
    threshold, all of those whose cosine is at most this."""
    entanglement: bool = True
    """Off: every direction counts whole, those shared with retained data too."""
    decompose: bool = False
    """Subtract along canonical directions by the same weights instead of everything; references `initial` and
    `trained` always do."""
    energy: float = Field(0.95, gt=0, le=1)
    """Share of the contributions' energy that the compared subspaces hold."""
    lock: Literal["after", "subspace", "importance", "off"] = "after"
    """What keeps the directions down: the Forget Lock in all later training, the same in recovery too, an axis-aligned
    penalty in recovery (as in EWC), or nothing."""
    lock_side: Literal["server", "client"] = "server"
    """In recovery: `server` contracts after every aggregation and sends nothing; `client` is the penalty in local
    training."""
    lock_strength: float | None = Field(None, gt=0)
    """In recovery. Server: share of the drift removed each round, default 1. Client: weight of the penalty, default
    0.1."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        self.check(trained.training)
        trained.history.verify_state(0)
        clients = retained_clients(request, federation)
        before = self._look(trained, request, federation, trained.start) if self._asks(request) else {}
        counts = self._counts(request, federation, before)
        concerned = sum(count != 0 for count in counts.values()) / len(federation.clients)
        written = written_by(trained, request, federation, counts, self.replay, self.farewell, self.replay_precision)
        whole = self._one_side(written.total)
        spectra, bases = self._directions(trained, written)
        nobody = _without(trained, written)
        early = self._look(trained, request, federation, nobody) if self._corrects else {}
        doubted = doubtful(before, early)
        before, early = without(before, doubted), without(early, doubted)

        share = 1.0 if self.share == "auto" else self.share
        state, residuals = self._excised(trained, whole, bases, share)
        # Along directions of closed requests the last recovery stays: it was there when their shares were measured.
        state, _ = excise(state, trained.start, dict(trained.locked), drifted=trained.ground)
        notes = self._notes(
            spectra, bases, written, share, residuals, membership_gap(before, early) if self._corrects else None
        ) | ({"rejected": doubted} if doubted else {})
        yield Step(state, "decomposition", notes=notes)

        lock, velocity, removed = self._client_lock(bases, state), state.zeros(), share
        held, loss, goal = state, None, _settled_loss(trained)
        lengths = (each(trained.training, request) - 1 for each in (self.fewest_rounds, self.rounds, self.most_rounds))
        fewest, usual, most = lengths
        for number in range(1, most + 1):
            # With the loss of the round before; what no one has told says nothing.
            enough = number >= usual if loss is None or goal is None else number >= fewest and loss <= goal
            last, told = number == most or enough, dict[str, Any]()
            if last and self._corrects:
                # Rounds that the loss asks for beyond the usual ones only make up for how much was taken.
                recovery = min(number, usual) / trained.training.rounds
                removed, told = self._right_share(
                    trained, request, federation, state, share, before, early, concerned, recovery
                )
                held = state = state - (removed - share) * whole
            job = trained.training.job(
                number, trained.seed, trained.temperature, "ease", request=request, data="retain", lock=lock
            )
            drawn = participants(clients, trained.training, trained.seed, number)
            # The state travels in half precision; the changes that come back are added to the whole one.
            answers = federation.run(halved(state), job, drawn)
            finished = average(state, answers, trained.training, number)
            velocity = (0.0 if last else self.momentum) * velocity + (finished.state - state)
            # What this round did along directions of closed requests is taken back; the excision above was not.
            state, _ = excise(state + velocity, state, dict(trained.locked))
            if self.lock == "subspace" and self.lock_side == "server":
                state, _ = excise(state, held, bases, self._strength)
            told |= told_of(finished)
            keep = joined(bases, trained.locked) if last and self.lock != "off" else None
            base = self._foundation(trained, whole, removed, written) if last else None
            loss = finished.loss
            yield Step(state, "recovery", loss, told, bases=keep, foundation=base)
            if last:
                return

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        usual = usual_recovery(isinstance(request, ClientRequest))
        return 1 + share_of(training, usual if self.recovery_share == "auto" else self.recovery_share)

    def fewest_rounds(self, training: TrainingConfig, request: Request) -> int:
        """Two rounds of recovery, if there are two: the first has no loss to go by.

        Where clients are taken to lie, none may end it by the loss that it tells.
        """
        usual = self.rounds(training, request) - 1
        by_loss = self.recovery_share == "auto" and training.aggregation == "mean"
        return 1 + (min(2, usual) if by_loss else usual)

    def most_rounds(self, training: TrainingConfig, request: Request) -> int:
        """Twice as much recovery; one round alone has no loss to go by."""
        usual = self.rounds(training, request) - 1
        return 1 + (2 * usual if self.recovery_share == "auto" and usual > 1 else usual)

    def reads_updates_of(self, request: Request, training: TrainingConfig, clients: int) -> frozenset[int] | None:
        """Of clients that leave their own alone: what the others did is in the states (`farewell`)."""
        told_by_means = training.aggregation == "mean" and training.participation == 1
        if isinstance(request, ClientRequest) and told_by_means and 2 * len(request.clients) < clients:
            return frozenset(request.clients)
        return None

    def _asks(self, request: Request) -> bool:
        """Whether levels are wanted, or how many forget pairs each client holds; of a client that left, neither."""
        return self._corrects or not isinstance(request, ClientRequest)

    @property
    def _corrects(self) -> bool:
        return self.share == "auto" and self.reference == "counterfactual"

    @property
    def _strength(self) -> float:
        default = 1.0 if self.lock == "subspace" and self.lock_side == "server" else 0.1
        return default if self.lock_strength is None else self.lock_strength

    def check(self, training: TrainingConfig) -> None:
        """Refuse a lock that would oscillate instead of contracting, and stand-ins where nothing is stored."""
        if self.farewell == "nobody" and training.history == "client":
            raise UserError(
                'farewell = "nobody": the server stores no updates here (training.history = "client"); choose '
                '"leaving" or "others"'
            )
        if self.lock == "subspace" and self.lock_side == "server":
            if self._strength > 1:
                raise UserError(
                    f"lock_strength = {self._strength:g}: on the server it is a share, choose 0 < strength <= 1"
                )
        elif self.lock in ("subspace", "importance"):
            rate = max(training.learning_rate, training.lora_learning_rate or 0)
            if rate * self._strength >= 0.5:
                raise UserError(
                    f"lock_strength = {self._strength:g}: at learning rate {rate:g} the lock cannot contract; "
                    f"choose less than {0.5 / rate:g}"
                )

    def _one_side(self, change: Params) -> Params:
        """What is subtracted of a change, by modality."""
        kept = {name for b in change.blocks if self.modalities in ("both", b.modality) for name in b.tensors}
        return change.replace({name: t * 0 for name, t in change.tensors.items() if name not in kept})

    def _directions(self, trained: Trained, written: Written) -> tuple[dict[str, Spectrum], dict[str, Basis]]:
        """Canonical directions of what was written against what the others did, each with its weight."""
        start = trained.ground
        forget = [Change(start - each, each) for each in (written.early, written.late)]
        retain = [Change(start - each, each) for each in written.retained]
        blocks = [block for block in start.blocks if self.modalities in ("both", block.modality)]
        spectra = {block.name: block_spectrum(block, forget, retain, self.energy) for block in blocks}
        bases = {
            block.name: canonical_basis(block, forget, spectra[block.name]).weighted(self._weights(spectra[block.name]))
            for block in blocks
        }
        return spectra, bases

    def _weights(self, spectrum: Spectrum) -> Tensor:
        if not self.entanglement:
            return torch.ones_like(spectrum.cosines)
        return 1 - spectrum.cosines**2 if self.delta == "soft" else spectrum.unique(self.delta).double()

    def _excised(
        self, trained: Trained, whole: Params, bases: dict[str, Basis], share: float
    ) -> tuple[Params, dict[str, float]]:
        """The state without what was written, and what truncation of factored blocks left of it."""
        if self.reference == "counterfactual" and not self.decompose:
            return trained.ground - share * whole, {}
        goal = {
            "counterfactual": trained.ground - share * whole,
            "initial": trained.initial,
            "trained": trained.ground,
        }[self.reference]
        return excise(trained.ground, goal, bases)

    def _look(self, trained: Trained, request: Request, federation: Federation, state: Params) -> Levels:
        """Levels under a state, of every client's held-out pairs: those of the ones concerned alone may be few."""
        sent = state if state is trained.start else halved(state)  # the trained one is known to all
        return measure_levels(trained, sent, request, federation, self._asked(request, federation))

    def _asked(self, request: Request, federation: Federation) -> Sequence[int]:
        return federation.clients if isinstance(request, ClientRequest) else forget_holders(request, federation)

    def _right_share(
        self,
        trained: Trained,
        request: Request,
        federation: Federation,
        state: Params,
        share: float,
        before: Levels,
        early: Levels,
        concerned: float,
        recovery: float,
    ) -> tuple[float, dict[str, Any]]:
        """How much to subtract so that forget pairs come to the level of held-out ones after what recovery has done.

        `recovery` is how long it was by then, as a share of the training rounds.
        """
        now = membership_gap(self._look(trained, request, federation, state), early)
        first = membership_gap(before, early)
        slope = (first.gap - now.gap) / share if first is not None and now is not None else 0.0
        recipe, leaving = trained.training, isinstance(request, ClientRequest)
        moved = rounds_moved(trained.history, recipe.rounds)
        usual = usual_share(leaving, recipe.optimiser, moved, recovery, concerned)
        why = disbelief(now, share, slope, usual)
        wanted, weight = share_to_remove(None if why else now, share, slope, usual)
        told = {"share": wanted, "measured_weight": weight, "gap": asdict(now) if now else None}
        return wanted, told | ({"why": why} if why else {})

    def _foundation(self, trained: Trained, whole: Params, removed: float, written: Written) -> Foundation | None:
        """What the next request builds on; what is excised towards other references is not told in parts."""
        if self.reference != "counterfactual" or self.decompose:
            return None
        return Foundation(trained.ground - removed * whole, written.told)

    def _counts(self, request: Request, federation: Federation, levels: Levels) -> dict[int, int | None]:
        """Client -> how many forget pairs it holds, by its levels; None of one whose levels were not to be had."""
        asked = self._asked(request, federation) if self._asks(request) else ()
        return {client: len(levels[client]["forget"]) if client in levels else None for client in asked}

    def _client_lock(self, bases: Mapping[str, Basis], reference: Params) -> Lock | None:
        if self.lock == "importance":
            return importance_lock(bases, reference, self._strength)
        if self.lock == "subspace" and self.lock_side == "client":
            return client_lock(bases, reference, self._strength)
        return None

    def _notes(
        self,
        spectra: Spectra,
        bases: Mapping[str, Basis],
        written: Written,
        share: float,
        residuals: dict[str, float],
        before: Gap | None,
    ) -> dict[str, Any]:
        notes: dict[str, Any] = {
            "reference": self.reference,
            "delta": self.delta,
            "share": share,
            "gap_before": asdict(before) if before else None,
            "replayed_rounds": written.replayed_rounds,
            "replaying_clients": written.clients,
            "residuals": residuals,
            "blocks": describe(spectra, {name: self._weights(spectrum) for name, spectrum in spectra.items()}),
        }
        few = "too few held-out pairs to measure a gap: the usual share is subtracted"
        why = "; ".join(filter(None, [few if before is None and self._corrects else "", written.filled.why]))
        return notes | ({"why": why} if why else {})


def _settled_loss(trained: Trained) -> float | None:
    """Mean loss of the last two rounds of training, where it was told: one alone is noisy."""
    rounds = trained.training.rounds
    told = [trained.history.record(number)["loss"] for number in range(max(1, rounds - 1), rounds + 1)]
    losses = [loss for loss in told if loss is not None]
    return sum(losses) / len(losses) if losses else None


def _without(trained: Trained, written: Written) -> Params:
    """The model after the early rounds, had the forget pairs never been there, nor those of closed requests."""
    if trained.gone:
        return trained.initial + written.retained[0]
    return trained.history.state(written.last_early) - written.early


def halved(state: Params) -> Params:
    """A state as it travels where half precision is enough."""
    return state.map(lambda tensor: tensor.half() if tensor.dtype == torch.float32 else tensor)


def describe(spectra: Spectra, weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The entanglement spectrum for people and reports: one entry for each block, each direction by its weight."""
    return [
        {
            "block": name,
            "forget_directions": spectrum.forget_rank,
            "retain_directions": spectrum.retain_rank,
            "excised": int((weights[name] > 0).sum()),
            "cosines": [round(cosine, 6) for cosine in spectrum.cosines.tolist()],
            "energies": [round(energy, 6) for energy in spectrum.energies.tolist()],
            "forget_energy": float((weights[name] * spectrum.energies).sum()),
            "retain_damage": max((weights[name] * spectrum.cosines**2).tolist(), default=0.0),
        }
        for name, spectrum in spectra.items()
    ]
