"""The journal: answers that were given once are given again, and only missing ones are asked for."""

from pathlib import Path

import pytest
import torch

from ease.errors import UserError
from ease.federation.journal import Journal, read_update, write_update
from ease.federation.meter import Metered
from ease.federation.protocol import Middleware, Update


class Counting(Middleware):
    """A federation that notes every client it is really asked for."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.asked = []

    def run(self, params, job, clients):
        self.asked += [(job.round, client) for client in clients]
        return super().run(params, job, clients)


def same(one: Update, two: Update) -> bool:
    deltas = (one.delta is None) == (two.delta is None)
    if one.delta is not None and two.delta is not None:
        deltas = one.delta.blocks == two.delta.blocks and list(one.delta.tensors) == list(two.delta.tensors)
        deltas = deltas and all(torch.equal(one.delta[name], two.delta[name]) for name in one.delta.tensors)
    values = one.values.keys() == two.values.keys() and all(
        torch.equal(one.values[k], two.values[k]) for k in one.values
    )
    return deltas and values and (one.client, one.pairs) == (two.client, two.pairs)


def two_calls(journal: Journal, state, local_job) -> list[Update]:
    return [*journal.run(state, local_job(round=1), [0, 2]), *journal.run(state, local_job(round=2), [1])]


def test_a_replay_gives_equal_updates_and_asks_no_one(world, local_job, tmp_path: Path) -> None:
    plain = [
        *world.federation.run(world.server.initial(), local_job(round=1), [0, 2]),
        *world.federation.run(world.server.initial(), local_job(round=2), [1]),
    ]
    first, second = Counting(world.federation), Counting(world.federation)
    written = two_calls(Journal(first, tmp_path), world.server.initial(), local_job)
    replayed = two_calls(Journal(second, tmp_path), world.server.initial(), local_job)
    assert first.asked == [(1, 0), (1, 2), (2, 1)] and second.asked == []
    for one, two, three in zip(plain, written, replayed, strict=True):
        assert same(one, two) and same(one, three)


def test_a_partial_journal_continues_where_it_stopped(world, local_job, tmp_path: Path) -> None:
    whole = two_calls(Journal(world.federation, tmp_path / "whole"), world.server.initial(), local_job)
    stopped = Journal(world.federation, tmp_path / "part").run(world.server.initial(), local_job(round=1), [0, 2])
    next(stopped)
    stopped.close()
    rest = Counting(world.federation)
    resumed = two_calls(Journal(rest, tmp_path / "part"), world.server.initial(), local_job)
    assert rest.asked == [(1, 2), (2, 1)]
    assert all(same(one, two) for one, two in zip(whole, resumed, strict=True))
    names = [sorted(path.name for path in (tmp_path / run).iterdir()) for run in ("whole", "part")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()


def test_replayed_answers_cost_the_same_bytes(world, local_job, tmp_path: Path) -> None:
    costs = []
    for _ in range(2):
        metered = Metered(Journal(world.federation, tmp_path))
        list(metered.run(world.server.initial(), local_job(), [0, 1]))
        costs.append((metered.cost.bytes_up, metered.cost.bytes_down, metered.cost.pairs_trained))
    assert costs[0] == costs[1]


def test_every_kind_of_answer_survives_the_disk(toy_params, tmp_path: Path) -> None:
    answers = [
        Update(3, 4, toy_params(seed=1), {"loss": torch.tensor(0.5)}),
        Update(4, 9, None, {"forget": torch.arange(3.0), "count": torch.tensor([2])}),
        Update(6, 9, None, {"forget/w": torch.randint(-127, 128, (4, 3)).to(torch.int8)}),
        Update(5, 0, None),
    ]
    for answer in answers:
        write_update(tmp_path / "u.safetensors", answer)
        assert same(read_update(tmp_path / "u.safetensors"), answer)


def test_a_client_that_did_not_answer_is_asked_again(world, local_job, tmp_path: Path) -> None:
    class Silent(Counting):
        def run(self, params, job, clients):
            self.asked += [(job.round, client) for client in clients]
            yield from ()

    silent = Silent(world.federation)
    assert list(Journal(silent, tmp_path).run(world.server.initial(), local_job(), [1])) == []
    assert len(list(Journal(world.federation, tmp_path).run(world.server.initial(), local_job(), [1]))) == 1


def test_a_damaged_answer_is_named(world, local_job, tmp_path: Path) -> None:
    list(Journal(world.federation, tmp_path).run(world.server.initial(), local_job(), [1]))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=str(path)):
        list(Journal(world.federation, tmp_path).run(world.server.initial(), local_job(), [1]))
