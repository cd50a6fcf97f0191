"""What the documents name exists."""

import importlib
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
NAMES = re.findall(r"`(ease\.[\w.]+)`", (ROOT / "docs" / "notation.md").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_notation_table_can_be_imported(name: str) -> None:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[cut:]:
        fields = found.model_fields if isinstance(found, type) and issubclass(found, BaseModel) else {}
        known = {**getattr(found, "__annotations__", {}), **fields}
        assert hasattr(found, part) or part in known, f"{name}: {part} is not there"
        found = getattr(found, part, None)


def test_readme_starts_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().splitlines()[:8]
    assert any(line.startswith("make demo") for line in head) and any(line.startswith("make test") for line in head)


def test_shipped_configurations_are_valid() -> None:
    from ease.run import RunConfig, load_config

    assert load_config(ROOT / "configs" / "scenes.toml") == RunConfig()
    assert load_config(ROOT / "configs" / "flickr8k.toml").model.backbone == "photos"
