"""The trainable state of a model as a value: named tensors grouped in blocks, each with modality and kind."""

import builtins
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ease.errors import UserError
from ease.storage import RESTORE, read_noted, tensor_bytes, tensors_in, write_atomic

Modality = Literal["image", "text"]
Kind = Literal["lora", "projector", "closed_form", "sums"]
"""The kind of a block: adapters and projectors are trained, closed-form maps are solved from sums."""


@dataclass(frozen=True)
class Block:
    """One adapted layer: the unit in which subspaces are compared and excised."""

    name: str
    modality: Modality
    kind: Kind
    tensors: tuple[str, ...]
    """Names of its tensors. A LoRA block holds `B` alone (A shared and frozen) or the factors `A` and `B`."""

    @property
    def factored(self) -> bool:
        """Both factors are trained, so the block's effective matrix is the product B·A."""
        return self.kind == "lora" and len(self.tensors) == 2


@dataclass(frozen=True)
class Params:
    """Immutable named tensors. Arithmetic is element by element and keeps the blocks."""

    tensors: Mapping[str, Tensor]
    blocks: tuple[Block, ...]

    def __repr__(self) -> str:
        return f"Params({self.size:,} values in {len(self.blocks)} blocks)"

    def __eq__(self, other: object) -> bool:
        """The same tensors, bit for bit, in the same order, and the same blocks."""
        if not isinstance(other, Params):
            return NotImplemented
        return self is other or (self.blocks == other.blocks and same_tensors(self.tensors, other.tensors))

    def __hash__(self) -> int:
        """The hash depends only on the layout: equal states have equal hashes, and no value needs to be read."""
        return hash((self.blocks, layout_of(self.tensors)))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __add__(self, other: "Params") -> "Params":
        return self.zip(torch.add, other)

    def __sub__(self, other: "Params") -> "Params":
        return self.zip(torch.sub, other)

    def __mul__(self, factor: float) -> "Params":
        return self.map(lambda tensor: tensor * factor)

    __rmul__ = __mul__

    def __neg__(self) -> "Params":
        return self * -1.0

    def map(self, function: Callable[[Tensor], Tensor]) -> "Params":
        return Params({name: function(tensor) for name, tensor in self.tensors.items()}, self.blocks)

    def zip(self, function: Callable[[Tensor, Tensor], Tensor], other: "Params") -> "Params":
        return Params({name: function(tensor, other[name]) for name, tensor in self.tensors.items()}, self.blocks)

    def replace(self, tensors: Mapping[str, Tensor]) -> "Params":
        """The same state with some tensors exchanged."""
        return Params({**self.tensors, **tensors}, self.blocks)

    def to(self, device: torch.device | str) -> "Params":
        return self.map(lambda tensor: tensor.to(device))

    def zeros(self) -> "Params":
        return self.map(torch.zeros_like)

    def dot(self, other: "Params") -> float:
        """Euclidean inner product in float64; the sum is exact, so the order of the tensors does not show in it."""
        return math.fsum(
            float(torch.dot(tensor.double().flatten(), other[name].double().flatten()))
            for name, tensor in self.tensors.items()
        )

    def norm(self) -> float:
        values = (tensor.double().flatten() for tensor in self.tensors.values())
        squared = math.fsum(float(torch.dot(each, each)) for each in values)
        return float(squared**0.5)  # not math.sqrt: it rounds otherwise

    def within(self, most: float) -> "Params":
        """The same if its norm is at most so large, else shortened to it."""
        norm = self.norm()
        return self if norm <= most else self * (most / norm)

    def is_finite(self) -> bool:
        return all(finite(tensor) for tensor in self.tensors.values())

    @property
    def size(self) -> int:
        """Number of trainable values."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Size of only the tensors; a message adds its header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def vector(self, block: Block) -> Tensor:
        """A block's tensors as one flat vector."""
        return torch.cat([self[name].flatten() for name in block.tensors])

    def save(self, path: Path, durable: bool = True, about: Mapping[str, Any] | None = None) -> str:
        """Write the state and return the file's SHA-256; `about` is stored in the header for other readers."""
        content = tensor_bytes(dict(self.tensors), {**(about or {}), **self._note()})
        write_atomic(path, content, durable)
        return hashlib.sha256(content).hexdigest()

    def file_bytes(self) -> builtins.bytes:
        """What `save` writes."""
        return tensor_bytes(dict(self.tensors), self._note())

    @classmethod
    def from_bytes(cls, data: builtins.bytes) -> "Params":
        """The state that `file_bytes` gave, of bytes that are known to be whole."""
        tensors, note = tensors_in(data)
        blocks = tuple(block_from(fields) for fields in note["blocks"])
        return cls({name: tensors[name] for block in blocks for name in block.tensors}, blocks)

    def _note(self) -> dict[str, Any]:
        return {"blocks": [vars(block) for block in self.blocks]}

    @classmethod
    def load(cls, path: Path, sha256: str | None = None, remedy: str = RESTORE) -> "Params":
        """Read a state and check it against its recorded SHA-256, or against its own seal if none is given.

        Tensors are put in the order of the blocks, so that sums over them are reproducible.
        """
        tensors, note = read_noted(path, sha256, remedy)
        blocks = blocks_of(path, note, tensors)
        return cls({name: tensors[name] for block in blocks for name in block.tensors}, blocks)


