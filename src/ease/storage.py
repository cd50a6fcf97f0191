"""Atomic writes and checked reads of files that carry their own hash, locks, and the cache folder.

A file is sealed: somewhere near its beginning (of an array: at its end) is `sha256:` and the hash of the whole file
with zeros in the place of the hash. So one rule covers JSON, tensors, answers of clients and arrays, no second file has
to be kept beside the first, and every byte counts. Files of other programs have no seal and are read with
`sealed=False`.
"""

import errno
import glob
import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from ease.errors import Busy, Missing, Unwritable, UserError

if TYPE_CHECKING:
    import torch  # a second of a process that only wants to read a picture or a line

LEFTOVER = ".partial-"
"""Prefix of unfinished files; a killed process may leave some."""
LARGEST_JSON = 1 << 28
"""Bytes of the largest JSON file that is parsed. Parsing takes about ten times as much memory."""
SMALL_JSON = 1 << 24
"""Bytes of the largest settings or marker file that is parsed."""
TENSOR_ERRORS = (
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    AssertionError,
    OverflowError,
    AttributeError,
)
"""Errors of the safetensors reader for a wrong header."""
SEAL = re.compile(rb"sha256:[0-9a-f]{64}")
BLANK = b"sha256:" + b"0" * 64
"""The seal while the hash is computed."""
PIECE = 1 << 24
"""Bytes of an array that one thread hashes at a time."""
RESTORE = "restore it, or delete it and make it again"


def cache_folder() -> Path:
    """The folder of derived files that can always be made again (`EASE_CACHE`, else the user's cache)."""
    folder = Path(os.environ.get("EASE_CACHE") or Path.home() / ".cache" / "ease")
    _make_folder(folder, "name another folder in EASE_CACHE")
    return folder


def _make_folder(folder: Path, remedy: str = "", durable: bool = True) -> None:
    """Create a folder and its parents, readable by this user only: they hold pictures, captions and models."""
    try:
        if folder.is_dir():  # nearly always; those above it need not be looked at then
            return
        for each in reversed([folder, *folder.parents]):
            if not each.exists():
                with suppress(FileExistsError):  # made by another process just now
                    each.mkdir(mode=0o700)
                if durable:
                    _sync_folder(each.parent)
        folder.mkdir(exist_ok=True)  # refuses a file in its place
    except OSError as error:
        raise Unwritable(
            f"{folder}: cannot make this folder ({error.strerror}); {remedy or write_remedy(error)}"
        ) from error


def write_atomic(path: Path, content: bytes | Iterable[bytes], durable: bool = True) -> None:
    """Write a file so that a crash leaves the old file or the new one, never a part of one.

    The content may come in parts, of which only one is in memory at a time.
    `durable` waits for the disk, so that this holds for a power cut too; scratch files need no such wait.
    """
    _make_folder(path.parent, durable=durable)
    with _unfinished(path) as temporary, _refusal_to_write(path):
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)


@contextmanager
def whole_or_none(*paths: Path) -> Iterator[None]:
    """Delete all of these files if the block fails: they are useful only together."""
    try:
        yield
    except BaseException:
        for path in paths:
            with suppress(OSError):  # its error would hide the one that brought us here
                path.unlink(missing_ok=True)
        raise


def replace_file(source: Path, target: Path) -> None:
    """Move a file to a path, durably, replacing what is there."""
    _make_folder(target.parent)
    with _refusal_to_write(target):
        os.replace(source, target)
        _sync_folder(target.parent)


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """An empty temporary file beside its target; it is deleted unless it was renamed.

    Its name is random: containers that share a folder may have equal process numbers.
    """
    temporary = path.parent / f"{LEFTOVER}{path.name[:100]}-{uuid.uuid4().hex}"
    with _refusal_to_write(path):
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield temporary
    finally:
        with suppress(OSError):  # its error would hide the one that brought us here
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, older_than_seconds: float = 0) -> None:
    """Delete unfinished files of killed processes. Callers with age 0 must be the only writer."""
    for path in folder.glob(f"{LEFTOVER}*"):
        with suppress(FileNotFoundError):  # its writer finished just now
            if time.time() - path.stat().st_mtime >= older_than_seconds:
                path.unlink()


