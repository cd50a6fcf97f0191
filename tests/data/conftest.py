"""What tests of data files share: a cache of their own, small pictures, and the way real data is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from ease.config import validate
from ease.data.config import DataConfig, load_pairs
from ease.data.pairs import PairSet


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def picture() -> Callable[..., Path]:
    """Write a picture of one grey shade; its folder is made."""

    def write(path: Path, shade: int = 0, size: tuple[int, int] = (20, 18)) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (shade, shade, shade)).save(path)
        return path

    return write


@pytest.fixture
def load(own_cache: Path) -> Callable[..., PairSet]:
    """Load data as a run does: validated settings, then `load_pairs`."""

    def read(name: str, path: Path, **settings: object) -> PairSet:
        return load_pairs(validate(DataConfig, {"name": name, "path": str(path), **settings}, "test"), 4)

    return read
