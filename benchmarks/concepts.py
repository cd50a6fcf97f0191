"""Precision and recall of words for concepts, by captions that the match never saw.

    python benchmarks/concepts.py flickr8k/dataset_flickr8k.json

Of the five captions of each photograph the first three are matched and the last two say what is in it: two other people
wrote them. A photograph counts as showing a concept if one of those two captions has an expression that was written for
the concept by hand. People do not mention all they see, so a perfect match has less than 100 % too: `agreement` is how
often the last two captions of a photograph have the expression if its first three have it.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ease.data.words import content, says_all

CONCEPTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("dog", ("hot dog",), r"(?<!hot )\b(dogs?|pupp(y|ies)|poodles?|greyhounds?|terriers?|retrievers?|hounds?)\b"),
    ("surfing", (), r"\bsurf"),
    ("snow", (), r"\bsnow"),
    ("bicycle", (), r"\b(bicycl|bik(e|es|er|ers|ing)\b)"),
    ("swimming", (), r"\bsw[ia]m"),
    ("football", (), r"\bfootball"),
    ("climbing", (), r"\b(climb|scal(e|es|ing)\b)"),
    ("beach", (), r"\b(beach|seashore|shore)"),
    ("skateboard", (), r"\bskat"),
    ("child", (), r"\b(child|children|kids?|toddlers?|bab(y|ies)|boys?|girls?)\b"),
)
"""Words, excluded phrases, and what the held-out captions are searched for."""


def counts(photographs: list[list[str]]) -> Iterator[tuple[str, int, int, int, int, int]]:
    """Concept, photographs matched, showing it, both, with the expression in the first captions, and in all."""
    for words, unless, expression in CONCEPTS:
        wanted, phrases, shows = content(words), [content(phrase) for phrase in unless], re.compile(expression)
        matched = [any(says_all(text, wanted, phrases) for text in each[:3]) for each in photographs]
        shown = [any(shows.search(text.lower()) for text in each[3:]) for each in photographs]
        named = [any(shows.search(text.lower()) for text in each[:3]) for each in photographs]
        both = sum(one and other for one, other in zip(matched, shown, strict=True))
        agreed = sum(one and other for one, other in zip(named, shown, strict=True))
        yield words, sum(matched), sum(shown), both, sum(named), agreed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="captions in the Karpathy layout")
    images = json.loads(parser.parse_args().path.read_text())["images"]
    photographs = [[each["raw"] for each in image["sentences"]] for image in images]
    photographs = [each for each in photographs if len(each) == 5]
    print(f"{len(photographs)} photographs")
    print("| Concept | Matched | Shown | Precision | Recall | Agreement of annotators |")
    print("|---|---|---|---|---|---|")
    for words, matched, shown, both, named, agreed in counts(photographs):
        print(f"| {words} | {matched} | {shown} | {both / matched:.0%} | {both / shown:.0%} | {agreed / named:.0%} |")


if __name__ == "__main__":
    main()
