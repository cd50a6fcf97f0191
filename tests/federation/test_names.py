"""Who does jobs and who counts them know no objective by name: a new loss is no change of theirs."""

import ast
import re
from pathlib import Path

import pytest

import ease.federation
from ease.audit.site_measures import AUDIT
from ease.federation import protocol
from ease.federation.objectives import OBJECTIVES
from ease.methods import import_all

import_all()
FOLDER = Path(ease.federation.__file__).parent
PARTS = {name for name, value in vars(protocol).items() if getattr(value, "__module__", "") == protocol.__name__}
"""What jobs and updates are made of. A round that is replayed is such, whichever objective replays it."""
ENGINES = ("local", "sequential", "vectorized", "engines", "meter", "journal", "codec", "container", "client")


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("module", ENGINES)
def test_no_objective_is_known_by_name(module: str) -> None:
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    documents = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in documents}
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    assert not strings & OBJECTIVES.keys()
    assert not {snake(name) for name in names - PARTS} & {name.replace(" ", "_") for name in OBJECTIVES}


@pytest.mark.parametrize("name", ["Imitate", "IMITATE", "imitate", "ReplayedRound", "REPLAYED_ROUND"])
def test_names_are_seen_however_they_are_written(name: str) -> None:
    assert snake(name) in {name.replace(" ", "_") for name in OBJECTIVES}


def test_every_loss_of_a_method_is_in_its_module() -> None:
    """The registry of a program that has imported no method holds plain training alone."""
    names = {
        "align",
        AUDIT,  # which belongs to no method
        "membership scores",
        "number of forget pairs",
        "sum of own updates",
        "replay",
        "replayed round",
        "difference",
        "decouple",
        "imitate",
        "sensitivity",
        "ternary",
        "sums",
        "ranks",
        "secure: advertise keys",
        "secure: share keys",
        "secure: masked sums",
        "secure: unmask",
    }
    assert names | {"unlearning cross-entropy"} == OBJECTIVES.keys()
    text = (FOLDER / "objectives.py").read_text()
    strings = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)}
    assert strings & OBJECTIVES.keys() == {"align"}
