"""The history on disk: exact, hashed, and a round exists only when all of it does."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import faults

from ease.errors import UserError
from ease.federation.fedavg import Round, TrainingConfig, average
from ease.federation.history import History, read_block
from ease.federation.protocol import Update
from ease.params import Params
from ease.storage import sha256, write_json


def a_round(toy_params, number: int, clients=(0, 3)) -> Round:
    updates = tuple(Update(c, c + 1, toy_params(seed=10 * number + c), {"loss": torch.tensor(1.0)}) for c in clients)
    return Round(number, toy_params(seed=number), updates, {7: "it is late"})


@pytest.fixture
def history(tmp_path: Path, toy_params) -> History:
    made = History(tmp_path)
    toy_params(seed=0).save(made.initial_path)
    made.append(a_round(toy_params, 1), bytes_up=5)
    made.append(a_round(toy_params, 2, clients=(3,)))
    return made


def same(one: Params, two: Params) -> bool:
    return one.blocks == two.blocks and all(torch.equal(one[name], two[name]) for name in one.tensors)


def test_everything_returns_exactly(history, toy_params) -> None:
    assert history.rounds() == 2
    assert same(history.initial(), toy_params(seed=0)) and same(history.state(0), toy_params(seed=0))
    assert same(history.state(1), toy_params(seed=1)) and same(history.state(2), toy_params(seed=2))
    assert same(history.update(1, 3).change, toy_params(seed=13)) and history.update(1, 3).pairs == 4
    assert history.clients(1) == [0, 3] and history.columns(2) == [(1, 0), (1, 3), (2, 3)]
    record = history.record(1)
    assert record.pairs == {0: 1, 3: 4} and record.rejected == {7: "it is late"}
    assert record.loss == 1.0 and record.bytes_up == 5
    history.verify()


def test_an_empty_history_has_no_rounds(tmp_path: Path) -> None:
    assert History(tmp_path).rounds() == 0 and History(tmp_path).columns(0) == []
    History(tmp_path).verify()
    with pytest.raises(UserError, match=r"initial\.safetensors"):
        History(tmp_path).initial()


def test_a_round_without_its_record_does_not_exist_and_is_written_again(history, toy_params) -> None:
    folder = history.state_path(2).parent
    (folder / "round.json").unlink()
    (folder / "left.safetensors").write_bytes(b"half a fi")
    assert history.rounds() == 1
    history.append(a_round(toy_params, 2, clients=(3,)))
    assert history.rounds() == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "round.json",
        "state.safetensors",
        "updates.bin",
    ]


def test_rounds_count_up_to_the_first_gap(history) -> None:
    (history.state_path(1).parent / "round.json").unlink()
    assert history.rounds() == 0


def test_a_failed_append_leaves_no_part_of_a_round(history, toy_params, monkeypatch) -> None:
    def full(self: Params) -> bytes:
        if self == toy_params(seed=33):
            raise UserError("no space")
        return file_bytes(self)

    file_bytes = Params.file_bytes
    monkeypatch.setattr(Params, "file_bytes", full)
    with pytest.raises(UserError, match="no space"):
        history.append(a_round(toy_params, 3))
    assert history.rounds() == 2 and not history.state_path(3).parent.exists()
    history.verify()


@pytest.mark.parametrize("name", ["initial.safetensors", "rounds/00001/updates.bin", "rounds/00002/state.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_found_and_named(history, name: str, damage: str) -> None:
    path = history.folder / name
    faults.damage(path, damage)
    with pytest.raises(UserError, match=f"{path}: (damaged|missing).*restore it or train again"):
        history.verify()


def test_a_damaged_record_is_named(history) -> None:
    path = history.state_path(2).parent / "round.json"
    path.write_text('{"round"')
    with pytest.raises(UserError, match=r"00002/round\.json: damaged JSON"):
        history.verify()


def test_equal_rounds_have_equal_bytes(history, toy_params, tmp_path) -> None:
    again = History(tmp_path / "again")
    toy_params(seed=0).save(again.initial_path)
    again.append(a_round(toy_params, 1), bytes_up=5)
    one, two = (each.state_path(1).parent for each in (history, again))
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()
    hashes = json.loads((one / "round.json").read_text())["sha256"]
    assert hashes == {path.name: sha256(path) for path in one.glob("*.safetensors")}


def test_only_one_block_is_read(history, toy_params) -> None:
    block = toy_params(0.0).blocks[0]
    tensors = history.update_block(1, 3, block)
    assert list(tensors) == ["image.layer.B"]
    assert torch.equal(tensors["image.layer.B"], toy_params(seed=13)["image.layer.B"])
    with pytest.raises(UserError, match=r"updates\.bin: client 8: missing"):
        history.update_block(1, 8, block)
    state = read_block(history.state_path(1), block)
    assert torch.equal(state["image.layer.B"], toy_params(seed=1)["image.layer.B"])


def test_packed_updates_equal_those_in_single_files(history, toy_params, tmp_path) -> None:
    files = []
    for client in (0, 3):
        toy_params(seed=10 + client).save(tmp_path / "alone.safetensors")
        files.append((tmp_path / "alone.safetensors").read_bytes())
    assert history.update_path(1, 0).read_bytes() == b"".join(files)


def test_damage_of_one_update_names_the_client_and_leaves_the_others_readable(history, toy_params) -> None:
    path = history.update_path(1, 3)
    faults.flip(path)
    with pytest.raises(UserError, match=r"updates\.bin: damaged .* \(client 3\)"):
        history.update(1, 3)
    assert same(history.update(1, 0).change, toy_params(seed=10))


@pytest.mark.parametrize("count", [2, 50])
def test_a_round_of_many_clients_is_three_files_and_a_few_waits_for_the_disk(toy_params, tmp_path, monkeypatch, count):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    history = History(tmp_path / "many")
    toy_params(seed=0).save(history.initial_path)
    history.append(a_round(toy_params, 1, clients=tuple(range(count))))
    # Three new folders, each of which waits for the one above it; four files, each for itself and for its folder.
    assert len(list(history.state_path(1).parent.iterdir())) == 3 and len(synced) == 3 * 1 + 4 * 2
    assert sorted(history.clients(1)) == list(range(count))


# --- where clients keep their updates ---


def test_a_history_without_updates_has_only_global_states(tmp_path: Path, toy_params) -> None:
    history = History(tmp_path, updates=False)
    toy_params(seed=0).save(history.initial_path)
    record = history.append(a_round(toy_params, 1))
    assert {path.name for path in (tmp_path / "rounds" / "00001").iterdir()} == {"round.json", "state.safetensors"}
    assert record.pairs == {0: 1, 3: 4} and list(record.sha256) == ["state.safetensors"]
    assert history.clients(1) == [0, 3] and history.columns(1) == [(1, 0), (1, 3)]
    history.verify()
    for name, tensor in history.moved(1).tensors.items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, toy_params(seed=1)[name].double() - toy_params(seed=0)[name].double())
    for read in (lambda: history.update(1, 0), history.require_updates):
        with pytest.raises(UserError, match=r"keeps updates at its clients .*training\.history = \"server\""):
            read()


def test_a_state_before_locking_is_stored_because_it_gives_the_mean(tmp_path: Path, toy_params) -> None:
    held = replace(a_round(toy_params, 1), averaged=toy_params(seed=5))
    for updates in (True, False):
        history = History(tmp_path / str(updates), updates=updates)
        toy_params(seed=0).save(history.initial_path)
        history.append(held)
        assert (history.folder / "rounds/00001/averaged.safetensors").is_file()
    after = toy_params(seed=5) - toy_params(seed=0)
    assert all(torch.allclose(history.moved(1)[name].float(), after[name]) for name in after.tensors)
    toy_params(seed=6).save(history.folder / "rounds/00001/averaged.safetensors")
    for check in (history.verify, lambda: history.moved(1)):
        with pytest.raises(UserError, match=r"averaged\.safetensors: damaged"):
            check()


# --- lengths, so that sums over a history need not read all of it ---


def averaged(toy_params, weights=(5, 5, 5, 1)) -> Round:
    """A round whose last update was long and is cut."""
    updates = [Update(c, pairs, toy_params(1.0 if c < 3 else 100.0, seed=c)) for c, pairs in enumerate(weights)]
    return average(toy_params(seed=0), updates, TrainingConfig(), 1)


def test_a_record_has_the_lengths_of_its_updates_and_of_the_move(tmp_path, toy_params) -> None:
    finished = averaged(toy_params)
    history = History(tmp_path)
    toy_params(seed=0).save(history.initial_path)
    record = history.append(finished)
    assert list(record.clipped) == [3]
    for update in finished.updates:
        assert record.updates[update.client].length == pytest.approx(update.change.norm())
        assert history.update_length(1, update.client) == record.updates[update.client].length
    assert history.moved_length(1) == record.moved == pytest.approx(history.moved(1).norm(), rel=1e-5)
    (tmp_path / "rounds/00001/updates.bin").unlink()  # neither is read for it
    (tmp_path / "rounds/00001/state.safetensors").unlink()
    assert history.update_length(1, 0) and history.moved_length(1)


def test_lengths_missing_in_records_are_computed(history) -> None:
    assert history.record(1).moved is None
    assert history.moved_length(1) == history.moved(1).norm()
    assert history.update_length(1, 3) == history.update(1, 3).change.norm()


@pytest.mark.parametrize("length", ["-1.0", '"long"', "true", "[]"])
@pytest.mark.parametrize("name", ["moved", "length"])
def test_a_length_that_nothing_has_is_refused(tmp_path, toy_params, name: str, length: str) -> None:
    history = History(tmp_path)
    toy_params(seed=0).save(history.initial_path)
    history.append(averaged(toy_params))
    record = json.loads(history.record_path(1).read_text())
    (record if name == "moved" else record["updates"]["0"])[name] = json.loads(length)
    write_json(history.record_path(1), {key: value for key, value in record.items() if key != "seal"})
    with pytest.raises(UserError, match=r"round\.json"):
        history.record(1)


def test_a_round_that_began_from_another_state_is_not_repeated_from_this_one(history, toy_params) -> None:
    toy_params(seed=9).save(history.state_path(1))
    assert same(Params.load(history.state_path(1)), toy_params(seed=9))  # an undamaged file, but another one
    for read in (lambda: history.state(1), lambda: history.start(2)):
        with pytest.raises(UserError, match=r"rounds/00001/state\.safetensors: damaged"):
            read()


# --- many rounds, little space ---


def chained(folder: Path, toy_params, rounds: int, held: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> History:
    """Rounds that follow on each other, but for those that began elsewhere; of some the state was held."""
    made = History(folder)
    toy_params(seed=0).save(made.initial_path)
    for number in range(1, rounds + 1):
        finished = a_round(toy_params, number)
        start = None
        if number in broken:
            start = folder / f"elsewhere-{number}.safetensors"
            toy_params(seed=100 + number).save(start)
        if number in held:
            finished = replace(finished, averaged=toy_params(seed=200 + number))
        made.append(finished, start=start)
    return made


@pytest.mark.parametrize("rounds", [[1], [2, 3, 4], [1, 3, 4, 6], [1, 2, 3, 4, 5, 6, 7]], ids=str)
@pytest.mark.parametrize("held", [(), (3,), (4, 5)], ids=str)
@pytest.mark.parametrize("broken", [(), (4,)], ids=str)
def test_the_move_over_rounds_is_the_sum_of_each_move(tmp_path, toy_params, rounds, held, broken) -> None:
    history = chained(tmp_path, toy_params, 7, held, broken)

    def one(number: int) -> Params:
        after = toy_params(seed=200 + number if number in held else number)
        before = toy_params(seed=100 + number if number in broken else number - 1)
        return after.map(torch.Tensor.double) - before.map(torch.Tensor.double)

    found = history.moved_over(rounds)
    for name, tensor in found.tensors.items():
        expected = sum(one(number)[name] for number in rounds)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


def test_rounds_between_two_ends_are_not_read(tmp_path, toy_params) -> None:
    history = chained(tmp_path, toy_params, 6)
    for number in (2, 3, 4, 5):
        history.state_path(number).unlink()
    history.moved_over(range(1, 7))
    with pytest.raises(UserError, match="missing"):
        history.moved_over([1, 2, 4])


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_half_the_space_keeps_eleven_bits_of_every_value(tmp_path, toy_params, scale) -> None:
    change = toy_params(seed=3).map(lambda tensor: scale * tensor)
    update = Update(4, 2, change, {"loss": torch.tensor(1.0)})
    stored = History(tmp_path, half=True)
    toy_params(seed=0).save(stored.initial_path)
    stored.append(Round(1, toy_params(seed=1), (update,)))
    stored.verify()
    found = History(tmp_path).update(1, 4).change  # whoever reads it need not know
    largest = max(float(tensor.abs().max()) for tensor in change.tensors.values())
    for name, tensor in change.tensors.items():
        assert found[name].dtype == tensor.dtype
        # Half an ulp of eleven bits, and below 2^-29 of the largest value half an ulp of the smallest normal number.
        bound = torch.maximum(tensor.abs() * 2**-11, torch.full_like(tensor, largest * 2**-39))
        assert bool(((found[name] - tensor).abs() <= bound).all())


def test_nothing_at_all_can_be_halved(tmp_path, toy_params) -> None:
    stored = History(tmp_path, half=True)
    toy_params(seed=0).save(stored.initial_path)
    stored.append(Round(1, toy_params(seed=1), (Update(0, 1, toy_params(0.0)),)))
    assert same(History(tmp_path).update(1, 0).change, toy_params(0.0))


@pytest.mark.parametrize("exponent", [301, -301, 1.5, "1", True])
def test_a_power_that_no_update_has_is_refused(tmp_path, toy_params, exponent) -> None:
    from ease.storage import read_json, write_json

    stored = History(tmp_path, half=True)
    toy_params(seed=0).save(stored.initial_path)
    stored.append(a_round(toy_params, 1))
    record = read_json(stored.record_path(1))
    record["updates"]["0"]["exponent"] = exponent
    write_json(stored.record_path(1), record)
    with pytest.raises(UserError, match="not the record of a round"):
        stored.update(1, 0)
