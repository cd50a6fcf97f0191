"""Writes the tables of the README and the landing pages from docs/numbers.toml, and checks the numbers they quote.

python recipes/quoted_numbers.py            # write the tables
python recipes/quoted_numbers.py --check    # exit with 1 if a page differs from the file
"""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/README.md", "docs/fit.md")
TABLE = re.compile(r"(<!-- numbers (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
QUOTED = re.compile(r"\[([^\]]+)\]\([^)\s]+ \"(\w+)\"\)")
MEASURED = re.compile(r"(?<![\w.-])[+-]?\d+(?:\.\d+)? ?(?:%|points?\b)|(?<![\w.-])[+-]?\d+\.\d+(?![\w.])")
HIDDEN = re.compile(r"^```.*?^```|`[^`]*`|<!-- numbers.*?<!-- end -->|\[[^\]]+\]\([^)\s]+ \"\w+\"\)", re.M | re.S)


def known() -> dict[str, Any]:
    """The numbers, their commands and commits."""
    return tomllib.loads((ROOT / "docs" / "numbers.toml").read_text())


def table(name: str) -> str:
    """A table as Markdown, followed by nothing."""
    asked = known()["table"][name]
    rows = [asked["columns"], ["---"] * len(asked["columns"]), *asked["rows"]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(text: str) -> str:
    """A page with its tables as the file has them."""
    return TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], text)


def problems(text: str) -> list[str]:
    """What a page says that the file does not."""
    quoted = known()["quoted"]
    stale = "a table differs from docs/numbers.toml; run python recipes/quoted_numbers.py"
    found = [] if written(text) == text else [stale]
    for value, key in QUOTED.findall(text):
        if key not in quoted:
            found.append(f"{key}: no such number in docs/numbers.toml")
        elif quoted[key]["value"] != value:
            found.append(f"{key}: the page says {value}, docs/numbers.toml {quoted[key]['value']}")
    return found + [f"{each}: a number without a key" for each in MEASURED.findall(HIDDEN.sub("", text))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    for page in PAGES:
        path = ROOT / page
        if not check:
            path.write_text(written(path.read_text()))
        for each in problems(path.read_text()):
            raise SystemExit(f"{page}: {each}")


if __name__ == "__main__":
    main()
