"""SOUL: Sophia runs at the clients with steps that are bounded, and forget pairs fall."""

import pytest

from ease.federation.local import work
from ease.federation.protocol import Optimiser
from ease.requests.request import ClientRequest

CLIENT = ClientRequest(clients=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["client", "sample"])
def test_forget_pairs_fall_while_others_stay(effect, few, scope: str) -> None:
    found = effect(CLIENT if scope == "client" else few, "soul", "share=0.5")
    assert found.after < found.before - 0.5 and found.kept_after > found.kept_before


@pytest.mark.parametrize("scope", ["client", "sample"])
def test_clients_minimise_the_difference_by_sophia(jobs, few, scope: str) -> None:
    given = jobs(CLIENT if scope == "client" else few, "soul", "retain=3", "learning_rate=2e-4")
    assert sorted(client for client, _ in given) == [0, 1, 2, 3]
    for _, job in given:
        assert job.objective == "difference" and job.settings == {"retain": 3.0, "forget": 1.0}
        assert job.optimiser == Optimiser(kind="sophia", learning_rate=2e-4)


def test_no_value_moves_further_than_the_rate_in_a_step(learnt, few, local_job) -> None:
    """Three epochs of one batch are three steps. Small gradients are clipped to the whole rate, so some go all the way.

    The state starts anew with the job: the same job twice gives the same change.
    """
    job = local_job(
        request=few, objective="difference", settings={"retain": 2.0, "forget": 1.0}, epochs=3, batch_size=1000,
        optimiser=Optimiser(kind="sophia", learning_rate=1e-3),
    )  # fmt: skip
    client = learnt.world.federation.data[0]
    one, two = (work(learnt.world.server.model, learnt.trained.final, client, job).delta for _ in range(2))
    assert one is not None and two is not None and (one - two).norm() == 0
    largest = max(float(tensor.abs().max()) for tensor in one.tensors.values())
    assert largest == pytest.approx(3e-3, rel=1e-3)
