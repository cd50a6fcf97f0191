"""Kills `ease` processes with signal 9 while they work on a run, and compares the ends.

python benchmarks/kills.py --kills 100

Each trial begins from the state before one command, kills it up to three times, lets it end, and compares every file
of the run with those that an undisturbed process left, less what depends on the clock. When to kill is drawn by lot as
a number of operations on files: the process tells of each through a pipe, and another process sends the signal from
outside, so that it arrives anywhere between that operation and the next ones. By default processes are copies of one
that has done its imports; `--fresh` starts a new interpreter each time.
"""

import argparse
import base64
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bitflips import TINY, Told, end_after, fix_secrets, inside, reported_hash, timeless

from ease.cli import main as ease_main
from ease.operations.evidence.log import CERTIFIED
from ease.operations.ledger.database import NAME as LEDGER
from ease.storage import LEFTOVER

WORLD = (*TINY, "partition.clients=3", "data.train=30", "data.validation=8")
SETTINGS = tuple(word for each in WORLD for word in ("--set", each))
AUDIT = ("audit", "run", "--request", "client-1", "--shadows", "4", "--retrains", "2", "--pool", "16", "--workers", "1")
ADD = ("request", "add", "run", "--approve", "--quiet")
CERTIFICATE = "run/requests/client-1/ease/certificate.json"
STAGES: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "train": ((), ("train", "--out", "run", *SETTINGS, "--quiet")),
    "forget": ((), ("forget", "run", "--client", "1", "--quiet")),
    "audit": ((("forget", "run", "--client", "1", "--method", "retrain", "--quiet"),), (*AUDIT, "--quiet")),
    "certificate": ((), ("certificate", "run", "--request", "client-1")),
    "keys": ((), ("keys", "new", "run/client.key")),
    "sign": ((), ("certificate", "sign", CERTIFICATE, "--key", "run/client.key")),
    "export": ((), ("export", "run", "--request", "client-1", "--quiet")),
    "serve": ((), ("serve", "run", "--port", "0", "--quiet")),
    "release": (
        (("forget", "run", "--samples", "released.txt", "--name", "few", "--quiet"),),
        ("release", "run", "--request", "few"),
    ),
    "work": (
        ((*ADD, "--client", "1", "--id", "c"), (*ADD, "--samples", "ids.txt", "--id", "s")),
        ("work", "run", "--set", "hold.retain_points=100", "--quiet"),
    ),
    "purge": ((), ("purge", "run", "--quiet")),
    "join": ((), ("join", "run", "--samples", "new.txt", "--consent", "yes", "--by", "ada", "--quiet")),
    "train on": ((), ("train", "--resume", "run", "--until", "3", "--quiet")),
}
"""What is done before, undisturbed, and the command that is killed; each goes on from where the one before ended."""
FINISHED = ("exists already", "has signed already")
"""What `keys new` and `certificate sign` say if the killed process had done all: they do nothing twice."""
SERVING = "serve"
"""A command that ends only when it is told to: it is killed while it starts or answers, and must then start again."""
STARTED = 60.0
"""Seconds in which it must answer."""
MOST_KILLS = 3
"""In one trial."""
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


class Trial(NamedTuple):
    stage: str
    kills: int
    fault: str
    """What was other than without kills; nothing when all was the same."""


class Begun(NamedTuple):
    """Where a command begins, what it comes to and in how many operations."""

    folder: Path
    expected: dict[str, Any]
    operations: int


def command(*arguments: str) -> None:
    sys.argv = ["ease", *arguments]
    try:
        ease_main()
    except SystemExit as ended:
        if ended.code:
            raise


def watched(reported: int, folder: Path, work: Callable[[], object]) -> Callable[[], object]:
    """The same work, which writes a byte to a pipe before each operation that changes a file in a folder."""

    def tell() -> None:
        os.write(reported, b".")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or not isinstance(arguments[0], str | os.PathLike):
            return
        writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if writes and Path(arguments[0]).absolute().is_relative_to(folder):
            tell()

    def telling() -> None:
        fsync = os.fsync
        os.fsync = lambda descriptor: (tell(), fsync(descriptor))[1]  # type: ignore[assignment]
        sys.addaudithook(hook)
        work()

    return telling


