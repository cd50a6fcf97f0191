"""What `ease train` tells about the data before it trains."""

import json
from pathlib import Path

import pytest
from PIL import Image

from ease.commands.train import training_notes
from ease.storage import read_json


@pytest.fixture
def odd_data(tmp_path: Path) -> Path:
    """Twelve pictures: two are equal, one is grey, one is broken, one caption is blank and one has 40 words."""
    folder = tmp_path / "[photos]"
    folder.mkdir()
    captions = ["a red boat", " ", "boat " * 40, *["a house"] * 9]
    for number in range(12):
        picture = Image.new("RGB", (64, 64), (20 * max(number, 1), 99, 5 * max(number, 1)))  # 0 and 1 are equal
        (picture.convert("L") if number == 5 else picture).save(folder / f"{number}.png")
    (folder / "6.png").write_bytes(b"broken")
    lines = [
        {"image": f"{number}.png", "captions": [text, "a tree"], "split": "test" if number > 8 else "train"}
        for number, text in enumerate(captions)
    ]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def train(ease, small, tmp_path: Path, data: Path, *options: str):
    changes = ["data.name=folder", f'data.path="{data}"', "partition.clients=2"]
    pairs = [part for change in (*small, *changes) for part in ("--set", change)]
    return ease("train", "--out", tmp_path / "run", *pairs, *options)


def test_oddities_of_the_data_are_reported_before_training(ease, small, tmp_path, odd_data, monkeypatch) -> None:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    result = train(ease, small, tmp_path, odd_data)
    assert result.code == 0, result.err
    reported = result.err[: result.err.index("training 1/")].splitlines()
    assert reported[:-2] == [
        "11 pairs: 8 train, 0 validation, 3 test",
        "  1 image left out: not readable",
        "  1 blank caption dropped",
        "  1 caption cut: longer than the text encoder reads",
        "  11 images with fewer than five captions: repeated up to five",
        "  2 images with the picture of another id: forgetting one leaves the other",
        "  1 image converted to RGB (grey, palette, transparent, CMYK or 16 bit)",
    ]
    broken, twins = (Path(line.removeprefix("  listed in ")).read_text() for line in reported[-2:])
    assert broken.startswith(f"{odd_data}/6.png (not an image") and twins == "0, 1\n"


def test_quiet_means_quiet(ease, small, tmp_path, odd_data) -> None:
    assert train(ease, small, tmp_path, odd_data, "--quiet").err == ""


def test_programs_get_it_too(ease, small, tmp_path, odd_data) -> None:
    """Who runs it without a screen must be able to see that images were left out."""
    reported = json.loads(train(ease, small, tmp_path, odd_data, "--json").out)["data"]
    splits = {"train": 8, "validation": 0, "test": 3}
    odd = {"unreadable": 1, "blank_captions": 1, "cut_captions": 1, "under_five": 11, "same_picture": 2, "converted": 1}
    assert reported == splits | odd == read_json(tmp_path / "run" / "summary.json")["data"]


def test_generated_data_has_nothing_to_report(ease, small, tmp_path) -> None:
    pairs = [part for change in small for part in ("--set", change)]
    assert ease("train", "--out", tmp_path / "run", *pairs).err.startswith("training 1/2")


def test_a_run_too_small_for_the_usual_audit_reports_it(ease, small, tmp_path, monkeypatch) -> None:
    changes = [word for assignment in small for word in ("--set", assignment)]
    reported = ease("train", "--out", tmp_path / "run", "--quiet", *changes).out
    line = (
        "an audit will compare with 16 pairs instead of 512, since there are 20 validation and test pairs, and see less"
    )
    assert f"audit: {line}" in reported
    assert json.loads(ease("train", "--out", tmp_path / "run", "--json", *changes).out)["prospects"] == line
    monkeypatch.setattr("ease.commands.train.audit_prospects", lambda world: "")  # as of a run that is large enough
    assert json.loads(ease("train", "--out", tmp_path / "run", "--json", *changes).out)["prospects"] == ""


def test_a_model_at_chance_level_and_a_smaller_gallery_are_reported(ease, small, tmp_path: Path) -> None:
    """Without learning the recall of 60 training pairs stays at chance; 20 test pairs make no gallery of 50."""
    changes = [word for each in (*small, "training.learning_rate=1e-12", "gallery=50") for word in ("--set", each)]
    result = ease("train", "--out", tmp_path / "run", "--json", *changes)
    assert result.code == 0, result.err
    notes = json.loads(result.out)["notes"]
    assert any(note.startswith("recall is measured in galleries of 20 pairs, not gallery = 50") for note in notes)


@pytest.mark.parametrize(
    ("low", "gallery", "said"),
    [(49.0, 20, "there is nothing to forget"), (51.0, 20, ""), (51.0, 30, "not gallery = 30")],
)
def test_chance_is_an_interval_that_reaches_it(low: float, gallery: int, said: str) -> None:
    level = {"recall@10": 60.0, "recall@10/low": low, "recall@10/chance": 50.0, "gallery_pairs": 20.0}
    notes = list(training_notes({f"seen/{name}": value for name, value in level.items()}, gallery))
    assert len(notes) == bool(said) and all(said in note for note in notes)
