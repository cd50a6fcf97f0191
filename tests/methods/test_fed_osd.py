"""FedOSD: the direction against least squares, both stages by hand, and its effect on a small run."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import LocalJob, Update
from ease.methods.base import Trained
from ease.methods.fed_osd import FedOsd, not_back, orthogonal
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest


def vector(*values: float) -> Params:
    return Params({"w": torch.tensor(values, dtype=torch.float32)}, ())


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**16), others=st.integers(1, 5), twins=st.booleans())
def test_the_direction_is_the_residual_of_least_squares_at_full_length(seed: int, others: int, twins: bool) -> None:
    """The residual of fitting g_u by the retain gradients is orthogonal to them all, and no such vector is nearer g_u.

    Twin gradients make the Gram matrix singular and must change nothing.
    """
    rng = np.random.default_rng(seed)
    change, rows = rng.standard_normal(9), rng.standard_normal((others, 9))
    if twins:
        rows = np.concatenate([rows, rows[:1]])
    fit, *_ = np.linalg.lstsq(rows.T, change, rcond=None)
    residual = change - rows.T @ fit
    expected = residual * np.linalg.norm(change) / np.linalg.norm(residual)
    found = orthogonal(vector(*change), [vector(*row) for row in rows])["w"]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(rows @ found.numpy(), 0, atol=1e-4)


def test_inside_the_span_there_is_not_a_step() -> None:
    """Rescaling what is left would blow rounding noise up to a full step."""
    retained = [vector(1.0, 0.3, 0.0), vector(0.2, 1.0, 0.0)]
    assert not orthogonal(vector(0.7, -0.4, 0.0), retained)["w"].any()
    assert not orthogonal(vector(0.0, 0.0, 0.0), retained)["w"].any()


def test_only_what_leads_back_is_taken_out() -> None:
    """Away is (2, 0). (-3, 4) leads back: (0, 4) is left, at its old length 5. (3, 4) leads on and stays."""
    away = vector(2.0, 0.0)
    torch.testing.assert_close(not_back(vector(-3.0, 4.0), away)["w"], torch.tensor([0.0, 5.0]))
    assert torch.equal(not_back(vector(3.0, 4.0), away)["w"], torch.tensor([3.0, 4.0]))
    assert torch.equal(not_back(vector(-3.0, 4.0), vector(0.0, 0.0))["w"], torch.tensor([-3.0, 4.0]))


class Scripted:
    """Clients 0 and 2 answer on retained pairs, client 1 on forget pairs."""

    clients: Sequence[int] = (0, 1, 2)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            if job.data == "forget":
                assert job.objective == "unlearning cross-entropy"
                yield Update(client, 9, vector(1.0, 1.0, 0.0)) if client == 1 else Update(client, 0, None)
            elif client != 1:
                recovering = bool(params["w"][0] > 0)
                change = vector(-1.0, 0.0, 1.0) if recovering else vector(0.0, client + 1.0, 0.0)
                yield Update(client, client + 1, change)


@pytest.mark.parametrize("request_", [ClientRequest(clients=(1,)), SampleRequest(ids=("x",))], ids=["client", "sample"])
def test_both_stages_by_hand(request_) -> None:
    """(1, 1, 0) without what (0, y, 0) sees is (1, 0, 0), at length sqrt 2: the state is (sqrt 2, 0, 0).

    Then both retained clients answer (-1, 0, 1). Back is (-1, 0, 0), so (0, 0, 1) is left, at length sqrt 2 again.
    """
    trained = Trained(None, TrainingConfig(rounds=5), 0.07, 0)  # type: ignore[arg-type]
    trained.__dict__["final"] = vector(0.0, 0.0, 0.0)
    method = FedOsd()
    first, second = method.unlearn(trained, request_, Scripted())
    root = 2**0.5
    torch.testing.assert_close(first.state["w"], torch.tensor([root, 0.0, 0.0]))
    torch.testing.assert_close(second.state["w"], torch.tensor([root, 0.0, root]))
    assert [first.phase, second.phase] == ["descent", "recovery"]
    assert method.rounds(trained.training, request_) == 2


@pytest.mark.parametrize("scope", ["client", "sample"])
def test_forget_pairs_fall_far_and_others_are_repaired(effect, few, scope: str) -> None:
    found = effect(ClientRequest(clients=(1,)) if scope == "client" else few, "fed_osd")
    assert found.after < found.before - 1 and found.kept_after > found.kept_before


def test_clients_with_both_kinds_of_pairs_play_both_parts(jobs, few) -> None:
    given = [(client, job.data, job.stream) for client, job in jobs(few, "fed_osd")]
    descent = [(k, "retain", "fed_osd") for k in range(4)] + [(k, "forget", "fed_osd-forget") for k in range(4)]
    assert given == descent + [(k, "retain", "fed_osd") for k in range(4)]
    leaving = [(client, job.data) for client, job in jobs(ClientRequest(clients=(1,)), "fed_osd") if client == 1]
    assert leaving == [(1, "forget")]
