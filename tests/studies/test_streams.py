"""All methods on one stream: the same requests, each released before the next, resumed where it stopped."""

import csv
from pathlib import Path

import ease
from ease.errors import Diverged
from ease.methods import METHODS
from ease.methods.finetune import Finetune
from ease.runs.config import load_config
from ease.runs.world import World
from ease.show.stream_board import retrained_again
from ease.studies.streams import requests_in_turn, sets_of


def experiment(small, *methods) -> dict:
    config = load_config(None, (*small, "partition.clients=5", "partition.scheme=uniform", "data.validation=40"))
    return {
        "title": "A stream",
        "requests": 3,
        "seeds": [0],
        "methods": list(methods),
        "run": config.model_dump(mode="json", exclude_none=True),
    }


def test_requests_take_turns_and_share_no_pair(small_config) -> None:
    world = World.open(small_config("partition.clients=5"))
    asked = requests_in_turn(world, 6, 0)
    assert [each.scope for each in asked][:3] == ["sample", "client", "sample"]
    assert asked == requests_in_turn(world, 6, 0) != requests_in_turn(world, 6, 1)
    sets = sets_of(world, asked)
    every = [position for name, found in sets.items() if name != "test" for position in found.tolist()]
    assert len(every) == len(set(every)) == sum(len(shard.train) for shard in world.shards)


def test_one_command_ranks_methods_and_keeps_what_is_done(small, tmp_path: Path, monkeypatch) -> None:
    table = experiment(small, "finetune", "not")
    found = ease.bench(table, name="s", out=tmp_path, quiet=True)
    assert [each.rank for each in found.standings] == [1, 2] and all(each.answered == 3 for each in found.standings)
    assert {each.verdict for each in found.standings} <= {"retrained", "trained", "undecided", "no signal"}
    assert all(0 < each.pairs_share < 1 for each in found.standings)
    assert len(retrained_again(found.summary)) == 3
    rows = list(csv.DictReader((tmp_path / "s" / "leaderboard.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == [each.method for each in found.standings]
    assert "<th" in (tmp_path / "s" / "leaderboard.html").read_text()
    assert "one after the other" in str(found) and "\n" not in repr(found)
    assert not list((tmp_path / "streams").glob("*-run"))

    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr("ease.studies.streams.forget", never)
    assert ease.bench(table, name="s", out=tmp_path, quiet=True).standings == found.standings


def test_a_method_that_cannot_continue_comes_last_with_its_reason(small, tmp_path: Path, monkeypatch) -> None:
    class Stops(Finetune):
        name = "stops"
        title = "Stops"

        def unlearn(self, trained, request, federation):
            if trained.gone:
                raise Diverged("the model is not finite")
            yield from super().unlearn(trained, request, federation)

    monkeypatch.setitem(METHODS, "stops", Stops)
    found = ease.bench(experiment(small, "stops", "not"), name="s", out=tmp_path, quiet=True)
    first, last = found.standings
    assert (first.method, last.method, last.answered, last.verdict) == ("NoT", "Stops", 1, "stopped")
    assert last.stopped == "request 2 (client): the model is not finite"
