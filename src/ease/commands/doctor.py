"""`ease doctor`: checks the machine, the installation and the cache, and tries a small run."""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from rich.console import RenderableType
from rich.text import Text

import ease
from ease.commands.cache import CacheSummary, exposed_remedy, list_cache
from ease.commands.forget import forget_run
from ease.commands.train import train_run
from ease.config import Config
from ease.console import disk, megabytes, plain, status
from ease.errors import UserError
from ease.methods import BROKEN, METHODS, make_method
from ease.runs.config import load_config
from ease.runs.resolve import RequestOptions
from ease.runs.run import Run
from ease.storage import exclusive, sha256, write_atomic

State = Literal["fine", "warning", "failed"]
PACKAGE = "ease-unlearning"
FEWEST_FREE = 1e9
"""Bytes of free disk below which a run may not fit."""
UNLISTED = ("dev",)
"""Extras for developers."""
SELF_TEST = (
    "data.train=24",
    "data.validation=0",
    "data.test=8",
    "partition.clients=3",
    "partition.scheme=iid",
    "partition.classes=2",
    "training.rounds=1",
    "training.local_epochs=1",
    "model.hidden=16",
    "model.embedding=8",
    "gallery=8",
)


class Finding(Config):
    """One thing that was checked."""

    name: str
    state: State
    words: str


class DoctorSummary(Config):
    """`ease doctor`: all that was checked."""

    version: str
    healthy: bool
    """Whether nothing failed."""
    findings: tuple[Finding, ...]
    cache: CacheSummary | None
    """Null if it could not be read."""

    def render(self) -> Iterator[RenderableType]:
        styles = {"fine": "green", "warning": "yellow", "failed": "bold red"}
        for each in self.findings:
            yield Text.assemble((f"{each.state:8}", styles[each.state]), f"{each.name}: {plain(each.words)}")
        yield "Everything works" if self.healthy else "Something does not work: see what failed above"


def doctor(quiet: bool) -> DoctorSummary:
    """Run every check. A check that raises an error has failed, and the others still run."""
    looked = [
        ("ease", _versions),
        ("machine", _machine),
        ("packages", _packages),
        ("methods", _methods),
        ("GPU", _gpu),
        ("cache", _cache),
        ("this folder", lambda: _place(Path.cwd())),
        ("temporary folder", lambda: _place(Path(tempfile.gettempdir()))),
        ("self-test", _self_test),
    ]
    with status("looking and trying", quiet):
        findings = [each for name, look in looked for each in _looked(name, look)]
    try:
        cache = list_cache()
    except UserError:
        cache = None  # reported by the check of the cache
    return DoctorSummary(
        version=ease.__version__,
        healthy=all(each.state != "failed" for each in findings),
        findings=tuple(findings),
        cache=cache,
    )


def _looked(name: str, look: Callable[[], Iterator[tuple[State, str]]]) -> list[Finding]:
    try:
        return [Finding(name=name, state=state, words=words) for state, words in look()]
    except Exception as error:  # whatever it is, it is what someone asks the doctor about
        words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return [Finding(name=name, state="failed", words=words)]


def _versions() -> Iterator[tuple[State, str]]:
    place = Path(ease.__file__).parent
    yield "fine", f"{ease.__version__} in {place}; Python {platform.python_version()}, torch {torch.__version__}"


def _machine() -> Iterator[tuple[State, str]]:
    threads = os.environ.get("OMP_NUM_THREADS")
    given = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield (
        "fine",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} used{given}",
    )


def _packages() -> Iterator[tuple[State, str]]:
    try:
        wanted = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        yield "warning", f"{PACKAGE} was not installed by pip, so nothing says which packages it needs"
        return
    lacking = [_lack(each) for each in wanted if each.marker is None]
    yield from (("failed", f"{each}; pip install --upgrade {PACKAGE}") for each in lacking if each)
    if not any(lacking):
        yield "fine", "all that are needed"
    extras = sorted(set(metadata.metadata(PACKAGE).get_all("Provides-Extra") or ()) - {*UNLISTED})
    there = {extra: not any(_lack(each) for each in _of(wanted, extra)) for extra in extras}
    yield "fine", f"extras that can be used: {', '.join(name for name, whole in there.items() if whole) or 'none'}"
    absent = [name for name, whole in there.items() if not whole]
    if absent:
        yield "fine", f'extras that are absent: {", ".join(absent)}; e.g. pip install "{PACKAGE}[{absent[0]}]"'


