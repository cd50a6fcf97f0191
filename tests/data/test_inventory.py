"""The cache tells what it holds and who may read it, and deletes what is its own alone."""

import os
import time
from pathlib import Path

import pytest

from ease.data.inventory import DAY, PARTS, clear, inventory
from ease.data.scenes import load_scenes
from ease.errors import UserError


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Two kinds of files of ours, one of them old, and a stranger's folder and file."""
    files = {
        "pixels/a.npy": b"1234",
        "pixels/a.json": b"12",
        "activations/key/image.npy": b"123",
        "scenes-0123456789abcdef/pixels.npy": b"12345",
        "scenes-of-mine/holiday.jpg": b"1",
        "thesis.tex": b"12",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(content)
        path.chmod(0o600)
    old = time.time() - 10 * DAY
    os.utime(tmp_path / "pixels" / "a.npy", (old, old))
    return tmp_path


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    return {part.name: (part.files, part.bytes) for part in inventory(folder)}


def test_cached_files_are_counted_by_kind(filled: Path) -> None:
    assert sizes(filled) == {
        "activations": (1, 3),
        "classes": (0, 0),
        "pixels": (2, 6),
        "scenes": (1, 5),
        "weights": (0, 0),
        "other": (2, 3),
    }


def test_only_what_is_ours_goes(filled: Path) -> None:
    gone = {part.name: part.bytes for part in clear(filled)}
    assert gone == {"activations": 3, "pixels": 6, "scenes": 5}
    assert {path.name for path in filled.rglob("*") if path.is_file()} == {"holiday.jpg", "thesis.tex"}


def test_only_some_parts_and_old_files(filled: Path) -> None:
    assert [part.bytes for part in clear(filled, ["pixels"], older_than_days=5)] == [4]
    assert clear(filled, ["activations"], older_than_days=5) == ()
    assert sizes(filled)["pixels"] == (1, 2) and sizes(filled)["activations"] == (1, 3)


def test_a_part_that_there_is_none_of_deletes_nothing(filled: Path) -> None:
    before = sizes(filled)
    with pytest.raises(UserError, match=r"pixel: no part of the cache \(did you mean pixels\?\)"):
        clear(filled, ["activations", "pixel"])
    with pytest.raises(UserError, match="other: no part"):
        clear(filled, ["other"])
    assert sizes(filled) == before


def test_links_are_not_followed(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine.jpg").write_bytes(b"1")
    (filled / "pixels" / "link").symlink_to(elsewhere)
    (filled / "classes").symlink_to(elsewhere)
    clear(filled)
    assert (elsewhere / "mine.jpg").is_file() and not (filled / "pixels" / "link").is_symlink()


def test_files_that_others_may_read_are_counted(filled: Path) -> None:
    assert sum(part.exposed for part in inventory(filled) if part.name in PARTS) == 0
    (filled / "pixels" / "a.npy").chmod(0o640)
    (filled / "activations" / "key").chmod(0o755)
    assert {part.name: part.exposed for part in inventory(filled) if part.exposed} == {"pixels": 1, "activations": 1}


def test_whatever_is_cached_is_private_under_any_umask(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        load_scenes(seed=1, train=2, validation=0, test=1)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*")}
    assert {mode for name, mode in modes.items() if "." in name} == {0o600}
    assert {part.name: part.exposed for part in inventory(tmp_path / "cache") if part.files} == {"scenes": 0}


def test_an_absent_cache_is_an_empty_one(tmp_path: Path) -> None:
    assert all(part.files == 0 for part in inventory(tmp_path / "none")) and clear(tmp_path / "none") == ()
