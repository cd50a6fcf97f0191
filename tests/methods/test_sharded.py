"""Sharded training and retraining: only affected shards work again, and the result is that of a whole retraining."""

from itertools import islice

import pytest
import torch

from ease.audit.shadows import train_federations
from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.meter import Metered
from ease.methods import make_method
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.answers import StoredAnswer, check_method, default_method, open_world, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run

SHARDED = ("partition.clients=5", "training.shards=2", "training.rounds=3")


@pytest.fixture(scope="module")
def run(small, shared_cache, tmp_path_factory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        run = Run.create(tmp_path_factory.mktemp("sharded") / "run", load_config(None, (*small, *SHARDED)))
        list(run.train(open_world(run)))
        return run


def requests(world) -> dict[str, ClientRequest | SampleRequest]:
    return {
        "client": ClientRequest(clients=(1,)),
        "sample": SampleRequest(ids=tuple(sorted(world.shards[3].train_ids[:4]))),
    }


@pytest.mark.parametrize("kind", ["client", "sample"])
def test_the_result_is_that_of_training_all_shards_again(run, kind) -> None:
    """To the byte, if retraining draws the same batches; and the other shard's clients make no step."""
    world, trained = open_world(run), trained_of(run)
    request = requests(world)[kind]
    mine, whole = Metered(world.federation), Metered(world.federation)
    steps = list(make_method("sharded").unlearn(trained, request, mine))
    again = list(make_method("retrain", ("keep=true",)).unlearn(trained, request, whole))
    assert [step.state for step in steps] == [step.state for step in again]
    assert steps[-1].notes["shards"] == [1] and steps[-1].state != trained.final
    assert mine.cost.pairs_passed < 0.8 * whole.cost.pairs_passed


def test_an_interrupted_training_continues_every_shard(run, tmp_path) -> None:
    stopped = Run.create(tmp_path / "run", run.config)
    world = open_world(stopped)
    list(islice(stopped.train(world), 2))
    list(Run.load(stopped.folder).train(world))
    assert stopped.history.state_path(3).read_bytes() == run.history.state_path(3).read_bytes()


def test_a_second_request_continues_from_the_first_result(ease, run, tmp_path) -> None:
    """Once released, the stored updates are those without the first client."""
    folder = tmp_path / "run"
    copied = Run.create(folder, run.config)
    list(copied.train(open_world(copied)))
    assert ease("forget", folder, "--client", 1, "--quiet").code == 0
    assert ease("release", folder, "--request", "client-1").code == 0
    second = ease("forget", folder, "--client", 3, "--quiet")
    assert second.code == 0, second.err
    both = Run.create(tmp_path / "both", run.config)
    list(both.train(open_world(both)))
    trained, federation = trained_of(both), open_world(both).federation
    *_, last = make_method("sharded").unlearn(trained, ClientRequest(clients=(1, 3)), federation)
    assert StoredAnswer(folder / "requests" / "client-3" / "sharded").model() == last.state


def test_only_methods_that_know_shards_answer(run, small, tmp_path) -> None:
    assert default_method(run).name == "sharded"
    with pytest.raises(UserError, match="trained in shards"):
        check_method(run, make_method("ease"))
    whole = Run.create(tmp_path / "whole", load_config(None, small))
    with pytest.raises(UserError, match=r"training\.shards=4"):
        check_method(whole, make_method("sharded"))


@pytest.mark.parametrize(
    "settings", [{"history": "client"}, {"participation": 0.5}, {"strategy": "fedadam"}, {"history_every": 2}]
)
def test_shards_need_all_stored_updates(settings) -> None:
    with pytest.raises(ValueError, match=r"training\.shards"):
        TrainingConfig(shards=2, **settings)


def test_shadows_are_trained_in_shards_too(run) -> None:
    world, trained, config = open_world(run), trained_of(run), run.config
    model, activations, device = world.server.model, world.evaluator.activations, world.server.device
    parts = [tuple(world.shards)], ["train"], trained.initial, config.training, config.seed, config.model.temperature
    *_, (last,) = train_federations(model, activations, device, *parts)
    for name in last.state.tensors:
        torch.testing.assert_close(last.state[name], trained.final[name], rtol=1e-3, atol=1e-5)