def _of(wanted: list[Requirement], extra: str) -> list[Requirement]:
    bare = {"extra": ""}
    return [
        each
        for each in wanted
        if each.marker and each.marker.evaluate({"extra": extra}) and not each.marker.evaluate(bare)
    ]


def _lack(wanted: Requirement) -> str:
    """The problem with a required package. Empty if it is installed and new enough."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is missing"
    fits = wanted.specifier.contains(version, prereleases=True)
    return "" if fits else f"{wanted.name} is {version}, and {wanted.specifier} is needed"


def _methods() -> Iterator[tuple[State, str]]:
    yield "fine", f"{len(METHODS)} can be used"
    yield from (("warning", f"plug-in {name}: {reason}") for name, reason in sorted(BROKEN.items()))


def _gpu() -> Iterator[tuple[State, str]]:
    if not torch.cuda.is_available():
        yield "fine", "none is visible; everything runs on the CPU"
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.ones(8, device="cuda").sum().item()  # a driver that does not fit shows only now
    yield "fine", f'{torch.cuda.get_device_name(0)}, {total / 1e9:.0f} GB; use it with device = "cuda"'


def _cache() -> Iterator[tuple[State, str]]:
    found = list_cache()
    yield from _place(found.folder)
    held = ", ".join(f"{part.name} {megabytes(part.bytes)}" for part in found.parts if part.files)
    yield "fine", f"{megabytes(found.bytes)} ({held or 'empty'}); `ease cache clear` deletes it"
    if found.exposed:
        yield "warning", exposed_remedy(found)


def _place(folder: Path) -> Iterator[tuple[State, str]]:
    """Check whether files can be written, replaced and locked in a folder, and how much space is left."""
    with tempfile.TemporaryDirectory(prefix=".ease-doctor-", dir=folder) as inside:
        for content in (b"first", b"second"):
            write_atomic(Path(inside) / "file", content)
        with exclusive(Path(inside) / "lock", f"{folder}: locks do not work here; use another disk"):
            pass
    free = shutil.disk_usage(folder).free
    enough = free >= FEWEST_FREE
    words = f"{folder} can be written, {disk(free)} are free"
    yield ("fine", words) if enough else ("warning", f"{words}, which is little: a run may not fit")


def _self_test() -> Iterator[tuple[State, str]]:
    """Train twice with a separate cache, forget a client, and read the results back."""
    begun = time.monotonic()
    config = load_config(None, SELF_TEST)
    with tempfile.TemporaryDirectory(prefix="ease-doctor-") as temporary, _own_cache(Path(temporary) / "cache"):
        runs = [Path(temporary) / name for name in ("first", "second")]
        for run in runs:
            train_run(config, run, quiet=True)
        states = [sha256(run / "rounds" / "00001" / "state.safetensors") for run in runs]
        if states[0] != states[1]:
            yield "failed", "the same training gave two different models; please report it with the lines above"
            return
        answer = forget_run(runs[0], RequestOptions(clients=[1]), make_method("ease"), quiet=True)
        Run.load(runs[0]).history.state(1)
        model = sha256(answer.folder / "model.safetensors")
    if model == states[0]:
        yield "failed", "a client was to be forgotten, and the model did not change"
        return
    seconds = time.monotonic() - begun
    yield "fine", f"trained twice to the same bytes, forgot a client, read it back, in {seconds:.1f} s"


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("EASE_CACHE")
    os.environ["EASE_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("EASE_CACHE")
        if before is not None:
            os.environ["EASE_CACHE"] = before
