"""The plug pulled, the disk full and the memory gone before any one operation on a file: resumed, it ends the same.

Every operation is seen: opening, renaming, deleting and making of files and folders by the interpreter's audit events,
waiting for the disk by its function. By default a few of them are struck, among `slow` tests each one.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.bitflips import TINY, forked, inside

from ease.cli import main

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork")
SETTINGS = [word for each in (*TINY, "data.test=12") for word in ("--set", each)]
COMMANDS = {
    "train": ["train", "--out", "run", "--quiet", *SETTINGS],
    "forget": ["forget", "run", "--samples", "ids.txt", "--quiet"],
}
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
STRUCK_BY_DEFAULT = 3
Strike = Callable[[], None]


class Watch:
    """Counts operations on files in a folder, and strikes before one of them."""

    def __init__(self) -> None:
        self.folder, self.seen, self.at, self.strike = Path("/nowhere"), 0, -1, lambda: None
        self.watching = False

    def tick(self) -> None:
        if self.watching:
            number, self.seen = self.seen, self.seen + 1
            if number == self.at:
                self.watching = False
                self.strike()

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
    """The hook cannot be taken away again; between tests it does nothing."""
    sys.addaudithook(WATCH.hook)
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        WATCH.tick()
        fsync(descriptor)

    os.fsync = watched
    yield
    os.fsync = fsync


def command(arguments: list[str]) -> None:
    sys.argv = ["ease", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def struck(folder: Path, arguments: list[str], at: int, strike: Strike) -> tuple[int, str, int]:
    """A command in a copy of this process, struck before one of its operations: its end, its words, how many it saw."""
    seen = folder / "seen"

    def work() -> None:
        WATCH.folder, WATCH.seen, WATCH.at, WATCH.strike, WATCH.watching = folder, 0, at, strike, True
        command(arguments)
        WATCH.watching = False
        seen.write_text(str(WATCH.seen))

    told = forked(work, folder)
    return told.code, told.said, int(seen.read_text()) if seen.exists() else -1


def contents(folder: Path) -> dict[str, bytes]:
    """What a run came to: every file that depends neither on the clock nor on where it was interrupted."""
    skipped = {".lock", "record.json", "summary.json"}
    paths = [path for path in sorted((folder / "run").rglob("*")) if path.is_file() and path.name not in skipped]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> dict[str, tuple[Path, dict[str, bytes], int]]:
    """For each command where it begins, what it comes to, and how many operations that takes."""
    folder, found = tmp_path_factory.mktemp("whole"), {}
    for name, arguments in COMMANDS.items():
        before = Path(shutil.copytree(folder, tmp_path_factory.mktemp(name) / "before"))
        with inside(folder):
            command(arguments)  # here, so that every copy of this process has the imports behind it
        again = Path(shutil.copytree(before, before.parent / "counted"))
        code, said, seen = struck(again, arguments, -1, lambda: None)
        assert code == 0 and contents(again) == contents(folder), said
        found[name] = (before, contents(folder), seen)
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


def survives(begun, name: str, strike: str, at: int, folder: Path) -> None:
    before, expected, _ = begun[name]
    shutil.copytree(before, folder)
    code, said, _ = struck(folder, COMMANDS[name], at, STRIKES[strike])
    if strike == "killed":
        assert code == -signal.SIGKILL, said
    else:
        # What is struck while it cleans up after itself may pass unseen; whatever is seen is one line.
        assert code in (0, 2) and said.count("error: ") == (code == 2) and "Traceback" not in said, (at, said)
        assert said.count("\n") <= (code == 2) or code == 0, (at, said)
    code, said, _ = struck(folder, COMMANDS[name], -1, lambda: None)
    assert code == 0, (at, said)
    assert contents(folder) == expected, at
    assert not list((folder / "run").rglob(".partial-*")), at
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("strike", STRIKES)
def test_struck_before_some_operations_it_resumes_to_the_same_bytes(begun, tmp_path, name: str, strike: str) -> None:
    total = begun[name][2]
    assert total > 40
    offset = list(STRIKES).index(strike)  # each kind of strike meets others
    step = total // STRUCK_BY_DEFAULT
    for at in range(offset * step // len(STRIKES), total, step):
        survives(begun, name, strike, at, tmp_path / "struck")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("strike", STRIKES)
def test_struck_before_every_operation_it_resumes_to_the_same_bytes(begun, tmp_path, name: str, strike: str) -> None:
    """Killed before each one; of the three errors, which all end in an exception there, one before each in turn."""
    place = list(STRIKES).index(strike)
    every, first = (1, 0) if strike == "killed" else (3, place % 3)
    for at in range(first, begun[name][2], every):
        survives(begun, name, strike, at, tmp_path / "struck")


# --- one cache, several processes that do not know of each other ---

ONE_OF_TWO = """
import os, sys
os.getpid = lambda: 7  # as in two containers
from ease.cli import main
main()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, bytes]:
    """What one process alone comes to, on a cache of its own."""
    folder = tmp_path_factory.mktemp("alone")
    with inside(folder):
        command(COMMANDS["train"])
    return contents(folder)


def two_at_once(folder: Path, alone: dict[str, bytes], delay: float) -> None:
    environment = {**os.environ, "EASE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    processes = []
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        start = ["sh", "-c", f'sleep {delay if processes else 0}; exec "$@"', "sh", sys.executable, "-c", ONE_OF_TWO]
        processes.append(
            subprocess.Popen(
                [*start, *COMMANDS["train"]],
                cwd=folder / name,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for name, process in zip(("one", "two"), processes, strict=True):
        _, said = process.communicate(timeout=300)
        assert process.returncode in (0, 2) and "Traceback" not in said, said
        if process.returncode == 0:
            assert contents(folder / name) == alone
        else:
            assert said.count("\n") == 1
    assert any(process.returncode == 0 for process in processes)


def test_two_processes_of_equal_number_share_an_empty_cache(alone, tmp_path) -> None:
    two_at_once(tmp_path, alone, 0)


@pytest.mark.slow
def test_two_processes_of_equal_number_share_an_empty_cache_often(alone, tmp_path) -> None:
    for attempt in range(20):
        two_at_once(tmp_path / str(attempt), alone, attempt / 20)
