"""docs/terminal.md shows what four commands print on 80 columns: made here, and compared with what they print today.

`EASE_CAPTURES=write pytest -m slow tests/test_captures.py` writes the page again.
"""

import os
import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "terminal.md"
HEAD = """# What commands print

On a screen of 80 columns, and in a pipe. Made by `tests/test_captures.py` on a small run, whose numbers mean nothing.
"""
EXPERIMENT = """title = "Three methods"
methods = ["finetune", "not", "ease"]
scenarios = ["client", "sample"]
seeds = [0, 1]
shadows = 4
band_retrains = 2
"""
COMMANDS = (
    "ease forget run --client 1 --method finetune",
    "ease audit run --request client-1/finetune --retrain --retrains 5 --shadows 4 --workers 1",
    "ease request list run",
    "ease bench small.toml --out results --quick",
)


def skeleton(text: str) -> list[str]:
    """The words of an output, without numbers, widths and lines that depend on what was measured."""
    lines = [re.sub(r"[-+]?\d[\d.,:]*%?|[^\w\s]", " ", line) for line in text.splitlines()]
    return [word for line in lines for word in line.split() if len(word) > 3 and not word.startswith("_")]


@pytest.mark.slow
def test_four_commands_fit_80_columns_and_look_as_the_page_shows(ease, small, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    settings = (*small, "partition.validation_share=0.3", "data.train=90", "data.validation=60")
    changes = [word for assignment in settings for word in ("--set", assignment)]
    assert ease("train", "--out", "run", *changes, "--quiet").code == 0
    assert ease("request", "add", "run", "--client", "2", "--by", "site 2", "--ground", "GDPR art. 17").code == 0
    Path("small.toml").write_text(EXPERIMENT)
    bench = [word for each in settings for word in ("--set", f"run.{each}")]
    page = [HEAD]
    for command in COMMANDS:
        added = bench if "bench" in command else []
        result = (
            ease(*shlex.split(command)[1:], "--quiet", *added)
            if "list" not in command
            else ease(*shlex.split(command)[1:])
        )
        assert result.code == 0, result.err
        tables = [line for line in result.out.splitlines() if line[:1] in "┏┃┡│└╭╰ "]
        assert tables and max(map(len, tables)) <= 80, command
        assert "…" not in "".join(tables), command
        page.append(f"```\n$ {command}\n{result.out.rstrip()}\n```\n")
    if os.environ.get("EASE_CAPTURES") == "write":
        PAGE.write_text("\n".join(page))
    shown = re.findall(r"```\n\$ (.*?)\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert [command for command, _ in shown] == list(COMMANDS)
    for (command, on_page), made in zip(shown, page[1:], strict=True):
        here = skeleton(made.split("\n", 2)[2])
        common = set(skeleton(on_page)) & set(here)
        assert len(common) >= 0.8 * len(set(here)), f"{command}: write docs/terminal.md again"
