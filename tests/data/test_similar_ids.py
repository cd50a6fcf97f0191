"""Ids in other letters that look the same are found, and ids that differ are not."""

import json
from pathlib import Path

from PIL import Image

from ease.data.config import DataConfig, load_pairs
from ease.data.similar_ids import similar_ids


def test_ids_in_cyrillic_greek_full_width_or_with_unseen_letters_are_alike() -> None:
    twins = [["photo-a", "photo-\u0430"], ["AB", "\u0391\u0412"], ["x1", "\uff581"], ["cat", "c\u200bat"]]
    assert similar_ids([each for pair in twins for each in pair]) == twins
    assert similar_ids(["photo-a", "photo-b", "foto-\u0431", "\u65e5", "\u672c"]) == []


def test_the_report_of_the_data_counts_and_lists_them(tmp_path: Path) -> None:
    names = ["a", "\u0430", *(f"b{number}" for number in range(10))]
    for place, _ in enumerate(names):
        Image.new("RGB", (32, 32), (place * 20, 0, 0)).save(tmp_path / f"{place}.png")
    rows = [{"image": f"{n}.png", "captions": ["words"], "id": name} for n, name in enumerate(names)]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = load_pairs(DataConfig(name="folder", path=tmp_path), 32).report
    assert report is not None and report.similar_ids == 2
    (listing,) = [path for path in report.listings if "look-alike" in path.name]
    assert "'a', '\\u0430'" in listing.read_text()
