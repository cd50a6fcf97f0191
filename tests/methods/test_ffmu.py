"""FFMU-style: the mean of three-valued updates, bounded value by value."""

import math

import pytest
import torch

from ease.federation.fedavg import TrainingConfig
from ease.federation.history import History
from ease.federation.protocol import Update
from ease.methods import make_method
from ease.methods.base import Trained
from ease.methods.ffmu import certificate
from ease.methods.ternary import encode
from ease.requests.request import ClientRequest

NAME = "text.projector.0.weight"


@pytest.fixture
def trained(toy_params, tmp_path) -> Trained:
    trained = Trained(History(tmp_path), TrainingConfig(rounds=2), temperature=0.07, seed=0)
    trained.__dict__["final"] = toy_params(1.0)  # all that the method reads
    return trained


def test_one_round_by_hand(toy_params, trained) -> None:
    """Client 0 (1 pair) changes the weight by (2, 0, 0), client 2 (3 pairs) by (0, 0, -4).

    Root mean squares 2/sqrt(3) and 4/sqrt(3), so they arrive as (1.1547, 0, 0) and (0, 0, -2.3094). Their mean by pairs
    is m = (0.28868, 0, -1.73205), with root mean square r = sqrt((0.08333 + 3) / 3) = 1.01379 and c = 3 r. The step is
    c · tanh(m / c), from a state of ones.
    """

    class Clients:
        clients = (0, 1, 2)

        def run(self, params, job, clients):
            assert clients == [0, 2] and job.objective == "ternary" and job.data == "retain"
            weights = {0: [[2.0, 0.0, 0.0]], 2: [[0.0, 0.0, -4.0]]}
            for client in clients:
                change = toy_params(0.0).replace({NAME: torch.tensor(weights[client])})
                yield encode(Update(client, client + 1, change), job.settings)

    (step,) = make_method("ffmu").unlearn(trained, ClientRequest(clients=(1,)), Clients())
    c = 3 * math.sqrt((3 + 1 / 12) / 3)
    mean = (0.25 * 2 / math.sqrt(3), 0.0, -0.75 * 4 / math.sqrt(3))
    torch.testing.assert_close(step.state[NAME], torch.tensor([[1 + c * math.tanh(m / c) for m in mean]]))
    torch.testing.assert_close(step.state["image.layer.B"], torch.ones(2, 1))


def test_the_radius_is_noted_and_no_number_leaves_it_out() -> None:
    radii = [Update(0, 1, None, {"radius": torch.tensor(r)}) for r in (0.1, 0.3, torch.nan)]
    assert certificate(radii) == {"certified_radius": pytest.approx(0.2)}
    assert certificate(radii[2:]) == certificate([]) == {}


def test_clients_report_a_radius(learnt) -> None:
    """With noise 0.1 none exceeds 0.1 · 4.75, and most values are farther than nothing from a threshold."""
    step = next(make_method("ffmu").unlearn(learnt.trained, ClientRequest(clients=(1,)), learnt.world.federation))
    assert 0.05 < step.notes["certified_radius"] < 0.476
