"""The log of a run: a chain that shows every change, survives every crash, and tells no id of a pair."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults import flip

from ease.errors import UserError
from ease.operations.evidence import append, hidden, read_log
from ease.operations.evidence.canonical import Refuted, canonical, hashed
from ease.operations.evidence.keys import new_key, public_path
from ease.operations.evidence.log import LARGEST_LINE, head_path, key_path, log_path
from ease.operations.evidence.salted import salt_path
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.config import load_config
from ease.runs.head import Release
from ease.runs.run import Run
from ease.storage import LARGEST_JSON


@pytest.fixture
def empty(tmp_path: Path, small: tuple[str, ...]) -> Run:
    """A run that was not even trained: the log needs no more than its folder."""
    return Run.create(tmp_path / "run", load_config(None, small))


@pytest.fixture
def logged(empty: Run) -> Run:
    """A log of five records: how it began, and four events."""
    for number in range(4):
        append(empty, "event", {"number": number})
    return empty


def lines_of(run: Run) -> list[bytes]:
    return log_path(run).read_bytes().splitlines(keepends=True)


def test_each_line_holds_the_hash_of_the_one_before(logged: Run) -> None:
    lines, previous = log_path(logged).read_bytes().splitlines(), "0" * 64
    for number, line in enumerate(lines):
        table = json.loads(line)
        assert sorted(table) == ["kind", "payload", "previous", "sequence", "time"]
        assert (table["sequence"], table["previous"]) == (number, previous)
        assert line == canonical(table)
        previous = hashed(line)
    assert [json.loads(line)["kind"] for line in lines] == ["begun", *["event"] * 4]
    log = read_log(logged)
    assert [record.sha256 for record in log.records] == [hashed(line) for line in lines] and log.unfinished == 0


def test_files_are_private(logged: Run) -> None:
    for path in (log_path(logged), head_path(logged), key_path(logged), salt_path(logged)):
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert log_path(logged).parent.stat().st_mode & 0o777 == 0o700


def test_every_flipped_byte_of_log_and_head_is_refused(empty: Run) -> None:
    append(empty, "event", {})
    for path, step in ((log_path(empty), 1), (head_path(empty), 3)):
        for place in range(0, path.stat().st_size, step):
            kept = flip(path, place, place % 8)
            with pytest.raises(Refuted):
                read_log(empty)
            path.write_bytes(kept)
    assert len(read_log(empty).records) == 2


def test_the_altered_record_is_named(logged: Run) -> None:
    lines = lines_of(logged)
    for number, line in enumerate(lines):
        kept = flip(log_path(logged), sum(map(len, lines[:number])) + line.index(b'"kind":"') + 9, 0)
        with pytest.raises(Refuted, match=f"record {number} was altered"):
            read_log(logged)
        log_path(logged).write_bytes(kept)


@pytest.mark.parametrize("number", range(5))
def test_a_record_that_was_left_out_is_missed(logged: Run, number: int) -> None:
    lines = lines_of(logged)
    log_path(logged).write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    with pytest.raises(Refuted, match=f"record {number} was left out"):
        read_log(logged)


def test_a_left_out_record_is_missed_when_others_are_renumbered(logged: Run) -> None:
    """Whoever has no key cannot sign the new end."""
    tables = [json.loads(line) for line in lines_of(logged)]
    del tables[2]
    previous, content = "0" * 64, b""
    for number, table in enumerate(tables):
        line = canonical({**table, "sequence": number, "previous": previous})
        previous, content = hashed(line), content + line + b"\n"
    log_path(logged).write_bytes(content)
    with pytest.raises(Refuted, match="record 4 was left out"):
        read_log(logged)


@pytest.mark.parametrize("number", range(5))
def test_a_doubled_record_is_seen(logged: Run, number: int) -> None:
    lines = lines_of(logged)
    log_path(logged).write_bytes(b"".join(lines[: number + 1] + lines[number:]))
    if number == 4:  # behind the head nothing counts
        assert len(read_log(logged).records) == 5 and read_log(logged).unfinished == len(lines[4])
        return
    with pytest.raises(Refuted, match="doubled"):
        read_log(logged)


@pytest.mark.parametrize("first", range(4))
def test_reordered_records_are_seen(logged: Run, first: int) -> None:
    lines = lines_of(logged)
    lines[first], lines[first + 1] = lines[first + 1], lines[first]
    log_path(logged).write_bytes(b"".join(lines))
    with pytest.raises(Refuted, match="reordered"):
        read_log(logged)


def test_a_cut_tail_is_missed_and_not_written_over(logged: Run) -> None:
    content = log_path(logged).read_bytes()
    log_path(logged).write_bytes(content[:-1])
    with pytest.raises(Refuted, match="record 4 was left out"):
        read_log(logged)
    with pytest.raises(Refuted, match="its last line"):
        append(logged, "event", {})
    log_path(logged).unlink()
    for refused in (lambda: read_log(logged), lambda: append(logged, "event", {})):
        with pytest.raises(Refuted, match=r"log\.jsonl: missing"):
            refused()


def test_a_torn_line_after_a_crash_is_cut_off_by_the_next(logged: Run) -> None:
    content = log_path(logged).read_bytes()
    following = lines_of(logged)[-1]
    for torn in (following[:1], following[:-1], following, b"\0" * 100):
        log_path(logged).write_bytes(content + torn)
        log = read_log(logged)
        assert len(log.records) == 5 and log.unfinished == len(torn)
    record = append(logged, "after", {})
    assert record.sequence == 5 and record.previous == hashed(following[:-1])
    assert log_path(logged).read_bytes() == content + record.line() + b"\n" and read_log(logged).unfinished == 0


def operations(run: Run) -> int:
    """How many steps one entry has that a crash can come before."""
    return sum(1 for _ in _crashing(run, None))


def _crashing(run: Run, at: int | None) -> Iterator[str]:
    """The steps of one entry; at the given one the process is gone."""
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace"):
            real = getattr(os, name)

            def step(*arguments: object, real: Callable[..., object] = real, name: str = name) -> object:
                steps.append(name)
                if len(steps) - 1 == at:
                    raise KeyboardInterrupt
                return real(*arguments)

            patch.setattr(os, name, step)
        try:
            append(run, "event", {"number": 99})
        except KeyboardInterrupt:
            assert at is not None
    return iter(steps)


def test_killed_before_any_step_the_log_continues(empty: Run, tmp_path: Path) -> None:
    """Of the first entry, which makes key, salt and log too, and of a later one."""
    for begun in (False, True):
        if begun:
            append(empty, "event", {"number": 0})
        count = operations(Run.load(Path(shutil.copytree(empty.folder, tmp_path / f"count-{begun}"))))
        assert count >= 4
        for at in range(count):
            run = Run.load(Path(shutil.copytree(empty.folder, tmp_path / f"{begun}-{at}")))
            list(_crashing(run, at))
            append(run, "after", {})
            kinds = [record.kind for record in read_log(run).records]
            before = ["begun", "event"] if begun else ["begun"]
            assert kinds in ([*before, "after"], [*before, "event", "after"]), at


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork")
def test_processes_take_turns(empty: Run) -> None:
    """Four write at once, the first of them making key, salt and log; no line is lost or torn."""
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for count in range(5):
                    append(empty, "event", {"process": number, "count": count, "ids": ["a"]})
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    events = read_log(empty).of_kind("event")
    assert sorted((each.payload["process"], each.payload["count"]) for each in events) == [
        (number, count) for number in range(4) for count in range(5)
    ]
    assert {each.payload["ids"][0] for each in events} == {hidden(empty, "a")}


def test_a_full_disk_leaves_the_log_as_it_was(logged: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    content = log_path(logged).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"log\.jsonl: cannot write"):
            append(logged, "event", {})
    assert log_path(logged).read_bytes() == content and read_log(logged).unfinished == 0
    assert append(logged, "event", {}).sequence == 5


def test_a_head_by_another_key_is_refused(logged: Run, tmp_path: Path, empty: Run) -> None:
    stranger = new_key(tmp_path / "stranger")
    with pytest.raises(Refuted, match="another key"):
        read_log(logged, stranger.public)
    key_path(logged).unlink()
    with pytest.raises(UserError, match=r"signing\.key: missing"):
        append(logged, "event", {})
    shutil.copy(tmp_path / "stranger", key_path(logged))
    with pytest.raises(Refuted, match="another key"):
        append(logged, "event", {})


def test_without_its_head_a_log_is_not_started_again(logged: Run) -> None:
    head_path(logged).unlink()
    for refused in (lambda: read_log(logged), lambda: append(logged, "event", {})):
        with pytest.raises(Refuted, match=r"head\.json: missing"):
            refused()
    assert len(lines_of(logged)) == 5


def test_the_public_half_of_a_key_is_made_again(logged: Run) -> None:
    kept = public_path(key_path(logged)).read_bytes()
    public_path(key_path(logged)).unlink()
    append(logged, "event", {})
    assert public_path(key_path(logged)).read_bytes() == kept


def test_no_id_of_a_pair_is_logged(empty: Run) -> None:
    """In requests, in values that hold requests, and in tables with `ids`; hashes differ from run to run."""
    request = SampleRequest(ids=("../../etc/passwd", "patient-17\n{}"))
    release = Release(request=request, answer="x/ease", model_sha256="0" * 64, after_round=1)
    append(empty, "event", {"request": request, "deep": [{"release": release}], "more": {"ids": ["patient-17\n{}"]}})
    text = log_path(empty).read_text()
    assert "patient" not in text and "passwd" not in text and len(text.splitlines()) == 2
    payload = read_log(empty).records[-1].payload
    assert payload["request"]["pairs"] == 2 and payload["request"]["scope"] == "sample"
    assert payload["more"]["ids"] == [hidden(empty, "patient-17\n{}")]
    assert payload["deep"][0]["release"]["request"] == payload["request"]
    assert hidden(empty, "a") != hidden(empty, "b")
    salt_path(empty).write_text("00" * 32)
    assert hidden(empty, "patient-17\n{}") != payload["more"]["ids"][0]
    assert append(empty, "event", {"request": ClientRequest(clients=(1,))}).payload["request"]["clients"] == [1]


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        ("Event", {}, "kind of an entry"),
        ("a\nb", {}, "kind of an entry"),
        ("", {}, "kind of an entry"),
        ("event", {"a": float("nan")}, "cannot be evidence"),
        ("event", {"a": 2**60}, "cannot be evidence"),
        ("event", {"a": "x" * LARGEST_LINE}, "bytes"),
    ],
)
def test_entries_that_are_none_are_refused(logged: Run, kind: str, payload: dict, words: str) -> None:
    content = log_path(logged).read_bytes()
    with pytest.raises(UserError, match=words):
        append(logged, kind, payload)
    assert log_path(logged).read_bytes() == content


def test_a_line_break_in_a_field_makes_no_line(logged: Run) -> None:
    append(logged, "event", {"text": 'a"}\n{"sequence":9', "\n": "\u2028"})
    assert len(lines_of(logged)) == 6 and read_log(logged).records[-1].payload["text"] == 'a"}\n{"sequence":9'


def test_a_huge_log_or_head_is_refused_unread(logged: Run) -> None:
    for path in (log_path(logged), head_path(logged)):
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(LARGEST_JSON + 1)  # sparse
        with pytest.raises(UserError, match="bytes, and at most"):
            read_log(logged)
        path.write_bytes(content)


def test_a_damaged_salt_is_refused(logged: Run) -> None:
    for content, words in (("zz", "damaged"), ("00", "cut short")):
        salt_path(logged).write_text(content)
        with pytest.raises(UserError, match=words):
            append(logged, "event", {"ids": ["a"]})
    salt_path(logged).unlink()
    with pytest.raises(UserError, match="salt: missing"):
        append(logged, "event", {"ids": ["a"]})
