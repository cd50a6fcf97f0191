"""What an answer must hold, declared beside each objective as a value, and why an answer is not taken."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ease.federation.protocol import NOT_FINITE, LocalJob, Update, reject_reason
from ease.params import Params, finite

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class Value:
    """One tensor of an answer: its shape, its type and the range of its numbers."""

    shape: tuple[int | None, ...] = ()
    """None means any length."""
    dtype: torch.dtype | None = None
    """Absent: any kind of float."""
    least: float = -math.inf
    most: float = math.inf

    def fault(self, name: str, tensor: Tensor) -> str | None:
        """Why a tensor is not this value, or None when it is."""
        lengths = zip(tensor.shape, self.shape, strict=False)
        if len(tensor.shape) != len(self.shape) or any(wanted not in (None, length) for length, wanted in lengths):
            wanted = tuple("any" if length is None else length for length in self.shape)
            return f"{name} has shape {tuple(tensor.shape)}, expected {wanted}"
        if tensor.dtype != self.dtype and (self.dtype is not None or tensor.dtype not in FLOATS):
            return f"{name} has dtype {tensor.dtype}, expected {self.dtype or 'a float'}"
        if not finite(tensor):
            return f"{name} {NOT_FINITE}"
        if tensor.numel() and not self.least <= float(tensor.min()) <= float(tensor.max()) <= self.most:
            return f"{name} has values outside of {self.least:g} to {self.most:g}, which no model gives"
        return None


Form = Mapping[str, Value]
"""Tensors of an answer by their names."""


@dataclass(frozen=True)
class Expected:
    """What an answer holds beside the number of its pairs."""

    change: bool = False
    """A change of the parameters, like the state that was sent."""
    values: Form = field(default_factory=dict)
    groups: tuple[Form, ...] = ()
    """Further values; each group is there as a whole or not at all."""
    abstains: bool = True
    """Whether a client may have nothing to say: no pairs, no change and no values."""
    fault: Callable[[Update], str | None] | None = None
    """What else must hold of an answer whose values have these forms: why it does not, or None."""


LARGEST_LOSS = 1e6
"""Bound, on either side, of a loss whose objective declares none: its mean over clients must stay a number."""
ROUNDING = 1.02
"""How far a bound is exceeded where embeddings of unit norm are rounded to half precision."""
TRAINED = Expected(change=True, values={"loss": Value(least=-LARGEST_LOSS, most=LARGEST_LOSS)})
"""The answer to a job that trains."""


def contrasted(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    """The answer to a job that minimises InfoNCE: a cross-entropy over n pairs whose logits differ by at most
    2 / temperature, so it is between 0 and log n + 2 / temperature."""
    batch = max(2, min(pair_count, 2 * job.batch_size))  # the last pairs join a batch instead of forming a small one
    most = ROUNDING * (math.log(batch) + 2 / job.temperature)
    return Expected(change=True, values={"loss": Value((), least=-1e-3, most=most)})


def answer_fault(update: Update, expected: Expected | None, state: Params, pair_count: int) -> str | None:
    """Why an answer must not be used, or None when it is sound; of one that no one has declared, what can be said.

    `pair_count` is the number of pairs that the client has.
    """
    if not isinstance(update.pairs, int) or isinstance(update.pairs, bool):
        return f"it reports {update.pairs!r} pairs, and a whole number is expected"
    if not 0 <= update.pairs <= pair_count:
        return f"it reports {update.pairs} pairs and holds {pair_count}"
    if reason := _type_fault(update):
        return reason
    if update.pairs == 0 and update.delta is None and not update.values and (expected is None or expected.abstains):
        return None
    if expected is None:
        finite = all(bool(torch.isfinite(value).all()) for value in update.values.values())
        return None if finite else f"it {NOT_FINITE}"
    if expected.change:
        reason = reject_reason(update, state)
        if reason is not None:
            return reason
    elif update.delta is not None:
        return "it contains parameters, and only values were requested"
    reason = _values_fault(update.values, expected)
    return expected.fault(update) if reason is None and expected.fault is not None else reason


def _type_fault(update: Update) -> str | None:
    """Why an answer is malformed: engines of other packages need not check what they pass on."""
    if not isinstance(update.delta, Params | None):
        return f"its change is a {type(update.delta).__name__}, and parameters are expected"
    strange = [name for name, value in update.values.items() if not isinstance(value, Tensor)]
    return f"its value {str(strange[0])[:80]!r} is not a tensor" if strange else None


def _values_fault(values: Mapping[str, Tensor], expected: Expected) -> str | None:
    present = [group for group in expected.groups if not values.keys().isdisjoint(group)]
    wanted: dict[str, Value] = dict(expected.values)
    for group in present:
        wanted |= group
    if values.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
        return f"its values lack {missing[0]!r}" if missing else f"its values hold {extra[0][:80]!r}, which is unknown"
    return next((reason for name, value in wanted.items() if (reason := value.fault(name, values[name]))), None)
