"""The Forget Lock on the client's side: what is sent of it, and the pull that a client computes from that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ease.config import Config
from ease.federation.container import (
    FLOATS,
    LIMITS,
    Limits,
    content_hash,
    pack,
    packed_length,
    require,
    state_of,
    unpack,
)
from ease.params import Block, Params, same_tensors
from ease.subspace import Basis, Factors, displacement

WEIGHTS = ":weights"
DENSE = {":directions": 2, ":scales": 1, WEIGHTS: 1}
"""Tensors sent for a block's plain directions: end of the name -> dimensions."""
FACTORED = {":left": 3, ":left_scales": 1, ":right": 3, ":right_scales": 1, ":coefficients": 2, WEIGHTS: 1}
"""The same where directions are made of products of factors."""


class LockHeader(Config):
    """A lock without its tensors."""

    kind: Literal["lock"] = "lock"
    strength: float
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class LockMessage:
    """Penalty strength · ||B_u^T (w - w_ref)||² of each block, as it is sent."""

    strength: float
    reference: Params
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    """Directions of each block in 8 bit with a scale each, their weights and, for trained factors, coefficients."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LockMessage):
            return NotImplemented
        return self is other or (
            (self.strength, self.reference) == (other.strength, other.reference)
            and same_tensors(dict(sorted(self.packed.items())), dict(sorted(other.packed.items())))
        )

    def __hash__(self) -> int:
        return hash((self.strength, self.reference, frozenset(self.packed)))

    @cached_property
    def key(self) -> str:
        """Names the lock by its content."""
        return content_hash(self.encode())

    def encode(self) -> bytes:
        return pack(*self._content())

    def encoded_length(self) -> int:
        return packed_length(*self._content())

    def _content(self) -> tuple[LockHeader, dict[str, Tensor]]:
        return LockHeader(strength=self.strength, blocks=self.reference.blocks), {
            **{f"reference/{name}": tensor for name, tensor in self.reference.tensors.items()},
            **{f"packed/{name}": tensor for name, tensor in self.packed.items()},
        }

    @classmethod
    def decode(cls, data: bytes, what: str = "lock", limits: Limits = LIMITS) -> "LockMessage":
        """The lock that was sent, checked: each of its blocks has directions of the right size."""
        header, tensors = unpack(data, LockHeader, what, limits)
        sections: dict[str, dict[str, Tensor]] = {"reference": {}, "packed": {}}
        for name, tensor in tensors.items():
            section, _, rest = name.partition("/")
            require(section in sections, what, f"{name!r} belongs to no lock")
            sections[section][rest] = tensor
        reference = state_of(header.blocks, sections["reference"], what)
        packed = _ordered(sections["packed"], reference, what)
        return cls(header.strength, reference, packed)

    @cached_property
    def _bases(self) -> dict[str, Basis]:
        """Block name -> directions, expanded once for all clients that share this process."""
        names = [name.removesuffix(WEIGHTS) for name in self.packed if name.endswith(WEIGHTS)]
        return {name: _basis(name, self.packed) for name in names}

    def on(self, device: torch.device | str) -> "ClientLock":
        """The directions with which a client computes, on its device, derived from the message."""
        bases = {name: basis.to(torch.device(device)) for name, basis in self._bases.items()}
        return ClientLock(self.strength, bases, self.reference.to(device))


@dataclass(frozen=True)
class ClientLock:
    """A lock as a client computes with it."""

    strength: float
    bases: Mapping[str, Basis]
    """Block name -> directions."""
    reference: Params

    @property
    def dense(self) -> bool:
        """Whether every direction is a plain vector, not a product of factors."""
        return all(isinstance(basis.directions, Tensor) for basis in self.bases.values())


def pack_directions(bases: Mapping[str, Basis]) -> dict[str, Tensor]:
    """Directions as they are sent: 8-bit values and one scale for each direction or factor."""
    packed: dict[str, Tensor] = {}
    for name, basis in bases.items():
        if basis.count == 0:
            continue
        if isinstance(basis.directions, Tensor):
            values, scales = zip(*(rounded(column) for column in basis.directions.T), strict=True)
            packed |= {f"{name}:directions": torch.stack(values, dim=1), f"{name}:scales": torch.stack(scales)}
        else:
            for side in ("left", "right"):
                values, scales = zip(*(rounded(getattr(factors, side)) for factors in basis.directions), strict=True)
                packed |= {f"{name}:{side}": torch.stack(values), f"{name}:{side}_scales": torch.stack(scales)}
            packed[f"{name}:coefficients"] = basis.coefficients
        packed[f"{name}{WEIGHTS}"] = basis.weights
    return packed


def _basis(name: str, packed: Mapping[str, Tensor]) -> Basis:
    """The directions of a block from what was sent of them."""
    weights = packed[f"{name}{WEIGHTS}"]
    if f"{name}:directions" in packed:
        directions = packed[f"{name}:directions"].float() * packed[f"{name}:scales"]
        return Basis(directions, torch.zeros(0, len(weights)), weights)
    sides = (
        [
            (values.float() * scale).double()
            for values, scale in zip(packed[f"{name}:{side}"], packed[f"{name}:{side}_scales"], strict=True)
        ]
        for side in ("left", "right")
    )
    factors = tuple(Factors(left, right) for left, right in zip(*sides, strict=True))
    return Basis(factors, packed[f"{name}:coefficients"], weights)


def _ordered(packed: Mapping[str, Tensor], reference: Params, what: str) -> dict[str, Tensor]:
    """The received directions, checked, by block in the order of the reference."""
    ordered: dict[str, Tensor] = {}
    for block in reference.blocks:
        ends = DENSE if f"{block.name}:directions" in packed else FACTORED
        found = {end: packed[f"{block.name}{end}"] for end in ends if f"{block.name}{end}" in packed}
        if not found:
            continue
        problem = f"what it says of {block.name} does not fit"
        require(found.keys() == ends.keys(), what, problem)
        require(all(tensor.dim() == ends[end] for end, tensor in found.items()), what, problem)
        kinds = {end: {torch.int8} if end in (":directions", ":left", ":right") else FLOATS for end in ends}
        require(all(tensor.dtype in kinds[end] for end, tensor in found.items()), what, problem)
        count = len(found[WEIGHTS])
        if ends is DENSE:
            values = sum(reference[name].numel() for name in block.tensors)
            sizes_fit = found[":directions"].shape == (values, count) and len(found[":scales"]) == count
        else:
            columns = len(found[":left"])
            a, b = (reference[name] for name in block.tensors) if block.factored else (torch.empty(0, 0),) * 2
            sizes_fit = (
                block.factored
                and found[":coefficients"].shape == (columns, count)
                and len(found[":right"]) == len(found[":left_scales"]) == len(found[":right_scales"]) == columns
                and found[":left"].shape[1:] == (b.shape[0], found[":right"].shape[1])
                and found[":right"].shape[2] == a.shape[1]
            )
        require(sizes_fit, what, problem)
        ordered |= {f"{block.name}{end}": tensor for end, tensor in found.items()}
    require(len(ordered) == len(packed), what, "it has directions of blocks that its reference does not have")
    return ordered


def lock_pulls(tensors: Mapping[str, Tensor], lock: ClientLock) -> dict[str, Tensor]:
    """Pi_u (w - w_ref) of every locked tensor."""
    pulls: dict[str, Tensor] = {}
    for block in lock.reference.blocks:
        if block.name in lock.bases:
            pulls |= lock_pull(block, tensors, lock)
    return pulls


def lock_pull(block: Block, tensors: Mapping[str, Tensor], lock: ClientLock) -> dict[str, Tensor]:
    """Pi_u (w - w_ref) of one block by tensor; for trained factors the chain rule takes it to B and to A."""
    basis = lock.bases[block.name]
    state = Params({name: tensors[name].detach() for name in block.tensors}, (block,))
    amounts = basis.weights * basis.components(displacement(block, state, lock.reference))
    if isinstance(basis.directions, Tensor):
        pull = basis.directions @ amounts.to(basis.directions)
        parts = pull.split([tensors[name].numel() for name in block.tensors])
        return {name: part.view_as(tensors[name]) for name, part in zip(block.tensors, parts, strict=True)}
    a, b = block.tensors
    gamma = basis.coefficients @ amounts
    grad_a, grad_b = torch.zeros_like(tensors[a]), torch.zeros_like(tensors[b])
    for weight, column in zip(gamma.tolist(), basis.directions, strict=True):
        left, right = column.left.to(grad_b), column.right.to(grad_a)
        grad_b += weight * left @ (right @ tensors[a].T)
        grad_a += weight * (tensors[b].T @ left) @ right
    return {a: grad_a, b: grad_b}


def rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The values in 8 bit, enough where only directions matter, and the number they are multiplied with."""
    scale = tensor.abs().max().float() / 127
    return torch.round(tensor / scale.clamp_min(1e-30)).to(torch.int8), scale
