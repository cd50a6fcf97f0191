"""Report on the data: counts of what was odd while they were read."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ease.console import plain

if TYPE_CHECKING:
    from ease.model.backbones import Backbone  # and with it torch, which reading needs not wait for

LAST_WORD = re.compile(r"(?:[^\W\u0e00-\uffff]+|\w)\W*$")
"""The last letter, in scripts without spaces between words such as Thai, Chinese or Japanese."""

FINDINGS = {
    "joined": "{} row{s} joined with an earlier row of the same image",
    "without_caption": "{} image{s} left out: no caption",
    "unreadable": "{} image{s} left out: not readable",
    "blank_captions": "{} blank caption{s} dropped",
    "cut_captions": "{} caption{s} cut: longer than the text encoder reads",
    "over_five": "{} image{s} with more than five captions: first five used",
    "under_five": "{} image{s} with fewer than five captions: repeated up to five",
    "same_picture": "{} image{s} with the picture of another id: forgetting one leaves the other",
    "similar_ids": "{} id{s} that look like another id in other letters: forgetting one leaves the other",
    "rotated": "{} image{s} turned upright by the EXIF note",
    "converted": "{} image{s} converted to RGB (grey, palette, transparent, CMYK or 16 bit)",
    "animated": "{} image{s} with several frames: first one used",
    "small": "{} image{s} of less than 16 pixels in width or height: kept",
}
"""Each count in words, in the order in which they are shown."""


@dataclass(frozen=True)
class DataReport:
    """How much of the data was odd. The meaning of each count is in `FINDINGS`."""

    splits: dict[str, int]
    """Pairs of each split."""
    joined: int = 0
    without_caption: int = 0
    unreadable: int = 0
    blank_captions: int = 0
    cut_captions: int = 0
    over_five: int = 0
    under_five: int = 0
    same_picture: int = 0
    similar_ids: int = 0
    rotated: int = 0
    converted: int = 0
    animated: int = 0
    small: int = 0
    listings: tuple[Path, ...] = ()
    """Files that name every unreadable image and every picture with several ids."""
    unused_columns: tuple[str, ...] = ()
    """Columns of a table that mean nothing here."""
    unused_site_columns: tuple[str, ...] = ()
    """Columns that name sites, where the pairs are dealt in another way."""

    def counts(self) -> dict[str, int]:
        """Findings and how often each occurred."""
        return {name: count for name in FINDINGS if (count := getattr(self, name))}

    def lines(self) -> Iterator[str]:
        """The report in sentences; only findings that occurred."""
        total = sum(self.splits.values())
        yield f"{total:,} pairs: " + ", ".join(f"{count:,} {split}" for split, count in self.splits.items())
        for name, count in self.counts().items():
            yield "  " + FINDINGS[name].format(f"{count:,}", s="" if count == 1 else "s")
        hint = ' (set partition.scheme = "sites" to deal by it)'
        unused = [*self.unused_columns, *(f"{name}{hint}" for name in self.unused_site_columns)]
        if unused:
            yield plain(f"  columns not used: {', '.join(unused)}")
        for path in self.listings:
            yield f"  listed in {path}"


def count_cut(captions: Iterable[Sequence[str]], backbone: "Backbone") -> int:
    """Number of captions that the tokenizer truncates."""
    # In practice no tokenizer makes more tokens than there are bytes, and two for the start and the end.
    long = sorted({text for texts in captions for text in texts if len(text.encode()) + 2 > backbone.context})
    if not long:
        return 0
    whole, shortened = backbone.tokenize([*long, *(LAST_WORD.sub("", text) for text in long)]).chunk(2)
    return int((whole == shortened).all(dim=1).sum())
