"""The paper's EASE, as its Algorithm 1 prints it. Equation numbers are the paper's."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.lock import LockMessage, pack_directions
from ease.federation.protocol import Federation
from ease.methods.base import Need, Space, Step, Trained, Unlearner, exclusions, retained_clients, share_of
from ease.methods.columns import Change, UpdateColumn, block_spectrum, canonical_basis, describe, stored_columns
from ease.params import Block
from ease.requests.request import ClientRequest, Request
from ease.subspace import Basis, Spectrum, excise


class EasePaper(Unlearner):
    """Algorithm 1 of the EASE paper: find the directions that only the forget updates use, project both modalities
    off them, and lock them while the federation trains on retained pairs.

    As printed (`reference = "trained"`), projection and lock refer to the trained model, where unlearning starts. They
    hold the forget component at its trained value, so nothing is erased. `reference = "initial"` refers to the state
    before training and does erase.

    Differs from the paper: client updates are averaged with the weights of training, not equally. Directions and
    reference are sent once to each client, directions in 8 bit. A client with a single forget pair sends no
    column, because InfoNCE of one pair has no gradient. The paper prints no values for `delta`, `energy` and `alpha`.
    """

    name: ClassVar[str] = "ease_paper"
    title: ClassVar[str] = "EASE (paper)"
    source: ClassVar[str] = "Ding, Wu and Huang: EASE, Algorithm 1"
    needs: ClassVar[frozenset[Need]] = frozenset({"history", "forget data"})
    tuned: ClassVar[Space] = {"delta": (0.1, 0.3, 0.5, 0.9), "alpha": (0.0, 0.05, 0.1, 0.2)}
    method: Literal["ease_paper"] = "ease_paper"
    reference: Literal["trained", "initial"] = "trained"
    """w_n in the equations: the trained model, as printed, or the state before training, which makes them erase."""
    delta: float = Field(0.3, ge=0, le=1)
    """Entanglement threshold: directions with a cosine of at most this belong to the forget data only. 1 takes the
    whole forget subspace, without decomposition."""
    energy: float = Field(0.95, gt=0, le=1)
    """Share of the columns' energy that each subspace keeps (tau_e)."""
    alpha: float = Field(0.1, ge=0)
    """Strength of the Forget Lock in local training; 0 switches it off."""
    modalities: Literal["both", "image", "text"] = "both"
    """Branches that are projected and locked."""
    excision_share: float = Field(0.15, gt=0)
    """Excision rounds R2, as a share of the training rounds."""
    stabilisation_share: float = Field(0.05, ge=0)
    """Stabilisation rounds R3, as a share of the training rounds."""
    probe_round: int | None = Field(None, ge=0)
    """Class and sample requests: the training round whose state the columns are measured at. Unset, as printed: the
    trained model."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        self.check(trained.training)
        training, state = trained.training, trained.start
        reference = trained.start if self.reference == "trained" else trained.initial
        clients = retained_clients(request, federation)

        # Phase I, lines 1 to 8: gradient subspace decomposition.
        forget, retain, notes = self._columns(trained, request, federation)
        blocks = [block for block in state.blocks if self.modalities in ("both", block.modality)]
        spectra, bases = unique_bases(blocks, forget, retain, self.energy, self.delta)
        weights = {name: spectrum.unique(self.delta).double() for name, spectrum in spectra.items()}
        notes |= {"reference": self.reference, "delta": self.delta, "blocks": describe(spectra, weights)}
        if not isinstance(request, ClientRequest):
            yield Step(state, "decomposition", notes=notes)
            notes = {}
        # Lines 15 and 24: directions and reference are broadcast with the model. Eq. (12) is the clients' objective.
        lock = LockMessage(self.alpha, reference, pack_directions(bases)) if self.alpha else None

        # Lines 9 to 31.
        excision, total = share_of(training, self.excision_share), self._training_rounds(training)
        for number in range(1, total + 1):
            phase = "excision" if number <= excision else "stabilisation"
            if phase == "excision":  # Eq. (10), in every excision round, before the broadcast
                state, residuals = excise(state, reference, bases)
                notes |= {"residuals": residuals} if residuals else {}
            job = trained.job(number, self.name, request=request, data="retain", lock=lock)
            drawn = participants(clients, training, trained.seed, number)
            finished = average(state, federation.run(state, job, drawn), training, number)
            state = finished.state  # line 30
            last = number == total
            yield Step(state, phase, finished.loss, notes | exclusions(finished), bases=dict(bases) if last else None)
            notes = {}

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        probe = 0 if isinstance(request, ClientRequest) else 1
        return probe + self._training_rounds(training)

    def check(self, training: TrainingConfig) -> None:
        """Refuse a probe round that never was, and a lock that cannot contract: durability needs lr < 1 / (2 alpha)."""
        super().check(training)
        rate = max(training.learning_rate, training.lora_learning_rate or 0)
        if rate * self.alpha >= 0.5:
            raise UserError(
                f"alpha = {self.alpha:g}: at learning rate {rate:g} the lock cannot contract; "
                f"choose less than {0.5 / rate:g}"
            )
        if self.probe_round is not None and self.probe_round > training.rounds:
            raise UserError(f"probe_round = {self.probe_round}: the training has {training.rounds} rounds")

    def _training_rounds(self, training: TrainingConfig) -> int:
        return share_of(training, self.excision_share) + share_of(training, self.stabilisation_share)

    def _columns(
        self, trained: Trained, request: Request, federation: Federation
    ) -> tuple[Sequence[UpdateColumn], Sequence[UpdateColumn], dict[str, Any]]:
        """G_f and G_r of Eq. (5), and who was left out: stored updates of a leaving client and of the others; for
        classes and samples the change of one local epoch, from every holder and from every client."""
        if isinstance(request, ClientRequest):
            history, retained = trained.history, set(retained_clients(request, federation))
            history.require_updates()
            keys = history.columns(trained.training.rounds)
            forget, retain = (
                stored_columns(history, [key for key in keys if key[1] in clients])
                for clients in (request.clients, retained)
            )
            if not forget:
                names = ", ".join(map(str, request.clients))
                raise UserError(f"client {names}: no stored update, so there is nothing to decompose")
            return forget, retain, {}
        state = trained.start if self.probe_round is None else trained.history.state(self.probe_round)
        columns, rejected = dict[str, Sequence[UpdateColumn]](), dict[int, str]()
        for data in ("forget", "retain"):
            job = trained.job(0, f"{self.name}-{data}", request=request, data=data, epochs=1)
            asked = average(state, federation.run(state, job, federation.clients), trained.training, 0, clip=False)
            columns[data] = [Change(state, update.change) for update in asked.updates]
            rejected |= asked.rejected
        if not columns["forget"]:
            raise UserError(
                "no client holds two of the forget pairs, so none has a gradient to send; use --method ease"
            )
        return columns["forget"], columns["retain"], {"rejected": rejected} if rejected else {}


def unique_bases(
    blocks: Sequence[Block],
    forget: Sequence[UpdateColumn],
    retain: Sequence[UpdateColumn],
    energy: float,
    delta: float,
) -> tuple[dict[str, Spectrum], dict[str, Basis]]:
    """Each block's entanglement spectrum, Eqs. (6) and (7), and its unique basis B_u, Eq. (8)."""
    spectra = {block.name: block_spectrum(block, forget, retain, energy) for block in blocks}
    bases = {
        block.name: canonical_basis(block, forget, spectra[block.name]).weighted(
            spectra[block.name].unique(delta).double()
        )
        for block in blocks
    }
    return spectra, bases
