"""Ids that look the same but consist of different characters."""

import unicodedata
from collections import defaultdict
from collections.abc import Sequence

LATIN = str.maketrans(
    "аАВсСеЕНһіІјЈКМоОрРԛѕЅТхХуУԁԝӏΑΒΕΖΗΙΚΜΝΟΡΤΥΧοανρ",
    "aABcCeEHhiIjJKMoOpPqsSTxXyYdwlABEZHIKMNOPTYXoavp",
)
"""Cyrillic and Greek letters that are drawn like Latin ones."""


def similar_ids(ids: Sequence[str]) -> list[list[str]]:
    """Groups of different ids that look the same."""
    if all(each.isascii() for each in ids):
        return []
    groups: dict[str, list[str]] = defaultdict(list)
    for each in ids:
        groups[_drawn(each)].append(each)
    return [group for group in groups.values() if len(group) > 1]


def _drawn(text: str) -> str:
    """A canonical form that texts with the same appearance share."""
    whole = unicodedata.normalize("NFKC", text).translate(LATIN)
    return "".join(letter for letter in whole if unicodedata.category(letter) != "Cf")
