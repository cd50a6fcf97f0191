"""What travels between server and clients: jobs out, updates back, and the rules an update must obey."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ease.config import Config
from ease.federation.sparse import Sparse
from ease.params import Params
from ease.requests.request import Request
from ease.subspace import Basis


class Optimiser(Config):
    kind: Literal["sgd", "adam", "sophia"] = "sgd"
    """Plain SGD, or Adam or Sophia with a state that is reset every round."""
    learning_rate: float = Field(1.0, gt=0)
    lora_learning_rate: float | None = Field(None, gt=0)
    """Step size of the LoRA blocks; absent means the same as for the projectors."""

    def scaled(self, factor: float) -> "Optimiser":
        """The same optimiser with other step sizes."""
        lora = None if self.lora_learning_rate is None else self.lora_learning_rate * factor
        return Optimiser(kind=self.kind, learning_rate=self.learning_rate * factor, lora_learning_rate=lora)


@dataclass(frozen=True)
class Lock:
    """The Forget Lock on the client's side: strength · ||B_u^T (w - w_ref)||² per block."""

    strength: float
    bases: Mapping[str, Basis]
    """Block name -> directions, as the client uses them."""
    packed: Mapping[str, Tensor]
    """The same as sent: quantised values and their scales."""
    reference: Params
    key: str
    """Names the lock, so that it is sent to each client once."""
    importance: Params | None = None
    """Axis-aligned alternative: weights per value instead of directions."""

    @property
    def dense(self) -> bool:
        """Whether every direction is a plain vector, not a product of factors."""
        return all(isinstance(basis.directions, Tensor) for basis in self.bases.values())

    def to(self, device: torch.device) -> "Lock":
        """The lock as a client uses it, on the client's device."""
        bases = {name: basis.to(device) for name, basis in self.bases.items()}
        importance = None if self.importance is None else self.importance.to(device)
        return replace(self, bases=bases, reference=self.reference.to(device), importance=importance)


@dataclass(frozen=True)
class LocalJob:
    """What a client is asked to do, as data: it can be sent, stored and compared."""

    round: int
    seed: int
    stream: str
    """Names the random stream, so training, probes and recovery never share numbers."""
    optimiser: Optimiser
    epochs: int
    batch_size: int
    temperature: float
    request: Request | None = None
    data: Literal["all", "retain", "forget"] = "all"
    objective: str = "align"
    """Name of the local objective, see `objectives.py`; `probe` asks for one update of each kind of pair."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Numbers the objective or the encoding needs, by name."""
    lock: Lock | None = None
    targets: Mapping[int, Tensor] = field(default_factory=dict)
    """Client -> one number per forget pair of that client; each client is sent its own alone."""
    reference: Params | None = None
    """A state that the objective compares with. A client is sent it once and keeps it."""
    clip: float | None = None
    """Largest norm of a step's gradient."""
    radius: float | None = None
    """How far local training may go from where it starts; beyond, it is projected back."""
    encoding: Literal["dense", "ternary"] = "dense"
    """How the change travels back; the receiver of ternary values decodes them, see `ternary.py`."""
    sparse: Sparse | None = None
    """The state that is sent is an adapter over this frozen base, and so is the change that comes back."""

    def batch_count(self, pairs: int) -> int:
        """Batches in an epoch over so many pairs; a batch of one pair would have no negatives at all."""
        return max(1, min(round(pairs / self.batch_size), pairs // 2))


@dataclass(frozen=True)
class Update:
    """A client's answer: its change of the parameters, or only values if it was asked to measure."""

    client: int
    pairs: int
    delta: Params | None
    values: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def change(self) -> Params:
        """The change of parameters, of an update that is known to carry one."""
        assert self.delta is not None
        return self.delta

    def message(self) -> dict[str, Tensor]:
        """The tensors as they are sent."""
        return {**(self.delta.tensors if self.delta is not None else {}), **self.values}


def to_8bit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """8-bit values with one scale for each tensor."""
    packed = {}
    for name, tensor in tensors.items():
        scale = tensor.abs().max().float() / 127
        packed[name] = torch.round(tensor / scale.clamp_min(1e-30)).to(torch.int8)
        packed[f"{name}:scale"] = scale
    return packed


def from_8bit(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the receiver of packed tensors works with."""
    names = [name for name in packed if not name.endswith(":scale")]
    return {name: packed[name].float() * packed[f"{name}:scale"] for name in names}


class Federation(Protocol):
    """Runs a job on clients. In-process, metered, journaled or over a network: the caller cannot tell."""

    @property
    def clients(self) -> Sequence[int]: ...

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]: ...


def reject_reason(update: Update, params: Params, norm_bound: float) -> str | None:
    """Why an update must not be averaged, or None when it is sound."""
    if update.pairs <= 0:
        return f"it reports {update.pairs} pairs"
    if update.delta is None:
        return "it carries no parameters"
    if update.delta.tensors.keys() != params.tensors.keys():
        return "its tensor names differ from the model's"
    for name, tensor in update.delta.tensors.items():
        if tensor.shape != params[name].shape:
            return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(params[name].shape)}"
        if tensor.dtype != params[name].dtype:
            return f"{name} has dtype {tensor.dtype}, expected {params[name].dtype}"
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} has non-finite values"
    norm = update.delta.norm()
    if norm > norm_bound:
        return f"its norm {norm:.3g} exceeds the bound {norm_bound:.3g}"
    return None
