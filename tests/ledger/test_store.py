"""The ledger: legal steps alone, every step written down, one transaction each, and one request for one id."""

import itertools
import sqlite3
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ease.errors import UserError
from ease.ledger import store
from ease.ledger.states import FOLLOWS, OPEN, STATES
from ease.ledger.store import Consent, Draft, Ledger, month_after
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest

EASE = {"method": "ease"}


def draft(client: int = 1, **changes) -> Draft:
    return Draft(**{"request": ClientRequest(clients=(client,)), "method": EASE, "asked_by": "ada", **changes})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def test_one_table_says_what_may_follow_what(ledger: Ledger) -> None:
    """Every pair of states is tried: a step succeeds if and only if the table has it, and only then is it noted."""
    assert set(FOLLOWS) == set(STATES) and {"done", "refused", "cancelled"} == set(STATES) - OPEN
    for number, (before, after) in enumerate(itertools.product(STATES, STATES)):
        id = f"r{number}"
        ledger.add(draft(id=id))
        with sqlite3.connect(ledger.path) as raw:
            raw.execute("UPDATE requests SET state = ? WHERE id = ?", (before, id))
        raw.close()
        if after in FOLLOWS[before]:
            ledger.move([id], after, "bo", "because")
        else:
            with pytest.raises(UserError, match=f"is {before} and cannot be {after}"):
                ledger.move([id], after, "bo", "because")
        steps = [(each.before, each.after) for each in ledger.events(id)]
        assert steps == [("", "submitted"), *([(before, after)] if after in FOLLOWS[before] else [])]
        assert ledger.entry(id).state == (after if after in FOLLOWS[before] else before)


def test_the_same_request_again_is_the_one_that_is_there(ledger: Ledger) -> None:
    first, new = ledger.add(draft())
    again, newer = ledger.add(draft(reason="asked twice"))
    assert (new, newer) == (True, False) and again == first and len(ledger.events()) == 1
    assert ledger.add(draft(asked_by="bo"))[1] and ledger.add(draft(client=2))[1]
    ledger.add(draft(id="ticket-7"))
    with pytest.raises(UserError, match="another request has this id"):
        ledger.add(draft(client=3, id="ticket-7"))
    for bad in ("../up", "a b", "", "x" * 81, "a\nb"):
        with pytest.raises(UserError, match="--id"):
            ledger.add(draft(id=bad or " "))


def test_the_queue_goes_by_priority_then_deadline_then_arrival(ledger: Ledger) -> None:
    soon, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 2, 1, tzinfo=UTC)
    for id, priority, deadline in (
        ("d", 0, late),
        ("b", 0, soon),
        ("c", 0, soon),
        ("a", 5, late),
        ("never", 9, soon),
    ):
        ledger.add(draft(id=id, priority=priority, deadline=deadline))
        if id != "never":
            ledger.approve(id, "bo")
    taken = []
    while claimed := ledger.claim("worker", together=False):
        taken += [each.id for each in claimed]
        ledger.move([taken[-1]], "done", "worker")
    assert taken == ["a", "b", "c", "d"]


def test_what_a_dead_process_left_running_comes_first_and_whole(ledger: Ledger) -> None:
    for id, request in (
        ("one", ClientRequest(clients=(1,))),
        ("two", ClientRequest(clients=(2,))),
        ("other", ClassRequest(classes=(1,))),
    ):
        method = {"method": "retrain"} if id == "other" else EASE
        ledger.add(draft(id=id, request=request, method=method))
        ledger.approve(id, "bo")
    assert [each.id for each in ledger.claim("dead", together=True)] == ["one", "two"]
    assert [each.id for each in ledger.claim("next", together=False)] == ["one", "two"]
    ledger.move(["one", "two"], "done", "next")
    assert [each.id for each in ledger.claim("next", together=True)] == ["other"]


