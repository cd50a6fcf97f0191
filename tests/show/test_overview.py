"""The opening of the page: who asked for what, what is left of it, and what comes next, in words anyone can read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ease.audit.records import AuditRecord
from ease.audit.verdict import Reason, Verdict
from ease.config import validate
from ease.data.membership import Holding, Membership
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.records import AnswerRecord
from ease.show.overview import PLAIN, Extent, NextStep, asked, extent_of, overview, plainly, whose
from ease.show.page import page

Make = Callable[..., Any]


def holding(client: int, name: str | None, ids: str, classes: tuple[int, ...]) -> Holding:
    return Holding(
        client=client,
        name=name,
        train_ids=tuple(ids),
        train_classes=classes,
        validation_ids=(),
        validation_classes=(),
    )


MEMBERS = Membership(
    clients=(holding(0, "north", "abc", (0, 1, 1)), holding(1, None, "de", (1, 2)), holding(2, None, "f", (2,))),
    test=(),
    validation=(),
    digests={},
)
"""Six pairs: classes 1 at clients north and 1, class 2 at 1 and 2."""


@pytest.mark.parametrize(
    ("request_", "extent", "words", "sentence"),
    [
        (
            ClientRequest(clients=(0,)),
            Extent(3, 6, ("north",), 3),
            "Forgetting client north",
            "3 of 6 training pairs were to be forgotten: all that client north gave.",
        ),
        (
            ClientRequest(clients=(0, 2)),
            Extent(4, 6, ("north", "2"), 3),
            "Forgetting clients north, 2",
            "4 of 6 training pairs were to be forgotten: all that client north, client 2 gave.",
        ),
        (
            ClassRequest(classes=(1,), text="snow"),
            Extent(3, 6, ("north", "1"), 3),
            "Forgetting “snow”",
            "3 of 6 training pairs were to be forgotten. They are with 2 of 3 clients.",
        ),
        (
            SampleRequest(ids=("f",)),
            Extent(1, 6, ("2",), 3),
            "Forgetting 1 single pair",
            "1 of 6 training pairs was to be forgotten. It is with client 2.",
        ),
    ],
)
def test_how_many_pairs_of_whom(request_: Request, extent: Extent, words: str, sentence: str) -> None:
    assert extent_of(MEMBERS, request_) == extent
    assert asked(request_, extent) == words
    assert whose(request_, extent) == sentence


@pytest.mark.parametrize("reason", Reason)
def test_every_verdict_has_a_plain_sentence(reason: Reason, audit: Make, joint: Make, measure: Make) -> None:
    """None has a p-value, a band or a measure's name in it."""
    tests = {
        Reason.LIKE_RETRAINING: joint(0.4, 0.0),
        Reason.KEPT: joint(0.001, 0.2),
        Reason.OVERDONE: joint(0.001, -0.2),
        Reason.OTHERWISE: joint(0.001, 0.0),
        Reason.TOO_FEW: None,
        Reason.NO_SIGNAL: {**joint(0.4, 0.0), "smallest_caught": None},
    }
    hashes = {"sums": "a", "model": "b", "retrain_sums": "a", "retrain_model": "b"}
    compared = {Reason.IDENTICAL: hashes, Reason.DIFFERENT: {**hashes, "sums": "c"}}
    measures = [measure("rho", 0.2, 0.1, None)]
    verdict = Verdict.model_validate(
        {"measures": measures, "joint": tests.get(reason), "identity": compared.get(reason)}
    )
    assert verdict.reason is reason
    reported = plainly(verdict)
    assert (reported == PLAIN[reason]) if reason is not Reason.KEPT else ("about 20% of what these pairs" in reported)
    assert not any(word in reported for word in ("p =", "band", "rho", "R@"))


def test_recall_before_now_and_of_pairs_never_seen(contents: Make) -> None:
    """From the audit where there is one; what retraining finds stands beside it."""
    audited, other, reference = contents().answers

    def found(answer: Any, before: float | None = None) -> dict[str, float]:
        opening = overview(answer.record, answer.audit, reference.record, None, before, "", "runs/first", answer.name)
        return {each.kind: each.value for each in opening.found}

    assert found(audited) == {"trained": 86.7, "unlearned": 23.0, "retrain": 24.0, "unseen": 27.0}
    assert found(other) == {"unlearned": 23.0, "retrain": 23.0, "unseen": 27.0}
    assert found(other, before=80.0)["trained"] == 80.0


def test_the_same_in_a_sentence_and_which_model_it_is(record: Make, audit: Make) -> None:
    reported = validate(AnswerRecord, record() | {"files": {"model.safetensors": "abc"}}, "record.json")
    opening = overview(
        reported,
        validate(AuditRecord, audit(), "audit.json"),
        None,
        None,
        None,
        "1 May 2026",
        "runs/first",
        "client-8/ease",
    )
    assert opening.summary == "87 before, 23 now, 27 of pairs that it never saw"
    assert (opening.date, opening.model_sha256) == ("1 May 2026", "abc")


def test_next_steps_follow_the_verdict(record: Make, audit: Make, alone: Make, joint: Make, measure: Make) -> None:
    def steps(judged: dict[str, Any] | None) -> list[NextStep]:
        (answer,) = alone(record(), judged).answers
        return list(overview(answer.record, answer.audit, None, None, None, "", "RUN", answer.name).steps)

    assert [step.command for step in steps(None)] == ["ease audit RUN --request client-8/ease --retrain"]
    good = steps(audit([measure("rho", 0.2, 0.1, (None, 0.3))], joint(0.4, 0.0)))
    assert [step.command.split()[1] for step in good] == ["release", "certificate"]
    bad = steps(audit())
    assert all(step.command.startswith("ease ") and ": " not in step.command and step.why for step in bad)
    unseen = steps(audit([measure("rho", 0.2, 0.1, (None, 0.3))], {**joint(0.4, 0.0), "smallest_caught": None}))
    assert unseen[0].command == "" and unseen[0].why.startswith("audit a request with more forget pairs")


def test_the_page_opens_with_it(contents: Make) -> None:
    """Before anything that is folded, and so before every measure, slider and attack."""
    made = contents()
    answers = [replace(each, extent=Extent(193, 2000, ("8",), 10), date="1 May 2026") for each in made.answers]
    html = page(replace(made, answers=answers, version="9.9"))
    opening = html[: html.index('<details class="expert">')]
    for words in (
        "193 of 2,000 training pairs were to be forgotten: all that client 8 gave.",
        "about 20% of what these pairs had brought",
        "87 before, 23 now, 27 of pairs that it never saw",
        "1 May 2026",
        "EASE 9.9",
        "ease forget runs/first --client 8",
    ):
        assert words in opening
    for technical in ("η", "data-spectrum", "p = 0.001 over", 'class="measures"'):
        assert technical not in opening and technical in html
