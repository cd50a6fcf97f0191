"""The page of a certificate in a real browser, offline: green for a true one, red for any change, honest elsewhere."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ease.operations.evidence import countersigned, issue, new_key, read_certificate
from ease.operations.evidence.envelope import Envelope, sealed
from ease.operations.evidence.log import signing_key
from ease.operations.evidence.page import certificate_page, shown
from ease.operations.evidence.statement import PAYLOAD, Certificate, read_statement, statement_of
from ease.runs.run import Run
from ease.storage import sha256

in_browser = pytest.mark.usefixtures("browser")
Show = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Open a page as a file, offline; at the end nothing may have been complained about and nothing else asked for."""
    contexts: list[Any] = []
    complaints: list[str] = []
    asked: list[str] = []

    def open_page(html: str, before: str = "", script: bool = True, width: int = 1000, scheme: str = "light") -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        contexts.append(
            browser.new_context(
                offline=True,
                java_script_enabled=script,
                viewport={"width": width, "height": 900},
                color_scheme=scheme,
            )
        )
        opened = contexts[-1].new_page()
        if before:
            opened.add_init_script(before)
        opened.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(path.as_uri())
        if script:
            opened.locator("#check").filter(has_not_text="runs no scripts").wait_for()
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == [] and len(asked) >= len(contexts)


@pytest.fixture
def signed(certified: tuple[Path, Path]) -> tuple[Envelope, Certificate]:
    return read_certificate(certified[1])


def state(opened: Any) -> tuple[str, str]:
    box = opened.locator("#check")
    return box.get_attribute("class"), box.inner_text()


def altered(envelope: Envelope, **changes: Any) -> Envelope:
    return envelope.model_copy(update=changes)


# --- without a browser ---


def test_the_page_is_self_contained_and_escaped(run: Run, signed: tuple[Envelope, Certificate]) -> None:
    caption = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"
    certificate = signed[1].model_copy(update={"asked": caption, "not_tested": (caption,)})
    html = certificate_page(sealed(PAYLOAD, statement_of(certificate), signing_key(run)), certificate)
    assert "<img" not in html and html.count("<script") == 2 and html.count("</script>") == 2
    assert "default-src &#39;none&#39;" in html and "unsafe" not in html
    assert not re.search(r"(src|href)=[\"']?(https?:|//)", html)


def test_every_shown_value_has_its_place(signed: tuple[Envelope, Certificate]) -> None:
    table = {"a/b": [{"name": "x", "v": 1.5}, 2], "c~d": {"e": []}, "f": "text", "g": None, "h": [1, 2]}
    assert [(each.name, each.pointer, each.text) for each in shown(table, "/p")] == [
        ("a/b x name", "/p/a~1b/0/name", "x"),
        ("a/b x v", "/p/a~1b/0/v", "1.5"),
        ("a/b 1", "/p/a~1b/1", "2"),
        ("c~d e", "/p/c~0d/e", "[]"),
        ("f", "/p/f", "text"),
        ("g", "/p/g", "null"),
        ("h", "/p/h", "[1,2]"),
    ]
    html = certificate_page(*signed)
    for words in (signed[1].verdict.words, signed[1].asked, signed[1].models.after, *signed[1].limits):
        assert words.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;").replace(">", "&gt;") in html
    assert "approximate erasure" in html and "not a proof of deletion" in html


# --- in a browser ---


@pytest.mark.slow
@in_browser
def test_green_for_a_true_certificate(show: Show, signed: tuple[Envelope, Certificate], tmp_path: Path) -> None:
    opened = show(certificate_page(*signed))
    kind, words = state(opened)
    assert kind == "verdict good" and "Unchanged" in words and "1 signature holds" in words
    envelope = countersigned(signed[0], new_key(tmp_path / "client.key"))
    kind, words = state(show(certificate_page(envelope, signed[1])))
    assert kind == "verdict good" and "2 signatures hold" in words


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_axe_finds_no_barrier(
    show: Show,
    signed: tuple[Envelope, Certificate],
    barriers: Callable[[Any], list[str]],
    width: int,
    scheme: str,
) -> None:
    opened = show(certificate_page(*signed), width=width, scheme=scheme)
    for part in opened.locator("summary").all():
        part.click()
    assert barriers(opened) == []


