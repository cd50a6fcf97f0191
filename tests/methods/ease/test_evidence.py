"""Where columns come from: the stored history without communication, or one probe round."""

from dataclasses import dataclass

import pytest
import torch

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.history import History
from ease.methods.base import Trained
from ease.methods.ease import evidence
from ease.methods.ease.evidence import StoredUpdate, block_spectrum, canonical_basis, from_history, from_probe
from ease.params import Block, Params
from ease.requests.request import ClientRequest, SampleRequest
from ease.subspace import decompose, displacement, gram


def test_history_columns_are_the_stored_updates(learnt) -> None:
    forget, retain = from_history(learnt.trained, ClientRequest(clients=(1,)), 60)
    assert len(forget) == 6 and len(retain) == 18
    block = learnt.trained.final.blocks[0]
    for number, column in enumerate(forget, start=1):
        stored = Params.load(learnt.run.history.update_path(number, 1))
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
    change.save(history.update_path(1, 0))
    column = StoredUpdate(history, 1, 0).column(block)
    expected = displacement(block, start + change, start)
    after = start + change
    torch.testing.assert_close(column.left @ column.right, expected.left @ expected.right)
    dense = after["adapter.B"] @ after["adapter.A"] - start["adapter.B"] @ start["adapter.A"]
    torch.testing.assert_close((column.left @ column.right).float(), dense, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class Ledger:
    """A history that only says who took part, round by round."""

    drawn: tuple[tuple[int, ...], ...]

    def columns(self, rounds: int) -> list[tuple[int, int]]:
        return [(number, client) for number in range(1, rounds + 1) for client in self.drawn[number - 1]]

    def verify_update(self, number: int, client: int) -> None:
        pass


def chosen(drawn, leaving: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    trained = Trained(Ledger(tuple(drawn)), TrainingConfig(rounds=len(drawn)), 0.07, 0)
    _, retain = from_history(trained, ClientRequest(clients=leaving), most)
    return [(update.round, update.client) for update in retain]


def test_retained_columns_come_from_evenly_spaced_rounds() -> None:
    everyone = [tuple(range(4))] * 20
    assert chosen(everyone, (0,), 60) == [(n, c) for n in range(1, 21) for c in (1, 2, 3)]
    assert chosen(everyone, (0,), 30) == [(n, c) for n in range(2, 21, 2) for c in (1, 2, 3)]
    assert len(chosen(everyone, (0, 1), 12)) <= 12


@pytest.mark.parametrize("most", [1, 5, 60])
def test_many_clients_in_few_rounds_still_leave_something_to_compare_with(most: int) -> None:
    """Without any retained column every direction would pass as the leaving client's own."""
    assert chosen([tuple(range(100))] * 3, (0,), most)
    assert chosen([(0, 1), (2,), (0,)], (0,), 1)


def test_a_client_that_never_took_part_is_refused() -> None:
    with pytest.raises(UserError, match="client 2 never took part in a training round"):
        chosen([(0, 1), (1, 3)], (2,), 60)
    assert chosen([(0, 1), (1, 3)], (0, 2), 60) == [(1, 1), (2, 1), (2, 3)]


def test_probed_columns_come_from_holders_alone(learnt) -> None:
    shards = learnt.world.shards
    request = SampleRequest(ids=(*shards[0].train_ids[:5], *shards[2].train_ids[:1]))
    forget, retain = from_probe(learnt.trained, request, learnt.world.federation, (1, 2))
    assert len(forget) == 2 and len(retain) == 8  # one pair alone teaches nothing
    for update in (*forget, *retain):
        for block in learnt.trained.final.blocks:
            assert float(update.column(block).norm()) > 0


def test_a_single_pair_gives_no_forget_column(learnt) -> None:
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[:1])
    forget, retain = from_probe(learnt.trained, request, learnt.world.federation, (1,))
    assert forget == [] and len(retain) == len(learnt.world.shards)


def test_tiles_do_not_change_the_spectrum(learnt, monkeypatch) -> None:
    forget, retain = from_history(learnt.trained, ClientRequest(clients=(1,)), 60)
    block = learnt.trained.final.blocks[0]
    columns = [[update.column(block) for update in part] for part in (forget, retain)]
    f, r = columns
    oracle = decompose(gram(f, f), gram(f, r), gram(r, r), 0.95)
    for size in (1, 5 * f[0].numel() * 4, 1 << 29):
        monkeypatch.setattr(evidence, "TILE_BYTES", size)
        spectrum = block_spectrum(block, forget, retain, 0.95)
        torch.testing.assert_close(spectrum.cosines, oracle.cosines, atol=1e-9, rtol=0)
        torch.testing.assert_close(spectrum.energies, oracle.energies, atol=1e-9, rtol=0)


def test_canonical_directions_are_orthonormal_and_span_the_forget_updates(learnt) -> None:
    forget, retain = from_history(learnt.trained, ClientRequest(clients=(1,)), 60)
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
