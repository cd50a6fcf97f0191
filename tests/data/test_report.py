"""The report in words, and captions that a tokenizer cuts."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from ease.data.report import FINDINGS, DataReport, count_cut
from ease.model.backbones import load_backbone


def test_only_findings_that_occurred_are_reported() -> None:
    report = DataReport(splits={"train": 6000, "validation": 0, "test": 9}, rotated=1200, listings=(Path("/c/x.txt"),))
    assert list(report.lines()) == [
        "6,009 pairs: 6,000 train, 0 validation, 9 test",
        "  1,200 images turned upright by the EXIF note",
        "  listed in /c/x.txt",
    ]


def test_every_count_has_words() -> None:
    assert {field.name for field in fields(DataReport)} == {
        *FINDINGS,
        "splits",
        "listings",
        "unused_columns",
        "unused_site_columns",
    }


def test_columns_that_count_for_nothing_are_named() -> None:
    head = "5 pairs: 5 train"
    hint = ' (set partition.scheme = "sites" to deal by it)'
    for given, line in (
        ({"unused_columns": ("photographer", "year")}, "photographer, year"),
        ({"unused_site_columns": ("site",)}, f"site{hint}"),
        ({"unused_columns": ("photographer",), "unused_site_columns": ("site",)}, f"photographer, site{hint}"),
    ):
        report = DataReport(splits={"train": 5}, **given)
        assert list(report.lines()) == [head, f"  columns not used: {line}"] and report.counts() == {}


@dataclass(frozen=True)
class Words:
    """A tokenizer with a token for each word; punctuation gives none."""

    context: int

    def tokenize(self, captions) -> torch.Tensor:
        rows = [[hash(word) for word in text.replace(".", "").split()[: self.context]] for text in captions]
        return torch.tensor([row + [0] * (self.context - len(row)) for row in rows])


@dataclass(frozen=True)
class Letters:
    """A tokenizer with a token for each letter."""

    context: int

    def tokenize(self, captions) -> torch.Tensor:
        return torch.tensor([[*map(ord, text.strip("。").ljust(self.context)[: self.context])] for text in captions])


def test_captions_are_cut_when_their_last_word_counts_for_nothing() -> None:
    """Four words fit, five and six do not."""
    texts = {count: " ".join(f"word{index}" for index in range(count)) + " ." for count in (1, 3, 4, 5, 6)}
    assert count_cut([(texts[1], texts[3], texts[4])], Words(4)) == 0
    assert count_cut([(texts[3], texts[5]), (texts[6], texts[5])], Words(4)) == 2, "equal captions count once"


def test_captions_that_must_fit_are_not_tokenised(monkeypatch) -> None:
    """Six letters, start and end fill a context of eight; three Chinese letters may be nine tokens."""
    monkeypatch.setattr(Letters, "tokenize", lambda *_: pytest.fail("tokenised"))
    assert count_cut([("abcdef", "a", "海海")], Letters(8)) == 0
    for text in ("abcdefg", "海海海"):
        with pytest.raises(pytest.fail.Exception):
            count_cut([(text,)], Letters(8))


def test_a_caption_without_spaces_is_cut_by_letters() -> None:
    """GroupSize for 70: the 71st letter is lost, and the full stop never counts."""
    assert count_cut([("海" * 69 + "船。",)], Letters(70)) == 0
    assert count_cut([("海" * 70 + "船。",)], Letters(70)) == 1


def test_the_shipped_backbone_cuts_after_31_words() -> None:
    texts = ["boat " * 30 + "house" + " boat" * more for more in (0, 1)]
    assert [count_cut([(text,)], load_backbone("tiny")) for text in texts] == [0, 1]


@pytest.mark.parametrize("family", ["clip", "siglip2"])
def test_a_checkpoint_cuts_at_its_own_context(checkpoint, family: str) -> None:
    """They read 12 tokens, a letter each: CLIP adds a start and an end, this SigLIP 2 a sign for each space."""
    backbone = load_backbone(f"hf:{checkpoint(family)}")
    letters = 12 - 2 - 1 if family == "clip" else 12 - 1 - 1
    texts = ["b" * letters + " c" + " d" * more for more in (0, 1)]
    assert [count_cut([(text,)], backbone) for text in texts] == [0, 1]
