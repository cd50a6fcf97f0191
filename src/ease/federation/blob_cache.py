"""The cache of a node for parts of jobs: files named by hash, of which the least recently used are deleted first."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ease.errors import UserError
from ease.federation.container import content_hash
from ease.storage import write_atomic

NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BlobCache(Mapping[str, bytes]):
    """A mapping from hashes to bytes in a folder. A damaged file counts as missing."""

    folder: Path
    most: int = 1 << 32
    """Largest size in bytes, apart from the parts of the last job."""

    def put(self, parts: Mapping[str, bytes]) -> None:
        """Store parts. If the name of one is not the hash of its bytes, none is stored and it is an error."""
        for name, data in parts.items():
            if content_hash(data) != name:
                raise UserError(f"part {name[:12]} was altered on the way; send it once more")
        for name, data in parts.items():
            if name not in self:
                write_atomic(self.folder / name, data, durable=False)
        self._make_room(set(parts))

    def used(self, name: str) -> None:
        """Mark a part as used now."""
        with suppress(OSError):
            os.utime(self.folder / name)

    def __getitem__(self, name: str) -> bytes:
        if not NAME.fullmatch(name):
            raise KeyError(name)
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            raise KeyError(name) from None
        if content_hash(data) != name:
            (self.folder / name).unlink(missing_ok=True)
            raise KeyError(name)
        return data

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and NAME.fullmatch(name) is not None and (self.folder / name).is_file()

    def __iter__(self) -> Iterator[str]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return iter(sorted(path.name for path in found if NAME.fullmatch(path.name)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _make_room(self, needed: set[str]) -> None:
        facts = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in map(self.folder.joinpath, self))
        size = sum(length for _, length, _ in facts)
        for _, length, path in facts:
            if size > self.most and path.name not in needed:
                path.unlink(missing_ok=True)
                size -= length
