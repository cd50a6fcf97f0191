"""The queue and the verdict: answer, audit, then release, or hold for a person."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from tests.operations.ledger.test_work import add, listed, run_json
from tests.runs.test_exact import CLOSED_FORM

from ease.audit.config import AuditConfig
from ease.commands.train import train_run
from ease.config import override
from ease.operations.ledger import judging
from ease.operations.ledger.policy import Policy
from ease.runs.config import load_config
from ease.runs.run import Run

LENIENT = "[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n"


def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path, *settings: str) -> Path:
    folder = tmp_path_factory.mktemp("verdicts") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(cache))
        train_run(load_config(None, settings), folder, quiet=True)
    (folder / "policy.toml").write_text(LENIENT)
    return folder


@pytest.fixture(scope="module")
def small_run(small, shared_cache, tmp_path_factory) -> Path:
    return trained(tmp_path_factory, shared_cache, *small, "partition.clients=4")


@pytest.fixture(scope="module")
def exact_run(shared_cache, tmp_path_factory) -> Path:
    return trained(tmp_path_factory, shared_cache, *CLOSED_FORM)


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


@pytest.fixture
def exact(exact_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exact_run, tmp_path / "exact"))


@pytest.fixture
def few_shadows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit of a few trainings, which is undecided about everything."""
    monkeypatch.setattr(judging, "AuditConfig", lambda: AuditConfig(shadows=4, retrains=1, pool=16, workers=1))


def certified(ease, run: Path, name: str, out: Path) -> dict:
    assert ease("certificate", run, "--request", name, "--out", out).code == 0
    return json.loads(base64.b64decode(json.loads(out.read_text())["payload"]))["predicate"]


def test_the_default_is_to_release_after_the_audit() -> None:
    assert Policy().release == "after_audit"


def test_an_answer_that_passes_its_audit_is_released_with_the_verdict(ease, exact: Path, tmp_path: Path) -> None:
    add(ease, exact, "--client", 1, id="c")
    (finished,) = run_json(ease, "work", exact)["finished"]
    assert finished["state"] == "done" and finished["outcome"]["passed"] is True and finished["outcome"]["verdict"]
    certificate = certified(ease, exact, "client-1/exact", tmp_path / "c.json")
    assert certificate["verdict"] == {"passed": True, "words": finished["outcome"]["verdict"]}
    assert finished["outcome"]["verdict"][:30] in " ".join(ease("request", "show", exact, "c").out.split())


def test_a_run_too_small_for_the_default_audit_releases_at_once_and_reports_it(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="c")
    (finished,) = run_json(ease, "work", run)["finished"]
    assert finished["state"] == "done" and finished["outcome"]["passed"] is None
    assert finished["outcome"]["verdict"].startswith("No audit: ")
    assert not (run / "requests" / "client-1" / "ease" / "audit.json").exists()


def test_at_once_releases_without_an_audit(ease, exact: Path) -> None:
    add(ease, exact, "--client", 1, id="c")
    (finished,) = run_json(ease, "work", exact, "--set", "release=at_once")["finished"]
    assert finished["state"] == "done" and finished["outcome"]["verdict"] == ""
    add(ease, exact, "--client", 2, id="d")
    (finished,) = run_json(ease, "work", exact, "--no-audit")["finished"]
    assert finished["state"] == "done" and finished["outcome"]["verdict"] == ""


def test_without_a_passed_verdict_a_person_decides(ease, run: Path, tmp_path: Path, few_shadows) -> None:
    add(ease, run, "--client", 1, id="c")
    (held,) = run_json(ease, "work", run, "--audit", code=4)["finished"]
    assert held["state"] == "held" and held["outcome"]["passed"] is None and not Run.load(run).head.gone
    assert held["why"].startswith("its audit is inconclusive; read the verdict") and held["outcome"]["verdict"]
    audit = run / "requests" / "client-1" / "ease" / "audit.json"
    written = audit.stat().st_mtime_ns
    assert run_json(ease, "work", run, "--audit")["finished"] == []  # it waits for a person
    run_json(ease, "request", "approve", run, "c", "--by", "bo")
    (done,) = run_json(ease, "work", run, "--audit")["finished"]
    assert done["state"] == "done" and audit.stat().st_mtime_ns == written
    words = done["outcome"]["verdict"]
    assert certified(ease, run, "client-1/ease", tmp_path / "c.json")["verdict"] == {"passed": None, "words": words}


def test_nothing_builds_on_a_held_or_refused_result(ease, run: Path, few_shadows) -> None:
    """Neither by hand nor by further training, which continues from the only result there is."""
    add(ease, run, "--client", 1, id="c")
    run_json(ease, "work", run, "--audit", code=4)
    for command in (("release", run, "--request", "c"), ("train", "--resume", run, "--until", 3)):
        refused = ease(*command)
        assert refused.code == 2 and "answers c, which is held; decide with `ease request approve" in refused.err
    run_json(ease, "request", "refuse", run, "c", "--reason", "the site takes it back")
    refused = ease("train", "--resume", run, "--until", 3)
    assert refused.code == 2 and "was refused; delete" in refused.err and not Run.load(run).head.gone
    shutil.rmtree(run / "requests" / "client-1")
    assert ease("train", "--resume", run, "--until", 3, "--quiet").code == 0 and not Run.load(run).head.gone


def test_an_audit_that_is_asked_for_and_impossible_holds_the_answer(ease, run: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise judging.UserError("no pool")

    monkeypatch.setattr(judging, "check_possible", refuse)
    add(ease, run, "--client", 1, id="c")
    (held,) = run_json(ease, "work", run, "--audit", code=4)["finished"]
    assert held["state"] == "held" and held["outcome"]["verdict"] == "No audit: no pool."
    assert held["why"].startswith("it could not be audited; ")


def test_pairs_outside_training_need_no_audit(ease, run: Path, tmp_path: Path) -> None:
    known = Run.load(run).known()
    assert known is not None
    add(ease, run, "--samples", listed(tmp_path, [known[0].test[0]]), id="t")
    (done,) = run_json(ease, "work", run, "--audit")["finished"]
    assert done["state"] == "done" and done["outcome"]["verdict"] == ""


def test_the_policy_is_read_from_its_file_and_from_settings() -> None:
    assert Policy(**override({"release": "at_once"}, ())).release == "at_once"
    with pytest.raises(ValueError, match="after_audit"):
        Policy(release="never")  # type: ignore[arg-type]
