"""The page says what the records say, whatever they hold or lack."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from ease.audit.verdict import Verdict
from ease.show.page import Contents, page

Make = Callable[..., Any]


def text_of(html: str) -> str:
    """What a reader sees: no style, no script, no tags."""
    html = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


def test_the_same_contents_give_the_same_bytes(contents: Make) -> None:
    assert page(contents()) == page(contents())


def test_nothing_comes_from_elsewhere(contents: Make) -> None:
    """No address but data and places on the page, and a policy that forbids the rest."""
    html = page(contents())
    addresses = re.findall(r'(?:src|href|action|data)="([^"]*)"', html) + re.findall(r"url\(([^)]*)\)", html)
    assert addresses and all(address.startswith(("#", "data:image/")) for address in addresses)
    assert "@import" not in html and "http:" not in html and "https:" not in html
    assert "default-src &#39;none&#39;" in html


@pytest.mark.parametrize(
    "caption", ["</script><script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "Zoë’s 猫 \u2028 &amp; é 🐈"]
)
def test_a_caption_is_only_text(contents: Make, caption: str) -> None:
    html = page(contents(caption))
    assert " ".join(caption.split()) in text_of(html)
    assert html.count("<script") == html.count("</script>") == page(contents()).count("<script")
    assert "<img src=x" not in html


def test_names_from_the_records_are_only_text(record: Make, audit: Make, alone: Make) -> None:
    evil = "</title><script>x</script>"
    found = record()
    found["rounds"][0]["spectrum"]["blocks"][0]["block"] = found["rounds"][0]["phase"] = evil
    found["method"]["method"] = evil
    html = page(replace(alone(found, audit(warnings=[evil], not_tested=[evil])), title=evil, folder=evil))
    assert "<script>x" not in html


def test_the_data_of_the_slider_is_what_was_stored(contents: Make) -> None:
    found = re.search(r'<script type="application/json" id="spectra">(.*?)</script>', page(contents()))
    assert found is not None
    assert json.loads(found[1])[0][0] == {"cosines": [0.6, 0.2], "energies": [0.3, 0.6]}


def test_the_verdict_comes_first_and_in_its_own_words(contents: Make, audit: Make) -> None:
    """The page says what the terminal and the interface say: the words of the value."""
    text = text_of(page(contents()))
    words = Verdict.model_validate(audit()["verdict"]).words
    assert words.startswith("Not enough evidence of approximate erasure: the result differs from retraining (p = 0.001")
    assert "it keeps about 20% of the forget effect" in words
    assert words in text and text.index(words) < text.index("Each measure beside retraining")


def test_a_good_verdict_and_none(record: Make, audit: Make, alone: Make, measure: Make, joint: Make) -> None:
    inside = [measure("rho", 0.2, 0.1, (None, 0.3))]
    html = page(alone(record(), audit(inside, joint(0.4, 0.0))))
    assert 'class="verdict good"' in html
    assert "Evidence of approximate erasure: the result is indistinguishable from retraining (p = 0.4" in text_of(html)
    html = page(alone(record(), audit(inside, {**joint(0.4, 0.0), "smallest_caught": None})))
    assert 'class="verdict unknown"' in html and "Undecided: the result is indistinguishable" in text_of(html)


def test_without_enough_retrained_models_nothing_is_judged(
    record: Make, audit: Make, alone: Make, measure: Make
) -> None:
    few = audit([{**measure("rho", 0.2, 0.1, None), "retrained": [0.1]}])
    few["verdict"]["joint"] = None
    html = page(alone(record(), few))
    assert 'class="verdict unknown"' in html
    assert "Undecided: 1 retrained models" in text_of(html) and "no band" in text_of(html)


def test_each_of_few_pairs_is_shown_with_the_span_of_all_retrainings(record: Make, audit: Make, alone: Make) -> None:
    """No table where there are many pairs; rank, margin and log-odds of each where there are few."""
    assert "Each pair in its gallery" not in text_of(page(alone(record(), audit())))
    values = {"trained": 1.0, "unlearned": 7.25, "retrain": 9.0, "retrain-1": 4.5, "retrain-2": 12.0}
    pair = {"id": "train-000007", "gallery": 50, "rank": values, "margin": values, "log_odds": values}
    shown = " ".join(re.sub(r"<[^>]+>", " ", page(alone(record(), audit(pairs=[pair])))).split())
    assert "Among 50 pairs: itself and test pairs of its pseudo-class" in shown
    assert "train-000007 rank 1.0 7.2 9.0 4.5 to 12.0" in shown
    assert "train-000007 margin 1.000 7.250 9.000 4.500 to 12.000" in shown
    assert "train-000007 log-odds 1.00 7.25 9.00 4.50 to 12.00" in shown


def test_a_list_of_results_shows_the_state_of_each(contents: Make) -> None:
    text = text_of(page(contents()))
    assert (
        "Forgetting client 8 by ease_paper ! unlike retraining (p = 0.001) Forgetting client 8 by finetune not audited"
        in text
    )


@pytest.mark.parametrize(
    ("request_", "words", "flags"),
    [
        ({"scope": "client", "clients": [3]}, "Forgetting client 3 by finetune", "--client 3 --method"),
        (
            {"scope": "client", "clients": [1, 2]},
            "Forgetting clients 1, 2 by finetune",
            "--client 1 --client 2 --method",
        ),
        ({"scope": "class", "classes": [4, 5]}, "Forgetting classes 4, 5 by finetune", "--class 4 --class 5 --method"),
        (
            {"scope": "class", "classes": [6], "text": "a dog in the snow"},
            "Forgetting “a dog in the snow” by finetune",
            "--class 6 --method",
        ),
        ({"scope": "class", "classes": [6], "text": "6"}, "Forgetting class 6 by finetune", "--class 6 --method"),
        ({"scope": "sample", "ids": ["a"]}, "Forgetting 1 single pair by finetune", "--samples ids.txt --method"),
        ({"scope": "sample", "ids": ["a", "b"]}, "Forgetting 2 single pairs by finetune", "--samples ids.txt --method"),
    ],
)
def test_the_request_in_words_and_as_a_command(
    record: Make, alone: Make, request_: dict[str, Any], words: str, flags: str
) -> None:
    text = text_of(page(alone(record("finetune", blocks=False) | {"request": request_})))
    assert words in text and flags in text


def test_a_measure_is_next_to_retrain_and_the_model_before(contents: Make) -> None:
    html = page(contents())
    cells = [text_of(row) for row in re.findall(r"<tr>.*?</tr>", html) if ">R@1<" in row]
    assert cells[0].startswith("R@186.723.024.0") and cells[0].endswith("inside")
    assert "forget R@1: 23.0 against retrain’s 24.0, band from 21.5 to 28.0" in unescape(html)
    assert "alignment rho: 0.200 against retrain’s 0.170, band from no lower end to 0.300" in unescape(html)


def test_a_threshold_that_was_used_is_where_the_slider_starts(contents: Make) -> None:
    text = text_of(page(contents(delta=0.15)))
    assert "This answer used δ = 0.15." in text
    assert "At δ = 0.15, 1 of 5 directions go: ηf = 0.25, ηr = 0.01." in text


def test_missing_parts_name_the_command_that_makes_them(record: Make, alone: Make) -> None:
    text = text_of(page(alone(record(method="finetune", blocks=False))))
    assert "Not audited yet: This answer has not been audited, so there is no verdict yet." in text
    assert "ease audit runs/first --request client-8/ease --retrain Compare with models" in text
    assert "What it found before is measured by the audit." in text
    assert "No retraining of this request is stored" in text
    assert "does not decompose updates; ease_paper does. ease forget runs/first --client 8 --method ease_paper" in text


def test_an_empty_run_says_what_to_do() -> None:
    assert "Nothing has been forgotten in this run yet. ease forget runs/first" in text_of(
        page(Contents("first", "runs/first"))
    )


def test_an_answer_without_measured_rounds_has_no_curve(record: Make, alone: Make) -> None:
    found = record()
    for entry in found["rounds"]:
        entry["metrics"] = {}
    assert "No recalls were measured between the rounds" in text_of(page(alone(found)))


@pytest.mark.parametrize("part", ["attacks", "similarities", "relearning"])
def test_an_audit_may_lack_a_picture(record: Make, audit: Make, alone: Make, part: str) -> None:
    """Too few pairs to watch leave no relearning, for one."""
    whole, found = page(alone(record(), audit())), page(alone(record(), audit(**{part: {}})))
    assert "Not enough evidence" in found and found.count("<svg") < whole.count("<svg")


def test_retraining_is_the_reference_and_not_an_answer(contents: Make) -> None:
    """Its costs are four times those of the others."""
    html = page(contents())
    assert "by retrain" not in text_of(html)
    rows = [text_of(row) for row in re.findall(r"<tr>.*?</tr>", html) if "client-8/" in row]
    assert rows == [
        "client-8/ease23.066.088.027.025%25%",
        "client-8/finetune23.066.088.027.025%25%",
        "client-8/retrain23.066.088.027.0100%100%",
    ]


def test_pairs_are_shown_with_their_ranks_or_a_reason(contents: Make, record: Make, alone: Make) -> None:
    text = text_of(page(contents()))
    assert "A red ball on the beach.before1after57retrain43.5" in text and "among those of 386 pairs" in text
    assert "since they are private" in text_of(
        page(replace(alone(record()), why_no_pairs="None, since they are private."))
    )
