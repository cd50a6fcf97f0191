"""Engines agree: in double precision, where rounding stays small however training enlarges it, to the ninth digit."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ease.federation.engines import make_engine, prefers_vectorized
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.history import History
from ease.federation.sequential import Sequential
from ease.federation.vectorized import Vectorized
from ease.methods import make_method
from ease.methods.base import Trained
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.model.tiny import load_tiny
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request

SETTINGS = (
    "data.train=240",
    "data.validation=40",
    "data.test=120",
    "partition.clients=4",
    "training.rounds=4",
    "gallery=40",
)
TRAINING = TrainingConfig(rounds=3, local_epochs=1, batch_size=8, learning_rate=0.5)
NEAR = 1e-9
"""Largest difference of a value after each round: rounding is 2e-16, and a round enlarges it less than 1e6 times."""
SINGLE = 1e-6
"""The same where a method keeps some numbers in single precision, as the paper's EASE keeps its directions."""
METHODS: tuple[tuple[str, tuple[str, ...], Request], ...] = (
    ("retrain", (), ClassRequest(classes=(2,))),
    ("grad_ascent", (), ClientRequest(clients=(1,))),
    ("fed_osd", (), ClassRequest(classes=(2,))),
    ("ease", (), ClientRequest(clients=(1,))),
    ("ease_paper", ("delta=0.5", "reference=initial"), ClientRequest(clients=(1,))),
)
"""Jobs of several kinds; none that sends a state in half precision, which clients take up in single."""

Engines = Callable[[str, str], Sequential]


@pytest.fixture(scope="module")
def exact(world) -> Engines:
    """Engines over a model and activations in double precision."""
    kept = world.evaluator.activations
    model = copy.deepcopy(world.server.model).double()
    arrays = {name: np.asarray(getattr(kept, name), np.float64) for name in ("image", "text")}
    activations = replace(kept, **arrays)

    def engine(kind: str, device: str = "cpu") -> Sequential:
        place = torch.device(device)
        return make_engine(kind, copy.deepcopy(model).to(place), world.shards, activations, place)  # type: ignore[arg-type]

    return engine


def trained_by(engine: Sequential, folder: Path) -> Trained:
    start = engine.model.initial().to("cpu")
    assert all(tensor.dtype == torch.float64 for tensor in start.tensors.values())
    history = History(folder, durable=False)
    start.save(history.initial_path, durable=False)
    for finished in fedavg(start, engine, TRAINING, 3, 0.07):
        history.append(finished)
    return Trained(history, TRAINING, 0.07, 3)


def difference(one: Params, two: Params) -> float:
    assert all(tensor.dtype == torch.float64 for tensor in one.tensors.values())
    return max(float((tensor - two[name]).abs().max()) for name, tensor in one.tensors.items())


def assert_agree(one: Sequential, two: Sequential, folder: Path) -> None:
    """Round for round: the training, retraining, and methods that send other jobs."""
    first, second = trained_by(one, folder / "one"), trained_by(two, folder / "two")
    for number in range(1, TRAINING.rounds + 1):
        assert difference(first.history.state(number), second.history.state(number)) <= number * NEAR
    assert (first.final - first.initial).norm() > 0.1
    for name, settings, request in METHODS:
        both = (make_method(name, settings).unlearn(t, request, e) for t, e in ((first, one), (second, two)))
        for number, (left, right) in enumerate(zip(*both, strict=True), start=1):
            bound = SINGLE if name == "ease_paper" else NEAR
            assert difference(left.state, right.state) <= (TRAINING.rounds + number) * bound, (name, number)


