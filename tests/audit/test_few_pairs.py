"""A request of few pairs, from end to end: fresh retrainings pass, and what was not forgotten does not."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ease.audit.config import AuditConfig
from ease.audit.few_pairs import OneByOne
from ease.audit.measurements import Instruments
from ease.audit.records import AuditRecord
from ease.audit.runner import Audit
from ease.audit.subjects import Subjects
from ease.audit.verdict import Reason, Verdict
from ease.measures.evaluate import embed_pairs
from ease.measures.ranks import FEW
from ease.methods import make_method
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.answers import answer_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, galleries, measure
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World

BY_HEART = (
    "data.train=120",
    "data.validation=0",
    "data.test=120",
    "partition.clients=3",
    "partition.classes=4",
    "partition.scheme=uniform",
    "partition.validation_share=0.1",
    "training.rounds=6",
    "training.local_epochs=8",
    "training.batch_size=16",
    "model.hidden=64",
    "model.embedding=32",
    "gallery=40",
)
"""So few pairs, seen so often, that each is known by heart."""
RETRAINS, FRESH = 9, 8
CLIENT = ClientRequest(clients=(1,))


@dataclass(frozen=True)
class Single:
    """A run whose model knows its pairs by heart, asked to forget one of them."""

    audit: Audit
    fresh: tuple[Params, ...]
    """Retrainings that no verdict knows."""

    def judge(self, state: Params) -> Verdict:
        return self.audit.instruments.measure(state).verdict


@pytest.fixture(scope="module")
def single(shared_cache, tmp_path_factory) -> Single:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        config = load_config(None, BY_HEART)
        world = World.open(config)
    run = Run.create(tmp_path_factory.mktemp("single") / "run", config)
    list(run.train(world))
    request = SampleRequest(ids=world.shards[0].train_ids[:1])
    method = make_method("finetune")
    for each in (Retrain(), method):
        list(forget(run, world, request, each, observe=False))
    settings = AuditConfig(retrains=RETRAINS, pool=64, workers=1)
    audit = Audit(run, world, answer_of(run, request, method), request, method, settings)
    every = replace(audit, config=settings.model_copy(update={"retrains": RETRAINS + FRESH}))
    assert every.missing() == ([], list(range(1, RETRAINS + FRESH + 1))), "no shadow is needed"
    list(every.shadows())
    orders = range(RETRAINS + 1, RETRAINS + FRESH + 1)
    return Single(audit, tuple(Params.load(audit.plan.retrain_path(order)) for order in orders))


@pytest.mark.slow
def test_fresh_retrainings_pass_and_models_that_keep_the_pair_do_not(single: Single) -> None:
    """At 5 % three or more of eight fresh retrainings are refused in less than one of a hundred audits."""
    assert isinstance(single.audit.instruments, OneByOne)
    passed = [single.judge(state).passed for state in single.fresh]
    assert passed.count(False) <= 2 and None not in passed
    trained, first = single.audit.trained.final, single.fresh[0]
    found = single.judge(trained)
    assert found.passed is False and found.reason is Reason.KEPT and found.joint.trace.contains(1.0)
    assert single.judge(first + 0.8 * (trained - first)).passed is False


@pytest.mark.slow
def test_power_is_reported_and_grows_with_the_share(single: Single) -> None:
    """The trained model itself is caught; a tenth of one pair's trace is not, and nobody says so."""
    joint = single.judge(single.fresh[0]).joint
    power = dict(joint.power)
    assert list(power) == [0.1, 0.2, 0.4, 0.7, 1.0] and power[0.1] < 0.5 < 0.9 < power[1.0]
    assert 0.1 < joint.smallest_caught < 1.0


