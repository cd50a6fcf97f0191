"""The report in words, and captions that a tokenizer cuts."""

from dataclasses import fields
from pathlib import Path

import torch

from ease.data.report import FINDINGS, SHORT_CAPTION, DataReport, count_cut
from ease.model.backbones import load_backbone


def test_only_what_occurred_is_told() -> None:
    report = DataReport(splits={"train": 6000, "validation": 0, "test": 9}, rotated=1200, listings=(Path("/c/x.txt"),))
    assert list(report.lines()) == [
        "6,009 pairs: 6,000 train, 0 validation, 9 test",
        "  1,200 images turned upright by the EXIF note",
        "  listed in /c/x.txt",
    ]


def test_every_count_has_words() -> None:
    assert {field.name for field in fields(DataReport)} == {*FINDINGS, "splits", "listings"}


def four_words(captions) -> torch.Tensor:
    """A tokenizer with room for four words; punctuation gives no token."""
    rows = [[hash(word) for word in text.replace(".", "").split()[:4]] for text in captions]
    return torch.tensor([row + [0] * (4 - len(row)) for row in rows])


def test_captions_are_cut_when_their_last_word_counts_for_nothing() -> None:
    """Words of 20 letters, so that three make a long caption: 3 and 4 words fit, 5 and 6 do not."""
    word = "abcdefghijklmnopqrst"
    texts = {count: " ".join(f"{word}{index}" for index in range(count)) + " ." for count in (3, 4, 5, 6)}
    assert all(len(text) > SHORT_CAPTION for text in texts.values())
    assert count_cut([(texts[3], texts[4])], four_words) == 0
    assert count_cut([(texts[3], texts[5]), (texts[6], texts[5])], four_words) == 2, "equal captions count once"
    assert count_cut([("short",)], four_words) == 0


def test_the_shipped_backbone_cuts_after_31_words() -> None:
    tokenize = load_backbone("tiny").tokenize
    texts = ["boat " * 30 + "house" + " boat" * more for more in (0, 1)]
    assert [count_cut([(text,)], tokenize) for text in texts] == [0, 1]
