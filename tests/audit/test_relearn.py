"""Relearning curves by hand, and a model that merely hides what it knows against one that never knew it."""

import numpy as np
import pytest
import torch

from ease.audit.relearn import CHECKPOINTS, Curve, Watch, relearn
from ease.audit.statistic import Gauge
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.seeding import generator

TURNED = 16
REQUEST = ClientRequest(clients=(1,))


def curve(*levels: float, lost: float = 4.0) -> Curve:
    return Curve(tuple(range(len(levels))), levels, lost)


def test_the_share_that_is_back_by_hand() -> None:
    """4 were lost from a start of 1: half is back at 3, all at 5."""
    assert curve(1, 2, 2.9, 3, 5).share_back == 1.0
    assert curve(1, 2, 2.5).share_back == pytest.approx(0.375)
    assert curve(1, 3, 0).share_back == pytest.approx(-0.25)


@pytest.mark.parametrize("lost", [0.0, -1.0])
def test_a_model_that_lost_nothing_relearns_at_once(lost: float) -> None:
    assert curve(5, 4, 3, lost=lost).share_back == 1.0


@pytest.fixture(scope="module")
def laboratory(learnt):
    """How the trained model, one that hides and retrain take a few forget pairs, and what each starts from."""
    world, trained = learnt.world, learnt.trained
    test, forget = world.evaluator.pairs.indices("test"), world.shards[1].train
    gauge = Gauge(world.server.model, world.evaluator.activations, test[:20], trained.temperature, world.server.device)
    *_, last = Retrain().unlearn(trained, REQUEST, world.federation)
    turned = torch.arange(32)
    turned[:TURNED] = turned[:TURNED].roll(1)  # the captions' space is turned against that of the images, and intact
    names = [f"text.projector.1.{part}" for part in ("weight", "bias")]
    hidden = trained.final.replace({name: trained.final[name][turned] for name in names})

    def run(*states: Params) -> list[Curve]:
        job = trained.training.job(0, 0, trained.temperature, "relearn")
        drawn = generator(0, "relearn")
        watch = Watch(gauge, forget[16:], test[20:])
        margins, top = [watch.margin(state) for state in states], watch.margin(trained.final)
        return relearn(watch, states, margins, top, forget[:16], job, drawn)

    return run, hidden, last.state, trained.final


def test_equal_states_have_equal_curves_and_the_trained_one_lost_nothing(laboratory) -> None:
    run, hidden, _, final = laboratory
    one, other, trained = run(hidden, hidden, final)
    assert one.steps == (0, *CHECKPOINTS)
    np.testing.assert_allclose(one.levels, other.levels, atol=2e-3)
    assert trained.lost == 0 and trained.share_back == 1
    (alone,) = run(hidden)
    np.testing.assert_allclose(one.levels, alone.levels, atol=2e-3)


def test_hidden_pairs_are_relearned_and_unknown_ones_are_not(laboratory) -> None:
    run, hidden, never, _ = laboratory
    hiding, unknown = run(hidden, never)
    assert hiding.lost > 1 and unknown.lost > 1
    assert hiding.share_back > 0.25 and unknown.share_back < 0.05
    gains = [[level - one.levels[0] for level in one.levels[1:]] for one in (hiding, unknown)]
    assert all(first > second + 0.1 for first, second in zip(*gains, strict=True))
