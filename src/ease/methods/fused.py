"""FUSED: find the layers that react most, and train a sparse adapter over them while the model stays as it is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from ease.federation.fedavg import TrainingConfig, average, participants
from ease.federation.protocol import Federation, Update
from ease.federation.sparse import Sparse
from ease.methods.base import Space, Step, Trained, Unlearner, retained_clients, share_of, step_of
from ease.params import Block, Params
from ease.requests.request import Request
from ease.subspace import Factors, displacement


class Fused(Unlearner):
    """One round shows which layers change most. Over these a random sparse adapter is trained on retained data; it
    alone travels, and dropping it brings the old model back.

    Differs from the paper: a leaving client is not asked in the first round. Layers are ranked by the mean change of
    a value instead of the sum, which would choose the largest. A pair of LoRA factors counts as its product. Each
    modality has at least one layer.
    """

    name: ClassVar[str] = "fused"
    title: ClassVar[str] = "FUSED"
    source: ClassVar[str] = "Zhong et al., CVPR 2025"
    tuned: ClassVar[Space] = {"layers": (2, 4, 8), "density": (0.03, 0.1, 0.3), "share": (0.2, 0.4)}
    method: Literal["fused"] = "fused"
    layers: int = Field(4, ge=2)
    """Layers that get an adapter."""
    density: float = Field(0.1, gt=0, le=1)
    """Share of the values of these layers that is trained."""
    share: float = Field(0.4, gt=0)
    """Rounds of adapter training, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        training, base = trained.training, trained.start
        clients = retained_clients(request, federation)
        job = trained.job(0, "fused", request=request, data="retain")

        drawn = participants(clients, training, trained.seed, 0)
        probed = average(base, federation.run(base, job, drawn), training, 0)
        changes = mean_changes(base, probed.updates)
        chosen = critical(base.blocks, changes, self.layers)
        notes = {"layers": [block.name for block in chosen], "changes": changes}
        step = step_of(probed, "critical layers")
        yield Step(base, step.phase, step.loss, {**step.notes, **notes})

        sparse = Sparse(base, chosen, self.density, trained.seed)
        adapter = sparse.zeros()
        for number in range(1, self.rounds(training, request)):
            drawn = participants(clients, training, trained.seed, number)
            answers = federation.run(adapter, replace(job, round=number, sparse=sparse), drawn)
            finished = average(adapter, answers, training, number)
            adapter = finished.state
            step = step_of(finished, "adapter")
            yield Step(Params(sparse.expand(adapter.tensors), base.blocks), step.phase, step.loss, step.notes)

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + share_of(training, self.share)


def mean_changes(base: Params, updates: Sequence[Update]) -> dict[str, float]:
    """Block name -> mean absolute change of a value, averaged over the clients by their pairs."""
    total = sum(update.pairs for update in updates)
    changes = dict.fromkeys((block.name for block in base.blocks), 0.0)
    for update in updates:
        after = base + update.change
        for block in base.blocks:
            change = displacement(block, after, base)
            values = change.left @ change.right if isinstance(change, Factors) else change
            changes[block.name] += update.pairs / total * float(values.abs().mean())
    return changes


def critical(blocks: Sequence[Block], changes: Mapping[str, float], count: int) -> tuple[Block, ...]:
    """The layers that change most, the first of each modality among them, in the model's order."""
    ranked = sorted(blocks, key=lambda block: -changes[block.name])
    firsts = [next(block for block in ranked if block.modality == side) for side in ("image", "text")]
    chosen = [*firsts, *(block for block in ranked if block not in firsts)][:count]
    return tuple(block for block in blocks if block in chosen)
