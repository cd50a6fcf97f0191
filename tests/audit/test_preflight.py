"""Whether an audit would be refused is said before anyone waits for one, and what is said is true."""

from dataclasses import replace

import numpy as np
import pytest

from ease.audit.config import AuditConfig
from ease.audit.preflight import audit_prospects, fitted_pool, verdict_prospects
from ease.audit.subjects import Subjects
from ease.errors import UserError
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.world import World

CLIENT = ClientRequest(clients=(1,))


def with_test_pairs(world: World, count: int) -> World:
    """The same world with so many pairs of no client; some are there twice where it has fewer."""
    evaluator = world.evaluator
    return replace(world, evaluator=replace(evaluator, test=np.resize(evaluator.test, count), spare=evaluator.test[:0]))


def test_all_is_well_where_the_usual_pool_leaves_enough(learnt) -> None:
    world = with_test_pairs(learnt.world, 600)
    assert audit_prospects(world) == audit_prospects(world, CLIENT) == ""


def test_the_pool_fits_the_data_and_the_line_names_it(learnt) -> None:
    for request in (None, CLIENT):
        line = audit_prospects(learnt.world, request)
        assert line.startswith("an audit will compare with 20 pairs instead of 512, since there are 40 validation and")
    assert fitted_pool(learnt.world, CLIENT, None) == 20
    assert fitted_pool(learnt.world, CLIENT, 512) == 512, "a chosen pool stays"
    assert fitted_pool(with_test_pairs(learnt.world, 600), CLIENT, None) == 512
    Subjects.of(learnt.world, CLIENT, 20)
    with pytest.raises(UserError):
        Subjects.of(learnt.world, CLIENT, 512)


def test_a_few_pairs_are_audited_without_attacks_and_it_reports_it(learnt) -> None:
    world, one = with_test_pairs(learnt.world, 600), SampleRequest(ids=learnt.world.shards[0].train_ids[:1])
    said = "an audit will go by ranks and levels compared with retraining only: attacks compare many pairs, 8 at least"
    assert audit_prospects(world, one).startswith(said) and audit_prospects(world, one).endswith("the request names 1")
    smaller = audit_prospects(learnt.world)
    assert audit_prospects(learnt.world, one) == f"{smaller}; {audit_prospects(world, one)}"
    assert Subjects.of(learnt.world, one, 20).candidates.members == 1


def test_a_limit_that_no_pool_lifts_is_reported(learnt) -> None:
    few = with_test_pairs(learnt.world, 17)
    assert audit_prospects(few) == audit_prospects(few, CLIENT)
    assert "needs 18 validation and test pairs at least" in audit_prospects(few) and "there are 17" in audit_prospects(
        few
    )
    world = with_test_pairs(learnt.world, 600)
    vanished = [replace(s, train=s.train[:0], train_ids=(), train_classes=s.train_classes[:0]) for s in world.shards]
    gone = replace(world, evaluator=replace(world.evaluator, shards=tuple(vanished)))
    line = audit_prospects(gone, SampleRequest(ids=world.shards[0].train_ids[:3]))
    assert line.startswith("no audit of this request is possible: 3 of the 3 photographs") and "vanished" in line


def test_too_few_retrainings_for_a_verdict_are_said_before_any_is_computed() -> None:
    assert verdict_prospects(AuditConfig()) == verdict_prospects(AuditConfig(retrains=5)) == ""
    line = verdict_prospects(AuditConfig(retrains=3))
    assert line.startswith("--retrains 3: no verdict is possible") and "add --retrains 5 or more" in line
