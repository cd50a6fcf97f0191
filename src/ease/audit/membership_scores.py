"""Membership scores: log-odds of forget pairs and of held-out pairs like them, measured by the clients.

The gap between the two says how much a model still remembers. It is 0 for pairs that it never saw.
"""

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
from ease.federation.objectives import SharedMeasurement, Tensors, register
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Trained
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import log_odds
from ease.params import Modality, Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask, validation_mask
from ease.seeding import generator

MEMBERSHIP_SCORES = "membership scores"
POOL = 128
"""Largest number of its own pairs that a client scores against."""
CHUNK_PAIRS = 512
"""Largest number of pairs in one pass: measuring takes no more memory than a training step."""
FEWEST = 3
"""With fewer pairs on either side, no gap is estimated."""

Scores = Mapping[int, Mapping[str, Tensor]]
"""Client -> scores of its forget pairs and of the held-out pairs that resemble them [pairs]."""
Selection = tuple[Examples, np.ndarray, np.ndarray]
"""Some pairs, and which caption of each."""


@dataclass(frozen=True)
class Queries:
    """Pairs to score."""

    examples: Examples
    rows: np.ndarray
    weights: Tensor
    """Weight of each base pair in the score of each row [rows, base]."""

    @property
    def pictures(self) -> Selection:
        """Each picture once, for all of its captions."""
        return self.examples, self.rows, np.zeros_like(self.rows)

    @property
    def captions(self) -> Selection:
        """All captions, pair after pair."""
        each = self.examples.captions
        return self.examples, np.repeat(self.rows, each), np.tile(np.arange(each), len(self.rows))


@dataclass(frozen=True)
class Comparison:
    """The forget pairs and the held-out pairs like them, and the base pairs that both are scored against."""

    base: Selection
    queries: Mapping[str, Queries]

    @property
    def pictures(self) -> list[Selection]:
        return [self.base, *(each.pictures for each in self.queries.values())]

    @property
    def captions(self) -> list[Selection]:
        return [self.base, *(each.captions for each in self.queries.values())]


