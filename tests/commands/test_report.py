"""`ease report`: what it gathers, what it leaves out, and what it says of damaged files."""

import base64
import io
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ease.audit.band import Band
from ease.audit.config import AuditConfig
from ease.audit.records import AuditRecord, Costs, Gallery, Price
from ease.audit.verdict import Measure, Verdict
from ease.commands.report import EDGE, MOVED, NO_RUN, PRIVATE, RESISTED, own_ranks, report_run
from ease.console import as_text
from ease.errors import UserError
from ease.methods.finetune import Finetune
from ease.methods.retrain import Retrain
from ease.requests.request import ClientRequest
from ease.runs.answers import StoredAnswer, answer_of, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.forget import forget
from ease.runs.records import write_record
from ease.runs.run import Run
from ease.runs.world import World
from ease.show.sheet import data_address
from ease.storage import read_json, sha256, write_json
from ease.studies.bench import header
from ease.studies.experiment import Experiment
from ease.studies.records import BenchResults, BenchRow, Role


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, world: World, small_config: Callable[..., RunConfig]) -> Path:
    """A small run in which client 1 was forgotten by two methods."""
    run = Run.create(tmp_path_factory.mktemp("report") / "run", small_config())
    list(run.train(world))
    for method in (Finetune(), Retrain()):
        list(forget(run, world, ClientRequest(clients=(1,)), method))
    return run.folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def answer(run: Path) -> StoredAnswer:
    return answer_of(Run.load(run), ClientRequest(clients=(1,)), Finetune())


def audit_of(model: str) -> AuditRecord:
    """An audit of one measure of a model with this hash."""
    band = Band(low=None, high=0.3, models=4)
    measure = Measure(name="rho", value=0.2, retrain=0.1, before=1.0, band=band, retrained=(0.1,), kept=())
    return AuditRecord(
        request=ClientRequest(clients=(1,)),
        method={"method": "finetune"},
        model_sha256=model,
        retrain_sha256="",
        settings=AuditConfig(),
        verdict=Verdict(measures=(measure,), joint=None),
        gallery=Gallery(pairs=50, chance={}),
        attack="rmia",
        attacks={},
        relearning={},
        similarities={},
        costs=Costs(totals={"seconds": Price.of(1.0, 4.0)}, phases={}, compute_matched_retrain={}),
        warnings=(),
        not_tested=(),
    )


def test_ranks_by_hand() -> None:
    """By their best captions, picture 0 scores its own pair 1 and the other 1: it shares the first two places.

    Picture 1 scores the other pair 0.8 and its own max(0.6, 0.6 · 0.99 + 0.8 · 0.141) = 0.71: it comes second.
    """
    image = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    text = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.99, 0.141]]])
    assert own_ranks(image, text).tolist() == [1.5, 2.0]


def test_in_a_collapsed_model_every_rank_is_the_middle() -> None:
    image = torch.tensor([[1.0, 0.0]]).expand(5, 2)
    assert own_ranks(image, image[:, None].expand(5, 3, 2)).tolist() == [3.0] * 5