def remove_leftovers_of(path: Path) -> None:
    """Delete unfinished versions of one file that killed processes left. Callers must be its only writer."""
    for each in path.parent.glob(f"{LEFTOVER}{glob.escape(path.name[:100])}-*"):
        each.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk."""
    if os.name == "nt":  # Windows opens no folders; it writes the names of files by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Pipes and devices are refused, because they may never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file; one with more than `most` bytes is refused before it is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise UserError(f"{path}: {max(size, len(content)):,} bytes, and at most {most:,} are read; name another file")
    return content


def _seal(content: bytes) -> bytes:
    """The content with its hash in the first blank seal."""
    return content.replace(BLANK, b"sha256:" + hashlib.sha256(content).hexdigest().encode(), 1)


def _check_seal(path: Path, content: bytes) -> None:
    """Refuse content that does not match its seal."""
    found = SEAL.search(content)
    if found is None:
        raise UserError(f"{path}: damaged, or written by an earlier version: it has no seal; {RESTORE}")
    view = memoryview(content)
    whole = hashlib.sha256(view[: found.start()])
    whole.update(BLANK)
    whole.update(view[found.end() :])
    if whole.hexdigest().encode() != found[0][len(b"sha256:") :]:
        raise UserError(f"{path}: damaged (its content is not what its seal says); {RESTORE}")


def _content(path: Path, most: int | None = None) -> bytes:
    try:
        if most is not None:
            return read_bytes(path, most)
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError as error:
        raise Missing(f"{path}: no such file; {RESTORE}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); check the path and its permissions") from error


def write_sealed(path: Path, content: bytes, durable: bool = True) -> None:
    """Write bytes after a first line with their seal."""
    write_atomic(path, _seal(BLANK + b"\n" + content), durable)


def read_sealed(path: Path) -> bytes:
    """The bytes that `write_sealed` wrote."""
    content = _content(path)
    _check_seal(path, content)
    return content[len(BLANK) + 1 :]


def write_json(path: Path, value: Any, durable: bool = True, sealed: bool = True) -> None:
    """Write JSON. A sealed object has `seal` as its first key."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"
    if not sealed:
        write_atomic(path, text.encode(), durable)
        return
    rest = f",{text[1:]}" if value else text[1:]
    write_atomic(path, _seal(f'{{\n "seal": "{BLANK.decode()}"{rest}'.encode()), durable)


def read_json(path: Path, sealed: bool = True, most: int = LARGEST_JSON) -> Any:
    """Read JSON of at most `most` bytes. The seal of a sealed object is checked and left out."""
    content = _content(path, most)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of too many digits
        raise UserError(f"{path}: damaged JSON ({_short(error)}); delete it and run again") from error
    if not sealed:
        return value
    _check_seal(path, content)
    if not isinstance(value, dict) or "seal" not in value:
        raise UserError(f"{path}: damaged: a JSON object with a seal is expected; {RESTORE}")
    return {key: each for key, each in value.items() if key != "seal"}


def _short(error: Exception) -> str:
    return str(error)[:200]


def write_tensors(
    path: Path,
    tensors: "dict[str, torch.Tensor]",
    note: Mapping[str, Any] | None = None,
    durable: bool = True,
    sealed: bool = True,
) -> None:
    """Write named tensors as safetensors. The header contains the seal and the `note` as JSON.

    They share one header key, because several keys are written in random order.
    """
    write_atomic(path, tensor_bytes(tensors, note, sealed), durable)


def tensor_bytes(
    tensors: "dict[str, torch.Tensor]", note: Mapping[str, Any] | None = None, sealed: bool = True
) -> bytes:
    """The bytes that `write_tensors` writes."""
    from safetensors.torch import save

    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if not sealed:
        return save(contiguous)
    ordered = json.loads(json.dumps(note or {}, sort_keys=True))
    header = {"ease": json.dumps({"seal": BLANK.decode(), **ordered})}
    return _seal(save(contiguous, metadata=header))


def tensors_in(data: bytes) -> "tuple[dict[str, torch.Tensor], dict[str, Any]]":
    """The tensors and the note in bytes of `tensor_bytes`; the caller has checked the hash."""
    from safetensors.torch import load

    return load(data), _note_in(data)


def _note_in(data: bytes) -> dict[str, Any]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    note = json.loads(header["__metadata__"]["ease"])
    return {key: value for key, value in note.items() if key != "seal"}


def read_tensors(path: Path, sealed: bool = True) -> "dict[str, torch.Tensor]":
    return _read_tensors(path, sealed)[0]


