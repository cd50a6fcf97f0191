"""What clients can be asked to minimise or to measure; jobs refer to these by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ease.data.density import densities
from ease.data.request import forget_mask, validation_mask
from ease.federation.protocol import LocalJob
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import info_nce, log_odds
from ease.params import Params
from ease.seeding import generator

if TYPE_CHECKING:
    from ease.federation.local import ClientData, Examples

Tensors = Mapping[str, Tensor]
LossFunction = Callable[[DualEncoder, Tensors, "ClientData", np.ndarray, LocalJob, np.random.Generator], Tensor]
MeasureFunction = Callable[[DualEncoder, Params, "ClientData", LocalJob], Tensors]


@dataclass(frozen=True)
class Objective:
    """Either a loss over a batch of positions, or a measurement that changes nothing."""

    loss: LossFunction | None = None
    measure: MeasureFunction | None = None


def embed_batch(
    model: DualEncoder, tensors: Tensors, examples: "Examples", rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Embeddings of a batch with one random caption per image: two captions of one image are no negatives."""
    captions = rng.integers(examples.text.shape[1], size=len(examples))
    image, text, mask = examples.with_caption(captions)
    return model.embed(tensors, "image", image), model.embed(tensors, "text", text, mask)


def align(
    model: DualEncoder, tensors: Tensors, client: "ClientData", positions: np.ndarray, job: LocalJob, rng: np.random.Generator
) -> Tensor:
    """Symmetric InfoNCE: the ordinary training objective."""
    image, text = embed_batch(model, tensors, client.train.take(positions), rng)
    return info_nce(image, text, job.temperature)


def displace(
    model: DualEncoder, tensors: Tensors, client: "ClientData", positions: np.ndarray, job: LocalJob, rng: np.random.Generator
) -> Tensor:
    """InfoNCE on retained pairs, and forget pairs pushed down to their target log-odds, no further.

    The push is strength · mean(max(0, phi - target)²) against the batch's retained pairs, which it does not move. It
    stops by itself at the level of unseen pairs, where plain gradient ascent would run away.
    """
    image, text = embed_batch(model, tensors, client.train.take(positions), rng)
    loss = info_nce(image, text, job.temperature)
    targets = job.targets.get(client.shard.client)
    if targets is None or len(targets) == 0:
        return loss
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    chosen = rng.permutation(len(forget))[: job.batch_size]
    forget_image, forget_text = embed_batch(model, tensors, client.train.take(forget[chosen]), rng)
    phi = log_odds(forget_image, forget_text, image.detach(), text.detach(), job.temperature)
    # The log-sum grows with the number of negatives; targets are stated for a full batch.
    phi = phi + np.log(len(positions) / job.batch_size)
    excess = torch.relu(phi - targets[torch.from_numpy(chosen)].to(phi))
    return loss + job.settings["displacement"] * excess.square().mean()


def levels(model: DualEncoder, params: Params, client: "ClientData", job: LocalJob) -> Tensors:
    """How strongly the model holds this client's forget pairs and its held-out pairs: log-odds and local densities.

    The pool of negatives is a batch of retained pairs, drawn several times; a client that withdraws has none and uses
    its held-out pairs. Densities count retained pairs only, so they say how well an unseen pair would be held.
    """
    forget = forget_mask(job.request, client.shard)
    held_out = client.validation.take(np.flatnonzero(validation_mask(job.request, client.shard)))
    retained = client.train.take(np.flatnonzero(~forget))
    forgotten = client.train.take(np.flatnonzero(forget))
    from_retained = len(retained) >= 2
    pool = retained if from_retained else client.validation
    pool_embedding = _embed_all(model, params.tensors, pool)
    rng = generator(job.seed, job.stream, job.round, client.shard.client)
    draws = [np.sort(rng.permutation(len(pool))[: job.batch_size]) for _ in range(8)] if from_retained else [np.arange(len(pool))]
    values: dict[str, Tensor] = {}
    for name, examples in (("forget", forgotten), ("validation", held_out)):
        own_pool = not from_retained and name == "validation" and len(held_out) == len(pool)
        phi = _pool_log_odds(_embed_all(model, params.tensors, examples), pool_embedding, draws, job, own_pool)
        values[name] = phi.float().cpu()
        values[f"{name}_density"] = densities(examples, retained).float().cpu()
    return values


def _embed_all(model: DualEncoder, tensors: Tensors, examples: "Examples") -> tuple[Tensor, Tensor]:
    """Every caption of every pair: image [n, d] and text [n, captions, d]."""
    n, captions = examples.text.shape[:2]
    mask = None if examples.text_mask is None else examples.text_mask.flatten(0, 1)
    image = model.embed(tensors, "image", examples.image)
    return image, model.embed(tensors, "text", examples.text.flatten(0, 1), mask).view(n, captions, -1)


def _pool_log_odds(
    pairs: tuple[Tensor, Tensor], pool: tuple[Tensor, Tensor], draws: list[np.ndarray], job: LocalJob, own_pool: bool
) -> Tensor:
    """Mean log-odds over captions and pool draws, stated for a pool of a full batch [n]."""
    (image, text), (pool_image, pool_text) = pairs, pool
    total = torch.zeros(len(image), dtype=torch.float64, device=image.device)
    if len(image) == 0 or len(pool_image) < 2:
        return total
    captions = text.shape[1]
    positive = torch.einsum("nd,ncd->nc", image, text) / job.temperature
    for draw in draws:
        index = torch.from_numpy(draw).to(image.device)
        to_text = torch.einsum("nd,mcd->cnm", image, pool_text[index]) / job.temperature
        to_image = torch.einsum("ncd,md->cnm", text, pool_image[index]) / job.temperature
        if own_pool:  # a pair is no negative of itself
            diagonal = torch.eye(len(index), dtype=torch.bool, device=image.device)
            to_text, to_image = (scores.masked_fill(diagonal, -torch.inf) for scores in (to_text, to_image))
        against = (torch.logsumexp(to_text, -1) + torch.logsumexp(to_image, -1)).T / 2
        correction = np.log((len(index) - own_pool) / job.batch_size)
        total += (positive - against + correction).double().sum(1) / captions
    return total / len(draws)


OBJECTIVES: dict[str, Objective] = {
    "align": Objective(loss=align),
    "displace": Objective(loss=displace),
    "levels": Objective(measure=levels),
}
