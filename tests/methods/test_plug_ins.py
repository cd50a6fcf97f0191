"""Methods of other packages: found by their entry point, and refused by name where they cannot be used."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ease import methods
from ease.commands.methods import list_methods
from ease.errors import UserError
from ease.methods import BROKEN, METHODS, make_method, plug_ins

SOUND = '''
from typing import ClassVar, Literal
from ease.methods.finetune import Finetune

class Longer(Finetune):
    """More of the same."""
    name: ClassVar[str] = "longer"
    title: ClassVar[str] = "Longer"
    method: Literal["longer"] = "longer"

class Unnamed(Finetune):
    """Keeps the name of another."""

class Half(Finetune):
    """Lacks the field."""
    name: ClassVar[str] = "half"

Nothing = 3
'''


@pytest.fixture
def point(tmp_path: Path, monkeypatch):
    """An entry point of a package that is installed nowhere else."""
    (tmp_path / "other_package.py").write_text(SOUND)
    (tmp_path / "broken_package.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name, value: EntryPoint(name, value, methods.GROUP)
    sys.modules.pop("other_package", None)


def test_a_sound_one_is_a_method_like_any_other(point, monkeypatch) -> None:
    usable, refused = plug_ins([point("longer", "other_package:Longer")] * 2)  # a package may be found twice
    assert list(usable) == ["longer"] and not refused
    monkeypatch.setitem(METHODS, "longer", usable["longer"])
    assert make_method("longer", ("share=0.5",)).model_dump() == {"method": "longer", "share": 0.5}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("gone", "broken_package:Method", "cannot be imported (ModuleNotFoundError: No module named 'a_module_that"),
        ("gone", "other_package:Missing", "cannot be imported (AttributeError"),
        ("number", "other_package:Nothing", "it is not a subclass of ease.methods.base.Unlearner"),
        ("base", "ease.methods.base:Unlearner", "it lacks rounds, unlearn"),
        ("Longer", "other_package:Longer", "a name consists of small letters"),
        ("ease", "other_package:Longer", "a method of this name belongs to this package"),
        ("other", "other_package:Longer", "its name is 'longer', the entry point's is 'other'"),
        ("unnamed", "other_package:Unnamed", "its name is 'finetune', the entry point's is 'unnamed'"),
        ("half", "other_package:Half", 'it lacks the field `method: Literal["half"] = "half"`'),
    ],
)
def test_others_are_refused_with_the_reason_and_break_nothing(point, name: str, value: str, reason: str) -> None:
    usable, refused = plug_ins([point(name, value), point("longer", "other_package:Longer")])
    assert list(usable) == ["longer"] and list(refused) == [name]
    assert value in refused[name] and reason in refused[name]


def test_a_name_that_two_packages_want_is_given_to_neither(point) -> None:
    usable, refused = plug_ins([point("longer", "other_package:Longer"), point("longer", "other_package:Half")])
    assert not usable and "several packages" in refused["longer"] and "other_package:Half" in refused["longer"]


def test_a_refused_plug_in_is_reported_when_it_is_requested(monkeypatch, ease) -> None:
    monkeypatch.setitem(BROKEN, "sad", "sad_package:Sad cannot be imported (ImportError: no luck)")
    with pytest.raises(
        UserError, match="--method sad: this plug-in cannot be used: sad_package:Sad cannot be imported"
    ):
        make_method("sad")
    assert list_methods().refused == {"sad": BROKEN["sad"]}
    shown = " ".join(ease("methods").out.split())
    assert "refused: sad: sad_package:Sad cannot be imported (ImportError: no luck)" in shown
    monkeypatch.setitem(BROKEN, "ease", "taken")
    assert make_method("ease").name == "ease"
