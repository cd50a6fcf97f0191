"""A certificate as one page for people: plain words first, then everything, and a check of itself, offline."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ease.operations.evidence.canonical import canonical
from ease.operations.evidence.envelope import Envelope
from ease.operations.evidence.statement import Certificate
from ease.show.page import policy
from ease.show.template import render, source

PARTS = ("request", "method", "models", "figures", "code", "seeds", "log", "configuration", "directions")
"""Parts shown at the end, as they are signed."""
SETS = {"forget": "to be forgotten", "retain": "kept", "test": "never seen"}
RANKS = (1, 5, 10)
STANDING = {True: ("good", "✓"), False: ("bad", "✗"), None: ("unknown", "?")}


@dataclass(frozen=True)
class Shown:
    """A value of the statement, and where in it the browser finds it again."""

    name: str
    pointer: str
    """RFC 6901."""
    text: str


def certificate_page(envelope: Envelope, certificate: Certificate) -> str:
    """The whole document. What it shows is marked with its place in the signed statement, and held against it."""
    style, script = source("page.css"), source("certificate.js")
    table = certificate.model_dump(mode="json")
    return render(
        "certificate.html",
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        certificate=certificate,
        standing=STANDING[certificate.verdict.passed],
        recalls=recalls(certificate),
        ranks=RANKS,
        costs=shown(table["costs"], "/predicate/costs"),
        audit=shown(table["audit"], "/predicate/audit") if table["audit"] else [],
        files=shown(table["files"], "/predicate/files"),
        rest=[each for part in PARTS for each in shown(table[part], f"/predicate/{part}", part)],
        signatures=envelope.signatures,
        envelope=envelope.model_dump(mode="json"),
    )


def recalls(certificate: Certificate) -> list[tuple[str, list[Shown]]]:
    """Recall of each set of pairs, rounded for reading; a set that has vanished has none."""
    rows = []
    for name, label in SETS.items():
        found = {f"{name}/recall@{k}": certificate.figures.get(f"{name}/recall@{k}") for k in RANKS}
        cells = [
            Shown(key, f"/predicate/figures/{key.replace('/', '~1')}", f"{value:.1f}")
            for key, value in found.items()
            if value is not None
        ]
        if len(cells) == len(RANKS):
            rows.append((label, cells))
    return rows


def shown(value: Any, pointer: str, name: str = "") -> list[Shown]:
    """Every leaf of a value with its name and place; list entries that have a name go by it."""
    return list(_leaves(value, pointer, name))


def _leaves(value: Any, pointer: str, name: str) -> Iterator[Shown]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            escaped = key.replace("~", "~0").replace("/", "~1")
            yield from _leaves(each, f"{pointer}/{escaped}", f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for number, each in enumerate(value):
            called = each.get("name", number) if isinstance(each, dict) else number
            yield from _leaves(each, f"{pointer}/{number}", f"{name} {called}".strip())
    else:
        yield Shown(name, pointer, value if isinstance(value, str) else canonical(value).decode())
