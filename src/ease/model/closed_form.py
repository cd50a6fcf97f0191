"""The closed-form head: exact sums over image-text pairs, and the two linear maps that solve the alignment from them.

Features are rounded to a fixed grid, and products of whole numbers are added as 64-bit integers. Such sums do not
depend on the order, the batches or the number of threads, and a subtraction undoes an addition bit for bit. The maps
are those of ridge-regularised canonical correlation analysis (CCA), as in CSA (Li et al., ICLR 2025).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ease.config import Config
from ease.errors import UserError
from ease.params import Block, Modality, Params

GRID = 1 << 12
"""Steps of the grid in one unit; layer normalisation gives features a variance of one."""
ROWS = 1024
"""Pairs that are multiplied at once: in float64, where whole numbers are exact up to 2^53."""
LARGEST_EXACT = 1 << 53
LARGEST_SUM = 1 << 62
"""Half of what 64 bits hold, so that neither a sum nor a difference of two can overflow."""
LEAST_VARIANCE = 1e-10
"""Share of its mean square below which a feature counts as constant: it is left out."""
SLACK = 1e-9
"""How far below zero rounding may push an eigenvalue of sums scaled to a diagonal of ones."""
SUMS = Block("sums", "image", "sums", ("sums",))
"""Sums as a stored state. They are of both sides; a block names one."""


class Ridge(Config):
    """How strongly each side is regularised and how its directions are weighted."""

    image: float = Field(1.0, gt=0)
    """Added to the diagonal of the correlations of image features."""
    text: float = Field(0.3, gt=0)
    """The same for text features."""
    power: float = Field(0.5, ge=0)
    """Exponent of the canonical correlation by which each direction is weighted."""


POWERS = (0.5, 1.0, 2.0)
TEXT_STRENGTHS = (0.3, 0.1, 1.0)
IMAGE_STRENGTHS = (1.0, 0.3, 3.0)
"""What training chooses from, one after the other: the power, the strength for text, that for images. The first wins a
tie."""


@dataclass(frozen=True)
class Sums:
    """Products of [image, caption, 1], added over every picture with each of its captions."""

    packed: Tensor
    """int64: the upper triangle of the symmetric matrix, row by row."""

    @classmethod
    def none(cls, size: int) -> "Sums":
        """Sums of zero pairs, for vectors of so many entries, the 1 included."""
        return cls(torch.zeros(packed_size(size), dtype=torch.int64))

    @classmethod
    def of(cls, image: Tensor, text: Tensor) -> "Sums":
        """Sums of features on the grid: image [pairs, width] and text [pairs, captions, width], whole numbers."""
        pairs, captions = text.shape[:2]
        size = image.shape[1] + text.shape[2] + 1
        rows, columns = torch.triu_indices(size, size)
        total = cls.none(size)
        for start in range(0, pairs, ROWS):
            words = text[start : start + ROWS].double().cpu().flatten(0, 1)
            pictures = image[start : start + ROWS].double().cpu().repeat_interleave(captions, 0)
            both = torch.cat([pictures, words, torch.ones(len(words), 1, dtype=torch.double)], dim=1)
            if float(both.square().sum(1).max()) * len(both) >= LARGEST_EXACT:
                raise UserError(f"features of {size - 1} dimensions are too large for exact sums; use a smaller tower")
            total += cls((both.T @ both)[rows, columns].long())
        return total

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(_within_range(self.packed + other.packed))

    def __sub__(self, other: "Sums") -> "Sums":
        return Sums(_within_range(self.packed - other.packed))

    @property
    def count(self) -> int:
        """Pictures with a caption: each pair counts as often as it has captions."""
        return int(self.packed[-1])

    def matrix(self) -> Tensor:
        """The whole symmetric matrix, in float64."""
        size = size_of(len(self.packed))
        rows, columns = torch.triu_indices(size, size)
        full = torch.zeros(size, size, dtype=torch.double)
        full[rows, columns] = full[columns, rows] = self.packed.double()
        return full

    def state(self) -> Params:
        """The same as it is stored."""
        return Params({"sums": self.packed}, (SUMS,))

    @classmethod
    def from_state(cls, state: Params) -> "Sums":
        return cls(state["sums"])

    def fault(self, image_width: int, text_width: int) -> str | None:
        """Why these can be sums of no pairs, or None when they may be."""
        matrix = self.matrix()
        squares, count = matrix.diagonal(), self.count
        if count < 0 or bool((squares < 0).any()):
            return "its sums of squares are negative"
        for side, start, width in (("image", 0, image_width), ("text", image_width, text_width)):
            if float(squares[start : start + width].sum()) > count * largest_square(width):
                return f"its sums of squares of {side} features are larger than {count} normalised vectors give"
        lengths = torch.where(squares > 0, squares, 1.0).sqrt()
        scaled = matrix / lengths / lengths[:, None]
        scaled.diagonal().add_(SLACK)
        with one_thread():
            failed = int(torch.linalg.cholesky_ex(scaled)[1])
        return "its sums are not positive semi-definite, as sums of products are" if failed else None


def packed_size(size: int) -> int:
    """Length of the upper triangle of a symmetric matrix."""
    return size * (size + 1) // 2


def size_of(packed: int) -> int:
    """The side of the matrix whose upper triangle has this length."""
    return int(((8 * packed + 1) ** 0.5 - 1) / 2)


def _within_range(total: Tensor) -> Tensor:
    """The same sums; each addend is at most `LARGEST_SUM`, so that sums that wrapped around exceed it too."""
    low, high = total.aminmax()
    if int(low) < -LARGEST_SUM or int(high) > LARGEST_SUM:
        raise UserError("sums are larger than 64-bit integers can hold exactly; train on fewer pairs")
    return total


def largest_square(width: int) -> float:
    """Largest squared length of a normalised vector of this width on the grid, rounding included."""
    return width * (GRID + 1) ** 2


def most_pairs(image_width: int, text_width: int, captions: int) -> int:
    """How many pairs can be summed without any chance of an overflow."""
    return int(LARGEST_SUM / (captions * max(largest_square(image_width), largest_square(text_width))))


def on_grid(features: Tensor) -> Tensor:
    """Pooled features [..., width], normalised as the head normalises them, in steps of the grid: float64, whole."""
    return (F.layer_norm(features.double(), features.shape[-1:]) * GRID).round()


def solves(state: Params) -> bool:
    """Whether a state consists of maps that are solved from sums."""
    return any(block.kind == "closed_form" for block in state.blocks)


def widths(state: Params) -> tuple[int, int]:
    """Widths of the features that the maps of a state take: image, text."""
    return state[_name("image", "weight")].shape[1], state[_name("text", "weight")].shape[1]


def solve(sums: Sums, ridge: Ridge, like: Params) -> Params:
    """The maps of ridge-regularised CCA, in the layout of a state whose maps they replace.

    W = L^-T U s^p with L L' = C + a I for each side, and U s V' the singular values of L_x^-1 C_xy L_y^-T. It runs on
    one thread, so that equal sums give equal bytes whatever the process is allowed.
    """
    with one_thread():
        maps = _maps(sums, ridge, widths(like), like[_name("image", "weight")].shape[0])
    return like.replace({name: maps[name].float() for name in like.tensors})


def _maps(sums: Sums, ridge: Ridge, sides: tuple[int, int], rank: int) -> dict[str, Tensor]:
    matrix, width = sums.matrix() / max(sums.count, 1), sides[0]
    mean, squares = matrix[-1, :-1], matrix.diagonal()[:-1]
    variance = squares - mean.square()
    varies = variance > LEAST_VARIANCE * squares
    inverse = torch.where(varies, variance, 1.0).rsqrt() * varies
    correlation = (matrix[:-1, :-1] - torch.outer(mean, mean)) * inverse * inverse[:, None]
    image, text, cross = correlation[:width, :width], correlation[width:, width:], correlation[:width, width:]
    lower_image, lower_text = _lower(image, ridge.image), _lower(text, ridge.text)
    whitened = torch.linalg.solve_triangular(lower_image, cross, upper=False)
    whitened = torch.linalg.solve_triangular(lower_text, whitened.T, upper=False).T
    left, strength, right = torch.linalg.svd(whitened, full_matrices=False)
    weighted = strength[:rank].pow(ridge.power)
    largest = left[:, :rank].abs().argmax(0)
    weighted = weighted * left[:, :rank].gather(0, largest[None]).sign()[0]  # of u and -u, always the same one
    found: dict[str, Tensor] = {}
    parts: tuple[tuple[Modality, Tensor, Tensor, slice], ...] = (
        ("image", lower_image, left[:, :rank], slice(None, width)),
        ("text", lower_text, right[:rank].T, slice(width, None)),
    )
    for side, lower, directions, own in parts:
        weight = (torch.linalg.solve_triangular(lower.T, directions * weighted, upper=True) * inverse[own, None]).T
        found[_name(side, "weight")] = weight * GRID
        found[_name(side, "bias")] = -weight @ mean[own]
    return found


def _lower(correlation: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of a regularised correlation matrix."""
    return torch.linalg.cholesky(correlation + ridge * torch.eye(len(correlation), dtype=correlation.dtype))


def _name(side: Modality, part: str) -> str:
    return f"{side}.projector.0.{part}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: more of them add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
