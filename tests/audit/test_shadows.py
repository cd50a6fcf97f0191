"""Shadow federations: balanced membership, matched non-members, and training equal to the engine's own."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ease.audit import side_by_side
from ease.audit.shadows import (
    Shadow,
    on_all_cores,
    scratch_history,
    shadow_request,
    shadow_shards,
    train_federations,
    unlearn_shadows,
)
from ease.audit.side_by_side import SideBySide
from ease.audit.subjects import MOST_MISMATCH, Candidates, choose_candidates, match_classes
from ease.data.partition import Shard
from ease.errors import UserError
from ease.federation import objectives
from ease.federation.client import ClientData
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.protocol import Federation
from ease.federation.sequential import Sequential
from ease.methods import make_method
from ease.methods.base import Order, Trained
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask, without


def deal(*classes: Sequence[int]) -> tuple[Shard, ...]:
    """One client for each list of classes; pair n has the id `pn`."""
    shards, first = [], 0
    for client, labels in enumerate(classes):
        train = np.arange(first, first + len(labels))
        ids = tuple(f"p{position}" for position in train)
        none = np.zeros(0, dtype=np.int64)
        shards.append(Shard(client, train, none, ids, np.array(labels, dtype=np.int64), none))
        first += len(labels)
    return tuple(shards)


SHARDS = deal([0] * 8 + [1] * 4, [0] * 2 + [1] * 10, [2] * 6)
IDS = [f"p{position}" for position in range(200)]
OTHERS = np.arange(100, 160)
OTHER_CLASSES = np.arange(60) % 3


def chosen(request: Request, seed: int = 0) -> Candidates:
    return choose_candidates(SHARDS, request, OTHERS, OTHER_CLASSES, IDS, seed)


SAMPLES = SampleRequest(ids=("p0", "p1", "p12", "p15"))
REQUESTS = [ClientRequest(clients=(0,)), ClassRequest(classes=(0,)), SAMPLES]


# --- who is a member of which shadow ---


@settings(max_examples=60, deadline=None)
@given(pairs=st.integers(2, 60), shadows=st.integers(1, 12), seed=st.integers(0, 1000))
def test_every_pair_is_in_exactly_half_of_any_even_number(pairs: int, shadows: int, seed: int) -> None:
    nothing = np.zeros(pairs, dtype=np.int64)
    candidates = Candidates(nothing, nothing == 0, nothing, nothing, ("",) * pairs, 0.0)
    table = np.stack([candidates.included(shadow, seed) for shadow in range(2 * shadows)])
    assert (table.sum(0) == shadows).all()
    assert (table[::2] == ~table[1::2]).all()
    assert {int(count) for count in table.sum(1)} <= {pairs // 2, pairs - pairs // 2}


def test_shadows_differ_and_more_can_be_added_later() -> None:
    candidates = chosen(REQUESTS[0])
    table = [candidates.included(shadow, 0) for shadow in range(8)]
    assert len({each.tobytes() for each in table}) == 8
    assert not np.array_equal(table[0], candidates.included(0, 1))


# --- who is tested ---


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.scope)
def test_forget_pairs_come_first_and_only_they_were_trained_on(request_: Request) -> None:
    candidates = chosen(request_)
    forget = [position for shard in SHARDS for position in shard.train[forget_mask(request_, shard)]]
    count = int(candidates.member.sum())
    assert candidates.member[:count].all() and not candidates.member[count:].any()
    assert candidates.positions[:count].tolist() == forget
    assert set(candidates.positions[count:]) <= set(OTHERS) and len(candidates) > count
    assert len(set(candidates.positions)) == len(candidates)
    assert candidates.ids == tuple(IDS[position] for position in candidates.positions)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.scope)
def test_the_class_mix_is_matched_and_the_mismatch_is_reported(request_: Request) -> None:
    candidates = chosen(request_)
    shares = [
        np.bincount(candidates.classes[side], minlength=3) / side.sum()
        for side in (candidates.member, ~candidates.member)
    ]
    distance = np.abs(shares[0] - shares[1]).sum() / 2
    assert candidates.mismatch == pytest.approx(distance)
    assert distance <= MOST_MISMATCH
    non_members = candidates.positions[~candidates.member]
    assert candidates.classes[~candidates.member].tolist() == [OTHER_CLASSES[p - 100] for p in non_members]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.scope)
def test_a_non_member_gets_a_home_where_its_class_is_forgotten(request_: Request) -> None:
    candidates = chosen(request_)
    count = int(candidates.member.sum())
    where = list(zip(candidates.home[:count].tolist(), candidates.classes[:count].tolist(), strict=True))
    holders = [shard.client for shard in SHARDS for _ in range(int(forget_mask(request_, shard).sum()))]
    assert candidates.home[:count].tolist() == holders
    for home, label in zip(candidates.home[count:].tolist(), candidates.classes[count:].tolist(), strict=True):
        assert (home, label) in where


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    available=st.lists(st.integers(0, 5), min_size=0, max_size=40),
)
def test_matching_never_breaks_the_tolerance_and_never_takes_twice(wanted: list[int], available: list[int]) -> None:
    labels = np.array(available, dtype=np.int64)
    taken = match_classes(np.array(wanted), labels)
    assert len(set(taken)) == len(taken)
    if len(taken):
        mixes = [np.bincount(each, minlength=6) / len(each) for each in (np.array(wanted), labels[taken])]
        assert np.abs(mixes[0] - mixes[1]).sum() / 2 <= MOST_MISMATCH + 1e-12


def test_matching_takes_as_many_as_the_scarce_class_allows() -> None:
    """Half and half is wanted and class 1 has 4: 4 + 4 fit exactly, and 6 + 4 (a tenth off) is the most."""
    taken = match_classes(np.array([0, 1]), np.array([0] * 20 + [1] * 4))
    assert np.bincount(np.array([0] * 20 + [1] * 4)[taken]).tolist() == [6, 4]


def test_without_pairs_of_the_class_there_is_not_a_attack() -> None:
    """Client 0 holds classes 0 and 1, and nobody else has pairs of either."""
    strangers = np.full(20, 2)
    found = choose_candidates(SHARDS, ClientRequest(clients=(0,)), OTHERS[:20], strangers, IDS, 0)
    assert (found.members, found.others, found.mismatch) == (12, 0, 0.0)
    assert found.why_no_attack().endswith("and 0 of those are of the forget pairs' pseudo-classes")


def test_a_request_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="names no pair that a client holds"):
        chosen(SampleRequest(ids=("nobody",)))


@pytest.mark.parametrize(("pairs", "fewest", "refused"), [(1, 8, True), (7, 8, True), (8, 8, False), (1, 2, True)])
def test_a_few_pairs_do_not_suffice_for_an_attack(pairs: int, fewest: int, refused: bool) -> None:
    found = chosen(SampleRequest(ids=SHARDS[0].train_ids[:pairs]))
    assert found.members == pairs and found.others >= 2
    words = f"attacks compare many pairs, {fewest} at least, and the request names {pairs}"
    assert found.why_no_attack(fewest) == (words if refused else "")


# --- what a shadow holds ---


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.scope)
def test_a_shadow_holds_everybodys_retained_pairs_and_its_candidates_at_home(request_: Request) -> None:
    candidates = chosen(request_)
    included = candidates.included(0, 0)
    shards = shadow_shards(SHARDS, request_, candidates, included)
    for before, after in zip(SHARDS, shards, strict=True):
        kept = before.train[~forget_mask(request_, before)]
        mine = candidates.positions[included & (candidates.home == before.client)]
        assert after.client == before.client
        assert after.train.tolist() == [*kept, *mine]
        assert after.train_ids == tuple(f"p{position}" for position in after.train)
        assert len(after.train_classes) == len(after.train)
    everything = np.concatenate([shard.train for shard in shards])
    retained = sum(int((~forget_mask(request_, shard)).sum()) for shard in SHARDS)
    assert len(everything) == len(set(everything)) == retained + included.sum()
    assert not set(candidates.positions[~included]) & set(everything)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.scope)
def test_a_shadow_is_asked_to_forget_exactly_the_candidates_it_trained_on(request_: Request) -> None:
    candidates = chosen(request_)
    included = candidates.included(1, 0)
    asked = shadow_request(request_, candidates, included)
    shards = shadow_shards(SHARDS, request_, candidates, included)
    named = [position for shard in shards for position in shard.train[forget_mask(asked, shard)]]
    assert sorted(named) == sorted(candidates.positions[included])
    if isinstance(asked, SampleRequest):
        assert set(asked.ids) == {candidates.ids[i] for i in np.flatnonzero(included)}, "none that it does not hold"
    else:
        assert asked == request_


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.scope)
def test_a_retraining_holds_no_forget_pair_and_no_leaving_client(request_: Request) -> None:
    shards = without(SHARDS, [request_])
    assert [shard.client for shard in shards] == ([1, 2] if request_.scope == "client" else [0, 1, 2])
    assert not any(forget_mask(request_, shard).any() for shard in shards)
    assert sum(len(shard.train) for shard in shards) == sum(
        int((~forget_mask(request_, shard)).sum()) for shard in SHARDS
    )


# --- training many federations at once ---


def simulation(world, shards: Sequence[Shard]) -> Sequential:
    return Sequential(
        world.server.model,
        {s.client: ClientData.of(s, world.evaluator.activations, world.server.device) for s in shards},
    )


def together(world, federations, streams, training: TrainingConfig):
    return train_federations(
        world.server.model,
        world.evaluator.activations,
        world.server.device,
        federations,
        streams,
        world.server.initial(),
        training,
        3,
        0.07,
    )


def assert_close(found: Params, expected: Params) -> None:
    """Equal but for the rounding of other matrix shapes, which grows from round to round; a step is 1000 times that."""
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-4)


def without_pairs(shard: Shard, left: int) -> Shard:
    return replace(
        shard, train=shard.train[:left], train_ids=shard.train_ids[:left], train_classes=shard.train_classes[:left]
    )


@pytest.mark.parametrize("participation", [1.0, 0.67])
@pytest.mark.parametrize("left", [None, 1, 0], ids=["all", "one pair", "no pair"])
def test_one_of_many_federations_trains_as_a_single_one(world, participation: float, left: int | None) -> None:
    """A client with too few pairs is drawn all the same, and abstains: who else is drawn must not change."""
    training = TrainingConfig(rounds=4, local_epochs=1, batch_size=8, participation=participation)
    shards = world.shards if left is None else (world.shards[0], without_pairs(world.shards[1], left), world.shards[2])
    alone = fedavg(world.server.initial(), simulation(world, shards), training, 3, 0.07, stream="shadow-5")
    for (found,), expected in zip(together(world, [shards], ["shadow-5"], training), alone, strict=True):
        assert_close(found.state, expected.state)
        assert [(u.client, u.pairs) for u in found.updates] == [(u.client, u.pairs) for u in expected.updates]
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert (found.state - world.server.initial()).norm() > 0.01


def test_federations_do_not_touch_each_other(world) -> None:
    training = TrainingConfig(rounds=2, local_epochs=1, batch_size=8)
    fewer = tuple(without_pairs(shard, 9) for shard in world.shards)
    both = list(together(world, [fewer, world.shards], ["shadow-0", "shadow-1"], training))
    for index, (shards, stream) in enumerate(((fewer, "shadow-0"), (world.shards, "shadow-1"))):
        (last,) = list(together(world, [shards], [stream], training))[-1]
        assert_close(both[-1][index].state, last.state)
    assert (both[-1][0].state - both[-1][1].state).norm() > 0.01


@pytest.mark.parametrize("scope", ["client", "class", "sample"])
def test_a_retraining_equals_the_method(learnt, scope: str) -> None:
    world, trained = learnt.world, learnt.trained
    request: Request = {
        "client": ClientRequest(clients=(1,)),
        "class": ClassRequest(classes=(2,)),
        "sample": SampleRequest(ids=tuple(pair for shard in world.shards[:3] for pair in shard.train_ids[:6])),
    }[scope]
    training = trained.training.model_copy(update={"rounds": 2})
    method = Retrain(order=1, share=2 / trained.training.rounds)
    found = train_federations(
        world.server.model,
        world.evaluator.activations,
        world.server.device,
        [without(world.shards, [request])],
        ["retrain-1"],
        trained.initial,
        training,
        trained.seed,
        trained.temperature,
    )
    for (mine,), step in zip(found, method.unlearn(trained, request, world.federation), strict=True):
        assert_close(mine.state, step.state)


# --- unlearning a shadow ---


@pytest.mark.parametrize(
    ("name", "single", "updates"),
    [("ease", False, 1), ("ease", True, 3), ("fed_eraser", False, 3), ("finetune", False, 0), ("finetune", True, 0)],
)
@pytest.mark.parametrize("measured", ["alone", "together"])
@pytest.mark.slow
def test_shadows_are_unlearned_as_by_hand_and_keep_only_what_the_method_reads(
    adapted, tmp_path: Path, monkeypatch, name: str, single: bool, updates: int, measured: str
) -> None:
    """Side by side, two shadows end where each ends alone; of three clients EASE reads the leaving one's updates."""
    if measured == "together":  # as on a GPU
        measures = objectives.OBJECTIVES
        monkeypatch.setattr(
            side_by_side,
            "can_measure_vectorized",
            lambda job, _: isinstance(measures[job.objective], objectives.SharedMeasurement),
        )
    world = adapted.world
    named = tuple(pair_id for shard in world.shards for pair_id in shard.train_ids[::4])
    request: Request = SampleRequest(ids=tuple(sorted(named))) if single else ClientRequest(clients=(1,))
    method = make_method(name)
    test = world.evaluator.pairs.indices("test")
    candidates = choose_candidates(
        world.shards, request, test, world.evaluator.classes_of(test), world.evaluator.pairs.ids, 0
    )
    federations = [shadow_shards(world.shards, request, candidates, candidates.included(n, 0)) for n in (0, 1)]
    training = TrainingConfig(rounds=2, local_epochs=1, batch_size=8)
    histories = [
        scratch_history(tmp_path / str(n), world.server.initial(), federations[n], [method], request, training)
        for n in (0, 1)
    ]
    for rounds in together(world, federations, ["shadow-0", "shadow-1"], training):
        for history, finished in zip(histories, rounds, strict=True):
            history.append(finished)
    assert [len(history.record(2).updates) for history in histories] == [updates] * 2
    asked = [shadow_request(request, candidates, candidates.included(n, 0)) for n in (0, 1)]
    orders = [Order(0, f"shadow-{n}") for n in (0, 1)]
    shadows = [
        Shadow(federations[n], Trained(histories[n], training, 0.07, 3 + n, orders[n]), asked[n]) for n in (0, 1)
    ]
    seen = world.evaluator
    states = unlearn_shadows(seen.model, seen.activations, world.server.device, shadows, method)
    for shadow, state in zip(shadows, states, strict=True):
        *_, last = method.unlearn(shadow.trained, shadow.request, simulation(world, shadow.shards))
        assert_close(state, last.state)
        assert (state - shadow.trained.final).norm() > 0.01
    assert (states[0] - states[1]).norm() > 0.01


def test_an_error_of_one_unlearning_is_raised_and_no_thread_waits_for_ever(world) -> None:
    seen, before = world.evaluator, threading.active_count()
    together = SideBySide.of(seen.model, [world.shards, world.shards], seen.activations, world.server.device)

    def asks(federation: Federation) -> Params:
        job = TrainingConfig().job(1, 0, 0.07)
        while True:
            list(federation.run(world.server.initial(), job, federation.clients))

    def fails(federation: Federation) -> Params:
        raise UserError("no such direction")

    with pytest.raises(UserError, match="no such direction"):
        together.unlearn([asks, fails])
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(timeout=60)
    assert threading.active_count() == before


def test_many_threads_equal_one_and_their_number_stays() -> None:
    """A GPU is not needed for the host's part."""
    each, before = [(n, 2 * n) for n in range(9)], torch.get_num_threads()
    found = [on_all_cores(lambda a, b: a * b, each, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert found[0] == found[1] == [2 * n * n for n in range(9)] and torch.get_num_threads() == before
