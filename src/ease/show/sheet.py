"""A contact sheet: pairs as small pictures with their captions, in one file that fetches nothing."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from PIL import Image

from ease.show.template import render, source

EDGE = 160
"""Pixels of a picture on a sheet."""
PRIVATE = "These are pictures and captions of the run's own data: for your eyes, and not to be passed on."


@dataclass(frozen=True)
class Card:
    """One pair."""

    image: str
    """A data address; empty: the picture is not shown."""
    caption: str
    notes: tuple[str, ...] = ()
    """Short lines below: an id, whose it is, how near."""
    marked: bool = False


@dataclass(frozen=True)
class Row:
    """Cards under a heading; rows of a column are below each other, columns side by side."""

    title: str
    cards: Sequence[Card]
    note: str = ""


def sheet(title: str, note: str, columns: Sequence[Sequence[Row]], top: Markup | None = None) -> str:
    """The whole document; without scripts. `top` comes before everything else, such as a form."""
    style = source("sheet.css")
    return render("sheet.html", title=title, note=note, columns=columns, top=top or "", style=Markup(style))


def data_address(pixels: np.ndarray, edge: int = EDGE) -> str:
    """A small JPEG as text, so that the page needs no other file."""
    picture = Image.fromarray(np.asarray(pixels))
    picture.thumbnail((edge, edge))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
