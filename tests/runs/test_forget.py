"""Answering requests on a run: resumed byte for byte, done once, and going on afterwards with and without the lock."""

import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ease.errors import UserError
from ease.federation.check import refusal
from ease.federation.protocol import LocalJob, Middleware, Update
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.methods.ease.method import Ease, final_loss, share_prior
from ease.methods.ease_paper import EasePaper
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import StoredAnswer, answer_of, continuation, find_answer, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import evaluation_sets
from ease.runs.forget import forget, train_further
from ease.runs.resolve import check_request, request_id
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import LEFTOVER, read_json, write_json
from ease.subspace import displacement, load_bases
from ease.testing import Fault, Faulty

EASE = Path(sys.executable).parent / "ease"
CLIENT = ClientRequest(clients=(1,))


@pytest.fixture(scope="module")
def home(small_config, shared_cache, tmp_path_factory) -> tuple[World, Path]:
    """A small finished run with held-out pairs. Copy it before writing into it."""
    config: RunConfig = small_config("partition.validation_share=0.3", "training.rounds=3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        world = World.open(config)
    run = Run.create(tmp_path_factory.mktemp("home") / "run", config)
    list(run.train(world))
    return world, run.folder


@pytest.fixture
def run(home, tmp_path: Path) -> Run:
    shutil.copytree(home[1], tmp_path / "run")
    return Run.load(tmp_path / "run")


@pytest.fixture
def world(home) -> World:
    return home[0]


def samples(world: World) -> SampleRequest:
    return SampleRequest(ids=tuple(pair_id for shard in world.shards for pair_id in shard.train_ids[:4]))


class Broken:
    """Stands in for clients when no one should be asked."""

    clients = (0, 1, 2)

    def run(self, *_: object):
        raise AssertionError("a client was asked")


# --- resuming ---


def requests(world: World) -> dict[str, tuple[Request, Unlearner]]:
    return {
        "client": (CLIENT, Ease(recovery_share=1.0)),
        "samples": (samples(world), Ease(recovery_share=1.5)),
        "paper, client": (CLIENT, EasePaper(reference="initial", excision_share=0.5)),
        "paper, class": (ClassRequest(classes=(1,)), EasePaper(reference="initial", excision_share=0.5)),
        "paper, samples": (samples(world), EasePaper(reference="initial", excision_share=0.5)),
        "finetune": (CLIENT, make_method("finetune", ("share=0.7",))),
    }


@pytest.mark.parametrize("name", ["client", "samples", "paper, client", "paper, class", "paper, samples", "finetune"])
def test_stopped_after_any_step_it_ends_with_the_same_bytes(world, run: Run, tmp_path: Path, name: str) -> None:
    request, method = requests(world)[name]
    total = len(list(forget(run, world, request, method, observe=False)))
    whole = answer_of(run, request, method)
    assert total == method.rounds(run.config.training, request) and whole.done
    for stop in range(1, total + 1):
        again = Run.load(
            shutil.copytree(run.folder, tmp_path / f"run{stop}", ignore=shutil.ignore_patterns("requests"))
        )
        steps = forget(again, world, request, method, observe=False)
        for _ in range(stop):
            next(steps)
        steps.close()
        outcome = answer_of(again, request, method)
        assert not outcome.done and not outcome.model_path.exists()
        (outcome.folder / f"{LEFTOVER}model.safetensors-x").write_bytes(b"half")
        assert len(list(forget(again, world, request, method, observe=False))) == total
        assert outcome.model_path.read_bytes() == whole.model_path.read_bytes()
        for file in ("bases.safetensors", "request.json"):
            assert (outcome.folder / file).is_file() == (whole.folder / file).is_file()
            if (whole.folder / file).is_file():
                assert (outcome.folder / file).read_bytes() == (whole.folder / file).read_bytes()
        assert {path.name for path in outcome.folder.iterdir()} == {path.name for path in whole.folder.iterdir()}
        records = [
            {key: value for key, value in each.record().metrics.items() if "seconds" not in key and "memory" not in key}
            for each in (outcome, whole)
        ]
        assert records[0] == records[1]  # bytes both ways included


def test_stopped_between_two_clients_it_asks_only_the_rest(world, run: Run) -> None:
    request, method = samples(world), Ease(recovery_share=1.0)

    class Tired(Middleware):
        """Answers a number of times and then pulls the plug."""

        def __init__(self, answers: int) -> None:
            super().__init__(world.federation)
            self.left, self.asked = answers, 0

        def run(self, params, job, clients):
            for client in clients:
                if self.left == 0:
                    raise KeyboardInterrupt
                self.left, self.asked = self.left - 1, self.asked + 1
                yield from super().run(params, job, [client])

    def attempt(answers: int) -> Tired:
        tired = Tired(answers)
        object.__setattr__(changed, "federation", tired)
        try:
            list(forget(run, changed, request, method, observe=False))
        except KeyboardInterrupt:
            assert answers == 5
        return tired

    changed = copy.copy(world)
    asked = [attempt(5).asked, attempt(5).asked, attempt(1000).asked]
    outcome = answer_of(run, request, method)
    interrupted = outcome.model_path.read_bytes()
    assert asked[:2] == [5, 5] and outcome.done and not (outcome.folder / "journal").exists()
    shutil.rmtree(outcome.folder)
    assert attempt(1000).asked == sum(asked)
    assert outcome.model_path.read_bytes() == interrupted


def test_a_request_that_is_done_costs_no_work(world, run: Run) -> None:
    list(forget(run, world, CLIENT, Ease()))
    outcome = answer_of(run, CLIENT, Ease())
    before = {path.name: path.read_bytes() for path in outcome.folder.iterdir()}
    (outcome.folder / "journal").mkdir()  # a process killed at its very end leaves it
    idle = copy.copy(world)
    object.__setattr__(idle, "federation", Broken())
    assert list(forget(run, idle, CLIENT, Ease())) == []
    assert {path.name: path.read_bytes() for path in outcome.folder.iterdir()} == before


def test_two_processes_do_not_work_on_one_run(world, run: Run) -> None:
    steps = forget(run, world, CLIENT, Ease())
    next(steps)
    with pytest.raises(UserError, match="another process is working on this run"):
        next(forget(run, world, samples(world), Ease()))
    steps.close()


# --- what is kept ---


def test_the_record_is_complete(world, run: Run) -> None:
    steps = list(forget(run, world, CLIENT, Ease()))
    outcome = answer_of(run, CLIENT, Ease())
    record = outcome.record()
    assert record.request == CLIENT and record.method_name == "ease" and record.seed == 0
    assert [entry.phase for entry in record.rounds] == [step.phase for step, _ in steps]
    assert all("forget/recall@1" in entry.metrics for entry in record.rounds)
    assert record.contribution is not None and record.contribution.share == share_prior(
        CLIENT, "sgd", final_loss(trained_of(run))
    )
    assert record.spectrum is None
    for name in ("forget", "retain", "test"):
        assert all(0 <= record.metrics[f"{name}/recall@{k}"] <= 100 for k in (1, 5, 10))
    for key in ("bytes_up", "bytes_down", "seconds", "pairs_trained", "seconds/subtraction", "seconds/recovery"):
        assert record.metrics[f"cost/{key}"] > 0
    assert torch.equal(outcome.model()["image.projector.0.bias"], steps[-1][0].state["image.projector.0.bias"])
    saved, shown = load_bases(outcome.folder / "bases.safetensors"), steps[-1][0].bases
    assert shown is not None and saved.keys() == shown.keys()
    assert all(torch.equal(saved[name].directions, shown[name].directions) for name in shown)


def test_settings_and_requests_have_folders_of_their_own(world, run: Run) -> None:
    folders = {
        answer_of(run, request, method).folder
        for request in (CLIENT, ClientRequest(clients=(1, 2)), ClassRequest(classes=(1,)), samples(world))
        for method in (Ease(), Ease(share=0.5), make_method("retrain"), make_method("retrain", ("order=1",)))
    }
    assert len(folders) == 16
    assert answer_of(run, CLIENT, Ease(replay=Ease().replay)).folder.name == "ease"
    assert request_id(SampleRequest(ids=("a", "b"))) == request_id(SampleRequest(ids=("b", "a")))


def test_test_pairs_of_a_forgotten_class_are_not_asked_for(world) -> None:
    sets = evaluation_sets(world, ClassRequest(classes=(1,)))
    assert (
        not (world.evaluator.classes_of(sets["test"]) == 1).any()
        and (world.evaluator.classes_of(sets["forget"]) == 1).all()
    )
    assert not set(sets["forget"]) & set(sets["retain"])
    assert len(sets["forget"]) + len(sets["retain"]) == sum(len(shard.train) for shard in world.shards)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ClientRequest(clients=(1, 7)), "--client 7: no such client; this run has clients 0 to 2"),
        (ClientRequest(clients=(0, 1, 2)), "names all training data"),
        (ClientRequest(clients=()), "matches no pair"),
        (ClassRequest(classes=(3,)), "--class 3: no such pseudo-class; this run has 0 to 2"),
        (ClassRequest(classes=(0, 1, 2)), "names all training data"),
        (SampleRequest(ids=("nobody",)), "1 of 1 ids are not pairs of this run.*e.g. 'nobody'"),
    ],
)
def test_requests_that_make_no_sense_are_refused(world, request_: Request, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_request(world, request_)


def test_a_refused_method_leaves_no_trace(world, run: Run) -> None:
    before = sorted(run.folder.rglob("*"))
    for method in (EasePaper(alpha=3), EasePaper(probe_round=99)):
        with pytest.raises(UserError):
            list(forget(run, world, CLIENT, method))
    assert sorted(run.folder.rglob("*")) == before


def test_a_refusal_keeps_what_others_have_done(world, run: Run) -> None:
    list(forget(run, world, CLIENT, make_method("finetune")))
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(UserError):
        list(forget(run, world, CLIENT, EasePaper(alpha=3)))
    assert sorted(run.folder.rglob("*")) == before


# --- finding it again, and going on ---


def test_finished_requests_are_found_by_name(world, run: Run) -> None:
    for method in (Ease(share=0.5), make_method("finetune")):
        list(forget(run, world, CLIENT, method, observe=False))
    label = answer_of(run, CLIENT, Ease(share=0.5)).folder.name
    outcome, request, method = find_answer(run, f"client-1/{label}")
    assert request == CLIENT and method == Ease(share=0.5) and outcome.done
    assert find_answer(run, "client-1/finetune")[2] == make_method("finetune")
    for name in ("client-1", "client-2", "client-1/retrain", "nonsense", ""):
        with pytest.raises(UserError, match=f"no finished request of that name .*client-1/{label}, client-1/finetune"):
            find_answer(run, name)


# --- clients that fail or lie ---


def with_faults(world: World, fault: Fault, client: int = 0, share: float = 1.0) -> World:
    faulty = replace(world)
    faulty.__dict__["federation"] = Faulty(world.federation, fault, client, share)
    return faulty


@pytest.mark.parametrize("fault", ["nan", "raise", "drop", "shape"])
@pytest.mark.parametrize("name", ["client", "sample"])
def test_a_request_continues_without_a_faulty_client_and_names_it(world, run: Run, name: str, fault: Fault) -> None:
    request = CLIENT if name == "client" else samples(world)
    steps = list(forget(run, with_faults(world, fault), request, Ease(), observe=False))
    assert all(step.state.is_finite() for step, _ in steps)
    record = answer_of(run, request, Ease()).record()
    asking = record.rounds[1:] if name == "client" else record.rounds  # a client's stored updates are subtracted
    assert asking and all("0" in each.notes["rejected"] for each in asking)


class Away(Middleware):
    """All clients are down as soon as recovery begins."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        yield from (refusal(each, "no node answers") for each in clients) if job.stream == "ease" else ()
        yield from () if job.stream == "ease" else self.inner.run(params, job, clients)


@pytest.mark.parametrize("name", ["client", "sample"])
def test_an_erasure_does_not_wait_for_sites_that_hold_none_of_the_pairs(world, run: Run, name: str) -> None:
    request = CLIENT if name == "client" else samples(world)
    away = replace(world)
    away.__dict__["federation"] = Away(world.federation)
    (first, _), (last, _) = forget(run, away, request, Ease(), observe=False)
    assert last.state == first.state and "recovery ended early: round 1" in last.notes["ended"]
    stored = answer_of(run, request, Ease())
    assert stored.base() is not None and set(stored.record().rounds[1].notes["rejected"]) == {"0", "1", "2"} - (
        {"1"} if name == "client" else set()
    )


def test_a_bad_answer_blocks_no_rerun(world, run: Run, tmp_path: Path) -> None:
    """The one client that a request begins with is spoilt; once it answers well, the same command works."""
    method, stored = make_method("grad_ascent"), answer_of(run, CLIENT, make_method("grad_ascent"))
    for fault in ("raise", "drop", "nan"):
        with pytest.raises(UserError, match=r"client 1: it|every update was rejected .client 1"):
            list(forget(run, with_faults(world, fault, client=1), CLIENT, method, observe=False))
    again = [step.state for step, _ in forget(run, world, CLIENT, method, observe=False)]
    plain = [step.state for step in method.unlearn(trained_of(run), CLIENT, world.federation)]
    assert again == plain and "rejected" not in stored.record().rounds[0].notes


def test_without_any_finished_request_it_reports_it(run: Run) -> None:
    with pytest.raises(UserError, match="finished: none"):
        find_answer(run, "client-1")
    with pytest.raises(UserError, match="is not finished; run the same `ease forget` again"):
        StoredAnswer(run.folder / "requests" / "client-1" / "ease").record()


@pytest.mark.parametrize("locked", [True, False])
def test_training_continues_with_the_directions_locked_or_free(world, run: Run, locked: bool) -> None:
    method = Ease()
    list(forget(run, world, CLIENT, method, observe=False))
    outcome = answer_of(run, CLIENT, method)
    name = f"client-1/{outcome.folder.name}"
    bases = load_bases(outcome.folder / "bases.safetensors")
    held = outcome.model()
    drift = []
    for step, metrics in train_further(run, world, name, 2, locked):
        assert step.phase == "further training" and "forget/recall@1" in metrics
        components = [
            bases[block.name].components(displacement(block, step.state, held)).norm() for block in held.blocks
        ]
        drift.append(float(torch.stack(components).norm()))
    assert len(drift) == 2
    assert max(drift) < 1e-4 if locked else min(drift) > 1e-2
    record = continuation(outcome, 2, locked).record()
    assert record.locked is locked and len(record.rounds) == 2
    assert all("forget/recall@1" in entry.metrics for entry in record.rounds)
    assert list(train_further(run, world, name, 2, locked)) == []


def test_further_training_is_resumed_byte_for_byte(world, run: Run, tmp_path: Path) -> None:
    list(forget(run, world, CLIENT, Ease(), observe=False))
    again = Run.load(shutil.copytree(run.folder, tmp_path / "again"))
    list(train_further(run, world, "client-1", 3, True))
    steps = train_further(again, world, "client-1", 3, True)
    next(steps)
    steps.close()
    assert len(list(train_further(again, world, "client-1", 3, True))) == 3
    models = [continuation(answer_of(each, CLIENT, Ease()), 3, True).model_path.read_bytes() for each in (run, again)]
    assert models[0] == models[1]


# --- the plug is pulled ---


def start(folder: Path, ids: Path) -> subprocess.Popen[bytes]:
    command = [
        EASE, "forget", folder, "--samples", ids, "--quiet",
        "--set", "recovery_share=5",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


@pytest.mark.slow
def test_killed_at_random_moments_a_real_process_ends_with_the_same_bytes(world, run: Run, tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(samples(world).ids))
    names = ("whole", "killed", "killed often")
    folders = [shutil.copytree(run.folder, tmp_path / name) for name in names]

    def answers(folder: Path) -> int:
        return len(list(folder.glob("requests/*/*/journal/*")))

    process, most = start(folders[0], ids), 0
    while process.poll() is None:
        most = max(most, answers(folders[0]))
        time.sleep(0.002)
    _, complaint = process.communicate(timeout=120)
    assert (process.returncode, complaint) == (0, b"")
    moments, killed = random.Random(0), 0
    for folder, attempts in zip(folders[1:], (1, 3), strict=True):
        for _ in range(attempts):
            # After some more answers, not after some time: a busy machine would be done before or not have begun.
            until = answers(folder) + moments.randint(1, max(1, most // (2 * attempts)))
            process = start(folder, ids)
            while process.poll() is None and answers(folder) < until:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.01))
            process.kill()
            process.communicate()
            killed += process.returncode == -signal.SIGKILL
        process = start(folder, ids)
        _, complaint = process.communicate(timeout=120)
        assert (process.returncode, complaint) == (0, b"")
        (whole,), (resumed,) = (list(each.glob("requests/*/*")) for each in (folders[0], folder))
        for file in ("model.safetensors", "bases.safetensors", "request.json"):
            assert (resumed / file).read_bytes() == (whole / file).read_bytes(), file
        assert {path.name for path in resumed.iterdir()} == {path.name for path in whole.iterdir()}
    assert killed >= 3


def test_an_answer_from_before_further_training_is_refused(small, ease, tmp_path) -> None:
    """A run may grow; what was answered before does not belong to the grown model, but for the answer it grew from."""
    settings = [part for each in small for part in ("--set", each)]
    assert ease("train", "--out", tmp_path / "run", "--quiet", *settings).code == 0
    for client in (1, 2):
        assert ease("forget", tmp_path / "run", "--client", client, "--method", "finetune", "--quiet").code == 0
    more = ("train", "--out", tmp_path / "run", "--quiet", *settings, "--set", "training.rounds=3")
    assert ease(*more).code == 2
    assert ease("release", tmp_path / "run", "--request", "client-1/finetune").code == 0
    shutil.move(tmp_path / "run" / "requests" / "client-2", tmp_path / "kept")
    assert ease(*more).code == 0
    shutil.move(tmp_path / "kept", tmp_path / "run" / "requests" / "client-2")
    assert ease("forget", tmp_path / "run", "--client", 1, "--method", "finetune", "--quiet").code == 0
    again = ease("forget", tmp_path / "run", "--client", 2, "--method", "finetune", "--quiet")
    assert again.code == 2 and "trained beyond" in again.err


def test_changed_data_are_refused(small, ease, tmp_path) -> None:
    """The request would name other pictures than those that were trained on."""
    settings = [part for each in small for part in ("--set", each)]
    assert ease("train", "--out", tmp_path / "run", "--quiet", *settings).code == 0
    path = tmp_path / "run" / "membership.json"
    stored = read_json(path)
    changed = next(iter(stored["digests"]))
    write_json(path, stored | {"digests": stored["digests"] | {changed: "other"}})
    answer = ease("forget", tmp_path / "run", "--client", 1, "--method", "finetune", "--quiet")
    assert answer.code == 2 and "have changed" in answer.err and changed in answer.err
