"""Certificates against what they list: all of it is computed again, and each change is refused for its own reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults import flip

from ease.errors import UserError
from ease.operations.evidence import (
    Verification,
    append,
    countersigned,
    hidden,
    issue,
    new_key,
    read_certificate,
    read_log,
    verify,
    witness,
)
from ease.operations.evidence.canonical import hashed
from ease.operations.evidence.certificates import LARGEST_CERTIFICATE, answer_named, installed_code, plain
from ease.operations.evidence.envelope import sealed
from ease.operations.evidence.keys import read_signing_key
from ease.operations.evidence.log import CERTIFIED, head_path, key_path, log_path
from ease.operations.evidence.salted import salt_path
from ease.operations.evidence.statement import LIMITS, PAYLOAD, asked
from ease.runs.answers import StoredAnswer, release
from ease.runs.records import write_record
from ease.runs.run import Run
from ease.storage import LARGEST_JSON, read_json, sha256, write_json

ANSWER = "requests/client-1/ease"


def written(path: Path, envelope: Any) -> Path:
    path.write_bytes(envelope.file_bytes() + b"\n")
    return path


def reissued(run: Run, path: Path, change: Callable[[dict[str, Any]], None], logged: bool = True) -> Path:
    """What the holder of the run's key could make of a certificate: changed, signed and, if so, logged."""
    statement = json.loads(read_certificate(path)[0].content)
    change(statement["predicate"])
    statement["subject"][0]["digest"]["sha256"] = statement["predicate"]["models"]["after"]
    envelope = sealed(PAYLOAD, statement, read_signing_key(key_path(run)))
    if logged:
        append(run, CERTIFIED, {"certificate": hashed(envelope.content)})
    return written(path, envelope)


