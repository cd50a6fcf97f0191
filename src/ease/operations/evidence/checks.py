"""Checking a certificate: its signatures, its place in the run's log, and all that it lists, computed again."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ease.audit.exact import computed_again, sums_file, sums_hash
from ease.audit.records import AuditRecord
from ease.config import validate
from ease.errors import UserError
from ease.methods.retrain import Retrain
from ease.operations.evidence.canonical import Refuted, canonical, hashed
from ease.operations.evidence.certificates import (
    audit_figures,
    costs_of,
    directions_of,
    figures_of,
    files_of,
    installed_code,
    label_of,
    plain,
    read_certificate,
    verdict_of,
)
from ease.operations.evidence.envelope import Envelope
from ease.operations.evidence.keys import PublicKey
from ease.operations.evidence.log import ANSWERED, AUDITED, CERTIFIED, Log, read_log
from ease.operations.evidence.salted import redacted, salt_path
from ease.operations.evidence.statement import Certificate, asked
from ease.params import Params
from ease.requests.request import listed_ids
from ease.requests.tombstones import read_tombstones
from ease.runs.answers import StoredAnswer, check_current, open_world
from ease.runs.config import RunConfig
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.records import read_record
from ease.runs.resolve import named_ids
from ease.runs.run import Run
from ease.storage import sha256

DRAWS = 5
"""Galleries that recall is measured on, as when the answer was given."""
PurgeTrace = Mapping[str, Any] | None
"""The log's record of what a purge left of a result; None: no purge touched it."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    holds: bool | None
    """None: it could not be checked."""
    words: str


@dataclass(frozen=True)
class Signer:
    """Whose signature an envelope bears."""

    key_id: str
    name: str | None
    """The verifier's name for the key; None for a key without a name."""


