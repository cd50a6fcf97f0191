"""An engineer trains on own photographs of five sites, answers four requests, audits, certifies, exports, serves."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from safetensors.torch import load_file

from ease.runs.answers import trained_of
from ease.runs.run import Run

pytestmark = pytest.mark.slow


def test_all_four_requests_are_answered_once(answered, command) -> None:
    states = {each["id"]: each["state"] for each in answered.listed}
    assert states == {f"request-{number}": "done" for number in range(4)}
    releases = json.loads((answered.run / "head.json").read_text())["releases"]
    assert [each["answer"] for each in releases] == [
        answered.answer(id) for id in ("request-0", "request-1", "request-3", "request-2")
    ], "larger priority first, then the earlier deadline, then the order of arrival"
    assert "client north" in command("request", "list", answered.run)
    assert "client west" in command("request", "show", answered.run, "request-3")
    again = json.loads(command("work", answered.run, "--json"))
    assert again["finished"] == []


def test_a_client_that_left_is_in_no_later_round(answered) -> None:
    """North and west are gone from what the clients hold, and so are the three photographs."""
    members = json.loads((answered.run / "membership.json").read_text())["clients"]
    gone = {each["client"] for each in members if each["name"] in ("north", "west")}
    closed = trained_of(Run.load(answered.run)).gone
    assert {client for request in closed for client in getattr(request, "clients", ())} == gone
    named = set((answered.folder / "ids.txt").read_text().split())
    assert {each for request in closed for each in getattr(request, "ids", ())} == named


def test_the_last_answer_is_audited_certified_and_exported(answered, command) -> None:
    name = answered.answer("request-0")
    options = ("--pool", 24, "--shadows", 4, "--retrains", 2, "--fpr", 0.1, "--workers", 1, "--quiet")
    audit = json.loads(command("audit", answered.run, "--request", name, "--retrain", *options, "--json"))
    assert audit["id"] == name and audit["verdict"]["words"]
    certificate = json.loads(command("certificate", answered.run, "--request", name, "--html", "--json"))
    assert certificate["verdict"] == audit["verdict"]["words"]
    verified = json.loads(command("verify", certificate["certificate"], "--run", answered.run, "--quick", "--json"))
    assert verified["holds"], verified["reasons"]
    page = json.loads(command("report", answered.run, "--json"))
    assert page["answers"] >= 4 and page["audited"] == 1
    exported = json.loads(command("export", answered.run, "--json"))
    model = load_file(next(path for path in exported["files"] if path.endswith("model.safetensors")))
    released = trained_of(Run.load(answered.run)).start
    assert model.keys() == released.tensors.keys()
    assert all(bool((model[name] == released[name]).all()) for name in model)


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, Any]]:
    """`ease serve` as a process of its own, ended by Ctrl-C; yields the line that it begins with."""
    command = [sys.executable, "-m", "ease", "serve", str(folder), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "stopped" in err and err.count("\n") == 2


def asked(served: dict[str, Any], path: str, content: bytes | None = None, kind: str = "application/json") -> Any:
    headers = {"Authorization": f"Bearer {served['key']}", "Content-Type": kind}
    with urlopen(Request(served["address"] + path, content, headers), timeout=60) as answer:
        return json.load(answer)


def test_the_released_model_is_served_and_finds_nothing_forgotten(answered, command, tmp_path: Path) -> None:
    """Over HTTP, before and after the purge: no id of two sites, three photographs and a class ever comes back."""
    run = Path(shutil.copytree(answered.run, tmp_path / "run"))
    members = json.loads((run / "membership.json").read_text())["clients"]
    gone = set((answered.folder / "ids.txt").read_text().split())
    for each in members:
        left = each["name"] in ("north", "west")
        of_class = [pair for pair, label in zip(each["train_ids"], each["train_classes"], strict=True) if label == 0]
        gone |= {*of_class, *(each["train_ids"] if left else ()), *(each["validation_ids"] if left else ())}
    held = {pair for each in members for pair in (*each["train_ids"], *each["validation_ids"])}
    assert 28 * 2 < len(gone) < len(held)
    captions = [json.loads(line) for line in (answered.folder / "photos" / "captions.jsonl").read_text().splitlines()]

    def found(served: dict[str, Any]) -> set[str]:
        answer = asked(served, f"/search?k=200&words={quote(captions[0]['caption'])}")
        return {hit["id"] for hits in answer["found"].values() for hit in hits}

    last = json.loads((run / "head.json").read_text())["releases"][-1]
    with serving(run) as served:
        health = json.load(urlopen(served["address"] + "/health", timeout=60))
        assert (health["model"], health["release"]) == (last["model_sha256"], last["answer"])
        assert found(served) & held == held - gone
        picture = (answered.folder / "photos" / "000.png").read_bytes()
        (image,) = asked(served, "/encode", picture, "image/png")["embeddings"]
        assert sum(value * value for value in image) == pytest.approx(1, abs=1e-5)
        with pytest.raises(HTTPError, match="401"):
            urlopen(served["address"] + "/search?words=boat", timeout=60)
        command("purge", run, "--quiet")
        assert found(served) & held == held - gone
    exported = json.loads(command("export", run, "--out", tmp_path / "model", "--json"))
    assert exported["request"] is None
    with serving(tmp_path / "model") as served:
        texts = json.dumps({"texts": ["a red kite"]}).encode()
        (text,) = asked(served, "/encode", texts)["embeddings"]
        assert len(text) == len(image)
