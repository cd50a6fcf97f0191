"""The register's commands on a run: letters, due requests, recipients, witnesses, and what `ease verify` refuses."""

import csv
import json
from pathlib import Path

import pytest
from tests.operations.ledger.test_work import add, kept, run, run_json

from ease.operations.evidence.log import log_path
from ease.operations.ledger.database import writing
from ease.operations.ledger.records import Event
from ease.operations.ledger.store import Ledger
from ease.runs.run import Run

__all__ = ["kept", "run"]  # fixtures


def test_a_request_is_extended_and_refused_with_letters(ease, run: Path, tmp_path: Path) -> None:
    add(ease, run, "--client", 1, "--by", "Eve Example", id="c", approve=False)
    before = run_json(ease, "request", "show", run, "c")["deadline"]
    extended = run_json(ease, "request", "extend", run, "c", "--days", 30, "--reason", "many pairs")
    assert extended["deadline"] > before and extended["first_deadline"] == before
    shown = ease("request", "letter", run, "c").out
    assert "many pairs" in shown and "\\n" not in shown and "Our reference: c" in shown.splitlines()
    assert ease("request", "extend", run, "c", "--days", 5, "--reason", "again").code == 2
    assert ease("request", "refuse", run, "c").code == 2
    assert run_json(ease, "request", "refuse", run, "c", "--reason", "nothing is held")["state"] == "refused"
    out = tmp_path / "letter.txt"
    assert run_json(ease, "request", "letter", run, "c", "--out", out)["kind"] == "refused"
    assert "nothing is held" in out.read_text()
    assert ease("work", run).code == 0 and run_json(ease, "work", run)["finished"] == []


def test_due_says_by_its_exit_code_how_urgent_it_is(ease, run: Path) -> None:
    assert ease("request", "due", run).code == 0
    add(ease, run, "--client", 1, id="later", approve=False)
    assert ease("request", "due", run).code == 0
    shown = ease("request", "due", run, "--within", 40)
    assert shown.code == 4 and "later" in shown.out and "a decision" in shown.out
    add(ease, run, "--client", 2, "--due", "2020-01-31", id="late", approve=False)
    result = ease("request", "due", run, "--json")
    assert result.code == 5 and [each["id"] for each in json.loads(result.out)["due"]] == ["late"]
    assert "overdue since 2020-01-31" in ease("request", "due", run).out
    missing = ease("request", "due", run, "--notify")
    assert missing.code == 2 and "remind.url" in missing.err


def test_deadlines_are_days_of_the_time_zone(ease, run: Path) -> None:
    policy = run / "policy.toml"
    policy.write_text('time_zone = "Pacific/Auckland"\n' + policy.read_text())
    entry = add(ease, run, "--client", 1, "--due", "2030-01-31", id="c", approve=False)
    assert entry["deadline"] == "2030-01-31T10:59:59.999+00:00"  # 13 hours ahead of UTC in summer
    assert "answer until 2030-01-31" in ease("request", "show", run, "c").out


def test_recipients_of_older_models_are_named_after_a_release(ease, run: Path, tmp_path: Path) -> None:
    run_json(ease, "export", run, "--out", tmp_path / "old", "--recipient", "Clinic 5", "--by", "ada")
    add(ease, run, "--client", 1, id="c")
    worked = run_json(ease, "work", run)
    assert worked["to_notify"] == {"c": ["Clinic 5"]}
    run_json(ease, "export", run, "--out", tmp_path / "new", "--recipient", "Clinic 6")
    assert run_json(ease, "request", "show", run, "c")["to_notify"] == ["Clinic 5"]
    unknown = ease("request", "notify", run, "c", "--recipient", "Nobody")
    assert unknown.code == 2 and "Clinic 5, Clinic 6" in unknown.err
    assert run_json(ease, "request", "notify", run, "c", "--recipient", "Clinic 5")["to_notify"] == []
    letter = ease("request", "letter", run, "c").out
    assert "We have done what you asked" in letter and "Clinic 5" in letter
    files = run_json(ease, "request", "export", run, "--out", tmp_path / "register")["files"]
    assert {Path(each).name for each in files} == {"register.csv", "steps.csv", "register.html", "consents.json"}
    (row,) = csv.DictReader((tmp_path / "register" / "register.csv").read_text().splitlines())
    assert (row["id"], row["state"], row["notified"], row["to_notify"]) == ("c", "done", "Clinic 5", "")
    page = (tmp_path / "register" / "register.html").read_text()
    assert "Clinic 5" in page and "<script" not in page


