"""Measures the English of the documents and of the source: long sentences and constructions that we avoid.

python recipes/language.py            # a table by page
python recipes/language.py --list     # each finding with its sentence
python recipes/language.py --source   # docstrings, comments and messages of the package, by module
"""

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HISTORY = {"CHANGELOG.md", "lab-log.md"}
"""Pages that tell the history of the code."""
SOURCE = ROOT / "src" / "ease"
LONG = 30
"""Words of a sentence that has to be read twice."""

BANNED = {
    "tells, is told": r"\b(?:tells?|told|untold)\b",
    "lies, lie": r"\b(?:lies|lie)\b(?! (?:about|to)\b)",
    "stands, stand": r"\b(?:stands|stand)\b(?!-)",
    "goes on, go on": r"\b(?:goes|go|went|going) on\b",
    "comes back": r"\b(?:comes?|came) back\b",
    "speaks of": r"\bsp(?:eaks?|oke) of\b",
    "is asked for": r"\b(?:is|are|was|were) asked for\b",
    "is no": r"(?<!there )\b(?:is|are) no (?!longer\b|more than\b|one\b|such\b)",
    "trailing alone": r"\balone\s*[.,;:)]",
    "but for": r"\bbut for\b",
    "mistake": r"\bmistakes?\b",
    "could be one more": r"\bone more retraining\b",
    "whoever": r"\bwhoever\b",
    "starts with Of, What, Where": r"^(?:Of|What (?:is|was|has|had|a|the)|Where)\b[^?]*$",
    "history words": r"\b(?:as before|nowadays|formerly|used to be)\b",
}
ANY = re.compile(
    "|".join(f"(?:{pattern})" for pattern in BANNED.values() if not pattern.startswith("^")), re.IGNORECASE
)
START = re.compile("|".join(pattern for pattern in BANNED.values() if pattern.startswith("^")))
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\s*\|.*$", re.MULTILINE)
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Findings:
    """What one text has: its sentences, the long ones, and each banned construction with its sentence."""

    sentences: int
    long: list[str]
    banned: list[tuple[str, str]]


def pages() -> list[Path]:
    """Every page except history and generated tables."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(p for p in found if p.name not in HISTORY and "tables" not in p.parts)


def findings(text: str) -> Findings:
    """Read one Markdown text."""
    prose = list(sentences(text))
    cells = [cell.strip() for row in TABLE.findall(FENCE.sub("", text)) for cell in plain(row).split("|")]
    banned = [
        (name, each)
        for each in [*prose, *cells]
        if ANY.search(each) or START.match(each)
        for name, pattern in BANNED.items()
        if re.search(pattern, each, 0 if pattern.startswith("^") else re.IGNORECASE)
    ]
    return Findings(len(prose), [each for each in prose if len(each.split()) > LONG], banned)


def modules() -> list[Path]:
    """Every module of the package."""
    return sorted(SOURCE.rglob("*.py"))


def prose(source: str) -> str:
    """The docstrings, comments and messages of a module as one text, a paragraph each."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = [" ".join(line) for line in re.findall(r"(?:^|  )#( )(.*)$", source, re.MULTILINE)]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return "\n\n".join(text for text in found if " " in text.strip())


def sentences(text: str) -> Iterator[str]:
    """The sentences of the running text, without code, tables and headings."""
    for pattern in (FENCE, COMMENT, TABLE, HEADING):
        text = pattern.sub("\n\n", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        whole = " ".join(plain(paragraph).split())
        yield from (part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z*\"])", whole) if part.strip(" -*"))


def plain(text: str) -> str:
    """Text without the marks of Markdown; code becomes one word."""
    return LINK.sub(r"\1", CODE.sub("code", text)).replace("**", "").replace("*", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each finding")
    parser.add_argument("--source", action="store_true", help="read the package instead of the documents")
    parser.add_argument("pages", nargs="*", type=Path)
    given = parser.parse_args()
    total = [0, 0, 0]
    for path in given.pages or (modules() if given.source else pages()):
        found = findings(prose(path.read_text()) if path.suffix == ".py" else path.read_text())
        for place, count in enumerate((found.sentences, len(found.long), len(found.banned))):
            total[place] += count
        name = path.relative_to(SOURCE).as_posix() if SOURCE in path.parents else path.name
        print(f"{name:24} {found.sentences:5} sentences {len(found.long):4} long {len(found.banned):4} banned")
        if given.list:
            for name, each in found.banned:
                print(f"    {name}: {each[:150]}")
            for each in found.long:
                print(f"    long: {each[:150]}")
    print(f"all: {total[0]} sentences, {100 * total[1] / total[0]:.1f} % over {LONG} words, {total[2]} banned")


if __name__ == "__main__":
    main()