FRESH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from benchmarks.kills import command, watched
watched(int(sys.argv[2]), Path(sys.argv[3]), lambda: command(*sys.argv[4:]))()
"""


def run_and_kill(
    folder: Path, arguments: Sequence[str], after: int | None, delay: float, fresh: bool
) -> tuple[Told, int]:
    """A command in a process of its own, killed after so many operations: how it ended, and how many it told of."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        process = (_fresh if fresh else _copied)(folder, arguments, reading, writing, said.fileno())
        os.close(writing)
        seen = 0
        while reported := os.read(reading, 1):
            seen += len(reported)
            if seen == after:
                time.sleep(delay)
                os.kill(process, signal.SIGKILL)  # ours until it is waited for, so no other process can be meant
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        said.seek(0)
        return Told(code, said.read().decode(errors="replace")), seen


def ended(folder: Path, arguments: Sequence[str], fresh: bool) -> tuple[Told, int]:
    """A command that nobody kills."""
    return run_and_kill(folder, arguments, None, 0.0, fresh)


def served(folder: Path, arguments: Sequence[str], fresh: bool, until_killed: float | None = None) -> tuple[Told, int]:
    """Start a server, kill it once it answers or after so many seconds, and return whether that was possible."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        process = (_fresh if fresh else _copied)(folder, arguments, reading, writing, said.fileno())
        os.close(writing)
        reported, answered, until = "", False, time.monotonic() + (until_killed or STARTED)
        while time.monotonic() < until and not (answered and until_killed is None):
            time.sleep(0.05)
            reported = os.pread(said.fileno(), 1 << 16, 0).decode(errors="replace")
            address = re.search(r"http://127\.0\.0\.1:[0-9]+", reported)
            if address is not None and not answered:
                with suppress(OSError), urllib.request.urlopen(f"{address[0]}/health", timeout=5) as answer:
                    answered = answer.status == 200
        os.kill(process, signal.SIGKILL)
        os.close(reading)
        os.waitpid(process, 0)
        code = -signal.SIGKILL if until_killed is not None else 0 if answered else 1
        return Told(code, reported), 1


def _copied(folder: Path, arguments: Sequence[str], reading: int, writing: int, said: int) -> int:
    """A copy of this process, which spares the imports."""
    process = os.fork()
    if process == 0:
        os.close(reading)
        end_after(lambda: watched(writing, folder / "run", lambda: command(*arguments))(), folder, said)
    return process


def _fresh(folder: Path, arguments: Sequence[str], reading: int, writing: int, said: int) -> int:
    """A new interpreter."""
    root, run = str(Path(__file__).parents[1]), str(folder / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", FRESH, root, str(writing), run, *arguments],
        cwd=folder,
        env={**os.environ, "EASE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        pass_fds=(writing,),
        stdout=said,
        stderr=said,
    )
    return process.pid


# --- what a run came to ---


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a run by its bytes; JSON, the ledger and the log by what they say, less what the clock says."""
    run, found = folder / "run", dict[str, Any]()
    for path in sorted(run.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name.startswith((".", LEDGER)) or path.parent.name == "evidence":
            continue
        if path.suffix in (".key", ".pub"):  # drawn at random
            found[name] = "a key"
            continue
        if path.name == "certificate.json":  # signed, and so with the time
            found[name] = certified(json.loads(path.read_bytes()))
            continue
        found[name] = timeless(json.loads(path.read_bytes())) if path.suffix == ".json" else path.read_bytes()
        if path.name == "summary.json":  # what was sent again after a kill is counted again
            found[name] = found[name]["rounds"]
    found |= reported_hash(run)
    # A process that was killed after it logged a certificate logs the next one as well, and every one has another hash.
    log = found.get("log", [])
    found["log"] = [each for each in log if each[0] != CERTIFIED]
    found["certified"] = any(each[0] == CERTIFIED for each in log)
    found["unfinished"] = [path.name for path in run.rglob(f"{LEFTOVER}*")]
    return found


def certified(envelope: dict[str, Any]) -> dict[str, Any]:
    """What a certificate says, less what the clock says, and how many signed it."""
    said = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
    kept = ("asked", "request", "answer", "method", "figures", "verdict")
    return {name: said[name] for name in kept} | {"signatures": len(envelope["signatures"])}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    return f"other than without kills: {', '.join(names[:5])}" if names else ""


# --- trials ---


def prepared(folder: Path, fresh: bool, stages: Sequence[str]) -> dict[str, Begun]:
    """Go through all commands undisturbed, and keep where each begins and what it comes to."""
    work, begun = folder / "here", dict[str, Begun]()
    work.mkdir()
    for name, (before, arguments) in STAGES.items():
        with inside(work), redirect_stdout(io.StringIO()):
            for each in before:
                command(*each)
        if name == "forget":  # secrets that would be drawn at random are there before anything hangs on them
            fix_secrets(work / "run")
        kept = Path(shutil.copytree(work, folder / "before" / name))
        if name != SERVING:
            with inside(work), redirect_stdout(io.StringIO()):
                command(*arguments)  # here, so that copies of this process have its imports
        whole = contents(work)
        operations = 0
        if name in stages:
            shutil.rmtree(work)
            shutil.copytree(kept, work)
            reported, operations = (served if name == SERVING else ended)(work, arguments, fresh)
            assert reported.code == 0, reported.said
            assert not difference(contents(work), whole), (name, difference(contents(work), whole))
        begun[name] = Begun(kept, whole, operations)
        if name == "train":
            members = json.loads((work / "run" / "membership.json").read_text())
            (work / "ids.txt").write_text("\n".join(members["clients"][0]["train_ids"][:2]))
            (work / "new.txt").write_text("\n".join(members["validation"]))
            (work / "released.txt").write_text(members["clients"][2]["train_ids"][0])
    return begun


def trials(
    folder: Path, kills: int, seed: int, fresh: bool, stages: Sequence[str], keep: Path | None = None
) -> Iterator[Trial]:
    """Kill so often; runs that came to something else are kept in a folder, if one is named."""
    begun, draw, done = prepared(folder, fresh, stages), random.Random(seed), 0
    work = folder / "here"
    while done < kills:
        for name in stages:
            before, expected, operations = begun[name]
            shutil.rmtree(work)
            shutil.copytree(before, work)
            struck, last = 0, None
            for _ in range(min(MOST_KILLS, kills - done)):
                after, delay = draw.randrange(1, operations + 1), draw.random()
                if name == SERVING:
                    last, _ = served(work, STAGES[name][1], fresh, 4 * delay)
                else:
                    last, _ = run_and_kill(work, STAGES[name][1], after, delay * 0.005, fresh)
                if last.code != -signal.SIGKILL:
                    break  # it had ended before the signal came
                struck += 1
            if last is None or last.code == -signal.SIGKILL:
                last, _ = (served if name == SERVING else ended)(work, STAGES[name][1], fresh)
            done += struck
            finished = name in ("keys", "sign") and any(said in last.said for said in FINISHED)
            fault = f"exit code {last.code}: {last.said.strip()[-400:]}" if last.code and not finished else ""
            fault = fault or difference(contents(work), expected)
            if fault and keep is not None:
                shutil.copytree(work, keep / f"{name}-{done}")
            yield Trial(name, struck, fault)
            if done >= kills:
                return


def table(found: Sequence[Trial]) -> str:
    rows = ["| killed | times | ends | equal to an undisturbed one |", "|---|---|---|---|"]
    kills, ends, equal = Counter[str](), Counter[str](), Counter[str]()
    for each in found:
        for row in (each.stage, "all"):
            kills[row] += each.kills
            ends[row] += 1
            equal[row] += not each.fault
    order = [*(name for name in STAGES if kills[name]), "all"]
    return "\n".join([*rows, *(f"| {row} | {kills[row]} | {ends[row]} | {equal[row]} |" for row in order)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="start a new interpreter for each process")
    parser.add_argument("--keep", type=Path, help="folder for runs that came to something else")
    parser.add_argument("--stages", nargs="*", choices=list(STAGES), default=list(STAGES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for each in trials(Path(folder).resolve(), args.kills, args.seed, args.fresh, args.stages, args.keep):
            found.append(each)
            print(
                f"{sum(one.kills for one in found)} {each.stage}: killed {each.kills} times {each.fault}",
                file=sys.stderr,
                flush=True,
            )
    print(table(found))
    if any(each.fault for each in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
