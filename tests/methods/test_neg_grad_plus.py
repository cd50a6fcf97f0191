"""NegGrad+: its weights by linearity of the gradient, and its effect on the small run."""

import pytest
import torch

from ease.federation.local import work
from ease.requests.request import ClientRequest

CLIENT = ClientRequest(clients=(1,))


def test_one_step_is_the_weighted_sum_of_descent_and_ascent(learnt, few, local_job) -> None:
    """The same batch in one SGD step: 0.9 · (step on L_r alone) + 0.1 · (step on -L_f alone)."""
    client = learnt.world.federation.data[0]

    def step(retain: float, forget: float):
        settings = {"retain": retain, "forget": forget}
        job = local_job(request=few, objective="difference", settings=settings, batch_size=1000)
        delta = work(learnt.world.server.model, learnt.trained.final, client, job).delta
        assert delta is not None
        return delta

    descent, ascent, both = step(1, 0), step(0, 1), step(0.9, 0.1)
    assert descent.norm() > 0.01 and ascent.norm() > 0.01 and abs(descent.dot(ascent)) < descent.norm() * ascent.norm()
    for name in both.tensors:
        torch.testing.assert_close(both[name], 0.9 * descent[name] + 0.1 * ascent[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scope", ["client", "sample"])
def test_every_client_gets_both_weights(jobs, few, scope: str) -> None:
    given = jobs(CLIENT if scope == "client" else few, "neg_grad_plus", "balance=0.96")
    assert sorted(client for client, _ in given) == [0, 1, 2, 3]
    for _, job in given:
        assert job.objective == "difference" and job.data == "all" and job.clip == 1.0
        assert job.settings == pytest.approx({"retain": 0.96, "forget": 0.04})


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["client", "sample"])
def test_forget_pairs_fall_while_others_are_learnt_on(effect, few, scope: str) -> None:
    found = effect(CLIENT if scope == "client" else few, "neg_grad_plus", "share=0.5")
    assert found.after < found.before - 1 and found.kept_after > found.kept_before + 1


@pytest.mark.slow
def test_more_ascent_forgets_more(effect, few) -> None:
    strong, weak = (effect(few, "neg_grad_plus", "share=0.5", f"balance={b}") for b in (0.8, 0.99))
    assert strong.after < weak.after - 1
