"""Embeddings of pairs under a state, and recall on galleries of one size."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ease.data.features import Activations
from ease.measures.retrieval import GalleryRecall, gallery_recall
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.seeding import generator

CHUNK_PAIRS = 256
LEAST_GALLERY = 50
"""Among fewer pairs recall says little: smaller sets, down to a single pair, are looked for among test pairs."""


@torch.no_grad()
def embed_pairs(
    model: DualEncoder,
    params: Params,
    activations: Activations,
    positions: np.ndarray,
    device: torch.device | str,
    captions: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Unit-norm embeddings of pairs on the CPU: image [n, d] and text [n, captions, d]."""
    images, texts = [], []
    tensors = dict(params.to(device).tensors)
    for start in range(0, len(positions), CHUNK_PAIRS):
        chunk = positions[start : start + CHUNK_PAIRS]
        image = torch.from_numpy(activations.image[chunk]).to(device)
        text = torch.from_numpy(activations.text[chunk, :captions]).to(device)
        masks = activations.text_mask
        mask = None if masks is None else torch.from_numpy(masks[chunk, :captions]).to(device)
        images.append(model.embed(tensors, "image", image).cpu())
        embedded = model.embed(tensors, "text", text.flatten(0, 1), None if mask is None else mask.flatten(0, 1))
        texts.append(embedded.view(*text.shape[:2], -1).cpu())
    return torch.cat(images), torch.cat(texts)


def recalls(
    model: DualEncoder,
    params: Params,
    activations: Activations,
    sets: Mapping[str, np.ndarray],
    size: int,
    device: torch.device | str,
    draws: int = 5,
) -> dict[str, GalleryRecall]:
    """Recall of each set of positions on galleries of one size, which are the same for every state."""
    size = common_size(sets, size)
    results = {}
    for name, positions in sets.items():
        queries = None if len(positions) >= size else len(positions)
        among = _subset(positions, size * draws)
        if queries is not None:
            among = np.concatenate([positions, _subset(np.setdiff1d(sets["test"], positions), size * draws)])
        image, text = embed_pairs(model, params, activations, among, device)
        results[name] = gallery_recall(image, text, size, draws, generator(0, "gallery", name), queries=queries)
    return results


def common_size(sets: Mapping[str, np.ndarray], size: int) -> int:
    """The largest gallery size up to `size` that every set can fill, so that recalls can be compared.

    If that would be less than `LEAST_GALLERY`, test pairs, if they are among the sets, fill the smaller ones up.
    """
    smallest = min(len(positions) for positions in sets.values())
    return min(size, max(smallest, min(LEAST_GALLERY, len(sets.get("test", ())))))


def _subset(positions: np.ndarray, most: int) -> np.ndarray:
    if len(positions) <= most:
        return positions
    return np.sort(generator(0, "evaluated").choice(positions, most, replace=False))
