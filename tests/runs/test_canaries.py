"""Canaries in a run: trained on, never measured as data, forgotten by request, and guessed about."""

import json
from pathlib import Path

import numpy as np
import pytest

from ease.audit.attack_suite import attack_canaries
from ease.audit.config import AuditConfig
from ease.audit.runner import Audit
from ease.audit.shadow_runs import gauge_of
from ease.audit.subjects import Subjects
from ease.errors import UserError
from ease.methods import make_method
from ease.methods.retrain import Retrain
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest
from ease.runs.answers import answer_of, open_world, trained_of
from ease.runs.config import RunConfig, load_config
from ease.runs.evaluation import evaluation_sets
from ease.runs.forget import forget
from ease.runs.resolve import planted_ids
from ease.runs.run import Run
from ease.runs.world import World

CLIENT = ClientRequest(clients=(1,))
PLANTED = ("data.validation=40", "data.canaries=20")
LEARNING = (
    "data.train=120",
    "data.validation=260",
    "data.test=120",
    "partition.clients=4",
    "partition.classes=4",
    "partition.scheme=uniform",
    "training.rounds=8",
    "training.local_epochs=4",
    "training.batch_size=16",
    "model.hidden=64",
    "model.embedding=32",
    "gallery=40",
)
"""A run that learns its pairs by heart."""


@pytest.fixture(scope="module")
def planted(shared_cache: Path, small_config) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return World.open(small_config(*PLANTED))


def test_the_identity_of_a_run_says_how_many_canaries_it_has() -> None:
    assert RunConfig().model_dump(mode="json")["data"]["canaries"] == 0
    some = load_config(None, ("data.canaries=8",))
    assert some.model_dump(mode="json")["data"]["canaries"] == 8
    assert RunConfig.model_validate(some.model_dump(mode="json")) == some
    assert RunConfig().identity() != some.identity()


def test_another_number_of_canaries_is_another_run(small_config, tmp_path: Path) -> None:
    Run.create(tmp_path / "run", small_config("data.validation=20"))
    with pytest.raises(UserError, match=r"data\.canaries is 0 there and 8 here"):
        Run.plan(tmp_path / "run", small_config("data.validation=20", "data.canaries=8"))


def test_clients_train_on_heads_and_no_set_that_is_measured_holds_a_canary(planted: World, small_config) -> None:
    canaries = planted.evaluator.canaries
    held = np.concatenate([shard.train for shard in planted.shards])
    inside = np.intersect1d(held, canaries)
    assert len(canaries) == 20 and 5 < len(inside) < 15
    assert len(planted_ids(planted)) == len(inside)
    for request in (CLIENT, ClassRequest(classes=(0,)), SampleRequest(ids=planted.shards[0].train_ids[:5])):
        for positions in evaluation_sets(planted, request).values():
            assert not np.isin(positions, canaries).any()
    for positions in (planted.evaluator.test, planted.evaluator.spare):
        assert not np.isin(positions, canaries).any()
    assert not np.isin(np.concatenate([shard.validation for shard in planted.shards]), canaries).any()
    plain = World.open(small_config(PLANTED[0]))
    for before, after in zip(plain.shards, planted.shards, strict=True):
        assert after.train_ids[: len(before.train_ids)] == before.train_ids, "data are dealt as without canaries"


def test_a_request_for_canaries_compares_them_with_those_kept_out(planted: World) -> None:
    request = SampleRequest(ids=tuple(planted_ids(planted)))
    canaries = planted.evaluator.canaries
    sets = evaluation_sets(planted, request)
    assert np.isin(sets["forget"], canaries).all() and len(sets["forget"]) == len(request.ids)
    assert not np.isin(sets["retain"], canaries).any()
    subjects = Subjects.of(planted, request, 16)
    assert np.isin(subjects.candidates.positions, canaries).all()
    held = np.concatenate([shard.train for shard in planted.shards])
    np.testing.assert_array_equal(subjects.candidates.member, np.isin(subjects.candidates.positions, held))
    assert not np.isin(subjects.population, canaries).any() and not np.isin(subjects.pool, canaries).any()


def test_canaries_of_a_leaving_client_are_not_candidates(planted: World) -> None:
    subjects = Subjects.of(planted, CLIENT, 16)
    assert not np.isin(subjects.positions, planted.evaluator.canaries).any()


def test_without_canaries_none_can_be_asked_for(learnt) -> None:
    with pytest.raises(UserError, match=r"--canaries: none was planted in this run"):
        planted_ids(learnt.world)
    gauge = gauge_of(learnt.world, Subjects.of(learnt.world, CLIENT, 16))
    assert not attack_canaries(learnt.world, CLIENT, gauge, {}, learnt.trained.initial)


def test_the_command_forgets_those_that_were_planted(ease, small, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changed = [part for each in (*small, *PLANTED) for part in ("--set", each)]
    assert ease("train", "--out", run, *changed, "--quiet").code == 0
    found = ease("forget", run, "--canaries", "--method", "finetune", "--json")
    assert found.code == 0, found.err
    request = json.loads(found.out)["request"]
    assert request["scope"] == "sample" and sorted(request["ids"]) == sorted(planted_ids(open_world(Run.load(run))))
    (tmp_path / "ids").write_text("train-000000")
    refused = ease("forget", run, "--canaries", "--samples", tmp_path / "ids")
    assert refused.code == 2 and "--canaries is a separate request" in refused.err


@pytest.mark.slow
def test_training_gives_canaries_away_and_only_retraining_takes_that_back(tmp_path: Path) -> None:
    config = load_config(None, (*LEARNING, "data.canaries=160"))
    run, world = Run.create(tmp_path / "run", config), World.open(config)
    list(run.train(world))
    world = open_world(run)
    request, finetune = SampleRequest(ids=tuple(planted_ids(world))), make_method("finetune")
    for each in (Retrain(), finetune):
        list(forget(run, world, request, each, observe=False))
    audit = Audit(
        run,
        world,
        answer_of(run, request, finetune),
        request,
        finetune,
        AuditConfig(shadows=4, retrains=2, pool=64, fpr=0.1, workers=1),
    )
    list(audit.shadows())
    found = {measure.name: measure for measure in audit.judge().verdict.measures}["canaries/epsilon"]
    assert found.before is not None and found.before > 2
    assert found.retrain < 0.5 and found.band is not None
    assert found.value > 1 and found.inside is False, "a few rounds of fine-tuning forget no canary"
    assert "of 80 guesses right about 160 canaries" in found.note
    models = {"trained": trained_of(run).final, "unlearned": trained_of(run).final, "retrain": trained_of(run).initial}
    read = (gauge_of(world, audit.subjects), models, trained_of(run).initial)
    leaving = ClientRequest(clients=(0, 1, 2, 3))
    assert attack_canaries(world, leaving, *read)[0].value == pytest.approx(found.before)
    assert not attack_canaries(world, SampleRequest(ids=request.ids[:-1]), *read)
