"""Training strategies: by hand, on both engines, and resumed to the byte."""

from itertools import islice

import pytest
import torch

from ease.errors import UserError
from ease.federation.engines import make_engine
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.strategies.fedadam import ADAPTIVITY, DECAY, FedAdam
from ease.methods import METHODS, make_method
from ease.requests.request import ClientRequest
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run


def trained(world, **settings):
    """The last round of a short training of the world's federation."""
    config = world.config.training.model_copy(update=settings)
    *_, last = fedavg(world.server.initial(), world.federation, config, 0, 0.1)
    return last


def test_fedprox_holds_clients_near_the_start(world) -> None:
    start = world.server.initial()
    free, held = (
        trained(world, rounds=1, strategy=name, proximal=5.0, learning_rate=0.05) for name in ("fedavg", "fedprox")
    )
    assert 0 < (held.state - start).norm() < 0.9 * (free.state - start).norm()


def test_fedprox_with_next_to_no_weight_is_fedavg(world) -> None:
    free, held = (trained(world, strategy=name, proximal=1e-12) for name in ("fedavg", "fedprox"))
    for name in free.state.tensors:
        torch.testing.assert_close(free.state[name], held.state[name], rtol=1e-4, atol=1e-6)


def test_fedprox_is_the_same_on_both_engines(world) -> None:
    jobs = world.config.training.model_copy(update={"strategy": "fedprox", "proximal": 1.0, "rounds": 2})
    states = []
    for engine in ("sequential", "vectorized"):
        parts = world.server.model, world.shards, world.evaluator.activations, world.server.device
        *_, last = fedavg(world.server.initial(), make_engine(engine, *parts), jobs, 0, 0.1)
        states.append(last.state)
    for name in states[0].tensors:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-3, atol=1e-5)


def test_fedadam_makes_the_steps_of_adam(toy_params) -> None:
    """Two updates of the same sign, by hand."""
    rule, (one, two), tau = FedAdam(0.1), DECAY, ADAPTIVITY
    first, second = (1 - one) * 2.0, two * tau**2 + (1 - two) * 4.0
    expected = 0.1 * first / (second**0.5 + tau)
    step = rule.step(toy_params(2.0))
    assert all(torch.allclose(each, torch.full_like(each, expected)) for each in step.tensors.values())
    first, second = one * first + (1 - one) * 1.0, two * second + (1 - two) * 1.0
    expected = 0.1 * first / (second**0.5 + tau)
    step = rule.step(toy_params(1.0))
    assert all(torch.allclose(each, torch.full_like(each, expected)) for each in step.tensors.values())


@pytest.mark.parametrize("strategy", ["fedprox", "fedadam"])
def test_an_interrupted_training_ends_in_the_same_bytes(small, tmp_path, strategy) -> None:
    config = load_config(None, (*small, "training.rounds=3", f"training.strategy={strategy}"))
    whole, stopped = (Run.create(tmp_path / name, config) for name in ("whole", "stopped"))
    world = open_world(whole)
    assert len(list(whole.train(world))) == 3
    list(islice(stopped.train(world), 1))
    assert len(list(Run.load(stopped.folder).train(world))) == 2
    assert whole.history.state_path(3).read_bytes() == stopped.history.state_path(3).read_bytes()
    plain = Run.create(tmp_path / "plain", load_config(None, (*small, "training.rounds=3")))
    list(plain.train(world))
    assert plain.history.state(3) != whole.history.state(3)
    federation, request = world.federation, ClientRequest(clients=(1,))
    for name in ("finetune", "retrain"):
        *_, last = make_method(name).unlearn(trained_of(whole), request, federation)
        assert last.state.is_finite()


def test_methods_that_subtract_stored_updates_refuse_a_server_that_makes_steps_of_its_own() -> None:
    adam, prox = TrainingConfig(strategy="fedadam"), TrainingConfig(strategy="fedprox")
    for name, kind in METHODS.items():
        if "history" in kind.needs and "fedavg" in kind.trainers:
            with pytest.raises(UserError, match=f"{name}: training.strategy"):
                make_method(name).check(adam)
            make_method(name).check(prox)


def test_a_strategy_that_needs_all_updates_refuses_a_history_without_them() -> None:
    for settings in ({"history": "client"}, {"history_every": 2}):
        with pytest.raises(ValueError, match="resumes from the stored updates"):
            TrainingConfig(strategy="fedadam", **settings)