def test_a_picture_travels_in_its_address() -> None:
    pixels = np.zeros((300, 200, 3), dtype=np.uint8)
    pixels[..., 0] = 200
    kind, _, text = data_address(pixels, EDGE).partition(",")
    shown = Image.open(io.BytesIO(base64.b64decode(text)))
    assert kind == "data:image/jpeg;base64" and shown.size == (EDGE * 2 // 3, EDGE)
    assert np.abs(np.asarray(shown, dtype=int).mean((0, 1)) - (200, 0, 0)).max() < 4


def test_generated_pictures_are_shown_and_the_page_is_small(run: Path) -> None:
    summary = report_run(run, None, None, quiet=True)
    html = summary.path.read_text()
    assert summary.path == run / "report.html" and summary.answers == 2 and summary.audited == 0
    assert html.count("<img ") == MOVED + RESISTED
    assert summary.bytes == len(html.encode()) < 1_500_000


def test_it_opens_with_whose_pairs_what_was_found_and_which_model(run: Path, world: World) -> None:
    """Counted in the stored membership, and measured again in the trained model."""
    held = {each["client"]: len(each["train_ids"]) for each in read_json(run / "membership.json")["clients"]}
    html = report_run(run, None, None, quiet=True).path.read_text()
    assert f"{held[1]} of {sum(held.values())} training pairs were to be forgotten: all that client 1 gave." in html
    found = measure(world, trained_of(Run.load(run)).final, evaluation_sets(world, ClientRequest(clients=(1,))))
    assert f"{found['forget/recall@1']:.0f} before, " in html
    assert sha256(answer(run).model_path) in html
    written = datetime.fromtimestamp(answer(run).record_path.stat().st_mtime, UTC)
    assert f"{written.day} {written:%B %Y}" in html


def test_only_some_answers_have_pictures_and_audited_ones_come_first(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two like answers the second is audited, and one alone may be illustrated."""
    other = Path(shutil.copytree(answer(run).folder, answer(run).folder.parent / "other"))
    write_record(other / "audit.json", audit_of(sha256(other / "model.safetensors")))
    monkeypatch.setattr("ease.commands.report.MOST_ILLUSTRATED", 1)
    html = report_run(run, None, None, quiet=True).path.read_text()
    assert html.count("<img ") == MOVED + RESISTED
    assert html.index("<img ") < html.index("has not been audited")


def test_pictures_can_be_left_out(run: Path) -> None:
    html = report_run(run, None, False, quiet=True).path.read_text()
    assert "<img " not in html and PRIVATE not in html


def test_other_peoples_pictures_are_shown_only_when_asked_for(run: Path) -> None:
    """With another layout in run.json nothing of the data is even opened: its path does not exist."""
    stored = read_json(run / "run.json")
    stored["config"]["data"] |= {"name": "folder", "path": str(run / "absent")}
    write_json(run / "run.json", stored)
    html = report_run(run, None, None, quiet=True).path.read_text()
    assert "<img " not in html and PRIVATE in html
    with pytest.raises(UserError, match="absent"):
        report_run(run, None, True, quiet=True)


def test_only_one_request(run: Path, tmp_path: Path) -> None:
    html = report_run(run / "requests" / "client-1", tmp_path / "one.html", None, quiet=True).path.read_text()
    assert "What was forgotten in client-1" in html and html.count("<img ") == MOVED + RESISTED


def test_records_that_were_copied_without_their_run(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied" / "client-1"
    for method in ("finetune", "retrain"):
        (copied / method).mkdir(parents=True)
        shutil.copy(run / "requests" / "client-1" / method / "record.json", copied / method)
    html = report_run(copied, None, None, quiet=True).path.read_text()
    assert NO_RUN in html and "<img " not in html


def test_an_audit_counts_while_its_model_is_the_one_that_was_audited(run: Path) -> None:
    stored = answer(run)
    write_record(stored.audit_path, audit_of(sha256(stored.model_path)))
    assert report_run(run, None, False, quiet=True).audited == 1
    write_record(stored.audit_path, audit_of("another"))
    summary = report_run(run, None, False, quiet=True)
    assert summary.audited == 0 and "The model has changed since it was audited" in summary.path.read_text()


def test_an_experiment_in_the_folder_is_shown(run: Path, tmp_path: Path) -> None:
    recalls = {f"{part}/recall@1": 12.34 for part in ("forget", "retain", "test")}
    roles: list[Role] = ["method", "retrain"]
    rows = tuple(
        BenchRow(scenario="class", seed=0, role=role, method="x", label="Mine", metrics=recalls) for role in roles
    )
    found = BenchResults(header=header(Experiment(title="x", seeds=(0,))), bands=(), rows=rows)
    (tmp_path / "bench").mkdir()
    for folder in (run, tmp_path / "bench"):
        write_record(folder / "results.json", found)
        summary = report_run(folder, None, False, quiet=True)
        assert "12.3" in summary.path.read_text() and summary.compared == 2
        assert ("answers" in as_text(summary)) == (folder == run) and "2 models of an experiment" in as_text(summary)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in ("record.json", "audit.json", "results.json") for content in ("{", "[1]")),
        ("record.json", '{"request": {}}'),
        ("record.json", '{"format": 2, "request": {}}'),
        ("audit.json", '{"format": 1}'),
        ("results.json", '{"format": 2, "rows": [{}]}'),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(run: Path, ease: Any, name: str, content: str) -> None:
    path = (run if name == "results.json" else answer(run).folder) / name
    path.write_text(content)
    code, _, said = ease("report", run)
    assert code == 2 and said.startswith("error: ") and name in said and said.count("\n") == 1
    assert "again" in said, "the remedy"
    assert not (run / "report.html").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, ease: Any) -> None:
    code, _, said = ease("report", tmp_path)
    assert code == 2 and "no run, request or results here" in said


def test_one_answer_is_not_a_request(run: Path, ease: Any) -> None:
    code, _, said = ease("report", answer(run).folder)
    assert code == 2 and "name its request" in said


def test_the_json_names_the_page(run: Path, ease: Any, tmp_path: Path) -> None:
    code, out, _ = ease("report", run, "--out", tmp_path / "a.html", "--no-thumbnails", "--json")
    found = json.loads(out)
    assert code == 0 and found["path"] == str(tmp_path / "a.html") and found["answers"] == 2
    assert found["bytes"] == (tmp_path / "a.html").stat().st_size


def test_a_run_gives_the_same_page_each_time(run: Path, tmp_path: Path) -> None:
    pages = [report_run(run, tmp_path / f"{n}.html", None, quiet=True).path.read_bytes() for n in range(2)]
    assert pages[0] == pages[1]
