"""What every method keeps to, whatever it does: one battery over all of them and all kinds of request."""

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from shutil import copytree

import pytest
import torch

from ease.config import to_toml
from ease.federation.history import History
from ease.federation.journal import Journal
from ease.federation.loop import Loop
from ease.federation.metered import Cost, Metered
from ease.federation.protocol import Federation, LocalJob, Update
from ease.methods import METHODS, make_method
from ease.methods.base import Step, Trained
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import trained_of
from ease.runs.run import Run
from ease.runs.world import World

LEAVING = 1
SCOPES = ("client", "class", "sample")
READS_FORGET_PAIRS = {"levels", "displace", "probe"}
"""Objectives that look at forget pairs whatever `data` says."""

every_method = pytest.mark.parametrize("name", sorted(METHODS))
every_request = pytest.mark.parametrize("scope", SCOPES)


class Spy:
    """A federation that notes every job of every client."""

    def __init__(self, inner: Federation) -> None:
        self.inner, self.asked = inner, list[tuple[int, LocalJob]]()

    @property
    def clients(self) -> Sequence[int]:
        return self.inner.clients

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        self.asked += [(client, job) for client in clients]
        yield from self.inner.run(params, job, clients)


class Broken(Spy):
    """One client's training went wrong: each number of what it learnt is not a number."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in super().run(params, job, clients):
            if update.client == 0 and "loss" in update.values:
                delta = None if update.delta is None else update.delta * torch.nan
                spoilt = {n: v * torch.nan if v.is_floating_point() else v for n, v in update.values.items()}
                update = replace(update, delta=delta, values=spoilt)
            yield update


@dataclass(frozen=True)
class Played:
    """One method's answer to one request, seen from outside."""

    steps: list[Step]
    asked: list[tuple[int, LocalJob]]
    cost: Cost
    given: tuple[dict[str, str], dict[str, str]]
    """What the method was given, before and after: hashes of its files and of the states in memory."""


@dataclass(frozen=True)
class Stage:
    """A small trained run, and what each method does on it."""

    world: World
    trained: Trained
    requests: dict[str, Request]
    play: Callable[[str, str], Played]

    def unlearn(self, name: str, scope: str, federation: Federation, trained: Trained | None = None) -> Iterator[Step]:
        return make_method(name).unlearn(trained or self.trained, self.requests[scope], federation)


