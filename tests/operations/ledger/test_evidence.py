"""What the queue leaves in the run's log, and certificates of what was purged since."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from benchmarks.bitflips import command
from tests.faults import flip
from tests.operations.ledger.test_work import add, ids_of, kept, listed, run, run_json, states

from ease.errors import Unwritable
from ease.operations.evidence import attest, read_log, verify
from ease.operations.evidence.checks import Verification
from ease.operations.evidence.log import key_path, log_path
from ease.operations.ledger import work as module
from ease.operations.ledger.store import Ledger
from ease.runs.answers import release
from ease.runs.run import Run
from ease.storage import read_json, sha256, write_json

__all__ = ["kept", "run"]  # fixtures


def kinds(run: Path) -> list[str]:
    return [each.kind for each in read_log(Run.load(run)).records]


def test_each_release_is_logged_once_and_without_ids(ease, run: Path, tmp_path: Path) -> None:
    ids = ids_of(run, 0, 2)
    add(ease, run, "--samples", listed(tmp_path, ids), id="s")
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    assert kinds(run) == ["begun", "answered", "released", "answered", "released"]
    head = Run.load(run).head
    lines = read_log(Run.load(run)).of_kind("released")
    assert [(each.payload["release"], each.payload["model"]) for each in lines] == [
        (number, each.model_sha256) for number, each in enumerate(head.releases, start=1)
    ]
    text = log_path(Run.load(run)).read_text()
    folder = head.releases[0].answer.partition("/")[0]  # a hash of ids without a salt
    assert (
        not any(each in text for each in ids) and folder not in text and lines[1].payload["answer"] == "client-1/ease"
    )
    run_json(ease, "work", run)
    assert len(kinds(run)) == 5


def test_an_unlogged_release_is_logged_by_the_next_call(ease, run: Path) -> None:
    run_json(ease, "forget", run, "--client", 1)
    release(Run.load(run), "client-1")  # as a process that died right after it
    run_json(ease, "work", run)
    assert kinds(run) == ["begun", "answered", "released"]


def test_a_release_that_failed_after_the_head_was_written_is_completed_by_the_same_command(
    ease, run: Path, monkeypatch
) -> None:
    run_json(ease, "forget", run, "--client", 1)
    run_json(ease, "forget", run, "--client", 1, "--method", "finetune")
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise Unwritable("log.jsonl: cannot write (No space left on device); free some space and run again")

        patch.setattr("ease.operations.evidence.events.append", full)
        assert ease("release", run, "--request", "client-1").code == 2
    assert len(Run.load(run).head.releases) == 1
    made = run_json(ease, "release", run, "--request", "client-1")
    assert made["answer"] == "client-1/ease" and len(Run.load(run).head.releases) == 1
    assert kinds(run) == ["begun", "answered", "released"]
    run_json(ease, "release", run, "--request", "client-1")
    assert kinds(run) == ["begun", "answered", "released"]
    other = ease("release", run, "--request", "client-1/finetune")
    assert other.code == 2 and "closed already by client-1/ease" in other.err


def test_no_certificate_rests_on_a_log_that_lacks_the_release(ease, run: Path, tmp_path: Path) -> None:
    run_json(ease, "forget", run, "--client", 1)
    release(Run.load(run), "client-1")  # as a process that died right after it
    run_json(ease, "certificate", run, "--request", "client-1", "--out", tmp_path / "c.json")
    assert kinds(run) == ["begun", "answered", "released", "certified"]
    assert verify(tmp_path / "c.json", Run.load(run), quick=True).holds


def test_a_longer_log_is_read_no_more_often_for_a_request(ease, run: Path, monkeypatch) -> None:
    """Otherwise the cost of each request grows with the number of releases before it."""
    for client in (1, 2):
        run_json(ease, "forget", run, "--client", client)
        release(Run.load(run), f"client-{client}")
    attest(Run.load(run))
    read = []
    monkeypatch.setattr("ease.operations.evidence.events.read_log", lambda run: read.append(1) or read_log(run))
    attest(Run.load(run))
    assert len(read) == 3  # for releases, for who joined, and for purges


def test_a_release_whose_line_the_disk_refused_comes_to_its_end_later(ease, run: Path, monkeypatch) -> None:
    add(ease, run, "--client", 1, id="c")
    whole, calls = module.attest, []

    def full(where: Run) -> None:
        calls.append(where)
        if len(calls) == 2:  # the first comes before the queue
            raise Unwritable("log.jsonl: cannot write (No space left on device)")
        whole(where)

    monkeypatch.setattr(module, "attest", full)
    result = ease("work", run)
    assert result.code == 2 and "No space left" in result.err and states(run) == {"c": "released"}
    assert len(Run.load(run).head.releases) == 1
    assert "cannot be cancelled" in ease("request", "cancel", run, "c").err and "not finished" in ease("purge", run).err
    finished = run_json(ease, "work", run)["finished"]
    assert [(each["state"], each["outcome"]["release"]) for each in finished] == [("done", 1)]
    assert kinds(run) == ["begun", "answered", "released"]


def test_a_log_that_was_altered_stops_the_queue_before_anything_is_computed(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    add(ease, run, "--client", 2, id="d")
    path = log_path(Run.load(run))
    path.write_bytes(path.read_bytes().replace(b'"release":1', b'"release":2'))
    result = ease("work", run)
    assert result.code == 2 and "record 2 was altered" in result.err and states(run)["d"] == "approved"
    assert not (run / "requests" / "client-2").exists()


# --- certificates after a purge ---


@pytest.fixture(scope="module")
def purged_once(kept: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs and a client forgotten, released and certified; a retraining beside, certified too; then all purged."""
    folder = tmp_path_factory.mktemp("purged")
    run = shutil.copytree(kept, folder / "run")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setenv("EASE_CACHE", str(shared_cache))
        patch.setattr("sys.argv", [])
        approved = ("request", "add", str(run), "--approve", "--id")
        command(*approved, "s", "--samples", str(listed(folder, ids_of(run, 0, 2))))
        command("work", str(run), "--quiet")
        command("forget", str(run), "--client", "1", "--method", "retrain", "--quiet")
        command(*approved, "c", "--client", "1")
        command("work", str(run), "--quiet")
        names = {"retrain": "client-1/retrain"}
        names |= {each.request.scope: each.answer for each in Run.load(run).head.releases}
        for scope, name in names.items():
            path = folder / f"{scope}.json"
            command("certificate", str(run), "--request", name, "--out", str(path))
            assert verify(path, Run.load(run), quick=True).holds
        command("purge", str(run), "--quiet")
    return folder


