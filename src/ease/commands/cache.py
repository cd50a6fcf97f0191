"""What `ease cache` does: say what the cache holds, and delete what can be made again."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ease.console import labelled, megabytes, table
from ease.data.inventory import OTHER, PARTS, Part, clear, inventory
from ease.storage import cache_folder


@dataclass(frozen=True)
class CacheSummary:
    """The parts of a cache, as they are or as they were before they were deleted."""

    folder: Path
    parts: tuple[Part, ...]
    cleared: bool = False

    @property
    def size(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def exposed(self) -> int:
        """Files and folders of ours that are not private."""
        return sum(part.exposed for part in self.parts if part.name != OTHER)

    def as_json(self) -> dict[str, Any]:
        parts = [{**asdict(part), "newest": _moment(part.newest)} for part in self.parts]
        told = {"folder": str(self.folder), "bytes": self.size, "cleared": self.cleared}
        return {**told, "private": not self.exposed, "parts": parts}

    def render(self) -> Iterator[RenderableType]:
        if self.cleared:
            yield f"{megabytes(self.size)} deleted from {self.folder}; what is needed again is made again"
            return
        rows: list[list[str | Text]] = [
            [
                part.name,
                PARTS.get(part.name, "not made by ease, and left alone"),
                str(part.files),
                megabytes(part.bytes),
                _moment(part.newest)[:10] if part.newest else "",
                Text("yes", "green") if not part.exposed else Text("no", "dim" if part.name == OTHER else "red"),
            ]
            for part in self.parts
        ]
        columns = ["part", "what", "files", "size", "newest", "private"]
        yield table(f"Cache: {megabytes(self.size)} in {self.folder}", columns, rows, text_columns=2)
        if self.exposed:
            yield labelled("open", exposed_remedy(self), "yellow")


def exposed_remedy(found: CacheSummary) -> str:
    return f"{found.exposed} files or folders can be read by others; close them with: chmod -R go= {found.folder}"


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def list_cache() -> CacheSummary:
    folder = cache_folder()
    return CacheSummary(folder, inventory(folder))


def clear_cache(parts: Sequence[str], older_than_days: float) -> CacheSummary:
    folder = cache_folder()
    return CacheSummary(folder, clear(folder, parts, older_than_days), cleared=True)
