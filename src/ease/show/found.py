"""Search results of models for some words, as a sheet with one column for each model."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from ease.runs.using import Hit
from ease.show.sheet import PRIVATE, Card, Row, data_address, sheet


def found_sheet(
    title: str,
    found: Mapping[str, Sequence[Hit]],
    pixels: np.ndarray | None,
    marked: bool,
    top: Markup | None = None,
) -> str:
    """The whole document; `pixels` of the pair set, or none where pictures are not to be shown."""
    columns = [
        [Row(name[0].upper() + name[1:], [_card(hit, rank, pixels) for rank, hit in enumerate(hits, start=1)])]
        for name, hits in found.items()
    ]
    note = f"{PRIVATE} Pairs that the request named are marked." if marked else PRIVATE
    return sheet(title, note, columns, top)


def _card(hit: Hit, rank: int, pixels: np.ndarray | None) -> Card:
    notes = (
        f"{rank}. cosine {hit.score:.2f}",
        f"{hit.whose}, {hit.id}",
        *(["to be forgotten"] if hit.forgotten else []),
    )
    return Card("" if pixels is None else data_address(pixels[hit.place]), hit.caption, notes, hit.forgotten)
