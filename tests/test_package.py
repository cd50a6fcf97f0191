"""The package as others get it: built, installed where nothing else of the repository is, and used there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ease

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("src", "pyproject.toml", "README.md", "LICENSE")
TINY = (
    "data.train=24",
    "data.validation=0",
    "data.test=8",
    "partition.clients=3",
    "partition.classes=2",
    "partition.scheme=iid",
    "training.rounds=1",
    "model.hidden=16",
    "model.embedding=8",
    "gallery=8",
)


def shown(command: list[str | Path], **more: str) -> str:
    """What a command prints, without anything that leads back to the repository."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "EASE_CACHE")}
    ran = subprocess.run(command, capture_output=True, text=True, env={**environment, **more}, cwd=more["HOME"])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of a copy of the repository, and the wheel that is built from that archive alone."""
    folder = tmp_path_factory.mktemp("package")
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for left in [*folder.rglob("__pycache__"), *folder.rglob("*.egg-info")]:
        shutil.rmtree(left)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (source,) = (folder / "dist").glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", folder / "wheels", source], check=True, capture_output=True)
    (wheel,) = (folder / "wheels").glob("*.whl")
    return source, wheel


@pytest.mark.slow
def test_both_archives_hold_every_file(archives: tuple[Path, Path]) -> None:
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "ease").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "ease/py.typed" in files
    with zipfile.ZipFile(archives[1]) as wheel:
        assert files <= set(wheel.namelist())
    with tarfile.open(archives[0]) as source:
        inside = {name.partition("/src/")[2] for name in source.getnames()}
    assert files <= inside
    assert ease.__version__ in archives[1].name


@pytest.mark.slow
def test_a_wheel_works_where_nothing_else_is(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, which borrows the dependencies and not this repository."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, archives[1]], check=True, capture_output=True)
    site = Path(
        shown([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], HOME=str(tmp_path)).strip()
    )
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # reads no .pth there: no editable install
    home = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = place / "bin" / "ease"
    assert shown([command, "--version"], **home) == f"ease {ease.__version__}\n"
    assert shown([python, "-m", "ease", "--version"], **home) == f"ease {ease.__version__}\n"
    assert "Example: ease demo" in shown([command, "demo", "--help"], **home)
    origin = shown([python, "-c", "import ease.cli; print(ease.cli.__file__)"], **home)
    assert origin.startswith(str(site))
    small = [word for change in TINY for word in ("--set", change)]
    assert "training pairs" in shown([command, "train", "--quiet", "--out", tmp_path / "run", *small], **home)
    assert (tmp_path / ".cache" / "ease").is_dir()
    report = shown([command, "report", tmp_path / "run"], **home)  # needs the templates
    assert "report.html" in report
