"""`ease audit` as a user meets it: refusals in one line, one object for machines, one page for a normal terminal."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from ease.api import Verdict
from ease.audit.quick_check import RULE
from ease.audit.records import AuditRecord, PairRecord
from ease.commands.audit import AuditsSummary, AuditSummary, _pair_rows
from ease.commands.forget import answer
from ease.commands.train import train_run
from ease.methods import make_method
from ease.requests.request import ClientRequest
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import read_json

CLIENT = ClientRequest(clients=(1,))
QUICK = ("--shadows", 4, "--retrains", 2, "--pool", 16, "--workers", 1, "--fpr", 0.1)


@pytest.fixture(scope="module")
def finished(small, shared_cache, tmp_path_factory) -> Path:
    """A run with a fine-tuning and no retraining. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        train_run(load_config(None, (*small, "data.test=60", "partition.validation_share=0.3")), folder, quiet=True)
        run = Run.load(folder)
        answer(run, World.open(run.config), CLIENT, make_method("finetune"), quiet=True)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["client-1/finetune", "--pool", "16"],
            ["client-1/retrain: retraining for this request is missing", "add --retrain"],
        ),
        (["client-1"], ["client-1: no finished request of that name", "finished: client-1/finetune"]),
        (["client-7/finetune"], ["client-7/finetune: no finished request"]),
        (["client-1/finetune", "--shadows", "5"], ["shadows", "complementary pairs: choose an even number (got 5)"]),
        (["client-1/finetune", "--shadows", "2"], ["--shadows"]),
        (["client-1/finetune", "--retrains", "0"], ["--retrains"]),
        (["client-1/finetune", "--fpr", "0"], ["fpr: input should be greater than 0"]),
        (["client-1/finetune", "--fpr", "1.5"], ["fpr: input should be less than 1 (got 1.5)"]),
        (["client-1/finetune", "--pool", "8"], ["--pool"]),
        (["client-1/finetune", "--pool", "59", "--retrain"], ["pool of 59 pairs", "there are 60: lower --pool"]),
        (["client-1/finetune", "--workers", "0"], ["--workers"]),
    ],
)
def test_a_user_error_is_one_line_and_changes_nothing(ease, run: Path, arguments: list[str], parts: list[str]) -> None:
    before = sorted(run.rglob("*"))
    result = ease("audit", run, "--request", *arguments)
    assert result.code == 2 and result.out == "" and "Traceback" not in result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    for part in parts:
        assert part in result.err, result.err
    assert sorted(run.rglob("*")) == before


def test_an_unfinished_answer_is_one_line(ease, run: Path) -> None:
    (run / "requests" / "client-1" / "finetune" / "record.json").unlink()
    result = ease("audit", run, "--request", "client-1/finetune")
    assert result.code == 2 and "no finished request" in result.err and "finished: none" in result.err


def test_retraining_itself_is_not_audited(ease, run: Path) -> None:
    world = World.open(Run.load(run).config)
    answer(Run.load(run), world, CLIENT, make_method("retrain"), quiet=True)
    result = ease("audit", run, "--request", "client-1/retrain", *QUICK)
    assert result.code == 2 and result.err.count("\n") == 1
    assert "retraining is what others are measured against" in result.err


@pytest.mark.slow
def test_retrain_runs_it_first_and_json_is_one_object(ease, run: Path) -> None:
    result = ease("audit", run, "--request", "client-1/finetune", "--retrain", *QUICK, "--json")
    assert result.code == 0 and result.err == "" and result.out.count("\n") == 1
    shown = json.loads(result.out)
    assert (run / "requests" / "client-1" / "retrain" / "record.json").is_file()
    kept = read_json(run / "requests" / "client-1" / "finetune" / "audit.json")
    named = {"id": "client-1/finetune", "folder": str(run / "requests" / "client-1" / "finetune")}
    steps = shown.pop("next_steps")
    assert shown == {**kept, **named}
    assert kept["verdict"]["reason"] == "too few retrainings" and len(steps) == 1
    again = f"ease audit {run} --request client-1/finetune --retrains 9 --shadows 4 --pool 16 --fpr 0.1"
    assert steps[0].startswith(f"{again}: 7 more retrainings, about")
    page = ease("audit", run, "--request", "client-1/finetune", *QUICK)
    assert page.code == 0 and "shadow models" not in page.err, "the second time nothing is trained"
    assert f"next: {steps[0]}" in page.out
    reported = ease("audit", run, "--request", "client-1/finetune", *QUICK, "--exit-code", "--json")
    assert reported.code == 3 and json.loads(reported.out)["verdict"]["passed"] is None
    for part in ("Audit of client-1/finetune (finetune)", "Each measure beside retraining", "Cost", "not tested:"):
        assert part in page.out


