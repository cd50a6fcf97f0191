"""Audits of pairs that lie at their sites: nodes tell what one place would measure, and verdicts are right."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.federation.on_site import Sites, lasting

from ease.audit.at_sites import AtSites, FewAtSites
from ease.audit.config import AuditConfig
from ease.audit.preflight import audit_prospects
from ease.audit.runner import Audit, check_possible
from ease.audit.site_measures import AUDIT, FEWEST_UNSEEN, KINDS, NUMBERS
from ease.audit.verdict import Reason
from ease.commands.audit import audit_run
from ease.errors import UserError
from ease.federation.codec import decode_update, encode_update
from ease.federation.middleware import Guarded
from ease.federation.node import Policy
from ease.federation.wire import UPDATE, Ask, decode_answer, encode
from ease.measures.evaluate import embed_pairs
from ease.methods import make_method
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import answer_of, open_world, release, trained_of
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World

BY_HEART = ("training.local_epochs=8", "model.hidden=64", "model.embedding=32")
"""So few pairs, seen so often, that each is known by heart."""
CLIENT = ClientRequest(clients=(1,))
SETTINGS = AuditConfig(retrains=6, workers=1)


@dataclass(frozen=True)
class Trained:
    """A run over nodes, and the same with all pairs in one place."""

    sites: Sites
    run: Run
    pooled: World

    def audit(self, request: Request, method: str = "finetune", settings: AuditConfig = SETTINGS) -> Audit:
        made = make_method(method)
        return Audit(
            self.run, open_world(self.run, request), answer_of(self.run, request, made), request, made, settings
        )

    def answered(self, request: Request, method: str = "finetune") -> None:
        for each in (Retrain(), make_method(method)):
            list(forget(self.run, open_world(self.run), request, each, observe=False))


@pytest.fixture(scope="module")
def there(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Trained]:
    with lasting(drawn, tmp_path_factory, (*small, *BY_HEART), shared_cache) as sites:
        run, pooled = sites.trained(), sites.pooled()
        made = Trained(sites, run, open_world(pooled))
        made.answered(CLIENT)
        yield made


REQUESTS: dict[str, Callable[[World], Request]] = {
    "client": lambda world: CLIENT,
    "class": lambda world: ClassRequest(classes=(1,)),
    "sample": lambda world: SampleRequest(ids=(*world.shards[0].train_ids[:3], *world.shards[2].train_ids[:1])),
}


def naive(world: World, state: Params, request: Request, client: int) -> dict[str, list[tuple[float, ...]]]:
    """What a client should tell, pair by pair, with everything at hand."""
    shard, temperature = world.shards[client], world.config.model.temperature
    named = forget_mask(request, shard)
    alike = [not isinstance(request, ClassRequest) or label in request.classes for label in shard.validation_classes]
    chosen = {
        "forget": shard.train[named],
        "retain": shard.train[~named],
        "held_out": shard.validation[np.array(alike, bool)],
        "unseen": shard.validation[~np.array(alike, bool)],
    }
    seen, found = world.evaluator, {}
    for kind, positions in chosen.items():
        found[kind] = []
        for position in positions:
            others = np.array([each for each in shard.validation if each != position])
            image, text = embed_pairs(seen.model, state, seen.activations, np.array([position, *others]), seen.device)
            own, words, rest, written = image[0].numpy(), text[0].numpy(), image[1:].numpy(), text[1:].numpy()
            odds, ranks, margins = [], [], []
            for caption in words:
                to_text = np.mean([np.exp(own @ each[0] / temperature) for each in written])
                to_image = np.mean([np.exp(caption @ each / temperature) for each in rest])
                odds.append(own @ caption / temperature - (np.log(to_text) + np.log(to_image)) / 2)
                scores = [caption @ each for each in rest]
                ranks.append(1 + sum(score > caption @ own for score in scores))
                margins.append(caption @ own - max(scores))
            best, scores = max(own @ caption for caption in words), [max(own @ w for w in each) for each in written]
            rank = np.exp((np.log(ranks).mean() + np.log(1 + sum(score > best for score in scores))) / 2)
            margin = (np.mean(margins) + best - max(scores)) / 2
            found[kind].append((np.mean(odds), np.mean([own @ caption for caption in words]), rank, margin))
    return found


@pytest.mark.parametrize("kind", REQUESTS)
def test_nodes_report_the_measures_of_one_place(there: Trained, kind: str) -> None:
    request = REQUESTS[kind](there.pooled)
    audit = there.audit(request)
    instruments = AtSites(
        audit.world, request, audit.trained, {}, Guarded(audit.engine, there.run.config.training), SETTINGS
    )
    state = audit.trained.final
    reported = instruments._look(state).readings
    for client, values in reported.items():
        wanted = naive(there.pooled, state, request, client)
        for each in KINDS:
            for column, name in enumerate(NUMBERS):
                numbers = np.array([row[column] for row in wanted[each]])
                assert values[f"{each}/{name}"] == pytest.approx(numbers, abs=2e-4), (client, each, name)
    assert sorted(reported) == [0, 1, 2] and sum(len(values["forget/rank"]) for values in reported.values())


@pytest.mark.slow
def test_the_trained_model_is_refused_and_a_fresh_retraining_is_not(there: Trained) -> None:
    audit = there.audit(CLIENT)
    more = replace(audit, config=SETTINGS.model_copy(update={"retrains": 8}))
    assert more.missing() == ([], [*range(1, 9)])
    assert sum(more.shadows()) == 8 * there.run.config.training.rounds
    assert more.missing() == ([], [])
    tried = {"trained": audit.trained.final}
    tried |= {f"fresh {order}": Params.load(audit.plan.retrain_path(order)) for order in (7, 8)}
    found = {name: audit.instruments.measure(state).verdict for name, state in tried.items()}
    assert found["trained"].passed is False and found["trained"].reason is Reason.KEPT
    assert all(found[f"fresh {order}"].passed is not False for order in (7, 8))
    names = {each.name for each in found["trained"].measures}
    assert {"pair/rank", "pair/log_odds", "rho", "ks/distance", "held-out/auc", "retained/auc"} <= names
    assert not any(name.startswith(("bavaria", "relearn", "forget/recall")) for name in names)


def test_retrainings_by_nodes_are_those_of_one_place(there: Trained) -> None:
    """The second one in another order, by nodes as the audit makes it, and in one process as a method."""
    audit = there.audit(CLIENT, settings=SETTINGS.model_copy(update={"retrains": 1}))
    list(audit.shadows())
    pooled = Run.load(there.sites.folder / "pooled")
    steps = Retrain(order=1).unlearn(trained_of(pooled), CLIENT, there.pooled.federation)
    states = [step.state for step in steps]
    assert Params.load(audit.plan.retrain_path(1)) == states[-1]
    assert Params.load(audit.plan.retrain_path(1, 0.5)) == states[max(1, round(0.5 * len(states))) - 1]


@pytest.mark.slow
def test_the_command_writes_a_verdict_and_says_what_was_not_tested(there: Trained) -> None:
    record = audit_run(there.run.folder, "client-1/finetune", SETTINGS, retrain=False, quiet=True)
    assert record.verdict.joint is not None and record.verdict.joint.retrained == 7
    assert len(record.similarities["unlearned"]) == len(there.pooled.shards[1].train)
    assert (
        "membership attacks by shadows" in record.not_tested[0]
        and "sites report their own pairs truthfully" in record.not_tested[1]
    )
    assert record.attack == "held-out/auc" and set(record.attacks["held-out/auc"]) >= {
        "trained",
        "unlearned",
        "retrain",
    }
    assert record.costs.compute_matched_retrain["50%"].keys() == {"test"}
    assert list(record.render())
    assert audit_prospects(open_world(there.run), CLIENT) == ""


@pytest.mark.slow
def test_few_pairs_are_looked_at_one_by_one(there: Trained) -> None:
    request = REQUESTS["sample"](there.pooled)
    there.answered(request)
    audit = there.audit(request)
    list(audit.shadows())
    assert isinstance(audit.instruments, FewAtSites)
    record = audit.judge()
    assert [pair.id for pair in record.pairs] == list(request.ids)  # type: ignore[union-attr]
    held_out = [len(there.pooled.shards[client].validation) for client in (0, 0, 0, 2)]
    assert [pair.gallery for pair in record.pairs] == [1 + count for count in held_out]
    assert record.pair_galleries == f"{1 + held_out[3]} to {1 + held_out[0]}"
    assert {each.name for each in record.verdict.measures}.isdisjoint({"rho", "ks/distance", "held-out/auc"})
    assert record.verdict.joint is not None and record.verdict.joint.power[-1][0] == 1


def test_a_missing_node_ends_it_by_name_and_what_came_is_kept(there: Trained, monkeypatch) -> None:
    audit = there.audit(ClassRequest(classes=(0,)), settings=SETTINGS.model_copy(update={"retrains": 1}))
    node = there.sites.nodes[2]
    monkeypatch.setattr(node, "policy", Policy(jobs_per_hour=len(node._times) + 1))
    with pytest.raises(
        UserError, match=r"2 of 3 clients gave a sound answer and 3 are needed \(client 2: .*an hour"
    ) as no:
        list(audit.shadows())
    assert "quorum" not in str(no.value)
    assert list(audit.plan.store.glob("journal-1/*.update")) and not audit.plan.retrain_path(1).exists()
    monkeypatch.setattr(node, "policy", Policy())
    before = len(there.sites.nodes[0]._times)
    list(audit.shadows())
    rounds = there.run.config.training.rounds
    assert len(there.sites.nodes[0]._times) - before == rounds - 2, "answers of two rounds were kept"
    assert audit.plan.retrain_path(1).exists() and not list(audit.plan.store.glob("journal-*"))


def altered(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        answer, update = decode_answer(data)
        assert update is not None
        reported = decode_update(update)
        return encode(answer, {UPDATE: encode_update(replace(reported, values=change(dict(reported.values))))})

    return changed


NONSENSE = {
    "no number": (lambda v: v | {"forget/rank": v["forget/rank"] * float("nan")}, "non-finite"),
    "a cosine of three": (lambda v: v | {"forget/cosine": v["forget/cosine"] * 0 + 3}, "which no model gives"),
    "a pair too few": (lambda v: v | {"forget/cosine": v["forget/cosine"][1:]}, "expected"),
    "fewer held-out pairs": (lambda v: {k: e[1:] if "held_out" in k else e for k, e in v.items()}, "the run knows of"),
    "nothing of the kind": (lambda v: {k: e for k, e in v.items() if k != "held_out/rank"}, "lack 'held_out/rank'"),
}


@pytest.mark.parametrize("lie", NONSENSE)
def test_a_node_with_impossible_reports_is_named(there: Trained, monkeypatch, lie: str) -> None:
    change, problem = NONSENSE[lie]
    audit, node = there.audit(CLIENT), there.sites.nodes[1]
    respond, lying = node.respond, altered(change)

    def nonsense(ask: Ask, job: bytes, parts: dict[str, bytes]) -> bytes:
        data = respond(ask, job, parts)
        return lying(data) if ask.kind == "task" and decode_answer(data)[1] is not None else data

    monkeypatch.setattr(node, "respond", nonsense)
    sound = Guarded(audit.engine, there.run.config.training, everyone=True)
    instruments = AtSites(audit.world, CLIENT, audit.trained, {}, sound, SETTINGS)
    with pytest.raises(UserError, match=problem) as refused:
        instruments._look(audit.trained.final)
    assert "client 1" in str(refused.value)


def test_a_site_may_refuse_to_be_audited(there: Trained, monkeypatch) -> None:
    monkeypatch.setattr(there.sites.nodes[0], "policy", Policy(objectives=("align", "membership scores")))
    audit = there.audit(CLIENT)
    sound = Guarded(audit.engine, there.run.config.training, everyone=True)
    with pytest.raises(UserError, match=f"its policy does not allow the objective '{AUDIT}'"):
        AtSites(audit.world, CLIENT, audit.trained, {}, sound, SETTINGS)._look(audit.trained.final)


def test_measures_that_sites_lack_are_refused_first(there: Trained, tmp_path: Path) -> None:
    world = open_world(there.run)
    members = world.server.membership
    few = [each.model_copy(update={"validation_ids": each.validation_ids[:2]}) for each in members.clients]
    bare = replace(world, server=replace(world.server, membership=members.model_copy(update={"clients": tuple(few)})))
    with pytest.raises(UserError, match=f"client 1: holds forget pairs and holds out 2, .* {FEWEST_UNSEEN} at least"):
        check_possible(there.run, bare, CLIENT, SETTINGS)
    assert audit_prospects(bare, CLIENT).startswith("no audit of this request is possible: client 1")
    closed = there.sites.trained("closed")
    list(forget(closed, open_world(closed), CLIENT, make_method("finetune"), observe=False))
    release(closed, "client-1/finetune")
    with pytest.raises(UserError, match="before `ease release`"):
        audit_run(closed.folder, "client-1/finetune", SETTINGS, retrain=False, quiet=True)
