"""The results page tells what the results say; sections without results are left out; no number is typed by hand."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recipes import results_page

from ease.config import validate
from ease.storage import write_json
from ease.studies.records import BenchResults

ROOT = Path(__file__).parent.parent
TEMPLATE = (ROOT / "recipes" / "results_page.md").read_text()
SEEDS = (0, 1)
HEADER: dict[str, Any] = {
    "experiment": {
        "title": "A comparison by hand",
        "kind": "table",
        "scenarios": ["client"],
        "methods": [],
        "vary": {},
        "tuned": None,
        "seeds": list(SEEDS),
        "band_retrains": 2,
        "shadows": 0,
        "run": {
            "data": {"name": "scenes", "path": None},
            "model": {"backbone": "tiny", "lora": "ffa", "lora_rank": 8},
            "partition": {"clients": 10, "beta": 0.5},
            "training": {"rounds": 20, "local_epochs": 2},
        },
    },
    "command": "ease bench experiments/main.toml --set run.data.path=/home/someone/flickr/captions.json",
    "date": "2026-03-04T05:06:07+00:00",
    "commit": "abc123",
    "versions": {"ease": "0.1.0"},
    "machine": {"cores": 2},
}


def rows(role: str, label: str, forget: Sequence[float], retain: Sequence[float], share: float) -> list[dict[str, Any]]:
    """One model on each seed; test recall is 30 for all, so that it adds nothing to a sum of gaps."""
    return [
        {
            "scenario": "client",
            "seed": seed,
            "role": role,
            "method": label,
            "label": label,
            "metrics": {
                **{f"forget/recall@{k}": forget[seed] for k in (1, 5, 10)},
                **{f"retain/recall@{k}": retain[seed] for k in (1, 5, 10)},
                **{f"test/recall@{k}": 30.0 for k in (1, 5, 10)},
                "rho": 0.0,
                **{f"ratio/{cost}": share for cost in ("bytes_up", "bytes_down", "seconds") if role != "trained"},
                **{f"cost/{cost}": share * 1e6 for cost in ("bytes_up", "bytes_down", "seconds") if role != "trained"},
            },
        }
        for seed in SEEDS
    ]


@pytest.fixture
def results() -> dict[str, Any]:
    """Retraining forgets to 20 and 22; EASE is 1 above and 3 below it and keeps 1 less; `Exact` is right and dear."""
    return {
        "format": 2,
        "header": HEADER,
        "bands": [
            {
                "scenario": "client",
                "seed": 0,
                "metrics": {
                    "forget/recall@1": {"low": 18.0, "high": 22.0, "models": 3},
                    "retain/recall@1": {"low": 89.5, "high": 90.5, "models": 3},
                },
            }
        ],
        "rows": [
            *rows("trained", "Trained", (80, 82), (90, 90), 0),
            *rows("method", "EASE", (21, 19), (89, 89), 0.2),
            *rows("method", "Exact", (20, 22), (90, 90), 0.9),
            *rows("retrain", "Retrain", (20, 22), (90, 90), 1),
        ],
    }


@pytest.fixture
def folder(results: dict[str, Any], tmp_path: Path) -> Path:
    write_json(tmp_path / "results" / "main" / "results.json", results)
    return tmp_path / "results"


def finished(name: str, results: dict[str, Any]) -> results_page.Finished:
    return results_page.Finished(name, validate(BenchResults, results, name))


def test_the_compact_table_by_hand(results: dict[str, Any]) -> None:
    """EASE: forget mean (21 + 19) / 2 = 20, gaps +1 and -3, mean -1; retain gaps -1; sums 1 + 1 and 3 + 1, mean 3.

    On the seed of the band, 21 lies in 18..22 and 89 outside 89.5..90.5. The band of the retained gap is 89.5 - 90 to
    90.5 - 90. Retraining comes first, the trained model last, and the nearer method before the farther one.
    """
    shown = results_page.comparison(finished("main", results)).splitlines()[2:]
    assert shown == [
        "| Retrain | 21.0 |  |  | 100% |",
        "| Exact | 21.0 (+0.0)° | +0.0° | 0.0 | 90% |",
        "| **EASE** | 20.0 (-1.0)° | -1.0 | 3.0 | 20% |",
        "| Trained | 81.0 (+60.0) | +0.0 | 60.0 |  |",
        "| retrain band | 18.0 to 22.0 | -0.5 to +0.5 |  |  |",
    ]


def test_a_dagger_marks_rows_whose_settings_a_sweep_chose(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        row["tuned"] = row["label"] == "Exact"
    shown = results_page.comparison(finished("main", results)).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in shown][1:3] == ["Exact†", "**EASE**"]


def test_similarities_of_some_blocks_and_of_all(results: dict[str, Any]) -> None:
    """Off the diagonal of one seed: 0.1 and 0.3 in two projectors, 0.5 in an attention block."""
    similar = {"image.projector.0": 0.1, "text.projector.0": 0.3, "text.tower.blocks.3.attention.query": 0.5}
    blocks = [
        {"block": name, "modality": "text", "clients": [0, 1], "cosines": [[[1.0], [value]], [[value], [1.0]]]}
        for name, value in similar.items()
    ]
    results["subspaces"] = [{"format": 2, "seed": 0, "blocks": blocks}]
    found = finished("subspaces", results)
    assert results_page.overlap(found) == "0.10 to 0.50"
    assert results_page.overlap(found, "projector") == "0.10 to 0.30"
    assert results_page.overlap(found, "attention") == "0.50 to 0.50"


def test_the_nearest_of_all_and_of_the_cheap(results: dict[str, Any]) -> None:
    """Exact is nearest but sends nine tenths; EASE is the only one below a third and second of two."""
    last = results_page.nearest(finished("main", results)).splitlines()[-1]
    assert last == "| client | Exact 0.0 (90%) | EASE 3.0 (20%) | EASE 3.0 (20%) | 2 of 2 |"


def test_a_method_without_a_model_is_named_as_such(results: dict[str, Any]) -> None:
    """It is in the table, takes no rank, and stands behind those that have one."""
    lost = rows("method", "Lost", (0, 0), (0, 0), 0.1)
    results["rows"] += [{**row, "metrics": {}, "diverged": "every update was rejected"} for row in lost]
    found = finished("main", results)
    labels = [line.split(" | ")[0].strip("| ") for line in results_page.comparison(found).splitlines()[2:]]
    assert labels == ["Retrain", "Exact", "**EASE**", "Lost", "Trained", "retrain band"]
    assert "| Lost | diverged |" in results_page.comparison(found)
    assert "2 of 2" in results_page.nearest(found)


def test_comparison_with_the_paper(results: dict[str, Any]) -> None:
    """Ours from the rows above, the paper's from its table: EASE 0.3 - 0.1 and 86.5 - 90.7; methods that only one
    of the two has are left blank or out."""
    printed, _ = results_page.paper()
    lines = results_page.beside([finished("main", results)], printed["comparison"]).splitlines()
    assert lines[0].startswith("|  | client, scenes | client, paper | class, scenes |")
    ease = next(line for line in lines if line.startswith("| **EASE**"))
    assert ease.startswith("| **EASE** | -1.0 / -1.0 | +0.2 / -4.2 |  |")
    assert lines[-1].startswith("| Retrain itself | 21.0 / 90.0 / 30.0 | 0.1 / 90.7 |")
    assert any(line.startswith("| FUSED |  | +82.0 / -4.5 |") for line in lines)
    assert not any("Exact" in line for line in lines)


def test_the_papers_algorithm_is_next_to_the_papers_ease(results: dict[str, Any]) -> None:
    """In a comparison with both methods the printed row is repeated; in an ablation without ours there is one row."""
    printed, _ = results_page.paper()
    rows, name = results["rows"], results_page.PAPERS_EASE
    papers = [row | {"label": name} for row in rows if row["label"] == "EASE"]
    both = finished("main", {**results, "rows": [*rows, *papers]})
    lines = results_page.beside([both], printed["comparison"]).splitlines()
    shown = [line for line in lines if "EASE" in line]
    assert [line.split(" | ")[0] for line in shown] == [f"| {name}", "| **EASE**"]
    assert all("| -1.0 / -1.0 | +0.2 / -4.2 |" in line for line in shown)
    alone = finished("ablation", {**results, "rows": [row for row in [*rows, *papers] if row["label"] != "EASE"]})
    lines = results_page.beside([alone], printed["ablation"]).splitlines()
    assert sum("EASE" in line for line in lines) == 1 and any(line.startswith("| w/o GSD |") for line in lines)


def test_data_are_called_by_their_file(results: dict[str, Any]) -> None:
    found = finished("main", results)
    assert results_page.world(found) == "scenes"
    run = {**HEADER["experiment"]["run"], "data": {"name": "karpathy", "path": "/a/b/dataset_flickr8k.json"}}
    other = {**results, "header": {**HEADER, "experiment": {**HEADER["experiment"], "run": run}}}
    assert results_page.world(finished("other", other)) == "Flickr8k"


def test_a_curve_of_a_varied_setting(results: dict[str, Any]) -> None:
    """Two values of a method's setting: gaps (19 - 20 and 21 - 22) -1, and +10 with 5 less of the retained pairs."""
    results["rows"] = [row for row in results["rows"] if row["role"] == "retrain"]
    for value, forget, retain in ((0.1, (19, 21), (90, 90)), (0.9, (30, 32), (85, 85))):
        varied = rows("method", "EASE", forget, retain, 0.2)
        settings = {"delta": value}
        results["rows"] += [{**row, "settings": settings, "at": {"name": "delta", "value": value}} for row in varied]
    shown = results_page.curve(finished("sensitivity-delta", results)).splitlines()
    assert shown == ["| `delta` | client |", "| --- | --- |", "| 0.1 | -1.0 / +0.0 |", "| 0.9 | +10.0 / -5.0 |"]


