"""Who is asked what, and when: forget data is read only in the phases that may read it."""

from functools import partial

import pytest
import torch
from tests.fixtures import Asked

from ease.federation.sequential import Sequential
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


def test_a_leaving_client_is_asked_nothing(learnt) -> None:
    """Its stored updates are enough."""
    asked, steps = watch(learnt, CLIENT, "ease", "recovery_share=0.34")
    assert [each.client for each in asked] == [0, 2, 3] * (len(steps) - 1)
    assert all(each.steps > 0 for each in asked)
    assert {each.job.data for each in asked} == {"retain"} and {each.job.objective for each in asked} == {"align"}


def test_several_leaving_clients_are_all_left_out(learnt) -> None:
    asked, _ = watch(learnt, ClientRequest(clients=(0, 3)), "ease")
    assert {each.client for each in asked} == {1, 2}


def test_the_leaving_client_may_already_be_gone(learnt) -> None:
    gone = Sequential(learnt.world.server.model, {c: d for c, d in learnt.world.federation.data.items() if c != 1})
    method = make_method("ease")
    alone = [step.state for step in method.unlearn(learnt.trained, CLIENT, gone)]
    together = [step.state for step in learnt.play(CLIENT, method)]
    assert all(same(one, two) for one, two in zip(alone, together, strict=True))


def test_only_the_papers_algorithm_sends_directions(learnt) -> None:
    """Directions are made of the leaving client's gradients."""
    assert all(each.job.lock is None for each in watch(learnt, CLIENT, "ease")[0])
    asked, _ = watch(learnt, CLIENT, "ease_paper")
    locks = [each.job.lock for each in asked]
    assert locks and all(lock is not None and lock.packed for lock in locks)
    assert len({lock.key for lock in locks if lock is not None}) == 1  # so each client is sent it once


def test_states_travel_in_half_precision_except_the_one_that_all_know(learnt, samples) -> None:
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
    first = [each for each in asked if each.steps == 0]
    counts = [] if request_ == "samples" else ["number of forget pairs"] * 4
    assert [each.job.objective for each in first] == counts + ["replay"] * len(holders)
    later = [each for each in asked if each.steps > 0]
    assert [each.client for each in later] == [0, 1, 2, 3] * (len(steps) - 1)
    assert {(each.job.objective, each.job.data) for each in later} == {("align", "retain")}


@pytest.mark.parametrize("request_", [CLIENT, CLASS, "samples"], ids=["client", "class", "samples"])
def test_no_forget_pair_is_ever_read(adapted, poison, request_) -> None:
    """Replays leave them out, so clients whose forget pairs cannot be read give the same states."""
    named = SampleRequest(ids=tuple(pair_id for shard in adapted.world.shards[:2] for pair_id in shard.train_ids[:4]))
    request = named if request_ == "samples" else request_
    _, plain = watch(adapted, request, "ease", "recovery_share=0.34")
    blind = list(
        make_method("ease", ("recovery_share=0.34",)).unlearn(adapted.trained, request, poison(adapted.world, request))
    )
    assert len(blind) > 1
    assert all(same(one.state, two.state) for one, two in zip(blind, plain, strict=True))


def test_a_client_learns_only_of_its_own_pairs_and_rounds(learnt, samples) -> None:
    asked, _ = watch(learnt, samples, "ease")
    job = next(each.job for each in asked if each.job.objective == "replay")
    for client in (0, 1, 2):
        own = job.own(client, learnt.world.federation.members[client])
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
