"""Markup that cannot be broken by its contents: whatever is not markup already is escaped."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

VOID = {"meta", "input", "img"}
"""Elements of HTML without an end."""


class Markup(str):
    """Text that is markup and goes in as it is."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element; `class_` and `for_` lose their line, other lines become hyphens; None and False leave one out."""
    named = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    opening = f"<{name}{''.join(named)}>"
    return Markup(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


def join(*children: Any) -> Markup:
    """Children one after the other; None is nothing."""
    return Markup("".join(c if isinstance(c, Markup) else escape(_text(c)) for c in children if c is not None))


def json_script(identity: str, value: Any) -> Markup:
    """Data for a script; no text in it can end the element or begin another."""
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", id=identity)


def figure(drawing: Markup, *caption: str | None) -> Markup:
    return tag("figure", drawing, tag("figcaption", *caption))


def missing(text: str, command: str) -> Markup:
    """What is not there, and the command that makes it."""
    return tag("p", text, " ", tag("code", command), class_="missing")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Markup:
    """A table of numbers that scrolls by itself where it is too wide for the page."""
    found = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", column, scope="col") for column in columns))),
        tag(
            "tbody",
            *(
                tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell, class_="number") for cell in row[1:]))
                for row in rows
            ),
        ),
    )
    return tag("div", found, class_="wide", tabindex=0, role="region", aria_label=caption)


def _text(value: Any) -> str:
    """Coordinates need two decimals, and rounding them keeps the same page the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
