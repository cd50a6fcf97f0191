"""How strongly a model holds pairs: the measurement by which EASE knows where forget pairs stand and should fall."""

import numpy as np
import torch
from torch import Tensor

from ease.data.density import densities
from ease.data.examples import Examples
from ease.federation.client import ClientData
from ease.federation.objectives import Objective, Tensors, embed_drawn, register
from ease.federation.protocol import LocalJob
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import log_odds
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, forget_mask, validation_mask
from ease.seeding import generator

DRAWS = 2
"""Random pools and captions over which a level is measured; two are enough to tell spread from noise."""
FAREWELL_DRAWS = 8
"""The same for a client that withdraws: it measures alone and once, on few pairs."""


def levels(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """How strongly the model holds this client's forget pairs and held-out pairs: log-odds and local densities.

    `held_out` are pairs to predict levels from, `kin` those that resemble the forget pairs. For a class request these
    differ: other classes show what a neighbourhood does, the same class shows what was learnt of the class.
    Densities count retained pairs only, so they say how well a pair would be held had the forget pairs been absent.
    """
    assert job.request is not None  # levels are always about a request
    forget = forget_mask(job.request, client.shard)
    retained = client.train.take(np.flatnonzero(~forget))
    rng = generator(job.seed, job.stream, job.round, client.shard.client)
    alike = validation_mask(job.request, client.shard)
    kin = np.flatnonzero(alike)
    held_out = np.flatnonzero(~alike) if isinstance(job.request, ClassRequest) else kin
    if len(retained) >= 2:
        forget_phi = train_levels(model, params.tensors, client, job, np.flatnonzero(forget), rng)
        validation_phi = _validation_levels(model, params.tensors, client, job, rng)
    else:  # a client that withdraws, or keeps next to nothing: its held-out pairs are the pool
        pool, own = np.arange(len(client.validation)), torch.eye(len(client.validation), dtype=torch.bool)
        draws = FAREWELL_DRAWS if isinstance(job.request, ClientRequest) else DRAWS
        measured = client.train.take(np.flatnonzero(forget)), None
        forget_phi, validation_phi = (
            _levels_in(model, params.tensors, job, queries, client.validation, pool, own_pairs, draws, rng)
            for queries, own_pairs in (measured, (client.validation, own))
        )
    values = {"forget": forget_phi, "held_out": validation_phi[held_out], "kin": validation_phi[kin]}
    values["forget_density"] = densities(client.train.take(np.flatnonzero(forget)), retained)
    values["held_out_density"] = densities(client.validation.take(held_out), retained)
    return {name: value.float().cpu() for name, value in values.items()}


def train_levels(
    model: DualEncoder,
    tensors: Tensors,
    client: ClientData,
    job: LocalJob,
    queries: np.ndarray,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> Tensor:
    """Levels of forget pairs, the pool drawn from retained pairs; all are peers of one another [queries, draws]."""
    assert job.request is not None
    retained = np.flatnonzero(~forget_mask(job.request, client.shard))
    phi = torch.zeros(len(queries), draws, device=client.train.device)
    for draw in range(draws):
        pool = rng.permutation(retained)[: job.batch_size]
        image, text = embed_drawn(model, tensors, client.train, np.concatenate([pool, queries]), rng)
        weights = pool_weights(job, client, queries, pool, queries).to(image)
        own = image[len(pool) :], text[len(pool) :]
        phi[:, draw] = log_odds(*own, image, text, weights, job.temperature) + full_batch(len(pool), job)
    return phi


def _validation_levels(
    model: DualEncoder, tensors: Tensors, client: ClientData, job: LocalJob, rng: np.random.Generator
) -> Tensor:
    """Levels of all held-out pairs, measured as those of training pairs are [validation, draws]."""
    assert job.request is not None
    retained = np.flatnonzero(~forget_mask(job.request, client.shard))
    everything, held_out = np.arange(len(client.train)), np.arange(len(client.validation))
    phi = torch.zeros(len(held_out), DRAWS, device=client.train.device)
    same = torch.zeros(len(held_out), len(everything))
    if isinstance(job.request, ClassRequest):
        same = torch.from_numpy(client.shard.validation_classes[:, None] == client.shard.train_classes).float()
        same /= same.sum(1, keepdim=True).clamp_min(1)
    for draw in range(DRAWS if len(held_out) else 0):
        pool = rng.permutation(retained)[: job.batch_size]
        image, text = embed_drawn(model, tensors, client.train, everything, rng)
        weights = same * len(pool)
        weights[:, pool] += 1.0
        own = embed_drawn(model, tensors, client.validation, held_out, rng)
        phi[:, draw] = log_odds(*own, image, text, weights.to(image), job.temperature) + full_batch(len(pool), job)
    return phi


def _levels_in(
    model: DualEncoder,
    tensors: Tensors,
    job: LocalJob,
    queries: Examples,
    base: Examples,
    pool: np.ndarray,
    own: Tensor | None,
    draws: int,
    rng: np.random.Generator,
) -> Tensor:
    """Levels of pairs against a fixed pool; `own` marks pool pairs that are the query itself [queries, draws]."""
    phi = torch.zeros(len(queries), draws, device=queries.device)
    if len(pool) < 2:
        return phi
    weights = torch.ones(len(queries), len(pool)) if own is None else (~own).float()
    for draw in range(draws):
        negatives = embed_drawn(model, tensors, base, pool, rng)
        mine = embed_drawn(model, tensors, queries, np.arange(len(queries)), rng)
        level = log_odds(*mine, *negatives, weights.to(phi), job.temperature)
        phi[:, draw] = level + full_batch(len(pool) - (own is not None), job)
    return phi


def pool_weights(job: LocalJob, client: ClientData, queries: np.ndarray, pool: np.ndarray, peers: np.ndarray) -> Tensor:
    """Weight of each negative [queries, pool + peers]: the pool counts once; for a class request peers count as much.

    Peers are training pairs of the query's own pseudo-class. A class is forgotten only when its pairs cannot be told
    from one another any more, and retained pairs, all of other classes, say nothing of that.
    """
    weights = torch.zeros(len(queries), len(pool) + len(peers))
    weights[:, : len(pool)] = 1.0
    if isinstance(job.request, ClassRequest):
        classes = client.shard.train_classes
        same = torch.from_numpy((classes[queries][:, None] == classes[peers]) & (queries[:, None] != peers)).float()
        weights[:, len(pool) :] = same * len(pool) / same.sum(1, keepdim=True).clamp_min(1)
    return weights


def full_batch(pool: int, job: LocalJob) -> float:
    """The log-sum grows with the number of negatives; levels and targets are stated for a full batch of them."""
    return float(np.log(pool / job.batch_size))


LEVELS = "levels"
register(LEVELS, Objective(measure=levels, reads=frozenset({"retain", "forget"}), passes=DRAWS / 3))