@pytest.mark.slow
def test_the_kept_values_are_the_ranks_of_the_pair(single: Single) -> None:
    record: AuditRecord = single.audit.judge()
    (pair,) = record.pairs
    assert pair.id == single.audit.request.ids[0] and len(record.similarities["trained"]) == 1
    world, state = single.audit.world, single.audit.trained.final
    drawn = galleries(world, evaluation_sets(world, single.audit.request)["forget"], pair.gallery)[0]
    seen = world.evaluator
    image, text = embed_pairs(seen.model, state, seen.activations, drawn, seen.device)
    own = float((image[0] @ text[0].T).max())
    above = sum(float((image[0] @ other.T).max()) > own for other in text[1:])
    asked = [1 + int((image[1:] @ caption > image[0] @ caption).sum()) for caption in text[0]]
    expected = np.exp((np.log(1 + above) + np.mean(np.log(asked))) / 2)
    assert pair.rank["trained"] == pytest.approx(expected)
    assert pair.rank["retrain"] > pair.rank["trained"] and pair.log_odds["retrain"] < pair.log_odds["trained"]
    assert any(warning.startswith("no attacks were made") for warning in record.warnings)


def test_many_pairs_without_unseen_ones_of_their_kind_are_measured_without_attacks(learnt) -> None:
    """Retrained models are stand-ins here: the start of training and a little of the way from it."""
    world, start, final = learnt.world, learnt.trained.initial, learnt.trained.final
    retrained = {f"retrain{name}": start + share * (final - start) for name, share in (("", 0.0), ("-1", 0.05))}
    subjects = Subjects.of(world, CLIENT, 16)
    kept = subjects.candidates.member
    alone = replace(
        subjects.candidates,
        positions=subjects.candidates.positions[kept],
        member=kept[kept],
        home=subjects.candidates.home[kept],
        classes=subjects.candidates.classes[kept],
    )
    assert alone.members >= FEW and "0 of those are of the forget pairs'" in alone.why_no_attack()
    settings = AuditConfig(pool=16, relearn_pairs=4)
    population = np.setdiff1d(world.evaluator.test, subjects.pool)
    instruments = Instruments(
        world,
        CLIENT,
        learnt.trained,
        retrained,
        replace(subjects, candidates=alone, population=population),
        None,
        settings,
    )
    found = instruments.measure(final)
    names = {each.name for each in found.measures}
    assert {"forget/recall@1", "rho", "ks/distance", "retained/auc"} <= names
    assert not any(name.startswith(("bavaria", "u-", "mia", "rmia", "relearn", "before")) for name in names)
    assert all(np.isfinite(each.value) for each in found.measures) and found.attack == ""


@pytest.mark.parametrize("pairs", [1, 3])
def test_recall_of_few_pairs_is_among_test_pairs_of_their_kind(learnt, pairs: int) -> None:
    """A naive count in the gallery of each; the mean of both directions, captions of a pair weighing together one."""
    world, state = learnt.world, learnt.trained.final
    request = SampleRequest(ids=world.shards[0].train_ids[:pairs])
    sets = evaluation_sets(world, request)
    assert len(sets["forget"]) == pairs < FEW
    found = measure(world, state, sets)
    drawn = galleries(world, sets["forget"], int(found["gallery"]))
    assert drawn.shape == (pairs, 40) and drawn[:, 0].tolist() == sets["forget"].tolist()
    assert np.isin(drawn[:, 1:], world.evaluator.test).all()
    seen, hits = world.evaluator, {k: [] for k in (1, 5, 10)}
    for members in drawn:
        image, text = embed_pairs(seen.model, state, seen.activations, members, seen.device)
        own = float((image[0] @ text[0].T).max())
        above = int((image[0] @ text[1:].flatten(0, 1).T > own).sum())
        asked = [int((image[1:] @ caption > image[0] @ caption).sum()) for caption in text[0]]
        for k, both in hits.items():
            both.append(((above < k) + np.mean([place < k for place in asked])) / 2)
    for k, both in hits.items():
        assert found[f"forget/recall@{k}"] == pytest.approx(100 * np.mean(both))
