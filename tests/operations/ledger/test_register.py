"""Deadlines, letters, recipients, reminders and the register, against calendars and files that were made by hand."""

import csv
import io
import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ease.errors import UserError
from ease.operations.evidence.canonical import Refuted
from ease.operations.evidence.keys import SigningKey, new_key
from ease.operations.ledger import deadlines, store
from ease.operations.ledger.database import writing
from ease.operations.ledger.deadlines import day_in, due, end_of_day, extended, month_later, parse_deadline
from ease.operations.ledger.letters import letter
from ease.operations.ledger.people import check_signers, person
from ease.operations.ledger.policy import ApprovalPolicy, Policy, load_policy
from ease.operations.ledger.records import Consent, Draft, Entry, Event, Outcome, stamp
from ease.operations.ledger.register import CONSENT_SCHEMA, as_csv, consent_record
from ease.operations.ledger.reminders import remind
from ease.operations.ledger.retention import redact_closed
from ease.operations.ledger.store import Ledger
from ease.operations.recipients import Recipient, Recipients, to_notify
from ease.requests.request import ClientRequest

BERLIN = "Europe/Berlin"


def draft(client: int = 1, **changes) -> Draft:
    return Draft(
        **{
            "request": ClientRequest(clients=(client,)),
            "method": {"method": "ease"},
            "asked_by": "Eve Example",
            **changes,
        }
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def put(ledger: Ledger, id: str, **changes) -> Entry:
    """Change a stored request, however it may come there."""
    entry = ledger.entry(id).model_copy(update=changes)
    with writing(ledger.path) as tables:
        tables.write(entry.number, entry)
    return entry


# --- deadlines ---


def test_a_deadline_is_the_end_of_the_day_in_the_time_zone_of_the_policy() -> None:
    """Winter is one hour ahead of UTC and summer two; a month after late January is the end of February."""
    assert stamp(end_of_day(datetime(2030, 1, 15, 12, tzinfo=UTC), BERLIN)) == "2030-01-15T22:59:59.999+00:00"
    assert stamp(end_of_day(datetime(2030, 7, 15, 23, tzinfo=UTC), BERLIN)) == "2030-07-16T21:59:59.999+00:00"
    assert stamp(month_later(datetime(2027, 1, 31, 12, tzinfo=UTC), BERLIN)) == "2027-02-28T22:59:59.999+00:00"
    assert stamp(month_later(datetime(2027, 2, 28, 12, tzinfo=UTC), BERLIN)) == "2027-03-28T21:59:59.999+00:00"
    assert stamp(parse_deadline("2030-01-31", BERLIN)) == "2030-01-31T22:59:59.999+00:00"
    assert stamp(parse_deadline("2030-01-31T12:00", BERLIN)) == "2030-01-31T11:00:00.000+00:00"
    assert day_in("2030-01-31T23:30:00.000+00:00", BERLIN) == "2030-02-01"
    with pytest.raises(UserError, match="--due soon"):
        parse_deadline("soon", BERLIN)


def test_a_deadline_is_extended_once_and_by_two_months_at_most(ledger: Ledger, monkeypatch) -> None:
    at = datetime(2027, 1, 10, 12, tzinfo=UTC)
    monkeypatch.setattr(store, "now", lambda: at)
    ledger.add(draft(id="r", zone=BERLIN))
    assert day_in(ledger.entry("r").deadline, BERLIN) == "2027-02-10"
    with pytest.raises(UserError, match="at most 2 further months are allowed, here 59 days"):
        ledger.extend("r", 60, "dpo", "many pairs", BERLIN)
    with pytest.raises(UserError, match="--reason"):
        ledger.extend("r", 5, "dpo", " ", BERLIN)
    entry = ledger.extend("r", 59, "dpo", "many pairs", BERLIN)
    assert day_in(entry.deadline, BERLIN) == "2027-04-10" and day_in(entry.first_deadline, BERLIN) == "2027-02-10"
    assert stamp(datetime.fromisoformat(entry.deadline)) == "2027-04-10T21:59:59.999+00:00"
    with pytest.raises(UserError, match="can be extended once"):
        ledger.extend("r", 1, "dpo", "more", BERLIN)
    ledger.add(draft(2, id="late"))
    with pytest.raises(UserError, match="its deadline has passed"):
        extended(ledger.entry("late"), 5, at + timedelta(days=60), BERLIN)
    ledger.cancel("r", "dpo", "")
    with pytest.raises(UserError, match="only an open request can be extended"):
        ledger.extend("r", 1, "dpo", "more", BERLIN)


def test_due_requests_are_sorted_and_labelled_by_urgency(ledger: Ledger) -> None:
    at = datetime(2030, 5, 10, 12, tzinfo=UTC)
    for id, day in (("later", 30), ("today", 10), ("late", 9), ("soon", 16), ("closed", 1)):
        ledger.add(draft(day, id=id, deadline=end_of_day(datetime(2030, 5, day, 12, tzinfo=UTC), BERLIN)))
    ledger.cancel("closed", "dpo", "")
    found = due(ledger.entries(), at, BERLIN, within=7)
    assert [(each.id, each.days_left, each.urgency) for each in found] == [
        ("late", -1, "overdue"),
        ("today", 0, "soon"),
        ("soon", 6, "soon"),
        ("later", 20, "later"),
    ]
    words = [deadlines.in_words(each) for each in found]
    assert words == ["overdue since 2030-05-09", "due today", "due in 6 days", "due in 20 days"]
    assert {each.waits_for for each in found} == {"a decision"}


def test_an_unknown_time_zone_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('time_zone = "Mars/Olympus"\n')
    with pytest.raises(UserError, match=r"policy.toml: time_zone: no such time zone"):
        load_policy(tmp_path)


# --- reminders ---


@pytest.fixture
def inbox():
    """A server on this machine that keeps what it is sent."""
    received: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(302 if self.path == "/elsewhere" else 500 if self.path == "/broken" else 204)
            if self.path == "/elsewhere":
                self.send_header("Location", "/inbox")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_reminder_names_ids_and_days_and_no_person(ledger: Ledger, inbox) -> None:
    address, received = inbox
    ledger.add(draft(id="r", reason="moved away"))
    remind(f"{address}/inbox", "first", due(ledger.entries(), datetime.now(UTC), "UTC"))
    assert received[0]["run"] == "first" and [each["id"] for each in received[0]["due"]] == ["r"]
    assert "Eve" not in json.dumps(received) and "moved" not in json.dumps(received)
    for path, why in (("broken", "answered 500"), ("elsewhere", "answered 302")):
        with pytest.raises(UserError, match=why):
            remind(f"{address}/{path}", "first", [])
    assert len(received) == 3  # no redirect was followed


@pytest.mark.parametrize("url", ["http://example.org/x", "file:///etc/passwd", "", "ftp://127.0.0.1/x"])
def test_reminders_go_to_https_or_to_this_machine(url: str) -> None:
    with pytest.raises(UserError, match=r"remind.url"):
        remind(url, "first", [])


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"cannot be reached .*; nobody was reminded"):
        remind("http://127.0.0.1:9/x", "first", [])


