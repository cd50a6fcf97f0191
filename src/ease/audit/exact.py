"""Audit of exact results: the hashes of sums and models are compared with retraining."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from ease.audit.config import AuditConfig
from ease.audit.costs import phase_seconds, prices
from ease.audit.records import AuditRecord, Costs, Gallery
from ease.audit.verdict import Identity, Verdict
from ease.errors import UserError
from ease.federation.engines import make_engine
from ease.federation.fedavg import Round
from ease.federation.history import SUMS, History
from ease.methods.retrain import Retrain
from ease.requests.request import Request, leaving_clients
from ease.runs.answers import StoredAnswer, answer_of, open_world, trained_of
from ease.runs.records import write_record
from ease.runs.run import Run
from ease.storage import sha256
from ease.trainers.sums import clients_named, sum_and_solve

NOTHING_TO_TEST = (
    "attacks, distances and relearning were not run: the answer and the retrained model are the same file, so that "
    "every measure of the one is that of the other"
)
NOT_TESTED = (
    "whether the sums of training came from the pairs that clients say they hold",
    "copies of earlier models, backups and exports",
)


def rounds_of(run: Run, stored: StoredAnswer) -> History:
    """The history with the round of an exact result."""
    return replace(run.history, place=stored.rounds_path.relative_to(run.folder).as_posix())


def sums_hash(run: Run, stored: StoredAnswer) -> str:
    """The hash of a result's sums; empty if it has none."""
    history = rounds_of(run, stored)
    if not history.rounds() or not history.sums_sha256(1):
        return ""
    history.sums(1)  # refuses another file than the recorded one
    return history.sums_sha256(1)


def judge_identity(run: Run, stored: StoredAnswer, request: Request, config: AuditConfig) -> AuditRecord:
    """Compare an exact answer with retraining, which must have been done, and keep the verdict as `audit.json`."""
    reference = answer_of(run, request, Retrain())
    ours, theirs = stored.record(), reference.record()
    paid = prices(ours.metrics, theirs.metrics, 0.0)
    verdict = Verdict(
        measures=(),
        joint=None,
        identity=Identity(
            sums=sums_hash(run, stored),
            retrain_sums=sums_hash(run, reference),
            model=sha256(stored.model_path),
            retrain_model=sha256(reference.model_path),
        ),
    )
    record = AuditRecord(
        request=request,
        method=ours.method,
        model_sha256=sha256(stored.model_path),
        retrain_sha256=sha256(reference.model_path),
        settings=config.model_copy(update={"workers": None}),
        verdict=verdict,
        gallery=Gallery(pairs=int(ours.metrics["gallery"]), chance={}),
        attack="",
        attacks={},
        relearning={},
        similarities={},
        costs=Costs(
            totals={name: price for name, price in paid.items() if name != "flops"},
            phases=phase_seconds(ours.metrics),
            compute_matched_retrain={},
            training_rounds=1,
        ),
        warnings=(NOTHING_TO_TEST,) if verdict.passed else tuple(_other_features(run, stored, reference)),
        not_tested=NOT_TESTED,
    )
    write_record(stored.audit_path, record)
    return record


def _other_features(run: Run, stored: StoredAnswer, reference: StoredAnswer) -> Iterator[str]:
    """Says which clients' features are not those that the answer was solved from."""
    ours, theirs = (rounds_of(run, each).features(1) for each in (stored, reference))
    if other := [client for client in sorted(ours.keys() & theirs.keys()) if ours[client] != theirs[client]]:
        yield (
            f"{clients_named(other)}: the features of the pairs that stay are not those of the answer; either other "
            "pairs were subtracted, or the cache of features was made again and they are computed otherwise now"
        )


def computed_again(run: Run, request: Request) -> tuple[str, str]:
    """Hashes of the sums and of the model that the retained pairs give, computed from their features now.

    It takes every client's pairs in one place and asks no client.
    """
    world = open_world(run, request)
    world.check_together("computing the sums again")
    history = trained_of(run, request).history
    server, closed = world.server, world.without(request)
    engine = make_engine("sequential", server.model, closed.shards, world.evaluator.activations, server.device)
    leaving, config = leaving_clients(request), run.config
    stay = [client for client in engine.clients if client not in leaving]
    if not stay:
        raise UserError(f"{run.folder}: no client is left whose sums could be computed again")
    training = config.training.model_copy(update={"secure": False})  # nobody is asked, so that nothing needs masks
    recipe = training, config.seed, config.model.temperature
    return hashes_of(sum_and_solve(history.initial(), engine, *recipe, stay, again=history))


def hashes_of(finished: Round) -> tuple[str, str]:
    """Hashes of the files of a solved round: its sums and its model."""
    assert finished.sums is not None  # it was solved
    sums, model = (hashlib.sha256(each.file_bytes()).hexdigest() for each in (finished.sums, finished.state))
    return sums, model


def sums_file(run: Run, stored: StoredAnswer) -> str:
    """The path of a result's sums, for a message."""
    history = rounds_of(run, stored)
    return str(history.record_path(1).with_name(SUMS))
