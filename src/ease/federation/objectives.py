"""What clients can be asked to minimise or to measure; jobs refer to these by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss

from ease.data.density import densities
from ease.data.partition import MINIMUM_PAIRS
from ease.data.request import ClassRequest, ClientRequest, forget_mask, validation_mask
from ease.federation.protocol import LocalJob
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import info_nce, log_odds
from ease.params import Modality, Params
from ease.seeding import generator

if TYPE_CHECKING:
    from ease.federation.local import ClientData, Examples

DRAWS = 2
"""Random pools and captions over which a level is measured; two are enough to tell spread from noise."""
FAREWELL_DRAWS = 8
"""The same for a client that withdraws: it measures alone and once, on few pairs."""
NOISE = (0.05, 1.0)
"""Least and largest noise, relative to the input, under which sensitivity is measured."""

Tensors = Mapping[str, Tensor]
States = tuple[Tensor, Tensor, Tensor | None]
"""Cached image states, caption states and the captions' mask."""
LossFunction = Callable[[DualEncoder, Tensors, "ClientData", np.ndarray, LocalJob, np.random.Generator], Tensor]
DecideFunction = Callable[[DualEncoder, Params, "ClientData", LocalJob], str]
MeasureFunction = Callable[[DualEncoder, Params, "ClientData", LocalJob], dict[str, Tensor]]


@dataclass(frozen=True)
class Objective:
    """Either a loss over a batch of positions, or a measurement that changes nothing.

    `decide` looks at the state a job starts from and may choose a simpler objective for this client.
    """

    loss: LossFunction | None = None
    fewest: int = MINIMUM_PAIRS
    """With fewer pairs a client abstains: one pair has no negatives, unless the objective brings them."""
    decide: DecideFunction | None = None
    measure: MeasureFunction | None = None


def draw_states(examples: "Examples", positions: np.ndarray, rng: np.random.Generator) -> States:
    """Cached states of a batch with one random caption per image: two captions of one image are no negatives."""
    return examples.batch(positions, rng.integers(examples.text.shape[1], size=len(positions)))


def embed_states(model: DualEncoder, tensors: Tensors, states: States) -> tuple[Tensor, Tensor]:
    image, text, mask = states
    return model.embed(tensors, "image", image), model.embed(tensors, "text", text, mask)


