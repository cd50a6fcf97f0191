"""MultiDelete: the teacher is the trained model, sent once, and forget pairs fall while others stay."""

import pytest
import torch

from ease.federation.codec import encode_state
from ease.federation.meter import Metered
from ease.methods.multi_delete import MultiDelete
from ease.requests.request import ClientRequest

CLIENT = ClientRequest(clients=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["client", "sample"])
def test_forget_pairs_fall_while_others_stay(effect, few, scope: str) -> None:
    found = effect(CLIENT if scope == "client" else few, "multi_delete", "share=0.5")
    assert found.after < found.before - 0.5
    assert abs(found.kept_after - found.kept_before) < 0.3


def test_at_the_trained_model_retained_pairs_have_nothing_to_lose(learnt) -> None:
    """Nothing has drifted there, so in the first round the withdrawing client alone moves the state."""
    first = next(MultiDelete().unlearn(learnt.trained, CLIENT, learnt.world.federation))
    assert first.loss == pytest.approx(0, abs=1e-9)
    assert (first.state - learnt.trained.final).norm() > 0.1


@pytest.mark.slow
def test_the_teacher_is_the_trained_model_and_is_sent_once(learnt, few, jobs) -> None:
    """It is the state of the first round, so it comes with that: two rounds cost each client two states, not three."""
    given = jobs(few, "multi_delete", "share=0.34")
    assert len(given) == 8
    assert all(torch.equal(job.reference[n], t) for _, job in given for n, t in learnt.trained.final.tensors.items())
    metered = Metered(learnt.world.federation)
    list(MultiDelete(share=0.34).unlearn(learnt.trained, few, metered))
    state = len(encode_state(learnt.trained.final))
    assert 2 * 4 * state < metered.cost.bytes_down < 2 * 4 * (state + 2000)
