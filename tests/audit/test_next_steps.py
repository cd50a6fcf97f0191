"""What to do after a verdict: one answer for each reason, with costs by hand, and nothing after one that passed."""

from typing import Any

import pytest

from ease.audit.config import AuditConfig
from ease.audit.joint import JointTest
from ease.audit.membership import Estimate
from ease.audit.next_steps import next_steps
from ease.audit.records import AuditRecord, Costs, Gallery, Price
from ease.audit.verdict import Measure, Reason, Verdict
from ease.methods import make_method
from ease.requests.request import ClassRequest, ClientRequest, Request
from ease.runs.records import AnswerRecord, RoundRecord
from ease.show.answer import ReportedAnswer, answer_section


def verdict(reason: Reason, retrained: int = 10) -> Verdict:
    low, high = {Reason.KEPT: (0.2, 0.6), Reason.OVERDONE: (-0.6, -0.2)}.get(reason, (-0.1, 0.1))
    refused = reason in (Reason.KEPT, Reason.OVERDONE, Reason.OTHERWISE)
    joint = JointTest(
        p_value=0.001 if refused else 0.5,
        level=0.05,
        retrained=retrained,
        measures=1,
        trace=Estimate((low + high) / 2, low, high),
        power=(),
        smallest_caught=None if reason is Reason.NO_SIGNAL else 0.2,
    )
    values = {"unlearned": 0.5, "trained": 0.9, "retrain": 0.5, **{f"retrain-{n}": 0.5 for n in range(1, retrained)}}
    found = Verdict(measures=(Measure.of("mia/share", values),), joint=None if reason is Reason.TOO_FEW else joint)
    assert found.reason is reason
    return found


def record(
    reason: Reason, request: Request, method: Any = None, retrained: int = 10, replayed: int = 10
) -> AuditRecord:
    """An answer of 8 s, 6 of them for replaying 10 of 20 rounds and 2 for recovery, beside a retraining of 30 s."""
    return AuditRecord(
        request=request,
        method=(method or make_method("ease")).model_dump(mode="json"),
        model_sha256="a",
        retrain_sha256="b",
        settings=AuditConfig(),
        verdict=verdict(reason, retrained),
        gallery=Gallery(pairs=10, chance={}),
        attack="bavaria-online/log_odds",
        attacks={},
        relearning={},
        similarities={"unlearned": (0.1, 0.2, 0.3)},
        costs=Costs(
            totals={"seconds": Price.of(8.0, 30.0)},
            phases={"subtraction": 6.0, "recovery": 2.0},
            compute_matched_retrain={},
            training_rounds=20,
            replayed_rounds=replayed,
        ),
        warnings=(),
        not_tested=(),
    )


CLIENT, CLASS = ClientRequest(clients=(3,)), ClassRequest(classes=(2,))
RELEASE = (
    "ease release {} --request {}/retrain: continue from the answer of --method retrain, which is there already and "
    "costs nothing more (it took 30 s)"
)


def test_nothing_is_to_be_done_after_a_verdict_that_passed() -> None:
    assert next_steps(record(Reason.LIKE_RETRAINING, CLASS)) == ()


@pytest.mark.parametrize("reason", [Reason.KEPT, Reason.OVERDONE, Reason.OTHERWISE])
def test_too_little_or_too_much_forgetting_recommends_exact_replay(reason: Reason) -> None:
    """Twice the rounds: 8 s and 6 s more; twice the recovery: 8 s and 2 s more."""
    assert next_steps(record(reason, CLASS), "runs/first", "class-2/ease") == (
        "ease forget runs/first --class 2 --set replay=1: the exact replay of all 20 rounds instead of 10, about 14 s",
        "ease forget runs/first --class 2 --set recovery_share=0.4: twice the rounds of recovery, about 10 s",
        RELEASE.format("runs/first", "class-2"),
    )


