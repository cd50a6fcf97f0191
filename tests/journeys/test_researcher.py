"""A researcher writes a method in one file, sees it beside the others in a table, and gets the same table again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EXPERIMENT = """
title = "Mine"
shadows = 0
seeds = [0]
band_retrains = 0
scenarios = ["client"]
methods = ["finetune", { method = "shrink", settings = { keep = 0.25 } }]

[run]
gallery = 20
data = { train = 60, validation = 0, test = 20 }
partition = { clients = 3, classes = 3, scheme = "iid" }
model = { hidden = 16, embedding = 8 }
training = { rounds = 2, local_epochs = 1, batch_size = 8 }
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that docs/howto.md shows, and what pip would write to make it known."""
    folder = tmp_path_factory.mktemp("lab")
    shown = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "howto.md").read_text(), re.MULTILINE | re.DOTALL)
    (folder / "shrink.py").write_text(next(code for code in shown if "class Shrink" in code))
    about = folder / "shrink-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shrink\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[ease.methods]\nshrink = shrink:Shrink\n")
    (folder / "mine.toml").write_text(EXPERIMENT)
    return folder


def done(lab: Path, *arguments: object) -> str:
    """What a command prints, in a process of its own: only a new one sees the new method."""
    paths = os.pathsep.join([str(lab), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ease", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=lab)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_method_is_known_and_explained(lab: Path) -> None:
    found = {each["name"]: each for each in json.loads(done(lab, "methods", "--json"))["methods"]}
    assert found["shrink"]["title"] == "Shrink"
    assert {each["name"] for each in found["shrink"]["settings"]} == {"keep", "share"}


def figures(results: dict) -> dict:
    """What was measured, less the clock."""
    return {
        (row["role"], row["method"]): {
            name: value for name, value in row["metrics"].items() if "seconds" not in name and "memory" not in name
        }
        for row in results["rows"]
    }


def test_its_table_comes_out_the_same_again(lab: Path) -> None:
    first, again = (
        json.loads(done(lab, "bench", "mine.toml", "--out", name, "--processes", 1, "--quiet", "--json"))
        for name in ("results", "again")
    )
    assert figures(first) == figures(again)
    assert {method for _, method in figures(first)} >= {"shrink", "finetune", "retrain"}
    table = (lab / "results" / "mine" / "tables.md").read_bytes()
    assert b"Shrink" in table
    done(lab, "bench", "--tables", "results/mine", "--quiet")
    assert (lab / "results" / "mine" / "tables.md").read_bytes() == table
