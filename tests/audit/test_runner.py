"""An audit from end to end: complete, repeatable, kept under a key that nothing else can meet, and right both ways."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.faults import flip
from tests.fixtures import LEARNT

import ease.audit.shadow_runs
from ease.audit.config import AuditConfig
from ease.audit.costs import phase_seconds, prices, training_flops
from ease.audit.records import AuditRecord, current_audit
from ease.audit.runner import Audit
from ease.audit.shadow_runs import (
    SHARES,
    ShadowPlan,
    attacker_of,
    make_shadows,
    plan_of,
    quick_attackers,
    read_shadow,
    write_shadow,
)
from ease.audit.shadows import train_federations
from ease.audit.subjects import Subjects
from ease.errors import UserError
from ease.methods import make_method
from ease.model.backbones import load_backbone
from ease.model.dual_encoder import DualEncoder
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import answer_of
from ease.runs.config import load_config
from ease.runs.records import read_record
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import LEFTOVER, read_tensors

CLIENT = ClientRequest(clients=(1,))


# --- which pairs are looked at ---


@pytest.mark.parametrize("scope", ["client", "class", "sample"])
def test_no_pair_plays_two_parts_and_none_but_members_was_trained_on(learnt, scope: str) -> None:
    world = learnt.world
    request: Request = {
        "client": CLIENT,
        "class": ClassRequest(classes=(2,)),
        "sample": SampleRequest(ids=world.shards[0].train_ids[:12]),
    }[scope]
    subjects = Subjects.of(world, request, 16)
    others = subjects.candidates.positions[~subjects.candidates.member]
    parts = [subjects.pool, others, subjects.population]
    spare = np.concatenate([world.evaluator.pairs.indices("validation"), world.evaluator.pairs.indices("test")])
    assert sorted(np.concatenate(parts)) == sorted(spare) and len(subjects.pool) == 16
    held = np.concatenate([position for shard in world.shards for position in (shard.train, shard.validation)])
    assert not set(np.concatenate(parts)) & set(held)
    forget = [position for shard in world.shards for position in shard.train[forget_mask(request, shard)]]
    assert subjects.candidates.positions[subjects.candidates.member].tolist() == forget
    first, rest = subjects.split({"log_odds": np.arange(len(subjects.positions))})
    assert len(first["log_odds"]) == len(subjects.candidates) and len(rest["log_odds"]) == len(subjects.population)


def test_a_pool_that_leaves_no_non_members_is_refused(learnt) -> None:
    with pytest.raises(UserError, match=r"pool of 39 pairs .* there are 40: lower --pool or add pairs"):
        Subjects.of(learnt.world, CLIENT, 39)


def test_a_machine_that_cannot_tell_its_free_cores_has_workers_too(learnt, monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    method = make_method("finetune")
    audit = Audit(learnt.run, learnt.world, answer_of(learnt.run, CLIENT, method), CLIENT, method, AuditConfig())
    assert audit.workers == 3


@pytest.mark.parametrize(
    ("cores", "short", "free", "workers"),
    [(16, True, 80, 8), (6, True, 80, 3), (1, True, 80, 1), (64, True, 80, 8), (64, True, 12, 3), (16, False, 80, 1)],
)
def test_a_gpu_that_waits_for_the_host_is_shared(
    learnt, monkeypatch, cores: int, short: bool, free: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 141 * 2**30))
    server = SimpleNamespace(device=torch.device("cuda"), model=SimpleNamespace(passes_are_short=short))
    method, world = make_method("finetune"), SimpleNamespace(server=server)
    audit = Audit(learnt.run, world, answer_of(learnt.run, CLIENT, method), CLIENT, method, AuditConfig())  # type: ignore[arg-type]
    assert audit.workers == workers


def test_short_passes_are_those_through_one_block_of_each_tower(adapted, learnt) -> None:
    model = adapted.world.server.model
    assert model.passes_are_short and learnt.world.server.model.passes_are_short
    deeper = DualEncoder(load_backbone("tiny"), model.config.model_copy(update={"lora_blocks": 2}), 0)
    assert not deeper.passes_are_short


def test_quick_attackers_remove_what_a_killed_process_left(learnt, tmp_path, monkeypatch) -> None:
    real = plan_of(learnt.run, learnt.world, CLIENT, None, 16)
    plan = replace(real, folder=tmp_path)
    scratch = plan.store / f"{LEFTOVER}killed"
    (scratch / "0" / "rounds").mkdir(parents=True)
    monkeypatch.setattr(ease.audit.shadow_runs, "plan_of", lambda *_: plan)
    monkeypatch.setattr(ease.audit.shadow_runs, "make_shadows", lambda *_: iter(()))
    monkeypatch.setattr(ease.audit.shadow_runs, "attacker_of", lambda *_: None)
    quick_attackers(learnt.run, learnt.world, CLIENT)
    assert not scratch.exists()


# --- what is kept, and under which key ---


@pytest.fixture(scope="module")
def little(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory, adapters: tuple[str, ...]) -> SimpleNamespace:
    """The same with fewer pairs and without a training, for tests of which shadows are made, and when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        config = load_config(None, (*LEARNT, *adapters, "data.train=96"))
        return SimpleNamespace(
            run=Run.create(tmp_path_factory.mktemp("little") / "run", config), world=World.open(config)
        )


