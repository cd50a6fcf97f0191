"""The page in a real browser: quiet, offline, usable with the keyboard, readable in the dark, on a phone, on paper."""

import io
import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ease.show.page import Contents, page

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Make = Callable[..., Contents]
Open = Callable[..., Any]

CONTRAST = """
() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || element.closest("script, title, desc")) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walk.currentNode.textContent.trim()]);
  }
  return found;
}
"""
NAMELESS = """
() => [...document.querySelectorAll("svg, img, input, nav, section, [role=region]")].filter((element) => {
  const label = element.getAttribute("aria-label") || element.getAttribute("alt");
  const by = document.getElementById(element.getAttribute("aria-labelledby"));
  const title = element.querySelector(":scope > title");
  const tag = element.labels && element.labels[0];
  return ![label, by && by.textContent, title && title.textContent, tag && tag.textContent].some((t) => t && t.trim());
}).map((element) => element.outerHTML.slice(0, 80))
"""


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open contents as a file; at the end nothing may have been complained about and nothing else asked for."""
    contexts: list[Any] = []
    complaints: list[str] = []
    asked: list[str] = []

    def open_page(
        contents: Contents, width: int = 1000, scheme: str = "light", script: bool = True, folded: bool = False
    ) -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(page(contents), encoding="utf-8")
        contexts.append(
            browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
            )
        )
        opened = contexts[-1].new_page()
        opened.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(path.as_uri())
        if not folded:
            for part in opened.locator(".expert > summary").all():
                part.click()
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == [] and len(asked) >= len(contexts)


def test_it_opens_with_one_screen_for_everyone(show: Open, contents: Make) -> None:
    """What was asked, the verdict, recall, what to do next and which model: all of it without scrolling."""
    opened = show(contents(), width=1200, folded=True)
    last = opened.locator(".opening").first.bounding_box()
    assert last["y"] + last["height"] <= 900
    assert not opened.locator(".measures").is_visible() and not opened.locator("#delta-0").is_visible()
    opened.locator(".expert > summary").first.press("Enter")
    assert opened.locator(".measures").is_visible() and opened.locator("#delta-0").is_visible()


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_axe_finds_no_barrier(
    show: Open, contents: Make, barriers: Callable[[Any], list[str]], width: int, scheme: str, folded: bool
) -> None:
    assert barriers(show(contents(), width=width, scheme=scheme, folded=folded)) == []


def test_axe_finds_a_barrier_where_there_is_one(
    browser: Any, barriers: Callable[[Any], list[str]], contents: Make
) -> None:
    opened = browser.new_page()
    opened.set_content(page(contents()).replace('<html lang="en">', "<html>"))
    assert [each.partition(":")[0] for each in barriers(opened)] == ["html-has-lang"]
    opened.close()


def spectrum_of(opened: Any) -> tuple[str, list[str], int]:
    """What the spectrum says: the sentence, the numbers of each block, and how many dots are filled."""
    sentence = opened.locator("output").inner_text()
    numbers = opened.locator(".spectrum tbody td").all_inner_texts()
    return sentence, numbers, opened.locator(".direction.goes").count()


def test_the_slider_answers_to_the_keyboard(show: Open, contents: Make) -> None:
    opened = show(contents())
    for _ in range(20):
        opened.keyboard.press("Tab")
        if opened.evaluate("document.activeElement.type") == "range":
            break
    assert opened.evaluate("document.activeElement.id") == "delta-0"
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    places = [opened.locator(".threshold").first.get_attribute("x1")]
    opened.keyboard.press("Home")
    assert spectrum_of(opened) == (
        "At δ = 0.00, 0 of 5 directions go: ηf = 0.00, ηr = 0.00.",
        ["0 of 2", "0.00", "0.00", "0 of 3", "0.00", "0.00"],
        0,
    )
    places.append(opened.locator(".threshold").first.get_attribute("x1"))
    opened.keyboard.press("End")
    assert spectrum_of(opened) == (
        "At δ = 1.00, 5 of 5 directions go: ηf = 0.95, ηr = 0.81.",
        ["2 of 2", "0.90", "0.36", "3 of 3", "1.00", "0.81"],
        5,
    )
    assert opened.locator("#delta-0").get_attribute("aria-valuetext") == "delta 1.00"
    places.append(opened.locator(".threshold").first.get_attribute("x1"))
    assert len(set(places)) == 3


@pytest.mark.parametrize("delta", [0.0, 0.13, 0.2, 0.5, 0.77, 1.0])
def test_the_slider_shows_what_would_be_drawn_at_that_threshold(show: Open, contents: Make, delta: float) -> None:
    """The page written for a threshold is the oracle of the page moved to it: words, dots, lines and places."""
    moved, drawn = show(contents(delta=0.4)), show(contents(delta=delta))
    moved.locator("#delta-0").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", delta
    )
    assert spectrum_of(moved) == spectrum_of(drawn)
    for selector, attributes in {".threshold": ("x1", "x2"), ".at-removed, .at-touched": ("cx", "cy")}.items():
        for attribute in attributes:
            read = f"elements => elements.map((e) => Number(e.getAttribute('{attribute}')))"
            places = [opened.locator(selector).evaluate_all(read) for opened in (moved, drawn)]
            assert places[0] == pytest.approx(places[1], abs=0.006)
    assert moved.locator("desc").all_text_contents() == drawn.locator("desc").all_text_contents()


def test_the_slider_speaks_politely(show: Open, contents: Make) -> None:
    opened = show(contents())
    assert opened.locator("output").get_attribute("aria-live") == "polite"
    assert opened.get_by_label("Try a threshold δ").count() == 1


def test_without_scripts_everything_but_the_slider_is_there(show: Open, contents: Make) -> None:
    opened = show(contents(), script=False)
    assert not opened.locator("#delta-0").is_visible()
    assert opened.locator("svg.chart").count() == 9 and opened.locator("output").is_visible()


def test_structure_is_exposed_to_screen_readers(show: Open, contents: Make) -> None:
    opened = show(contents())
    assert opened.locator("html").get_attribute("lang") == "en"
    assert [opened.locator(name).count() for name in ("header", "main", "footer", "h1")] == [1, 1, 1, 1]
    levels = [int(name[1]) for name in opened.locator("h1, h2, h3, h4").evaluate_all("e => e.map((h) => h.tagName)")]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels))
    assert opened.evaluate(NAMELESS) == []
    assert opened.locator("svg:not([role=img])").count() == 0
    assert opened.locator("table:not(:has(caption))").count() == 0
    assert opened.locator("th:not([scope])").count() == 0
    doubled = "() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); "
    assert opened.evaluate(doubled + "return ids.filter((id, i) => ids.indexOf(id) !== i); }") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(show: Open, contents: Make, scheme: str) -> None:
    opened = show(contents(), scheme=scheme)
    found = opened.evaluate(CONTRAST)
    assert len(found) > 100
    assert [text for ratio, text in found if ratio < 4.5] == []
    paper = opened.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", paper))) / 3
    assert (brightness < 60) == (scheme == "dark")


def test_a_phone_shows_it_whole(show: Open, contents: Make) -> None:
    """Nothing is wider than 320 px, long words neither, and letters in pictures are at least 9 px high."""
    opened = show(
        contents("Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft"), width=320
    )
    assert opened.evaluate("document.documentElement.scrollWidth") == 320
    sizes = opened.locator("svg.chart").evaluate_all(
        "all => all.map((s) => parseFloat(getComputedStyle(s).fontSize) * s.clientWidth / s.viewBox.baseVal.width)"
    )
    assert min(sizes) >= 9
    clipped = "all => all.map((t) => [t.getBoundingClientRect(), t.textContent])"
    clipped += ".filter(([box]) => box.left < 0 || box.right > 320).map(([, text]) => text)"
    assert opened.locator("svg.chart text").evaluate_all(clipped) == []


def test_paper_has_no_controls_and_no_dark(show: Open, contents: Make) -> None:
    opened = show(contents(), scheme="dark")
    assert opened.locator(".control").first.is_visible()
    opened.emulate_media(media="print", color_scheme="dark")
    assert not opened.locator(".control").first.is_visible() and not opened.locator("nav").is_visible()
    assert opened.locator("output").is_visible() and opened.locator("details dl").is_visible()
    assert opened.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert [text for ratio, text in opened.evaluate(CONTRAST) if ratio < 4.5] == []


def test_still_for_those_who_want_no_motion(show: Open, contents: Make) -> None:
    opened = show(contents())
    duration = "getComputedStyle(document.querySelector('.direction')).transitionDuration"
    assert opened.evaluate(duration) != "0s"
    opened.emulate_media(reduced_motion="reduce")
    assert opened.evaluate(duration) == "0s"


def test_no_caption_becomes_a_script(show: Open, contents: Make) -> None:
    caption = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"
    opened = show(contents(caption))
    assert opened.evaluate("window.taken") is None
    assert opened.locator(".thumbnails li p").first.inner_text() == caption


def paper_of(opened: Any) -> float:
    """Brightness of the paper that a figure is drawn on, by a corner of it."""
    picture = Image.open(io.BytesIO(opened.locator(".drawn img").screenshot()))
    return sum(picture.convert("RGB").getpixel((8, 8))) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_experiment_is_for_everyone_too(show: Open, results: dict[str, Any], bench, scheme: str) -> None:
    """Its figure is drawn at its own size, on paper as light or dark as the page, and scrolls by itself on a phone."""
    results["header"]["experiment"]["kind"] = "bars"
    opened = show(Contents("main", "results/main", results=bench(results)), width=360, scheme=scheme)
    assert opened.locator(".drawn img").evaluate("image => image.complete && image.naturalWidth > 200")
    assert opened.evaluate("document.documentElement.scrollWidth") == 360
    assert opened.evaluate(NAMELESS) == []
    assert [text for ratio, text in opened.evaluate(CONTRAST) if ratio < 4.5] == []
    assert (paper_of(opened) < 60) == (scheme == "dark")
    opened.emulate_media(media="print")
    assert paper_of(opened) == 255
    opened.emulate_media(media="screen")
    folder = Path(os.environ.get("EASE_ARTIFACTS") or ROOT / "build") / "report"
    opened.screenshot(path=folder / f"experiment-{scheme}.png", full_page=True)


def test_pictures_of_the_page_are_kept_for_people(show: Open, contents: Make) -> None:
    folder = Path(os.environ.get("EASE_ARTIFACTS") or ROOT / "build") / "report"
    for name, width, scheme in (("desktop", 1200, "light"), ("phone", 390, "light"), ("dark", 1000, "dark")):
        show(contents(), width=width, scheme=scheme).screenshot(path=folder / f"{name}.png", full_page=True)
        assert (folder / f"{name}.png").stat().st_size > 10_000