@pytest.fixture
def purged(purged_once: Path, tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A copy of that run, and its certificates by what they are of."""
    paths = {scope: purged_once / f"{scope}.json" for scope in ("retrain", "sample", "client")}
    return Path(shutil.copytree(purged_once / "run", tmp_path / "run")), paths


def unchecked(found: Verification) -> dict[str, str]:
    return {check.name: check.words for check in found.checks if check.holds is None}


def test_a_certificate_holds_after_a_purge_and_says_what_is_gone(ease, purged) -> None:
    run, paths = purged
    assert kinds(run)[-1] == "purged"
    found = {scope: verify(path, Run.load(run)) for scope, path in paths.items()}
    assert all(each.holds for each in found.values()), [each.reasons for each in found.values()]
    reported_hash = {scope: unchecked(each) for scope, each in found.items()}
    # Of the pairs: the record spelt their ids; the model was of an older release than the one the run goes on from.
    assert {"record.json", "model.safetensors", "pairs", "model before"} <= reported_hash["sample"].keys()
    assert "rewritten by a purge" in reported_hash["sample"]["record.json"]
    # Of the client: its model is the head; what it began from is gone.
    assert "model.safetensors" not in reported_hash["client"] and "record.json" not in reported_hash["client"]
    assert {"pairs", "model before"} <= reported_hash["client"].keys()
    assert set(reported_hash["retrain"]) == {"answer"} and "purge" in reported_hash["retrain"]["answer"]
    assert run_json(ease, "verify", paths["client"], "--run", run)["holds"]


def test_files_altered_after_a_purge_are_refused(purged) -> None:
    run, paths = purged
    answer = run / "requests" / Run.load(run).head.releases[0].answer
    record = read_json(answer / "record.json")
    write_json(answer / "record.json", {**record, "seed": record["seed"] + 1})
    assert any("record.json" in reason for reason in verify(paths["sample"], Run.load(run), quick=True).reasons)
    model = run / "requests" / "client-1" / "ease" / "model.safetensors"
    flip(model)
    assert any("model.safetensors" in reason for reason in verify(paths["client"], Run.load(run), quick=True).reasons)


def test_figures_are_compared_even_if_the_record_was_altered_before_the_purge(ease, run: Path, tmp_path: Path) -> None:
    """The purge logs the hash of what it rewrote; a figure that someone slipped in before is seen all the same."""
    add(ease, run, "--samples", listed(tmp_path, ids_of(run, 0, 2)), id="s")
    run_json(ease, "work", run)
    name, path = Run.load(run).head.releases[0].answer, tmp_path / "certificate.json"
    assert ease("certificate", run, "--request", name, "--out", path).code == 0
    record = read_json(run / "requests" / name / "record.json")
    record["metrics"]["forget/recall@1"] += 1.0
    write_json(run / "requests" / name / "record.json", record)
    run_json(ease, "purge", run)
    (reason,) = verify(path, Run.load(run), quick=True).reasons
    assert "forget/recall@1" in reason


def test_the_line_about_a_purge_cannot_be_forged_or_left_out(purged) -> None:
    run, paths = purged
    path = log_path(Run.load(run))
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(True)[:-1]))
    assert not verify(paths["sample"], Run.load(run), quick=True).holds
    path.write_bytes(whole.replace(b'"rewritten":{"record.json":"', b'"rewritten":{"record.json":"0', 1))
    assert not verify(paths["sample"], Run.load(run), quick=True).holds


def test_a_certificate_of_what_was_purged_holds_and_adds_no_second_answer(ease, purged, tmp_path: Path) -> None:
    run, _ = purged
    before = kinds(run)
    assert ease("certificate", run, "--request", "client-1", "--out", tmp_path / "later.json").code == 0
    assert verify(tmp_path / "later.json", Run.load(run)).holds and kinds(run) == [*before, "certified"]


def test_the_purge_of_a_dead_process_is_logged_by_the_next_call(ease, run: Path, monkeypatch) -> None:
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    with monkeypatch.context() as patch:
        calls = []

        def dies(where: Run) -> None:
            calls.append(where)
            if len(calls) == 2:  # the first comes before the purge
                raise KeyboardInterrupt

        patch.setattr("ease.operations.ledger.retention.attest", dies)
        assert ease("purge", run).code != 0
    assert "purged" not in kinds(run) and Ledger(run).entry("c").state != "running"
    run_json(ease, "purge", run)
    assert kinds(run)[-1] == "purged" and kinds(run).count("purged") == 1


def test_keys_and_ledger_are_private(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    private = [
        key_path(Run.load(run)),
        run / "ledger.sqlite",
        *(run / "rounds").rglob("*.bin"),
        *(run / "evidence").glob("[!.]*"),  # a lock file is empty
    ]
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)


def test_a_certificate_moved_to_another_release_is_refused(ease, run: Path, tmp_path: Path) -> None:
    """Two releases of one run: the certificate of one is not that of the other's model, nor of a copied answer."""
    for client, id in ((1, "a"), (2, "b")):
        add(ease, run, "--client", client, id=id)
    run_json(ease, "work", run)
    path = tmp_path / "one.json"
    assert ease("certificate", run, "--request", "client-1", "--out", path).code == 0
    other = run / "requests" / "client-2" / "ease" / "model.safetensors"
    found = verify(path, Run.load(run), model=other, quick=True)
    assert len(found.reasons) == 1 and "another model" in found.reasons[0]
    shutil.copyfile(other, run / "requests" / "client-1" / "ease" / "model.safetensors")
    assert any("its hash is not the one" in reason for reason in verify(path, Run.load(run), quick=True).reasons)
    assert json.loads(ease("verify", path, "--run", run, "--quick", "--json").out)["holds"] is False
    assert (
        sha256(other) != read_json(run / "requests" / "client-1" / "ease" / "record.json")["files"]["model.safetensors"]
    )
