"""Files that are either whole or absent: atomic writes, safe reads, one place for the cache folder."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors

from ease.errors import UserError


def cache_folder() -> Path:
    """Where derived files live that can always be made again (`EASE_CACHE`, else the user's cache)."""
    folder = Path(os.environ.get("EASE_CACHE") or Path.home() / ".cache" / "ease")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the old file or the new one, never a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UserError(f"{path}: cannot write here ({error.strerror}); check space and permissions") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); free some space and run again") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged JSON ({error}); delete it and run again") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], note: Any = None) -> None:
    """Write named tensors as safetensors; `note` travels as JSON in the header.

    One header key only: several would be stored in random order and equal contents would differ in bytes.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"ease": json.dumps(note, sort_keys=True)} if note is not None else None
    write_atomic(path, serialise_tensors(contiguous, metadata=header))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return parse_tensors(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except SafetensorError as error:
        raise UserError(f"{path}: damaged or truncated safetensors ({error}); restore it or train again") from error


def read_note(path: Path) -> Any:
    """The JSON note in a tensor file's header; the tensors themselves are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get("ease", "null"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or truncated safetensors ({error}); restore it or train again") from error


@contextmanager
def new_array(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray]:
    """Fill a memory-mapped .npy array of any size; the file appears under its name only when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    try:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        yield array
        array.flush()
        del array
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); free some space and run again") from error
    finally:
        temporary.unlink(missing_ok=True)


def map_array(path: Path) -> np.ndarray:
    """Memory-map an array that `new_array` wrote."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged array file ({error}); delete it and run again") from error


def digest(*parts: Any) -> str:
    """A short hash of JSON-able values, for cache keys and config identity."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
