"""Parts of a document that a benchmark writes: they stand between two markers, and the rest is left alone."""

from pathlib import Path


def write_section(document: Path, name: str, text: str) -> None:
    """Put text between the markers of this name, which must be there."""
    begin, end = f"<!-- {name}: made by a benchmark -->", f"<!-- /{name} -->"
    whole = document.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise SystemExit(f"{document}: has no place for {name}; put {begin} and {end} where it shall stand")
    before, rest = whole.split(begin)
    after = rest.split(end)[1]
    document.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
