"""The documents are plain English, and the numbers on their first pages come from one file."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


LANGUAGE, NUMBERS = recipe("language"), recipe("quoted_numbers")


@pytest.mark.parametrize("path", LANGUAGE.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_uses_a_banned_construction(path: Path) -> None:
    found = LANGUAGE.findings(path.read_text()).banned
    assert not found, f"{path.name}: {found}; see python recipes/language.py --list"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The model is told nothing.", ["tells, is told"]),
        ("It is no proof.", ["is no"]),
        ("It is no longer used.", []),
        ("Where pairs stay at sites, nodes retrain.", ["starts with Of, What, Where"]),
        ("What is forgotten?", []),
        ("Projectors alone are trained alone.", ["trailing alone"]),
        ("| a | the run goes on |", ["goes on, go on"]),
        ("`ease told` prints a line.", []),
        ("```\nis told\n```", []),
    ],
)
def test_constructions_are_found(text: str, names: list[str]) -> None:
    assert [name for name, _ in LANGUAGE.findings(text).banned] == names


def test_long_sentences_are_counted() -> None:
    found = LANGUAGE.findings(f"Short. {'Word ' * 31}end. Short again.")
    assert (found.sentences, len(found.long)) == (3, 1)


@pytest.mark.parametrize("page", NUMBERS.PAGES)
def test_numbers_of_landing_pages_come_from_the_file(page: str) -> None:
    assert NUMBERS.problems((ROOT / page).read_text()) == []


def test_a_changed_number_is_noticed() -> None:
    text = (ROOT / "README.md").read_text()
    value = NUMBERS.known()["quoted"]["client_bytes"]["value"]
    assert NUMBERS.problems(text.replace(f"[{value}](", "[1 %](", 1))
    row = NUMBERS.known()["table"]["results"]["rows"][0]
    assert NUMBERS.problems(text.replace(f"| {row[2]} |", "| -9.9 |", 1))
    assert NUMBERS.problems(text + "\nIt saves 12.5 % of the time.\n") == ["12.5 %: a number without a key"]


def test_the_number_of_methods_is_that_of_the_main_comparison() -> None:
    listed = tomllib.loads((ROOT / "experiments" / "main.toml").read_text())["methods"]
    names = {each if isinstance(each, str) else each["method"] for each in listed}
    assert NUMBERS.known()["quoted"]["methods"]["value"] == f"{len(names)} methods"


def test_every_number_names_its_command_and_commit() -> None:
    known = NUMBERS.known()
    for each in [*known["quoted"].values(), *known["table"].values()]:
        assert each["command"] and each["commit"]
