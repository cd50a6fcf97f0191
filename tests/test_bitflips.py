"""No flipped bit in a run or its cache passes in silence: a small survey of `benchmarks/bitflips.py`."""

import importlib.util
import os
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork")


@pytest.fixture(scope="module")
def bitflips() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "bitflips.py"
    spec = importlib.util.spec_from_file_location("bitflips", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(bitflips: ModuleType, folder: Path, flips: int, seed: int, audited: bool) -> Counter[str]:
    found = list(bitflips.survey(folder, flips, seed, audited))
    wrong = [each for each in found if each.outcome not in ("detected", "harmless")]
    assert len(found) == flips and not wrong
    return Counter(each.outcome for each in found)


def test_some_flips(bitflips, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bitflips, "TINY", (*bitflips.TINY, "model.lora=off"))  # the long survey has adapters
    assert counted(bitflips, tmp_path, 2, 1, audited=False)["detected"] > 0


@pytest.mark.slow
def test_many_flips(bitflips, tmp_path: Path) -> None:
    flips = 60 if os.environ.get("EASE_SWEEP") == "all" else 24
    assert counted(bitflips, tmp_path, flips, 2, audited=True)["detected"] > flips * 2 / 3


@pytest.mark.parametrize(
    ("codes", "said", "same", "outcome"),
    [
        ([0, 2], "error: run/round.json: damaged", True, "detected"),
        ([0, 2], "error: no", False, "unnamed"),
        ([0, 0], "round.json is made again", True, "detected"),
        ([0, 0], "round.json is made again", False, "silent"),
        ([0, 0], "", True, "harmless"),
        ([0, 0], "", False, "silent"),
        ([0, 1], "Traceback: round.json", True, "traceback"),
        ([-7], "", True, "traceback"),
    ],
)
def test_outcomes_are_distinguished(bitflips, codes: list[int], said: str, same: bool, outcome: str) -> None:
    reported = [bitflips.Told(code, said if code == codes[-1] else "") for code in codes]
    assert bitflips.classify(reported, "run/rounds/00001/round.json", same) == outcome
