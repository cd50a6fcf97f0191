"""How strongly a model holds pairs: the measurement that tells when forget pairs stand where unseen ones do."""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ease.data.examples import Examples
from ease.federation.client import ClientData
from ease.federation.expected import Expected, Value
from ease.federation.objectives import Objective, Tensors, register
from ease.federation.protocol import LocalJob
from ease.model.dual_encoder import DualEncoder, Modality
from ease.model.losses import log_odds
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest, forget_mask, validation_mask
from ease.seeding import generator

LEVELS = "levels"
POOL = 128
"""Pairs of its own that a client compares with, at most."""
CHUNK_PAIRS = 512
"""Most pairs in one pass: measuring takes no more memory than a training step."""


def levels(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """Log-odds of this client's forget pairs and of held-out pairs that resemble them, over all captions.

    They are held against pairs that the client keeps; one that withdraws keeps none and takes its own others. The same
    pairs are drawn under every state, so that only the state makes a difference.
    """
    assert job.request is not None  # levels are always about a request
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    kin = np.flatnonzero(validation_mask(job.request, client.shard))
    others = np.setdiff1d(np.arange(len(client.train)), forget)
    rng = generator(job.seed, job.stream, client.shard.client)
    pool = np.sort(rng.permutation(others if len(others) >= 2 else forget)[:POOL])
    peers = forget if isinstance(job.request, ClassRequest) else forget[:0]
    if len(pool) < 2:
        return {name: torch.zeros(len(rows)) for name, rows in (("forget", forget), ("kin", kin))}
    base = np.concatenate([pool, peers])
    drawn = base, rng.integers(client.train.captions, size=len(base))
    against = (
        embedded(model, params.tensors, "image", client.train, *drawn),
        embedded(model, params.tensors, "text", client.train, *drawn),
    )
    found = {}
    for name, examples, queries, classes in (
        ("forget", client.train, forget, client.shard.train_classes[forget]),
        ("kin", client.validation, kin, client.shard.validation_classes[kin]),
    ):
        own = queries[:, None] == base if name == "forget" else np.zeros((len(queries), len(base)), dtype=bool)
        weights = torch.from_numpy(_weights(own, len(pool), classes, client.shard.train_classes[peers])).float()
        found[name] = _phi(model, params.tensors, examples, queries, against, weights, job).float().cpu()
    return found


def _weights(own: np.ndarray, pool: int, classes: np.ndarray, peer_classes: np.ndarray) -> np.ndarray:
    """Of each pair that is compared with [queries, pool + peers]: the pool together counts one, and peers as much.

    Peers are training pairs of the query's own pseudo-class. A class is forgotten only when its pairs cannot be told
    from one another any more, and retained pairs, all of other classes, say nothing of that.
    """
    weights = np.ones_like(own, dtype=float)
    weights[:, pool:] = classes[:, None] == peer_classes
    weights[own] = 0.0
    for part in (weights[:, :pool], weights[:, pool:]):
        part /= np.maximum(part.sum(1, keepdims=True), 1.0)
    return weights


def _phi(
    model: DualEncoder,
    tensors: Tensors,
    examples: Examples,
    queries: np.ndarray,
    against: tuple[Tensor, Tensor],
    weights: Tensor,
    job: LocalJob,
) -> Tensor:
    """Log-odds of pairs, mean over their captions [queries]."""
    if not len(queries):
        return torch.zeros(0)
    each = examples.captions
    every = np.repeat(queries, each), np.tile(np.arange(each), len(queries))
    image = embedded(model, tensors, "image", examples, queries, np.zeros_like(queries))  # once for all captions
    text = embedded(model, tensors, "text", examples, *every)
    counted = weights.repeat_interleave(each, 0).to(text)
    found = log_odds(image.repeat_interleave(each, 0), text, *against, counted, job.temperature)
    return found.view(len(queries), each).mean(1)


@torch.no_grad()
def embedded(
    model: DualEncoder,
    tensors: Tensors,
    modality: Modality,
    examples: Examples,
    rows: np.ndarray,
    captions: np.ndarray,
) -> Tensor:
    """One side of pairs, each with one of its captions."""
    starts = range(0, max(len(rows), 1), CHUNK_PAIRS)
    chunks = [(rows[start : start + CHUNK_PAIRS], captions[start : start + CHUNK_PAIRS]) for start in starts]
    sides = ((image, None) if modality == "image" else (text, mask) for image, text, mask in examples.feed(chunks))
    return torch.cat([model.embed(tensors, modality, states, mask) for states, mask in sides])


def named_pairs(job: LocalJob, client: int, held: int) -> int | None:
    """How many of a client's `held` pairs a request names; None: of a class only the client knows."""
    if isinstance(job.request, ClientRequest):
        return held if client in job.request.clients else 0
    return len(set(job.request.ids)) if isinstance(job.request, SampleRequest) else None


def measured(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    """What levels are: one for each forget pair, as many as the server knows of, in the range that cosines allow."""
    known = named_pairs(job, client, held)
    # A pair's cosine, less the log of a weighted mean over others, whose weights add up to one, or to two with peers.
    least, most = -2 / job.temperature - math.log(2), 2 / job.temperature
    slack = 1e-3 * most
    level = partial(Value, least=least - slack, most=most + slack)
    return Expected(values={"forget": level((known,)), "kin": level((None,))}, abstains=False)


register(LEVELS, Objective(measure=levels, expects=measured, reads=frozenset({"forget"}), passes=1 / 3))
