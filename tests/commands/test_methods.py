"""`ease methods`: every method, as its class describes itself."""

import json
from pathlib import Path

from ease.commands.methods import methods_page
from ease.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == methods_page(), "run: ease methods --markdown > docs/methods.md"


def test_the_page_has_everything_of_a_class() -> None:
    for kind in METHODS.values():
        section = methods_page().partition(f"(`{kind.name}`)")[2].partition("\n## ")[0]
        assert kind.source in section
        for name, field in kind.model_fields.items():
            if name != "method":
                assert f"| `{name}` |" in section and str(field.description).split("\n")[0] in section
        assert ("**Differs from the paper:**" in section) == ("Differs from the paper:" in str(kind.__doc__))
        assert all(need in section for need in kind.needs)


def test_the_command_prints_the_page(ease) -> None:
    assert ease("methods", "--markdown") == (0, methods_page(), "")


def test_the_table_names_every_method(ease, monkeypatch) -> None:
    monkeypatch.setattr("ease.console.screen.width", 200, raising=False)
    result = ease("methods")
    assert result.code == 0 and result.err == ""
    for kind in METHODS.values():
        assert kind.title in result.out


def test_json_for_machines(ease) -> None:
    """Rounds by hand: retraining and replays 20, fine-tuning 0.2 · 20 = 4 and with a negation 5, ternary rounds
    0.4 · 20 = 8 and adapter rounds with one for the layers 9; EASE 1 + 0.2 · 20 = 5, and
    1 + 0.15 · 20 = 4 when a client leaves.
    """
    result = ease("methods", "--json")
    methods = {entry["name"]: entry for entry in json.loads(result.out)["methods"]}
    assert methods.keys() == METHODS.keys()
    expected = {"retrain": 20, "fed_eraser": 20, "fed_recover": 20, "finetune": 4, "not": 5, "ffmu": 8, "fused": 9}
    for name, rounds in expected.items():
        assert methods[name]["rounds"] == {"client": rounds, "class": rounds, "sample": rounds}
    assert methods["ease"]["rounds"] == {"client": 4, "class": 5, "sample": 5}
    assert {"name": "share", "default": 0.2, "help": "Rounds, as a share of the training rounds."} in (
        methods["finetune"]["settings"]
    )
    assert methods["fed_eraser"]["needs"] == ["history"]


def test_one_form_at_a_time(ease) -> None:
    result = ease("methods", "--markdown", "--json")
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1
