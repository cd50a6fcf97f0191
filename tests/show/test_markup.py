"""Nothing that data holds can become markup."""

import json
import re
from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from ease.show.markup import Markup, join, json_script, tag


def test_an_element_by_hand() -> None:
    assert tag("p", "a < b", tag("b", "c"), class_="x", data_y=1, hidden=True, lang=None) == (
        '<p class="x" data-y="1" hidden>a &lt; b<b>c</b></p>'
    )


def test_only_elements_of_html_without_an_end_lack_one() -> None:
    """A shape without its end would swallow the shapes after it, and they would not be drawn."""
    assert tag("line", x1=1) == '<line x1="1"></line>'
    assert tag("img", alt="") == '<img alt="">'


def test_coordinates_are_short() -> None:
    assert tag("circle", r=1 / 3, cx=2.0) == '<circle r="0.33" cx="2"></circle>'


@given(st.text())
def test_text_comes_back_as_it_was_and_opens_no_element(text: str) -> None:
    inner = tag("p", text).removeprefix("<p>").removesuffix("</p>")
    assert unescape(inner) == unescape(join(text)) and "<" not in inner and ">" not in inner
    value = re.fullmatch(r'<p title="([^"<>]*)"></p>', tag("p", title=text))
    assert value is not None


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_script_of_data_gives_the_data_back_and_cannot_be_left(value: object) -> None:
    found = re.fullmatch(r'<script type="application/json" id="d">([^<>&]*)</script>', json_script("d", value))
    assert found is not None and json.loads(found[1]) == value
    assert found[1].isascii()


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", Markup("<br>"), "<br>") == "<p><br>&lt;br&gt;</p>"
