"""Sparse adapters: what is kept, what is trained, and what travels."""

from dataclasses import replace

import pytest
import torch

from ease.federation.codec import encode_job, encode_state, encode_update
from ease.federation.journal import read_update, write_update
from ease.federation.meter import Metered
from ease.federation.protocol import Optimiser, Update, reject_reason
from ease.federation.sparse import LEAST_KEPT, Sparse
from ease.params import Params


@pytest.fixture(scope="module")
def sparse(world) -> Sparse:
    """Both first projector layers, a tenth of their values."""
    base = world.server.initial()
    blocks = tuple(block for block in base.blocks if block.name.endswith("projector.0"))
    assert len(blocks) == 2
    return Sparse(base, blocks, density=0.1, seed=7)


def test_positions_depend_only_on_the_seed(sparse: Sparse) -> None:
    for name, kept in sparse.positions.items():
        size = sparse.base[name].numel()
        assert len(kept) == min(size, max(LEAST_KEPT, -(-size // 10))) == len(set(kept.tolist()))
        assert int(kept.min()) >= 0 and int(kept.max()) < size and torch.equal(kept, kept.sort().values)
        assert torch.equal(kept, replace(sparse, base=sparse.base * 2.0).positions[name])
    weight = "image.projector.0.weight"
    assert not torch.equal(sparse.positions[weight], replace(sparse, seed=8).positions[weight])


def test_the_adapter_is_added_where_it_belongs(sparse: Sparse) -> None:
    assert all(torch.equal(t, sparse.base[n]) for n, t in sparse.expand(sparse.zeros().tensors).items())
    weight = "text.projector.0.weight"
    adapter = sparse.zeros().map(lambda tensor: tensor + 1)
    change = (sparse.expand(adapter.tensors)[weight] - sparse.base[weight]).flatten()
    expected = torch.zeros_like(change)
    expected[sparse.positions[weight]] = 1.0
    torch.testing.assert_close(change, expected)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_training_moves_kept_values_and_no_other(world, sparse: Sparse, local_job, kind) -> None:
    """Adam moves every value that has ever had a gradient: here it holds state for the kept ones alone."""
    job = local_job(epochs=3, sparse=sparse, optimiser=Optimiser(kind=kind, learning_rate=0.05))
    (update,) = world.federation.run(sparse.zeros(), job, [0])
    assert reject_reason(update, sparse.zeros()) is None and update.change.norm() > 0
    after = sparse.expand(update.change.tensors)
    assert after.keys() == sparse.base.tensors.keys()
    for name, tensor in after.items():
        moved = (tensor != sparse.base[name]).flatten().nonzero()[:, 0]
        assert set(moved.tolist()) <= set(sparse.positions.get(name, torch.tensor([])).tolist())
    moved = [float((value != 0).float().mean()) for value in update.change.tensors.values()]
    assert min(moved) > 0.5


def test_one_step_of_sgd_is_the_dense_step_on_the_kept_values(world, sparse: Sparse, local_job) -> None:
    """The gradient of a kept value does not know of the mask, so one step agrees with dense training there."""
    job = local_job(batch_size=10_000)
    (dense,) = world.federation.run(sparse.base, job, [0])
    (update,) = world.federation.run(sparse.zeros(), replace(job, sparse=sparse), [0])
    for name, kept in sparse.positions.items():
        torch.testing.assert_close(update.change[name], dense.change[name].flatten()[kept], rtol=1e-4, atol=1e-7)


def test_only_kept_values_travel_once_the_base_is_known(world, sparse: Sparse, local_job) -> None:
    """Client 0 was sent the base as a whole; client 2 was not, and gets it with its first adapter."""
    adapter, job = sparse.zeros(), local_job(sparse=sparse)
    metered = Metered(world.federation)
    list(metered.run(sparse.base, local_job(), [0]))

    def spent(client: int) -> tuple[int, int]:
        down, up = metered.cost.bytes_down, metered.cost.bytes_up
        list(metered.run(adapter, job, [client]))
        return metered.cost.bytes_down - down, metered.cost.bytes_up - up

    first, late, again = spent(0), spent(2), spent(2)
    assert first == again and late[0] - again[0] == len(encode_state(sparse.base))
    pairs = len(world.shards[0].train)
    assert first[1] == len(encode_update(Update(0, pairs, adapter, {"loss": torch.tensor(0.0)})))
    data, _ = encode_job(job, adapter)
    assert first[0] == len(encode_state(adapter)) + len(data)
    assert len(data) < 2000  # with the seed and the layers of the mask
    list(metered.run(sparse.base * 2.0, local_job(), [0]))  # another whole state: the request's base is kept beside it
    assert spent(0) == first
    fresh = Metered(world.federation)
    for whole in (sparse.base, sparse.base * 2.0):  # of whole states alone, the last is kept
        list(fresh.run(whole, local_job(), [0]))
    before = fresh.cost.bytes_down
    list(fresh.run(adapter, job, [0]))
    assert fresh.cost.bytes_down - before == late[0]


def test_the_journal_keeps_it(world, sparse: Sparse, local_job, tmp_path) -> None:
    (update,) = world.federation.run(sparse.zeros(), local_job(sparse=sparse), [0])
    write_update(tmp_path / "update.safetensors", update)
    stored = read_update(tmp_path / "update.safetensors")
    assert stored.change.blocks == sparse.blocks
    assert all(torch.equal(stored.change[name], update.change[name]) for name in update.change.tensors)


def test_a_dense_answer_to_a_sparse_job_is_refused(world, sparse: Sparse, local_job) -> None:
    (dense,) = world.federation.run(sparse.base, local_job(), [0])
    assert reject_reason(dense, sparse.zeros()) == "its tensor names differ from the model's"
    wide = replace(dense, delta=Params({n: dense.change[n] for n in sparse.positions}, sparse.blocks))
    assert "has shape" in str(reject_reason(wide, sparse.zeros()))
