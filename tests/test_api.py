"""The Python interface does what the commands do, in as few words, and shows itself in a notebook."""

import doctest
import io
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import ease
import ease.api
import ease.api.studies
from ease.audit.verdict import Reason
from ease.commands.audit import AuditSummary
from ease.runs.config import load_config
from ease.runs.run import Run


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
    assert check.words in repr(check) and "This is not a verdict" in str(check)


def test_requests_are_checked_as_on_the_command_line(run: "ease.TrainedRun") -> None:
    with pytest.raises(ease.UserError, match="no such client"):
        run.forget(client=99, quiet=True)
    with pytest.raises(ease.UserError, match="name what to forget"):
        run.forget(quiet=True)
    with pytest.raises(ease.UserError, match="not pairs of this run"):
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
    assert "\n" not in repr(run) and str(run.folder) in repr(run)
    assert "Recall in percent" in str(run)
    html = run._repr_html_()
    assert html.startswith("<table") and "Recall in percent" in html and "<td" in html and "<pre" not in html
    assert len(run.preview(client=1).ids) == run.clients["1"] and "\n" not in repr(run.preview(client=1))


@pytest.mark.slow
def test_a_verdict_says_whether_it_passed_and_why(audited) -> None:
    """In the very words of the terminal."""
    for name, passed in (("nothing", False), ("finetune", False)):
        summary = AuditSummary.of(audited.records[name], f"client-1/{name}", audited.run.folder)
        verdict = ease.Verdict(summary)
        assert verdict.passed is passed and verdict.reason is Reason.KEPT and verdict.p_value <= 0.05
        assert verdict.measures == audited.records[name].verdict.measures
        assert " ".join(verdict.words.split()[:8]) in str(verdict) and "not passed" in repr(verdict)


def test_the_import_is_light() -> None:
    """Tab completion and `ease --help` must not wait for torch."""
    code = "import sys, ease; assert 'torch' not in sys.modules; assert 'train' in dir(ease); ease.UserError"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        ease.nothing  # noqa: B018


# --- what is meant otherwise is refused by name ---


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"client": "12"}, ("client='12'", "in quotes", "client=12")),
        ({"client": ["1", 2]}, ("client='1'", "client=1")),
        ({"client": True}, ("client=True", "client=3")),
        ({"client": 1.0}, ("client=1.0",)),
        ({"client": {1: 2}}, ("client={1: 2}",)),
        ({"client": "north"}, ("north", "no such client")),
        ({"concept": 1}, ("concept=1", 'concept="on the beach"')),
        ({"concept": [1]}, ("concept=1",)),
        ({"samples": "train-000003"}, ("samples='train-000003'", "samples=['train-000003']")),
        ({"samples": [3]}, ("samples=3", "not a text")),
        ({"samples": 3}, ("samples=3",)),
        ({"client": 1, "method": None}, ("method=None", "ease methods")),
        ({"client": 1, "method": "fintune"}, ("fintune", "did you mean finetune?")),
        ({"client": 1, "settings": "replay=1"}, ("settings='replay=1'", "training.rounds")),
        ({"client": 1, "settings": {"replays": 1}}, ("replays", "did you mean replay?")),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(run: "ease.TrainedRun", given, parts) -> None:
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(ease.UserError) as caught:
        run.forget(**given, quiet=True)
    for part in parts:
        assert part in str(caught.value)
    assert sorted(run.folder.rglob("*")) == before


def test_numbers_of_other_libraries_and_files_of_ids_are_taken(run: "ease.TrainedRun", tmp_path: Path) -> None:
    answer = run.forget(client=np.int64(1), method="finetune", quiet=True)
    assert answer.name == "client-1/finetune"
    known = Run.load(run.folder).known()
    assert known is not None
    first = known[0].clients[0].train_ids[0]
    (tmp_path / "ids.txt").write_text(f"{first}\n")
    by_file = run.forget(samples=tmp_path / "ids.txt", method="finetune", quiet=True)
    assert by_file.summary.request.ids == (first,)
    assert run.forget(samples={first}, method="finetune", quiet=True).name == by_file.name


def test_a_site_may_be_called_by_a_number(run: "ease.TrainedRun", monkeypatch) -> None:
    """Then text is its name, as on the command line."""
    seen = []
    monkeypatch.setattr(ease.api, "_sites", lambda folder: {"12", "north"})
    monkeypatch.setattr(ease.api, "forget_run", lambda folder, wanted, *_: seen.append(wanted.clients))
    run.forget(client=["12", 2])
    assert seen == [["12", 2]]


@pytest.mark.parametrize("given", [{"config": 3}, {"settings": ["training.rounds=2"]}, {"settings": {1: 2}}])
def test_train_takes_no_other_kinds_either(given, tmp_path: Path) -> None:
    (name,) = given
    with pytest.raises(ease.UserError, match=f"^{name}="):
        ease.train(out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_the_examples_of_the_docstrings_run(small, tmp_path: Path, monkeypatch) -> None:
    """Each public name of the interface has one, and what it shows is what comes."""
    monkeypatch.chdir(tmp_path)
    config = load_config(None, (*small, "partition.validation_share=0.3"))
    names = {"small": config.model_dump(mode="json", exclude_defaults=True)}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder()
    found = [test for test in finder.find(ease.api, "ease.api") if test.examples]
    found += [test for test in finder.find(ease.api.studies, "ease.api.studies") if test.examples]
    # A module's own makes what the others use.
    for test in sorted(found, key=lambda test: test.name not in ("ease.api", "ease.api.studies")):
        test.globs = names
        reported = io.StringIO()
        assert runner.run(test, out=reported.write, clear_globs=False).failed == 0, reported.getvalue()
    shown = {test.name for test in found}
    assert {"ease.api.train", "ease.api.open_run", "ease.api.TrainedRun.forget", "ease.api.Answer.check"} <= shown


def test_the_version_is_shown_everywhere() -> None:
    """As a name, by `python -m ease`, and where the package says what it is built as."""
    reported = subprocess.run([sys.executable, "-m", "ease", "--version"], capture_output=True, text=True, check=True)
    assert reported.stdout == f"ease {ease.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ease.__version__"}
    assert (Path(ease.__file__).parent / "py.typed").is_file()
