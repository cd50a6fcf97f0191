"""Matching of words and captions, for searches where the pairs are."""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

LONGEST = 300
"""Most letters of the words in one search of a site."""
WORD = re.compile(r"[^\W_]+")
UNSPACED = re.compile("[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters of languages that put no spaces between words: these are looked for anywhere in a caption."""
FILLING = re.compile(
    "a|an|the|of|in|on|at|to|with|and|or|is|are|was|were|be|being|by|for|from|some|his|her|its|their|this|that|these|"
    "those|there|it|he|she|they|as|into|near|while|who|which|very"
)
"""Words that say nothing of what is in a picture."""
IRREGULAR = {
    "men": "man",
    "women": "woman",
    "children": "child",
    "people": "person",
    "feet": "foot",
    "teeth": "tooth",
    "mice": "mouse",
    "geese": "goose",
    "leaves": "leaf",
    "wolves": "wolf",
    "knives": "knife",
    "ran": "run",
    "rode": "ride",
    "sat": "sit",
    "skis": "ski",
    "stood": "stand",
    "swam": "swim",
    "wore": "wear",
}


FAMILIES = {"surfboard": "surf", "skateboard": "skat", "kiteboard": "kit", "wakeboard": "wak", "paddleboard": "paddl"}
"""Compounds that belong to another word, by their stems."""
NO_DERIVATION = re.compile(
    "banner|border|brother|bumper|butter|center|cooler|corner|counter|cover|crater|cracker|dinner|dresser|flower|gutter|"
    "hammer|ladder|letter|litter|locker|master|matter|meter|mother|number|offer|officer|pepper|planter|poster|roller|"
    "rubber|shower|shutter|sitter|slipper|sneaker|sticker|summer|supper|sweater|tower|trailer|trainer|upper"
)
"""Words in -er that are not a form of the word before the ending: a flower does not flow."""


def content(words: str) -> tuple[str, ...]:
    """The stems of the words that say something, each once; text without spaces between its words stays whole."""
    found = [word for word in WORD.findall(words.lower()) if not FILLING.fullmatch(word)]
    return tuple(dict.fromkeys(word if UNSPACED.search(word) else stem(word) for word in found))


def says_all(caption: str, wanted: Sequence[str], unless: Sequence[Sequence[str]] = ()) -> bool:
    """Whether a caption has all the words, in any order and with any endings; words inside of `unless` do not count."""
    stems = frozenset(_remaining(_stems(caption), unless)) if unless else _stem_set(caption)
    return all(word in caption if UNSPACED.search(word) else word in stems for word in wanted)


def has_phrase(caption: str, phrase: Sequence[str]) -> bool:
    """Whether a caption has the stems of a phrase one after the other."""
    stems = _stems(caption)
    return len(_remaining(stems, [phrase])) < len(stems)


def _remaining(stems: tuple[str, ...], phrases: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The stems of a caption that are in none of the phrases."""
    for phrase in map(tuple, phrases):
        left, place = [], 0
        while place < len(stems):
            if stems[place : place + len(phrase)] == phrase:
                place += len(phrase)
            else:
                left.append(stems[place])
                place += 1
        stems = tuple(left)
    return stems


@lru_cache(maxsize=1 << 18)
def _stems(caption: str) -> tuple[str, ...]:
    return tuple(map(stem, WORD.findall(caption.lower())))


@lru_cache(maxsize=1 << 18)
def _stem_set(caption: str) -> frozenset[str]:
    return frozenset(_stems(caption))


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """The stem of an English word, the same for most of its forms.

    It loses its plural, -ing, -ed, and the -er of people and comparisons: surf, surfs, surfing, surfed, surfer and
    surfers are one word, and so are those of `FAMILIES`.
    """
    word = IRREGULAR.get(word, word)
    if len(word) > 4 and word.endswith("ies"):
        word = word[:-3] + "y"
    elif len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes", "zes")):
        word = word[:-2]
    elif len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        rest = word.removesuffix(ending)
        if rest != word and len(rest) > 2 and re.search("[aeiouy]", rest):
            word = _undoubled(rest)
            break
    rest = word if NO_DERIVATION.fullmatch(word) else word.removesuffix("er")
    if rest != word and len(rest) > 2 and rest[-1] != "e" and re.search("[aeiouy]", rest):
        word = _undoubled(rest)
    word = word.removesuffix("e") if len(word) > 3 else word
    return FAMILIES.get(word, word)


def _undoubled(rest: str) -> str:
    """The rest of runn- or swimm- without the doubled letter."""
    return rest[:-1] if rest[-1] == rest[-2] and rest[-1] not in "lsz" else rest


def centred_cosines(query: np.ndarray, points: np.ndarray, centre: np.ndarray | None = None) -> np.ndarray:
    """Cosines [pairs, each] of a vector with points [pairs, each, width], all of unit norm, from a centre.

    Absent: their common mean.
    """
    points = points / np.maximum(np.linalg.norm(points, axis=-1, keepdims=True), 1e-12)
    centre = points.mean(axis=(0, 1)) if centre is None else centre
    points, query = points - centre, query / max(float(np.linalg.norm(query)), 1e-12) - centre
    return points @ query / (np.linalg.norm(points, axis=-1) * np.linalg.norm(query) + 1e-12)


def telling(text: str) -> list[str]:
    """The content words of a text."""
    return [word for word in WORD.findall(text.lower()) if not FILLING.fullmatch(word)]
