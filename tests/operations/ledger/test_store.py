"""The ledger: legal steps alone, every step written down, one transaction each, and one request for one id."""

import random
import shutil
import sqlite3
import stat
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ease.errors import UserError
from ease.operations.ledger.database import TABLES, VERSION, Tables, writing
from ease.operations.ledger.deadlines import months_after
from ease.operations.ledger.records import Consent, Draft, Entry, Outcome, RequestPlan
from ease.operations.ledger.states import ACTORS, OPEN, STATES, TRANSITIONS, State, may_move
from ease.operations.ledger.store import Ledger
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest

EASE = {"method": "ease"}
CONSENT = Consent(client=7, time="2030-01-01", given_by="ada", text="yes, again", pairs=12, returned=3)


def draft(client: int = 1, **changes) -> Draft:
    return Draft(**{"request": ClientRequest(clients=(client,)), "method": EASE, "asked_by": "ada", **changes})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def put_into(ledger: Ledger, id: str, state: State) -> None:
    """Store a request in some state, however it may come there."""
    entry = ledger.entry(id)
    with writing(ledger.path) as tables:
        tables.write(entry.number, entry.model_copy(update={"state": state}))


def test_one_table_says_who_may_take_a_request_where(ledger: Ledger) -> None:
    """Every actor and pair of states is tried: a step succeeds if and only if the table has it, and only then is it
    noted."""
    assert set(TRANSITIONS) == set(ACTORS) and {"done", "refused", "cancelled"} == set(STATES) - OPEN
    person = {
        "approved": lambda id: ledger.approve(id, "bo"),
        "refused": lambda id: ledger.refuse(id, "bo", "no such person"),
        "cancelled": lambda id: ledger.cancel(id, "bo", ""),
    }
    tried = [(actor, before, after) for actor in ACTORS for before in STATES for after in STATES]
    for number, (actor, before, after) in enumerate(tried):
        if actor == "person" and after not in person:
            assert not any(may_move(actor, state, after) for state in STATES)
            continue
        id, allowed = f"r{number}", may_move(actor, before, after)
        ledger.add(draft(id=id))
        put_into(ledger, id, before)
        step = person[after] if actor == "person" else lambda id, to=after: ledger.finish([id], to, "bo", "because")
        if allowed:
            step(id)
        else:
            with pytest.raises(UserError, match=f"is {before} and cannot be {after}"):
                step(id)
        steps = [(each.before, each.after) for each in ledger.events(id)]
        assert steps == [(None, "submitted"), *([(before, after)] if allowed else [])]
        assert ledger.entry(id).state == (after if allowed else before)


def test_a_running_request_is_neither_cancelled_nor_approved(ledger: Ledger) -> None:
    """Its answer may be released at any moment, and who cancelled it would think that nothing was forgotten."""
    ledger.add(draft(id="r"))
    ledger.approve("r", "bo")
    ledger.claim("worker", together=False)
    with pytest.raises(UserError, match="is running and cannot be approved; wait for `ease work`"):
        ledger.approve("r", "bo")
    with pytest.raises(UserError, match="is running and cannot be cancelled; wait for `ease work`"):
        ledger.cancel("r", "bo", "")
    assert ledger.entry("r").state == "running"


def test_a_request_whose_answer_is_released_is_not_cancelled_after_it_was_given_back(ledger: Ledger) -> None:
    ledger.add(draft(id="r"))
    ledger.approve("r", "bo")
    ledger.claim("worker", together=False)
    plan = RequestPlan(request=ClientRequest(clients=(1,)), method=EASE)
    ledger.finish(["r"], "released", "worker", "the disk was full", Outcome(plan=plan))
    for step in (lambda: ledger.cancel("r", "bo", ""), lambda: ledger.approve("r", "bo")):
        with pytest.raises(UserError, match=r"is released and cannot be .*; its model is released already"):
            step()
    with pytest.raises(UserError, match="r is not finished"):
        ledger.check_idle()
    assert [each.id for each in ledger.claim("worker", together=False)] == ["r"]


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
        ledger.finish([taken[-1]], "done", "worker")
    assert taken == ["a", "b", "c", "d"]


