"""Federated averaging: means computed by hand, order that cannot matter, and updates that must not count."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig, average, fedavg, participants, weighted_median
from ease.federation.protocol import Update, reject_reason
from ease.params import Params

CONFIG = TrainingConfig(rounds=3)


def update(client: int, pairs: int, delta: Params | None, loss: float = 1.0) -> Update:
    return Update(client, pairs, delta, {"loss": torch.tensor(loss)})


class Spy:
    """Clients that add their own number, and a note of what they were asked."""

    clients = (0, 1, 2, 3)

    def __init__(self) -> None:
        self.asked = []

    def run(self, params, job, clients):
        self.asked.append((params, job, list(clients)))
        for client in clients:
            yield update(client, 1, params.map(lambda tensor, client=client: torch.full_like(tensor, client)))


def test_the_mean_is_weighted_by_pairs(toy_params) -> None:
    updates = [update(0, 1, toy_params(1.0)), update(1, 3, toy_params(5.0))]
    finished = average(toy_params(10.0), updates, CONFIG, 1)
    assert all(bool((tensor == 14.0).all()) for tensor in finished.state.tensors.values())  # 10 + (1·1 + 3·5) / 4
    uniform = average(toy_params(10.0), updates, TrainingConfig(weighting="uniform"), 1)
    assert all(bool((tensor == 13.0).all()) for tensor in uniform.state.tensors.values())  # 10 + (1 + 5) / 2


def test_sums_are_kept_in_double_precision(toy_params) -> None:
    """In single precision 1e8 + 1 - 1e8 is 0, and the 1 would be lost."""
    updates = [update(client, 1, toy_params(value)) for client, value in enumerate((1e8, 3.0, -1e8))]
    finished = average(toy_params(0.0), updates, CONFIG, 1)
    assert all(bool((tensor == 1.0).all()) for tensor in finished.state.tensors.values())
    assert all(tensor.dtype == torch.float32 for tensor in finished.state.tensors.values())


def test_the_order_of_arrival_does_not_matter(toy_params) -> None:
    updates = [update(client, client + 1, toy_params(seed=client) * 10.0**client) for client in range(4)]
    states = [average(toy_params(seed=9), order, CONFIG, 1).state for order in itertools.permutations(updates)]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state.tensors)


def test_the_round_records_its_events(toy_params) -> None:
    bad = update(2, 5, toy_params(math.nan))
    finished = average(
        toy_params(0.0), [bad, update(1, 3, toy_params(1.0), 2.0), update(0, 1, toy_params(1.0), 4.0)], CONFIG, 7
    )
    assert finished.number == 7
    assert [kept.client for kept in finished.updates] == [0, 1]
    assert finished.loss == 2.0  # three of four pairs
    assert list(finished.rejected) == [2] and "non-finite" in finished.rejected[2]


def test_a_loss_that_is_not_a_number_does_not_spoil_the_mean(toy_params) -> None:
    updates = [update(0, 1, toy_params(1.0), math.nan), update(1, 1, toy_params(1.0), 2.0)]
    assert average(toy_params(0.0), updates, CONFIG, 1).loss == 2.0
    assert average(toy_params(0.0), updates[:1], CONFIG, 1).loss is None


def other_keys(params: Params) -> Params:
    return Params({f"x{name}": tensor for name, tensor in params.tensors.items()}, params.blocks)


def other_shape(params: Params) -> Params:
    return params.replace({"text.projector.0.bias": torch.zeros(2)})


def one_bad_value(params: Params, value: float) -> Params:
    return params.replace({"image.layer.B": torch.tensor([[0.0], [value]])})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda params: replace(update(4, 5, params), pairs=0), "reports 0 pairs"),
        (lambda params: replace(update(4, 5, params), pairs=-3), "reports -3 pairs"),
        (lambda params: update(4, 5, None), "no parameters"),
        (lambda params: update(4, 5, other_keys(params)), "tensor names differ"),
        (lambda params: update(4, 5, Params(dict(list(params.tensors.items())[1:]), params.blocks)), "names differ"),
        (lambda params: update(4, 5, other_shape(params)), r"bias has shape \(2,\), expected \(1,\)"),
        (
            lambda params: update(4, 5, params.map(torch.Tensor.double)),
            "has dtype torch.float64, expected torch.float32",
        ),
        (lambda params: update(4, 5, params.map(torch.Tensor.half)), "has dtype torch.float16"),
        (lambda params: update(4, 5, one_bad_value(params, math.nan)), "image.layer.B has non-finite values"),
        (lambda params: update(4, 5, one_bad_value(params, math.inf)), "image.layer.B has non-finite values"),
        (lambda params: replace(Update(4, 0, None), refused="it is late"), "it is late"),
    ],
)
def test_unsound_updates_are_rejected_and_change_nothing(toy_params, change, reason: str) -> None:
    params, good = toy_params(2.0), update(1, 3, toy_params(1.0))
    wrong = change(toy_params(1.0))
    finished = average(params, [wrong, good], CONFIG, 1)
    assert torch.equal(finished.state["image.layer.B"], average(params, [good], CONFIG, 1).state["image.layer.B"])
    assert [kept.client for kept in finished.updates] == [1]
    assert re.search(reason, finished.rejected[4])


def test_a_sound_update_has_no_reason_to_be_rejected(toy_params) -> None:
    assert reject_reason(update(0, 1, toy_params(1.0)), toy_params(0.0)) is None


def test_a_client_that_answers_twice_does_not_count(toy_params) -> None:
    twice = [update(2, 1, toy_params(1.0)), update(2, 1, toy_params(5.0)), update(0, 1, toy_params(3.0))]
    for answers in (twice, twice[::-1]):
        finished = average(toy_params(0.0), answers, CONFIG, 1)
        assert finished.state["image.layer.B"].unique().tolist() == [3.0]
        assert finished.rejected == {2: "it answered more than once"}


def test_a_client_that_abstains_is_neither_counted_nor_rejected(toy_params) -> None:
    finished = average(toy_params(0.0), [Update(0, 0, None), update(1, 2, toy_params(1.0))], CONFIG, 1)
    assert [kept.client for kept in finished.updates] == [1] and not finished.rejected


def test_when_all_abstain_the_state_stays(toy_params) -> None:
    state = toy_params(4.0)
    finished = average(state, [Update(0, 0, None), Update(1, 0, None)], CONFIG, 1)
    assert finished.state is state and not finished.updates and finished.loss is None


def test_when_all_are_rejected_the_reason_is_named(toy_params) -> None:
    wrong = [update(client, 1, toy_params(math.nan)) for client in (3, 5)]
    with pytest.raises(UserError, match=r"round 2: every update was rejected .client 3: .*non-finite.*learning_rate"):
        average(toy_params(0.0), wrong, CONFIG, 2)


@pytest.mark.parametrize(("share", "count"), [(1.0, 10), (0.5, 5), (0.34, 3), (0.01, 1)])
def test_a_share_of_the_clients_takes_part(share: float, count: int) -> None:
    config = TrainingConfig(participation=share)
    clients = list(range(100, 110))
    drawn = participants(clients, config, seed=0, number=1)
    assert len(drawn) == len(set(drawn)) == count and set(drawn) <= set(clients) and drawn == sorted(drawn)
    assert participants(clients, config, seed=0, number=1) == drawn
    assert participants(clients[::-1], config, seed=0, number=1) == drawn
    rounds = [tuple(participants(clients, config, seed=0, number=number)) for number in range(20)]
    assert (len(set(rounds)) > 1) == (count < 10)
    assert len({client for each in rounds for client in each}) > count or count == 10


def test_fedavg_yields_one_state_a_round(toy_params) -> None:
    spy = Spy()
    finished = list(fedavg(toy_params(0.0), spy, CONFIG, seed=3, temperature=0.1))
    assert [each.number for each in finished] == [1, 2, 3]
    assert [float(each.state["image.layer.B"][0]) for each in finished] == [1.5, 3.0, 4.5]
    for (params, job, clients), before in zip(spy.asked, (0.0, 1.5, 3.0), strict=True):
        assert float(params["image.layer.B"][0]) == before and clients == [0, 1, 2, 3]
        assert (job.seed, job.stream, job.temperature, job.data, job.request) == (3, "train", 0.1, "all", None)
    assert [job.round for _, job, _ in spy.asked] == [1, 2, 3]


def test_fedavg_continues_from_a_later_round(toy_params) -> None:
    config = TrainingConfig(rounds=4, participation=0.5)
    whole, spy = Spy(), Spy()
    states = [each.state for each in fedavg(toy_params(0.0), whole, config, seed=0, temperature=0.1)]
    rest = list(fedavg(states[1], spy, config, seed=0, temperature=0.1, first_round=3))
    assert [clients for *_, clients in spy.asked] == [clients for *_, clients in whole.asked[2:]]
    assert torch.equal(rest[-1].state["image.layer.B"], states[-1]["image.layer.B"])


@pytest.mark.parametrize(
    ("weighted", "middle"),
    [
        ([], None),
        ([(3.0, 1)], 3.0),
        ([(1.0, 1), (2.0, 1)], 1.5),
        ([(5.0, 1), (1.0, 1), (2.0, 1)], 2.0),
        ([(1.0, 10), (9.0, 1), (8.0, 2)], 1.0),
        ([(1.0, 2), (2.0, 1), (3.0, 1)], 1.5),
    ],
)
def test_the_weighted_median_has_half_of_the_weight_on_either_side(
    weighted: list[tuple[float, float]], middle: float | None
) -> None:
    assert weighted_median(weighted) == middle
