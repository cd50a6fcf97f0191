"""Gradient ascent: it forgets, it ends at chance, and only holders of forget pairs climb."""

import pytest
import torch

from ease.methods.grad_ascent import GradAscent
from ease.requests.request import ClientRequest

CLIENT = ClientRequest(clients=(1,))


def test_a_clients_pairs_fall_far_and_others_are_repaired(effect) -> None:
    found = effect(CLIENT, "grad_ascent")
    assert found.after < found.before - 1 and found.kept_after > found.kept_before


def test_single_pairs_fall_far_and_others_are_repaired(effect, few) -> None:
    found = effect(few, "grad_ascent")
    assert found.after < found.before - 1 and found.kept_after > found.kept_before


def test_without_fine_tuning_the_damage_shows(effect) -> None:
    found = effect(CLIENT, "grad_ascent", "finetune_share=0")
    assert found.kept_after < found.kept_before - 1


def test_ascent_stops_at_chance(learnt) -> None:
    """Once every batch of forget pairs is told by chance alone, nothing moves any more."""
    method = GradAscent(forget_rounds=6, finetune_share=0)
    states = [step.state for step in method.unlearn(learnt.trained, CLIENT, learnt.world.federation)]
    assert (states[0] - learnt.trained.final).norm() > 0.1
    assert all(torch.equal(states[-1][name], states[-2][name]) for name in states[-1].tensors)


@pytest.mark.parametrize("scope", ["client", "sample"])
def test_holders_climb_and_the_others_repair(learnt, jobs, few, scope: str) -> None:
    """A leaving client is asked in the ascent alone; of single pairs the server does not know who holds them."""
    request, holders, repairers = (CLIENT, [1], [0, 2, 3]) if scope == "client" else (few, [0, 1, 2, 3], [0, 1, 2, 3])
    given = jobs(request, "grad_ascent", "forget_rounds=2", "rate=0.5", "clip=0.7")
    ascent = [(client, job) for client, job in given if job.data == "forget"]
    assert [client for client, _ in ascent] == holders * 2
    assert [client for client, _ in given[len(ascent) :]] == repairers
    assert {(job.data, job.objective, job.clip) for _, job in given[len(ascent) :]} == {("retain", "align", None)}
    for _, job in ascent:
        assert job.settings == {"retain": 0.0, "forget": 1.0} and job.clip == 0.7 and job.epochs == 1
        assert job.optimiser.learning_rate == learnt.trained.training.learning_rate * 0.5
