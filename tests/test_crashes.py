"""The plug pulled, the disk full and the memory gone before any one operation on a file: resumed, it ends the same.

Every operation is seen: opening, renaming, deleting and making of files and folders by the interpreter's audit events,
waiting for the disk by its function. By default two of each command's are struck, one by a kill. Among `slow` tests
every state that a kill can leave is gone on from, and every tenth operation fails; with EASE_SWEEP=all each one does.
"""

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.bitflips import TINY, end_after, forked, inside

from ease.cli import main

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork")
SETTINGS = [word for each in (*TINY, "data.test=12", "model.lora=off") for word in ("--set", each)]
COMMANDS = {
    "train": ["train", "--out", "run", "--quiet", *SETTINGS],
    "forget": ["forget", "run", "--samples", "ids.txt", "--quiet"],
}
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
EXHAUSTIVE = os.environ.get("EASE_SWEEP") == "all"
FAILING = 1 if EXHAUSTIVE else 10
"""One of so many operations fails in the sweeps."""
Strike = Callable[[], None]


class Watch:
    """Counts operations on files in a folder, and strikes before one of them, or before all (`at` is None)."""

    def __init__(self) -> None:
        self.folder, self.seen, self.strike = Path("/nowhere"), 0, lambda: None
        self.at: int | None = -1
        self.watching = False

    def tick(self) -> None:
        if self.watching:
            number, self.seen = self.seen, self.seen + 1
            if self.at in (None, number):
                self.watching = False
                self.strike()
                self.watching = self.at is None

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        # Reading is left out but for folders, which are opened to be waited for: nothing on the disk hangs on it.
        if not self.watching or event not in WATCHED or not isinstance(arguments[0], str | os.PathLike):
            return
        path, reading = Path(arguments[0]).absolute(), event == "open" and not _writes(arguments)
        if path.is_relative_to(self.folder) and not (reading and not path.is_dir()):
            self.tick()


