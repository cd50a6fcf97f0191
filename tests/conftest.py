"""What many tests share: one cache for the session, a small world, and a disk that is nearly full."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ease.federation.protocol import LocalJob, Optimiser
from ease.params import Block, Params
from ease.run import RunConfig, World, load_config

torch.set_num_threads(1)  # so that results do not depend on how many tests run at once

SMALL = (
    "data.train=60",
    "data.validation=0",
    "data.test=20",
    "partition.clients=3",
    "partition.classes=3",
    "partition.scheme=iid",
    "training.rounds=2",
    "training.local_epochs=1",
    "training.batch_size=8",
    "model.hidden=16",
    "model.embedding=8",
    "gallery=20",
)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's cache; what one test computed, the next may use."""
    monkeypatch.setenv("EASE_CACHE", str(shared_cache))
    return shared_cache


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Assignments that make a run small: 60 training pairs, 3 clients, 2 rounds."""
    return SMALL


@pytest.fixture(scope="session")
def small_config() -> Callable[..., RunConfig]:
    """A small configuration; further assignments change it."""
    return lambda *assignments: load_config(None, (*SMALL, *assignments))


@pytest.fixture(scope="session")
def world(shared_cache: Path, small_config: Callable[..., RunConfig]) -> World:
    """The world of the small configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return World.open(small_config())


@pytest.fixture(scope="session")
def local_job() -> Callable[..., LocalJob]:
    """A job of one epoch; keyword arguments change it."""
    fields = {
        "round": 1,
        "seed": 0,
        "stream": "train",
        "optimiser": Optimiser(learning_rate=0.5),
        "epochs": 1,
        "batch_size": 8,
        "temperature": 0.07,
    }
    return lambda **changes: LocalJob(**{**fields, **changes})


@pytest.fixture(scope="session")
def toy_params() -> Callable[..., Params]:
    """A state of two blocks and six values, filled with one number or drawn from a seed."""
    blocks = (
        Block("image.layer", "image", "lora", ("image.layer.B",)),
        Block("text.projector.0", "text", "projector", ("text.projector.0.bias", "text.projector.0.weight")),
    )
    shapes = {"image.layer.B": (2, 1), "text.projector.0.bias": (1,), "text.projector.0.weight": (1, 3)}

    def make(value: float | None = None, seed: int = 0) -> Params:
        rng = torch.Generator().manual_seed(seed)
        return Params(
            {
                name: torch.randn(shape, generator=rng) if value is None else torch.full(shape, float(value))
                for name, shape in shapes.items()
            },
            blocks,
        )

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a real file system of so many kilobytes; skipped where the user may not mount one."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a small disk needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
