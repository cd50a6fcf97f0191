"""NoT: negate a layer, so that the model is far from where it was, and fine-tune it back on retained data."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods.base import Space, Step, Trained, Unlearner, fine_tuning, share_of
from ease.params import Block, Params
from ease.requests.request import Request


class NoT(Unlearner):
    """Turn the sign of the first layer's weights on the server, without any data, then fine-tune.

    Differs from the paper: the encoders are frozen, so the first trained layer of full rank is negated, the first of
    each projector, with its bias and in both modalities. The rounds are those of plain fine-tuning.
    """

    name: ClassVar[str] = "not"
    title: ClassVar[str] = "NoT"
    source: ClassVar[str] = "Khalil et al., CVPR 2025"
    tuned: ClassVar[Space] = {"share": (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)}
    method: Literal["not"] = "not"
    layers: tuple[str, ...] = ()
    """Layers or single tensors to negate; empty: the first layer of both projectors. Those whose negation changes
    nothing are refused."""
    share: float = Field(0.2, gt=0)
    """Fine-tuning rounds, as a share of the training rounds."""

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        chosen = self._tensors(trained.start.blocks)
        state = negate(trained.start, chosen)
        yield Step(state, "negation", notes={"negated": chosen})
        rounds = share_of(trained.training, self.share)
        yield from fine_tuning(trained, state, request, federation, rounds, "not")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + share_of(training, self.share)

    def _tensors(self, blocks: Sequence[Block]) -> list[str]:
        """Names of the tensors to negate, checked."""
        projectors = [[b for b in blocks if b.kind == "projector" and b.modality == side] for side in ("image", "text")]
        projectors = [layers for layers in projectors if layers]
        asked = self.layers or tuple(layers[0].name for layers in projectors)
        if not asked:
            names = ", ".join(block.name for block in blocks)
            raise UserError(f"layers: the model has no projector; name layers to negate, of: {names}")
        known = {name for block in blocks for name in (block.name, *block.tensors)}
        for name in asked:
            if name not in known:
                layers = ", ".join(block.name for block in blocks)
                raise UserError(f"layers: {name}: the model has no such layer or tensor; its layers are: {layers}")
        chosen = [name for block in blocks for name in block.tensors if {name, block.name} & set(asked)]
        for block in blocks:
            if block in [layers[-1] for layers in projectors] and set(block.tensors) & set(chosen):
                raise UserError(
                    f"layers: {block.name} is a last layer: negated in both modalities it changes no similarity, "
                    "in one it turns all of them around; choose an earlier layer"
                )
            if block.factored and set(block.tensors) <= set(chosen):
                raise UserError(
                    f"layers: {block.name}: its two factors negated leave their product as it was; name one of them, "
                    f"for example {block.tensors[0]}"
                )
        return chosen


def negate(params: Params, names: Sequence[str]) -> Params:
    """The state with the sign of some tensors turned."""
    return params.replace({name: -params[name] for name in names})
