"""Who is asked what, and when: forget data is read only in the phases that may read it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from ease.federation.codec import encode_job
from ease.federation.loop import Loop
from ease.federation.metered import Metered
from ease.federation.protocol import Federation, LocalJob, Update
from ease.methods import make_method
from ease.methods.base import Step
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest

CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(2,))


@dataclass(frozen=True)
class Asked:
    client: int
    job: LocalJob
    state: Params
    steps: int
    """Steps the method had yielded by then."""


class Spy:
    """A federation that notes every job of every client, and whose inner federation may be exchanged."""

    def __init__(self, inner: Federation) -> None:
        self.inner, self.asked, self.steps = inner, list[Asked](), 0

    @property
    def clients(self) -> Sequence[int]:
        return self.inner.clients

    @property
    def held(self) -> Mapping[int, Collection[str]]:
        return self.inner.held

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            self.asked.append(Asked(client, job, params, self.steps))
            yield from self.inner.run(params, job, [client])


def watch(learnt, request: Request, method: str, *settings: str) -> tuple[list[Asked], list[Step]]:
    """Run a method to its end under a spy."""
    spy = Spy(learnt.world.federation)
    steps = []
    for step in make_method(method, settings).unlearn(learnt.trained, request, spy):
        steps.append(step)
        spy.steps += 1
    return spy.asked, steps


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


@pytest.mark.parametrize("settings", [(), ("delta=0.5",), ("lock_side=client",)], ids=str)
def test_a_leaving_client_is_only_asked_to_measure_and_never_after_the_decomposition(learnt, settings) -> None:
    asked, steps = watch(learnt, CLIENT, "ease", *settings)
    leaving = [each for each in asked if each.client == 1]
    assert {each.job.objective for each in leaving} <= {"levels"}
    assert all(each.steps == 0 for each in leaving)
    assert bool(leaving) == ("delta=0.5" not in settings)
    training = [each for each in asked if each.job.objective != "levels"]
    assert {each.client for each in training} == {0, 2, 3} and len(training) == 3 * (len(steps) - 1)
    assert {each.job.data for each in training} == {"retain"} and {each.job.objective for each in training} == {"align"}


def test_several_leaving_clients_are_all_left_alone(learnt) -> None:
    asked, _ = watch(learnt, ClientRequest(clients=(0, 3)), "ease")
    assert {each.client for each in asked if each.job.objective != "levels"} == {1, 2}
    assert {each.client for each in asked if each.job.objective == "levels"} == {0, 3}


def test_a_fixed_threshold_needs_nothing_from_the_leaving_client(learnt) -> None:
    """It may already be gone: the federation does not know it any more."""
    gone = Loop(learnt.world.server.model, {c: d for c, d in learnt.world.federation.data.items() if c != 1})
    method = make_method("ease", ("delta=0.5",))
    alone = [step.state for step in method.unlearn(learnt.trained, CLIENT, gone)]
    together = [step.state for step in method.unlearn(learnt.trained, CLIENT, learnt.world.federation)]
    assert all(same(one, two) for one, two in zip(alone, together, strict=True))


def test_the_server_side_lock_sends_no_directions(learnt) -> None:
    """Directions are made of the leaving client's gradients; only the paper's form shows them to others."""
    assert all(each.job.lock is None for each in watch(learnt, CLIENT, "ease")[0])
    asked, _ = watch(learnt, CLIENT, "ease", "lock_side=client")
    locks = [each.job.lock for each in asked if each.job.objective == "align"]
    assert locks and all(lock is not None and lock.packed for lock in locks)
    assert len({lock.key for lock in locks if lock is not None}) == 1  # so each client is sent it once


# --- class and sample requests ---


@pytest.mark.parametrize("request_", [CLASS, "samples"], ids=["class", "samples"])
def test_forget_pairs_are_probed_and_measured_before_the_decomposition_alone(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    asked, steps = watch(learnt, request, "ease")
    assert {each.job.objective for each in asked if each.steps == 0} == {"probe", "levels"}
    later = [each for each in asked if each.steps > 0]
    assert {each.job.objective for each in later} == {"displace"}
    assert {each.job.data for each in later} == {"retain"}
    assert len(later) == 4 * (len(steps) - 1)


@pytest.mark.parametrize("request_", [CLASS, "samples"], ids=["class", "samples"])
def test_without_the_push_forget_data_is_not_read_after_the_decomposition(learnt, samples, poisoned, request_) -> None:
    request = samples if request_ == "samples" else request_
    asked, plain = watch(learnt, request, "ease", "displacement=0")
    assert {each.job.objective for each in asked if each.steps > 0} == {"align"}
    spy = Spy(learnt.world.federation)
    states = []
    for step in make_method("ease", ("displacement=0",)).unlearn(learnt.trained, request, spy):
        states.append(step.state)
        spy.inner = poisoned(request)  # from the first step on
    assert all(same(state, step.state) for state, step in zip(states, plain, strict=True))


def test_a_leaving_clients_data_is_not_read_after_the_decomposition(learnt, poisoned) -> None:
    _, plain = watch(learnt, CLIENT, "ease")
    spy = Spy(learnt.world.federation)
    states = []
    for step in make_method("ease").unlearn(learnt.trained, CLIENT, spy):
        states.append(step.state)
        spy.inner = poisoned(CLIENT)
    assert all(same(state, step.state) for state, step in zip(states, plain, strict=True))


def test_targets_go_to_their_own_client_alone(learnt, samples) -> None:
    """The meter counts the bytes that each client is sent: another client's targets change nothing of them."""
    asked, _ = watch(learnt, samples, "ease")
    job = next(each.job for each in asked if each.job.objective == "displace")
    state = asked[-1].state
    assert {client: len(values) for client, values in job.targets.items()} == {0: 6, 1: 6, 2: 6, 3: 0}

    class Silent:
        clients, held = learnt.world.federation.clients, learnt.world.federation.held

        def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
            return iter(())

    def sent(job: LocalJob, client: int) -> int:
        metered = Metered(Silent())
        list(metered.run(state, job, [client]))
        return metered.cost.bytes_down

    bare = replace(job, targets={})
    grown = replace(job, targets={**job.targets, 1: torch.zeros(5000)})
    for client in (0, 2):
        own = job.own(client, learnt.world.federation.held[client])
        mine = samples.ids[:6] if client == 0 else samples.ids[12:]
        assert list(own.targets) == [client] and own.request == SampleRequest(ids=mine)
        alone, without = (encode_job(each, state)[0] for each in (own, replace(own, targets={})))
        assert sent(job, client) - sent(bare, client) == len(alone) - len(without)
        assert sent(grown, client) == sent(job, client)
    assert sent(grown, 1) > sent(job, 1) + 15_000


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
