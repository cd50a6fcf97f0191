"""What a command enters: its modules, the depth of its calls, the files it opens and the hashes it takes.

    python benchmarks/entered.py

A small federation with adapters is trained, a concept and a client are forgotten, and one result is audited. Files are
those of the run and of the cache. Hashes are also listed by purpose: most seed a random stream or name a pair.
"""

import hashlib
import io
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ease
from ease.cli import main as command_line

ROOT = f"{Path(ease.__file__).parent}/"
STEPS = {"federation/local.train", "federation/stacked.train_stacked"}
"""Where the steps of a client are taken."""
SETTINGS = (
    *("data.train=60", "data.validation=0", "data.test=40", "gallery=20"),
    *("partition.clients=3", "partition.classes=3", "partition.scheme=iid"),
    *("training.rounds=2", "training.local_epochs=1", "training.batch_size=8", "engine=sequential"),
    *("model.lora=ffa", "model.hidden=16", "model.embedding=8"),
)


class Entered:
    """The calls into the package while it watches."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        """Each once, in the order in which they are first called."""
        self.deepest: list[str] = []
        """The longest chain of calls."""
        self.to_a_step: list[str] = []
        """The longest chain of calls from a method to a step, both included."""
        self._stacks = threading.local()
        self._names: dict[CodeType, str] = {}

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile function of each thread."""
        code = frame.f_code
        if event not in ("call", "return") or not (name := self._name(code)):
            return
        stack: list[CodeType] = self._stacks.__dict__.setdefault("stack", [])
        if event == "return":
            if stack and stack[-1] is code:
                stack.pop()
            return
        stack.append(code)
        self.functions.setdefault(name)
        if len(stack) > len(self.deepest):
            self.deepest = [self._name(each) for each in stack]
        if name in STEPS:
            names = [self._name(each) for each in stack]
            begun = [n for n, each in enumerate(names) if each.startswith("methods/") and each.endswith(".unlearn")]
            if begun and len(names) - begun[-1] > len(self.to_a_step):
                self.to_a_step = names[begun[-1] :]

    @property
    def modules(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.functions}

    @property
    def between(self) -> int:
        """Calls between a method and a step."""
        return max(0, len(self.to_a_step) - 2)

    def _name(self, code: CodeType) -> str:
        """The module and name of a function of the package; empty for others, and for bodies of modules and classes."""
        if code not in self._names:
            own = code.co_filename.startswith(ROOT) and code.co_flags & CO_OPTIMIZED
            file = Path(code.co_filename.removeprefix(ROOT)).with_suffix("")
            self._names[code] = f"{file.as_posix()}.{code.co_name}" if own else ""
        return self._names[code]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread and those that start meanwhile."""
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


class Touched:
    """Files that are opened under some folder, and hashes that are taken; there is no way to stop watching."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.hashes = str(folder), Counter[str](), Counter[str]()
        sys.addaudithook(self._opened)
        plain, of_file = hashlib.sha256, hashlib.file_digest

        def sha256(*values: Any, **more: Any) -> Any:
            self.hashes[_caller()] += 1
            return plain(*values, **more)

        def file_digest(*values: Any, **more: Any) -> Any:
            self.hashes[_caller()] += 1
            return of_file(*values, **more)

        hashlib.sha256, hashlib.file_digest = sha256, file_digest  # type: ignore[assignment]

    def _opened(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str | bytes) and os.fsdecode(values[0]).startswith(self.folder):
            self.files[os.fsdecode(values[0])] += 1

    def clear(self) -> None:
        self.files.clear()
        self.hashes.clear()


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def run(touched: Touched, *words: str) -> None:
    """Run a command in this process and print one line."""
    touched.clear()
    seen, sys.argv = Entered(), ["ease", *words, "--quiet", "--json"]
    code: object = 0
    try:
        with redirect_stdout(io.StringIO()), seen.watching():
            command_line()
    except SystemExit as end:
        code = end.code
    seeds, ids = touched.hashes["seeding.stream_seed"], touched.hashes["storage.digest"]
    hashes = touched.hashes.total()
    print(
        f"{' '.join(words[:1] + words[2:4])} (exit code {code}): {len(seen.modules)} modules, "
        f"{len(seen.deepest)} calls deep, {seen.between} between method and step, "
        f"{touched.files.total()} files opened ({len(touched.files)} different), {hashes} hashes "
        f"({seeds} seeds, {ids} names, {hashes - seeds - ids} of contents)"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASE_CACHE"] = f"{folder}/cache"
        touched, first = Touched(Path(folder)), f"{folder}/run"
        run(touched, "train", *(word for each in SETTINGS for word in ("--set", each)), "--out", first)
        run(touched, "forget", first, "--concept", "dunes")
        run(touched, "forget", first, "--client", "1")
        few = ("--shadows", "4", "--retrains", "1", "--workers", "1", "--retrain")
        run(touched, "audit", first, "--request", "client-1", *few)


if __name__ == "__main__":
    main()
