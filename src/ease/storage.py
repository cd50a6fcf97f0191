"""Files that are either whole or absent: atomic writes, safe reads, one place for the cache folder."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors

from ease.errors import UserError

LEFTOVER = ".partial-"
"""How the names of unfinished files begin; a killed process may leave some behind."""


def cache_folder() -> Path:
    """Where derived files live that can always be made again (`EASE_CACHE`, else the user's cache)."""
    folder = Path(os.environ.get("EASE_CACHE") or Path.home() / ".cache" / "ease")
    _make_folder(folder, "name another folder in EASE_CACHE")
    return folder


def _make_folder(folder: Path, remedy: str = "check the path, its permissions and the space left") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot make this folder ({error.strerror}); {remedy}") from error


def write_atomic(path: Path, content: bytes | Iterable[bytes], durable: bool = True) -> None:
    """Write a file so that a crash leaves the old file or the new one, never a part of one.

    The content may come in parts, of which only one is in memory at a time.
    `durable` waits for the disk, so that this holds for a power cut too; scratch files need no such wait.
    """
    _make_folder(path.parent)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{LEFTOVER}{path.name}-")
    except OSError as error:
        raise UserError(f"{path}: cannot write here ({error.strerror}); check space and permissions") from error
    try:
        with _refusal_to_write(path):
            with os.fdopen(handle, "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if durable:
                _sync_folder(path.parent)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def remove_leftovers(folder: Path, older_than_seconds: float = 0) -> None:
    """Delete unfinished files of killed processes; whoever asks for age 0 must be the only writer."""
    for path in folder.glob(f"{LEFTOVER}*"):
        with suppress(FileNotFoundError):  # its writer finished just now
            if time.time() - path.stat().st_mtime >= older_than_seconds:
                path.unlink()


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders; it writes the names of files by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(), durable)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); check the path and its permissions") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged JSON ({error}); delete it and run again") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], note: Any = None, durable: bool = True) -> None:
    """Write named tensors as safetensors; `note` travels as JSON in the header.

    One header key only: several would be stored in random order and equal contents would differ in bytes.
    """
    write_atomic(path, tensor_bytes(tensors, note), durable)


def tensor_bytes(tensors: dict[str, torch.Tensor], note: Any = None) -> bytes:
    """What `write_tensors` writes."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"ease": json.dumps(note, sort_keys=True)} if note is not None else None
    return serialise_tensors(contiguous, metadata=header)


def tensors_in(data: bytes) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors and the note of what `tensor_bytes` gave, of bytes whose hash was checked."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return parse_tensors(data), json.loads(header.get("__metadata__", {}).get("ease", "null"))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return parse_tensors(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); check the path and its permissions") from error
    except SafetensorError as error:
        raise UserError(f"{path}: damaged or truncated safetensors ({error}); restore it or train again") from error


def read_note(path: Path) -> Any:
    """The JSON note in a tensor file's header; the tensors themselves are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get("ease", "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged or truncated safetensors ({error}); restore it or train again") from error


@contextmanager
def new_array(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray]:
    """Fill a memory-mapped .npy array of any size; the file appears under its name only when complete."""
    _make_folder(path.parent)
    remove_leftovers(path.parent, older_than_seconds=86400)  # another process may be writing here now
    temporary = path.parent / f"{LEFTOVER}{path.name}-{os.getpid()}"
    try:
        with _refusal_to_write(path):
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            _reserve(temporary)
        yield array
        with _refusal_to_write(path):
            array.flush()
            os.replace(temporary, path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _reserve(path: Path) -> None:
    """Take the disk space of a sparse file now: a full disk met through a memory map would kill the process."""
    if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


@contextmanager
def _refusal_to_write(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); free some space and run again") from error


@contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file while the context lasts; if another process holds it, a user error says `busy`.

    The system drops the lock when its process ends, however it ends, so a killed run never locks anyone out.
    """
    _make_folder(path.parent)
    # A disk without locks is refused: the substitute is a file whose mere presence locks, which outlives a kill.
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(busy) from error
    except OSError as error:
        raise UserError(f"{path}: cannot lock ({error.strerror}); use a folder on a disk of your own") from error
    try:
        yield
    finally:
        lock.release()


def map_array(path: Path) -> np.ndarray:
    """Memory-map an array that `new_array` wrote."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged array file ({error}); delete it and run again") from error


def digest(*parts: Any) -> str:
    """A short hash of JSON-able values, for cache keys and config identity."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """Hash of a whole file, however large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
