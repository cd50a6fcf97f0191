"""The meter counts the bytes that encoded messages really have."""

import gc
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from ease.federation.codec import encode_job, encode_state, encode_update, parts_of
from ease.federation.lock import LockMessage, pack_directions, rounded
from ease.federation.meter import Metered
from ease.federation.protocol import LocalJob, Middleware, Replay, Update
from ease.methods import make_method
from ease.params import Block, Params
from ease.requests.request import Request, SampleRequest
from ease.subspace import Basis
from ease.testing import Stage, make_stage


class Answers:
    """A federation that gives prepared answers."""

    clients = (0, 1, 2)
    members: ClassVar = {client: frozenset({"a", *(f"pair-{n}" for n in range(50))}) for client in clients}

    def __init__(self, *updates: Update) -> None:
        self.updates = {update.client: update for update in updates}

    def run(self, params, job, clients):
        yield from (self.updates[client] for client in clients if client in self.updates)


def single(name: str, tensor: torch.Tensor) -> Params:
    """A state of one tensor."""
    return Params({name: tensor}, (Block(name, "image", "projector", (name,)),))


def test_a_real_round_counts_what_is_serialised(world, local_job) -> None:
    metered = Metered(world.federation)
    state = world.server.initial()
    updates = list(metered.run(state, local_job(epochs=2), [0, 2]))
    assert [update.client for update in updates] == [0, 2] and list(metered.clients) == [0, 1, 2]
    assert metered.cost.bytes_up == sum(len(encode_update(update)) for update in updates)
    assert metered.cost.messages == 2
    assert metered.cost.pairs_trained == 2 * sum(update.pairs for update in updates)
    assert metered.cost.client_seconds > 0
    jobs = [encode_job(local_job(epochs=2), state)[0] for _ in updates]
    assert metered.cost.bytes_down == 2 * len(encode_state(state)) + sum(map(len, jobs))
    assert len(jobs[0]) < 1000


def test_the_meter_changes_no_answer(world, local_job) -> None:
    plain = list(world.federation.run(world.server.initial(), local_job(), [0, 1]))
    metered = list(Metered(world.federation).run(world.server.initial(), local_job(), [0, 1]))
    for one, other in zip(plain, metered, strict=True):
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta.tensors)


def test_eight_bits_cost_a_quarter(toy_params, local_job) -> None:
    wide = single("w", torch.randn(1000, 10))
    costs = []
    values, scale = rounded(wide["w"])
    answers = Update(0, 1, wide), Update(0, 1, None, {"w": values, "scale": scale})
    for answer in answers:
        metered = Metered(Answers(answer))
        list(metered.run(toy_params(0.0), local_job(), [0]))
        costs.append(metered.cost.bytes_up)
    assert costs == [len(encode_update(answer)) for answer in answers]
    assert costs[1] < 0.26 * costs[0]


def test_values_and_abstentions_count_as_they_are(toy_params, local_job) -> None:
    values = {"forget": torch.zeros(7), "validation": torch.zeros(3)}
    answers = Update(0, 5, None, values), Update(1, 0, None)
    metered = Metered(Answers(*answers))
    list(metered.run(toy_params(0.0), local_job(objective="membership scores"), [0, 1, 2]))
    assert metered.cost.bytes_up == sum(len(encode_update(answer)) for answer in answers)
    assert metered.cost.messages == 3  # the third client never answered
    assert metered.cost.pairs_trained == 0


