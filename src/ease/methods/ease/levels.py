"""How strongly a model holds pairs: the measurement that tells when forget pairs stand where unseen ones do."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


Wanted = tuple[Examples, np.ndarray, np.ndarray]
"""Some pairs, and which caption of each."""


@dataclass(frozen=True)
class Queries:
    """Pairs whose levels are wanted."""

    examples: Examples
    rows: np.ndarray
    weights: Tensor
    """What each pair that they are held against counts [rows, base]."""

    @property
    def pictures(self) -> Wanted:
        """Each once, for all of its captions."""
        return self.examples, self.rows, np.zeros_like(self.rows)

    @property
    def captions(self) -> Wanted:
        """All of them, pair after pair."""
        each = self.examples.captions
        return self.examples, np.repeat(self.rows, each), np.tile(np.arange(each), len(self.rows))


@dataclass(frozen=True)
class Compared:
    """What a client compares: pairs to forget and held-out ones that resemble them, with a base of others."""

    base: Wanted
    queries: Mapping[str, Queries]

    @property
    def pictures(self) -> list[Wanted]:
        return [self.base, *(each.pictures for each in self.queries.values())]

    @property
    def captions(self) -> list[Wanted]:
        return [self.base, *(each.captions for each in self.queries.values())]


def levels(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """Log-odds of this client's forget pairs and of held-out pairs that resemble them, over all captions."""
    return levels_together(model, params, [(client, job)])[0]


def levels_together(
    model: DualEncoder, params: Params, asked: Sequence[tuple[ClientData, LocalJob]]
) -> list[dict[str, Tensor]]:
    """The same of several clients, whose pairs share passes through the model."""
    compared = [compared_by(client, job) for client, job in asked]
    images = iter(embedded_each(model, params.tensors, "image", [each for one in compared for each in one.pictures]))
    texts = iter(embedded_each(model, params.tensors, "text", [each for one in compared for each in one.captions]))
    found = []
    for one, (_, job) in zip(compared, asked, strict=True):
        base = next(images), next(texts)
        levels = {name: _phi(each, next(images), next(texts), base, job) for name, each in one.queries.items()}
        found.append({name: level.float().cpu() for name, level in levels.items()})
    return found


def compared_by(client: ClientData, job: LocalJob) -> Compared:
    """Pairs are held against ones that the client keeps; one that withdraws keeps none and takes its own others.

    The same are drawn under every state, so that only the state makes a difference.
    """
    assert job.request is not None  # levels are always about a request
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    kin = np.flatnonzero(validation_mask(job.request, client.shard))
    others = np.setdiff1d(np.arange(len(client.train)), forget)
    rng = generator(job.seed, job.stream, client.shard.client)
    pool = np.sort(rng.permutation(others if len(others) >= 2 else forget)[:POOL])
    if len(pool) < 2:
        pool = pool[:0]  # one pair alone says nothing
    peers = forget if isinstance(job.request, ClassRequest) and len(pool) else forget[:0]
    base = np.concatenate([pool, peers])
    drawn = client.train, base, rng.integers(client.train.captions, size=len(base))
    queries = {}
    for name, examples, rows, classes in (
        ("forget", client.train, forget, client.shard.train_classes[forget]),
        ("kin", client.validation, kin, client.shard.validation_classes[kin]),
    ):
        own = rows[:, None] == base if name == "forget" else np.zeros((len(rows), len(base)), dtype=bool)
        weights = _weights(own, len(pool), classes, client.shard.train_classes[peers])
        queries[name] = Queries(examples, rows, torch.from_numpy(weights).float())
    return Compared(drawn, queries)


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


def _phi(each: Queries, image: Tensor, text: Tensor, base: tuple[Tensor, Tensor], job: LocalJob) -> Tensor:
    """Log-odds of pairs, mean over their captions [queries]; 0 where there is nothing to hold them against."""
    if not len(each.rows) or not len(base[0]):
        return torch.zeros(len(each.rows))
    captions = each.examples.captions
    counted = each.weights.repeat_interleave(captions, 0).to(text)
    found = log_odds(image.repeat_interleave(captions, 0), text, *base, counted, job.temperature)
    return found.view(len(each.rows), captions).mean(1)


def embedded(
    model: DualEncoder,
    tensors: Tensors,
    modality: Modality,
    examples: Examples,
    rows: np.ndarray,
    captions: np.ndarray,
) -> Tensor:
    """One side of pairs, each with one of its captions."""
    return embedded_each(model, tensors, modality, [(examples, rows, captions)])[0]


@torch.no_grad()
def embedded_each(model: DualEncoder, tensors: Tensors, modality: Modality, wanted: Sequence[Wanted]) -> list[Tensor]:
    """One side of several lots of pairs, in as few passes as their size allows."""
    found = []
    for parts in _passes(wanted):
        images, texts, masks = zip(*(examples.batch(*chosen) for examples, *chosen in parts), strict=True)
        states = torch.cat(images if modality == "image" else texts)
        masked = modality == "text" and masks[0] is not None
        found.append(model.embed(tensors, modality, states, torch.cat(masks) if masked else None))
    return list(torch.cat(found).split([len(rows) for _, rows, _ in wanted]))


def _passes(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """The same pairs in the same order, `CHUNK_PAIRS` at a time; where there are none, one pass of none."""
    parts, room = [(examples, rows[:0], captions[:0]) for examples, rows, captions in wanted[:1]], CHUNK_PAIRS
    for examples, rows, captions in wanted:
        while len(rows):
            if not room:
                yield parts
                parts, room = [], CHUNK_PAIRS
            parts.append((examples, rows[:room], captions[:room]))
            rows, captions, room = rows[room:], captions[room:], room - len(rows[:room])
    yield parts


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


register(
    LEVELS,
    Objective(
        measure=levels,
        measure_together=levels_together,
        expects=measured,
        reads=frozenset({"forget"}),
        passes=1 / 3,
    ),
)