def refused(found: Verification) -> str:
    """The one reason for which a certificate is refused."""
    assert not found.holds and len(found.reasons) == 1, found.reasons
    assert "\n" not in found.reasons[0]
    return found.reasons[0]


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {str(path): (sha256(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


# --- what holds ---


def test_a_true_certificate_holds_and_checking_changes_nothing(run: Run, certificate: Path) -> None:
    before = contents(run.folder)
    found = verify(certificate, run)
    assert found.holds and found.reasons == () and all(check.holds for check in found.checks)
    names = [check.name for check in found.checks]
    for name in ("signatures", "log", "log position", "model.safetensors", "record.json", "audit.json"):
        assert name in names
    for name in ("bases.safetensors", "model before", "retrained model", "audit", "configuration", "measured figures"):
        assert name in names
    assert "measured figures" not in [check.name for check in verify(certificate, run, quick=True).checks]
    assert contents(run.folder) == before


def test_it_says_what_is_on_record_and_no_more(run: Run, certificate: Path) -> None:
    envelope, found = read_certificate(certificate)
    statement = json.loads(envelope.content)
    folder, record = run.folder / ANSWER, read_json(run.folder / ANSWER / "record.json")
    audit = read_json(folder / "audit.json")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "urn:ease:certificate:1"
    assert statement["subject"] == [
        {"name": "model.safetensors", "digest": {"sha256": sha256(folder / "model.safetensors")}}
    ]
    assert found.models.before == sha256(run.folder / "rounds" / "00002" / "state.safetensors")
    assert found.models.retrain == sha256(run.folder / "requests/client-1/retrain/model.safetensors")
    assert set(found.files) == {
        "model.safetensors",
        "bases.safetensors",
        "record.json",
        "audit.json",
        "base.safetensors",
    }
    assert all(sha256(folder / name) == reported for name, reported in found.files.items())
    assert found.directions is not None and found.directions.bases_sha256 == sha256(folder / "bases.safetensors")
    assert found.directions.spectrum == record["rounds"][0]["spectrum"]
    assert {**found.figures, **found.costs} == record["metrics"] and found.method == record["method"]
    assert found.verdict.model_dump() == {key: audit["verdict"][key] for key in ("passed", "words")}
    assert found.audit is not None and found.audit["verdict"] == audit["verdict"]
    assert found.not_tested == tuple(audit["not_tested"])
    ids = read_json(run.folder / "membership.json")["clients"][1]["train_ids"]
    assert found.asked == f"Client 1 withdrew: {len(ids)} pairs were to be forgotten."
    assert found.request["pairs_sha256"] == hashed(sorted(hidden(run, each) for each in ids))
    assert found.limits == LIMITS and "not a proof of deletion" in found.limits[0]
    assert found.seeds == {"training": run.config.seed, "answer": run.config.seed}
    records = read_log(run).records
    assert [each.kind for each in records] == ["begun", "answered", "audited", "certified"]
    assert (found.log.sequence, found.log.sha256) == (2, records[2].sha256)
    assert records[3].payload["certificate"] == hashed(envelope.content)


def test_an_answer_that_was_not_audited_reports_it(bare: Run, tmp_path: Path) -> None:
    path = written(tmp_path / "certificate.json", issue(bare, "client-1/retrain"))
    _, found = read_certificate(path)
    assert found.verdict.passed is None and "not audited" in found.verdict.words
    assert found.audit is None and found.directions is None and found.not_tested
    assert verify(path, bare).holds


def test_no_id_of_a_pair_is_in_a_certificate_or_log(bare: Run, tmp_path: Path) -> None:
    folder = next(path.parent for path in bare.folder.glob("requests/sample-*/*/record.json"))
    name = f"{folder.parent.name}/{folder.name}"
    (pair,) = read_json(folder / "record.json")["request"]["ids"]
    path = written(tmp_path / "certificate.json", issue(bare, name))
    envelope, found = read_certificate(path)
    for text in (envelope.content.decode(), log_path(bare).read_text()):
        assert pair not in text and folder.parent.name not in text
    assert found.request["pairs"] == 1 and found.request["pairs_sha256"] == hashed([hidden(bare, pair)])
    assert found.asked == "1 pair was to be forgotten, each named by its id."
    assert verify(path, bare).holds


def test_a_second_certificate_logs_only_itself(run: Run, certificate: Path) -> None:
    stored, request = answer_named(run, "client-1")
    assert witness(run, stored, request) == read_log(run).records[-1]
    second = written(certificate.with_name("second.json"), issue(run, "client-1/ease"))
    assert [each.kind for each in read_log(run).records][3:] == ["certified", "certified"]
    assert verify(certificate, run, quick=True).holds and verify(second, run, quick=True).holds


def test_it_still_holds_when_the_run_has_continued(run: Run, certificate: Path) -> None:
    release(run, "client-1")
    assert verify(certificate, run).holds


def test_without_the_run_what_was_not_checked_is_said(certificate: Path) -> None:
    found = verify(certificate)
    assert found.holds and {check.name for check in found.checks if check.holds is None} == {"run", "keys"}


def test_figures_that_cannot_be_measured_again_are_reported(
    run: Run, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*_: object) -> None:
        raise UserError("3 of the 64 pairs are missing")

    monkeypatch.setattr("ease.operations.evidence.checks.open_world", vanished)
    found = verify(certificate, run)
    (check,) = [check for check in found.checks if check.holds is None]
    assert found.holds and check.name == "measured figures" and "3 of the 64 pairs" in check.words


def test_other_sources_are_reported(run: Run, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = installed_code().model_copy(update={"sources_sha256": "0" * 64})
    monkeypatch.setattr("ease.operations.evidence.checks.installed_code", lambda: other)
    found = verify(certificate, run, quick=True)
    assert found.holds and "other sources" in next(check.words for check in found.checks if check.name == "code")


def test_an_unfinished_record_does_not_count(run: Run, certificate: Path) -> None:
    with log_path(run).open("ab") as file:
        file.write(b'{"kind":"ev')
    found = verify(certificate, run, quick=True)
    assert found.holds and "11 bytes of an unfinished record" in next(
        check.words for check in found.checks if check.name == "log end"
    )


# --- what is refused ---


def test_flipped_bits_of_a_certificate_are_refused(certificate: Path) -> None:
    size = certificate.stat().st_size
    for place in {*range(0, size, 331), *range(size - 60, size)}:
        kept = flip(certificate, place, place % 8)
        assert refused(verify(certificate))
        certificate.write_bytes(kept)
    assert verify(certificate).holds


@pytest.mark.slow
def test_many_flipped_bits_of_a_certificate_are_refused(certificate: Path) -> None:
    for place in range(0, certificate.stat().st_size, 17):
        kept = flip(certificate, place, place % 8)
        assert refused(verify(certificate))
        certificate.write_bytes(kept)


@pytest.mark.parametrize("more", [b"\n", b" ", b"{}", b"\0"])
def test_nothing_may_follow_or_go(certificate: Path, more: bytes) -> None:
    content = certificate.read_bytes()
    certificate.write_bytes(content + more)
    assert refused(verify(certificate))
    certificate.write_bytes(content[:-1])
    assert "line break" in refused(verify(certificate))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "record.json", "audit.json", "bases.safetensors"],
)
def test_a_changed_or_missing_file_is_named(run: Run, certificate: Path, name: str) -> None:
    path = run.folder / ANSWER / name
    kept = flip(path, path.stat().st_size // 2, 3)
    assert name in refused(verify(certificate, run))
    path.unlink()
    if name != "record.json":  # which makes an answer one
        assert f"{name}: missing" in refused(verify(certificate, run))
    path.write_bytes(kept)
    assert verify(certificate, run, quick=True).holds


@pytest.mark.parametrize("place", ["rounds/00002/state.safetensors", "requests/client-1/retrain/model.safetensors"])
def test_other_models_before_or_retrained_are_named(run: Run, certificate: Path, place: str) -> None:
    flip(run.folder / place, -5, 2)
    assert place in verify(certificate, run, quick=True).reasons[0]
    (run.folder / place).unlink()
    assert not verify(certificate, run, quick=True).holds


def test_a_figure_that_does_not_recompute_is_refused(bare: Run, tmp_path: Path) -> None:
    """Even where record, log and signature all agree on it."""
    stored = StoredAnswer(bare.folder / ANSWER)
    record = stored.record()
    better = {**record.metrics, "forget/recall@1": record.metrics["forget/recall@1"] + 7}
    write_record(stored.record_path, record.model_copy(update={"metrics": better}))
    path = written(tmp_path / "certificate.json", issue(bare, "client-1"))
    assert verify(path, bare, quick=True).holds
    assert "forget/recall@1: measured again" in refused(verify(path, bare))


def test_a_verdict_is_drawn_again(bare: Run, tmp_path: Path) -> None:
    """The stored words of an audit are not believed; those in a certificate are its measures'."""
    path = bare.folder / ANSWER / "audit.json"
    table = read_json(path)
    table["verdict"]["words"], table["verdict"]["passed"] = "All deleted for good.", True
    write_json(path, table)
    made = written(tmp_path / "certificate.json", issue(bare, "client-1"))
    assert read_certificate(made)[1].verdict.words != "All deleted for good."
    assert verify(made, bare, quick=True).holds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it["figures"].update({"forget/recall@1": 0.5}), "figures: forget/recall@1: the record has"),
        (lambda it: it["costs"].update({"cost/seconds": 0.0}), "costs: cost/seconds"),
        (lambda it: it["verdict"].update(words="All deleted for good."), "verdict: the measures give"),
        (lambda it: it["audit"]["gallery"].update(pairs=99), "audit: gallery: pairs: the record has"),
        (lambda it: it.update(not_tested=["nothing"]), "what was not tested"),
        (lambda it: it["request"].update(pairs=1), "request: pairs"),
        (lambda it: it.update(asked="Nothing."), "asked"),
        (lambda it: it["method"].update(method="retrain"), "method"),
        (lambda it: it["configuration"].update(gallery=9), "configuration: gallery"),
        (lambda it: it["seeds"].update(answer=5), "seeds"),
        (lambda it: it["seeds"].update(training=5), "seeds"),
        (lambda it: it["directions"].update(spectrum={"delta": 0.3}), "directions: spectrum"),
        (lambda it: it["files"].update({"record.json": "0" * 64}), "record.json with the hash"),
        (lambda it: it["files"].update({"../../../run.json": "0" * 64}), "no file that an answer has"),
        (lambda it: it["request"].update(name="../../../etc"), "request: name: the record has"),
        (lambda it: it.update(answer="../../.."), "no request of this run"),
        (lambda it: it["log"].update(sequence=999), "later records were cut off"),
        (lambda it: it["log"].update(sequence=1), "record 1 of this log has another hash"),
        (lambda it: it["log"].update(sequence=-1), "record -1 of this log|sequence"),
    ],
)
def test_each_forged_part_is_refused_for_its_own_reason(
    run: Run, certificate: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """Forged by whoever has the run's key, and logged: what is on record still contradicts it."""
    path = reissued(run, certificate, change)
    reasons = verify(path, run, quick=True).reasons
    assert any(part in reason for part in words.split("|") for reason in reasons), reasons


def test_a_certificate_that_was_never_logged_is_refused(run: Run, certificate: Path) -> None:
    path = reissued(run, certificate, lambda it: it.update(issued="2001-01-01T00:00:00Z"), logged=False)
    assert "the log contains no such certificate" in refused(verify(path, run, quick=True))


def test_one_signed_by_a_stranger_is_refused(run: Run, certificate: Path, tmp_path: Path) -> None:
    """The content may be the same; the key is not the run's."""
    envelope, found = read_certificate(certificate)
    stranger, operator = new_key(tmp_path / "stranger"), read_signing_key(key_path(run))
    path = written(tmp_path / "same.json", sealed(PAYLOAD, json.loads(envelope.content), stranger))
    assert "first signature is not by the key" in refused(verify(path, run))
    own = {"log": {**found.log.model_dump(), "key": stranger.public.id}}
    statement = json.loads(envelope.content)
    statement["predicate"].update(own)
    path = written(tmp_path / "own.json", sealed(PAYLOAD, statement, stranger))
    assert verify(path).holds  # by itself nothing tells against it, and whose key it is was not checked
    assert "another run" in refused(verify(path, run, quick=True))
    assert "wrong key: no signature by hospital" in refused(verify(path, keys={"hospital": operator.public}))


def test_a_certificate_of_another_run_is_refused(run: Run, bare: Run, certificate: Path, tmp_path: Path) -> None:
    """Of one with equal settings, models and records even."""
    other = written(tmp_path / "other.json", issue(bare, "client-1"))
    assert read_certificate(other)[1].models == read_certificate(certificate)[1].models
    assert "certificate of another run" in refused(verify(other, run))
    assert verify(other, bare, quick=True).holds


def test_a_run_without_evidence_is_reported(bare: Run, certificate: Path) -> None:
    before = contents(bare.folder)
    reasons = verify(certificate, bare).reasons
    assert len(reasons) == 1 and "signing.key.pub" in reasons[0]
    assert contents(bare.folder) == before


def test_a_certificate_of_another_model_is_refused(run: Run, certificate: Path) -> None:
    assert verify(certificate, model=run.folder / ANSWER / "model.safetensors").holds
    other = run.folder / "requests" / "client-1" / "retrain" / "model.safetensors"
    assert "another model" in refused(verify(certificate, model=other))


def test_a_left_out_log_record_is_refused(run: Run, certificate: Path) -> None:
    lines = log_path(run).read_bytes().splitlines(keepends=True)
    log_path(run).write_bytes(b"".join(lines[:1] + lines[2:]))
    assert "record 1 was left out" in refused(verify(certificate, run, quick=True))


def test_a_log_that_was_wound_back_is_refused(run: Run, tmp_path: Path) -> None:
    """Log and head of yesterday are sound by themselves; a certificate of today misses its records."""
    kept = [(path, path.read_bytes()) for path in (log_path(run), head_path(run))]
    append(run, "event", {})
    path = written(tmp_path / "today.json", issue(run, "client-1"))
    for place, content in kept:
        place.write_bytes(content)
    assert "later records were cut off" in refused(verify(path, run, quick=True))


def test_a_copy_without_key_and_salt_can_be_checked(run: Run, bare: Run, certificate: Path, tmp_path: Path) -> None:
    """All but which pairs were meant, of client and sample requests; nothing is made anew."""
    folder = next(path.parent for path in bare.folder.glob("requests/sample-*/*/record.json"))
    sample = written(tmp_path / "sample.json", issue(bare, f"{folder.parent.name}/{folder.name}"))
    for each, path in ((run, certificate), (bare, sample)):
        salt_path(each).unlink()
        key_path(each).unlink()
        found = verify(path, each)
        assert found.holds and [check.name for check in found.checks if check.holds is None] == ["pairs"]
        assert not salt_path(each).exists() and not key_path(each).exists()


@pytest.mark.parametrize(
    "name", ["../client-1", "client-1/../../x", "/etc", "client-1/", "..", "a\\b", "", "a/b/c", "a\0"]
)
def test_names_that_lead_elsewhere_are_not_answers(bare: Run, name: str) -> None:
    with pytest.raises(UserError, match="no name of an answer"):
        issue(bare, name)
    assert not (bare.folder / "evidence").exists()


def test_a_damaged_answer_is_not_certified(bare: Run) -> None:
    flip(bare.folder / ANSWER / "bases.safetensors", -3, 1)
    with pytest.raises(UserError, match=r"bases\.safetensors: not the file"):
        issue(bare, "client-1")


def test_huge_files_are_refused_before_they_are_read(certificate: Path) -> None:
    with certificate.open("r+b") as file:
        file.truncate(LARGEST_CERTIFICATE + 1)
    with pytest.raises(UserError, match="bytes, and at most"):
        verify(certificate)
    assert LARGEST_CERTIFICATE < LARGEST_JSON


# --- two signatures ---


def test_a_second_signature_is_listed_with_its_owner(run: Run, certificate: Path, tmp_path: Path) -> None:
    client, operator = new_key(tmp_path / "client.key"), read_signing_key(key_path(run))
    path = written(tmp_path / "both.json", countersigned(read_certificate(certificate)[0], client))
    found = verify(path, run, {"client": client.public}, quick=True)
    assert found.holds
    assert [(each.key_id, each.name) for each in found.signers] == [
        (operator.public.id, "the run"),
        (client.public.id, "client"),
    ]
    assert [each.name for each in verify(path, keys={"operator": operator.public}).signers] == ["operator", None]
    assert "no signature by client" in refused(verify(certificate, keys={"client": client.public}))


# --- small parts ---


def test_whole_numbers_that_would_be_rounded_are_text() -> None:
    assert plain({"a": [2**53, 2**53 - 1, -(2**60), True, 1.5]}) == {
        "a": [str(2**53), 2**53 - 1, str(-(2**60)), True, 1.5]
    }


def test_requests_in_a_sentence() -> None:
    assert (
        asked({"scope": "client", "clients": [1, 3], "pairs": 4})
        == "Client 1, 3 withdrew: 4 pairs were to be forgotten."
    )
    assert "(on the beach)" in asked({"scope": "class", "classes": [2], "text": "on the beach", "pairs": 1})
    assert "(2)" in asked({"scope": "class", "classes": [2], "text": "", "pairs": 1})


def test_the_hash_of_the_sources_follows_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ease

    root = Path(shutil.copytree(Path(ease.__file__).parent, tmp_path / "ease"))
    same = installed_code()
    monkeypatch.setattr(ease, "__file__", str(root / "__init__.py"))
    assert installed_code() == same
    (root / "__pycache__").mkdir(exist_ok=True)
    (root / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert installed_code() == same
    (root / "errors.py").write_text((root / "errors.py").read_text() + "\n")
    assert installed_code().sources_sha256 != same.sources_sha256
