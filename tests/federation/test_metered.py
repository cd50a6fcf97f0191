"""The meter counts the bytes that are really serialised."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from ease.federation.metered import Metered
from ease.federation.protocol import Lock, Update, to_8bit
from ease.params import Params
from ease.requests.request import SampleRequest


class Answers:
    """A federation that gives prepared answers."""

    clients = (0, 1, 2)

    def __init__(self, *updates: Update) -> None:
        self.updates = {update.client: update for update in updates}

    def run(self, params, job, clients):
        yield from (self.updates[client] for client in clients if client in self.updates)


def wire(tensors) -> int:
    return len(save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def test_a_real_round_counts_what_is_serialised(world, local_job) -> None:
    metered = Metered(world.federation)
    state = world.initial()
    updates = list(metered.run(state, local_job(epochs=2), [0, 2]))
    assert [update.client for update in updates] == [0, 2] and list(metered.clients) == [0, 1, 2]
    assert metered.cost.bytes_up == sum(wire({**update.delta.tensors, **update.values}) for update in updates)
    assert metered.cost.messages == 2
    assert metered.cost.pairs_trained == 2 * sum(update.pairs for update in updates)
    assert metered.cost.client_seconds > 0
    job_bytes = metered.cost.bytes_down - 2 * wire(state.tensors)
    assert 0 < job_bytes < 1000


def test_the_meter_changes_no_answer(world, local_job) -> None:
    plain = list(world.federation.run(world.initial(), local_job(), [0, 1]))
    metered = list(Metered(world.federation).run(world.initial(), local_job(), [0, 1]))
    for one, other in zip(plain, metered, strict=True):
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta.tensors)


def test_eight_bits_cost_a_quarter(toy_params, local_job) -> None:
    wide = Params({"w": torch.randn(1000, 10)}, ())
    costs = []
    for answer in (Update(0, 1, wide), Update(0, 1, None, to_8bit(wide.tensors))):
        metered = Metered(Answers(answer))
        list(metered.run(toy_params(0.0), local_job(), [0]))
        costs.append(metered.cost.bytes_up)
    packed = {"w": torch.zeros(1000, 10, dtype=torch.int8), "w:scale": torch.tensor(1.0)}
    assert costs == [wire(wide.tensors), wire(packed)]
    assert costs[1] < 0.26 * costs[0]


def test_values_and_abstentions_count_as_they_are(toy_params, local_job) -> None:
    values = {"forget": torch.zeros(7), "validation": torch.zeros(3)}
    metered = Metered(Answers(Update(0, 5, None, values), Update(1, 0, None)))
    list(metered.run(toy_params(0.0), local_job(), [0, 1, 2]))
    assert metered.cost.bytes_up == wire(values) + wire({})
    assert metered.cost.messages == 3  # the third client never answered
    assert metered.cost.pairs_trained == 0


def test_shape_type_and_name_decide_the_size(toy_params, local_job) -> None:
    for delta in (torch.zeros(4), torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        metered = Metered(Answers(Update(0, 1, Params({"w": delta}, ())), Update(1, 1, Params({"ww": delta}, ()))))
        list(metered.run(toy_params(0.0), local_job(), [0, 1]))
        assert metered.cost.bytes_up == wire({"w": delta}) + wire({"ww": delta})


def test_a_lock_is_sent_to_each_client_once(toy_params, local_job) -> None:
    packed = {"basis": torch.zeros(100, 4, dtype=torch.int8)}
    lock = Lock(strength=1.0, bases={}, packed=packed, reference=toy_params(0.0), key="first")
    extra = wire(packed) + wire(toy_params(0.0).tensors)

    def spent(metered: Metered, clients: list[int], lock: Lock | None) -> int:
        before = metered.cost.bytes_down
        list(metered.run(toy_params(0.0), local_job(lock=lock), clients))
        return metered.cost.bytes_down - before

    metered = Metered(Answers())
    plain = spent(metered, [0], None)
    assert spent(metered, [0], lock) == plain + extra
    assert spent(metered, [0], lock) == plain
    assert spent(metered, [0, 1], lock) == 2 * plain + extra
    assert spent(metered, [0], replace(lock, key="second")) == plain + extra


def test_each_client_is_sent_its_own_targets_alone(toy_params, local_job) -> None:
    metered, free = Metered(Answers()), Metered(Answers())
    list(metered.run(toy_params(0.0), local_job(targets={0: torch.zeros(9), 5: torch.zeros(900)}), [0, 1]))
    list(free.run(toy_params(0.0), local_job(), [0, 1]))
    assert metered.cost.bytes_down - free.cost.bytes_down == wire({"targets": torch.zeros(9)})


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

    bare = sent(0, None)
    assert [sent(0, reference), sent(0, reference)] == [bare + wire(reference.tensors), bare]
    assert sent(1, reference) == bare + wire(reference.tensors)  # another client has not got it
    assert sent(0, toy_params(2.0)) == bare + wire(reference.tensors)  # another reference


def test_probes_and_measurements_are_not_free(world, local_job) -> None:
    """A probe passes every pair once; levels pass them forward alone, twice, which counts 2/3; epochs count."""
    request = SampleRequest(ids=world.shards[0].train_ids[:4])
    pairs = len(world.shards[0].train)
    passed = {}
    for objective, epochs in (("probe", 1), ("levels", 1), ("align", 3)):
        metered = Metered(world.federation)
        job = local_job(request=request, objective=objective, epochs=epochs)
        list(metered.run(world.initial(), job, [world.shards[0].client]))
        passed[objective] = metered.cost.pairs_passed
    assert passed == {"probe": pairs, "levels": pytest.approx(2 / 3 * pairs), "align": 3 * pairs}
