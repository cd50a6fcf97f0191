"""Cached activations of some pairs, on the model's device or streamed to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ease.data.features import Activations

States = tuple[Tensor, Tensor, Tensor | None]
"""Image states, the states of one caption each, and the captions' mask."""
Batch = tuple[np.ndarray, np.ndarray]
"""Positions in the examples, and the caption chosen for each."""
RESIDENT_SHARE = 0.5
"""Most of a GPU's free memory that activations may take; training needs the rest."""


@dataclass(frozen=True)
class Streamed:
    """Rows of a memory-mapped array that does not fit on the device; batches are gathered on the host."""

    array: np.ndarray
    rows: np.ndarray
    device: torch.device
    """The device of the batches."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> "Streamed":
        return Streamed(self.array, self.rows[part], self.device)

    @property
    def captions(self) -> int:
        return int(self.array.shape[1])

    def gather(self, positions: np.ndarray, captions: np.ndarray | None = None) -> Tensor:
        """Copies in page-locked memory where there is a GPU, from which it reads on its own."""
        array, rows = self.array, self.rows[positions]
        if captions is not None:
            array, rows = array.reshape(-1, *array.shape[2:]), rows * array.shape[1] + captions
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found = torch.empty(len(rows), *array.shape[1:], dtype=kind, pin_memory=torch.cuda.is_available())
        np.take(array, rows, axis=0, out=found.numpy(), mode="clip")  # the other modes copy twice
        return found


@dataclass(frozen=True)
class Examples:
    """The activations that a client computes with, on the device or, if large, on the host."""

    image: Tensor | Streamed
    """[pairs, ...]"""
    text: Tensor | Streamed
    """[pairs, captions, ...]"""
    text_mask: Tensor | Streamed | None
    """bool [pairs, captions, tokens]"""

    def __len__(self) -> int:
        return len(self.image)

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.image.device

    @property
    def captions(self) -> int:
        """Captions of each pair."""
        return self.text.captions if isinstance(self.text, Streamed) else self.text.shape[1]

    @property
    def pair_bytes(self) -> int:
        """Bytes of a pair in one pass: its image and one caption."""
        image, text = (each.array if isinstance(each, Streamed) else each for each in (self.image, self.text))
        return int(image[:1].nbytes + text[:1, :1].nbytes)

    def take(self, positions: np.ndarray) -> "Examples":
        def taken(values: Tensor | Streamed) -> Tensor | Streamed:
            return values[positions] if isinstance(values, Streamed) else values[index]

        index = _index(positions, self.device)
        mask = None if self.text_mask is None else taken(self.text_mask)
        return Examples(taken(self.image), taken(self.text), mask)

    def part(self, start: int, stop: int) -> "Examples":
        """A run of pairs, sharing memory with these."""
        rows = slice(start, stop)
        mask = None if self.text_mask is None else self.text_mask[rows]
        return Examples(self.image[rows], self.text[rows], mask)

    def batch(self, positions: np.ndarray, captions: np.ndarray) -> States:
        """The states of some pairs, with one chosen caption each."""
        return next(self.feed([(positions, captions)]))

    def feed(self, batches: Sequence[Batch]) -> Iterator[States]:
        """Yield the states of each batch, prefetched so that no step waits for the host.

        From the device: all indices go there at once. From the host: a batch is gathered and copied while the device
        still works on the one before.
        """
        if isinstance(self.image, Streamed):
            yield from self._streamed(batches)
        elif batches:
            yield from self._resident(batches)

    def _resident(self, batches: Sequence[Batch]) -> Iterator[States]:
        assert isinstance(self.image, Tensor) and isinstance(self.text, Tensor)
        words = self.text.flatten(0, 1)
        masks = self.text_mask.flatten(0, 1) if isinstance(self.text_mask, Tensor) else None
        rows = np.concatenate([positions for positions, _ in batches])
        lines = rows * self.captions + np.concatenate([captions for _, captions in batches])
        indices = _index(np.stack([rows, lines]), self.device).split([len(rows) for rows, _ in batches], dim=1)
        for row, line in indices:
            mask = None if masks is None else masks.index_select(0, line)
            yield self.image.index_select(0, row), words.index_select(0, line), mask

    def _streamed(self, batches: Sequence[Batch]) -> Iterator[States]:
        assert isinstance(self.image, Streamed) and isinstance(self.text, Streamed)
        mask = self.text_mask if isinstance(self.text_mask, Streamed) else None
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        for rows, captions in batches:
            gathered = [self.image.gather(rows), self.text.gather(rows, captions)]
            gathered += [] if mask is None else [mask.gather(rows, captions)]
            image, text, *masks = _copied(gathered, self.device, side)
            yield image, text, masks[0] if masks else None


@dataclass(frozen=True)
class Chosen(Examples):
    """A selection of shared pairs by position; states are copied on demand."""

    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, positions: np.ndarray) -> "Chosen":
        return replace(self, rows=self.rows[positions])

    def part(self, start: int, stop: int) -> "Chosen":
        return replace(self, rows=self.rows[start:stop])

    def feed(self, batches: Sequence[Batch]) -> Iterator[States]:
        yield from super().feed([(self.rows[positions], captions) for positions, captions in batches])


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _copied(tensors: list[Tensor], device: torch.device, side: torch.cuda.Stream | None) -> list[Tensor]:
    """The tensors on the device; on a side stream the copy does not wait for the work that is queued already."""
    if side is None:
        return [tensor.to(device) for tensor in tensors]
    with torch.cuda.stream(side):
        moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    for tensor in moved:
        tensor.record_stream(current)
    return moved


def examples_at(
    activations: Activations, positions: np.ndarray, device: torch.device | str, resident: bool | None = None
) -> Examples:
    """The activations of some pairs, copied to the device if they leave it enough room."""
    place, mask = torch.device(device), activations.text_mask
    if resident is None:
        resident = _fits(activations, len(positions), place)

    def held(array: np.ndarray) -> Tensor | Streamed:
        return torch.from_numpy(np.array(array[positions])).to(place) if resident else Streamed(array, positions, place)

    return Examples(held(activations.image), held(activations.text), None if mask is None else held(mask))


def _fits(activations: Activations, pairs: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    wanted = sum(array.nbytes // len(array) for array in (activations.image, activations.text)) * pairs
    return wanted <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