def test_requests_of_a_dead_process_come_first_and_together(ledger: Ledger) -> None:
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
    ledger.finish(["one", "two"], "done", "next")
    assert [each.id for each in ledger.claim("next", together=True)] == ["other"]


def test_a_held_model_waits_for_a_person_and_missing_clients_do_not(ledger: Ledger) -> None:
    for id in ("held", "missing"):
        ledger.add(draft(id=id))
        ledger.approve(id, "bo")
    ledger.claim("w", together=True)
    ledger.finish(["held"], "held", "w", "it fell", Outcome(model_sha256="abc"))
    ledger.finish(["missing"], "pending", "w", "client 3 is silent")
    assert [each.id for each in ledger.claim("w", together=False, passed=["missing"])] == []
    assert [each.id for each in ledger.claim("w", together=False)] == ["missing"]
    ledger.finish(["missing"], "done", "w")
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
            with writing(ledger.path) as tables:
                entry = next((each for each in tables.read(Entry) if each.state == "approved"), None)
                if entry is None:
                    return
                tables.write(entry.number, entry.model_copy(update={"state": "running"}))
            taken.append(entry.id)

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
    ledger.claim("w", together=False)
    with pytest.raises(UserError, match="b: is submitted"):
        ledger.finish(["a", "b"], "done", "w")
    assert ledger.entry("a").state == "running" and len(ledger.events("a")) == 3


def test_the_deadline_is_a_calendar_month_away_and_overdue_counts_while_open(ledger: Ledger) -> None:
    assert months_after(datetime(2027, 1, 31, tzinfo=UTC), 1) == datetime(2027, 2, 28, tzinfo=UTC)
    assert months_after(datetime(2027, 12, 5, tzinfo=UTC), 1) == datetime(2028, 1, 5, tzinfo=UTC)
    entry, _ = ledger.add(draft())
    after = datetime.fromisoformat(entry.submitted) + timedelta(days=32)
    assert not entry.is_overdue(datetime.now(UTC)) and entry.is_overdue(after)
    ledger.cancel(entry.id, "ada", "")
    assert not ledger.entry(entry.id).is_overdue(after)


def test_the_file_is_private_and_has_its_schema(ledger: Ledger) -> None:
    ledger.add(draft())
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    with sqlite3.connect(ledger.path) as raw:
        assert raw.execute("PRAGMA user_version").fetchone()[0] == VERSION
        assert raw.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(UserError, match="version 99"):
        ledger.entries()


def test_a_ledger_whose_records_another_version_wrote_is_one_line(ledger: Ledger) -> None:
    entry, _ = ledger.add(draft())
    with writing(ledger.path) as tables:
        tables.write(entry.number, entry.model_copy(update={"state": "waiting"}))
    with pytest.raises(UserError, match="written by another version"):
        ledger.entries()


def test_an_unwritten_ledger_is_empty_and_reading_makes_no_file(ledger: Ledger) -> None:
    assert everything(ledger) == ([], [], []) and not list(ledger.folder.iterdir())
    with pytest.raises(UserError, match="no such request"):
        ledger.entry("r")
    with pytest.raises(UserError, match="no such run"):
        Ledger(ledger.folder / "none").add(draft())


def test_a_file_that_is_not_a_ledger_is_one_line(ledger: Ledger) -> None:
    ledger.path.write_bytes(b"not a database, and long enough to be looked at" * 50)
    with pytest.raises(UserError, match=r"ledger.sqlite: damaged \(file is not a database\)"):
        ledger.entries()


def test_replaced_ids_leave_the_file(ledger: Ledger) -> None:
    secret = "patient-4711.png"
    ledger.add(draft(id="s", request=SampleRequest(ids=(secret,))))
    ledger.rename({"s": SampleRequest(ids=("gone-1",))})
    files = [path.read_bytes() for path in ledger.folder.iterdir()]
    assert not any(secret.encode() in content for content in files)
    assert ledger.entry("s").request == SampleRequest(ids=("gone-1",))


def test_a_consent_is_written_once_for_a_client(ledger: Ledger) -> None:
    for text in ("yes", CONSENT.text):  # the first process died, and its consent counts for nothing
        ledger.record_consent(CONSENT.model_copy(update={"text": text}))
    assert ledger.consents() == [CONSENT]