@pytest.fixture(scope="module")
def stage(small_config, shared_cache, tmp_path_factory) -> Stage:
    """60 pairs at 3 clients, 5 rounds: every phase of every method has a round."""
    config = small_config("training.rounds=5", "partition.validation_share=0.3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        world = World.open(config)
    run = Run.create(tmp_path_factory.mktemp("contract") / "run", config)
    list(run.train(world))
    ids = tuple(pair_id for shard in world.shards[:2] for pair_id in shard.train_ids[:4])
    requests: dict[str, Request] = {
        "client": ClientRequest(clients=(LEAVING,)),
        "class": ClassRequest(classes=(2,)),
        "sample": SampleRequest(ids=ids),
    }

    trained = trained_of(run)

    @cache
    def play(name: str, scope: str) -> Played:
        before = fingerprint(trained)
        spy = Spy(world.federation)
        metered = Metered(spy)
        steps = list(make_method(name).unlearn(trained, requests[scope], metered))
        return Played(steps, spy.asked, metered.cost, (before, fingerprint(trained)))

    return Stage(world, trained, requests, play)


def fingerprint(trained: Trained) -> dict[str, str]:
    """Hashes of every file of the history, and of both ends of the training as they are held in memory."""
    files = [path for path in trained.history.folder.rglob("*") if path.is_file()]
    contents = {str(path): path.read_bytes() for path in files}
    for end, state in {"initial": trained.initial, "final": trained.final}.items():
        contents |= {f"{end}/{name}": tensor.numpy().tobytes() for name, tensor in state.tensors.items()}
    return {name: hashlib.sha256(each).hexdigest() for name, each in contents.items()}


def equal(one: Params, two: Params) -> bool:
    return one.blocks == two.blocks and all(torch.equal(one[name], two[name]) for name in one.tensors)


@every_method
@every_request
def test_every_round_gives_a_finite_state_of_the_same_layout(stage: Stage, name: str, scope: str) -> None:
    steps, start = stage.play(name, scope).steps, stage.trained.initial
    assert len(steps) == make_method(name).rounds(stage.trained.training, stage.requests[scope]) > 0
    for step in steps:
        assert step.phase and step.state.is_finite() and step.state.blocks == start.blocks
        layout = {key: (tensor.shape, tensor.dtype) for key, tensor in step.state.tensors.items()}
        assert layout == {key: (tensor.shape, tensor.dtype) for key, tensor in start.tensors.items()}
    assert not equal(steps[-1].state, stage.trained.final)


@every_method
@every_request
def test_a_method_needs_no_more_than_it_says(stage: Stage, poison, tmp_path: Path, name: str, scope: str) -> None:
    """Whatever it does not list is taken away or spoilt, and its states stay the same to the byte."""
    needs, request = METHODS[name].needs, stage.requests[scope]
    data = dict((stage.world.federation if "forget data" in needs else poison(stage.world, request)).data)
    if scope == "client" and "leaving client" not in needs:
        del data[LEAVING]
    trained = stage.trained
    if "history" not in needs:
        history = History(copytree(trained.history.folder, tmp_path / "history"))
        ends = {history.state_path(number) for number in (0, trained.training.rounds)}
        for path in set(history.folder.rglob("*.safetensors")) - ends:
            path.unlink()
        trained = replace(trained, history=history)
    starved = stage.unlearn(name, scope, Loop(stage.world.model, data), trained)
    for one, two in zip(starved, stage.play(name, scope).steps, strict=True):
        assert equal(one.state, two.state)


@every_method
@every_request
def test_jobs_name_only_the_data_a_method_may_read(stage: Stage, name: str, scope: str) -> None:
    needs, asked = METHODS[name].needs, stage.play(name, scope).asked
    if "forget data" not in needs:
        assert {job.data for _, job in asked} == {"retain"}
        assert not {job.objective for _, job in asked} & READS_FORGET_PAIRS
    if scope == "client" and "leaving client" not in needs:
        assert LEAVING not in {client for client, _ in asked}
    assert all(job.request == stage.requests[scope] for _, job in asked)


@every_method
@every_request
def test_stopping_after_every_round_changes_no_byte(stage: Stage, tmp_path: Path, name: str, scope: str) -> None:
    """Each time one round further from the journal alone; the last run is the whole method, asking no one again."""
    whole = stage.play(name, scope)
    asked = 0
    for stop in range(1, len(whole.steps) + 1):
        spy = Spy(stage.world.federation)
        steps = list(islice(stage.unlearn(name, scope, Journal(spy, tmp_path)), stop))
        asked += len(spy.asked)
    assert asked == len(whole.asked)
    for one, two in zip(steps, whole.steps, strict=True):
        assert equal(one.state, two.state) and one.notes == two.notes and one.loss == two.loss


@every_method
@every_request
def test_nothing_that_was_given_is_changed(stage: Stage, name: str, scope: str) -> None:
    before, after = stage.play(name, scope).given
    assert before == after and "final/image.projector.0.weight" in before


@every_method
@every_request
def test_a_client_that_sends_no_numbers_is_refused_and_the_round_goes_on(stage: Stage, name: str, scope: str) -> None:
    steps = list(stage.unlearn(name, scope, Broken(stage.world.federation)))
    assert len(steps) == len(stage.play(name, scope).steps)
    assert all(step.state.is_finite() for step in steps)
    refused = [step.notes["rejected"] for step in steps if step.notes.get("rejected")]
    assert refused and {client for each in refused for client in each} == {0}
    if (name, scope) != ("multi_delete", "client"):  # its retained clients start where their loss is least: no change
        assert not equal(steps[-1].state, stage.play(name, scope).steps[-1].state)


@every_method
@every_request
def test_what_travels_is_metered(stage: Stage, name: str, scope: str) -> None:
    cost = stage.play(name, scope).cost
    assert cost.bytes_down > 0 and cost.bytes_up > 0 and cost.pairs_trained > 0
    assert cost.messages == len(stage.play(name, scope).asked)


@every_method
def test_settings_survive_toml(name: str) -> None:
    method = make_method(name)
    assert make_method(name, table=tomllib.loads(to_toml(method))) == method


@every_method
def test_a_method_says_what_it_is(name: str) -> None:
    kind = METHODS[name]
    assert kind.name == name and kind.title and kind.source and kind.__doc__
    assert all(field.description for key, field in kind.model_fields.items() if key != "method")