def test_sections_without_results_are_left_out_and_named(results: dict[str, Any]) -> None:
    template = "# Page\n\n## Here\n\n{{main: value EASE, client, forget/recall@1}} percent\n\n## Parent\n\n"
    template += "### Gone\n\nText that leads to\n\n{{ablation: comparison}}\n\n## End\n\nBye.\n"
    text, missing = results_page.page(template, {"main": finished("main", results)})
    assert text == "# Page\n\n## Here\n\n20.0 percent\n\n## End\n\nBye.\n"
    assert missing == ["Gone (ablation)"]


def test_prose_is_wrapped_and_tables_are_not() -> None:
    words, cells = "word " * 60, "| cell " * 60
    assert max(map(len, results_page.wrapped(words).splitlines())) <= results_page.WIDTH
    assert results_page.wrapped(cells) == cells
    points = results_page.wrapped(f"- {words}\n- short").splitlines()
    assert points[0].startswith("- ") and points[1].startswith("  word") and points[-1] == "- short"


def test_the_whole_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is written, every link of the page leads to what was written or to a document, and twice is once."""
    out = tmp_path / "docs"
    assert results_page.main(["--results", str(folder), "--out", str(out)]) == 0
    text = (out / "results.md").read_text()
    assert "{{" not in text and "20.0 (-1.0)°" in text
    assert "[main](tables/main.md): `ease bench experiments/main.toml --set run.data.path=captions.json`, 2 seeds," in (
        " ".join(text.split())
    )
    assert "Commit `abc123`; ease 0.1.0, cores 2" in text and "4 March 2026" in text and "someone" not in text
    assert "left out, no results: Attacks (lira)" in capsys.readouterr().out
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (out / link).exists() or (ROOT / "docs" / link).exists(), link
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    assert {path.relative_to(out).as_posix() for path in before} == {"results.md", "tables/main.md", "figures/main.svg"}
    results_page.write([folder], out)
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


def test_user_errors_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert results_page.main(["--results", str(tmp_path / "empty"), "--out", str(tmp_path)]) == 2
    assert "run `ease bench` first" in capsys.readouterr().err
    assert results_page.main(["--results", str(folder), str(folder), "--out", str(tmp_path)]) == 2
    assert "a second experiment called main" in capsys.readouterr().err


def test_prose_has_no_number_of_its_own() -> None:
    """Digits stand only in names (Flickr8k, R@1, CLIP-B/32), in code and in what the placeholders ask for."""
    prose = re.sub(r"`[^`]*`", "", results_page.PLACE.sub("", TEMPLATE))
    assert "{{" not in prose
    assert not re.findall(r"(?<![\w@/.-])\d[\d.,]*", prose)


def test_every_placeholder_asks_for_something_that_exists() -> None:
    """Experiments by the names of their files, and models and facts of the paper that are in its table."""
    known = {path.stem for path in (ROOT / "experiments").glob("*.toml")}
    for names, view, arguments in results_page.PLACE.findall(TEMPLATE):
        if names == "paper":
            assert results_page.answer({}, names, view, arguments)
        else:
            assert names == "all" or set(names.split("+")) <= known, names


def test_the_papers_tables_agree_with_one_another() -> None:
    """EASE and retraining are printed in three tables, and early retraining sends the share of bytes in its name."""
    tables = tomllib.loads((ROOT / "recipes" / "results_page_paper.toml").read_text())
    for scenario in ("client", "class", "sample"):
        for label in ("EASE", "Retrain"):
            values = {tuple(tables[name][scenario][label][:7]) for name in ("comparison", "ablation", "compute")}
            assert len(values) == 1, (scenario, label)
        full = tables["compute"][scenario]["Retrain"][7]
        for share in (25, 50, 75):
            assert tables["compute"][scenario][f"Retrain {share} %"][7] == pytest.approx(full * share / 100, abs=0.1)
    lengths = {
        len(row) for name in ("comparison", "ablation", "compute") for t in tables[name].values() for row in t.values()
    }
    assert lengths == {8}
