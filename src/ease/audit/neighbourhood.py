"""Neighbourhood probes: crops of forgotten pictures with shortened captions, which forgetting too much also lowers.

A method that pushes forget pairs down leaves a plateau around them: pictures and captions that nobody named are known
less than under retraining. The relative test of such neighbours shows it as a share below 0.
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from ease.audit.statistic import statistics
from ease.data.features import Activations
from ease.measures.evaluate import embed_pairs
from ease.params import Params
from ease.runs.world import World
from ease.seeding import generator

MOST_PAIRS = 64
"""Forget pairs with a neighbour, evenly from all of them."""
CROP = 0.8
"""Share of each side that a crop keeps."""
WORDS = 0.75
"""Share of its words that a caption keeps."""


@dataclass(frozen=True)
class Neighbours:
    """One neighbour of each of some forget pairs, against the pool of the audit."""

    world: World
    activations: Activations
    pool: np.ndarray

    @classmethod
    def of(
        cls, world: World, positions: np.ndarray, pool: np.ndarray, crop: float = CROP, words: float = WORDS
    ) -> "Neighbours":
        """Neighbours of pairs, the same for every model."""
        some = positions[np.linspace(0, len(positions) - 1, min(MOST_PAIRS, len(positions))).round().astype(int)]
        rng, pairs = generator(world.config.seed, "neighbourhood"), world.evaluator.pairs
        pixels = np.stack([cropped(np.array(pairs.pixels[position]), crop, rng) for position in some])
        captions = [[shortened(text, words, rng) for text in pairs.captions[position]] for position in some]
        return cls(world, encoded(world, pixels, captions), pool)

    def log_odds(self, state: Params) -> np.ndarray:
        """How strongly a model holds the neighbours [pairs]."""
        model, device = self.world.server.model, self.world.server.device
        pool = embed_pairs(model, state, self.world.evaluator.activations, self.pool, device, captions=1)
        pairs = embed_pairs(model, state, self.activations, np.arange(len(self.activations.image)), device)
        found = statistics(*pairs, pool[0], pool[1][:, 0], self.world.config.model.temperature)
        return found["log_odds"]


def cropped(picture: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A random window of a picture [side, side, 3], enlarged to the same size."""
    side = picture.shape[0]
    kept = max(1, round(share * side))
    top, left = rng.integers(side - kept + 1, size=2)
    window = Image.fromarray(picture[top : top + kept, left : left + kept])
    return np.asarray(window.resize((side, side), Image.Resampling.BILINEAR))


def shortened(caption: str, share: float, rng: np.random.Generator) -> str:
    """A caption with some of its words, in their order; at least one."""
    words = caption.split()
    if not words:
        return caption
    kept = rng.choice(len(words), max(1, round(share * len(words))), replace=False)
    return " ".join(words[place] for place in sorted(kept.tolist()))


@torch.no_grad()
def encoded(world: World, pixels: np.ndarray, captions: list[list[str]]) -> Activations:
    """Outputs of the frozen parts of both towers for pictures and captions."""
    server, each = world.server, len(captions[0])
    tokens = server.backbone.tokenize([text for texts in captions for text in texts]).to(server.device)
    image, text = server.model.image, server.model.text
    states, _ = image.tower.prefix(torch.from_numpy(pixels).to(server.device), image.first)
    words, mask = text.tower.prefix(tokens, text.first)
    words = words.float().unflatten(0, (-1, each))
    empty = np.zeros((len(pixels), 0), dtype=np.float32)
    return Activations(
        image=states.float().cpu().numpy(),
        text=words.cpu().numpy(),
        text_mask=None if mask is None else mask.bool().unflatten(0, (-1, each)).cpu().numpy(),
        pooled_image=empty,  # for clustering only
        pooled_text=empty,
    )
