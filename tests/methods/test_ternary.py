"""Three values on two bits: the quantiser by hand, packing there and back, and what a stranger may send."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from ease.federation.codec import encode_update
from ease.federation.meter import Metered
from ease.federation.protocol import Update, reject_reason
from ease.methods.ternary import decode, encode, pack, quantise, unpack
from ease.params import Params

SETTINGS = {"threshold": 0.5, "noise": 0.1}


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=40))
def test_packing_there_and_back(values: list[int]) -> None:
    packed = pack(torch.tensor(values))
    assert packed.dtype == torch.uint8 and len(packed) == -(-len(values) // 4)
    assert unpack(packed, len(values)).tolist() == values


def test_a_byte_by_hand() -> None:
    """Codes of -1, 0, 1 are 0, 1, 2. (1, 0, -1, 1) is 2 + 1·4 + 0·16 + 2·64 = 134; a lone 1 is padded to 2."""
    assert pack(torch.tensor([1, 0, -1, 1, 1])).tolist() == [134, 2]


def test_values_by_hand() -> None:
    """threshold 0.5, noise 0.1. At 0.6: P(+1) = Phi(1) = 0.841, P(0) = 0.159, so the radius is 0.05 · (1 + 1) = 0.1.

    That is the distance to the threshold, as it must be. At 0.45: P(0) = Phi(0.5), radius 0.05. At -0.7 the radius
    is 0.2. At 0 two classes share the rest: P(0) = 1 - 2 Phi(-5), beyond what is told apart from certainty, so the
    probabilities are 1 - 1e-6 and 1e-6 and the radius is 0.1 · Phi^-1(1 - 1e-6) = 0.475.
    """
    classes, radius = quantise(torch.tensor([0.6, 0.45, -0.7, 0.0]), 0.5, 0.1)
    assert classes.tolist() == [1, 0, -1, 0]
    expected = torch.tensor([0.1, 0.05, 0.2, 0.1 * norm.ppf(1 - 1e-6)], dtype=torch.float64)
    torch.testing.assert_close(radius, expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(st.floats(-3, 3), st.floats(-0.999, 0.999), st.sampled_from([(0.5, 0.1), (0.5, 0.5), (0.0, 0.2)]))
def test_within_its_radius_a_value_keeps_its_class(value: float, share: float, setting: tuple[float, float]) -> None:
    """The certificate speaks of a smoothed classifier and holds for every move shorter than the radius."""
    classes, radius = quantise(torch.tensor([value], dtype=torch.float64), *setting)
    moved, _ = quantise(torch.tensor([value], dtype=torch.float64) + share * radius, *setting)
    assert torch.equal(moved, classes)


def test_an_update_by_hand(toy_params) -> None:
    """weight (2, 0, 0.5): root mean square sqrt(4.25 / 3) = 1.190, relative (1.68, 0, 0.42), so (1, 0, 0) · 1.190."""
    name = "text.projector.0.weight"
    update = Update(0, 3, toy_params(1.0).replace({name: torch.tensor([[2.0, 0.0, 0.5]])}))
    sent = encode(update, SETTINGS)
    assert sent.delta is None and sent.pairs == 3 and sent.values[name].tolist() == [2 + 4 + 16]
    received = decode(sent, toy_params(0.0))
    scale = (4.25 / 3) ** 0.5
    torch.testing.assert_close(received.change[name], torch.tensor([[scale, 0.0, 0.0]]))
    assert reject_reason(received, toy_params(0.0)) is None
    assert set(received.values) == {"radius"}


def test_a_tensor_of_zeros_stays_zero(toy_params) -> None:
    received = decode(encode(Update(0, 3, toy_params(0.0)), SETTINGS), toy_params(0.0))
    assert received.change.norm() == 0


def test_two_bits_are_what_is_metered(world, local_job) -> None:
    """A quarter of a byte for each value instead of four, one scale for each tensor, and the same training."""
    state, costs, updates = world.server.initial(), {}, {}
    for objective in ("align", "ternary"):
        metered = Metered(world.federation)
        (updates[objective],) = metered.run(state, local_job(objective=objective, settings=SETTINGS), [0])
        costs[objective] = metered.cost
    sent = updates["ternary"]
    assert costs["ternary"].bytes_up == len(encode_update(sent))
    payload = sum(-(-tensor.numel() // 4) + 4 for tensor in state.tensors.values()) + 8  # and loss and radius
    assert sum(value.numel() * value.element_size() for value in sent.values.values()) == payload
    assert costs["ternary"].pairs_trained == costs["align"].pairs_trained > 0
    for name, tensor in decode(sent, state).change.tensors.items():
        exact = updates["align"].change[name]
        assert torch.equal(tensor.sign()[tensor != 0], exact.sign()[tensor != 0])
        assert float(tensor.abs().max()) == pytest.approx(float(exact.square().mean().sqrt()), rel=1e-5)


def test_an_abstention_stays_one(toy_params) -> None:
    silent = Update(0, 0, None)
    assert encode(silent, SETTINGS) is silent and decode(silent, toy_params(0.0)) is silent


NAME = "text.projector.0.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({NAME: None}, "names"),
        ({f"{NAME}:scale": None}, "names"),
        ({NAME: torch.zeros(2, dtype=torch.uint8)}, "names"),
        ({NAME: torch.ones(1, 3)}, "names"),
        ({f"{NAME}:scale": torch.ones(3)}, "names"),
        ({NAME: torch.tensor([3], dtype=torch.uint8)}, "non-finite"),
        ({f"{NAME}:scale": torch.tensor(torch.nan)}, "non-finite"),
    ],
)
def test_undecodable_values_are_refused(toy_params, change: dict, reason: str) -> None:
    sent = encode(Update(0, 3, toy_params(1.0)), SETTINGS)
    values = {name: value for name, value in {**sent.values, **change}.items() if value is not None}
    refused = reject_reason(decode(replace(sent, values=values), toy_params(0.0)), toy_params(0.0))
    assert refused is not None and reason in refused


def test_a_dense_answer_to_a_ternary_job_is_refused(toy_params) -> None:
    answer = decode(Update(0, 3, Params(toy_params(1.0).tensors, toy_params(1.0).blocks)), toy_params(0.0))
    assert reject_reason(answer, toy_params(0.0)) is not None