def plan(learnt, **changes: object) -> ShadowPlan:
    world = learnt.world
    fields = ShadowPlan(
        world.config,
        CLIENT,
        make_method("ease"),
        (),
        "start",
        world.evaluator.pairs.fingerprint,
        16,
        learnt.run.folder,
    )
    return replace(fields, **changes)


def test_a_pass_that_was_interrupted_is_done_again_in_the_same_company(learnt, tmp_path) -> None:
    """Trained alone, the last shadow would round otherwise than with the others."""
    planned, rounds = plan(learnt, method=None, folder=tmp_path), learnt.world.config.training.rounds
    whole = planned.passes([0, 1, 2], [1])
    assert whole == [((0, 1, 2), (1,))] == planned.passes([0, 1, 2], [1], workers=1)
    assert planned.passes([0, 1, 2], [1], workers=2) == [((0, 2), (1,)), ((1,), ())]
    planned.begin(whole)
    for shadow in (0, 1):
        planned.state_path(shadow).parent.mkdir(parents=True, exist_ok=True)
        planned.state_path(shadow).touch()
        planned.shadow_path(shadow).touch()
    assert planned.missing_shadows(3) == [2] and planned.passes([2], []) == whole
    assert planned.passes([2, 3], []) == [*whole, ((3,), ())] and planned.ticks([2], []) == 4 * rounds
    planned.end()
    assert planned.passes([2], []) == [((2,), ())]


def test_whatever_decides_a_shadow_decides_its_key(learnt) -> None:
    config = learnt.world.config
    plans = [
        plan(learnt),
        plan(learnt, request=ClientRequest(clients=(2,))),
        plan(learnt, gone=(ClientRequest(clients=(2,)),)),
        plan(learnt, start_sha256="other"),
        plan(learnt, data="other"),
        plan(learnt, config=config.model_copy(update={"seed": 1})),
        plan(learnt, config=config.model_copy(update={"training": config.training.model_copy(update={"rounds": 7})})),
    ]
    assert len({each.key for each in plans}) == len(plans)
    assert plan(learnt).key == plan(learnt).key