# --- letters ---

OFFICE = Policy.model_validate(
    {"office": {"name": "Clinic", "contact": "dpo@clinic.example", "authority": "The Authority"}, "time_zone": BERLIN}
)


def test_a_letter_says_what_happened_in_plain_words(ledger: Ledger) -> None:
    ledger.add(draft(id="r"))
    received = letter(ledger.entry("r"), ledger.events("r"), OFFICE)
    assert "We have received your request" in received and "Our reference: r" in received
    ledger.extend("r", 20, "dpo", "three sites have to answer", BERLIN)
    moved = letter(ledger.entry("r"), ledger.events("r"), OFFICE)
    entry = ledger.entry("r")
    for part in (day_in(entry.deadline, BERLIN), day_in(entry.first_deadline, BERLIN), "three sites have to answer"):
        assert part in moved
    assert "complaint with The Authority" in moved
    ledger.refuse("r", "dpo", "we hold no pictures of you")
    refused = letter(ledger.entry("r"), ledger.events("r"), OFFICE)
    for part in (
        "not done",
        "we hold no pictures of you",
        "The Authority",
        "court",
        "dpo@clinic.example",
        "Eve Example",
    ):
        assert part in refused
    with pytest.raises(UserError, match="no letter can say that it is granted"):
        letter(ledger.entry("r"), ledger.events("r"), OFFICE, kind="granted")


