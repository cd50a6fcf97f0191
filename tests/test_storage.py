"""Files are whole or absent: on a full disk, in a crash and under another process's hands."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ease import storage
from ease.errors import UserError
from ease.storage import (
    LEFTOVER,
    cache_folder,
    digest,
    exclusive,
    map_array,
    new_array,
    read_json,
    read_note,
    read_tensors,
    remove_leftovers,
    write_atomic,
    write_json,
    write_tensors,
)

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.int8)}


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    monkeypatch.setattr(os, failing, no_space)
    with pytest.raises(UserError, match=r"file: cannot write .No space left on device.; free some space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for write in (lambda path: write_atomic(path, b""), lambda path: write_tensors(path, TENSORS)):
        with pytest.raises(UserError, match="file: cannot make this folder"):
            write(tmp_path / "file" / "inside")
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="EASE_CACHE"):
        cache_folder()


def test_tensors_come_back_exactly_and_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_tensors(one, TENSORS, note={"x": 1, "y": [2]})
    write_tensors(
        two, {name: tensor.clone().t().contiguous().t() for name, tensor in TENSORS.items()}, {"y": [2], "x": 1}
    )
    assert one.read_bytes() == two.read_bytes()
    assert read_note(one) == {"x": 1, "y": [2]}
    back = read_tensors(one)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


@pytest.mark.parametrize("read", [read_tensors, read_note])
@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_tensors_are_refused(tmp_path: Path, read: Callable, kept: int) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, note=1)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"t\.safetensors: damaged or truncated"):
        read(path)


@pytest.mark.parametrize("read", [read_tensors, read_note, read_json, map_array])
def test_missing_files_and_folders_in_their_place_are_refused(tmp_path: Path, read: Callable) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            read(path)


def test_json_is_checked_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})
    assert read_json(path) == {"b": 1}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("nan"))
    assert read_json(path) == {"b": 1}
    path.write_text('{"b":')
    with pytest.raises(UserError, match="damaged JSON"):
        read_json(path)


def test_an_array_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with new_array(path, (4, 3), np.float32) as array:
        array[:] = 2
        assert not path.exists()
    np.testing.assert_array_equal(map_array(path), np.full((4, 3), 2, np.float32))
    with pytest.raises(OSError, match="of the caller"), new_array(tmp_path / "b.npy", (4,), np.float32):
        raise OSError("of the caller")
    assert [file.name for file in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"text"])
def test_a_damaged_array_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npy: damaged array"):
        map_array(tmp_path / "a.npy")


def test_an_array_larger_than_the_disk_is_refused_before_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(UserError, match=r"a\.npy: cannot write"), new_array(tmp_path / "a.npy", (4,), np.float32):
        pytest.fail("the space is not there")
    assert not list(tmp_path.iterdir())


def test_a_really_full_disk(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64)
    write_atomic(disk / "kept", b"x" * 1000)
    with pytest.raises(UserError, match=r"a\.npy: cannot write .No space left"):
        with new_array(disk / "a.npy", (1000, 1000), np.float32):
            pytest.fail("the space is not there")
    with pytest.raises(UserError, match=r"big: cannot write .No space left"):
        write_atomic(disk / "big", bytes(200_000))
    assert [path.name for path in disk.iterdir()] == ["kept"]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with exclusive(tmp_path / ".lock", "busy now"):
        with pytest.raises(UserError, match="busy now"), exclusive(tmp_path / ".lock", "busy now"):
            pytest.fail("two hold the lock")
    with exclusive(tmp_path / ".lock", "busy now"):
        pass


HOLDER = """
import sys, time
from pathlib import Path
from ease.storage import exclusive
with exclusive(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_locks_no_one_out(tmp_path: Path) -> None:
    path = tmp_path / "deep" / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(UserError, match="busy now"), exclusive(path, "busy now"):
                pytest.fail("two hold the lock")
        finally:
            holder.kill()
    with exclusive(path, "busy now"):
        pass


def test_a_lock_is_free_again_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / ".lock", "busy"):
        raise ZeroDivisionError
    with exclusive(tmp_path / ".lock", "busy"):
        pass


def test_a_disk_without_locks_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never with a file whose presence alone locks: a killed run would leave it behind."""
    fcntl = pytest.importorskip("fcntl")

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.raises(UserError, match=r"\.lock: cannot lock .Function not implemented.; use a folder"):
        with exclusive(tmp_path / ".lock", "busy"):
            pytest.fail("nothing is locked")
    monkeypatch.undo()
    with exclusive(tmp_path / ".lock", "busy"):
        pass


IMPORT_ALL = """
import importlib, pkgutil, sys
for absent in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[absent] = None
import ease
for module in pkgutil.walk_packages(ease.__path__, "ease."):
    importlib.import_module(module.name)
print("imported")
"""


def test_every_module_can_be_imported_where_unix_modules_are_absent() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr


def test_leftovers_go_once_they_are_old_enough(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f"{LEFTOVER}old", f"{LEFTOVER}new", "work"))
    for path in (old, new, other):
        path.write_text("")
    os.utime(old, (0, 0))
    remove_leftovers(tmp_path, older_than_seconds=3600)
    assert set(tmp_path.iterdir()) == {new, other}
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {other}


def test_writers_use_names_that_are_recognised_as_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(storage, "_sync_folder", lambda folder: None)
    monkeypatch.setattr(os, "replace", lambda source, target: seen.append(Path(source).name))
    write_atomic(tmp_path / "a", b"")
    with new_array(tmp_path / "b.npy", (1,), np.float32):
        pass
    assert len(seen) == 2 and all(name.startswith(LEFTOVER) for name in seen)


def test_a_digest_depends_on_values_and_not_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len({digest(1), digest("1"), digest(1, 2), digest([1, 2]), digest(None)}) == 5
