"""`ease cache`: lists and deletes cached files, which can be made again."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ease.config import Config
from ease.console import labelled, megabytes, table
from ease.data.inventory import OTHER, PARTS, Part, clear, inventory
from ease.storage import cache_folder


class CachedPart(Config):
    """One kind of cached files."""

    name: str
    files: int
    bytes: int
    newest: str
    """When the last of them was written. Empty if there is none."""
    exposed: int
    """Files and folders that other users of the machine may read or change."""


class CacheSummary(Config):
    """`ease cache list`, and `ease cache clear` with what was deleted."""

    folder: Path
    bytes: int
    exposed: int
    """Files and folders of ours that other users may read or change."""
    cleared: bool
    """Whether the files were deleted."""
    parts: tuple[CachedPart, ...]

    @classmethod
    def of(cls, folder: Path, parts: Sequence[Part], cleared: bool = False) -> "CacheSummary":
        return cls(
            folder=folder,
            bytes=sum(part.bytes for part in parts),
            exposed=sum(part.exposed for part in parts if part.name != OTHER),
            cleared=cleared,
            parts=tuple(CachedPart(**{**asdict(part), "newest": _moment(part.newest)}) for part in parts),
        )

    def render(self) -> Iterator[RenderableType]:
        if self.cleared:
            yield f"{megabytes(self.bytes)} deleted from {self.folder}; files that are needed again are made again"
            return
        rows: list[list[str | Text]] = [
            [
                part.name,
                PARTS.get(part.name, "not made by ease, never deleted"),
                str(part.files),
                megabytes(part.bytes),
                part.newest[:10],
                Text("yes", "green") if not part.exposed else Text("no", "dim" if part.name == OTHER else "red"),
            ]
            for part in self.parts
        ]
        columns = ["part", "what", "files", "size", "newest", "private"]
        yield table(f"Cache: {megabytes(self.bytes)} in {self.folder}", columns, rows, text_columns=2)
        if self.exposed:
            yield labelled("open", exposed_remedy(self), "yellow")


def exposed_remedy(found: CacheSummary) -> str:
    return f"{found.exposed} files or folders can be read by others; close them with: chmod -R go= {found.folder}"


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def list_cache() -> CacheSummary:
    folder = cache_folder()
    return CacheSummary.of(folder, inventory(folder))


def clear_cache(parts: Sequence[str], older_than_days: float) -> CacheSummary:
    folder = cache_folder()
    return CacheSummary.of(folder, clear(folder, parts, older_than_days), cleared=True)
