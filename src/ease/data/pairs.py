"""Image-text pairs: one image, its captions, a stable id and a split."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ease.data.report import DataReport
from ease.storage import digest

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class PairSet:
    """All pairs of a data set. The image is the unit of membership; its captions never part from it."""

    ids: tuple[str, ...]
    captions: tuple[tuple[str, ...], ...]
    """Five captions for each image: the first five, or fewer ones repeated."""
    pixels: np.ndarray
    """uint8 [pairs, height, width, 3], usually memory-mapped."""
    splits: tuple[str, ...]
    """`train`, `validation` or `test` for each pair."""
    fingerprint: str
    """Hash of what made this data; derived caches are keyed by it."""
    report: DataReport | None = None
    """Report of oddities in the files; None for generated data."""
    sites: tuple[str | None, ...] = ()
    """The site that each pair is from, None where it names none; empty when no pair names one."""
    digests: tuple[str, ...] = ()
    """A short hash of each pair's own content: it stays when other pairs go, or when the split or the id changes."""

    def __len__(self) -> int:
        return len(self.ids)

    def indices(self, split: str) -> np.ndarray:
        """Positions of the pairs of one split."""
        return np.flatnonzero(np.array(self.splits) == split)


def picture_digest(pixels: np.ndarray) -> str:
    """A hash of one decoded picture [height, width, 3]."""
    return hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest()


def pair_digest(picture: str, captions: Sequence[str]) -> str:
    """A short hash of what makes a pair: its picture, by hash, and its captions."""
    return digest("pair", picture, captions)
