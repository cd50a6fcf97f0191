"""A quick look: right about what was retrained and what was not, seldom wrong by chance, and cheap to repeat."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import ease.audit.quick_check
from ease.audit.membership import Estimate
from ease.audit.quick_check import Level, QuickCheck, check_answer, compare, current_check, quick_check
from ease.errors import UserError
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import answer_of
from ease.runs.forget import forget
from ease.runs.records import read_record
from ease.runs.run import Run

REQUESTS: dict[str, Request] = {"client": ClientRequest(clients=(1,)), "class": ClassRequest(classes=(2,))}


def drawn(rng: np.random.Generator, counts: dict[int, tuple[int, int]], gap: float) -> tuple[dict, dict]:
    """Levels at the start and later: clients differ, pairs that were easy stay easy, members stand `gap` higher."""
    start, later = {}, {}
    for client, sides in counts.items():
        for name, count in zip(("forget", "held_out"), sides, strict=True):
            first = rng.normal(size=count)
            last = 0.7 * first + rng.normal(size=count) * (1.0 if name == "held_out" else 0.6) + 3 * client
            start.setdefault(client, {})[name] = torch.tensor(first)
            later.setdefault(client, {})[name] = torch.tensor(last + gap * (name == "forget"))
    return start, later


@pytest.mark.parametrize(
    "counts", [{0: (60, 8)}, {0: (40, 20), 1: (4, 20), 2: (10, 3)}, dict.fromkeys(range(8), (15, 2))], ids=str
)
@pytest.mark.slow
def test_false_findings_are_below_one_in_twenty_checks(counts: dict[int, tuple[int, int]]) -> None:
    """Clients differ by far more than pairs do, and hold forget and held-out pairs in other proportions."""
    rng, looks = np.random.default_rng(0), 600
    found = sum(not compare(*reversed(drawn(rng, counts, 0.0))).gap.contains(0) for _ in range(looks))
    assert found <= 0.05 * looks
    for gap in (3.0, -3.0):
        there = [compare(*reversed(drawn(rng, counts, gap))).gap for _ in range(60)]
        assert np.mean([each.value for each in there]) == pytest.approx(gap, abs=0.25)
        assert sum(each.contains(0) for each in there) <= 3


def test_the_gap_of_one_client_without_covariate_is_a_difference_of_means() -> None:
    """All pairs stood alike at the start: nothing is adjusted, and Welch's error is widened for the four fits."""
    forget, held_out = torch.tensor([3.0, 4.0, 5.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    start = {0: {"forget": torch.ones(4), "held_out": torch.ones(3)}}
    found = compare({0: {"forget": forget, "held_out": held_out}}, start)
    error = (float(forget.var()) / 4 + 1.0 / 3) ** 0.5 * (7 / 4) ** 0.5
    assert (found.forget, found.held_out, found.expected) == pytest.approx((4.0, 2.0, 2.0))
    assert found.gap.value == pytest.approx(2.0)
    assert found.gap.high == pytest.approx(2.0 + 6.9646 * error, rel=1e-4)


def test_pairs_that_were_easy_at_the_start_are_expected_to_be_easy() -> None:
    """Levels are twice those of the start plus one, for members and others: there is no gap, and means say there is."""
    first = {"forget": torch.tensor([4.0, 5.0, 6.0]), "held_out": torch.tensor([0.0, 1.0, 2.0, 4.0])}
    found = compare({3: {name: 2 * each + 1 for name, each in first.items()}}, {3: first})
    assert found.forget - found.held_out == pytest.approx(11 - 4.5)
    assert found.gap.value == pytest.approx(0, abs=1e-6) and found.expected == pytest.approx(11)


def test_too_few_pairs_are_refused() -> None:
    few = {0: {"forget": torch.ones(9), "held_out": torch.ones(2)}}
    with pytest.raises(UserError, match=r"9 forget pairs and 2 held-out pairs .* 3 at least"):
        compare(few, few)
    with pytest.raises(UserError, match="no client holds a forget pair any more"):
        compare({}, {})


def check(gap: Estimate, before: Estimate, **method: object) -> QuickCheck:
    first, last = (Level(forget=2.0, held_out=1.0, expected=2.0 - each.value, gap=each) for each in (before, gap))
    return QuickCheck(
        request=REQUESTS["client"],
        method=method or {"method": "finetune"},
        model_sha256="x",
        forget_pairs=9,
        held_out_pairs=4,
        compared_with="held-out pairs of the same clients",
        before=first,
        after=last,
    )


def test_less_than_unseen_is_a_finding_too_and_it_is_never_a_verdict() -> None:
    seen, none = Estimate(2.0, 1.0, 3.0), Estimate(0.1, -0.2, 0.4)
    assert not check(none, seen).found and check(none, seen).words.startswith(
        "Nothing found: forget pairs differ by +0.10"
    )
    assert "memorised more than unseen" in check(seen, seen).words and check(seen, seen).found
    assert "memorised less than unseen" in check(Estimate(-2.0, -3.0, -1.0), seen).words
    for each in (check(none, seen), check(seen, seen), check(none, none)):
        assert any("not a verdict" in note for note in each.limits)
    assert any("blind" in note for note in check(none, none).limits)


@pytest.fixture
def copied(learnt, tmp_path: Path) -> Run:
    return Run.load(shutil.copytree(learnt.run.folder, tmp_path / "run"))


@pytest.mark.parametrize("scope", ["client", "class", "sample"])
def test_retraining_shows_nothing_and_doing_hardly_anything_shows(learnt, copied: Run, scope: str) -> None:
    request = REQUESTS.get(scope) or SampleRequest(ids=learnt.world.shards[0].train_ids[:20])
    found = {}
    for name in ("retrain", "finetune"):
        method: Unlearner = make_method(name)
        list(forget(copied, learnt.world, request, method, observe=False))
        stored = answer_of(copied, request, method)
        found[name] = check_answer(copied, learnt.world, stored, request, method)
        assert read_record(QuickCheck, stored.quick_path) == found[name] == current_check(stored)
    assert found["finetune"].found and found["finetune"].after.gap.value > 0
    assert abs(found["retrain"].after.gap.value) < found["finetune"].after.gap.value / 2
    assert found["retrain"].before == found["finetune"].before
    held = [shard.validation for shard in learnt.world.shards if scope == "class" or shard.client in (0, 1)]
    assert found["retrain"].held_out_pairs <= sum(map(len, held))


def test_clients_are_asked_once_and_only_those_concerned(learnt, copied: Run, monkeypatch) -> None:
    request, method = REQUESTS["client"], make_method("finetune")
    list(forget(copied, learnt.world, request, method, observe=False))
    asked: list[tuple[int, ...]] = []
    real = ease.audit.quick_check.measure_scores

    def spy(trained, state, request, federation, clients):
        asked.append(tuple(clients))
        return real(trained, state, request, federation, clients)

    monkeypatch.setattr(ease.audit.quick_check, "measure_scores", spy)
    first = quick_check(copied, learnt.world, "client-1/finetune")
    assert asked == [(1,)] * 3, "a leaving client compares its own pairs with its own"
    assert quick_check(copied, learnt.world, "client-1/finetune") == first and len(asked) == 3
    stored = answer_of(copied, request, method)
    stored.quick_path.unlink()
    learnt.trained.initial.save(stored.model_path)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        quick_check(copied, learnt.world, "client-1/finetune")