def test_ranks_of_a_pair_are_three_lines_with_the_span_of_all_retrainings() -> None:
    rank = {"trained": 1.0, "unlearned": 7.25, "retrain": 9.0, "retrain-1": 4.5, "retrain-2": 12.0}
    margin, level = {name: -value / 100 for name, value in rank.items()}, {name: -value for name, value in rank.items()}
    pair = PairRecord(id="p7", gallery=50, rank=rank, margin=margin, log_odds=level)
    assert [list(map(str, row)) for row in _pair_rows(pair)] == [
        ["p7", "rank", "1.0", "7.2", "9.0", "4.5..12.0"],
        ["", "margin", "-0.010", "-0.072", "-0.090", "-0.120..-0.045"],
        ["", "log-odds", "-1.00", "-7.25", "-9.00", "-12.00..-4.50"],
    ]


@pytest.mark.slow
def test_a_single_photo_gets_a_verdict_in_the_same_words_everywhere(ease, run: Path, tmp_path: Path) -> None:
    """A training of two rounds leaves nothing to be seen of one pair, and no shadow is trained for it."""
    (one,) = World.open(Run.load(run).config).shards[1].train_ids[:1]
    (tmp_path / "ids.txt").write_text(one)
    reported = ease("forget", run, "--samples", tmp_path / "ids.txt", "--method", "finetune", "--json")
    assert "go by ranks and levels" in json.loads(reported.out)["prospects"]
    name = f"{json.loads(reported.out)['id']}/finetune"
    asked = ("audit", run, "--request", name, "--retrain", "--retrains", 5, "--pool", 16, "--workers", 1)
    found = json.loads(ease(*asked, "--json").out)
    words = found["verdict"]["words"]
    assert found["verdict"]["passed"] is None and found["verdict"]["reason"] == "no signal"
    assert words.startswith("Undecided: the result is indistinguishable from retraining (p = ")
    assert (
        not list(run.rglob("shadow-*")) and found["attacks"] == {} and found["not_tested"][0].startswith("membership")
    )
    (pair,) = found["pairs"]
    models = {"trained", "unlearned", "retrain", *(f"retrain-{order}" for order in range(1, 6))}
    assert pair["id"] == one and pair["gallery"] == found["gallery"]["pairs"] == 20
    assert set(pair["rank"]) == set(pair["margin"]) == set(pair["log_odds"]) == models
    assert all(1 <= rank <= 20 for rank in pair["rank"].values())
    shown = ease(*asked)
    assert words[:40] in shown.out and "Each pair in its gallery of 20 pairs" in shown.out and one in shown.out
    assert ease("report", run, "--no-thumbnails").code == 0
    page = (run / "report.html").read_text()
    assert words.partition(": ")[2] in page and "Each pair in its gallery" in page and one in page
    kept = AuditRecord.model_validate(read_json(run / "requests" / name / "audit.json"))
    spoken = Verdict(AuditSummary.of(kept, name, run / "requests" / name))
    assert spoken.words == words and spoken.pairs[0].rank == pair["rank"] and spoken.passed is None


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1), (None, 3)])
def test_the_exit_code_depends_on_the_verdict_only_on_request(
    ease, monkeypatch, passed: bool | None, code: int
) -> None:
    summary = AuditSummary.model_construct(verdict=SimpleNamespace(passed=passed))
    monkeypatch.setattr(AuditSummary, "render", lambda _: iter(["the page"]))
    monkeypatch.setattr("ease.commands.audit.audit_run", lambda *_: summary)
    assert ease("audit", "runs/first", "--request", "client-1").code == 0
    result = ease("audit", "runs/first", "--request", "client-1", "--exit-code")
    assert (result.code, result.out) == (code, "the page\n")