def embed_batch(
    model: DualEncoder, tensors: Tensors, examples: "Examples", positions: np.ndarray, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Embeddings of a batch with one random caption per image."""
    return embed_states(model, tensors, draw_states(examples, positions, rng))


def align(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    positions: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> Tensor:
    """Symmetric InfoNCE: the ordinary training objective."""
    image, text = embed_batch(model, tensors, client.train, positions, rng)
    return info_nce(image, text, job.temperature)


def displace(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    positions: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> Tensor:
    """InfoNCE on retained pairs, and forget pairs pushed down to their target log-odds, no further.

    The push is strength · mean(max(0, phi - target)²) against the batch's retained pairs, which it does not move. It
    stops by itself at the level of unseen pairs, where plain gradient ascent would run away.
    """
    assert job.request is not None  # there is something to displace
    targets = job.targets[client.shard.client]
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    chosen = rng.permutation(len(forget))[: max(2, job.batch_size // 2)]  # half a batch: the push must cost little
    image, text = embed_batch(model, tensors, client.train, np.concatenate([positions, forget[chosen]]), rng)
    retained = len(positions)
    loss = info_nce(image[:retained], text[:retained], job.temperature)
    weights = _pool_weights(job, client, forget[chosen], positions, forget[chosen]).to(image)
    pool = image.detach(), text.detach()
    phi = log_odds(image[retained:], text[retained:], *pool, weights, job.temperature) + _full_batch(retained, job)
    excess = torch.relu(phi - targets[torch.from_numpy(chosen)].to(phi))
    return loss + job.settings["displacement"] * huber_loss(excess, torch.zeros_like(excess))


def displace_or_align(model: DualEncoder, params: Params, client: "ClientData", job: LocalJob) -> str:
    """Push only while this client's forget pairs are, on the whole, held more strongly than they should be."""
    assert job.request is not None  # there is something to displace
    targets = job.targets.get(client.shard.client)
    forget = np.flatnonzero(forget_mask(job.request, client.shard))
    if targets is None or len(forget) == 0:
        return "align"
    rng = generator(job.seed, f"{job.stream}-decide", job.round, client.shard.client)
    with torch.no_grad():
        phi = _train_levels(model, params.tensors, client, job, forget, rng, draws=1)
    return "displace" if float(phi.mean()) > float(targets.mean()) else "align"


def difference(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    positions: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> Tensor:
    """Retained pairs are learnt and forget pairs unlearnt: retain · L_r - forget · min(L_f, log N).

    At log N a pair is told from N candidates by chance; ascent beyond that only destroys what is shared.
    """
    forget, retained = both_kinds(client, positions, job, rng)
    image, text = embed_batch(model, tensors, client.train, np.concatenate([forget, retained]), rng)
    loss = image.new_zeros(())
    if len(retained):
        kept = info_nce(image[len(forget) :], text[len(forget) :], job.temperature)
        loss = loss + job.settings["retain"] * kept
    if len(forget):
        surprise = -own_log_probabilities(image, text, len(forget), job.temperature).mean()
        loss = loss - job.settings["forget"] * surprise.clamp(max=float(np.log(len(image))))
    return loss


def unlearning_cross_entropy(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    positions: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> Tensor:
    """-log(1 - p / 2) of forget pairs, p the probability of the right partner: descent on it is bounded by 0."""
    forget, retained = both_kinds(client, positions, job, rng)
    image, text = embed_batch(model, tensors, client.train, np.concatenate([forget, retained]), rng)
    probabilities = own_log_probabilities(image, text, len(forget), job.temperature).exp()
    return -torch.log1p(-probabilities / 2).mean()


def decouple(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    positions: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> Tensor:
    """Forget pairs become as alike as strangers are to the reference; retained pairs stay where it has them.

    Retained pairs are held in each modality and in both together, of which the product of the two embeddings tells.
    """
    assert job.reference is not None  # the teacher
    forget, retained = both_kinds(client, positions, job, rng)
    states = draw_states(client.train, np.concatenate([forget, retained]), rng)
    image, text = embed_states(model, tensors, states)
    with torch.no_grad():
        teacher_image, teacher_text = embed_states(model, job.reference.tensors, states)
    loss = image.new_zeros(())
    if len(forget):
        strangers = (teacher_image * teacher_text.roll(1, 0)).sum(1)  # every image with another image's caption
        similarity = (image * text).sum(1)
        loss = loss + job.settings["forget"] * mse_loss(similarity[: len(forget)], strangers[: len(forget)])
    if len(retained):
        drifts = image - teacher_image, text - teacher_text, image * text - teacher_image * teacher_text
        loss = loss + sum(drift[len(forget) :].square().sum(1).mean() for drift in drifts)
    return loss


def sensitivity(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    positions: np.ndarray,
    job: LocalJob,
    rng: np.random.Generator,
) -> Tensor:
    """How far noise on the input moves an embedding, for its size: a sampled Lipschitz constant, both modalities added.

    Noise is relative to the mean size of a value. It goes onto the cached states, which are the input a client has.
    """
    image, text, mask = draw_states(client.train, positions, rng)
    draws = int(job.settings["draws"])
    loss = image.new_zeros(())
    branches: tuple[tuple[Modality, Tensor, Tensor | None], ...] = (("image", image, None), ("text", text, mask))
    for modality, states, visible in branches:
        clean = model.embed(tensors, modality, states, visible)
        unit = states.norm(dim=-1).mean() / states.shape[-1] ** 0.5
        for _ in range(draws):
            sigma = rng.uniform(*NOISE)
            noise = torch.from_numpy(sigma * rng.standard_normal(tuple(states.shape), dtype=np.float32)).to(states)
            if visible is not None:
                # Rows behind the tokens are no padding: a tower may keep more than tokens there.
                noise[:, : visible.shape[1]] *= visible[..., None]
            with torch.no_grad():
                noisy = model.embed(tensors, modality, states + unit * noise, visible)
            # The root of exactly 0 has no gradient.
            moved = ((clean - noisy).square().sum(1) + 1e-12).sqrt()
            loss = loss + (moved / noise.flatten(1).norm(dim=1).clamp_min(1e-6)).mean() / draws
    return loss


def both_kinds(
    client: "ClientData", positions: np.ndarray, job: LocalJob, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Forget pairs and retained pairs of a batch, each kind filled up to half a batch with what the client has of it.

    A forget pair alone would have no negatives: its loss, and the gradient of that, would be 0.
    """
    assert job.request is not None  # it says which are which
    named = forget_mask(job.request, client.shard)

    def filled(kind: np.ndarray) -> np.ndarray:
        present = positions[kind[positions]]
        others = rng.permutation(np.setdiff1d(np.flatnonzero(kind), present))
        return np.concatenate([present, others[: max(0, job.batch_size // 2 - len(present))]])

    return filled(named), filled(~named)


def own_log_probabilities(image: Tensor, text: Tensor, anchors: int, temperature: float) -> Tensor:
    """log p of the right caption and of the right image for the first pairs [2, anchors].

    All pairs are candidates, but only the anchors move: forgetting must not drag retained pairs along.
    """
    to_text = image[:anchors] @ torch.cat([text[:anchors], text[anchors:].detach()]).T
    to_image = text[:anchors] @ torch.cat([image[:anchors], image[anchors:].detach()]).T
    return torch.stack([(each / temperature).log_softmax(1).diagonal() for each in (to_text, to_image)])


def levels(model: DualEncoder, params: Params, client: "ClientData", job: LocalJob) -> dict[str, Tensor]:
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
        forget_phi = _train_levels(model, params.tensors, client, job, np.flatnonzero(forget), rng)
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


def _pool_weights(
    job: LocalJob, client: "ClientData", queries: np.ndarray, pool: np.ndarray, peers: np.ndarray
) -> Tensor:
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


def _full_batch(pool: int, job: LocalJob) -> float:
    """The log-sum grows with the number of negatives; levels and targets are stated for a full batch of them."""
    return float(np.log(pool / job.batch_size))


def _train_levels(
    model: DualEncoder,
    tensors: Tensors,
    client: "ClientData",
    job: LocalJob,
    queries: np.ndarray,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> Tensor:
    """Levels of forget pairs, the pool drawn from retained pairs; all are peers of one another [queries, draws]."""
    assert job.request is not None
    retained = np.flatnonzero(~forget_mask(job.request, client.shard))
    phi = torch.zeros(len(queries), draws, device=client.train.image.device)
    for draw in range(draws):
        pool = rng.permutation(retained)[: job.batch_size]
        image, text = embed_batch(model, tensors, client.train, np.concatenate([pool, queries]), rng)
        weights = _pool_weights(job, client, queries, pool, queries).to(image)
        own = image[len(pool) :], text[len(pool) :]
        phi[:, draw] = log_odds(*own, image, text, weights, job.temperature) + _full_batch(len(pool), job)
    return phi


def _validation_levels(
    model: DualEncoder, tensors: Tensors, client: "ClientData", job: LocalJob, rng: np.random.Generator
) -> Tensor:
    """Levels of all held-out pairs, measured as those of training pairs are [validation, draws]."""
    assert job.request is not None
    retained = np.flatnonzero(~forget_mask(job.request, client.shard))
    everything, held_out = np.arange(len(client.train)), np.arange(len(client.validation))
    phi = torch.zeros(len(held_out), DRAWS, device=client.train.image.device)
    same = torch.zeros(len(held_out), len(everything))
    if isinstance(job.request, ClassRequest):
        same = torch.from_numpy(client.shard.validation_classes[:, None] == client.shard.train_classes).float()
        same /= same.sum(1, keepdim=True).clamp_min(1)
    for draw in range(DRAWS if len(held_out) else 0):
        pool = rng.permutation(retained)[: job.batch_size]
        image, text = embed_batch(model, tensors, client.train, everything, rng)
        weights = same * len(pool)
        weights[:, pool] += 1.0
        own = embed_batch(model, tensors, client.validation, held_out, rng)
        phi[:, draw] = log_odds(*own, image, text, weights.to(image), job.temperature) + _full_batch(len(pool), job)
    return phi


def _levels_in(
    model: DualEncoder,
    tensors: Tensors,
    job: LocalJob,
    queries: "Examples",
    base: "Examples",
    pool: np.ndarray,
    own: Tensor | None,
    draws: int,
    rng: np.random.Generator,
) -> Tensor:
    """Levels of pairs against a fixed pool; `own` marks pool pairs that are the query itself [queries, draws]."""
    phi = torch.zeros(len(queries), draws, device=queries.image.device)
    if len(pool) < 2:
        return phi
    weights = torch.ones(len(queries), len(pool)) if own is None else (~own).float()
    for draw in range(draws):
        negatives = embed_batch(model, tensors, base, pool, rng)
        mine = embed_batch(model, tensors, queries, np.arange(len(queries)), rng)
        level = log_odds(*mine, *negatives, weights.to(phi), job.temperature)
        phi[:, draw] = level + _full_batch(len(pool) - (own is not None), job)
    return phi


OBJECTIVES: dict[str, Objective] = {
    "align": Objective(loss=align),
    "displace": Objective(loss=displace, decide=displace_or_align),
    "difference": Objective(loss=difference, fewest=1),
    "unlearning cross-entropy": Objective(loss=unlearning_cross_entropy, fewest=1),
    "decouple": Objective(loss=decouple, fewest=1),
    "sensitivity": Objective(loss=sensitivity, fewest=1),
    "levels": Objective(measure=levels),
}


def passes(job: LocalJob) -> float:
    """How often each pair of a job goes through the model, forward and backward; forward alone counts a third.

    Costs are told by it, so what a method does beside plain training is not free.
    """
    extra = {
        "displace": 0.5,  # half a batch of forget pairs beside the retained ones
        "decouple": 1 / 3,  # the teacher
        "sensitivity": job.settings.get("draws", 0) / 3,  # noisy copies
    }
    return DRAWS / 3 if job.objective == "levels" else 1 + extra.get(job.objective, 0.0)