def test_a_granted_letter_names_notified_recipients_and_claims_no_proof(ledger: Ledger) -> None:
    ledger.add(draft(id="r"))
    passed = Outcome(answer="client-1/ease", release=1, passed=True, verdict="Evidence of approximate erasure")
    entry = put(ledger, "r", state="done", outcome=passed)
    text = letter(entry, ledger.events("r"), OFFICE, notified=["Clinic 5"])
    assert "We have done what you asked" in text and "Clinic 5" in text and "does not prove" in text
    nothing = entry.model_copy(update={"outcome": Outcome()})
    assert "Nothing had to be done" in letter(nothing, [], OFFICE)
    assert "[name of the controller]" in letter(entry, [], Policy())


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ({"passed": False, "verdict": "Not enough evidence"}, "Differences were found, and a person decided"),
        ({"passed": None, "verdict": "Too few pairs to tell"}, "could not determine"),
        ({"passed": None, "verdict": "No audit: too few pairs."}, "was not measured"),
        ({"passed": None, "verdict": ""}, "was not measured"),
        ({"trained_again": True}, "trained from the start without your data"),
    ],
)
def test_a_granted_letter_says_only_what_was_measured(ledger: Ledger, outcome: dict, says: str) -> None:
    ledger.add(draft(id="r"))
    entry = put(ledger, "r", state="done", outcome=Outcome(answer="client-1/ease", release=1, **outcome))
    text = letter(entry, ledger.events("r"), OFFICE)
    assert says in text and "No difference was found" not in text


def test_a_letter_on_pairs_outside_training_claims_no_change_of_the_model(ledger: Ledger) -> None:
    ledger.add(draft(id="r"))
    entry = put(ledger, "r", state="done", outcome=Outcome(answer="sample-0/ease", release=1))
    text = letter(entry, ledger.events("r"), OFFICE, trained=False)
    assert "No model was trained on your data" in text and "replaced" not in text and "measured by" not in text


# --- recipients ---


def exported(name: str, releases: int, request: str | None = None) -> Recipient:
    return Recipient(recipient=name, time="", by="", format="onnx", request=request, releases=releases, files={})


def test_recipients_of_an_older_model_are_to_be_notified(ledger: Ledger) -> None:
    ledger.add(draft(id="r"))
    known = Recipients(
        exports=(
            exported("before", 0),
            exported("between", 1),
            exported("the new model, before its release", 1, "client-1/ease"),
            exported("another answer", 1, "client-2"),
            exported("after", 2),
        )
    )
    assert to_notify(known, ledger.entry("r")) == []
    entry = put(ledger, "r", state="done", outcome=Outcome(answer="client-1/ease", release=2))
    assert to_notify(known, entry) == ["before", "between", "another answer"]
    assert to_notify(known, ledger.notify("r", "between", "dpo")) == ["before", "another answer"]
    assert ledger.events("r")[-1].why == "notified between"


# --- the register ---


def test_no_cell_of_the_register_is_a_formula() -> None:
    rows = [{"a": "=HYPERLINK(1)", "b": 'two "words", and\na line'}, {"a": "-1", "b": "@x"}]
    read = list(csv.reader(io.StringIO(as_csv(("a", "b"), rows))))
    assert read == [["a", "b"], ["'=HYPERLINK(1)", 'two "words", and\na line'], ["'-1", "'@x"]]


def test_a_consent_has_the_sections_of_the_standard() -> None:
    consent = Consent(client=7, time="2030-01-01", given_by="ada", text="form 12", pairs=12, returned=3)
    record = consent_record(consent, OFFICE.office)
    assert record["record_metadata"]["schema_version"] == CONSENT_SCHEMA
    (purpose,) = record["pii_processing"]["purposes"]
    assert purpose["pii_controllers"] == [{"name": "Clinic", "contact": "dpo@clinic.example"}]
    assert record["event"] | {"event_state": "given", "entity_id": "ada", "evidence": "form 12"} == record["event"]


# --- who decided ---


def key(path: Path) -> tuple[Path, str]:
    return path, new_key(path).public.id


def test_the_name_of_who_decides_is_that_of_the_key(tmp_path: Path) -> None:
    (ada, ada_id), (eve, eve_id) = key(tmp_path / "ada.key"), key(tmp_path / "eve.key")
    policy = ApprovalPolicy(signed=True, keys={"ada": ada_id}, revoked={eve_id: "2020-01-01"})
    assert person(policy, "somebody else", ada).name == "ada"
    assert person(ApprovalPolicy(), "bo", None).name == "bo"
    for path, said in ((None, "name your key with --key"), (eve, "belongs to nobody")):
        with pytest.raises(UserError, match=said):
            person(policy, "ada", path)
    with pytest.raises(UserError, match="was revoked on 2020-01-01"):
        person(ApprovalPolicy(revoked={eve_id: "2020-01-01"}), "eve", eve)


