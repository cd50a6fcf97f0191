"""The push of EASE: forget pairs fall to the level of unseen ones while retained pairs are learnt."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from ease.federation.client import ClientData
from ease.federation.objectives import Draw, Objective, draw_pairs, register
from ease.federation.protocol import LocalJob
from ease.methods.ease.levels import full_batch, pool_weights, train_levels
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import info_nce, log_odds
from ease.params import Params
from ease.requests.request import forget_mask
from ease.seeding import generator

DISPLACE = "displace"


def draw_pushed(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    """Retained pairs, then forget pairs: half a batch of those, for the push must cost little."""
    assert job.request is not None  # there is something to displace
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    chosen = rng.permutation(len(forget))[: max(2, job.batch_size // 2)]
    pushed = forget[chosen]
    drawn = draw_pairs(client, np.concatenate([positions, pushed]), job, rng)
    return replace(
        drawn,
        split=len(positions),
        weights=pool_weights(job, client, pushed, positions, pushed),
        targets=job.targets[client.shard.client][torch.from_numpy(chosen)],
    )


def displace(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """InfoNCE on retained pairs, and forget pairs pushed down to their target log-odds, no further.

    The push is strength · huber(max(0, phi - target)) against the batch's retained pairs, which it does not move. It
    stops by itself at the level of unseen pairs, where plain gradient ascent would run away.
    """
    assert draw.weights is not None and draw.targets is not None
    retained = draw.split
    loss = info_nce(image[:retained], text[:retained], job.temperature)
    pool = image.detach(), text.detach()
    weights, targets = draw.weights.to(image), draw.targets.to(image)
    phi = log_odds(image[retained:], text[retained:], *pool, weights, job.temperature) + full_batch(retained, job)
    excess = torch.relu(phi - targets)
    return loss + job.settings["displacement"] * huber_loss(excess, torch.zeros_like(excess))


def displace_or_align(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> str:
    """Push only while this client's forget pairs are, on the whole, held more strongly than they should be."""
    assert job.request is not None  # there is something to displace
    targets = job.targets.get(client.shard.client)
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    if targets is None or len(forget) == 0:
        return "align"
    rng = generator(job.seed, f"{job.stream}-decide", job.round, client.shard.client)
    with torch.no_grad():
        phi = train_levels(model, params.tensors, client, job, forget, rng, draws=1)
    return DISPLACE if float(phi.mean()) > float(targets.mean()) else "align"


register(
    DISPLACE,
    Objective(
        draw_pushed,
        displace,
        decide=displace_or_align,
        reads=frozenset({"forget"}),
        passes=1.5,  # half a batch of forget pairs beside the retained ones
    ),
)