def _writes(arguments: tuple[object, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


WATCH = Watch()


@pytest.fixture(scope="module", autouse=True)
def hooked() -> Iterator[None]:
    """The hook cannot be taken away again; between tests it does nothing.

    Nothing waits for the disk: what a process has written outlives it, and no power is cut here.
    """
    sys.addaudithook(WATCH.hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: WATCH.tick())
        yield


def command(arguments: list[str]) -> None:
    sys.argv = ["ease", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def struck(folder: Path, arguments: list[str], at: int | None, strike: Strike) -> tuple[int, str, int]:
    """A command in a copy of this process, struck before one of its operations: its end, its words, how many it saw."""
    seen = folder / "seen"

    def work() -> None:
        WATCH.folder, WATCH.seen, WATCH.at, WATCH.strike, WATCH.watching = folder, 0, at, strike, True
        command(arguments)
        WATCH.watching = False
        seen.write_text(str(WATCH.seen))

    reported = forked(work, folder)
    return reported.code, reported.said, int(seen.read_text()) if seen.exists() else -1


def contents(folder: Path) -> dict[str, bytes]:
    """What a run came to: every file that depends neither on the clock nor on where it was interrupted."""
    skipped = {".lock", "record.json", "summary.json"}
    paths = [path for path in sorted((folder / "run").rglob("*")) if path.is_file() and path.name not in skipped]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@dataclass(frozen=True)
class Begun:
    """Where a command begins, what it comes to, and how many operations that takes."""

    arguments: list[str]
    before: Path
    contents: Callable[[Path], dict[str, object]]
    expected: dict[str, object]
    operations: int

    def struck(self, folder: Path, at: int | None, strike: Strike) -> tuple[int, str]:
        """Its exit code and its words, when it begins in a new folder and is struck there."""
        shutil.copytree(self.before, folder)
        return struck(folder, self.arguments, at, strike)[:2]

    def goes_on(self, folder: Path, at: object) -> None:
        """The same command again ends as if nothing had been; the folder is gone afterwards."""
        code, said, _ = struck(folder, self.arguments, -1, lambda: None)
        assert code == 0, (at, said)
        found = self.contents(folder)
        assert found.keys() == self.expected.keys(), at
        assert [name for name in found if found[name] != self.expected[name]] == [], at
        assert not list((folder / "run").rglob(".partial-*")) and not (folder / "run" / ".purge").exists(), at
        shutil.rmtree(folder)


def begin(
    folder: Path, arguments: list[str], apart: Path, contents: Callable[[Path], dict[str, object]] = contents
) -> Begun:
    """Run a command in a folder; what was there before stays apart."""
    before = Path(shutil.copytree(folder, apart / "before"))
    with inside(folder):
        command(arguments)  # here, so that every copy of this process has the imports behind it
    again = Path(shutil.copytree(before, apart / "counted"))
    code, said, seen = struck(again, arguments, -1, lambda: None)
    assert code == 0 and contents(again) == contents(folder), said
    return Begun(arguments, before, contents, contents(folder), seen)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> dict[str, Begun]:
    folder, found = tmp_path_factory.mktemp("whole"), {}
    for name, arguments in COMMANDS.items():
        found[name] = begin(folder, arguments, tmp_path_factory.mktemp(name))
        ids = [f"train-{number:06d}" for number in range(4)]
        (folder / "ids.txt").write_text("\n".join(ids))
    return found


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def exhausted() -> None:
    raise MemoryError


STRIKES: dict[str, Strike] = {"killed": killed, "disk full": full, "disk broken": broken, "no memory": exhausted}


def survives(begun: Begun, strike: str, at: int, folder: Path) -> None:
    code, said = begun.struck(folder, at, STRIKES[strike])
    if strike == "killed":
        assert code == -signal.SIGKILL, said
    else:
        # What is struck while it cleans up after itself may pass unseen; whatever is seen is one line.
        assert code in (0, 2) and said.count("error: ") == (code == 2) and "Traceback" not in said, (at, said)
        if begun.arguments[0] in COMMANDS:  # others tell of what they had finished before
            assert code == 0 or said.count("\n") == 1, (at, said)
    begun.goes_on(folder, at)


def states_before_operations(begun: Begun, folder: Path) -> list[Path]:
    """For each operation a copy of all files as a kill right before it leaves them; equal ones are one copy."""
    work, order = folder / "work", folder / "order.json"
    copies: dict[str, Path] = {}
    states: list[str] = []

    def keep() -> None:
        digest = hashlib.sha256()
        for path in sorted(work.rglob("*")):
            digest.update(f"{path} {path.stat().st_mode}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"")
        if (key := digest.hexdigest()) not in copies:
            copies[key] = Path(shutil.copytree(work, folder / f"{len(copies):05d}"))
        states.append(str(copies[key]))
        order.write_text(json.dumps(states))

    code, said = begun.struck(work, None, keep)
    assert code == 0, said
    return [Path(each) for each in json.loads(order.read_text())]


def names(folder: Path) -> list[str]:
    """Every file and folder; what is unfinished has a name that is drawn by lot."""
    paths = [path.relative_to(folder) for path in folder.rglob("*")]
    return sorted("unfinished" if ".partial-" in path.name else str(path) for path in paths)


def sweep_kills(begun: Begun, folder: Path) -> None:
    """Killed before each operation, the command goes on. Processes are killed for some: they leave what was kept."""
    states = states_before_operations(begun, folder / "states")
    assert len(states) == begun.operations
    for at in range(7, begun.operations, 40):
        code, said = begun.struck(folder / "struck", at, killed)
        assert code == -signal.SIGKILL, said
        assert names(folder / "struck") == names(states[at]), at
        shutil.rmtree(folder / "struck")
    for state in sorted(set(states)):
        begun.goes_on(state, states.index(state))


def sweep_errors(begun: Begun, strike: str, folder: Path) -> None:
    """One of the three errors, which all end in an exception there, before one of FAILING operations in turn."""
    first = list(STRIKES).index(strike) % 3
    for at in range(first * FAILING, begun.operations, 3 * FAILING):
        survives(begun, strike, at, folder)


def few(*commands: str, first: int = 0) -> list[tuple[str, str]]:
    """Each command with a kill and one of the errors, which all end in an exception: another one for the next."""
    errors = [strike for strike in STRIKES if strike != "killed"]
    return [
        (name, strike)
        for number, name in enumerate(commands, first)
        for strike in ("killed", errors[number % len(errors)])
    ]


def strike_once(begun: Begun, strike: str, folder: Path) -> None:
    """Each kind of strike meets another part of what a command does."""
    assert begun.operations > 40
    survives(begun, strike, (2 * list(STRIKES).index(strike) + 3) * begun.operations // (2 * len(STRIKES) + 2), folder)


@pytest.mark.parametrize(("name", "strike"), few(*COMMANDS))
def test_struck_before_some_operations_it_resumes_to_the_same_bytes(begun, tmp_path, name: str, strike: str) -> None:
    strike_once(begun[name], strike, tmp_path / "struck")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_before_every_operation_it_resumes_to_the_same_bytes(begun, tmp_path, name: str) -> None:
    sweep_kills(begun[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("strike", [strike for strike in STRIKES if strike != "killed"])
def test_failing_at_one_operation_after_the_other_it_resumes_to_the_same_bytes(
    begun, tmp_path, name: str, strike: str
) -> None:
    sweep_errors(begun[name], strike, tmp_path / "struck")


# --- one cache, several processes that do not know of each other ---


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, bytes]:
    """What one process alone comes to, on a cache of its own."""
    folder = tmp_path_factory.mktemp("alone")
    with inside(folder):
        command(COMMANDS["train"])
    return contents(folder)


def two_at_once(folder: Path, alone: dict[str, bytes], delay: float) -> None:
    """Copies of this process, as one would start them in two containers."""
    processes = {}
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        process = os.fork()
        if process == 0:
            os.getpid = lambda: 7
            time.sleep(delay if processes else 0)
            with (folder / f"{name}.txt").open("w") as said:
                end_after(lambda: _train_beside(folder / "cache"), folder / name, said.fileno())
        processes[name] = process
    codes = []
    for name, process in processes.items():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        said = (folder / f"{name}.txt").read_text()
        assert codes[-1] in (0, 2) and "Traceback" not in said, said
        if codes[-1] == 0:
            assert contents(folder / name) == alone
        else:
            assert said.count("\n") == 1
    assert 0 in codes


def _train_beside(cache: Path) -> None:
    """Where a folder's own cache would be, one is named that others use too."""
    os.environ["EASE_CACHE"] = str(cache)
    sys.stdout = io.StringIO()
    command(COMMANDS["train"])


@pytest.mark.slow
def test_two_processes_of_equal_number_share_an_empty_cache(alone, tmp_path) -> None:
    two_at_once(tmp_path, alone, 0)


@pytest.mark.slow
def test_two_processes_of_equal_number_share_an_empty_cache_often(alone, tmp_path) -> None:
    attempts = 20 if EXHAUSTIVE else 5
    for attempt in range(attempts):
        two_at_once(tmp_path / str(attempt), alone, attempt / attempts)
