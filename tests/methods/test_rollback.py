"""Rollback: which stored rounds may stay, and that training goes on from the last of them."""

from dataclasses import replace

import pytest
import torch

from ease.methods import make_method
from ease.methods.rollback import influences, kept_rounds
from ease.requests.request import ClassRequest, ClientRequest

CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(0,))


@pytest.mark.parametrize(
    ("found", "share", "kept"),
    [
        ([1, 1, 2, 4], 0.25, 2),  # 1 + 1 of 8
        ([1, 1, 2, 4], 0.24, 1),
        ([1, 1, 2, 4], 0.0, 0),
        ([0, 0, 3, 1], 0.0, 2),  # no part in the first two
        ([1, 0, 0, 0], 0.99, 0),
        ([4, 1, 1, 0], 0.99, 2),  # 4 + 1 of 6
        ([0, 0, 0], 0.5, 2),  # never all
    ],
)
def test_rounds_stay_as_long_as_they_hold_little(found: list[float], share: float, kept: int) -> None:
    assert kept_rounds(found, share) == kept


def test_a_client_that_came_late_costs_the_rounds_since_then(toy_params, past, scripted) -> None:
    """Clients 0 and 2 sent 1 and 2 (1 and 3 pairs: mean 1.75) twice, then client 1 came. Both answer 0.5 from there."""
    early = {0: toy_params(1.0), 2: toy_params(2.0)}
    late = {**early, 1: toy_params(9.0)}
    trained = past(early, early, late, late)
    federation = scripted(dict.fromkeys((0, 1, 2), toy_params(0.5)), {0: 1, 1: 2, 2: 3})
    method = make_method("rollback", ("influence=0",))
    steps = list(method.unlearn(trained, CLIENT, federation))
    assert [step.phase for step in steps] == ["kept", "kept", "retraining", "retraining"]
    for step, value in zip(steps, (1.75, 3.5, 4.0, 4.5), strict=True):
        for tensor in step.state.tensors.values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, value))
    assert [(job.round, job.data, clients) for job, clients, _ in federation.asked] == [
        (3, "retain", [0, 2]),
        (4, "retain", [0, 2]),
    ]


def test_a_client_counts_by_what_it_made_of_a_round_and_a_class_by_all_of_it(toy_params, past) -> None:
    """Six values. Clients 0 and 1 sent 1 and 4 (1 and 2 pairs): mean 3, without client 1 it is 1, so 2 are its own."""
    trained = past({0: toy_params(1.0), 1: toy_params(4.0)})
    assert influences(trained, CLIENT, [0]) == pytest.approx([2 * 6**0.5])
    assert influences(trained, CLASS, [0, 1]) == pytest.approx([3 * 6**0.5])


def test_earlier_rounds_count_too(toy_params, past) -> None:
    """Stored states still hold client 2, who is gone: mean (1 + 8 + 9) / 6 = 3, of client 0 alone 1."""
    trained = past({0: toy_params(1.0), 1: toy_params(4.0), 2: toy_params(3.0)})
    after_client = replace(trained, gone=(ClientRequest(clients=(2,)),))
    assert influences(after_client, CLIENT, [0]) == pytest.approx([2 * 6**0.5])
    after_class = replace(trained, gone=(CLASS,))
    assert influences(after_class, CLIENT, [0, 2]) == pytest.approx([3 * 6**0.5])
