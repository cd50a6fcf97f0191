"""What an answer leaves for the next request: the state before its recovery, and the sums that clients reported.

Every request recovers anew from this state. If each request started from the recovered model of the one before, the
model would be trained further with every request, and what was forgotten would return with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ease.errors import UserError
from ease.params import Params, block_from, fits
from ease.storage import read_noted, write_tensors


@dataclass(frozen=True)
class ClientReport:
    """A client's sum of replayed updates, as it was sent."""

    values: Mapping[str, Tensor]
    share: float
    """Sum of the factors of its rounds. They change when clients leave later."""
    longest: float
    """Largest norm that the server accepts."""


@dataclass(frozen=True)
class UnlearningBase:
    """Stored with an answer, for the answer after it."""

    state: Params
    """The model without all contributions subtracted so far, before any recovery."""
    reports: Mapping[int, ClientReport] = field(default_factory=dict)
    """Client -> its report, for clients whose stored updates were trained on forgotten pairs."""

    def save(self, path: Path) -> None:
        tensors = {f"state:{name}": tensor for name, tensor in self.state.tensors.items()}
        for client, report in self.reports.items():
            tensors |= {f"{client}:{name}": tensor for name, tensor in report.values.items()}
        numbers = {str(client): [report.share, report.longest] for client, report in self.reports.items()}
        write_tensors(path, tensors, {"blocks": [vars(block) for block in self.state.blocks], "reports": numbers})

    @classmethod
    def load(cls, path: Path) -> "UnlearningBase":
        tensors, note = read_noted(path)
        try:
            blocks = tuple(block_from(fields) for fields in note["blocks"])
            state = {name: tensors[f"state:{name}"] for block in blocks for name in block.tensors}
            if not fits(blocks, state):
                raise ValueError("its tensors do not match its block list")
            reports = {}
            for client, (share, longest) in note["reports"].items():
                start = f"{int(client)}:"
                values = {name.removeprefix(start): tensors[name] for name in tensors if name.startswith(start)}
                reports[int(client)] = ClientReport(values, float(share), float(longest))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not the unlearning base of an answer ({error}); restore it") from error
        return cls(Params(state, blocks), reports)
