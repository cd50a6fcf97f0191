"""The notebook of the first tutorial runs from top to bottom, and its cells end in values that a notebook can show."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first-verdict.ipynb"


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    verdict = names["verdict"]
    assert verdict.passed in (True, False, None) and verdict.words
    assert set(names["run"].ids(client=3)) <= set(names["answer"].ids)
    for name in ("run", "answer", "verdict"):
        assert names[name]._repr_html_()


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code"
    )
