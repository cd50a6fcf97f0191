"""Columns of a decomposition, stored or in memory, and the spectrum they have."""

import torch

from ease.federation.fedavg import Round
from ease.federation.history import History
from ease.federation.protocol import Update
from ease.methods.columns import Change, StoredUpdate, block_spectrum, canonical_basis
from ease.params import Block, Params
from ease.subspace import decompose, displacement, gram


def test_stored_columns_are_the_stored_updates(learnt) -> None:
    forget, retain = columns_of(learnt, 1)
    assert len(forget) == 6 and len(retain) == 18
    block = learnt.trained.final.blocks[0]
    for number, column in enumerate(forget, start=1):
        stored = learnt.run.history.update(number, 1).change
        assert torch.equal(column.column(block), stored.vector(block))


def test_a_stored_update_of_trained_factors_is_the_change_of_their_product(tmp_path) -> None:
    block = Block("adapter", "text", "lora", ("adapter.A", "adapter.B"))
    rng = torch.Generator().manual_seed(0)
    start, change = (
        Params({"adapter.A": torch.randn(2, 5, generator=rng), "adapter.B": torch.randn(4, 2, generator=rng)}, (block,))
        for _ in range(2)
    )
    history = History(tmp_path)
    start.save(history.initial_path)
    history.append(Round(1, start + change, (Update(0, 1, change),)))
    column = StoredUpdate(history, 1, 0).column(block)
    expected = displacement(block, start + change, start)
    after = start + change
    torch.testing.assert_close(column.left @ column.right, expected.left @ expected.right)
    dense = after["adapter.B"] @ after["adapter.A"] - start["adapter.B"] @ start["adapter.A"]
    torch.testing.assert_close((column.left @ column.right).float(), dense, atol=1e-5, rtol=1e-5)


def columns_of(learnt, leaving: int) -> tuple[list[StoredUpdate], list[StoredUpdate]]:
    """Every stored update of a client, and those of the others."""
    history = learnt.run.history
    updates = [StoredUpdate(history, number, client) for number, client in history.columns(6)]
    return [u for u in updates if u.client == leaving], [u for u in updates if u.client != leaving]


def test_a_change_in_memory_is_read_as_the_stored_one(learnt) -> None:
    """In blocks that are trained whole and, with both factors trained, as the change of the product."""
    history = learnt.run.history
    before, delta = history.state(2), history.update(3, 1).change
    for block in delta.blocks:
        assert torch.equal(Change(before, delta).column(block), displacement(block, before + delta, before))
        torch.testing.assert_close(
            Change(before, delta).column(block), StoredUpdate(history, 3, 1).column(block), atol=1e-6, rtol=0
        )


def test_tiles_do_not_change_the_spectrum(learnt, monkeypatch) -> None:
    forget, retain = columns_of(learnt, 1)
    block = learnt.trained.final.blocks[0]
    f, r = [[update.column(block) for update in part] for part in (forget, retain)]
    oracle = decompose(gram(f, f), gram(f, r), gram(r, r), 0.95)
    for size in (1, 5 * f[0].numel() * 4, 1 << 29):
        monkeypatch.setattr("ease.methods.columns.TILE_BYTES", size)
        spectrum = block_spectrum(block, forget, retain, 0.95)
        torch.testing.assert_close(spectrum.cosines, oracle.cosines, atol=1e-9, rtol=0)
        torch.testing.assert_close(spectrum.energies, oracle.energies, atol=1e-9, rtol=0)


def test_canonical_directions_are_orthonormal_and_span_the_forget_updates(learnt) -> None:
    forget, retain = columns_of(learnt, 1)
    for block in learnt.trained.final.blocks:
        spectrum = block_spectrum(block, forget, retain, 1.0)
        basis = canonical_basis(block, forget, spectrum)
        directions = basis.directions.double()
        assert basis.count == spectrum.forget_rank
        torch.testing.assert_close(
            directions.T @ directions, torch.eye(basis.count, dtype=torch.float64), atol=1e-5, rtol=0
        )
        for update in forget:
            column = update.column(block).double()
            assert float((column - directions @ (directions.T @ column)).norm()) < 1e-4 * float(column.norm())
