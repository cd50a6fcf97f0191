"""Independent jobs in several processes. Results are files; only short progress notes are returned."""

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ease.errors import UserError

Job = TypeVar("Job")
Work = Callable[[Job], Iterator[str]]
"""Does one job and yields a note after each part of it; a function of a module, so that it can be sent."""
WATCH_SECONDS = 1.0


def default_processes(device: str) -> int:
    """The default number of processes: one per core, or one for a GPU."""
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(work: Work[Job], jobs: Sequence[Job], processes: int) -> Iterator[str]:
    """Do all jobs in order and yield their notes; with one process, in this one.

    Processes are spawned, with one thread each: small matrices gain nothing from more.
    """
    if min(processes, len(jobs)) < 2:
        for job in jobs:
            yield from work(job)
        return
    context = multiprocessing.get_context("spawn")
    waiting, notes = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    workers = [
        context.Process(target=_worker, args=(work, waiting, notes), daemon=True)
        for _ in range(min(processes, len(jobs)))
    ]
    with _keeping_memory():
        for worker in workers:
            waiting.put(None)
            worker.start()
    running = len(workers)
    try:
        while running:
            try:
                note = notes.get(timeout=WATCH_SECONDS)
            except queue.Empty:
                if any(worker.exitcode not in (None, 0) for worker in workers):
                    raise UserError(
                        "a worker process ended early (its output is above; if there are none, memory ran out): run "
                        "the same command again, if it happens again in one process (--processes 1, or --workers 1 of "
                        "`ease audit`)"
                    ) from None
                continue
            if isinstance(note, UserError):
                raise note
            if note is None:
                running -= 1
            else:
                yield note
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


@contextmanager
def _keeping_memory() -> Iterator[None]:
    """Let child processes keep freed memory; returning it after every step costs a tenth of the time."""
    changes = {name: str(1 << 32) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _worker(work: Work[Any], waiting: Any, notes: Any) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    parent = multiprocessing.parent_process()
    try:
        while (job := waiting.get()) is not None:
            for note in work(job):
                notes.put(note)
                if parent is not None and not parent.is_alive():  # killed: the run is to be free for the next attempt
                    return
        notes.put(None)
    except UserError as error:
        notes.put(error)
