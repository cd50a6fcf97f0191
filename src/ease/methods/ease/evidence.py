"""Where the columns of a decomposition come from: the stored history, or a probe round at an early state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ease.errors import UserError
from ease.federation.eight_bit import from_8bit
from ease.federation.history import History, read_block
from ease.federation.protocol import Federation
from ease.methods.base import Trained
from ease.methods.ease.probe import PROBE
from ease.params import Block, Params
from ease.requests.request import ClientRequest, Request
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
        delta = read_block(self.history.update_path(self.round, self.client), block)
        if not block.factored:
            return torch.cat([delta[name].flatten() for name in block.tensors])
        before = read_block(self.history.state_path(self.round - 1), block)
        after = {name: before[name] + delta[name] for name in block.tensors}
        return displacement(block, Params(after, (block,)), Params(before, (block,)))


@dataclass(frozen=True)
class ProbedUpdate:
    """An update that a probe round brought."""

    before: Params
    delta: Params

    def column(self, block: Block) -> Column:
        return displacement(block, self.before + self.delta, self.before)


def from_history(
    trained: Trained, request: ClientRequest, retain_columns: int
) -> tuple[list[Evidence], list[Evidence]]:
    """Client request: the leaving clients' stored updates, and those of everybody else. No communication.

    Updates of neighbouring rounds are much alike, so of the retained clients evenly spaced rounds are enough.
    """
    history = trained.history
    columns = history.columns(trained.training.rounds)
    forget = [StoredUpdate(history, number, client) for number, client in columns if client in request.clients]
    others = [(number, client) for number, client in columns if client not in request.clients]
    rounds = sorted({number for number, _ in others})
    # With very many clients one round holds more than was asked for, but without it nothing would count as shared.
    stride = max(1, min(len(rounds), -(-len(others) // retain_columns)))
    chosen = set(rounds[stride - 1 :: stride])
    retain = [StoredUpdate(history, number, client) for number, client in others if number in chosen]
    for update in (*forget, *retain):
        history.verify_update(update.round, update.client)
    if not forget:
        names = ", ".join(map(str, request.clients))
        raise UserError(f"client {names} never took part in a training round: the history has nothing of it to excise")
    return list(forget), list(retain)


def from_probe(
    trained: Trained, request: Request, federation: Federation, rounds: Sequence[int]
) -> tuple[list[Evidence], list[Evidence]]:
    """Class or sample request: one epoch each on forget and on retained pairs, from an early stored state.

    The state travels in half precision and the updates come back in 8 bit: only their directions matter. A client with
    a single forget pair has no update to give, for InfoNCE over one pair is constant: there may be no forget column.
    """
    forget: list[Evidence] = []
    retain: list[Evidence] = []
    for number in rounds:
        early = trained.history.state(number)
        sent = early.map(torch.Tensor.half)
        job = trained.training.job(
            number, trained.seed, trained.temperature, "probe", request=request, objective=PROBE, epochs=1
        )
        for update in sorted(federation.run(sent, job, federation.clients), key=lambda update: update.client):
            for data, columns in (("forget", forget), ("retain", retain)):
                packed = {
                    name.removeprefix(f"{data}/"): t for name, t in update.values.items() if name.startswith(f"{data}/")
                }
                if packed:
                    columns.append(ProbedUpdate(early, Params(from_8bit(packed), early.blocks)))
    return forget, retain


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