def test_two_people_approve_and_one_person_is_not_two(ledger: Ledger) -> None:
    ledger.add(draft(id="r"))
    assert ledger.approve("r", "ada", people=2).state == "submitted"
    with pytest.raises(UserError, match="ada has approved it already"):
        ledger.approve("r", "ada", people=2)
    assert ledger.approve("r", "bo", people=2).state == "approved"
    assert [each.why for each in ledger.events("r")] == ["", "approval 1 of 2", ""]


@pytest.fixture
def signed(ledger: Ledger, tmp_path: Path) -> tuple[Ledger, SigningKey, ApprovalPolicy]:
    """A request that ada handed in and approved with her key."""
    ada = SigningKey(Ed25519PrivateKey.generate())
    ledger.add(draft(id="r", asked_by="Eve Example", reason="moved away"), ada)
    ledger.approve("r", "ada", ada)
    return ledger, ada, ApprovalPolicy(signed=True, keys={"ada": ada.public.id})


def alter(ledger: Ledger, number: int, **changes) -> None:
    """Change a stored step and write the digests anew, as whoever can write the file could."""
    with writing(ledger.path) as tables:
        step = tables.read(Event)[number - 1]
        tables.write(number, step.model_copy(update=changes))


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (1, {"time": "2020-01-01"}),
        (1, {"why": "another reason"}),
        (1, {"by": "somebody"}),
        (2, {"by": "bo"}),
        (2, {"after": "refused"}),
        (2, {"previous": "0" * 64}),
        (1, {"deadline": "2040-01-01"}),
    ],
)
def test_a_step_that_was_altered_is_refused(signed, number: int, changes: dict) -> None:
    ledger, _, policy = signed
    steps, _ = ledger.check()
    assert steps == 2 and "2 of them signed" in check_signers(ledger.events(), policy, "ledger")
    alter(ledger, number, **changes)
    if changes == {"by": "somebody"}:  # the name of who asked is private, and part of what was handed in
        put(ledger, "r", asked_by="somebody")
    with pytest.raises(Refuted, match=r"ledger.sqlite"):
        ledger.check()


def test_a_request_that_was_exchanged_or_a_step_that_was_left_out_is_refused(signed) -> None:
    ledger, _, _ = signed
    put(ledger, "r", request=ClientRequest(clients=(2,)))
    with pytest.raises(Refuted, match="what was handed in"):
        ledger.check()
    put(ledger, "r", request=ClientRequest(clients=(1,)))
    ledger.check()
    with writing(ledger.path) as tables:
        tables.connection.execute("DELETE FROM events WHERE number = 2")
    with pytest.raises(Refuted, match="r is approved, and its last step says submitted"):
        ledger.check()


def test_decisions_without_a_signature_or_with_a_wrong_name_are_refused(signed) -> None:
    ledger, ada, policy = signed
    ledger.add(draft(2, id="s"))
    ledger.approve("s", "ada")
    with pytest.raises(Refuted, match="without a signature"):
        check_signers(ledger.events(), policy, "ledger")
    other = policy.model_copy(update={"signed": False, "keys": {"bo": ada.public.id}})
    with pytest.raises(Refuted, match="the key is that of bo"):
        check_signers(ledger.events(), other, "ledger")
    revoked = policy.model_copy(update={"signed": False, "revoked": {ada.public.id: "2020-01-01"}})
    with pytest.raises(Refuted, match="revoked"):
        check_signers(ledger.events(), revoked, "ledger")


def test_words_of_closed_requests_are_removed_and_the_chain_holds(signed) -> None:
    ledger, _, policy = signed
    assert redact_closed(ledger.folder, 0) == []
    ledger.cancel("r", "ada", "Eve Example took it back")
    before = ledger.check()
    assert redact_closed(ledger.folder, 1) == [] and redact_closed(ledger.folder, 0) == ["r"]
    assert ledger.check() == before and redact_closed(ledger.folder, 0) == []
    content = ledger.path.read_bytes()
    assert not any(each in content for each in (b"Eve", b"moved away", b"took it back"))
    check_signers(ledger.events(), policy.model_copy(update={"signed": False}), "ledger")
