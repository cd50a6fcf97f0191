"""Image-text pairs: one image, its captions, a stable id and a split."""

from dataclasses import dataclass

import numpy as np

from ease.data.report import DataReport

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
    """What was odd in the files; None for generated data."""

    def __len__(self) -> int:
        return len(self.ids)

    def indices(self, split: str) -> np.ndarray:
        """Positions of the pairs of one split."""
        return np.flatnonzero(np.array(self.splits) == split)
