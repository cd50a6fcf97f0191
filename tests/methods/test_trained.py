"""What a method is given: where it starts, what is gone already, and in which order the data were trained on."""

from dataclasses import replace

import pytest

from ease.federation.fedavg import fedavg
from ease.methods import METHODS, make_method
from ease.methods.base import Order, Trained
from ease.requests.request import ClientRequest
from ease.testing import Spy

CLIENT = ClientRequest(clients=(1,))
AFRESH = {"retrain", "fed_eraser", "fed_recover", "rollback", "exact", "sharded", "sifu", "noisy_finetune"}
"""Methods that start from an earlier round, clip the state that they start from, or solve again."""


def test_a_training_that_nothing_was_forgotten_of(learnt) -> None:
    trained = learnt.trained
    assert trained.start is trained.final and trained.gone == () and trained.order == Order(trained.seed, "train")
    assert trained.training_job(3) == trained.training.job(3, trained.seed, trained.temperature)


def test_the_training_job_is_the_job_of_that_round(learnt) -> None:
    """Of a shadow too, which was trained with another stream than the method's own numbers come from."""
    spy = Spy(learnt.world.federation)
    training = learnt.trained.training.model_copy(update={"rounds": 2})
    list(fedavg(learnt.trained.initial, spy, training, 5, 0.07, stream="shadow-4"))
    shadow = Trained(learnt.trained.history, training, 0.07, seed=99, trained_with=Order(5, "shadow-4"))
    each = len(spy.clients)
    assert [shadow.training_job(1)] * each + [shadow.training_job(2)] * each == [job for _, job in spy.asked]


def test_fed_recover_asks_in_the_order_of_the_training(learnt, jobs) -> None:
    assert {(job.seed, job.stream) for _, job in jobs(CLIENT, "fed_recover")} == {(learnt.trained.seed, "train")}
    shadow = replace(learnt.trained, seed=8, trained_with=Order(5, "shadow-4"))
    spy = Spy(learnt.world.federation)
    next(make_method("fed_recover").unlearn(shadow, CLIENT, spy))
    assert [(client, job.seed, job.stream) for client, job in spy.asked] == [(c, 5, "shadow-4") for c in (0, 2, 3)]


@pytest.mark.parametrize("name", sorted(METHODS.keys() - AFRESH))
def test_methods_continue_from_what_earlier_requests_left(learnt, name: str) -> None:
    """The first state is near the start that was given, and far from it where the training alone was given."""
    trained = learnt.trained
    shift = trained.final.map(lambda tensor: tensor * 0 + 0.5)
    later = replace(trained, answered=trained.final + shift)
    first, second = (
        next(make_method(name).unlearn(each, CLIENT, learnt.world.federation)).state for each in (trained, later)
    )
    moved = second - first
    assert moved.dot(shift) > 0.5 * shift.dot(shift) or name == "not"
    if name == "not":  # the negated layer moved the other way
        assert (moved.norm() / shift.norm()) == pytest.approx(1, rel=1e-3)
