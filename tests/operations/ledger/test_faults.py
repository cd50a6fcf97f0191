"""Faults around the queue that no other page tries: full disks, names that are paths, replays, and what comes back."""

import json
import pickle
import shutil
import subprocess
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from tests.operations.ledger.test_work import add, kept, listed, run, run_json, states

from ease import storage
from ease.errors import UserError
from ease.federation.codec import decode_update
from ease.methods.ease import Ease
from ease.operations.evidence import read_log, verify
from ease.operations.ledger.store import Ledger
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.answers import open_world, release
from ease.runs.forget import forget
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.storage import LEFTOVER

__all__ = ["kept", "run"]  # fixtures


@pytest.fixture(scope="module")
def small(small) -> tuple[str, ...]:
    """With adapters: how far a command comes on a disk that is almost full hangs on the size of its states."""
    return (*small, "model.lora=ffa")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("free", [40, 120])
def test_a_disk_that_fills_up_loses_nothing_and_the_queue_continues(ease, run: Path, small_disk, free: int) -> None:
    """So many kilobytes are left: one line, the request given back (or left to the next worker, if not even that can
    be written), nothing half done; then there is space again."""
    add(ease, run, "--client", 1, id="c")
    disk = small_disk(8192)
    here = Path(shutil.copytree(run, disk / "run"))
    filler = disk / "filler"
    left = shutil.disk_usage(disk).free - free * 1024
    filler.write_bytes(bytes(left))
    before = files(here / "rounds")
    result = ease("work", here, "--quiet")
    assert result.code == 2 and result.err.count("\n") == 1 and "Traceback" not in result.err, result.err
    assert files(here / "rounds") == before and not list(here.rglob(f"{LEFTOVER}*"))
    assert "free some space" in result.err or "free space" in result.err
    filler.unlink()
    assert states(here)["c"] in ("approved", "running") and not Run.load(here).head.releases
    assert run_json(ease, "work", here)["finished"][0]["state"] == "done"
    run_json(ease, "work", run)
    model = "requests/client-1/ease/model.safetensors"
    assert (here / model).read_bytes() == (run / model).read_bytes()
    assert [each.kind for each in read_log(Run.load(here)).records] == ["begun", "answered", "released"]


@pytest.mark.parametrize("id", ["../x", "/etc/passwd", "a/b", "a\nb", "", ".hidden", "x" * 81, "ünïcode", "a b"])
def test_ids_that_are_paths_or_break_lines_are_refused(ease, run: Path, id: str) -> None:
    result = ease("request", "add", run, "--client", 1, "--id", id)
    if id:  # none given is one that is made
        assert result.code == 2 and result.err.count("\n") == 1 and not Ledger(run).entries()
    assert not (run.parent / "x").exists()


def test_pairs_and_answers_that_are_paths_lead_nowhere(ease, run: Path, tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "/etc/passwd", "train-000000/..", "\u202etrain"):
        result = ease("request", "add", run, "--samples", listed(tmp_path, [name]))
        assert result.code == 2 and "\u202e" not in result.err
    run_json(ease, "forget", run, "--client", 1)
    elsewhere = shutil.copytree(run / "requests" / "client-1", tmp_path / "elsewhere" / "client-1")
    for name in (
        f"../../{elsewhere.parent.name}/client-1/ease",
        f"client-1/{elsewhere}/ease",
        "client-1/../client-1/ease",
    ):
        for command in ("release", "certificate", "export", "audit"):
            result = ease(command, run, "--request", name)
            assert result.code == 2 and result.err.count("\n") == 1, (command, name)
    assert not Run.load(run).head.releases


def test_words_of_strangers_steer_no_terminal_and_make_no_line(ease, run: Path) -> None:
    words = "eve\x1b[2J\nclient-2  done"
    add(ease, run, "--client", 1, "--by", words, "--reason", words, id="c", approve=False)
    for command in (("list",), ("show",)):
        shown = ease("request", *command, run, *(["c"] if command == ("show",) else []))
        assert shown.code == 0 and "\x1b[2J" not in shown.out
        assert not any(line.startswith("client-2") for line in shown.out.splitlines())
    assert json.loads(ease("request", "show", run, "c", "--json").out)["asked_by"] == words


def test_a_request_that_is_handed_in_again_is_answered_once(ease, run: Path) -> None:
    first = add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    again = add(ease, run, "--client", 1, id="c", approve=False)
    assert first["added"] and not again["added"] and again["state"] == "done"
    assert run_json(ease, "work", run)["finished"] == [] and len(Run.load(run).head.releases) == 1
    result = ease("request", "add", run, "--client", 2, "--id", "c")
    assert result.code == 2 and "another request has this id" in result.err