@pytest.mark.parametrize(
    ("passed", "code"), [((True, True), 0), ((True, None), 3), ((None, False), 1), ((False, True), 1)]
)
def test_several_answers_pass_only_if_all_do(ease, monkeypatch, passed: tuple[bool | None, ...], code: int) -> None:
    verdicts = [SimpleNamespace(passed=each) for each in passed]
    audits = AuditsSummary(audits=tuple(AuditSummary.model_construct(verdict=each) for each in verdicts))
    monkeypatch.setattr(AuditSummary, "render", lambda _: iter(["a page"]))
    monkeypatch.setattr("ease.commands.audit.audits_run", lambda *_: audits)
    result = ease("audit", "runs/first", "--request", "client-1", "--request", "client-1/not", "--exit-code")
    assert (result.code, result.out) == (code, "a page\na page\n")


def test_audits_share_shadows_only_for_results_of_one_request(ease, run: Path) -> None:
    asked = ("--request", "client-1/finetune") * 2
    result = ease("audit", run, *asked)
    assert result.code == 2 and "different answers to one request" in result.err and result.err.count("\n") == 1
    assert ease("audit", run, *asked, "--quick").err == "error: --quick takes one result: name one --request\n"


def test_a_quick_look_is_one_object_or_a_few_lines_and_no_verdict(ease, run: Path) -> None:
    result = ease("audit", run, "--request", "client-1/finetune", "--quick", "--json")
    assert result.code == 0 and result.err == "" and result.out.count("\n") == 1
    shown, folder = json.loads(result.out), run / "requests" / "client-1" / "finetune"
    kept = read_json(folder / "quick.json")
    assert shown == {**kept, "id": "client-1/finetune", "folder": str(folder)} | {
        "rule": RULE,
        "notes": shown["notes"],
    }
    assert kept["found"] is (not kept["after"]["gap"]["low"] <= 0 <= kept["after"]["gap"]["high"])
    page = ease("audit", run, "--request", "client-1/finetune", "--quick")
    assert page.code == 0 and "Quick look at client-1/finetune" in page.out and "This is not a verdict" in page.out
    assert "one of twenty" in page.out and not (run / "shadows").exists()


@pytest.mark.parametrize("other", ["--exit-code", "--retrain"])
def test_a_quick_look_refuses_what_only_an_audit_can_give(ease, run: Path, other: str) -> None:
    result = ease("audit", run, "--request", "client-1/finetune", "--quick", other)
    assert result.code == 2 and result.err.startswith("error: --quick gives no verdict") and result.err.count("\n") == 1


def page(record: AuditRecord, width: int) -> list[str]:
    screen = Console(width=width, file=io.StringIO())
    for part in AuditSummary.of(record, "client-1", Path("runs/first")).render():
        screen.print(part, soft_wrap=isinstance(part, str | Text))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def is_end(line: str) -> bool:
    """Of the panel that holds the verdict."""
    return line.startswith("╰")


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("method", ["finetune", "nothing", "perfect"])
def test_the_page_fits_a_normal_terminal_with_a_line_for_each_measure(audited, method: str, width: int) -> None:
    found = audited.records[method]
    lines = page(found, width)
    framed = [line for line in lines if line[:1] in "┏┡│└┃╭╰"]
    assert max(map(len, framed)) <= width and not any("…" in line for line in lines)
    rows = [
        line.strip("│").split("│") for line in framed if "side" in line and line.startswith("│") and "│" in line[1:-1]
    ]
    shown = [each for each in found.verdict.measures if each.inside is False or "recall@5" not in each.name]
    assert len(rows) == len(shown)
    for cells, measure in zip(rows, shown, strict=True):
        digits = 1 if "recall" in measure.name else 3
        assert [cells[2].strip(), cells[3].strip()] == [
            f"{each:.{digits}f}" for each in (measure.value, measure.retrain)
        ]
        assert cells[5].strip() == ("inside" if measure.inside else "outside")
    assert all(any(warning in line for line in lines) for warning in found.warnings)
    reported = " ".join(
        " ".join(line.strip("│ ") for line in lines[1 : lines.index(next(filter(is_end, lines)))]).split()
    )
    assert reported == found.verdict.words
    assert any("by chance R@1" in line for line in lines)
    assert lines[-1].startswith("Evidence of approximate erasure is the most")
