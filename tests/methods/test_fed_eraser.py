"""FedEraser: stored lengths, new directions."""

from dataclasses import replace

import pytest
import torch

from ease.errors import UserError
from ease.methods import make_method
from ease.methods.fed_eraser import calibrate
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest

BIAS, WEIGHT, ADAPTER = "text.projector.0.bias", "text.projector.0.weight", "image.layer.B"
CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(0,))


def filled(toy_params, bias: float, weight: tuple[float, float, float], adapter: tuple[float, float]) -> Params:
    return toy_params(0.0).replace(
        {BIAS: torch.tensor([bias]), WEIGHT: torch.tensor([weight]), ADAPTER: torch.tensor(adapter).view(2, 1)}
    )


def test_each_tensor_keeps_its_direction_and_gets_the_stored_length(toy_params) -> None:
    """Step: bias 2, weight (3, 0, 4), adapter (0, 0). Stored: bias -1, weight (0, 10, 0), adapter (5, 0).

    bias: 2 · |-1| / |2| = 1. weight: length 5, stored 10, factor 2, so (6, 0, 8). adapter: a step of no length has no
    direction, so it stays zero instead of becoming 0/0.
    """
    step = filled(toy_params, 2.0, (3.0, 0.0, 4.0), (0.0, 0.0))
    result = calibrate(step, filled(toy_params, -1.0, (0.0, 10.0, 0.0), (5.0, 0.0)))
    torch.testing.assert_close(result[BIAS], torch.tensor([1.0]))
    torch.testing.assert_close(result[WEIGHT], torch.tensor([[6.0, 0.0, 8.0]]))
    assert torch.equal(result[ADAPTER], torch.zeros(2, 1))


def test_a_tiny_step_grows_tenfold_at_most(toy_params) -> None:
    """bias: 1 / 1e-6 would be a factor of a million; it becomes 1e-5."""
    result = calibrate(filled(toy_params, 1e-6, (1.0, 0.0, 0.0), (1.0, 0.0)), toy_params(1.0))
    torch.testing.assert_close(result[BIAS], torch.tensor([1e-5]))


def test_two_rounds_by_hand(toy_params, past, scripted) -> None:
    """Clients 0, 1, 2 have 1, 2, 3 pairs; 1 leaves. Every stored change of round 1 is c + 1 in every value.

    Round 1 (stored, as it is): (1 · 1 + 3 · 3) / 4 = 2.5 in every value.
    Round 2: clients 0 and 2 answer -0.5 and +0.25 in every value, their stored changes are 1 and 2 in every value, so
    the calibrated ones are -1 and +2, and their mean (1 · -1 + 3 · 2) / 4 = 1.25. Together 3.75.
    """
    first = {client: toy_params(client + 1.0) for client in (0, 1, 2)}
    second = {0: toy_params(1.0), 1: toy_params(7.0), 2: toy_params(-2.0)}
    federation = scripted({0: toy_params(-0.5), 1: toy_params(9.0), 2: toy_params(0.25)}, {0: 1, 1: 2, 2: 3})
    steps = list(make_method("fed_eraser").unlearn(past(first, second), CLIENT, federation))
    assert [step.phase for step in steps] == ["replay", "calibration"]
    for step, value in zip(steps, (2.5, 3.75), strict=True):
        for tensor in step.state.tensors.values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, value))
    ((job, clients, start),) = federation.asked
    assert clients == [0, 2] and job.epochs == 2  # half of 4
    assert torch.equal(start[BIAS], steps[0].state[BIAS])


def test_class_requests_calibrate_the_first_round_too(toy_params, past, scripted) -> None:
    """One client, stored +1, answer -0.5: the replayed step is -1, not +1."""
    federation = scripted({0: toy_params(-0.5)}, {0: 3})
    (step,) = make_method("fed_eraser").unlearn(past({0: toy_params(1.0)}), CLASS, federation)
    torch.testing.assert_close(step.state[WEIGHT], torch.full((1, 3), -1.0))


def test_only_clients_of_a_stored_round_take_part_in_its_replay(toy_params, past, scripted) -> None:
    """Round 2 had clients 0 and 1, round 3 the leaving client alone: nothing is left of it to replay."""
    one = toy_params(1.0)
    trained = past({0: one, 1: one, 2: one}, {0: one, 1: one}, {1: one}, participation=0.5)
    federation = scripted(dict.fromkeys((0, 1, 2), one), {0: 1, 1: 2, 2: 3})
    steps = list(make_method("fed_eraser").unlearn(trained, CLIENT, federation))
    assert [clients for _, clients, _ in federation.asked] == [[0], []]
    assert torch.equal(steps[2].state[WEIGHT], steps[1].state[WEIGHT])


@pytest.mark.parametrize(("rounds", "interval", "replayed"), [(5, 1, [1, 2, 3, 4, 5]), (5, 2, [1, 3]), (3, 9, [1])])
def test_every_so_many_rounds_are_replayed(
    toy_params, past, scripted, rounds: int, interval: int, replayed: list[int]
) -> None:
    method = make_method("fed_eraser", (f"interval={interval}",))
    federation = scripted({0: toy_params(1.0)}, {0: 1})
    trained = past(*[{0: toy_params(1.0)}] * rounds)
    assert len(list(method.unlearn(trained, CLASS, federation))) == method.rounds(trained.training, CLASS)
    assert [job.round for job, _, _ in federation.asked] == replayed


def test_a_damaged_update_is_refused(toy_params, past, scripted) -> None:
    trained = past({0: toy_params(1.0)})
    path = trained.history.update_path(1, 0)
    toy_params(2.0).save(path)
    with pytest.raises(UserError, match=str(path)):
        list(make_method("fed_eraser").unlearn(trained, CLASS, scripted({0: toy_params(1.0)}, {0: 1})))


def test_an_answer_of_another_layout_is_refused(toy_params, past, scripted) -> None:
    """It must not reach the calibration, which would look for its tensors in vain."""
    one = toy_params(1.0)
    strange = replace(one, tensors={**one.tensors, "more": torch.zeros(1)})
    (step,) = make_method("fed_eraser").unlearn(
        past({0: one, 2: one}), CLASS, scripted({0: strange, 2: one}, {0: 1, 2: 3})
    )
    assert step.notes["rejected"] == {0: "its tensor names differ from the model's"}