@dataclass(frozen=True)
class Verification:
    """All that was looked at. One thing that does not hold is enough to refuse a certificate."""

    checks: tuple[Check, ...]
    signers: tuple[Signer, ...] = ()
    certificate: Certificate | None = None
    """None where not even that could be read."""

    @property
    def holds(self) -> bool:
        return all(check.holds is not False for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is refused, one line each."""
        return tuple(check.words for check in self.checks if check.holds is False)


def verify(
    path: Path,
    run: Run | None = None,
    keys: Mapping[str, PublicKey] | None = None,
    model: Path | None = None,
    quick: bool = False,
) -> Verification:
    """Check a certificate against what is at hand: keys whose owners are known, a model file, the run itself.

    `keys` are by the names of their owners; each of them must have signed. `quick` measures nothing anew.
    """
    try:
        envelope, certificate = read_certificate(path)
    except Refuted as error:
        return Verification((Check("signatures", False, str(error)),))
    keys = keys or {}
    checks = list(_of_signatures(envelope, keys, run))
    if model is not None:
        checks.append(_looked("model file", _model_file, certificate, model))
    if run is None:
        checks.append(Check("run", None, "neither the log nor any figure was checked: that takes the run (--run)"))
    else:
        checks += _of_run(run, envelope, certificate, quick)
    return Verification(
        tuple(checks), _signers(envelope, keys, None if run is None else certificate.log.key), certificate
    )


def _looked(name: str, look: Callable[..., str | Check], *arguments: Any) -> Check:
    """A check that says what it found, or why it refuses."""
    try:
        found = look(*arguments)
    except (UserError, OSError) as error:
        return Check(name, False, str(error))
    return found if isinstance(found, Check) else Check(name, True, found)


# Signatures


def _of_signatures(envelope: Envelope, keys: Mapping[str, PublicKey], run: Run | None) -> Iterator[Check]:
    signed = {each.keyid for each in envelope.signatures}
    yield Check("signatures", True, f"{len(signed)} signatures hold" if len(signed) > 1 else "the signature holds")
    for name, key in keys.items():
        found = "signed with this key" if key.id in signed else f"wrong key: no signature by {name} ({key.id})"
        yield Check(f"key {name}", key.id in signed, found)
    if not keys and run is None:
        yield Check("keys", None, "whose keys these are was not checked: name those you know (--key)")


def _signers(envelope: Envelope, keys: Mapping[str, PublicKey], log_key: str | None) -> tuple[Signer, ...]:
    names = {} if log_key is None else {log_key: "the run"}
    names |= {key.id: name for name, key in keys.items()}
    return tuple(Signer(each.keyid, names.get(each.keyid)) for each in envelope.signatures)


def _model_file(certificate: Certificate, path: Path) -> str:
    found = sha256(path)
    if found != certificate.models.after:
        raise Refuted(f"{path}: another model than the certificate is about ({found[:12]}..., not its hash)")
    return f"{path} is the model that the certificate is about"


# The run


def _of_run(run: Run, envelope: Envelope, certificate: Certificate, quick: bool) -> Iterator[Check]:
    left: PurgeTrace = None
    try:
        log = read_log(run)
    except (UserError, OSError) as error:
        yield Check("log", False, str(error))
    else:
        if certificate.log.key != log.key.id:
            yield Check("run", False, f"certificate of another run: its log is signed by {certificate.log.key}")
            return
        words = f"{len(log.records)} records, each with the hash of the one before, up to a signed head"
        yield Check("log", True, words)
        if log.unfinished:
            yield Check("log end", None, f"{log.unfinished} bytes of an unfinished record after the head do not count")
        yield _looked("log position", _position, log, envelope, certificate)
        left = log.left_by_purge(_label(certificate))
    if not salt_path(run).is_file():  # left out of a copy that was passed on; to make one would be to write into it
        yield Check("pairs", None, f"{salt_path(run)}: missing, so no pair can be held against its hash")
    try:
        stored = _answer(run, certificate, left)
    except (UserError, OSError) as error:
        removed = left is not None and "record.json" in left["gone"]
        yield (
            Check("answer", None, f"not there any more: {PURGED_SINCE}")
            if removed
            else Check("answer", False, str(error))
        )
        return
    files = [_looked(name, _file, stored, certificate, name, left) for name in certificate.files]
    yield from files
    yield _unless_purged(_looked("model before", _before, run, certificate), left)
    if any(check.holds is False for check in files):
        yield Check("figures", None, "not computed again: the files that they come from are others")
        return
    yield _looked("recorded figures", _recorded, run, stored, certificate)
    yield from _marked(run, stored)
    if certificate.models.retrain is not None:
        yield _unless_purged(_looked("retrained model", _retrained, stored, certificate), left)
    if certificate.audit is not None:
        yield _looked("audit", _audited, stored, certificate)
    if certificate.models.sums is not None:
        yield _unless_purged(_looked("sums", _sums, run, stored, certificate), left)
    yield _looked("configuration", _configured, run, certificate)
    yield _code(certificate)
    if certificate.models.sums is not None and not quick:
        yield _looked("computed again", _computed_again, run, stored, certificate)
    if not quick:
        yield _looked("measured figures", _measured, run, stored, certificate)


def _position(log: Log, envelope: Envelope, certificate: Certificate) -> str:
    place = certificate.log
    if place.sequence >= len(log.records):
        raise Refuted(
            f"the log ends with record {len(log.records) - 1}, and the certificate names record {place.sequence}: "
            "later records were cut off"
        )
    if log.records[place.sequence].sha256 != place.sha256:
        raise Refuted(f"certificate of another run: record {place.sequence} of this log has another hash")
    content = hashed(envelope.content)
    if not any(each.payload.get("certificate") == content for each in log.of_kind(CERTIFIED)):
        raise Refuted("the log contains no such certificate: it was never issued here, or another was put in its place")
    before = log.records[: place.sequence + 1]
    log_then = Log(before, log.key)
    left = log_then.left_by_purge(_label(certificate))
    for kind, name in ((ANSWERED, "record.json"), (AUDITED, "audit.json")):
        key, wanted = name.removesuffix(".json"), certificate.files.get(name)
        purged = left is not None and left["rewritten"].get(name) == wanted
        if wanted and not purged and not log_then.tells(kind, **{key: wanted}):
            raise Refuted(f"the log contains no {name} with the hash that the certificate lists")
    return f"record {place.sequence} is the one that the certificate names, and the log contains the certificate"


PURGED_SINCE = "a purge removed it or made it again, and the log records that purge"


def _label(certificate: Certificate) -> str:
    return f"{certificate.request['name']}/{certificate.answer}"


def _unless_purged(check: Check, left: PurgeTrace) -> Check:
    """Files that a purge removed cannot be checked any more, which is not a fault."""
    return check if check.holds or left is None else Check(check.name, None, PURGED_SINCE)


def _answer(run: Run, certificate: Certificate, left: PurgeTrace) -> StoredAnswer:
    """The certified answer among those of the run, by the hash of its record, or else by its name. This distinguishes a
    changed result from a missing one."""
    stored = [
        StoredAnswer(path.parent)
        for path in sorted(run.folder.glob("requests/*/*/record.json"))
        if path.parent.name == certificate.answer
    ]
    known = {certificate.files.get("record.json"), None if left is None else left["rewritten"].get("record.json")}
    for each in stored:
        if sha256(each.record_path) in known:
            return each
    for each in stored:
        label = label_of(run, each) if salt_path(run).is_file() else f"{each.folder.parent.name}/{each.folder.name}"
        if label == _label(certificate):
            return each
    raise Refuted("no request of this run has the name and method of the certificate")


def _file(stored: StoredAnswer, certificate: Certificate, name: str, left: PurgeTrace) -> str | Check:
    path = files_of(stored).get(name)
    if path is None:
        raise Refuted(f"{name}: no file that an answer has")
    if not path.is_file():
        if left is not None and name in left["gone"]:
            return Check(name, None, f"{path}: {PURGED_SINCE}")
        raise Refuted(f"{path}: missing, and the certificate lists its hash")
    rewritten = None if left is None else left["rewritten"].get(name)
    if rewritten not in (None, certificate.files[name]) and sha256(path) == rewritten:
        return Check(name, None, f"{path}: rewritten by a purge, and its hash is the one that the log records for it")
    if sha256(path) != certificate.files[name]:
        raise Refuted(f"{path}: its hash is not the one that the certificate lists")
    return "as certified"


def _before(run: Run, certificate: Certificate) -> str:
    """The model that the answer began from: a state of the history, or a released answer."""
    wanted = certificate.models.before
    for release in run.head.releases:
        if release.model_sha256 == wanted:
            return _hashes_to(run.model_path(release), wanted)
    for history in (replace(run.history, place=place) for place in run.head.places):
        for number in range(history.rounds(), 0, -1):
            if history.state_sha256(number) == wanted:
                return _hashes_to(history.state_path(number), wanted)
    raise Refuted("no model of this run has the hash of the model before")


def _retrained(stored: StoredAnswer, certificate: Certificate) -> str:
    assert certificate.models.retrain is not None  # asked for by the caller
    beside = StoredAnswer(stored.folder.with_name(Retrain.name))
    return _hashes_to(beside.model_path, certificate.models.retrain)


def _hashes_to(path: Path, wanted: str) -> str:
    if sha256(path) != wanted:
        raise Refuted(f"{path}: its hash is not the one that the certificate lists")
    return "as certified"


def _same(found: Any, certified: Any) -> bool:
    return canonical(found) == canonical(certified)


def _recorded(run: Run, stored: StoredAnswer, certificate: Certificate) -> str:
    record = stored.record()
    expected: dict[str, Any] = {
        "method": plain(record.method),
        "costs": costs_of(record),
        "figures": figures_of(record),
    }
    directions = directions_of(record, certificate.files)
    expected["directions"] = None if directions is None else directions.model_dump(mode="json")
    listed = certificate.model_dump(mode="json")
    if salt_path(run).is_file():
        request = redacted(run, record.request, stored.folder.parent.name)
        expected |= {"request": request, "asked": asked(request)}
        if any(_marked(run, stored)):
            listed["request"] = {**listed["request"], "pairs_sha256": request["pairs_sha256"]}
    else:
        expected["request"] = record.request.model_dump(mode="json", exclude={"ids"})
        listed["request"] = {key: listed["request"].get(key) for key in expected["request"]}
    for name, value in expected.items():
        if not _same(value, listed[name]):
            raise Refuted(f"{name}: {_difference(value, listed[name])}")
    if (
        record.trained_sha256 != certificate.models.before
        or record.files["model.safetensors"] != certificate.models.after
    ):
        raise Refuted("models: the certificate names others than record.json")
    if str(record.seed) != str(certificate.seeds.get("answer")):
        raise Refuted("seeds: record.json has another")
    return "request, method, costs, figures and directions are those of record.json"


def _marked(run: Run, stored: StoredAnswer) -> Iterator[Check]:
    """Report pairs that were purged, whose ids are replaced by marks."""
    known = run.known()
    ids = [] if known is None else named_ids(known[0], stored.record().request)
    purged = [each for each in ids if each in read_tombstones(run.folder).ids]
    if purged:
        share = f"{len(purged)} of {len(ids)}"
        yield Check("pairs", None, f"{share} were purged, and without their ids the hash of all cannot be made again")


def _difference(found: Any, listed: Any) -> str:
    """The first part in which a record and a certificate differ."""
    if isinstance(found, dict) and isinstance(listed, dict):
        for name in sorted({*found, *listed}):
            if name not in found or name not in listed or not _same(found[name], listed[name]):
                return f"{name}: {_difference(found.get(name), listed.get(name))}"
    return f"the record has {_short(found)}, and the certificate {_short(listed)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _audited(stored: StoredAnswer, certificate: Certificate) -> str:
    """The verdict is drawn anew from the audit's measures."""
    audit = read_record(AuditRecord, stored.audit_path)
    if audit.model_sha256 != certificate.models.after:
        raise Refuted("audit: audit.json is of another model")
    figures = audit_figures(audit)
    if not _same(figures, certificate.audit):
        raise Refuted(f"audit: {_difference(figures, certificate.audit)}")
    if verdict_of(audit) != certificate.verdict:
        raise Refuted(f"verdict: the measures give {_short(verdict_of(audit).words)}")
    if audit.not_tested != certificate.not_tested or audit.retrain_sha256 != certificate.models.retrain:
        raise Refuted("audit: what was not tested, or the retrained model, is another in audit.json")
    return "every figure is that of audit.json, and the verdict follows from them"


def _sums(run: Run, stored: StoredAnswer, certificate: Certificate) -> str:
    """The sums that the model was solved from, and those of retraining where they were compared."""
    models = certificate.models
    if sums_hash(run, stored) != models.sums:
        raise Refuted(f"{sums_file(run, stored)}: its hash is not the one that the certificate lists")
    if models.retrain_sums is not None:
        beside = StoredAnswer(stored.folder.with_name(Retrain.name))
        if sums_hash(run, beside) != models.retrain_sums:
            raise Refuted(f"{sums_file(run, beside)}: its hash is not the one that the certificate lists")
    return "as certified"


def _computed_again(run: Run, stored: StoredAnswer, certificate: Certificate) -> str | Check:
    """Sums and model of the retained pairs, computed from their features once more."""
    request, models = stored.record().request, certificate.models
    try:
        sums, model = computed_again(run, request)
    except (UserError, OSError) as error:
        return Check("computed again", None, f"not computed again: {error}")
    if sums != models.sums:
        raise Refuted(
            f"the retained pairs give sums {sums[:12]}, and the certificate lists {str(models.sums)[:12]}: the answer "
            "was not solved from the retained pairs only, or their features are computed otherwise here"
        )
    if model != models.after:
        return Check("computed again", None, "the sums are equal; another machine solves them to other last digits")
    return "the retained pairs give the certified sums and model, bit for bit"


def _configured(run: Run, certificate: Certificate) -> str:
    """The run may have been trained on since; what makes it this run is the same."""
    certified = validate(RunConfig, certificate.configuration, "configuration")
    if certified.identity() != run.config.identity():
        raise Refuted(
            f"configuration: {_difference(plain(run.config.model_dump(mode='json')), certificate.configuration)}"
        )
    if str(certificate.seeds.get("training")) != str(run.config.seed):
        raise Refuted("seeds: the run has another")
    return "that of the run"


def _code(certificate: Certificate) -> Check:
    here, there = installed_code(), certificate.code
    if here.sources_sha256 == there.sources_sha256:
        return Check("code", True, f"version {here.version}, the same sources as are installed here")
    return Check("code", None, f"made by version {there.version} from other sources than those installed here")


def _measured(run: Run, stored: StoredAnswer, certificate: Certificate) -> str | Check:
    """Recall measured once more from the stored model; one pair in one of the galleries may fall otherwise."""
    request = stored.record().request
    if not stored.model_path.is_file():  # reported above
        return Check("measured figures", None, "not measured again: a purge removed the model")
    try:
        check_current(run, stored)
        world = open_world(run, request)
    except (UserError, OSError) as error:
        return Check("measured figures", None, f"not measured again: {error}")
    listed, later = listed_ids((request,)), listed_ids(run.head.gone[len(run.head.before(request).releases) :])
    known = run.known()
    untrained = frozenset[str]().union(*known[0].untrained().values()) if known is not None else frozenset()
    if since := (later - listed) & untrained:
        return Check(
            "measured figures", None, f"not measured again: {len(since)} test or held-out pairs were erased since"
        )
    found = measure(world, Params.load(stored.model_path), evaluation_sets(world, request), DRAWS)
    recalls = [name for name in certificate.figures if "/recall@" in name]
    again = [name for name in recalls if name in found]
    if found["gallery"] != certificate.figures.get("gallery"):
        if len(again) < len(recalls):
            return Check("measured figures", None, "not measured again: pairs have vanished, and galleries are smaller")
        raise Refuted(f"gallery: {found['gallery']:.0f} pairs measured, {certificate.figures.get('gallery')} certified")
    tolerance = 100 / (found["gallery"] * DRAWS)
    for name in again:
        if abs(found[name] - certificate.figures[name]) > tolerance:
            raise Refuted(
                f"{name}: measured again it is {found[name]:.2f}, and {certificate.figures[name]:.2f} is certified"
            )
    if len(again) < len(recalls):
        return Check(
            "measured figures", None, f"{len(again)} of {len(recalls)} measured again; other pairs have vanished"
        )
    return f"{len(again)} recalls measured again from the stored model, equal within {tolerance:.2g} points"
