"""EASE: excise what only the forget data taught, in both modalities, and keep it from coming back."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ease.data.density import fit_ridge, predict_ridge
from ease.data.request import ClientRequest, Request
from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.protocol import Federation
from ease.methods.base import Step, Trained, Unlearner, retained_clients
from ease.methods.evidence import Evidence, block_basis, block_spectrum, from_history, from_probe
from ease.params import Params
from ease.subspace import Basis, Spectrum, excise


class Ease(Unlearner):
    """Entanglement-aware subspace excision: decompose, excise in both branches, lock, recover."""

    name: ClassVar[str] = "ease"
    method: Literal["ease"] = "ease"
    reference: Literal["initial", "trained"] = "initial"
    """State to which excised directions return: before training, or (the paper's literal reading) after it."""
    delta: float | Literal["auto", "soft"] = "soft"
    """Directions with a smaller cosine to the retained updates are excised."""
    energy: float = Field(0.95, gt=0, le=1)
    """Share of the updates' energy that the compared subspaces hold."""
    modalities: Literal["both", "image", "text"] = "both"
    entanglement: bool = True
    """Off: erase the whole forget subspace, shared directions included."""
    lock_strength: float = Field(1.0, ge=0, le=1)
    displacement: float = Field(0.3, ge=0)
    targets: Literal["density", "level"] = "density"
    probe_rounds: tuple[int, ...] = ()
    excision_rounds: int | None = Field(None, ge=1)
    stabilisation_rounds: int | None = Field(None, ge=0)

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        clients = retained_clients(request, federation)
        forget, retain = self._evidence(trained, request, federation)
        blocks = [block for block in trained.final.blocks if self.modalities in ("both", block.modality)]
        spectra = {block.name: block_spectrum(block, forget, retain, self.energy) for block in blocks}
        weights = {name: self._weights(s) for name, s in spectra.items()}
        bases = {b.name: block_basis(b, forget, spectra[b.name], weights[b.name]) for b in blocks}
        reference = trained.initial if self.reference == "initial" else trained.final
        targets = self._targets(trained, request, federation) if not isinstance(request, ClientRequest) and self.displacement else {}
        state, _ = excise(trained.final, reference, bases)
        excision, stabilisation = self._phases(trained.training)
        for number in range(1, excision + stabilisation + 1):
            phase = "excision" if number <= excision else "stabilisation"
            job = trained.training.job(number, trained.seed, trained.temperature, "ease", request=request, data="retain")
            if targets and phase == "excision":
                from dataclasses import replace
                job = replace(job, objective="displace", targets=targets, settings={"displacement": self.displacement})
            drawn = participants(clients, trained.training, trained.seed, number)
            finished = average(state, federation.run(state, job, drawn), trained.training, number)
            state, _ = excise(finished.state, reference, bases, self.lock_strength)
            yield Step(state, phase, finished.loss)

    def rounds(self, training: TrainingConfig) -> int:
        return sum(self._phases(training))

    def _phases(self, training: TrainingConfig) -> tuple[int, int]:
        excision = self.excision_rounds if self.excision_rounds is not None else max(1, round(0.15 * training.rounds))
        stabilisation = self.stabilisation_rounds if self.stabilisation_rounds is not None else max(1, round(0.05 * training.rounds))
        return excision, stabilisation

    def _evidence(self, trained, request, federation):
        if isinstance(request, ClientRequest):
            return from_history(trained, request)
        return from_probe(trained, request, federation, self.probe_rounds or (max(1, round(0.1 * trained.training.rounds)),))

    def _weights(self, spectrum: Spectrum) -> Tensor:
        if not self.entanglement:
            return torch.ones_like(spectrum.cosines)
        if self.delta == "soft":
            return 1 - spectrum.cosines**2
        return spectrum.unique(self.delta).double()

    def _targets(self, trained: Trained, request: Request, federation: Federation) -> dict[int, Tensor]:
        job = trained.training.job(0, trained.seed, trained.temperature, "levels", request=request, objective="levels")
        answers = list(federation.run(trained.final.map(torch.Tensor.half), job, federation.clients))
        phi = torch.cat([a.values["validation"] for a in answers])
        if self.targets == "level":
            return {a.client: torch.full((len(a.values["forget"]),), float(phi.mean())) for a in answers}
        ridge = fit_ridge(torch.cat([a.values["validation_density"] for a in answers]), phi)
        return {a.client: predict_ridge(ridge, a.values["forget_density"]).float() for a in answers}
