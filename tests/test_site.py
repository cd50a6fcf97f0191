"""The documents as a site: links between both folders lead somewhere, and from a disk it searches without a network."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

built = pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="no site: make docs")


def test_every_page_has_its_place_in_the_site() -> None:
    """mkdocs would only warn of a page that its menu leaves out."""
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = {line.split()[-1] for line in menu.splitlines() if line.endswith(".md")}
    assert {path.name for path in ROOT.glob("docs/*.md")} == {name for name in named if "/" not in name}


@pytest.mark.slow
@built
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1200, 390])
def test_it_searches_offline_and_is_quiet(width: int) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_context(offline=True, viewport={"width": width, "height": 900}).new_page()
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((SITE / "officer.html").as_uri())
        if width < 800:  # the field is behind a button there
            page.locator("label.md-header__button[for=__search]").click()
        else:
            page.click("input.md-search__input")
        page.keyboard.type("tombstone", delay=20)
        page.wait_for_selector(".md-search-result__item", timeout=30_000)
        found = page.locator(".md-search-result__item a").evaluate_all("links => links.map((link) => link.href)")
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        browser.close()
    assert any("glossary.html" in link for link in found)
    assert said == [] and wide <= 0
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


PAGES = ("index", "quickstart", "audit", "commands", "api")
PAPER = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const [r, g, b, a] = parse(getComputedStyle(document.body).backgroundColor);
  const ink = parse(getComputedStyle(document.querySelector(".md-typeset p")).color);
  const scheme = getComputedStyle(document.documentElement).colorScheme;
  return [a === 0 ? 255 : (r + g + b) / 3, (ink[0] + ink[1] + ink[2]) / 3, scheme];
}"""
"""How bright paper and ink are, and which scheme the margins follow."""


@pytest.mark.slow
@built
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_and_keeps_no_one_out(
    browser: Any, barriers: Callable[[Any], list[str]], scheme: str
) -> None:
    """At the desk and on a phone: nothing on the console, no serious barrier, as dark as the system asks for."""
    for width in (1200, 390):
        context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        for name in PAGES:
            page, said = context.new_page(), []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.goto((SITE / f"{name}.html").as_uri())
            assert said == []
            paper, ink, _ = page.evaluate(PAPER)
            assert (paper < 60 < 140 < ink) if scheme == "dark" else (ink < 60 < 240 < paper)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            assert barriers(page) == []
            page.close()
        context.close()


@pytest.mark.slow
@built
def test_paper_is_white_whatever_the_screen_is(browser: Any) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto((SITE / "quickstart.html").as_uri())
    page.wait_for_selector(".md-code__nav", state="attached")  # what the theme adds for the mouse
    page.emulate_media(media="print", color_scheme="dark")
    paper, ink, scheme = page.evaluate(PAPER)
    assert paper == 255 and ink < 60 and scheme == "light"
    for control in (".md-header", ".md-code__nav", ".headerlink", ".md-footer"):
        assert not any(each.is_visible() for each in page.locator(control).all()), control
    page.close()