@pytest.mark.slow
@in_browser
def test_paper_is_white_and_has_raw_figures_only_if_they_were_opened(
    show: Show, signed: tuple[Envelope, Certificate]
) -> None:
    opened = show(certificate_page(*signed), scheme="dark")
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    raw, cost = opened.locator("details.raw table").last, opened.locator("details:not(.raw) table")
    assert not raw.is_visible() and cost.is_visible() and not opened.locator("#file").is_visible()
    opened.emulate_media(media="screen")
    opened.locator("details.raw > summary").last.click()
    opened.emulate_media(media="print", color_scheme="dark")
    assert raw.is_visible()


@pytest.mark.slow
@in_browser
def test_green_for_an_answer_that_was_not_audited_and_odd_letters(show: Show, bare: Run) -> None:
    envelope = issue(bare, "client-1/retrain")
    certificate = read_statement(envelope.content, "it")
    assert state(show(certificate_page(envelope, certificate)))[0] == "verdict good"
    odd = certificate.model_copy(update={"asked": "a\r\nb \u2028 \x7f 🙂 <b>&amp;", "figures": {"gallery": 1e-7}})
    envelope = sealed(PAYLOAD, statement_of(odd), signing_key(bare))
    assert state(show(certificate_page(envelope, odd)))[0] == "verdict good"


@pytest.mark.slow
@in_browser
def test_red_for_every_kind_of_change(show: Show, signed: tuple[Envelope, Certificate], tmp_path: Path) -> None:
    envelope, certificate = signed
    other = new_key(tmp_path / "other").public
    first = envelope.signatures[0]
    content = envelope.content.replace(b'"issued":"2', b'"issued":"3')
    payload = sealed(PAYLOAD, json.loads(content), new_key(tmp_path / "signing")).payload
    flipped = envelope.payload[:400] + ("A" if envelope.payload[400] != "A" else "B") + envelope.payload[401:]
    html = certificate_page(envelope, certificate)
    pages = {
        "content": certificate_page(altered(envelope, payload=payload), read_statement(content, "it")),
        "one letter": certificate_page(altered(envelope, payload=flipped), certificate),
        "signature": certificate_page(
            altered(envelope, signatures=(first.model_copy(update={"sig": "A" * 86 + "=="}),)), certificate
        ),
        "key id": certificate_page(
            altered(envelope, signatures=(first.model_copy(update={"keyid": other.id}),)), certificate
        ),
        "no signature": certificate_page(altered(envelope, signatures=()), certificate),
        "another type": certificate_page(altered(envelope, payloadType="text/plain"), certificate),
        "shown words": html.replace(certificate.asked, "Nothing was asked."),
        "shown figure": re.sub(r'(data-of="/predicate/figures/gallery">)[^<]*', r"\g<1>9", html),
        "rounded figure": re.sub(
            r'(data-of="/predicate/figures/forget~1recall@1" data-digits="1">)[^<]*', r"\g<1>0.2", html
        ),
        "shown key": html.replace(f"<li><code>{first.keyid}", f"<li><code>{other.id}"),
    }
    for name, page in pages.items():
        assert page != html
        kind, words = state(show(page))
        assert kind == "verdict bad" and "Do not trust" in words, name


@pytest.mark.slow
@in_browser
def test_browsers_that_cannot_check_say_so(show: Show, signed: tuple[Envelope, Certificate]) -> None:
    html = certificate_page(*signed)
    refuse = "crypto.subtle.importKey = () => Promise.reject(new DOMException('', 'NotSupportedError'))"
    absent = "Object.defineProperty(Crypto.prototype, 'subtle', { get: () => undefined })"
    for before in (refuse, absent):
        kind, words = state(show(html, before))
        assert kind == "verdict unknown" and "cannot check here; use ease verify" in words
    kind, words = state(show(html, script=False))
    assert kind == "verdict unknown" and "ease verify" in words


@pytest.mark.slow
@in_browser
def test_files_are_hashed_in_the_browser(
    show: Show, signed: tuple[Envelope, Certificate], certified: tuple[Path, Path], tmp_path: Path
) -> None:
    answer = certified[1].parent
    assert sha256(answer / "model.safetensors") == signed[1].models.after
    altered_model = tmp_path / "altered.safetensors"
    altered_model.write_bytes((answer / "model.safetensors").read_bytes() + b"\0")
    opened = show(certificate_page(*signed))
    opened.locator("#file").set_input_files([answer / "model.safetensors", answer / "record.json", altered_model])
    opened.locator("#hashed", has_text="altered").wait_for()
    assert opened.locator("#hashed").inner_text() == (
        "model.safetensors: is the model that this certificate is about. record.json: is record.json of this answer. "
        "altered.safetensors: is no file that this certificate tells of."
    )
