"""An engineer trains on own photographs of five sites, answers four requests, audits, certifies, exports."""

import json

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
    again = json.loads(command("work", answered.run, "--json"))
    assert again["finished"] == []


def test_who_left_is_in_no_later_round(answered) -> None:
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
