"""Configurations: what TOML and `--set` give, and mistakes that name their field."""

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from ease.config import Config, override, read_toml, to_toml, validate
from ease.errors import UserError


class Section(Config):
    count: int = Field(3, ge=1)
    rate: float = Field(0.5, gt=0)
    word: Literal["one", "two"] = "one"
    many: tuple[str, ...] = ("a", "b")


class Whole(Config):
    seed: int = 0
    note: str | None = None
    section: Section = Section()


def test_assignments_are_read_as_toml_and_bare_words_as_text() -> None:
    table = override(
        {"seed": 1, "section": {"count": 2}},
        ["seed=7", "section.rate = 1e-3", "section.word=two", 'section.many=["x"]', "note=plain words"],
    )
    assert validate(Whole, table, "here") == Whole(
        seed=7, note="plain words", section=Section(count=2, rate=1e-3, word="two", many=("x",))
    )


def test_an_override_does_not_change_its_source() -> None:
    table = {"section": {"count": 2}}
    override(table, ["section.count=5", "other.new=1"])
    assert table == {"section": {"count": 2}}


def test_the_last_assignment_wins() -> None:
    assert override({}, ["a.b=1", "a.b=2"]) == {"a": {"b": 2}}


@pytest.mark.parametrize("assignment", ["rounds", "=5", " = 5"])
def test_an_assignment_without_key_or_value_is_refused(assignment: str) -> None:
    with pytest.raises(UserError, match="write it as key=value"):
        override({}, [assignment])


def test_an_assignment_into_a_value_is_refused() -> None:
    with pytest.raises(UserError, match="seed is a value, not a section"):
        override({"seed": 1}, ["seed.more=2"])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sed": 1}, r"f.toml: sed: unknown key \(did you mean seed\?\); known keys here: note, section, seed"),
        (
            {"section": {"cuont": 1}},
            r"f.toml: section.cuont: unknown key \(did you mean count\?\); known keys here: count, many, rate, word",
        ),
        ({"section": {"count": 0}}, r"f.toml: section.count: input should be greater than or equal to 1 \(got 0\)"),
        ({"section": {"word": "three"}}, "f.toml: section.word: input should be 'one' or 'two'"),
        ({"section": {"rate": float("inf")}}, "f.toml: section.rate: input should be a finite number"),
        ({"section": {"rate": float("nan")}}, "f.toml: section.rate: "),
        ({"section": 5}, "f.toml: section: input should be a valid dictionary"),
        ({"seed": "x" * 500}, r"f.toml: seed: .* \(got 'xxx.*\.\.\.\)$"),
    ],
)
def test_a_user_error_is_one_line_with_file_field_and_remedy(table: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        validate(Whole, table, "f.toml")
    assert "\n" not in str(caught.value)


def test_values_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Whole().seed = 2  # type: ignore[misc]


def test_toml_round_trip(tmp_path: Path) -> None:
    config = Whole(seed=4, note='a "quoted" ü\n', section=Section(rate=1e-05, many=("x", "y")))
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert validate(Whole, read_toml(tmp_path / "c.toml"), "c.toml") == config
    assert "note" not in to_toml(Whole())  # TOML has no null


class Inner(Config):
    near: float = 1.0
    gone: int | None = None


class Outer(Config):
    """A value after a section, a section in a section, and a key and a text that need quotes."""

    inner: Inner = Inner()
    last: bool = True
    words: tuple[str, ...] = ("a", 'b "c"')
    free: dict[str, Inner | int] = Field(default_factory=lambda: {"x y": 3, "deep": Inner(near=2)})


def test_toml_keeps_the_order_of_the_fields_and_leaves_out_what_is_none_at_any_depth() -> None:
    text = to_toml(Outer())
    assert (
        text
        == """last = true
words = [
  "a",
  "b \\"c\\"",
]

[inner]
near = 1.0

[free]
"x y" = 3

[free.deep]
near = 2.0
"""
    )
    assert validate(Outer, tomllib.loads(text), "text") == Outer()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"a = ", "not valid TOML"), (b"a = 1\na = 2", "not valid TOML"), (b"\xff", "TOML")],
)
def test_files_that_are_not_toml_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_not_a_toml_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name a TOML file"):
        read_toml(tmp_path)


def test_a_nul_in_a_path_or_any_text_is_one_line() -> None:
    for table in ({"note": "a\0b"}, {"section": {"many": ["x", "\0"]}}):
        with pytest.raises(UserError, match=r"run.toml: (note|section.many): holds a NUL character"):
            validate(Whole, table, "run.toml")
