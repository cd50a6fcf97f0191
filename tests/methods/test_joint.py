"""Joint rounds by hand: who is asked, how the answers add up, and when a withdrawing client is gone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import LocalJob, Update
from ease.methods.base import Trained
from ease.methods.joint import joint_rounds
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest


class Constant:
    """Client k answers k + 1 in every value, with k + 1 pairs."""

    clients: Sequence[int] = (0, 1, 2)

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            self.asked.append((job.round, client))
            yield Update(client, client + 1, params.map(lambda tensor, k=client: torch.full_like(tensor, k + 1.0)))


@pytest.fixture
def trained(toy_params) -> Trained:
    trained = Trained(None, TrainingConfig(rounds=10), 0.07, 0)  # type: ignore[arg-type]
    trained.__dict__["final"] = toy_params(0.0)
    return trained


def values(steps) -> list[float]:
    """The one number that fills each state."""
    assert all(torch.allclose(tensor, next(iter(step.state.tensors.values())).flatten()[0])
               for step in steps for tensor in step.state.tensors.values())  # fmt: skip
    return [float(next(iter(step.state.tensors.values())).flatten()[0]) for step in steps]


def test_a_withdrawing_client_is_added_in_full_and_then_left_out(trained, local_job) -> None:
    """Clients 0 and 2 have a weighted mean of (1·1 + 3·3) / 4 = 2.5. Client 1 adds its 2 in the first two rounds."""
    federation = Constant()
    steps = list(joint_rounds(trained, ClientRequest(clients=(1,)), federation, local_job(), 3, forget_rounds=2))
    assert values(steps) == pytest.approx([4.5, 9.0, 11.5])
    assert [step.phase for step in steps] == ["unlearning", "unlearning", "finetune"]
    assert sorted(federation.asked) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 2)]


def test_other_requests_are_plain_averages_to_the_end(trained, local_job) -> None:
    """All three have a weighted mean of (1 + 4 + 9) / 6."""
    steps = list(joint_rounds(trained, SampleRequest(ids=("x",)), Constant(), local_job(), 3, forget_rounds=1))
    assert values(steps) == pytest.approx([14 / 6, 28 / 6, 7.0])
    assert {step.phase for step in steps} == {"unlearning"}


def test_a_withdrawing_client_that_sends_no_numbers_is_refused(trained, local_job) -> None:
    class Broken(Constant):
        def run(self, params, job, clients):
            for update in super().run(params, job, clients):
                spoilt = update.delta.map(lambda tensor: tensor * torch.nan)
                yield replace(update, delta=spoilt) if update.client == 1 else update

    with pytest.raises(UserError, match=r"client 1: .* non-finite"):
        next(joint_rounds(trained, ClientRequest(clients=(1,)), Broken(), local_job(), 3, forget_rounds=2))