def test_shape_type_and_name_decide_the_size(toy_params, local_job) -> None:
    for delta in (torch.zeros(4), torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        answers = Update(0, 1, single("w", delta)), Update(1, 1, single("ww", delta))
        metered = Metered(Answers(*answers))
        list(metered.run(toy_params(0.0), local_job(), [0, 1]))
        assert metered.cost.bytes_up == sum(len(encode_update(answer)) for answer in answers)


def test_a_lock_is_sent_to_each_client_once(toy_params, local_job) -> None:
    direction = Basis(torch.tensor([[1.0], [0.0]]), torch.eye(1), torch.ones(1).double())
    lock = LockMessage(1.0, toy_params(0.0), pack_directions({"image.layer": direction}))
    named = 64  # the job names it by 64 letters in quotes, instead of null

    def spent(metered: Metered, clients: list[int], lock: LockMessage | None) -> int:
        before = metered.cost.bytes_down
        list(metered.run(toy_params(0.0), local_job(lock=lock), clients))
        return metered.cost.bytes_down - before

    metered = Metered(Answers())
    state = len(encode_state(toy_params(0.0)))
    first = spent(metered, [0], None)  # with the state, which is kept
    assert spent(metered, [0], lock) == first - state + named - 2 + len(lock.encode())
    assert spent(metered, [0], lock) == first - state + named - 2
    assert spent(metered, [0, 1], lock) == 2 * (first - state + named - 2) + state + len(lock.encode())
    assert spent(metered, [0], replace(lock, strength=2.0)) == first - state + named - 2 + len(lock.encode())


def test_a_longer_request_costs_more(toy_params, local_job) -> None:
    costs = []
    for ids in (("a",), tuple(f"pair-{n}" for n in range(50))):
        metered = Metered(Answers())
        list(metered.run(toy_params(0.0), local_job(request=SampleRequest(ids=ids)), [0]))
        costs.append(metered.cost.bytes_down)
    assert costs[1] > costs[0] + 300


def test_a_reference_is_sent_to_each_client_once(toy_params, local_job) -> None:
    metered = Metered(Answers())
    state, reference = toy_params(0.0), toy_params(1.0)

    def sent(client: int, reference: Params | None) -> int:
        before = metered.cost.bytes_down
        list(metered.run(state, local_job(reference=reference), [client]))
        return metered.cost.bytes_down - before

    length = len(encode_state(reference))
    sent(0, None)
    bare = sent(0, None) + 62  # the state is kept; a job names its reference in 64 letters and quotes instead of null
    assert [sent(0, reference), sent(0, reference)] == [bare + length, bare]
    assert sent(1, reference) == bare + 2 * length  # another client has got neither
    assert sent(0, toy_params(2.0)) == bare + length  # another reference
    assert sent(0, state) == bare  # one that it has already under another name


def run_and_count(federation, method, trained, request: Request) -> tuple[int, int, Metered]:
    """What a server would send that encodes every message and every part a client does not keep, and the meter."""
    kept: dict[int, dict[str, str]] = {}
    down = up = 0

    class Post(Middleware):
        def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
            nonlocal down, up
            for client in clients:
                own = job.own(client, self.members[client])
                data, parts = encode_job(own, params)
                mine = kept.setdefault(client, {})
                # A client keeps the states of the training that it took part in.
                had = {hashlib.sha256(encode_state(each.state)).hexdigest() for each in own.replays}
                had |= set(mine.values())
                down += len(data) + sum(len(part) for name, part in parts.items() if name not in had)
                for role, part in parts_of(own, params).items():
                    if role != "state" or own.sparse is None:
                        content = part.encode() if isinstance(part, LockMessage) else encode_state(part)
                        mine[role] = hashlib.sha256(content).hexdigest()
            for update in super().run(params, job, clients):
                up += len(encode_update(update))
                yield update

    metered = Metered(Post(federation))
    list(method.unlearn(trained, request, metered))
    return down, up, metered


@pytest.fixture(scope="module")
def stage(shared_cache, tmp_path_factory) -> Stage:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return make_stage("sequential", tmp_path_factory.mktemp("stage"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("finetune", ()),
        ("ease", ()),
        ("ease_paper", ()),
        ("fused", ()),
        ("ffmu", ()),
        ("multi_delete", ("share=0.4",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("scope", ["client", "sample"])
def test_every_message_of_a_method_is_counted_as_long_as_it_is(stage: Stage, name: str, settings, scope: str) -> None:
    method, request = make_method(name, settings), stage.requests[scope]
    down, up, metered = run_and_count(stage.world.federation, method, stage.trained, request)
    assert (metered.cost.bytes_down, metered.cost.bytes_up) == (down, up) and min(down, up) > 0


def test_replays_and_measurements_are_not_free(world, local_job) -> None:
    """A replay passes the pairs that stay once a round; membership scores only pass forward, which counts 1/3."""
    request = SampleRequest(ids=world.shards[0].train_ids[:4])
    pairs = len(world.shards[0].train)
    passed = {}
    start = world.server.initial()
    replays = (Replay(1, start, 1.0, 0), Replay(2, start, 1.0, 1))
    for objective, epochs in (("replay", 3), ("membership scores", 1), ("align", 3)):
        metered = Metered(world.federation)
        job = local_job(
            request=request, objective=objective, epochs=epochs, replays=replays if objective == "replay" else ()
        )
        list(metered.run(world.server.initial(), job, [world.shards[0].client]))
        passed[objective] = metered.cost.pairs_passed
    assert passed == {"replay": 2 * 3 * (pairs - 4), "membership scores": pytest.approx(pairs / 3), "align": 3 * pairs}


def test_no_sent_state_is_kept_alive(toy_params, local_job) -> None:
    """Of many clients each was last drawn in another round: their states would fill the memory."""
    metered, alive = Metered(Answers()), []
    for number in range(6):
        state = toy_params(seed=number)
        alive += [weakref.ref(tensor) for tensor in state.tensors.values()]
        list(metered.run(state, local_job(round=number), [number % 3]))
    del state
    gc.collect()
    assert not any(reference() is not None for reference in alive)