# --- damage ---


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    for number in range(4):
        ledger.add(draft(client=number, id=f"r{number}", reason="moved away"))
        ledger.approve(f"r{number}", "bo")
    ledger.record_consent(CONSENT)
    ledger.claim("w", together=False)
    return ledger


def test_rows_that_were_exchanged_are_missed(filled: Ledger) -> None:
    """Every row has its own digest, and all of them are there."""
    with sqlite3.connect(filled.path) as raw:
        rows = raw.execute("SELECT number, record, digest FROM requests").fetchall()
        for (number, *_), (_, record, digest) in zip(rows, reversed(rows), strict=True):
            raw.execute("UPDATE requests SET record = ?, digest = ? WHERE number = ?", (record, digest, number))
    raw.close()
    with pytest.raises(UserError, match=r"requests: row 1 does not have its digest"):
        filled.entries()


def test_every_row_is_written_with_its_digest(filled: Ledger) -> None:
    with sqlite3.connect(filled.path) as raw:
        Tables(raw, filled.path).check()
        assert all(raw.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in TABLES.values())
    raw.close()


def everything(ledger: Ledger) -> tuple[object, ...]:
    return ledger.entries(), ledger.events(), ledger.consents()


def test_the_client_that_a_request_names_cannot_change_by_one_bit(filled: Ledger) -> None:
    content = filled.path.read_bytes()
    place = content.index(b'"clients":[2]') + len(b'"clients":[')
    filled.path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for use in (filled.entries, filled.events, lambda: filled.approve("r0", "bo"), lambda: filled.add(draft(9))):
        with pytest.raises(UserError, match=r"ledger.sqlite: damaged \(requests: row 3 does not have its digest"):
            use()


@pytest.mark.parametrize(
    "statement",
    [
        """UPDATE requests SET record = replace(record, '"state":"running"', '"state":"done"')""",
        "UPDATE events SET record = replace(record, 'bo', 'eve') WHERE number = 2",
        "UPDATE consents SET record = replace(record, 'yes', 'no')",
        "UPDATE requests SET digest = '' WHERE number = 1",
        "DELETE FROM events WHERE number = 9",
        "DELETE FROM requests WHERE number = 4",
        "DELETE FROM consents",
        "UPDATE requests SET number = number + 10",
        "DELETE FROM digests",
        "INSERT INTO digests VALUES ('more', '')",
        "ALTER TABLE requests RENAME COLUMN record TO season",
        "CREATE TABLE more (a)",
    ],
)
def test_a_row_that_was_altered_or_taken_out_is_missed(filled: Ledger, statement: str) -> None:
    with sqlite3.connect(filled.path) as raw:
        assert raw.execute(statement).rowcount != 0
    raw.close()
    with pytest.raises(UserError, match=r"ledger.sqlite: damaged"):
        filled.entries()


@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_bit_of_a_ledger_passes_in_silence_or_ends_in_a_traceback(filled: Ledger, seed: int) -> None:
    whole, before, draw = filled.path.read_bytes(), everything(filled), random.Random(seed)
    filled_bytes, detected = [place for place, byte in enumerate(whole) if byte], 0
    for _ in range(100):
        place = draw.choice(filled_bytes) if draw.random() < 0.9 else draw.randrange(len(whole))
        bit = 8 * place + draw.randrange(8)
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        filled.path.write_bytes(content)
        try:
            assert everything(filled) == before, bit
        except UserError as error:
            assert str(error).startswith(str(filled.path)), bit
            detected += 1
    assert detected > 60


def test_a_ledger_that_is_cut_short_is_refused(filled: Ledger) -> None:
    whole = filled.path.read_bytes()
    for length in (0, 1, 50, 100, 4096, 8192, len(whole) - 4096, len(whole) - 1):
        filled.path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"ledger.sqlite: "):
            filled.entries()


def test_a_read_only_disk_is_read(filled: Ledger, small_disk) -> None:
    disk = small_disk(1024)
    shutil.copy(filled.path, disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    here = Ledger(disk)
    assert everything(here) == everything(filled)
    with pytest.raises(UserError, match="readonly"):
        here.cancel("r3", "bo", "")
