"""Jobs in processes: all are done, notes come back, and mistakes are told."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ease.errors import UserError
from ease.runs.workers import spread


def write(job: Path) -> Iterator[str]:
    job.write_text(str(os.getpid()))
    yield f"{job.name} begun"
    yield f"{job.name} done"


def refuse(job: Path) -> Iterator[str]:
    yield "begun"
    raise UserError(f"{job.name}: cannot be done; do something else")


def die(job: Path) -> Iterator[str]:
    yield "begun"
    os._exit(9)


def test_one_process_works_here_in_order(tmp_path) -> None:
    jobs = [tmp_path / name for name in "abc"]
    assert list(spread(write, jobs, 1)) == [f"{name} {what}" for name in "abc" for what in ("begun", "done")]
    assert {job.read_text() for job in jobs} == {str(os.getpid())}


@pytest.mark.slow
def test_several_processes_do_every_job_once(tmp_path) -> None:
    jobs = [tmp_path / name for name in "abcd"]
    notes = list(spread(write, jobs, 2))
    assert sorted(notes) == sorted(f"{name} {what}" for name in "abcd" for what in ("begun", "done"))
    assert str(os.getpid()) not in {job.read_text() for job in jobs}


def tell_memory(job: Path) -> Iterator[str]:
    yield os.environ.get("MALLOC_TRIM_THRESHOLD_", "")


@pytest.mark.slow
def test_processes_keep_freed_memory_and_this_one_stays_as_it_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert set(spread(tell_memory, [tmp_path, tmp_path], 2)) == {str(1 << 32)}
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "7" and "MALLOC_MMAP_THRESHOLD_" not in os.environ


@pytest.mark.slow
def test_an_error_in_a_process_is_raised_unchanged(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot be done"):
        list(spread(refuse, [tmp_path / "a", tmp_path / "b"], 2))


@pytest.mark.slow
def test_a_process_that_is_killed_is_noticed(tmp_path) -> None:
    with pytest.raises(UserError, match="--processes 1"):
        list(spread(die, [tmp_path / "a", tmp_path / "b"], 2))