def test_methods_share_retrainings_and_trained_shadows_and_nothing_that_was_unlearned(learnt) -> None:
    ours, other = plan(learnt), plan(learnt, pool=17)
    methods = [plan(learnt, method=make_method(*each)) for each in (("finetune",), ("ease", ("share=0.5",)))]
    for each in methods:
        assert each.retrain_path(1) == ours.retrain_path(1)
        assert (each.shadow_path(0), each.state_path(0)) == (ours.shadow_path(0), ours.state_path(0))
    assert len({each.unlearned_path(0) for each in (ours, other, *methods)}) == 4
    assert other.retrain_path(1) == ours.retrain_path(1) and other.shadow_path(0) != ours.shadow_path(0)


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file, by its content and the time it was written."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_another_method_trains_no_retraining_again_and_more_shadows_keep_those_there(
    little, tmp_path: Path, monkeypatch
) -> None:
    training = little.world.config.training.model_copy(update={"rounds": 2, "local_epochs": 1})
    config = little.world.config.model_copy(update={"training": training})
    world = replace(little.world, server=replace(little.world.server, config=config))
    streams: list[list[str]] = []

    def spy(*arguments: Any) -> Any:
        streams.append(list(arguments[4]))
        yield from train_federations(*arguments)

    monkeypatch.setattr(ease.audit.shadow_runs, "train_federations", spy)

    def make(method: str, shadows: int, retrains: int) -> int:
        """Ticks, as many as were promised."""
        planned = plan(little, config=config, folder=tmp_path, method=make_method(method))
        missing = planned.missing_shadows(shadows), planned.missing_orders(retrains)
        promised = planned.ticks(*missing)
        subjects = Subjects.of(world, planned.request, planned.pool)
        assert sum(make_shadows(planned, world, subjects, *missing)) == promised
        assert not planned.missing_shadows(shadows) and not planned.missing_orders(retrains)
        assert attacker_of(planned, subjects, shadows, 0.1).included.shape[1] == shadows
        return promised

    assert make("finetune", 4, 1) == 5 * 2 + 4
    assert streams.pop() == ["shadow-0", "shadow-1", "shadow-2", "shadow-3", "retrain-1"]
    before = files(tmp_path)
    assert make("grad_ascent", 4, 1) == 4 and not streams, "one that reads no history trains nothing"
    assert make("rollback", 4, 1) == 4 * 2 + 4
    assert streams.pop() == ["shadow-0", "shadow-1", "shadow-2", "shadow-3"], "a history is needed, no retraining"
    assert make("finetune", 6, 2) == 3 * 2 + 2
    assert streams.pop() == ["shadow-4", "shadow-5", "retrain-2"] and not streams
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert make("rollback", 4, 2) == 0 and not streams


def short_world(learnt) -> tuple[Any, Any]:
    """Configuration and world of a training of two short rounds."""
    training = learnt.world.config.training.model_copy(update={"rounds": 2, "local_epochs": 1})
    config = learnt.world.config.model_copy(update={"training": training})
    return config, replace(learnt.world, server=replace(learnt.world.server, config=config))


@pytest.mark.slow
def test_methods_in_one_pass_train_their_shadows_once_and_get_the_same_models(
    little, tmp_path: Path, monkeypatch
) -> None:
    config, world = short_world(little)
    trainings: list[int] = []

    def spy(*arguments: Any) -> Any:
        trainings.append(len(arguments[4]))
        yield from train_federations(*arguments)

    monkeypatch.setattr(ease.audit.shadow_runs, "train_federations", spy)
    methods = [make_method(name) for name in ("rollback", "fed_eraser", "finetune")]

    def make(folder: str, *some: Any) -> dict[str, bytes]:
        planned = plan(little, config=config, folder=tmp_path / folder, method=some[0], other_methods=tuple(some[1:]))
        missing, promised = planned.missing_shadows(4), planned.ticks(planned.missing_shadows(4), [1])
        subjects = Subjects.of(world, planned.request, planned.pool)
        assert sum(make_shadows(planned, world, subjects, missing, [1])) == promised
        assert not planned.missing_shadows(4) and not list(planned.store.glob(f"{LEFTOVER}*"))
        return {name: content for name, (content, _) in files(tmp_path / folder).items()}

    alone = {name: content for method in methods for name, content in make(method.name, method).items()}
    trainings.clear()
    assert make("together", *methods) == alone
    assert trainings == [5], "one training for three methods, two of which read its history"