def test_a_replay_that_was_exact_is_not_offered_again_and_clients_have_none() -> None:
    more = "ease forget RUN {}--set recovery_share={}: twice the rounds of recovery, about 10 s"
    exact = next_steps(record(Reason.KEPT, CLASS, replayed=20))
    assert exact == (more.format("--class 2 ", 0.4), RELEASE.format("RUN", "class-2"))
    client = next_steps(record(Reason.KEPT, CLIENT, replayed=0))
    assert client == (more.format("--client 3 ", 0.3), RELEASE.format("RUN", "client-3"))


def test_settings_made_by_hand_are_kept_and_recovery_ends_where_retraining_is_as_cheap() -> None:
    method = make_method("ease", ("recovery_share=0.5", "share=0.7", "replay=0.5"))
    steps = next_steps(record(Reason.KEPT, CLASS, method))
    assert steps[0].startswith("ease forget RUN --class 2 --set share=0.7 --set replay=1 --set recovery_share=0.5:")
    assert len(steps) == 2 and "release" in steps[1]


def test_another_method_is_pointed_to_ease() -> None:
    steps = next_steps(record(Reason.KEPT, CLIENT, make_method("finetune")))
    assert steps == (
        "ease forget RUN --client 3: forget by EASE instead of finetune",
        RELEASE.format("RUN", "client-3"),
    )


def test_too_few_retrainings_are_made_more() -> None:
    """Nine further ones are usual, two are there: seven more of 30 s are 3.5 minutes."""
    assert next_steps(record(Reason.TOO_FEW, CLIENT, retrained=3)) == (
        "ease audit RUN --request client-3/ease --retrains 9: 7 more retrainings, about 4 min one after the other; all "
        "that is there is used again",
    )


@pytest.mark.parametrize("reason", [Reason.KEPT, Reason.TOO_FEW, Reason.LIKE_RETRAINING])
def test_the_page_says_the_same_words_and_steps(reason: Reason) -> None:
    audited = record(reason, CLASS, retrained=3 if reason is Reason.TOO_FEW else 10)
    rounds = (RoundRecord(round=0, phase="subtraction", loss=None, metrics={}),)
    answer = AnswerRecord(
        method=audited.method, request=CLASS, trained_sha256="t", seed=0, resumed=False, rounds=rounds, metrics={}
    )
    shown = answer_section(ReportedAnswer("class-2/ease", answer, audited), None, 1, "runs/first", "none")
    text = " ".join(shown.striptags().split())
    steps = next_steps(audited, "runs/first", "class-2/ease")
    assert audited.verdict.words in text
    for step in steps:
        command, _, why = " ".join(step.split()).partition(": ")
        assert command in text and why[1:] in text
    assert ("ease release" in text) == (
        reason is Reason.LIKE_RETRAINING or any("ease release" in each for each in steps)
    )


def test_an_audit_that_sees_nothing_says_what_it_would_need() -> None:
    pairs, more = next_steps(record(Reason.NO_SIGNAL, CLIENT))
    assert "more forget pairs, here 3" in pairs
    assert more.startswith("ease audit RUN --request client-3/ease --retrains 19: 10 more retrainings, about 5 min")


@pytest.mark.parametrize("reason", [Reason.TOO_FEW, Reason.NO_SIGNAL])
def test_a_further_audit_keeps_what_was_chosen_for_the_first(reason: Reason) -> None:
    """Few photographs need a smaller pool: without it the command that is told would be refused."""
    settings = AuditConfig(pool=50, shadows=4, fpr=0.1, retrains=2)
    done = record(reason, ClientRequest(clients=(1,)), retrained=3).model_copy(update={"settings": settings})
    (step,) = [each for each in next_steps(done, "runs/first") if each.startswith("ease audit")]
    assert " --shadows 4 --pool 50 --fpr 0.1: " in step
    (plain,) = [
        each
        for each in next_steps(record(reason, ClientRequest(clients=(1,)), retrained=3), "runs/first")
        if each.startswith("ease audit")
    ]
    assert "--pool" not in plain and "--shadows" not in plain
