"""Nothing that data holds can become markup."""

import json
import re
from html import unescape

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from ease.show.svg import join, tag
from ease.show.template import ENVIRONMENT, fixed, sentence


def table_of(label: str) -> str:
    parts = ENVIRONMENT.get_template("parts.html").module
    return parts.table(["A", "B"], [[label, "1"]], label)  # type: ignore[attr-defined]


@given(st.text())
def test_template_values_are_text(text: str) -> None:
    """In a cell and in an attribute; line ends are whatever the file has."""
    html = table_of(text)
    cell = re.search(r'<th scope="row">([^<>]*)</th>', html)
    label = re.search(r'aria-label="([^"<>]*)"', html)
    assert cell is not None and label is not None and unescape(cell[1]) == unescape(label[1])
    assert re.sub(r"&(amp|lt|gt|#34|#39);", "", cell[1]).count("&") == 0


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        ENVIRONMENT.from_string("{{ nothing }}").render()


@settings(max_examples=40)
@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_script_of_data_gives_the_data_back_and_cannot_be_left(value: object) -> None:
    text = ENVIRONMENT.from_string("{{ value | tojson }}").render(value=value)
    assert not set("<>&") & set(text) and json.loads(text) == value
    assert text.isascii()


def test_numbers_and_sentences() -> None:
    assert (fixed(0.126, 2), fixed(None, 2)) == ("0.13", "")
    assert (sentence("two pairs"), sentence("Done."), sentence("")) == ("Two pairs.", "Done.", ".")


# The shapes of the pictures


def test_a_shape_by_hand() -> None:
    assert tag("text", "a < b", tag("tspan", "c"), None, class_="x", x=1) == (
        '<text class="x" x="1">a &lt; b<tspan>c</tspan></text>'
    )
    assert tag("text", Markup("<br>"), "<br>") == "<text><br>&lt;br&gt;</text>"


def test_coordinates_are_short() -> None:
    assert tag("circle", r=1 / 3, cx=2.0) == '<circle r="0.33" cx="2"></circle>'


@given(st.text())
def test_text_returns_as_it_was_and_opens_no_shape(text: str) -> None:
    inner = tag("p", text).removeprefix("<p>").removesuffix("</p>")
    assert unescape(inner) == unescape(join(text)) and "<" not in inner and ">" not in inner
    assert re.fullmatch(r'<p title="([^"<>]*)"></p>', tag("p", title=text)) is not None
