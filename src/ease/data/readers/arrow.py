"""Arrow and Parquet files as plain values; the bytes of images stay in the file until they are decoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ease.errors import UserError
from ease.storage import open_regular


def parquet_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file by column; it is unpacked into memory as a whole."""
    with _reading(path):
        from pyarrow import parquet

        table = parquet.read_table(path)
    return _entries(table)


def stream_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow stream file by column; it is memory-mapped."""
    with _reading(path):
        import pyarrow

        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    return _entries(table)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        open_regular(path).close()
        yield
    except ImportError as error:
        raise UserError(f'{path}: needs the tables extra: pip install "ease-unlearning[tables]"') from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check data.path") from error
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged or no such table ({reason}); get the file again") from error


def _entries(table: Any) -> Iterator[dict[str, Any]]:
    for values in zip(*table.itercolumns(), strict=True):
        yield {name: _plain(value) for name, value in zip(table.column_names, values, strict=True)}


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
