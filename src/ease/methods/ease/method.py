"""EASE: excise what only the forget data taught, in both modalities, and keep it from coming back."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.lock import Lock
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Need, Space, Step, Trained, Unlearner, retained_clients
from ease.methods.ease.calibration import (
    Gap,
    choose_depth,
    density_targets,
    level_targets,
    measure_levels,
    membership_gap,
)
from ease.methods.ease.displacement import DISPLACE
from ease.methods.ease.evidence import Evidence, block_spectrum, canonical_basis, from_history, from_probe
from ease.methods.ease.lock import client_lock, importance_lock
from ease.params import Params
from ease.requests.request import ClientRequest, Request
from ease.subspace import Basis, Spectrum, excise

Spectra = Mapping[str, Spectrum]


class Ease(Unlearner):
    """Decompose the updates, excise the forget data's own directions in both branches, lock them, recover."""

    name: ClassVar[str] = "ease"
    title: ClassVar[str] = "EASE"
    source: ClassVar[str] = "EASE: entanglement-aware subspace excision, as described in docs/method.md"
    needs: ClassVar[frozenset[Need]] = frozenset({"history", "forget data", "leaving client"})
    tuned: ClassVar[Space] = {
        "delta": ("auto", 0.3, 0.6),
        "displacement": (0.3, 0.6, 1.2),
        "energy": (0.9, 0.95, 0.99),
    }
    method: Literal["ease"] = "ease"
    reference: Literal["initial", "trained"] = "initial"
    """State to which excised directions return: before training, or (the literal reading of the paper) after it."""
    delta: Annotated[float, Field(ge=0, le=1)] | Literal["auto", "soft"] = "auto"
    """Directions whose cosine to the retained updates is at most this are excised. `soft` excises each direction by
    1 - cosine², so that none flips at a threshold; `auto` is `soft` to a depth that closes the membership gap."""
    energy: float = Field(0.95, gt=0, le=1)
    """Share of the updates' energy that the compared subspaces hold."""
    retain_columns: int = Field(60, ge=1)
    """Client requests: most stored updates of retained clients that are compared, from evenly spaced rounds."""
    modalities: Literal["both", "image", "text"] = "both"
    """Where to excise; one side alone leaves the other to bring the pair back."""
    entanglement: bool = True
    """Off: erase the whole forget subspace, directions shared with the retained clients included."""
    lock: Literal["subspace", "projection", "importance", "off"] = "subspace"
    """What keeps excised directions down: the Forget Lock, projection before each excision round alone, an
    axis-aligned penalty (as in EWC), or nothing."""
    lock_side: Literal["server", "client"] = "server"
    """`server` contracts after every aggregation and sends nothing; `client` is the penalty in local training."""
    lock_strength: float | None = Field(None, gt=0)
    """Server: share of the drift removed each round, default 1. Client: weight of the penalty, default 0.1."""
    displacement: float = Field(0.6, ge=0)
    """Class and sample requests: weight of the push of forget pairs to the level of unseen ones; 0: no push."""
    targets: Literal["density", "level"] = "density"
    """Level to push to: predicted for each pair from its neighbourhood, or the mean of held-out pairs."""
    probe_rounds: tuple[int, ...] = ()
    """Class and sample requests: rounds whose stored state is probed; empty: the one after 10 % of training."""
    excision_rounds: int | None = Field(None, ge=1)
    """Default: 5 % of the training rounds for a client request, 15 % for others."""
    excision_rate: float = Field(1.5, gt=0)
    """Learning rate in excision rounds, relative to training: larger steps leave the old optimum sooner."""
    stabilisation_rounds: int | None = Field(None, ge=0)
    """Default: 10 % of the training rounds for a client request, 5 % for others."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        self._check_contraction(trained.training)
        clients = retained_clients(request, federation)
        reference = trained.initial if self.reference == "initial" else trained.start

        forget, retain = self._evidence(trained, request, federation)
        blocks = [block for block in trained.start.blocks if forget and self.modalities in ("both", block.modality)]
        spectra = {block.name: block_spectrum(block, forget, retain, self.energy) for block in blocks}
        canonical = {block.name: canonical_basis(block, forget, spectra[block.name]) for block in blocks}
        weights = {name: self._weights(spectrum) for name, spectrum in spectra.items()}
        bases = {name: basis.weighted(weights[name]) for name, basis in canonical.items()}
        depth, notes = self._calibrate(trained, request, federation, reference, bases)
        targets, levels = self._targets(trained, request, federation)
        held, residuals = excise(trained.start, reference, bases, depth)
        notes |= {**levels, "delta": self.delta, "residuals": residuals, "blocks": describe(spectra, weights)}
        if not forget:
            notes["why"] = "no client has two forget pairs to probe: nothing is excised, the pairs are displaced alone"
        yield Step(held, "decomposition", notes=notes, bases=bases)

        state, lock = held, self._client_lock(bases, held)
        excision, stabilisation = self._phases(trained.training, request)
        for number in range(1, excision + stabilisation + 1):
            phase = "excision" if number <= excision else "stabilisation"
            if phase == "excision" and self.lock != "off":
                state, _ = excise(state, held, bases)
            job = self._job(trained, request, number, phase, targets, lock)
            drawn = participants(clients, trained.training, trained.seed, number)
            finished = average(state, federation.run(state, job, drawn), trained.training, number)
            state, notes = finished.state, {"rejected": finished.rejected} if finished.rejected else {}
            if self.lock == "subspace" and self.lock_side == "server":
                state, residuals = excise(state, held, bases, self._strength)
                notes |= {"residuals": residuals} if residuals else {}
            yield Step(state, phase, finished.loss, notes)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + sum(self._phases(training, request))

    def _phases(self, training: TrainingConfig, request: Request) -> tuple[int, int]:
        """Rounds of each phase: a client request has excised all at once and recovers, others still displace."""
        defaults = (0.05, 0.1) if isinstance(request, ClientRequest) else (0.15, 0.05)
        asked = (self.excision_rounds, self.stabilisation_rounds)
        excision, stabilisation = (
            max(1, round(share * training.rounds)) if rounds is None else rounds
            for share, rounds in zip(defaults, asked, strict=True)
        )
        return excision, stabilisation

    @property
    def _strength(self) -> float:
        default = 1.0 if self.lock == "subspace" and self.lock_side == "server" else 0.1
        return default if self.lock_strength is None else self.lock_strength

    def _check_contraction(self, training: TrainingConfig) -> None:
        """Refuse a lock that would oscillate instead of contracting."""
        if self.lock == "subspace" and self.lock_side == "server":
            if self._strength > 1:
                raise UserError(
                    f"lock_strength = {self._strength:g}: on the server it is a share, choose 0 < strength <= 1"
                )
        elif self.lock in ("subspace", "importance"):
            rate = max(1.0, self.excision_rate) * max(training.learning_rate, training.lora_learning_rate or 0)
            if rate * self._strength >= 0.5:
                raise UserError(
                    f"lock_strength = {self._strength:g}: at learning rate {rate:g} the lock cannot contract; "
                    f"choose less than {0.5 / rate:g}"
                )

    def _evidence(
        self, trained: Trained, request: Request, federation: Federation
    ) -> tuple[list[Evidence], list[Evidence]]:
        trained.history.verify_state(0)
        trained.history.verify_state(trained.training.rounds)
        if isinstance(request, ClientRequest):
            return from_history(trained, request, self.retain_columns)
        rounds = self.probe_rounds or (max(1, round(0.1 * trained.training.rounds)),)
        for number in rounds:
            trained.history.verify_state(number)
        return from_probe(trained, request, federation, rounds)

    def _calibrate(
        self, trained: Trained, request: Request, federation: Federation, reference: Params, bases: dict[str, Basis]
    ) -> tuple[float, dict[str, Any]]:
        """How deep to excise, and the membership gap before and after.

        Under `auto` the leaving client, as its last task, measures the gap of the trained and of the excised state. If
        its pairs would fall below held-out ones, they are excised less deep: over-forgetting is a trace too.
        """
        if self.delta != "auto" or not isinstance(request, ClientRequest) or self.reference == "trained":
            return 1.0, {}

        def gap_at(depth: float, label: str) -> Gap | None:
            state, _ = excise(trained.start, reference, bases, depth)
            return membership_gap(measure_levels(trained, state, request, federation, label))

        before, after = gap_at(0.0, "trained"), gap_at(1.0, "excised")
        if before is None or after is None:
            return 1.0, {"why": "the leaving client has too few held-out pairs to measure a gap"}
        depth = choose_depth(before, after)
        if depth < 1:
            after = gap_at(depth, "calibrated") or after
        return depth, {"depth": depth, "gap_before": asdict(before), "gap_after": asdict(after)}

    def _weights(self, spectrum: Spectrum) -> Tensor:
        """Share of each canonical direction to excise."""
        if not self.entanglement:
            return torch.ones_like(spectrum.cosines)
        if isinstance(self.delta, float):
            return spectrum.unique(self.delta).double()
        return 1 - spectrum.cosines**2

    def _targets(
        self, trained: Trained, request: Request, federation: Federation
    ) -> tuple[dict[int, Tensor], dict[str, Any]]:
        """Levels the forget pairs are to fall to, and the gap before; a leaving client takes no part in training."""
        if isinstance(request, ClientRequest) or self.displacement == 0:
            return {}, {}
        levels = measure_levels(trained, trained.start, request, federation, "trained")
        before = membership_gap(levels)
        targets = density_targets(levels, trained.seed) if self.targets == "density" else level_targets(levels)
        mean = float(torch.cat(list(targets.values())).mean())
        return targets, {"gap_before": asdict(before) if before else None, "target_mean": mean}

    def _client_lock(self, bases: Mapping[str, Basis], reference: Params) -> Lock | None:
        if self.lock == "importance":
            return importance_lock(bases, reference, self._strength)
        return (
            client_lock(bases, reference, self._strength)
            if self.lock == "subspace" and self.lock_side == "client"
            else None
        )

    def _job(
        self, trained: Trained, request: Request, number: int, phase: str, targets: dict[int, Tensor], lock: Lock | None
    ) -> LocalJob:
        job = trained.training.job(
            number, trained.seed, trained.temperature, "ease", request=request, data="retain", lock=lock
        )
        if not targets:
            return job
        job = replace(job, objective=DISPLACE, targets=targets, settings={"displacement": self.displacement})
        if phase == "stabilisation":
            return job
        push = {"displacement": self.displacement / self.excision_rate}
        return replace(job, optimiser=job.optimiser.scaled(self.excision_rate), settings=push)


def describe(spectra: Spectra, weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The entanglement spectrum for people and reports: one entry for each block.

    Under a threshold the two shares are eta_f and eta_r; soft weights count each direction by its weight.
    """
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
