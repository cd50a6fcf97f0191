"""Measures of a client that only it can take: how they compare with pairs that it holds out.

Its held-out pairs, which no model saw, are pool and gallery: every pair is measured against them as an audit measures
pairs in one place. Four numbers for each pair are all that leaves; no picture, caption or embedding does.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ease.audit.membership_scores import embedded, named_pairs
from ease.audit.statistic import statistics
from ease.data.examples import Examples
from ease.federation.client import ClientData
from ease.federation.expected import Expected, Value
from ease.federation.objectives import Measurement, register
from ease.federation.protocol import LocalJob
from ease.measures.ranks import standing
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import forget_mask, validation_mask
from ease.seeding import generator

AUDIT = "audit"
KINDS = ("forget", "held_out", "retain", "unseen")
"""Pairs to forget, held-out ones that resemble them, some retained ones, and held-out ones that resemble those."""
NUMBERS = ("log_odds", "cosine", "rank", "margin")
"""Values of each pair: two-way log-odds, similarity of picture and captions, and its rank and margin in its gallery."""
MOST_UNSEEN = 128
"""Held-out pairs, at most, that pairs are measured against, and of each kind that are measured themselves."""
FEWEST_UNSEEN = 4
"""With fewer held-out pairs nothing is reported: among so few every pair is found."""
RETAINED = "retained"
"""The setting that says how many retained pairs a client looks at, at most."""
ROWS_AT_ONCE = 64

Embedded = tuple[Tensor, Tensor]
"""Image [n, d] and text [n, captions, d]."""


def read_site(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """`KIND/NUMBER` -> values [pairs], the pairs in the client's own order; the same ones under every state."""
    assert job.request is not None  # an audit is always about one
    shard, rng = client.shard, generator(job.seed, job.stream, client.shard.client)

    def some(rows: np.ndarray, most: int) -> np.ndarray:
        return np.sort(rng.permutation(rows)[:most])

    named, alike = forget_mask(job.request, shard), validation_mask(job.request, shard)
    pool = some(np.arange(len(alike)), MOST_UNSEEN)
    rows = {
        "forget": np.flatnonzero(named),
        "held_out": some(np.flatnonzero(alike), MOST_UNSEEN),
        "retain": some(np.flatnonzero(~named), int(job.settings[RETAINED])),
        "unseen": some(np.flatnonzero(~alike), MOST_UNSEEN),
    }
    found = {f"{kind}/{name}": torch.zeros(0) for kind in KINDS for name in NUMBERS}
    if len(pool) < FEWEST_UNSEEN:
        return found
    against = _embedded(model, params, client.validation, pool)
    for kind, chosen in ((kind, chosen) for kind, chosen in rows.items() if len(chosen)):
        held_out = kind in ("held_out", "unseen")
        pairs = _embedded(model, params, client.validation if held_out else client.train, chosen)
        read = _left_out(pairs, chosen, against, pool, job) if held_out else read_pairs(pairs, against, job.temperature)
        found |= {f"{kind}/{name}": torch.from_numpy(read[name]).float() for name in NUMBERS}
    return found


def read_pairs(pairs: Embedded, against: Embedded, temperature: float) -> dict[str, np.ndarray]:
    """Each number of each pair, against a pool of others that is also its gallery.

    Log-odds are against the mean over the pool, not its sum: clients hold out more or less.
    """
    (image, text), (others, words) = pairs, against
    read = statistics(image, text, others, words[:, 0], temperature)
    places = []
    for start in range(0, len(image), ROWS_AT_ONCE):
        few = slice(start, start + ROWS_AT_ONCE)
        count = len(image[few])
        galleries = ((image, others), (text, words))
        places.append(
            standing(*(torch.cat([own[few, None], rest.expand(count, *rest.shape)], 1) for own, rest in galleries))
        )
    return {
        "log_odds": read["log_odds"] + math.log(len(others)),
        "cosine": read["cosine"],
        "rank": np.concatenate([place.rank for place in places]),
        "margin": np.concatenate([place.margin for place in places]),
    }


def _left_out(
    pairs: Embedded, rows: np.ndarray, against: Embedded, pool: np.ndarray, job: LocalJob
) -> dict[str, np.ndarray]:
    """The same of held-out pairs, each left out of the pool that it is measured against."""
    read = []
    for place, row in enumerate(rows):
        others = torch.from_numpy(pool != row)
        one = pairs[0][place : place + 1], pairs[1][place : place + 1]
        read.append(read_pairs(one, (against[0][others], against[1][others]), job.temperature))
    return {name: np.concatenate([each[name] for each in read]) for name in NUMBERS}


def _embedded(model: DualEncoder, params: Params, examples: Examples, rows: np.ndarray) -> Embedded:
    each = examples.captions
    image = embedded(model, params.tensors, "image", examples, rows, np.zeros_like(rows))
    every = np.repeat(rows, each), np.tile(np.arange(each), len(rows))
    text = embedded(model, params.tensors, "text", examples, *every)
    return image.cpu(), text.view(len(rows), each, -1).cpu()


def expected(state: Params, job: LocalJob, client: int, held: int) -> Expected:
    """Numbers that some model could give; the number of each kind is checked by code that knows the client's
    classes."""
    named, reach = named_pairs(job, client, held), 2 / job.temperature
    ends: Mapping[str, tuple[float, float]] = {
        "log_odds": (-1.001 * reach, 1.001 * reach),
        "cosine": (-1.001, 1.001),
        "rank": (0.999, 1.001 * (MOST_UNSEEN + 1)),
        "margin": (-2.001, 2.001),
    }
    lengths = {"forget": named, "held_out": None, "retain": None, "unseen": None}
    values = {
        f"{kind}/{name}": Value((length,), least=ends[name][0], most=ends[name][1])
        for kind, length in lengths.items()
        for name in NUMBERS
    }
    return Expected(values=values, abstains=False)


register(AUDIT, Measurement(measure=read_site, expects=expected, reads=frozenset({"forget", "retain"}), passes=1 / 3))