def test_a_certificate_of_an_older_run_is_recognised_by_its_log(ease, run: Path, tmp_path: Path) -> None:
    """Run, key and log wound back to a copy from before: what was issued since is missed."""
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run)
    old = shutil.copytree(run, tmp_path / "old")
    path = tmp_path / "certificate.json"
    assert ease("certificate", run, "--request", "client-1", "--out", path).code == 0
    (reason,) = verify(path, Run.load(old), quick=True).reasons
    assert "no such certificate" in reason or "cut off" in reason


def bomb() -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.pkl", bytes(50_000_000))
    return packed.getvalue()


class Trap:
    """Whoever unpickles it has a file less."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.unlink, (self.path,)


def test_a_pickle_or_a_packed_bomb_is_not_a_update(tmp_path: Path) -> None:
    (tmp_path / "witness").touch()
    for message in (pickle.dumps(Trap(tmp_path / "witness")), bomb()):
        with pytest.raises(UserError, match="not a message of this tool"):
            decode_update(message)
    assert (tmp_path / "witness").exists()


@pytest.mark.slow
def test_a_later_request_does_not_bring_an_earlier_one_back(learnt, tmp_path: Path) -> None:
    """Three requests, one after the other, on a run that has learnt its pairs.

    How strongly the model holds forgotten pairs may rise again by a quarter of what it fell, and no more.
    """
    run = Run.load(Path(shutil.copytree(learnt.run.folder, tmp_path / "run")))
    first = ClientRequest(clients=(1,))
    pairs = SampleRequest(ids=tuple(sorted(learnt.world.shards[0].train_ids[:12])))
    scores = {name: [learnt.level(learnt.trained.final, each)] for name, each in (("client", first), ("pairs", pairs))}
    for request in (first, pairs, ClientRequest(clients=(2,))):
        list(forget(run, open_world(run), request, Ease(), observe=False))
        made = release(run, request_id(request))
        state = Params.load(run.model_path(made))
        scores["client"].append(learnt.level(state, first))
        scores["pairs"].append(learnt.level(state, pairs))
    held, fallen, *later = scores["client"]
    assert held - fallen > 0.5 and max(later) - fallen < 0.25 * (held - fallen), scores
    held, _, fallen, end = scores["pairs"]
    assert held - fallen > 0.5 and end - fallen < 0.25 * (held - fallen), scores


def test_requests_are_listed_and_shown_on_a_read_only_disk(ease, run: Path, small_disk) -> None:
    add(ease, run, "--client", 1, id="c")
    disk = small_disk(8192)
    here = Path(shutil.copytree(run, disk / "run"))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert [each["id"] for each in run_json(ease, "request", "list", here)["requests"]] == ["c"]
    assert run_json(ease, "request", "show", here, "c")["state"] == "approved"
    refused = ease("request", "cancel", here, "c")
    assert refused.code == 2 and refused.err.count("\n") == 1


def test_leftovers_next_to_a_certificate_are_removed_by_the_next_one(ease, run: Path, tmp_path: Path) -> None:
    run_json(ease, "forget", run, "--client", 1)
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{LEFTOVER}c.json-0a").write_text("half")
    (out / f"{LEFTOVER}other.json-0a").write_text("of another program that writes now")
    run_json(ease, "certificate", run, "--request", "client-1", "--out", out / "c.json")
    assert sorted(path.name for path in out.iterdir()) == [f"{LEFTOVER}other.json-0a", "c.json"]


@pytest.mark.parametrize("words", [("new", "k.key"), ("node", "n.key"), ("server", "federation")])
def test_a_full_disk_leaves_no_half_of_a_key_pair(ease, small_disk, words: tuple[str, str], monkeypatch) -> None:
    disk, wrote = small_disk(256), []
    whole = storage.write_atomic

    def full_after_one(path: Path, content: bytes, durable: bool = True) -> None:
        if wrote:
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
        wrote.append(path)
        whole(path, content, durable)

    for module in ("ease.operations.evidence.keys", "ease.federation.credentials"):
        monkeypatch.setattr(f"{module}.write_atomic", full_after_one)
    result = ease("keys", words[0], disk / words[1])
    assert result.code == 2 and result.err.count("\n") == 1 and len(wrote) == 2
    assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"]


def test_half_of_a_key_pair_after_a_kill_is_completed(ease, tmp_path: Path) -> None:
    """A killed process can clean nothing up: its private key gets its public half, and is not written over."""
    key = tmp_path / "client.key"
    assert ease("keys", "new", key).code == 0
    private, public = key.read_bytes(), key.with_name("client.key.pub").read_bytes()
    key.with_name("client.key.pub").unlink()
    assert ease("keys", "new", key).code == 0
    assert key.read_bytes() == private and key.with_name("client.key.pub").read_bytes() == public
    assert ease("keys", "new", key).code == 2