def read_noted(
    path: Path, sha256: str | None = None, remedy: str = RESTORE
) -> "tuple[dict[str, torch.Tensor], dict[str, Any]]":
    """Tensors and the note in their header, checked against a recorded SHA-256 or else against the file's own seal."""
    tensors, content = _read_tensors(path, sealed=True, sha256=sha256, remedy=remedy)
    try:
        return tensors, _note_in(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its header has no note; the file was altered, restore it") from error


def _read_tensors(
    path: Path, sealed: bool, sha256: str | None = None, remedy: str = RESTORE
) -> "tuple[dict[str, torch.Tensor], bytes]":
    from safetensors.torch import load

    content = _content(path)
    if sha256 is not None:
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UserError(f"{path}: damaged (its hash is not the recorded one); {remedy}")
    elif sealed:
        _check_seal(path, content)
    try:
        return load(content), content
    except TENSOR_ERRORS as error:
        raise UserError(f"{path}: damaged or truncated safetensors ({_short(error)}); {RESTORE}") from error


def read_some(path: Path, names: Iterable[str]) -> "dict[str, torch.Tensor]":
    """Read some tensors of a sealed file without loading the rest. The seal is checked at the first reading only."""
    _check_once(path, *identity(path))
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (*TENSOR_ERRORS, OSError) as error:
        raise UserError(f"{path}: damaged or truncated safetensors ({_short(error)}); {RESTORE}") from error


def identity(path: Path) -> tuple[int, int, int]:
    """Inode, size and modification time of a file: the key of caches of its content."""
    try:
        found = path.stat()
    except OSError as error:
        raise Missing(f"{path}: missing or unreadable ({error.strerror}); {RESTORE}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=100_000)
def _check_once(path: Path, *identity: int) -> None:
    _check_seal(path, _content(path))


@contextmanager
def new_array(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray]:
    """Yield a memory-mapped .npy array to fill. The file gets its name once it is complete and sealed."""
    _make_folder(path.parent)
    remove_leftovers(path.parent, older_than_seconds=86400)  # another process may be writing here now
    with _unfinished(path) as temporary:
        with _refusal_to_write(path):
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            _reserve(temporary)
        yield array
        with _refusal_to_write(path):
            array.flush()
            with temporary.open("r+b") as file:
                hashed = _hash_in_pieces(temporary, file.seek(0, os.SEEK_END))
                file.write(b"sha256:" + hashed.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)


def _reserve(path: Path) -> None:
    """Allocate the disk space of a sparse file, because a full disk behind a memory map would kill the process."""
    if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


@contextmanager
def _refusal_to_write(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{path}: cannot write ({error.strerror}); {write_remedy(error)}") from error


def write_remedy(error: OSError) -> str:
    """The remedy for a file that could not be written."""
    match error.errno:
        case errno.EROFS:
            return "this disk is read-only: choose a folder on another one"
        case errno.EACCES | errno.EPERM:
            return "you may not write here: choose another folder, or change its permissions"
        case errno.ENOENT | errno.ESTALE | errno.ENOTDIR:
            return "the folder is gone: bring it back (is its disk still there?) and run again"
        case errno.EIO | errno.ENODEV | errno.ENXIO:
            return "the disk does not answer: check it, and run again"
    return "free some space and run again"


def check_writable(folder: Path, choose: str) -> None:
    """Refuse a folder that cannot be created or written to, before long work begins."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"{folder}: {there} is a file; {choose}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: you may not write in {there}, or its disk is read-only; {choose}")


@contextmanager
def exclusive(path: Path, busy: str, wait_seconds: float = 0) -> Iterator[None]:
    """Hold a lock file during the block; raise `Busy` if another process keeps it.

    The system drops the lock when its process ends, however it ends, so a killed run never locks anyone out.
    """
    _make_folder(path.parent)
    # A disk without locks is refused: the substitute is a file whose mere presence locks, which outlives a kill.
    lock = FileLock(path, timeout=wait_seconds, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise Busy(busy) from error
    except OSError as error:
        raise Unwritable(f"{path}: cannot lock ({error.strerror}); use a folder on a disk of your own") from error
    try:
        yield
    finally:
        lock.release()


def map_array(path: Path) -> np.ndarray:
    """Memory-map an array that `new_array` wrote, after checking its seal."""
    _, size, _ = identity(path)
    length = size - len(BLANK)
    try:
        with path.open("rb") as file:
            file.seek(max(length, 0))
            seal = file.read()
        if length < 0 or seal != b"sha256:" + _hash_in_pieces(path, length).encode():
            raise ValueError("its content is not what its seal says")
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged array file ({error}); delete it and run again") from error


def _hash_in_pieces(path: Path, length: int) -> str:
    """The hash of the hashes of a file's pieces, which all cores compute together."""

    def hashed(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(min(PIECE, length - start))).digest()

    starts = range(0, length, PIECE)
    if len(starts) < 2:  # starting threads would take longer
        return hashlib.sha256(b"".join(map(hashed, starts))).hexdigest()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(hashed, starts))).hexdigest()


def digest(*parts: Any) -> str:
    """A short hash of JSON values, for cache keys and identities."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
