"""Real processes killed with signal 9 while they train, forget, audit, work, purge and join: they end the same."""

import os
from pathlib import Path

import pytest
from benchmarks.kills import MOST_KILLS, STAGES, contents, difference, trials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork"),
]


def test_killed_at_random_moments_every_command_ends_the_same(tmp_path: Path) -> None:
    kills = MOST_KILLS * len(STAGES)  # so many that each command's turn comes
    found = list(trials(tmp_path, kills, seed=1, fresh=False, stages=list(STAGES)))
    assert sum(each.kills for each in found) == kills and {each.stage for each in found} == set(STAGES)
    assert [each for each in found if each.fault] == []


def test_another_end_is_seen(tmp_path: Path) -> None:
    """The comparison itself: a changed byte, a file too many and an unfinished one."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "state.bin").write_bytes(b"1")
    whole = contents(tmp_path)
    assert difference(contents(tmp_path), whole) == ""
    (run / "state.bin").write_bytes(b"2")
    assert "state.bin" in difference(contents(tmp_path), whole)
    (run / "state.bin").write_bytes(b"1")
    (run / ".partial-1").touch()
    assert "unfinished" in difference(contents(tmp_path), whole)
