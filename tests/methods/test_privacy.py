"""Who is asked what, and when: forget data is read only in the phases that may read it."""

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from tests.fixtures import Asked

from ease.federation.loop import Loop
from ease.federation.protocol import LocalJob, Update, Wrapped
from ease.methods import make_method
from ease.methods.base import Step
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest

CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(2,))


def watch(learnt, request: Request, method: str, *settings: str) -> tuple[list[Asked], list[Step]]:
    """What a method asked of whom, and its steps to the end."""
    play = learnt.play(request, make_method(method, settings))
    steps = list(play)
    return play.asked, steps


@pytest.fixture(scope="module")
def samples(learnt) -> SampleRequest:
    """Six pairs each of three clients; the fourth holds none."""
    return SampleRequest(ids=tuple(pair_id for shard in learnt.world.shards[:3] for pair_id in shard.train_ids[:6]))


@pytest.fixture(scope="module")
def poisoned(learnt, poison):
    return partial(poison, learnt.world)


def same(one: Params, two: Params) -> bool:
    return one.is_finite() and all(torch.equal(one[name], two[name]) for name in one.tensors)


# --- client requests ---


@pytest.mark.parametrize(
    "settings", [(), ("share=1",), ("lock=subspace", "lock_side=client"), ("decompose=true", "delta=0.5")], ids=str
)
def test_a_leaving_client_is_only_asked_to_measure(learnt, settings) -> None:
    """Before the first step and once more before the last round; with a fixed share it may be gone already."""
    asked, steps = watch(learnt, CLIENT, "ease", *settings, "recovery_share=0.34")
    leaving = [each for each in asked if each.client == 1]
    assert {each.job.objective for each in leaving} == (set() if "share=1" in settings else {"levels"})
    assert [each.steps for each in leaving] == ([] if "share=1" in settings else [0, 0, 2])
    training = [each for each in asked if each.job.objective != "levels"]
    assert [each.client for each in training] == [0, 2, 3] * (len(steps) - 1)
    assert all(each.steps > 0 for each in training)
    assert {each.job.data for each in training} == {"retain"} and {each.job.objective for each in training} == {"align"}


def test_several_leaving_clients_are_all_left_alone(learnt) -> None:
    """The others are asked for levels too: of held-out pairs, for they have nothing to forget."""
    asked, _ = watch(learnt, ClientRequest(clients=(0, 3)), "ease")
    assert {each.client for each in asked if each.job.objective != "levels"} == {1, 2}
    assert {each.client for each in asked if each.job.objective == "levels"} == {0, 1, 2, 3}


def test_a_fixed_share_needs_nothing_from_the_leaving_client(learnt) -> None:
    """It may already be gone: the federation does not know it any more."""
    gone = Loop(learnt.world.server.model, {c: d for c, d in learnt.world.federation.data.items() if c != 1})
    method = make_method("ease", ("share=1",))
    alone = [step.state for step in method.unlearn(learnt.trained, CLIENT, gone)]
    together = [step.state for step in learnt.play(CLIENT, method)]
    assert all(same(one, two) for one, two in zip(alone, together, strict=True))


def test_without_the_leaving_client_the_usual_share_goes(learnt) -> None:
    gone = Loop(learnt.world.server.model, {c: d for c, d in learnt.world.federation.data.items() if c != 1})
    steps = list(make_method("ease").unlearn(learnt.trained, CLIENT, gone))
    usual = learnt.usual(True, steps)
    assert steps[-1].notes["share"] == usual.share and steps[-1].notes["measured_weight"] == 0


def test_the_lock_sends_no_directions_but_in_its_client_side_form(learnt) -> None:
    """Directions are made of the leaving client's gradients; only the paper's form shows them to others."""
    for settings in ((), ("lock=subspace",)):
        assert all(each.job.lock is None for each in watch(learnt, CLIENT, "ease", *settings)[0])
    asked, _ = watch(learnt, CLIENT, "ease", "lock=subspace", "lock_side=client", "recovery_share=0.34")
    locks = [each.job.lock for each in asked if each.job.objective == "align"]
    assert locks and all(lock is not None and lock.packed for lock in locks)
    assert len({lock.key for lock in locks if lock is not None}) == 1  # so each client is sent it once


def test_states_travel_in_half_precision_but_the_one_that_all_know(learnt, samples) -> None:
    for request in (CLIENT, samples):
        for each in watch(learnt, request, "ease")[0]:
            known = each.state is learnt.trained.start
            halves = {tensor.dtype == torch.float16 for tensor in each.state.tensors.values()}
            assert halves == {not known}


