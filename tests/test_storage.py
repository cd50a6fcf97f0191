"""Files are whole or absent: on a full disk, in a crash and under another process's hands."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.bitflips import forked

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
    read_noted,
    read_sealed,
    read_some,
    read_tensors,
    remove_leftovers,
    write_atomic,
    write_json,
    write_sealed,
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


def test_tensors_return_exactly_and_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_tensors(one, TENSORS, note={"x": 1, "y": [2]})
    write_tensors(
        two, {name: tensor.clone().t().contiguous().t() for name, tensor in TENSORS.items()}, {"y": [2], "x": 1}
    )
    assert one.read_bytes() == two.read_bytes()
    assert read_noted(one)[1] == {"x": 1, "y": [2]}
    back = read_tensors(one)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


@pytest.mark.parametrize("read", [read_tensors, read_noted])
@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_tensors_are_refused(tmp_path: Path, read: Callable, kept: int) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, note={"n": 1})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"t\.safetensors: damaged"):
        read(path)


@pytest.mark.parametrize("read", [read_tensors, read_noted, read_json, read_sealed, map_array])
def test_missing_files_and_folders_in_their_place_are_refused(tmp_path: Path, read: Callable) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            read(path)


def write_array(path: Path) -> None:
    with new_array(path, (2, 3), np.float32) as array:
        array[:] = np.arange(6).reshape(2, 3)


SEALED: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "json": (lambda path: write_json(path, {"pairs": {"3": 20}, "words": "sha256:" + "1" * 64}), read_json),
    "empty json": (lambda path: write_json(path, {}), read_json),
    "tensors": (lambda path: write_tensors(path, TENSORS, note={"x": 1}), read_tensors),
    "tensors without a note": (lambda path: write_tensors(path, TENSORS), read_noted),
    "some tensors": (lambda path: write_tensors(path, TENSORS), lambda path: read_some(path, ["a"])),
    "bytes": (lambda path: write_sealed(path, b"what a client answered"), read_sealed),
    "array": (write_array, map_array),
}


def _put(file: FileIO, place: int, byte: int) -> None:
    file.seek(place)
    file.write(bytes([byte]))


@pytest.mark.parametrize("kind", SEALED)
def test_every_single_flipped_bit_of_a_sealed_file_is_refused(tmp_path: Path, kind: str) -> None:
    write, read = SEALED[kind]
    path = tmp_path / "file"
    write(path)
    read(path)
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in range(8 * len(whole)):
            _put(file, place // 8, whole[place // 8] ^ 1 << place % 8)
            storage._check_once.cache_clear()  # two writes in one tick of the clock look alike
            with pytest.raises(UserError, match=f"{path}: damaged"):
                read(path)
            _put(file, place // 8, whole[place // 8])
    assert path.read_bytes() == whole
    for content in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(content)
        storage._check_once.cache_clear()
        with pytest.raises(UserError, match=f"{path}: damaged"):
            read(path)
    path.write_bytes(whole)
    read(path)


@pytest.mark.parametrize("kind", SEALED)
def test_equal_contents_have_equal_seals(tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        SEALED[kind][0](tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_seal_is_the_hash_of_the_file_with_zeros_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})
    value = json.loads(path.read_text())
    assert list(value) == ["seal", "b"]
    blank = path.read_text().replace(value["seal"], "sha256:" + "0" * 64)
    assert value["seal"] == "sha256:" + hashlib.sha256(blank.encode()).hexdigest()


def test_a_large_array_is_hashed_in_pieces_and_every_piece_counts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(storage, "PIECE", 100)
    path = tmp_path / "a.npy"
    with new_array(path, (300,), np.uint8) as array:
        array[:] = 7
    whole, length = path.read_bytes(), path.stat().st_size - 71
    pieces = [hashlib.sha256(whole[start : min(start + 100, length)]).digest() for start in range(0, length, 100)]
    assert whole[-64:].decode() == hashlib.sha256(b"".join(pieces)).hexdigest()
    for place in (130, 250, 350, length - 1):
        path.write_bytes(whole[:place] + b"x" + whole[place + 1 :])
        with pytest.raises(UserError, match="damaged array"):
            map_array(path)


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, '{"a": ' * 50_000, "\ud800", "\xff"])
@pytest.mark.parametrize("sealed", [True, False])
def test_odd_json_is_one_line(tmp_path: Path, content: str, sealed: bool) -> None:
    (tmp_path / "a.json").write_bytes(content.encode("latin-1", "replace"))
    with pytest.raises(UserError, match=r"a\.json: damaged JSON") as raised:
        read_json(tmp_path / "a.json", sealed)
    assert len(str(raised.value)) < 500


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "deep" / "a.npy"
    with new_array(path, (1,), np.float32):
        (partial,) = path.parent.iterdir()
        assert partial.stat().st_mode & 0o777 == 0o600
    write_json(path.parent / "a.json", {})
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in path.parent.iterdir())
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (path.parent, path.parent.parent))


def test_new_names_reach_the_disk_up_to_the_folder_that_was_there(tmp_path: Path, monkeypatch) -> None:
    """Else a power cut takes a whole folder of files that were waited for one by one."""
    synced: list[Path] = []
    monkeypatch.setattr(storage, "_sync_folder", synced.append)
    write_json(tmp_path / "rounds" / "00001" / "round.json", {})
    assert synced == [tmp_path, tmp_path / "rounds", tmp_path / "rounds" / "00001"]
    synced.clear()
    write_json(tmp_path / "scratch" / "round.json", {}, durable=False)
    assert synced == []


def test_two_that_share_their_process_number_do_not_share_a_file(tmp_path: Path, monkeypatch) -> None:
    """Two containers on one cache: one writes over what the other has half written."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "a.npy"
    with new_array(path, (4,), np.float32) as one:
        one[:2] = 1
        with new_array(path, (4,), np.float32) as two:
            two[:] = 2
        one[2:] = 1
    np.testing.assert_array_equal(map_array(path), np.ones(4))


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
import importlib.util, pkgutil, sys
for absent in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[absent] = None
import ease
for module in pkgutil.walk_packages(ease.__path__, "ease."):
    if module.name != "ease.model.kernels" or importlib.util.find_spec("triton"):
        importlib.import_module(module.name)
print("imported")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is copied by fork")
def test_our_modules_can_be_imported_where_unix_modules_are_absent(tmp_path: Path) -> None:
    """In a copy of this process, which has what others wrote imported; below, everything is imported anew."""

    def work() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "ease"]:
            del sys.modules[name]
        exec(IMPORT_ALL, {})

    assert forked(work, tmp_path) == (0, "imported\n")


@pytest.mark.slow
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
