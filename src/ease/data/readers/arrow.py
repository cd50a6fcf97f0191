"""Arrow and Parquet files as plain values; the bytes of images stay in the file until they are decoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ease.errors import UserError
from ease.storage import open_regular

UNPACKED_BYTES, UNPACKED_TIMES = 1 << 28, 100
"""Limits for unpacking a Parquet file, in bytes and as a multiple of its size. Pictures do not shrink, text to a
tenth."""
ROWS_AT_ONCE = 256


def parquet_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file by column; it is unpacked into memory as a whole."""
    with _reading(path):
        import pyarrow
        from pyarrow import parquet

        with open_regular(path) as content, parquet.ParquetFile(content) as file:
            most, taken, parts = UNPACKED_BYTES + UNPACKED_TIMES * path.stat().st_size, 0, []
            for part in file.iter_batches(ROWS_AT_ONCE):
                taken += part.nbytes
                if taken > most:
                    raise UserError(f"{path}: unpacks to more than {UNPACKED_TIMES} times its size; get the file again")
                parts.append(part)
            table = pyarrow.Table.from_batches(parts, file.schema_arrow)
        table.validate(full=True)
    return _entries(table, path)


def stream_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow stream file by column; it is memory-mapped."""
    with _reading(path):
        import pyarrow

        open_regular(path).close()
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
        table.validate(full=True)  # its offsets are used as they are: wrong ones would read anywhere
    return _entries(table, path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(f'{path}: needs the tables extra: pip install "ease-unlearning[tables]"') from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check data.path") from error
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged or no such table ({reason}); get the file again") from error


def _entries(table: Any, path: Path) -> Iterator[dict[str, Any]]:
    for values in zip(*table.itercolumns(), strict=True):
        with _reading(path):
            entry = {name: _plain(value) for name, value in zip(table.column_names, values, strict=True)}
        yield entry


def _plain(scalar: Any) -> Any:
    """A Python value; bytes become a view of the table's memory instead of a copy."""
    from pyarrow import types

    if not scalar.is_valid:
        return None
    if types.is_struct(scalar.type):
        return {name: _plain(value) for name, value in scalar.items()}
    if types.is_binary(scalar.type) or types.is_large_binary(scalar.type):
        return memoryview(scalar.as_buffer())
    return scalar.as_py()
