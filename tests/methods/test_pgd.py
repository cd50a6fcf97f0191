"""PGD: the model without a client, the ball, and the effect on the small run."""

from dataclasses import replace

import pytest
import torch

from ease.methods.base import Trained
from ease.methods.pgd import Pgd, without_clients
from ease.params import Params, weighted_mean
from ease.requests.request import ClientRequest

CLIENT = ClientRequest(clients=(1,))


def last_models(learnt, clients: list[int]) -> Params:
    """The mean of the clients' own models after the last round, by pairs: computed from all their stored updates."""
    history, last = learnt.trained.history, learnt.trained.training.rounds
    pairs = history.pairs(last)
    updates = [(pairs[client], history.update(last, client).change) for client in clients]
    return history.state(last - 1) + weighted_mean(updates)


def close(one: Params, two: Params) -> bool:
    return (one - two).norm() < 1e-5 * one.norm()


@pytest.mark.parametrize("leaving", [(1,), (0, 3)], ids=str)
def test_the_rest_is_the_mean_of_the_other_clients_models(learnt, leaving) -> None:
    staying = [client for client in range(4) if client not in leaving]
    rest = without_clients(learnt.trained, leaving)
    assert close(rest, last_models(learnt, staying))
    assert not close(rest, learnt.trained.final)


def test_with_equal_weights_it_is_the_papers_formula(learnt) -> None:
    """(K w_n - w_k) / (K - 1) with K = 4; the trained state is taken as it is, whatever made it."""
    uniform = learnt.trained.training.model_copy(update={"weighting": "uniform"})
    trained = replace(learnt.trained, training=uniform)
    expected = (4 * trained.final - last_models(learnt, [1])) * (1 / 3)
    assert close(without_clients(trained, (1,)), expected)


class LastRound:
    """A history whose last round was made by other clients than the rest."""

    def __init__(self, history, pairs: dict[int, int]) -> None:
        self.history, self.made_by = history, pairs

    def __getattr__(self, name: str):
        return getattr(self.history, name)

    def pairs(self, number: int):
        return self.made_by


def test_a_client_that_was_not_drawn_has_nothing_to_subtract(learnt) -> None:
    trained = replace(learnt.trained, history=LastRound(learnt.trained.history, {0: 5, 2: 5}))
    rest = without_clients(trained, (1,))
    assert all(torch.equal(rest[name], trained.final[name]) for name in rest.tensors)


def test_if_no_one_else_was_drawn_the_round_is_undone(learnt) -> None:
    trained: Trained = replace(learnt.trained, history=LastRound(learnt.trained.history, {1: 5}))
    rest, start = without_clients(trained, (1,)), trained.history.state(trained.training.rounds - 1)
    assert all(torch.equal(rest[name], start[name]) for name in rest.tensors)


@pytest.mark.parametrize("scope", ["client", "sample"])
@pytest.mark.parametrize("radius", [0.01, 1 / 3])
def test_ascent_ends_inside_the_ball(learnt, few, scope: str, radius: float) -> None:
    request = CLIENT if scope == "client" else few
    centre = last_models(learnt, [0, 2, 3]) if scope == "client" else learnt.trained.final
    first = next(Pgd(radius=radius).unlearn(learnt.trained, request, learnt.world.federation))
    limit = radius * (learnt.trained.final - learnt.trained.initial).norm()
    distance = (first.state - centre).norm()
    assert 0.1 * limit < distance < limit * (1 + 1e-4)
    if scope == "client" and radius == 0.01:
        assert distance == pytest.approx(limit, rel=1e-3)  # one client, held at the edge


@pytest.mark.parametrize("scope", ["client", "sample"])
def test_forget_pairs_fall_far_and_others_are_repaired(effect, few, scope: str) -> None:
    found = effect(CLIENT if scope == "client" else few, "pgd")
    assert found.after < found.before - 1 and found.kept_after > found.kept_before


def test_only_the_leaving_client_ascends_and_is_then_left_out(jobs) -> None:
    given = jobs(CLIENT, "pgd", "epochs=3")
    assert [(client, job.data) for client, job in given] == [(1, "forget"), (0, "retain"), (2, "retain"), (3, "retain")]
    ascent = given[0][1]
    assert (ascent.objective, ascent.epochs, ascent.clip) == ("difference", 3, 5.0)
    assert all(job.radius is None and job.clip is None for _, job in given[1:])
