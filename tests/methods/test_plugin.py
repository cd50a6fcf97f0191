"""A method in a separate package, installed with pip: listed, answering, audited, and passing the exported checks."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ease import methods
from ease.commands.methods import MethodsSummary
from ease.federation.objectives import OBJECTIVES

PACKAGE = Path(__file__).parents[2] / "examples" / "own-method"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, str]:
    """Processes that see the package, which lies in a folder of its own."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(site), str(PACKAGE)], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(site), "EASE_CACHE": str(shared_cache), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: object) -> dict:
    command = [str(Path(sys.executable).parent / "ease"), *map(str, arguments), "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def settings_of_halfway(reported: dict) -> list[str]:
    return [each["name"] for kind in reported["methods"] if kind["name"] == "halfway" for each in kind["settings"]]


def test_a_declared_method_is_listed_with_its_settings(monkeypatch) -> None:
    """As if it were installed, which takes seconds: what pip makes of the same declaration is asked for below."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    monkeypatch.syspath_prepend(PACKAGE / project["tool"]["setuptools"]["package-dir"][""])
    points = [EntryPoint(*each, methods.GROUP) for each in project["project"]["entry-points"][methods.GROUP].items()]
    usable, refused = methods.plug_ins(points)
    sys.modules.pop("ease_halfway")
    OBJECTIVES.pop("halfway: softened")
    assert list(usable) == ["halfway"] and not refused
    assert settings_of_halfway(MethodsSummary.of(usable.values()).model_dump()) == ["back", "softness", "share"]


@pytest.mark.slow
def test_it_is_listed_answers_is_audited_and_keeps_the_contract(environment, small, tmp_path: Path) -> None:
    assert settings_of_halfway(run(environment, "methods")) == ["back", "softness", "share"]
    larger = (*small, "data.test=120", "partition.validation_share=0.2", "training.rounds=3")
    settings = [part for change in larger for part in ("--set", change)]
    run(environment, "train", "--out", tmp_path / "run", *settings)
    answer = run(environment, "forget", tmp_path / "run", "--client", 1, "--method", "halfway", "--set", "back=0.25")
    assert answer["method"]["back"] == 0.25 and {each["phase"] for each in answer["rounds"]} == {"softened"}
    name = f"client-1/{Path(answer['folder']).name}"
    options = ("--shadows", 4, "--retrains", 1, "--pool", 32, "--fpr", 0.2, "--workers", 1, "--retrain")
    audit = run(environment, "audit", tmp_path / "run", "--request", name, *options)
    assert audit["method"]["method"] == "halfway" and audit["verdict"]["measures"]
    check = "from ease_halfway import Halfway; from ease.testing import check_method; check_method(Halfway)"
    checked = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