def membership_scores(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """Log-odds of this client's forget pairs and of the held-out pairs that resemble them, over all captions."""
    return vectorized_scores(model, params, [(client, job)])[0]


def vectorized_scores(
    model: DualEncoder, params: Params, asked: Sequence[tuple[ClientData, LocalJob]]
) -> list[dict[str, Tensor]]:
    """The membership scores of several clients, whose pairs share passes through the model."""
    comparisons = [comparison(client, job) for client, job in asked]
    images = iter(embedded_each(model, params.tensors, "image", [each for one in comparisons for each in one.pictures]))
    texts = iter(embedded_each(model, params.tensors, "text", [each for one in comparisons for each in one.captions]))
    found = []
    for one, (_, job) in zip(comparisons, asked, strict=True):
        base = next(images), next(texts)
        scores = {name: _phi(each, next(images), next(texts), base, job) for name, each in one.queries.items()}
        found.append({name: score.float().cpu() for name, score in scores.items()})
    return found


def comparison(client: ClientData, job: LocalJob) -> Comparison:
    """Choose the pairs that a client scores, and those to compare with: retained ones, or its own others if it
    withdraws.

    The same pairs are drawn under every state, so that only the state makes a difference.
    """
    assert job.request is not None  # membership scores are always about a request
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    held_out = np.flatnonzero(validation_mask(job.request, client.shard))
    others = np.setdiff1d(np.arange(len(client.train)), forget)
    rng = generator(job.seed, job.stream, client.shard.client)
    pool = np.sort(rng.permutation(others if len(others) >= 2 else forget)[:POOL])
    if len(pool) < 2:
        pool = pool[:0]  # a single pair is nothing to compare with
    peers = forget if isinstance(job.request, ClassRequest) and len(pool) else forget[:0]
    base = np.concatenate([pool, peers])
    drawn = client.train, base, rng.integers(client.train.captions, size=len(base))
    queries = {}
    for name, examples, rows, classes in (
        ("forget", client.train, forget, client.shard.train_classes[forget]),
        ("held_out", client.validation, held_out, client.shard.validation_classes[held_out]),
    ):
        own = rows[:, None] == base if name == "forget" else np.zeros((len(rows), len(base)), dtype=bool)
        weights = _weights(own, len(pool), classes, client.shard.train_classes[peers])
        queries[name] = Queries(examples, rows, torch.from_numpy(weights).float())
    return Comparison(drawn, queries)


def _weights(own: np.ndarray, pool: int, classes: np.ndarray, peer_classes: np.ndarray) -> np.ndarray:
    """Weights of the base pairs [queries, pool + peers]: the pool counts one in total, and the peers one in total.

    Peers are training pairs of the query's own pseudo-class. A class is forgotten only when its pairs cannot be
    distinguished from each other any more, and retained pairs, all of other classes, do not show that.
    """
    weights = np.ones_like(own, dtype=float)
    weights[:, pool:] = classes[:, None] == peer_classes
    weights[own] = 0.0
    for part in (weights[:, :pool], weights[:, pool:]):
        part /= np.maximum(part.sum(1, keepdims=True), 1.0)
    return weights


def _phi(each: Queries, image: Tensor, text: Tensor, base: tuple[Tensor, Tensor], job: LocalJob) -> Tensor:
    """Log-odds of pairs, mean over their captions [queries]; 0 if there is nothing to compare with."""
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
def embedded_each(
    model: DualEncoder, tensors: Tensors, modality: Modality, wanted: Sequence[Selection]
) -> list[Tensor]:
    """One side of several selections of pairs, in as few passes as their size allows."""
    found = []
    for parts in _passes(wanted):
        images, texts, masks = zip(*(examples.batch(*chosen) for examples, *chosen in parts), strict=True)
        states = torch.cat(images if modality == "image" else texts)
        masked = modality == "text" and masks[0] is not None
        found.append(model.embed(tensors, modality, states, torch.cat(masks) if masked else None))
    return list(torch.cat(found).split([len(rows) for _, rows, _ in wanted]))


def _passes(wanted: Sequence[Selection]) -> Iterator[list[Selection]]:
    """The same pairs in the same order, `CHUNK_PAIRS` at a time; without any pair, one empty pass."""
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


def expected_scores(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    """One score for each forget pair that the server knows of, in the range that cosines allow."""
    known = named_pairs(job, client, held)
    # A pair's cosine, less the log of a weighted sum over others, whose weights add up to one, or to two with peers.
    least, most = -2 / job.temperature - math.log(2), 2 / job.temperature
    slack = 1e-3 * most
    score = partial(Value, least=least - slack, most=most + slack)
    return Expected(values={"forget": score((known,)), "held_out": score((None,))}, abstains=False)


register(
    MEMBERSHIP_SCORES,
    SharedMeasurement(
        measure=membership_scores,
        measure_clients=vectorized_scores,
        expects=expected_scores,
        reads=frozenset({"forget"}),
        passes=1 / 3,
    ),
)


# --- at the server ---


@dataclass(frozen=True)
class Gap:
    """Mean score of forget pairs minus that of held-out pairs; 0 means indistinguishable."""

    gap: float
    standard_error: float
    forget_pairs: int
    held_out_pairs: int


def measure_scores(
    trained: Trained, state: Params, request: Request, federation: Federation, clients: Sequence[int]
) -> Scores:
    """Ask clients for their scores under a state. The same pairs are compared each time."""
    job = trained.job(0, MEMBERSHIP_SCORES, request=request, objective=MEMBERSHIP_SCORES)
    answers = federation.run(state, job, clients)
    return {answer.client: answer.values for answer in sorted(answers, key=lambda answer: answer.client)}


def membership_gap(scores: Scores) -> Gap | None:
    """The gap over all clients, or None if there are too few pairs on either side."""
    forget, held_out = (
        torch.cat([torch.zeros(0), *(values[name] for values in scores.values())]).double()
        for name in ("forget", "held_out")
    )
    if min(len(forget), len(held_out)) < FEWEST:
        return None
    member = torch.cat([torch.ones_like(forget), torch.zeros_like(held_out)])
    gap, error = adjusted_gap(torch.cat([forget, held_out]), member, [])
    return Gap(gap, error, len(forget), len(held_out))


def adjusted_gap(score: Tensor, member: Tensor, covariates: Sequence[Tensor]) -> tuple[float, float]:
    """What membership (1 or 0) adds to scores, given covariates [pairs], and its standard error."""
    columns = [torch.ones_like(score), member, *(each - each.mean() for each in covariates)]
    design = torch.stack(columns, dim=1)
    inverse = torch.linalg.pinv(design.T @ design, hermitian=True)
    coefficients = inverse @ design.T @ score
    residual = score - design @ coefficients
    # Each side has its own spread, as for a difference of means.
    spread = torch.where(member > 0, residual[member > 0].var(), residual[member == 0].var())
    error = (inverse @ design.T @ (spread[:, None] * design) @ inverse)[1, 1].clamp_min(0).sqrt()
    return float(coefficients[1]), float(error)


def comparable(one: Scores, two: Scores) -> tuple[Scores, Scores]:
    """Keep clients that reported the same number of pairs in both measurements."""

    def counts(scores: Scores, client: int) -> list[int]:
        return [len(scores[client][name]) for name in ("forget", "held_out")]

    both = [client for client in one if client in two and counts(one, client) == counts(two, client)]
    return {client: one[client] for client in both}, {client: two[client] for client in both}
