"""How much goes: gaps by hand, planted gaps, and the share between a measurement and the usual one."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ease.federation.checked import checked
from ease.federation.protocol import Wrapped
from ease.methods import make_method
from ease.methods.ease.calibration import (
    LEAVING,
    MOST,
    REPLAYED,
    SCATTER,
    Gap,
    Usual,
    comparable,
    disbelief,
    doubtful,
    measure_levels,
    membership_gap,
    rounds_moved,
    share_to_remove,
    usual_share,
    without,
)
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest

# --- the gap ---


def measured(forget: list[float], kin: list[float]) -> dict[str, torch.Tensor]:
    return {"forget": torch.tensor(forget), "kin": torch.tensor(kin)}


def test_the_gap_is_the_difference_of_means_over_all_clients_with_welchs_error() -> None:
    """(4, 6, 5) has mean 5 and variance 1, (1, 2, 3, 6) has mean 3 and variance 14/3."""
    gap = membership_gap({0: measured([4.0, 6.0], [1.0]), 1: measured([5.0], [2.0, 3.0, 6.0])})
    assert gap is not None
    assert gap.gap == pytest.approx(5 - 3)
    assert gap.standard_error == pytest.approx(math.sqrt(1 / 3 + 14 / 3 / 4))
    assert (gap.forget_pairs, gap.held_out_pairs) == (3, 4)


@pytest.mark.parametrize(
    ("forget", "kin"), [([], []), ([1.0, 2.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [1.0, 2.0]), ([1.0, 2.0, 3.0], [])]
)
def test_with_too_few_pairs_there_is_no_gap(forget, kin) -> None:
    assert membership_gap({0: measured(forget, kin)}) is None
    assert membership_gap({0: measured(forget, kin), 1: measured([], [])}) is None


def planted(gap: float, noise: float, seed: int = 0) -> tuple[dict, dict]:
    """Forget pairs are harder than held-out ones by 2; under membership they gain `gap`, and levels follow by 0.7."""
    rng = np.random.default_rng(seed)
    early, late = {}, {}
    for client in range(3):
        before = {"forget": rng.normal(-2.0, 1.5, 30), "kin": rng.normal(0.0, 1.5, 20)}
        after = {name: 4 + 0.7 * each + rng.normal(0, noise, len(each)) for name, each in before.items()}
        after["forget"] += gap
        early[client] = {name: torch.from_numpy(each) for name, each in before.items()}
        late[client] = {name: torch.from_numpy(each) for name, each in after.items()}
    return late, early


@pytest.mark.parametrize("gap", [-1.0, 0.0, 2.5])
def test_with_levels_before_membership_a_planted_gap_is_found(gap: float) -> None:
    late, early = planted(gap, noise=0.0)
    found, plain = membership_gap(late, early), membership_gap(late)
    assert found is not None and plain is not None
    assert found.gap == pytest.approx(gap, abs=1e-9) and found.standard_error < 1e-9
    assert plain.gap < gap - 0.7  # the harder pairs hide what membership adds
    assert (found.forget_pairs, found.held_out_pairs) == (90, 60)


def test_the_error_says_how_far_off_the_gap_is() -> None:
    """Over many draws the estimate scatters as much as it says it does."""
    found = [membership_gap(*planted(1.0, 0.8, seed)) for seed in range(200)]
    gaps, errors = (np.array([getattr(each, name) for each in found]) for name in ("gap", "standard_error"))
    assert gaps.mean() == pytest.approx(1.0, abs=4 * gaps.std() / math.sqrt(200))
    assert errors.mean() == pytest.approx(gaps.std(), rel=0.2)


def test_levels_before_that_are_all_alike_change_nothing() -> None:
    late = {0: measured([4.0, 6.0, 5.0], [1.0, 2.0, 3.0])}
    flat = {0: measured([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])}
    plain, covaried = membership_gap(late), membership_gap(late, flat)
    assert plain is not None and covaried is not None
    assert covaried.gap == pytest.approx(plain.gap) and covaried.standard_error == pytest.approx(plain.standard_error)


# --- the share ---

USUAL = Usual(0.9, 0.02)


def test_without_held_out_pairs_it_is_the_usual_share() -> None:
    assert share_to_remove(None, 1.0, 0.0, USUAL) == (USUAL.share, 0.0)
    assert share_to_remove(None, 1.0, 5.0, USUAL) == (USUAL.share, 0.0)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize(("leaving", "known", "lasts"), [(True, LEAVING, 0.15), (False, REPLAYED, 0.2)])
def test_longer_recovery_asks_for_a_larger_share(leaving, known, lasts, optimiser) -> None:
    """Each round of it gives some back; never is much more wanted than all that was written."""
    usual, found = known[optimiser], usual_share(leaving, optimiser, 10.0, lasts)
    assert found.share == pytest.approx(usual.share + 0.01, abs=0.006) and found.spread == usual.spread
    shorter, longer = (usual_share(leaving, optimiser, 10.0, lasts + more).share for more in (-0.05, 0.05))
    assert longer - found.share == pytest.approx(found.share - shorter) and shorter < found.share < longer
    assert usual_share(leaving, optimiser, 10.0, 2.0).share == MOST


@pytest.mark.parametrize("leaving", [True, False])
def test_the_fewer_rounds_there_were_the_less_others_made_up_for(leaving: bool) -> None:
    """After a single round what was written is all there is to it; many rounds hardly differ from more."""
    shares = [usual_share(leaving, "sgd", moved, 0.0).share for moved in (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    assert shares[1] - shares[3] > 0.15 and shares[3] - shares[5] < 0.02


class Steps:
    """A history of nothing but how far each round went."""

    def __init__(self, steps: Sequence[float]) -> None:
        self.steps = steps

    def moved_length(self, number: int) -> float:
        return self.steps[number - 1]


@pytest.mark.parametrize(
    ("steps", "rounds"),
    [([2.0], 1.0), ([3.0] * 7, 7.0), ([4.0, 2.0, 1.0, 1.0], 2.0), ([0.0, 0.0], 0.0), ([1.0] * 400, 400.0)],
)
def test_rounds_in_which_little_moved_count_little(steps: list[float], rounds: float) -> None:
    assert rounds_moved(Steps(steps), len(steps)) == pytest.approx(rounds)  # type: ignore[arg-type]


def test_of_a_long_training_some_rounds_stand_for_all() -> None:
    steps = [0.98**number for number in range(300)]
    assert rounds_moved(Steps(steps), 300) == pytest.approx(sum(steps), rel=0.1)  # type: ignore[arg-type]


def test_pairs_of_few_clients_stand_between_leaving_and_pairs_of_many() -> None:
    def share(leaving: bool, concerned: float = 1.0) -> float:
        return usual_share(leaving, "sgd", 10.0, 0.2, concerned).share

    leaving, of_many = share(True), share(False)
    assert share(False, 0.0) == leaving < of_many
    assert share(False, 0.1) == pytest.approx((leaving + of_many) / 2)
    assert share(False, 0.2) == share(False, 1.0) == of_many
    assert share(True, 0.3) == leaving


@pytest.mark.parametrize("slope", [0.0, -3.0])
def test_where_nothing_falls_it_is_the_usual_share(slope: float) -> None:
    assert share_to_remove(Gap(-2.0, 0.1, 9, 9), 1.0, slope, USUAL) == (USUAL.share, 0.0)


@pytest.mark.parametrize(("gap", "expected"), [(-1.0, 0.75), (0.0, 1.0), (0.4, 1.1), (-4.0, 0.0)])
def test_an_exact_measurement_is_followed(gap: float, expected: float) -> None:
    """The gap falls by 4 for the whole of it, and all of it is gone: -1 says that a quarter was too much."""
    share, weight = share_to_remove(Gap(gap, 0.0, 9, 9), 1.0, 4.0, USUAL)
    assert share == pytest.approx(expected) and weight == 1


def test_an_error_as_wide_as_the_usual_spread_meets_halfway() -> None:
    for usual in (LEAVING["sgd"], REPLAYED["adam"]):
        share, weight = share_to_remove(Gap(-1.0, 4 * usual.spread / SCATTER, 9, 9), 1.0, 4.0, usual)
        assert weight == pytest.approx(0.5) and share == pytest.approx((0.75 + usual.share) / 2)


def test_a_useless_measurement_is_ignored() -> None:
    share, weight = share_to_remove(Gap(-3.0, 1e4, 9, 9), 1.0, 4.0, USUAL)
    assert share == pytest.approx(USUAL.share, abs=1e-6) and weight < 1e-6


@pytest.mark.parametrize("gap", [-1e6, -100.0, 100.0, 1e6])
@pytest.mark.parametrize("error", [0.0, 0.1])
def test_the_share_never_leaves_its_range(gap: float, error: float) -> None:
    """With an error of 0.075 in the share, a measured -49 weighs 4/60 and is drawn to 0.9 - 49.9 / 15 < 0."""
    share, _ = share_to_remove(Gap(gap, error, 9, 9), 1.0, 2.0, USUAL)
    assert share == (0.0 if gap < 0 else MOST)


# --- asking for levels ---


def test_the_state_goes_to_those_who_are_named_and_answers_come_in_their_order(learnt) -> None:
    class Backwards(Wrapped):
        def __init__(self, inner) -> None:
            super().__init__(inner)
            self.calls: list[tuple] = []

        def run(self, params, job, clients):
            self.calls.append((params, job, list(clients)))
            yield from reversed(list(super().run(params, job, clients)))

    asked, request = Backwards(learnt.world.federation), ClassRequest(classes=(0,))
    levels = measure_levels(learnt.trained, learnt.trained.final, request, asked, [1, 3, 2])
    ((state, job, clients),) = asked.calls
    assert state is learnt.trained.final and clients == [1, 3, 2] and list(levels) == [1, 2, 3]
    assert job.objective == "levels" and job.request == request


def test_unseen_pairs_have_no_gap_and_training_pairs_do(learnt) -> None:
    """Before training no one is a member; after it the training pairs stand out."""
    request, federation = ClientRequest(clients=(0, 1, 2, 3)), learnt.world.federation
    levels = [
        measure_levels(learnt.trained, state, request, federation, federation.clients)
        for state in (learnt.trained.initial, learnt.trained.final)
    ]
    gaps = [membership_gap(each) for each in levels]
    assert gaps[0] is not None and gaps[1] is not None
    assert abs(gaps[0].gap) < 4 * gaps[0].standard_error
    assert gaps[1].gap > 4 * gaps[1].standard_error
    covaried = membership_gap(levels[1], levels[0])
    assert covaried is not None and covaried.gap == pytest.approx(gaps[1].gap, abs=3 * gaps[1].standard_error)


def test_one_that_holds_no_forget_pair_still_tells_its_held_out_level(learnt) -> None:
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[:3])
    levels = measure_levels(learnt.trained, learnt.trained.final, request, learnt.world.federation, [0, 1, 2, 3])
    assert [len(values["forget"]) for values in levels.values()] == [3, 0, 0, 0]
    assert [len(values["kin"]) for values in levels.values()] == [len(s.validation) for s in learnt.world.shards]


# --- levels that do not fit ---


def looked(shift: float, rise: float = 3.0, seed: int = 0) -> tuple[dict, dict]:
    """Four clients, the first of which leaves; its levels are moved by `shift`, and training raises its own."""
    rng = np.random.default_rng(seed)
    early, before = {}, {}
    for client in range(4):
        forget = torch.from_numpy(rng.normal(-1.0, 1.5, 30 if client == 0 else 0))
        kin = torch.from_numpy(rng.normal(0.0, 1.5, 12))
        early[client] = {"forget": forget + shift, "kin": kin}
        before[client] = {"forget": forget + shift + rise, "kin": kin + 1 + torch.from_numpy(rng.normal(0, 0.5, 12))}
    return before, early


def test_honest_levels_are_not_doubted() -> None:
    assert all(doubtful(*looked(0.0, seed=seed)) == {} for seed in range(20))
    assert doubtful({}, {}) == {}


@pytest.mark.parametrize("shift", [-50.0, -15.0, 15.0])
def test_pairs_that_stand_apart_before_anyone_saw_them_are_doubted(shift: float) -> None:
    assert list(doubtful(*looked(shift))) == [0]
    assert "its forget pairs stand" in doubtful(*looked(shift))[0]


def test_pairs_that_training_did_not_raise_are_doubted() -> None:
    doubts = doubtful(*looked(0.0, rise=-20.0))
    assert list(doubts) == [0] and "training changed its own pairs by -20.0" in doubts[0]


def test_one_that_lies_about_held_out_pairs_is_doubted_and_no_one_else() -> None:
    before, early = looked(0.0)
    for levels in (before, early):
        levels[2] = {**levels[2], "kin": levels[2]["kin"] + 25}
    assert list(doubtful(before, early)) == [2]


def test_levels_of_other_pairs_each_time_are_left_out() -> None:
    before, early = looked(0.0)
    early[3] = {**early[3], "kin": early[3]["kin"][:-1]}
    assert list(comparable(before, early)[0]) == [0, 1, 2]
    gap = membership_gap(before, early)
    assert gap is not None and gap.held_out_pairs == 36
    assert list(without(before, {1, 3})) == [0, 2]


@pytest.mark.parametrize(
    ("gap", "error", "believed"),
    [
        (0.0, 0.0, True),
        (-1.7, 0.0, False),
        (-1.5, 0.0, True),
        (-1.6, 0.4, True),
        (-40.0, 0.4, False),
        (3.0, 0.0, False),
    ],
)
def test_a_share_far_from_the_usual_one_is_not_believed(gap: float, error: float, believed: bool) -> None:
    """The gap falls by 4 for the whole of it: -1.7 asks for less than three usual spreads below 0.9."""
    assert (disbelief(Gap(gap, error, 9, 9), 1.0, 4.0, USUAL) == "") == believed
    assert disbelief(None, 1.0, 4.0, USUAL) == "" == disbelief(Gap(gap, error, 9, 9), 1.0, 0.0, USUAL)


class Lying(Wrapped):
    """The leaving client reports its levels lower than they are, under every state or under the last alone."""

    def __init__(self, inner, shift: float, first: int) -> None:
        super().__init__(inner)
        self.shift, self.first, self.looks = shift, first, 0

    def run(self, params, job, clients):
        self.looks += job.objective == "levels"
        for update in self.inner.run(params, job, clients):
            if update.client == 1 and job.objective == "levels" and self.looks > self.first:
                update = replace(update, values={**update.values, "forget": update.values["forget"] - self.shift})
            yield update


@pytest.mark.parametrize(("shift", "first"), [(50.0, 0), (20.0, 0), (20.0, 2), (10.0, 2)])
def test_a_leaving_client_cannot_keep_itself_in_the_model_unseen(learnt, shift: float, first: int) -> None:
    method, request = make_method("ease"), ClientRequest(clients=(1,))
    sound = checked(Lying(learnt.world.federation, shift, first), learnt.trained.training)
    steps = list(method.unlearn(learnt.trained, request, sound))
    seen = sound.left_out() | {k: v for step in steps for k, v in step.notes.get("rejected", {}).items()}
    assert 1 in seen or "no honest ones do" in steps[-1].notes["why"]
    assert steps[-1].notes["share"] == learnt.usual(True, steps).share


def test_an_honest_client_is_followed(learnt) -> None:
    steps = list(make_method("ease").unlearn(learnt.trained, ClientRequest(clients=(1,)), learnt.world.federation))
    assert "why" not in steps[-1].notes and steps[-1].notes["measured_weight"] > 0
    assert not any("rejected" in step.notes for step in steps)