# --- class and sample requests ---


@pytest.mark.parametrize("request_", [CLASS, "samples"], ids=["class", "samples"])
def test_holders_replay_before_the_first_step_and_everyone_recovers(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    asked, steps = watch(learnt, request, "ease", "recovery_share=0.34")
    holders = [0, 1, 2] if request_ == "samples" else [0, 1, 2, 3]
    assert [each.client for each in asked if each.job.objective == "replay"] == holders
    assert {each.job.objective for each in asked if each.steps == 0} == {"levels", "replay"}
    later = [each for each in asked if each.steps > 0 and each.job.objective != "levels"]
    assert [each.client for each in later] == [0, 1, 2, 3] * (len(steps) - 1)
    assert {(each.job.objective, each.job.data) for each in later} == {("align", "retain")}
    assert [each.steps for each in asked if each.job.objective == "levels"] == [0] * 8 + [len(steps) - 1] * 4


@pytest.mark.parametrize("request_", [CLIENT, CLASS, "samples"], ids=["client", "class", "samples"])
def test_forget_pairs_are_read_to_measure_alone(adapted, poison, request_) -> None:
    """Whatever else is asked, at any time, is answered by clients whose forget pairs cannot be read."""
    named = SampleRequest(ids=tuple(pair_id for shard in adapted.world.shards[:2] for pair_id in shard.train_ids[:4]))
    request = named if request_ == "samples" else request_
    _, plain = watch(adapted, request, "ease", "recovery_share=0.34")
    whole, spoilt = adapted.world.federation, poison(adapted.world, request)

    class Divided(Wrapped):
        def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
            inner = whole if job.objective == "levels" else spoilt
            return inner.run(params, job, clients)

    divided = Divided(whole)
    steps = list(make_method("ease", ("recovery_share=0.34",)).unlearn(adapted.trained, request, divided))
    assert len(steps) > 1
    assert all(same(one.state, two.state) for one, two in zip(steps, plain, strict=True))


@pytest.mark.parametrize("request_", [CLIENT, CLASS, "samples"], ids=["client", "class", "samples"])
def test_with_a_fixed_share_forget_pairs_are_not_read_after_the_first_step(learnt, samples, poisoned, request_) -> None:
    request = samples if request_ == "samples" else request_
    asked, plain = watch(learnt, request, "ease", "share=1")
    assert {each.job.objective for each in asked if each.steps > 0} == {"align"}
    federation = Wrapped(learnt.world.federation)
    states = []
    for step in make_method("ease", ("share=1",)).unlearn(learnt.trained, request, federation):
        states.append(step.state)
        federation.inner = poisoned(request)  # from the first step on
    assert all(same(state, step.state) for state, step in zip(states, plain, strict=True))


def test_a_client_learns_of_its_own_pairs_and_rounds_alone(learnt, samples) -> None:
    asked, _ = watch(learnt, samples, "ease", "replay=1.0")
    job = next(each.job for each in asked if each.job.objective == "replay")
    for client in (0, 1, 2):
        own = job.own(client, learnt.world.federation.held[client])
        assert own.request == SampleRequest(ids=samples.ids[6 * client : 6 * client + 6])
        assert all(each.clients == () for each in own.replays) and len(own.replays) == 6


# --- the references ---


@pytest.mark.parametrize("method", ["retrain", "finetune"])
@pytest.mark.parametrize("request_", [CLIENT, CLASS, "samples"], ids=["client", "class", "samples"])
def test_the_references_never_touch_forget_data(learnt, samples, poisoned, method: str, request_) -> None:
    request = samples if request_ == "samples" else request_
    share = "share=0.17"  # one round shows it
    asked, plain = watch(learnt, request, method, share)
    assert {(each.job.data, each.job.objective) for each in asked} == {("retain", "align")}
    if isinstance(request, ClientRequest):
        assert not {each.client for each in asked} & set(request.clients)
    blind = list(make_method(method, (share,)).unlearn(learnt.trained, request, poisoned(request)))
    assert all(same(one.state, two.state) for one, two in zip(blind, plain, strict=True))


def test_poison_would_be_noticed(learnt, samples, poisoned) -> None:
    """The oracle bites: whoever trains on the named pairs gets no finite update."""
    (update,) = poisoned(samples).run(learnt.trained.initial, learnt.trained.training.job(1, 0, 0.07), [0])
    assert update.delta is not None and not update.delta.is_finite()