def finite(tensor: Tensor) -> bool:
    """Whether every value is finite. Minimum and maximum suffice, because NaN is both of them. One pass, nothing
    kept."""
    return tensor.numel() == 0 or all(math.isfinite(end) for end in tensor.aminmax())


Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Names, shapes and types of tensors, in their order."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def same_tensors(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are alike to the bit, in layout and values; no number equals itself here too."""
    return layout_of(one) == layout_of(two) and all(
        tensor is two[name] or torch.equal(_bits(tensor), _bits(two[name]).to(tensor.device))
        for name, tensor in one.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def blocks_of(path: Path, note: Mapping[str, Any], names: Iterable[str]) -> tuple[Block, ...]:
    """The block list in the note of a file, checked against the names of its tensors."""
    if "blocks" not in note:
        raise UserError(f"{path}: not a parameter file of this tool (no block list in its header)")
    try:
        blocks = tuple(block_from(fields) for fields in note["blocks"])
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: its block list is malformed ({error}); the file was altered, restore it") from error
    if not fits(blocks, names):
        raise UserError(f"{path}: its tensors do not match its block list; the file was altered, restore it")
    return blocks


def fits(blocks: tuple[Block, ...], names: Iterable[str]) -> bool:
    """Whether blocks list exactly these tensors, each once, under names of their own."""
    listed = [name for block in blocks for name in block.tensors]
    return sorted(listed) == sorted(names) and len({block.name for block in blocks}) == len(blocks)


def block_from(fields: dict[str, Any]) -> Block:
    """A block from its JSON form, checked."""
    block = Block(**{**fields, "tensors": tuple(fields["tensors"])})
    if block.modality not in get_args(Modality) or block.kind not in get_args(Kind):
        raise ValueError(f"unknown modality {block.modality!r} or kind {block.kind!r}")
    if not all(isinstance(name, str) for name in (block.name, *block.tensors)):
        raise TypeError("names must be text")
    return block


def weighted_mean(values: Iterable[tuple[float, Params]]) -> Params:
    """Weighted mean, accumulated in float64 in the order given; callers sort, so the result is reproducible."""
    total, first = 0.0, None
    sums: dict[str, Tensor] = {}
    for weight, params in values:
        first = first or params
        total += weight
        for name, tensor in params.tensors.items():
            weighed = tensor.to(torch.double, copy=True).mul_(weight)
            sums[name] = sums[name].add_(weighed) if name in sums else weighed
    if first is None or total <= 0:
        raise UserError("no update to aggregate: every client of the round was absent or rejected")
    return Params({name: (value / total).to(first[name].dtype) for name, value in sums.items()}, first.blocks)
