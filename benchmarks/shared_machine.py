"""Processor seconds of `ease demo` on a machine that is shared with busy processes.

python benchmarks/shared_machine.py [--quick] [--busy 0 2 8]

The job runs next to each number of busy processes, with one thread and with all. Processor seconds are user and system
time of the job and of every process that it starts. Its cache is filled beforehand. The command fails if a job next to
busy processes takes more than 1.5 times the processor seconds that it takes alone. `--quick` trains a small model
instead of running the demo. Set GOMP_SPINCOUNT=300000 to see the cost of OpenMP's default, which is to spin.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MOST = 1.5
"""Bound on the processor seconds next to busy processes, relative to those without."""
SPIN = "while True: pass"
DEMO = ("demo", "--quiet")
QUICK = (
    *("train", "--out", "run", "--quiet"),
    *(
        word
        for each in ("data.train=600", "data.validation=100", "data.test=100", "training.rounds=3", "gallery=100")
        for word in ("--set", each)
    ),
)


class Cost(NamedTuple):
    """What one run of the job took, in seconds."""

    processor: float
    wall: float


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes spinning."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def cost(job: Sequence[str], threads: int, cache: Path) -> Cost:
    """Run the job in a new folder and return its cost."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "EASE_CACHE": str(cache)}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "ease", *job], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
    if process.returncode is None:
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"ease {' '.join(job)} ended with exit code {process.returncode}")
    return Cost(used.ru_utime + used.ru_stime, wall)


def survey(job: Sequence[str], numbers: Sequence[int], threads: Sequence[int]) -> Iterator[tuple[int, int, Cost]]:
    """Yield threads of the job, number of busy processes and cost."""
    with tempfile.TemporaryDirectory() as cache:
        cost(job, 1, Path(cache))
        for count in threads:
            for number in numbers:
                with busy(number):
                    yield count, number, cost(job, count, Path(cache))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="train a small model instead of running the demo")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 8], help="numbers of busy processes")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    options = parser.parse_args()
    alone: dict[int, float] = {}
    exceeded = False
    print("| threads | busy processes | processor s | wall s | relative to alone |\n|---|---|---|---|---|")
    for threads, number, each in survey(QUICK if options.quick else DEMO, options.busy, options.threads):
        ratio = each.processor / alone.setdefault(threads, each.processor)
        exceeded |= ratio > MOST
        print(f"| {threads} | {number} | {each.processor:.1f} | {each.wall:.1f} | {ratio:.2f} |", flush=True)
    sys.exit(int(exceeded))


if __name__ == "__main__":
    main()
