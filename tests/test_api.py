"""The Python interface does what the commands do, in as few words, and shows itself in a notebook."""

import subprocess
import sys
from pathlib import Path

import pytest

import ease
import ease.api
from ease.audit.verdict import Reason
from ease.commands.audit import AuditSummary
from ease.runs.config import load_config


@pytest.fixture(scope="module")
def run(small, shared_cache, tmp_path_factory) -> "ease.TrainedRun":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return ease.train(load_config(None, small), tmp_path_factory.mktemp("api") / "run", quiet=True)


def test_train_forget_and_open_again(run: "ease.TrainedRun") -> None:
    answer = run.forget(client=1, method="finetune", quiet=True)
    assert answer.name == "client-1/finetune" and answer.model.is_finite()
    assert answer.metrics["cost/bytes_up"] > 0 and run.metrics["cost/bytes_up"] > 0
    assert ease.open_run(run.folder) == run


def test_a_quick_look_from_python(tmp_path: Path, small) -> None:
    run = ease.train(load_config(None, (*small, "partition.validation_share=0.3")), tmp_path / "run", quiet=True)
    answer = run.forget(client=1, method="finetune", quiet=True)
    check = answer.check(quiet=True)
    assert check.words == answer.summary.check.words and check.found == (not check.gap.contains(0))
    assert check.words.split()[0] in repr(check) and "This is no verdict" in repr(check)


def test_requests_are_checked_as_on_the_command_line(run: "ease.TrainedRun") -> None:
    with pytest.raises(ease.UserError, match="no such client"):
        run.forget(client=99, quiet=True)
    with pytest.raises(ease.UserError, match="name what to forget"):
        run.forget(quiet=True)
    with pytest.raises(ease.UserError, match="no training pairs"):
        run.forget(samples=["nobody"], quiet=True)
    with pytest.raises(ease.UserError, match="unknown method"):
        run.forget(client=1, method="magic", quiet=True)


def test_settings_by_name(tmp_path: Path, small) -> None:
    with pytest.raises(ease.UserError, match=r"training\.rounds"):
        ease.train(out=tmp_path / "run", settings={"training.rounds": 0}, quiet=True)


def test_settings_change_a_configuration_value_too(tmp_path: Path, small, monkeypatch) -> None:
    """Whatever the configuration is given as; paths may be paths, meant from where the user stands."""
    seen = []
    monkeypatch.setattr(ease.api, "train_run", lambda config, *_: seen.append(config))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\nrounds = 3\n")
    changes = {"training.batch_size": 4, "data.name": "folder", "data.path": Path("photos")}
    for config in (load_config(None, (*small, "training.rounds=3")), tmp_path / "run.toml"):
        ease.train(config, tmp_path / "run", changes, quiet=True)
        assert (seen[-1].training.rounds, seen[-1].training.batch_size) == (3, 4)
        assert seen[-1].data.path == tmp_path / "photos"
    with pytest.raises(ease.UserError, match=r"settings: training\.rounds"):
        ease.train(seen[0], tmp_path / "run", {"training.rounds": 0}, quiet=True)


def test_results_show_themselves(run: "ease.TrainedRun") -> None:
    assert "Recall in percent" in repr(run)
    html = run._repr_html_()
    assert html.startswith("<pre") and "Recall in percent" in html


@pytest.mark.slow
def test_a_verdict_says_whether_it_passed_and_why(audited) -> None:
    """In the very words of the terminal."""
    for name, passed in (("nothing", False), ("finetune", False)):
        summary = AuditSummary(audited.records[name], f"client-1/{name}", audited.run.folder)
        verdict = ease.Verdict(summary)
        assert verdict.passed is passed and verdict.reason is Reason.KEPT and verdict.p_value <= 0.05
        assert verdict.measures == audited.records[name].verdict.measures
        assert " ".join(verdict.words.split()[:8]) in repr(verdict)


def test_import_alone_is_light() -> None:
    """Tab completion and `ease --help` must not wait for torch."""
    code = "import sys, ease; assert 'torch' not in sys.modules; assert 'train' in dir(ease); ease.UserError"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        ease.nothing  # noqa: B018