def test_signed_decisions_of_two_people_are_asked_for_and_verified(ease, run: Path, tmp_path: Path) -> None:
    ids = {name: run_json(ease, "keys", "new", tmp_path / f"{name}.key")["key_id"] for name in ("ada", "bo", "eve")}
    keys = "".join(f'{name} = "{ids[name]}"\n' for name in ("ada", "bo"))
    with (run / "policy.toml").open("a") as policy:
        policy.write(f"[approval]\npeople = 2\nsigned = true\n[approval.keys]\n{keys}")
    add(ease, run, "--client", 1, id="c", approve=False)
    assert "--key" in ease("request", "approve", run, "c", "--by", "ada").err
    assert "belongs to nobody" in ease("request", "approve", run, "c", "--key", tmp_path / "eve.key").err
    first = run_json(ease, "request", "approve", run, "c", "--key", tmp_path / "ada.key")
    assert first["state"] == "submitted" and first["approved_by"] == ["ada"]
    assert "another person" in ease("request", "approve", run, "c", "--key", tmp_path / "ada.key").err
    assert run_json(ease, "request", "approve", run, "c", "--key", tmp_path / "bo.key")["state"] == "approved"
    run_json(ease, "work", run)
    shown = ease("verify", run)
    assert shown.code == 0 and "2 of them signed" in shown.out and "nothing contradicts it" in shown.out
    ledger = Ledger(run)
    with writing(ledger.path) as tables:  # as the keeper of the file could, digests and all
        steps = tables.read(Event)
        tables.write(3, steps[2].model_copy(update={"by": "ada"}))
    refused = ease("verify", run)
    assert refused.code == 1 and "step 3 (c): its signature does not hold" in refused.out.replace("\n", " ")


def test_a_witness_notices_a_log_and_a_ledger_that_were_rewritten(ease, run: Path, tmp_path: Path) -> None:
    run_json(ease, "keys", "new", tmp_path / "witness.key")
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    signed = run_json(ease, "certificate", "attest", run, "--key", tmp_path / "witness.key")
    assert run_json(ease, "verify", run)["holds"]
    add(ease, run, "--client", 2, id="d")  # what comes later contradicts nothing
    assert run_json(ease, "verify", run)["holds"]
    own = ease("certificate", "attest", run, "--key", run / "evidence" / "signing.key")
    assert own.code == 2 and "somebody else" in own.err
    with writing(Ledger(run).path) as tables:
        tables.connection.execute("DELETE FROM events")
        tables.connection.execute("DELETE FROM requests")
    found = ease("verify", run, "--json")
    assert found.code == 1 and "the ledger had" in " ".join(json.loads(found.out)["reasons"])
    Path(signed["path"]).write_text("{}")
    assert ease("verify", run).code == 1


def test_names_and_reasons_go_after_the_days_of_the_policy(ease, run: Path) -> None:
    with (run / "policy.toml").open("a") as policy:
        policy.write("[retention]\nclosed_days = 0\n")
    add(ease, run, "--client", 1, "--by", "Eve Example", "--reason", "moved away", id="c")
    run_json(ease, "work", run)
    entry = run_json(ease, "request", "show", run, "c")
    assert entry["asked_by"] == "" and entry["reason"] == "" and entry["state"] == "done"
    assert b"Eve Example" not in (run / "ledger.sqlite").read_bytes() and run_json(ease, "verify", run)["holds"]


def test_an_altered_log_is_refused_without_a_certificate(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    path = log_path(Run.load(run))
    path.write_bytes(path.read_bytes().replace(b'"release":1', b'"release":2'))
    assert ease("verify", run).code == 1


@pytest.mark.parametrize("width", [80, 100])
def test_no_word_of_a_table_is_cut(ease, run: Path, width: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    add(ease, run, "--client", 1, "--by", "somebody", id="a-ticket-of-the-office-2030-0007", approve=False)
    run_json(ease, "request", "cancel", run, "a-ticket-of-the-office-2030-0007", "--reason", "submitted by mistake")
    shown = ease("request", "list", run).out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    for word in ("a-ticket-of-the-office-2030-0007", "client 1", "cancelled", "submitted", "mistake"):
        assert word in shown, shown