def test_a_cohort_agrees_with_single_clients(exact: Engines, tmp_path: Path) -> None:
    assert_agree(exact("sequential", "cpu"), exact("vectorized", "cpu"), tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_agrees_with_a_cpu(exact: Engines, tmp_path: Path) -> None:
    assert_agree(exact("sequential", "cpu"), exact("auto", "cuda"), tmp_path)


def test_a_name_makes_an_engine(world) -> None:
    parts = world.server.model, world.shards, world.evaluator.activations, world.server.device
    assert (
        type(make_engine("sequential", *parts))
        is type(make_engine("auto", *parts))
        is type(world.federation)
        is Sequential
    )
    cohort = make_engine("vectorized", *parts)
    assert isinstance(cohort, Vectorized) and cohort.clients == world.federation.clients
    assert cohort.members == world.federation.members == {s.client: frozenset(s.train_ids) for s in world.shards}


@pytest.mark.parametrize(
    ("lora", "hidden", "clients", "device", "together"),
    [
        ("off", 256, 4, "cpu", True),
        ("off", 256, 3, "cpu", False),
        ("off", 512, 10, "cpu", True),  # 3 MiB
        ("ffa", 32, 10, "cpu", False),
        ("ffa", 512, 3, "cuda", True),
    ],
)
def test_auto_vectorizes_only_projectors(lora: str, hidden: int, clients: int, device: str, together: bool) -> None:
    model = DualEncoder(load_tiny(), ModelConfig(lora=lora, hidden=hidden), 0)  # type: ignore[arg-type]
    assert prefers_vectorized(model, clients, torch.device(device)) is together


def test_a_cohort_does_jobs_that_differ_in_more_than_what_is_a_clients_own(world, local_job) -> None:
    """Three clients, two kinds of job and one that shares no pass: each gets its own answer, in the order asked."""
    cohort = make_engine(
        "vectorized", world.server.model, world.shards, world.evaluator.activations, world.server.device
    )
    jobs = {2: local_job(), 0: local_job(epochs=2), 1: local_job(optimiser=local_job().optimiser.scaled(0.5))}
    found = list(cohort.perform(world.server.initial(), jobs))
    assert [update.client for update in found] == [2, 0, 1]
    for update in found:
        (alone,) = world.federation.perform(world.server.initial(), {update.client: jobs[update.client]})
        for name, tensor in alone.change.tensors.items():
            torch.testing.assert_close(update.change[name], tensor, rtol=1e-3, atol=1e-4)


def test_padding_of_a_batch_comes_from_the_same_client(world, local_job) -> None:
    """Client 0's pairs are not numbers, and batches of unequal size are filled up: others' answers stay the same."""
    cut = [replace(s, train=s.train[:n], train_ids=s.train_ids[:n], train_classes=s.train_classes[:n])
           for s, n in zip(world.shards, (9, 12, 7), strict=True)]  # fmt: skip
    plain = Vectorized.of(world.server.model, cut, world.evaluator.activations, world.server.device)
    image = np.array(world.evaluator.activations.image)
    image[cut[0].train] = np.nan
    spoilt = Vectorized.of(
        world.server.model, cut, replace(world.evaluator.activations, image=image), world.server.device
    )
    job = local_job(batch_size=100)
    before, after = (
        {u.client: u for u in each.run(world.server.initial(), job, [0, 1, 2])} for each in (plain, spoilt)
    )
    assert not after[0].change.is_finite()
    assert before[1] == after[1] and before[2] == after[2]


# --- the whole path by the command line ---


def whole_path(ease, folder: Path, *settings: str) -> None:
    """Train, forget and audit, in the way a user does."""

    def answer(*arguments: object) -> dict:
        result = ease(*arguments, "--quiet", "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    run = folder / "run"
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    trained = answer("train", *words, "--out", run)["metrics"]["seen/recall@10"]
    for request in (("--client", 1), ("--class", 2)):
        for method in ("ease", "retrain"):
            metrics = answer("forget", run, *request, "--method", method)["metrics"]
            assert metrics["forget/recall@10"] < trained < metrics["retain/recall@10"] + 25
    options = ("--shadows", 4, "--retrains", 1, "--pool", 32, "--fpr", 0.1)
    verdict = answer("audit", run, "--request", "client-1", *options)
    measures = {entry["name"]: entry for entry in verdict["verdict"]["measures"]}
    assert measures["bavaria/auc"]["before"] > 0.6


@pytest.mark.slow
def test_the_whole_path_in_one_pass(ease, tmp_path: Path) -> None:
    whole_path(ease, tmp_path, 'engine="vectorized"')


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_whole_path_on_a_gpu(ease, tmp_path: Path) -> None:
    whole_path(ease, tmp_path, 'device="cuda"')
