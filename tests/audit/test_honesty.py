"""Fifteen ways in which an audit can flatter, one test each: every one is impossible here, refused, or printed."""

import shutil

import numpy as np
import pytest

from ease.audit.attacks import Attacker
from ease.audit.caveats import NOT_TESTED, settings_caveat
from ease.audit.joint import joint_test
from ease.audit.membership import auc, leakage
from ease.audit.records import AuditRecord
from ease.audit.runner import Audit
from ease.audit.shadow_runs import gauge_of, read_shadow, write_shadow
from ease.audit.subjects import Candidates, choose_candidates
from ease.audit.verdict import Measure, Verdict
from ease.data.partition import Shard
from ease.errors import UserError
from ease.methods import make_method
from ease.requests.request import ClientRequest, forget_mask
from ease.runs.answers import answer_of
from ease.runs.run import Run
from ease.seeding import generator

CLIENT = ClientRequest(clients=(1,))


@pytest.fixture(scope="module")
def careless(audited, tmp_path_factory) -> AuditRecord:
    """An audit that asks too much: few non-members, one retraining, copies in the retained data, unbalanced shadows."""
    run = Run.load(shutil.copytree(audited.run.folder, tmp_path_factory.mktemp("careless") / "run"))
    audit = audited.audits["finetune"]
    config = audit.config.model_copy(update={"fpr": 0.001, "retrains": 1})
    included = Candidates.included

    def unbalanced(self: Candidates, shadow: int, seed: int) -> np.ndarray:
        return included(self, shadow, seed) | (np.arange(len(self)) == 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ease.audit.runner.near_duplicates", lambda *_: 3)
        patch.setattr(Candidates, "included", unbalanced)
        outcome = answer_of(run, audit.request, audit.method)
        return Audit(run, audited.world, outcome, audit.request, audit.method, config).judge()


def warned(record: AuditRecord, *parts: str) -> bool:
    """Whether one warning holds all parts."""
    return any(all(part in warning for part in parts) for warning in record.warnings)


def test_1_non_members_come_from_the_members_distribution() -> None:
    """Line 1: non-members from another distribution. Here a statistic tells classes apart and knows no member."""
    rng = generator(0, "honest")
    labels = rng.permutation(np.repeat([0, 1], [160, 40]))
    none = np.zeros(0, dtype=np.int64)
    shard = Shard(1, np.arange(200), none, tuple(map(str, range(200))), labels, none)
    others, other_classes = np.arange(200, 800), rng.permutation(np.repeat([0, 1], [120, 480]))
    statistic = np.concatenate([labels, other_classes]) + rng.normal(size=800)
    assert not auc(statistic[:200], statistic[200:]).contains(0.5)
    candidates = choose_candidates([shard], CLIENT, others, other_classes, list(map(str, range(800))), 0)
    found = statistic[candidates.positions]
    assert auc(found[candidates.member], found[~candidates.member]).contains(0.5)


@pytest.mark.slow
def test_1_how_far_the_distributions_differ_is_printed(audited) -> None:
    """Line 1, what is left of it."""
    assert warned(audited.records["finetune"], "members and", "class mixes differ by 0.0")


@pytest.mark.slow
def test_2_a_target_among_the_shadows_stops_the_audit(audited, tmp_path) -> None:
    """Line 2: the attack is fitted to its own answer."""
    run = Run.load(shutil.copytree(audited.run.folder, tmp_path / "run"))
    audit = audited.audits["finetune"]
    copied = Audit(run, audited.world, answer_of(run, CLIENT, audit.method), CLIENT, audit.method, audit.config)
    path = copied.plan.shadow_path(1)
    stored = read_shadow(path)
    target = gauge_of(copied.world, copied.subjects).read(copied.trained.final, copied.subjects.positions)
    write_shadow(path, {name: stored[name].new_tensor(values) for name, values in target.items()})
    with pytest.raises(UserError, match="shadow 1 is the target model itself"):
        copied.judge()


@pytest.mark.slow
def test_3_one_threshold_serves_every_model(audited) -> None:
    """Line 3: a threshold chosen on the judged pairs would differ from model to model."""
    for attack, models in audited.records["finetune"].attacks.items():
        if attack.startswith(("before-after", "retained")):
            assert all(found.tpr is None for found in models.values()), "no shadows, no threshold"
        else:
            assert len({found.tpr.threshold for found in models.values()}) == 1, attack


@pytest.mark.slow
def test_4_too_few_non_members_give_no_rate_and_a_reason(careless) -> None:
    """Line 4: at 0.1 % it takes 5 / 0.001 = 5000 non-members to expect 5 false positives."""
    assert not [measure for measure in careless.verdict.measures if "tpr" in measure.name]
    assert all(found.tpr is None for models in careless.attacks.values() for found in models.values())
    assert warned(careless, "TPR at 0.10% FPR is not given", "it takes 5000 non-member scores")


def test_5_an_audit_that_would_overlook_a_trace_proves_nothing() -> None:
    """Line 5: what would not have been seen in the trained model is no success afterwards."""
    rng = np.random.default_rng(0)
    retrained = 0.5 + 0.01 * rng.standard_normal(10)
    for effect, passed in ((1e-4, None), (1.0, True)):
        names = {f"retrain-{n}": value for n, value in enumerate(retrained[1:], 1)}
        kept = {f"kept-{share}": retrained[0] + share * effect for share in (0.1, 0.2, 0.4)}
        values = {"unlearned": 0.5, "trained": 0.5 + effect, "retrain": retrained[0], **names, **kept}
        measure = Measure.of("rho", values, 0.001)
        planted = [(0.0, np.array([measure.retrain])), *((share, np.array([value])) for share, value in measure.kept)]
        found = joint_test(np.array([0.5]), retrained[:, None], np.array([0.001]), planted, rng, draws=500)
        verdict = Verdict(measures=(measure,), joint=found)
        assert verdict.passed is passed, verdict.words


def test_6_far_below_a_half_is_outside_too() -> None:
    """Line 6: pairs pushed far below the unseen ones stand out as much as members."""
    values = {"trained": 0.98, "unlearned": 0.02, "retrain": 0.5, "retrain-1": 0.52, "retrain-2": 0.49}
    assert Measure.of("lira/auc", values, 0.001).inside is False
    assert Measure.of("lira/auc", {**values, "unlearned": 0.51}, 0.001).inside is True
    assert leakage(0.02) == leakage(0.98) == 0.98


@pytest.mark.parametrize(
    ("settings", "reported"), [((), "with its default settings"), (("share=0.5",), "with share = 0.5:")], ids=str
)
def test_7_and_8_settings_are_named_and_so_is_what_they_must_not_be_chosen_by(settings, reported: str) -> None:
    """Lines 7 and 8: settings tuned on these measures, and baselines that nobody tuned."""
    note = settings_caveat(make_method("ease", settings))
    assert note.startswith("ease with") and reported in note
    assert "chosen by these measures or against retrain" in note and "tuned less" in note


@pytest.mark.slow
def test_9_kept_statistics_and_verdicts_belong_to_one_model(audited) -> None:
    """Line 9: stale caches. Each method of the same request has shadows of its own, and a verdict names its model."""
    assert len({audit.plan.unlearned_store for audit in audited.audits.values()}) == len(audited.audits)
    assert len({found.model_sha256 for found in audited.records.values()}) == len(audited.records)


@pytest.mark.slow
def test_10_how_little_a_few_models_of_one_seed_can_say_is_printed(audited, careless) -> None:
    """Line 10: one seed. Two retrained models give a band of 12.7 sqrt(3/2) = 15.6 deviations, and no verdict."""
    assert warned(audited.records["finetune"], "6 retrained models of one seed", "reaches 2.8 of their standard")
    assert warned(careless, "2 retrained models of one seed", "reaches 15.6 of their standard")
    assert careless.verdict.passed is None and "--retrains 5" in careless.verdict.words
    assert any("other training seeds" in gap for gap in NOT_TESTED)


@pytest.mark.slow
def test_11_copies_in_the_retained_data_are_counted(audited, careless) -> None:
    """Line 11: no method can forget what is kept."""
    assert warned(careless, "3 retained pairs are near-duplicates of forget pairs")
    assert not warned(audited.records["finetune"], "near-duplicates")


def test_12_one_model_is_not_the_method() -> None:
    """Line 12: single-model claims made general."""
    assert any("one trained model is audited, not the method in general" in gap for gap in NOT_TESTED)


@pytest.mark.slow
def test_13_showings_of_retained_pairs_are_counted_on_both_sides(audited) -> None:
    """Line 13: fine-tuning adds 1 round to training's 6, of 3 epochs each; retrain has 6 and no more."""
    retained = sum(int((~forget_mask(CLIENT, shard)).sum()) for shard in audited.world.shards)
    assert warned(
        audited.records["finetune"],
        f"{7 * 3 * retained:,} to the answer ({6 * 3 * retained:,} in training)",
        f"{6 * 3 * retained:,} to retrain",
    )


def test_14_pairs_without_shadows_are_left_out_and_counted() -> None:
    """Line 14: a neutral score for what cannot be scored."""
    rng = generator(0, "left out")
    included = np.tile([True, False], (40, 4))
    included[0] = True
    values = {name: rng.normal(size=(40, 8)) for name in ("log_odds", "cosine", "loss")}
    bench = Attacker(values, values, included, np.arange(40) < 20, {k: v[:0] for k, v in values.items()}, 0.1)
    target = {name: rng.normal(size=40) for name in values}
    for attack in bench.attacks():
        found = bench.judge(attack, target, {})
        assert found.unscored == 1 and np.isnan(found.scores[0])
        assert found.auc.value == auc(found.scores[1:20], found.scores[20:]).value


@pytest.mark.slow
def test_14_and_the_audit_reports_it(audited, careless) -> None:
    """Line 14, printed."""
    assert warned(careless, "1 pairs have no shadow on one side and are left out")
    assert not warned(audited.records["finetune"], "no shadow on one side")


@pytest.mark.slow
def test_15_leakage_of_retained_pairs_is_measured(audited) -> None:
    """Line 15: what stays in the model is told too; a trained model knows its retained pairs by heart."""
    measure = next(each for each in audited.records["finetune"].verdict.measures if each.name == "retained/auc")
    assert measure.value > 0.9 and measure.inside is not None
    assert "retained pairs against" in measure.note