def test_a_held_model_waits_for_a_person_and_missing_clients_do_not(ledger: Ledger) -> None:
    for id in ("held", "missing"):
        ledger.add(draft(id=id))
        ledger.approve(id, "bo")
    ledger.claim("w", together=True)
    ledger.move(["held"], "pending", "w", "held", {"held": True, "model_sha256": "abc"})
    ledger.move(["missing"], "pending", "w", "client 3 is silent", {})
    assert [each.id for each in ledger.claim("w", together=False, passed=["missing"])] == []
    assert [each.id for each in ledger.claim("w", together=False)] == ["missing"]
    ledger.move(["missing"], "done", "w")
    assert ledger.approve("held", "bo").waived == "abc"
    assert [each.id for each in ledger.claim("w", together=False)] == ["held"]


def test_many_threads_claim_each_request_once(ledger: Ledger) -> None:
    """Here nobody holds the worker's lock: the transaction alone must keep two from taking the same one."""
    for number in range(12):
        ledger.add(draft(client=number, id=f"r{number}"))
        ledger.approve(f"r{number}", "bo")
    taken: list[str] = []

    def take() -> None:
        while True:
            with ledger._writing() as raw:
                row = raw.execute("SELECT id FROM requests WHERE state = 'approved' LIMIT 1").fetchone()
                if row is None:
                    return
                raw.execute("UPDATE requests SET state = 'running' WHERE id = ?", row)
            taken.append(row[0])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(f"r{number}" for number in range(12))


def test_several_steps_happen_together_or_not_at_all(ledger: Ledger) -> None:
    for id in ("a", "b"):
        ledger.add(draft(id=id))
    ledger.approve("a", "bo")
    with pytest.raises(UserError, match="b: is submitted"):
        ledger.move(["a", "b"], "running", "w")
    assert ledger.entry("a").state == "approved" and len(ledger.events("a")) == 2


def test_the_deadline_is_a_calendar_month_away_and_overdue_counts_while_open(ledger: Ledger) -> None:
    assert month_after(datetime(2027, 1, 31, tzinfo=UTC)) == datetime(2027, 2, 28, tzinfo=UTC)
    assert month_after(datetime(2027, 12, 5, tzinfo=UTC)) == datetime(2028, 1, 5, tzinfo=UTC)
    entry, _ = ledger.add(draft())
    after = datetime.fromisoformat(entry.submitted) + timedelta(days=32)
    assert not entry.overdue(datetime.now(UTC)) and entry.overdue(after)
    ledger.move([entry.id], "cancelled", "ada")
    assert not ledger.entry(entry.id).overdue(after)


def test_the_file_is_its_owners_alone_and_knows_its_schema(ledger: Ledger) -> None:
    ledger.add(draft())
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    with sqlite3.connect(ledger.path) as raw:
        assert raw.execute("PRAGMA user_version").fetchone()[0] == len(store.MIGRATIONS)
        assert raw.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(UserError, match="schema 99"):
        ledger.entries()


def test_an_older_ledger_is_brought_up_to_date(ledger: Ledger, monkeypatch) -> None:
    entry, _ = ledger.add(draft())
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, "ALTER TABLE requests ADD COLUMN extra TEXT"))
    assert ledger.entry(entry.id) == entry
    with sqlite3.connect(ledger.path) as raw:
        assert "extra" in [row[1] for row in raw.execute("PRAGMA table_info(requests)")]
    raw.close()


def test_a_file_that_is_no_ledger_is_one_line(ledger: Ledger) -> None:
    ledger.path.write_bytes(b"not a database, and long enough to be looked at" * 50)
    with pytest.raises(UserError, match=r"ledger.sqlite: cannot be read or written as a ledger"):
        ledger.entries()


def test_replaced_ids_leave_the_file(ledger: Ledger) -> None:
    secret = "patient-4711.png"
    ledger.add(draft(id="s", request=SampleRequest(ids=(secret,))))
    ledger.rename({"s": SampleRequest(ids=("gone-1",))})
    files = [path.read_bytes() for path in ledger.folder.iterdir()]
    assert not any(secret.encode() in content for content in files)
    assert ledger.entry("s").request == SampleRequest(ids=("gone-1",))


def test_a_consent_is_written_once_for_a_client(ledger: Ledger) -> None:
    consent = Consent(7, "2030-01-01", "ada", "yes, again", 12, 3)
    for _ in range(2):
        ledger.consent(consent)
    assert ledger.consents() == [consent]
