"""`ease request find`: every pair of a person, in whatever split it is and whoever holds it."""

from pathlib import Path

import pytest
from PIL import Image
from tests.operations.ledger.test_work import listed, run_json
from tests.operations.test_untrained import here, members_of, one_of_each, photograph, queue

__all__ = ["here"]


def found(ease, run: Path, *arguments: object) -> dict[str, dict]:
    return {each["id"]: each for each in run_json(ease, "request", "find", run, *arguments)["pairs"]}


def test_ids_are_found_in_every_split_with_their_client(ease, here: Path, tmp_path: Path) -> None:
    run, wanted = here / "run", one_of_each(here / "run")
    pairs = found(ease, run, "--ids", listed(tmp_path, [*wanted.values(), "nobody"]))
    assert {each["split"]: each["id"] for each in pairs.values()} == wanted
    assert {each["split"]: each["client"] for each in pairs.values()} == {
        "train": 0, "held_out": 1, "validation": None, "test": None,
    }  # fmt: skip
    every = {*members_of(run).digests}
    assert set(found(ease, run, "*")) == every
    assert set(found(ease, run, "5")) == {each for each in every if "5" in each}


def test_closed_requests_are_named_also_after_their_purge(ease, here: Path, tmp_path: Path) -> None:
    run, wanted = here / "run", one_of_each(here / "run")
    ids = listed(tmp_path, [wanted["test"], wanted["train"]])
    assert found(ease, run, "--ids", ids)[wanted["test"]]["closed"] == []
    queue(ease, run, ids, "r")
    assert {each["id"]: each["closed"] for each in found(ease, run, "--ids", ids).values()} == {
        wanted["test"]: ["r"], wanted["train"]: ["r"],
    }  # fmt: skip
    assert ease("purge", run).code == 0
    purged = found(ease, run, "--ids", ids)
    assert {(each["split"], *each["closed"]) for each in purged.values()} == {("purged", "r")} and len(purged) == 2


@pytest.mark.parametrize("kind", ["same", "jpeg"])
def test_a_picture_is_found_in_every_split(ease, here: Path, tmp_path: Path, kind: str) -> None:
    run = here / "run"
    for split, id in one_of_each(run).items():
        picture = photograph(here, id)
        if kind == "jpeg":
            copy = tmp_path / f"{id}.jpg"
            Image.open(picture).resize((180, 180)).save(copy, quality=80)
            picture = copy
        (pair,) = found(ease, run, "--image", picture).values()
        match = "same picture" if kind == "same" else "similar picture"
        assert (pair["id"], pair["split"], pair["match"]) == (id, split, match)


def test_nothing_held_is_said_in_one_line(ease, here: Path) -> None:
    result = ease("request", "find", here / "run", "nobody")
    assert result.code == 0 and "holds no such pair" in result.out
    assert ease("request", "find", here / "run").code == 2
    wrong = ease("request", "find", here / "run", "--image", here / "photos" / "captions.jsonl")
    assert wrong.code == 2 and "--image" in wrong.err and "Traceback" not in wrong.err
