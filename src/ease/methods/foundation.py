"""What later requests build on, once one is closed: the state before its recovery, and what clients would have sent.

Recovery is made anew for every request. Were each to begin from the recovered model of the one before, the model would
be trained on with every request, and what was forgotten would come back with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ease.errors import UserError
from ease.params import Params, block_from, fits
from ease.storage import read_noted, write_tensors


@dataclass(frozen=True)
class Told:
    """What a client told of its rounds without what is gone: two sums as they were sent, of early and of late rounds.

    Each round counts by its share in the sum; the shares are added up too, for clients that leave later change them.
    """

    values: Mapping[str, Tensor]
    shares: tuple[float, float]
    longest: tuple[float, float]
    """How long each sum may be to be believed."""


@dataclass(frozen=True)
class Foundation:
    """Kept with an answer, for the answer after it."""

    state: Params
    """The model without what was subtracted so far, before any recovery."""
    told: Mapping[int, Told] = field(default_factory=dict)
    """Client -> what it told, of those whose stored updates hold pairs that are gone."""

    def save(self, path: Path) -> None:
        tensors = {f"state:{name}": tensor for name, tensor in self.state.tensors.items()}
        for client, told in self.told.items():
            tensors |= {f"{client}:{name}": tensor for name, tensor in told.values.items()}
        numbers = {str(client): [*told.shares, *told.longest] for client, told in self.told.items()}
        write_tensors(path, tensors, {"blocks": [vars(block) for block in self.state.blocks], "told": numbers})

    @classmethod
    def load(cls, path: Path) -> "Foundation":
        tensors, note = read_noted(path)
        try:
            blocks = tuple(block_from(fields) for fields in note["blocks"])
            state = {name: tensors[f"state:{name}"] for block in blocks for name in block.tensors}
            if not fits(blocks, state):
                raise ValueError("its tensors do not match its block list")
            told = {}
            for client, (early, late, most_early, most_late) in note["told"].items():
                start = f"{int(client)}:"
                values = {name.removeprefix(start): tensors[name] for name in tensors if name.startswith(start)}
                told[int(client)] = Told(values, (float(early), float(late)), (float(most_early), float(most_late)))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not what an answer leaves to the next ({error}); restore it") from error
        return cls(Params(state, blocks), told)