@pytest.mark.parametrize("method", ["rollback", "finetune"])
@pytest.mark.slow
def test_an_unlearning_that_was_interrupted_ends_in_the_same_bytes(
    little, tmp_path: Path, monkeypatch, method: str
) -> None:
    """Shadows share passes: those left over go through the method once more in the company that they had."""
    config, world = short_world(little)
    store = ease.audit.shadow_runs._store_readings

    def make(folder: str, stored: int) -> dict[str, bytes]:
        planned = plan(little, config=config, folder=tmp_path / folder, method=make_method(method))
        left = iter(range(stored))

        def until_then(*arguments: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            store(*arguments)

        monkeypatch.setattr(ease.audit.shadow_runs, "_store_readings", until_then)
        subjects = Subjects.of(world, planned.request, planned.pool)
        while (missing := planned.missing_shadows(4)) or planned.missing_orders(1):
            try:
                list(make_shadows(planned, world, subjects, missing, planned.missing_orders(1)))
            except KeyboardInterrupt:
                left = iter(range(99))
        return {name: content for name, (content, _) in files(tmp_path / folder).items()}

    whole = make("whole", 99)
    assert make("trained", 3) == whole and make("unlearned", 6) == whole


def test_a_stored_shadow_is_unlearned_as_it_would_have_been_at_once(learnt, tmp_path: Path) -> None:
    """Fine-tuning right after the training, and again from the stored end of it."""
    training = learnt.world.config.training.model_copy(update={"rounds": 1, "local_epochs": 1})
    config = learnt.world.config.model_copy(update={"training": training})
    world = replace(learnt.world, server=replace(learnt.world.server, config=config))
    planned = plan(learnt, config=config, folder=tmp_path, method=make_method("finetune"))
    subjects = Subjects.of(world, planned.request, planned.pool)
    list(make_shadows(planned, world, subjects, [0, 1], ()))
    first = {n: planned.unlearned_path(n).read_bytes() for n in (0, 1)}
    shutil.rmtree(planned.unlearned_store)
    assert list(make_shadows(planned, world, subjects, [0, 1], ())) == [1, 1]
    assert {n: planned.unlearned_path(n).read_bytes() for n in (0, 1)} == first


@pytest.mark.parametrize("damage", ["flipped", "truncated", "other", "unsigned"])
def test_a_damaged_shadow_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "shadow-0003.safetensors"
    values = {"trained/cosine": torch.arange(5.0)}
    write_shadow(path, values)
    assert torch.equal(read_shadow(path)["trained/cosine"], values["trained/cosine"])
    if damage == "flipped":
        flip(path)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    elif damage == "other":
        path.write_text("not tensors")
    else:
        from safetensors.torch import save_file

        save_file(values, path)
    with pytest.raises(UserError, match=r"shadow-0003.*damaged; delete it and run the same command again"):
        read_shadow(path)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_a_short_training_has_every_early_stop(learnt, tmp_path: Path, rounds: int) -> None:
    """With few rounds several shares end in the same round; each is still a file."""
    training = learnt.world.config.training.model_copy(update={"rounds": rounds, "local_epochs": 1})
    config = learnt.world.config.model_copy(update={"training": training})
    short = plan(learnt, config=config, folder=tmp_path)
    world = replace(learnt.world, server=replace(learnt.world.server, config=config))
    assert list(make_shadows(short, world, Subjects.of(world, short.request, short.pool), [], [1])) == [1] * rounds
    found = {share: read_tensors(short.retrain_path(1, share)) for share in (*SHARES, 1.0)}
    assert len(list(short.store.iterdir())) == 4
    assert (rounds == 1) == all(torch.equal(found[0.25][name], tensor) for name, tensor in found[1.0].items())


def test_settings_that_make_no_audit_are_refused() -> None:
    for wrong in ({"shadows": 5}, {"shadows": 2}, {"retrains": 0}, {"fpr": 0}, {"fpr": 1}, {"pool": 8}):
        with pytest.raises(ValidationError):
            AuditConfig(**wrong)


def test_costs_are_shares_of_retrainings_by_hand() -> None:
    """10 of 40 bytes; 6 passed pairs against 8 trained ones at 100 operations each; seconds of phases are no totals."""
    ours = {"cost/bytes_up": 10.0, "cost/pairs_trained": 4.0, "cost/pairs_passed": 6.0, "cost/seconds/excision": 2.0}
    theirs = {"cost/bytes_up": 40.0, "cost/pairs_trained": 8.0}
    found = prices({**ours, "forget/recall@1": 3.0}, theirs, 100.0)
    assert found.keys() == {"bytes_up", "pairs_trained", "pairs_passed", "flops"}
    assert (found["bytes_up"].ratio, found["pairs_passed"].ratio) == (0.25, 0.0)
    assert (found["flops"].answer, found["flops"].retrain, found["flops"].ratio) == (600, 800, 0.75)
    assert phase_seconds(ours) == {"excision": 2.0}


def test_the_price_of_a_pair_is_counted_by_the_model(adapted) -> None:
    """A projector of hidden x embedding values alone costs 6 operations a value: forward 2, backward 4."""
    found = training_flops(adapted.world)
    values = sum(tensor.numel() for name, tensor in adapted.trained.initial.tensors.items() if "projector" in name)
    assert found > 5 * values


# --- from end to end ---


@pytest.mark.slow
def test_the_audit_is_complete_and_read_as_it_was_written(audited) -> None:
    for name, found in audited.records.items():
        assert read_record(AuditRecord, audited.audits[name].stored.audit_path) == found
        assert {measure.name for measure in found.verdict.measures} >= {
            *(f"{part}/recall@{k}" for part in ("forget", "near", "retain", "test") for k in (1, 5, 10)),
            *("rho", "mia/share", "bavaria/auc", "u-bavaria/auc", "bavaria/tpr", "u-bavaria/tpr", "ks/distance"),
            *("before-after/auc", "retained/auc"),
            *("relearn/forget/share", "relearn/retain/share"),
        }
        assert all(measure.inside is not None for measure in found.verdict.measures)
        assert set(found.attacks) >= {
            *("bavaria-online/log_odds", "lira-offline/cosine", "u-bavaria/log_odds", "u-lira/cosine"),
            *("before-after/change", "before-after/both", "retained"),
        }
        assert found.attack == "bavaria-online/log_odds"
        assert set(found.costs.compute_matched_retrain) == {"25%", "50%", "75%"}
        assert found.costs.totals["pairs_trained"].retrain > 0
        assert len(found.similarities["unlearned"]) == len(audited.world.shards[1].train)
        assert found.request == CLIENT and found.not_tested


@pytest.mark.slow
def test_a_leaky_method_is_outside_and_a_retrained_model_is_inside(audited) -> None:
    """Of 23 measures a retrained model falls outside on about one; five or more are rare."""
    leaky, perfect = audited.records["nothing"].verdict, audited.records["perfect"].verdict
    outside = {measure.name for measure in leaky.outside}
    assert {"forget/recall@1", "bavaria/auc", "mia/share", "ks/distance", "rho"} <= outside
    assert leaky.passed is False and leaky.words.startswith("Not enough evidence")
    assert len(perfect.outside) <= 4
    spared = {measure.name for measure in perfect.outside}
    assert not {"forget/recall@1", "bavaria/auc", "mia/share", "ks/distance"} & spared
    before = {measure.name: (measure.value, measure.before) for measure in leaky.measures}
    assert before["forget/recall@1"][0] == before["forget/recall@1"][1]
    assert before["bavaria/auc"][0] == before["bavaria/auc"][1] > 0.9


@pytest.mark.slow
def test_both_models_reveal_retraining_and_not_doing_nothing(audited) -> None:
    found = {name: {each.name: each for each in record.verdict.measures} for name, record in audited.records.items()}
    nothing, perfect = (found[name]["before-after/auc"] for name in ("nothing", "perfect"))
    assert nothing.value == nothing.before == 0.5 and nothing.inside is False
    seen = audited.records["perfect"].attacks["before-after/change"]
    assert perfect.inside and seen["unlearned"].auc.low > 0.7 and seen["retrain"].auc.low > 0.7
    assert "retraining shows it too" in perfect.note


@pytest.mark.slow
def test_retained_pairs_are_attacked_under_every_model(audited) -> None:
    """They are members of all of them, and a retrained model is the measure of how exposed that leaves them."""
    for record in audited.records.values():
        measure = next(each for each in record.verdict.measures if each.name == "retained/auc")
        assert set(record.attacks["retained"]) == {
            "trained",
            "unlearned",
            *(f"retrain{n}" for n in ("", "-1", "-2", "-3", "-4", "-5")),
        }
        assert measure.retrain > 0.7 and measure.band is not None and measure.band.models == 6
    assert next(e for e in audited.records["perfect"].verdict.measures if e.name == "retained/auc").inside


@pytest.mark.slow
def test_the_strongest_attack_is_judged_by_when_asked_for(copied) -> None:
    record = copied(attack="strongest").judge()
    families = ("bavaria-", "lira-", "rmia")
    before = {name: of["trained"].auc.value for name, of in record.attacks.items() if name.startswith(families)}
    assert before[record.attack] == max(before.values())
    names = {measure.name for measure in record.verdict.measures}
    assert {"lira/auc", "u-lira/auc"} <= names and not {"bavaria/auc", "u-bavaria/auc"} & names


@pytest.mark.slow
def test_nothing_is_ever_called_deleted(audited) -> None:
    for found in audited.records.values():
        assert "delet" not in found.model_dump_json().lower()
        assert "evidence of approximate erasure" in found.verdict.words.lower()


@pytest.mark.slow
def test_a_second_audit_trains_nothing_and_says_the_same(audited, monkeypatch) -> None:
    audit = audited.audits["finetune"]
    fresh = Audit(audit.run, audit.world, audit.stored, audit.request, audit.method, audit.config)
    assert fresh.missing() == ([], []) and fresh.ticks_left() == 0
    monkeypatch.setattr("ease.audit.shadow_runs.train_federations", None)
    assert list(fresh.shadows()) == []
    assert fresh.judge() == audited.records["finetune"]
    assert current_audit(audit.stored) == audited.records["finetune"]


@pytest.mark.slow
def test_more_shadows_reuse_those_at_hand(audited) -> None:
    audit = audited.audits["finetune"]
    more = replace(audit, config=audit.config.model_copy(update={"shadows": 6, "retrains": 6}))
    assert more.missing() == ([4, 5], [6])
    rounds = audited.run.config.training.rounds
    assert more.ticks_left() == 3 * rounds + 2


@pytest.mark.slow
def test_a_verdict_on_another_model_is_not_shown(audited, tmp_path: Path) -> None:
    stored = audited.audits["finetune"].stored
    moved = type(stored)(shutil.copytree(stored.folder, tmp_path / "finetune"))
    assert current_audit(moved) is not None
    shutil.copy(audited.audits["nothing"].stored.model_path, moved.model_path)
    assert current_audit(moved) is None
    assert current_audit(type(stored)(tmp_path)) is None


@pytest.fixture
def copied(audited, tmp_path: Path) -> Callable[..., Audit]:
    """The fine-tuning's audit on a copy of the run."""

    def make(**changes: object) -> Audit:
        run = Run.load(shutil.copytree(audited.run.folder, tmp_path / "run"))
        audit = audited.audits["finetune"]
        stored = answer_of(run, audit.request, audit.method)
        config = audit.config.model_copy(update=changes)
        return Audit(run, audited.world, stored, audit.request, audit.method, config)

    return make


@pytest.mark.slow
def test_a_damaged_shadow_stops_the_audit_and_is_made_again(copied) -> None:
    audit = copied()
    path = audit.plan.shadow_path(2)
    whole = read_shadow(path)
    flip(path, -3, 6)
    with pytest.raises(UserError, match=r"shadow-0002\.safetensors: this stored shadow is damaged"):
        audit.judge()
    path.unlink()
    scratch = audit.plan.store / f"{LEFTOVER}killed"
    (scratch / "0" / "rounds").mkdir(parents=True)
    assert sum(audit.shadows()) == audited_rounds(audit)
    assert not scratch.exists(), "a killed process leaves clients' updates behind"
    assert not list(audit.plan.store.glob(f"{LEFTOVER}*"))
    for name, values in read_shadow(path).items():
        torch.testing.assert_close(values, whole[name], rtol=1e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["answer", "reference"])
def test_a_model_file_that_the_answer_did_not_write_is_refused_before_the_long_work(copied, whose: str) -> None:
    audit = copied()
    swapped = audit.stored if whose == "answer" else audit.reference
    audit.trained.final.save(swapped.model_path)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged \(its hash is not the recorded one\)"):
        Audit.of(audit.run, audit.world, "client-1/finetune", audit.config)
    with pytest.raises(UserError, match="its hash is not the recorded one"):
        audit.judge()


def audited_rounds(audit: Audit) -> int:
    return audit.run.config.training.rounds


@pytest.mark.slow
def test_processes_make_the_same_shadows(copied) -> None:
    """Equal up to rounding, not in bytes: models that share other matrix products are rounded otherwise."""
    audit = copied(workers=2, retrains=1)
    stored = {n: read_shadow(audit.plan.shadow_path(n)) for n in range(4)}
    shutil.rmtree(audit.plan.store)
    assert sum(audit.shadows()) == 5 * audited_rounds(audit) + 4
    for number, expected in stored.items():
        for name, values in read_shadow(audit.plan.shadow_path(number)).items():
            torch.testing.assert_close(values, expected[name], rtol=1e-2, atol=2e-2)
