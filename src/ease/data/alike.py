"""Ids that a person takes for the same although they are written in other letters."""

import unicodedata
from collections import defaultdict
from collections.abc import Sequence

LATIN = str.maketrans(
    "аАВсСеЕНһіІјЈКМоОрРԛѕЅТхХуУԁԝӏΑΒΕΖΗΙΚΜΝΟΡΤΥΧοανρ",
    "aABcCeEHhiIjJKMoOpPqsSTxXyYdwlABEZHIKMNOPTYXoavp",
)
"""Cyrillic and Greek letters that are drawn like Latin ones."""


def alike(ids: Sequence[str]) -> list[list[str]]:
    """Groups of two and more different ids that look the same."""
    if all(each.isascii() for each in ids):
        return []
    groups: dict[str, list[str]] = defaultdict(list)
    for each in ids:
        groups[_drawn(each)].append(each)
    return [group for group in groups.values() if len(group) > 1]


def _drawn(text: str) -> str:
    """The same for all texts that look the same: one form of each letter, without what is not seen."""
    whole = unicodedata.normalize("NFKC", text).translate(LATIN)
    return "".join(letter for letter in whole if unicodedata.category(letter) != "Cf")
