"""`ease doctor` finds what is wrong with a machine and says so; `ease cache` lists and deletes."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from ease.commands import doctor
from ease.commands.doctor import State
from ease.errors import UserError


def untried() -> Iterator[tuple[State, str]]:
    yield "fine", "not tried"


def states(out: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in json.loads(out)["findings"]:
        found.setdefault(each["name"], set()).add(each["state"])
    return found


@pytest.mark.slow
def test_everything_works_here(ease, cache: Path) -> None:
    """The self-test leaves nothing, in the user's cache either."""
    before = sorted(cache.rglob("*"))
    result = ease("doctor", "--json")
    found = json.loads(result.out)
    assert result.code == 0 and found["healthy"] and result.err == ""
    assert "trained twice to the same bytes" in next(
        each["words"] for each in found["findings"] if each["name"] == "self-test"
    )
    assert sorted(cache.rglob("*")) == before


def test_a_failed_check_is_reported_and_stops_no_other(ease, monkeypatch) -> None:
    def broken() -> Iterator[tuple[State, str]]:
        raise OSError("the driver is too old")

    monkeypatch.setattr(doctor, "_gpu", broken)
    monkeypatch.setattr(doctor, "_self_test", untried)
    result = ease("doctor", "--json")
    assert result.code == 1 and not json.loads(result.out)["healthy"]
    assert states(result.out)["GPU"] == {"failed"} and states(result.out)["self-test"] == {"fine"}
    shown = ease("doctor")
    assert shown.code == 1 and "failed  GPU: OSError: the driver is too old" in shown.out


def test_a_cache_that_cannot_be_made_is_reported(ease, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_self_test", untried)
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "file" / "cache"))
    result = ease("doctor", "--json")
    assert result.code == 1 and states(result.out)["cache"] == {"failed"} and json.loads(result.out)["cache"] is None


def test_cached_files_that_others_may_read_are_a_warning(ease, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_self_test", untried)
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    (tmp_path / "pixels").mkdir(mode=0o700)
    (tmp_path / "pixels" / "a.npy").write_bytes(b"1")
    (tmp_path / "pixels" / "a.npy").chmod(0o644)
    result = ease("doctor", "--json")
    assert result.code == 0 and "warning" in states(result.out)["cache"]
    assert f"chmod -R go= {tmp_path}" in ease("cache", "list").out


@pytest.mark.parametrize(
    ("needs", "state", "words"),
    [
        (["numpy>=1"], "fine", "all that are needed"),
        (["numpy>=999"], "failed", "numpy is"),
        (["no-such-package>=1"], "failed", "no-such-package is missing"),
        (["numpy>=1", 'no-such-package; extra == "photos"'], "fine", "extras that are absent: photos"),
        (["numpy>=1", 'numpy; extra == "photos"'], "fine", "extras that can be used: photos"),
    ],
)
def test_packages_are_compared_with_what_is_needed(monkeypatch, needs: list[str], state: str, words: str) -> None:
    reported = metadata.metadata("ease-unlearning")
    monkeypatch.setattr(reported.__class__, "get_all", lambda *_: ["photos", "dev"])
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    found = list(doctor._packages())
    assert any(each == state and words in said for each, said in found), found


def test_the_same_training_must_give_the_same_bytes(monkeypatch) -> None:
    hashes = iter("ab")
    monkeypatch.setattr(doctor, "train_run", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "sha256", lambda path: next(hashes))
    assert [state for state, _ in doctor._self_test()] == ["failed"]


def test_the_cache_is_listed_and_cleared(ease, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    (tmp_path / "pixels").mkdir(mode=0o700)
    (tmp_path / "pixels" / "a.npy").write_bytes(b"123")
    listed = json.loads(ease("cache", "list", "--json").out)
    assert listed["bytes"] == 3 and {part["name"]: part["files"] for part in listed["parts"]}["pixels"] == 1
    assert ease("cache", "clear", "pixel").code == 2
    cleared = json.loads(ease("cache", "clear", "--json").out)
    assert cleared["cleared"] and cleared["bytes"] == 3 and not (tmp_path / "pixels" / "a.npy").exists()


def test_locks_that_do_not_work_are_reported(monkeypatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no locks")

    monkeypatch.setattr(doctor, "exclusive", refuse)
    found = doctor._looked("here", lambda: doctor._place(tmp_path))
    assert [(each.state, each.words) for each in found] == [("failed", "no locks")]
    assert not list(tmp_path.iterdir())
