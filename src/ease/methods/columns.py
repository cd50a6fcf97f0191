"""Updates as columns of a decomposition, and the entanglement spectrum of each block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ease.federation.history import History, read_block
from ease.params import Block, Params
from ease.subspace import Basis, Column, Spectrum, decompose, displacement, gram, make_basis

TILE_BYTES = 1 << 29
"""Columns of one block in memory at a time."""
WHOLE_BYTES = 1 << 30
"""Updates up to this total size are read once; larger ones are read, and hashed, anew for every block."""


class UpdateColumn(Protocol):
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
        before = read_block(self.history.start_path(self.round), block)
        after = {name: before[name] + delta[name] for name in block.tensors}
        return displacement(block, Params(after, (block,)), Params(before, (block,)))


@dataclass(frozen=True)
class Change:
    """A change from a state, in memory."""

    before: Params
    delta: Params

    def column(self, block: Block) -> Column:
        return displacement(block, self.before + self.delta, self.before)


def stored_columns(history: History, keys: Sequence[tuple[int, int]]) -> list[UpdateColumn]:
    """The stored updates of these rounds and clients."""
    each = sum(tensor.numel() * 4 for tensor in history.initial().tensors.values())
    if each * len(keys) > WHOLE_BYTES:
        return [StoredUpdate(history, number, client) for number, client in keys]
    starts = {number: history.start(number) for number in sorted({number for number, _ in keys})}
    return [Change(starts[number], history.update(number, client).change) for number, client in keys]


def block_spectrum(
    block: Block, forget: Sequence[UpdateColumn], retain: Sequence[UpdateColumn], energy: float
) -> Spectrum:
    """Decompose one block, with at most a tile of columns in memory."""
    everything = [*forget, *retain]
    first = everything[0].column(block)
    size = first.numel() * 4 if isinstance(first, Tensor) else (first.left.numel() + first.right.numel()) * 4
    tile = max(1, TILE_BYTES // size)
    tiles = [everything[start : start + tile] for start in range(0, len(everything), tile)]
    rows: list[list[Tensor]] = []
    for i, left_tile in enumerate(tiles):
        left = [update.column(block) for update in left_tile]
        row = [rows[j][i].T for j in range(i)]
        row += [gram(left, left)]
        row += [gram(left, [update.column(block) for update in right_tile]) for right_tile in tiles[i + 1 :]]
        rows.append(row)
    square = torch.cat([torch.cat(row, dim=1) for row in rows])
    f = len(forget)
    return decompose(square[:f, :f], square[:f, f:], square[f:, f:], energy)


def canonical_basis(block: Block, forget: Sequence[UpdateColumn], spectrum: Spectrum) -> Basis:
    """All canonical directions of the forget subspace, from coefficient vectors over the forget columns."""
    columns = [update.column(block) for update in forget]
    return make_basis(columns, spectrum.coefficients, torch.ones_like(spectrum.cosines))


def single_direction(column: Column) -> Basis:
    """A basis of one direction, that of a column; empty if the column is zero."""
    length = gram([column], [column]).sqrt()
    coefficients = torch.where(length > 0, 1 / length.clamp_min(1e-300), torch.zeros_like(length))
    return make_basis([column], coefficients, (length[0] > 0).double())


def describe(spectra: Mapping[str, Spectrum], weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Describe each block's spectrum for reports, with the weight that a method gives each direction."""
    return [
        {
            "block": name,
            "forget_directions": spectrum.forget_rank,
            "retain_directions": spectrum.retain_rank,
            "excised": int((weights[name] > 0).sum()),
            "cosines": [round(cosine, 6) for cosine in spectrum.cosines.tolist()],
            "energies": [round(energy, 6) for energy in spectrum.energies.tolist()],
            "forget_energy": float((weights[name] * spectrum.energies).sum()),
            "retain_damage": max((weights[name] * spectrum.cosines**2).tolist(), default=0.0),
        }
        for name, spectrum in spectra.items()
    ]
