"""The columns of a decomposition, read block by block, and the spectrum they have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ease.federation.history import History, read_block
from ease.params import Block, Params
from ease.subspace import Basis, Column, Spectrum, decompose, displacement, gram, make_basis

TILE_BYTES = 1 << 29


class Evidence(Protocol):
    """One update, read block by block."""

    def column(self, block: Block) -> Column: ...


@dataclass(frozen=True)
class StoredUpdate:
    """A client's update of one training round, on disk."""

    history: History
    round: int
    client: int

    def column(self, block: Block) -> Column:
        delta = self.history.update_block(self.round, self.client, block)
        if not block.factored:
            return torch.cat([delta[name].flatten() for name in block.tensors])
        before = read_block(self.history.state_path(self.round - 1), block)
        after = {name: before[name] + delta[name] for name in block.tensors}
        return displacement(block, Params(after, (block,)), Params(before, (block,)))


@dataclass(frozen=True)
class Change:
    """A change from a state, in memory."""

    before: Params
    delta: Params

    def column(self, block: Block) -> Column:
        return displacement(block, self.before + self.delta, self.before)


def block_spectrum(block: Block, forget: Sequence[Evidence], retain: Sequence[Evidence], energy: float) -> Spectrum:
    """Decompose one block, with at most a tile of columns in memory."""
    everything = [*forget, *retain]
    first = everything[0].column(block)
    size = first.numel() * 4 if isinstance(first, Tensor) else (first.left.numel() + first.right.numel()) * 4
    tile = max(1, TILE_BYTES // size)
    tiles = [everything[start : start + tile] for start in range(0, len(everything), tile)]
    rows: list[list[Tensor]] = []
    for i, left_tile in enumerate(tiles):
        left = [evidence.column(block) for evidence in left_tile]
        row = [rows[j][i].T for j in range(i)]
        row += [gram(left, left)]
        row += [gram(left, [evidence.column(block) for evidence in right_tile]) for right_tile in tiles[i + 1 :]]
        rows.append(row)
    square = torch.cat([torch.cat(row, dim=1) for row in rows])
    f = len(forget)
    return decompose(square[:f, :f], square[:f, f:], square[f:, f:], energy)


def canonical_basis(block: Block, forget: Sequence[Evidence], spectrum: Spectrum) -> Basis:
    """All canonical directions of the forget subspace, from coefficient vectors over the forget columns."""
    columns = [evidence.column(block) for evidence in forget]
    return make_basis(columns, spectrum.coefficients, torch.ones_like(spectrum.cosines))
