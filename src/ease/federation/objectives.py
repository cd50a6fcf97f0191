"""What clients can be asked to minimise or to measure; jobs refer to these by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss

from ease.data.density import densities
from ease.data.examples import Examples, States
from ease.data.partition import MINIMUM_PAIRS
from ease.federation.client import ClientData
from ease.federation.protocol import LocalJob
from ease.model.dual_encoder import DualEncoder
from ease.model.losses import info_nce, log_odds
from ease.params import Modality, Params
from ease.requests.request import ClassRequest, ClientRequest, forget_mask, validation_mask
from ease.seeding import generator

DRAWS = 2
"""Random pools and captions over which a level is measured; two are enough to tell spread from noise."""
FAREWELL_DRAWS = 8
"""The same for a client that withdraws: it measures alone and once, on few pairs."""
NOISE = (0.05, 1.0)
"""Least and largest noise, relative to the input, under which sensitivity is measured."""

CHUNK_PAIRS = 512
"""Most pairs in one pass when nothing is learnt: a measurement takes no more memory than a training step."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Draw:
    """A batch as data: which pairs, which caption of each, and what the loss must know of them."""

    rows: np.ndarray
    """Positions in the client's training examples."""
    captions: np.ndarray
    split: int = 0
    """Where the second kind of pairs begins, for objectives that treat forget and retained pairs differently."""
    weights: Tensor | None = None
    """Of each negative, for each pair that is pushed [pushed, pairs]."""
    targets: Tensor | None = None
    """The level of each pair that is pushed."""
    noise_seed: int = 0

    def to(self, device: torch.device) -> "Draw":
        if self.weights is None or self.targets is None:
            return self
        return replace(self, weights=self.weights.to(device), targets=self.targets.to(device))


DrawFunction = Callable[[ClientData, np.ndarray, LocalJob, np.random.Generator], Draw]
LossFunction = Callable[[Tensor, Tensor, Draw, LocalJob], Tensor]
StatesLossFunction = Callable[[DualEncoder, Tensors, States, Draw, LocalJob], Tensor]
DecideFunction = Callable[[DualEncoder, Params, ClientData, LocalJob], str]
MeasureFunction = Callable[[DualEncoder, Params, ClientData, LocalJob], dict[str, Tensor]]


@dataclass(frozen=True)
class Objective:
    """Either a loss over batches, or a measurement that changes nothing."""

    draw: DrawFunction | None = None
    """Chooses a batch around some positions."""
    loss: LossFunction | None = None
    """Of the batch's embeddings alone, so that many clients can share a pass through the model."""
    loss_of_states: StatesLossFunction | None = None
    """The alternative for a loss that embeds more than once."""
    fewest: int = MINIMUM_PAIRS
    """With fewer pairs a client abstains: one pair has no negatives, unless the objective brings them."""
    decide: DecideFunction | None = None
    """Looks at the state a job starts from and may choose a simpler objective for this client."""
    measure: MeasureFunction | None = None

    def loss_at(self, model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
        """The loss of one client's batch."""
        if self.loss_of_states is not None:
            return self.loss_of_states(model, tensors, states, draw, job)
        assert self.loss is not None  # only measurements have neither
        return self.loss(*embed_states(model, tensors, states), draw, job)


def embed_states(model: DualEncoder, tensors: Tensors, states: States) -> tuple[Tensor, Tensor]:
    image, text, mask = states
    return model.embed(tensors, "image", image), model.embed(tensors, "text", text, mask)


def draw_pairs(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    """One random caption for each image: two captions of one image are no negatives."""
    return Draw(positions, rng.integers(client.train.captions, size=len(positions)))


def align(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """Symmetric InfoNCE: the ordinary training objective."""
    return info_nce(image, text, job.temperature)


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
        weights=_pool_weights(job, client, pushed, positions, pushed),
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
    phi = log_odds(image[retained:], text[retained:], *pool, weights, job.temperature) + _full_batch(retained, job)
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
        phi = _train_levels(model, params.tensors, client, job, forget, rng, draws=1)
    return "displace" if float(phi.mean()) > float(targets.mean()) else "align"


def draw_both_kinds(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    """Forget pairs, then retained pairs."""
    forget, retained = both_kinds(client, positions, job, rng)
    return replace(draw_pairs(client, np.concatenate([forget, retained]), job, rng), split=len(forget))


def difference(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """Retained pairs are learnt and forget pairs unlearnt: retain · L_r - forget · min(L_f, log N).

    At log N a pair is told from N candidates by chance; ascent beyond that only destroys what is shared.
    """
    forget, loss = draw.split, image.new_zeros(())
    if forget < len(image):
        loss = loss + job.settings["retain"] * info_nce(image[forget:], text[forget:], job.temperature)
    if forget:
        surprise = -own_log_probabilities(image, text, forget, job.temperature).mean()
        loss = loss - job.settings["forget"] * surprise.clamp(max=float(np.log(len(image))))
    return loss


def unlearning_cross_entropy(image: Tensor, text: Tensor, draw: Draw, job: LocalJob) -> Tensor:
    """-log(1 - p / 2) of forget pairs, p the probability of the right partner: descent on it is bounded by 0."""
    probabilities = own_log_probabilities(image, text, draw.split, job.temperature).exp()
    return -torch.log1p(-probabilities / 2).mean()


def decouple(model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
    """Forget pairs become as alike as strangers are to the reference; retained pairs stay where it has them.

    Retained pairs are held in each modality and in both together, of which the product of the two embeddings tells.
    """
    assert job.reference is not None  # the teacher
    image, text = embed_states(model, tensors, states)
    with torch.no_grad():
        teacher_image, teacher_text = embed_states(model, job.reference.tensors, states)
    forget, loss = draw.split, image.new_zeros(())
    if forget:
        strangers = (teacher_image * teacher_text.roll(1, 0)).sum(1)  # every image with another image's caption
        similarity = (image * text).sum(1)
        loss = loss + job.settings["forget"] * mse_loss(similarity[:forget], strangers[:forget])
    if forget < len(image):
        drifts = image - teacher_image, text - teacher_text, image * text - teacher_image * teacher_text
        loss = loss + sum(drift[forget:].square().sum(1).mean() for drift in drifts)
    return loss


def draw_with_noise(client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator) -> Draw:
    return replace(draw_pairs(client, positions, job, rng), noise_seed=int(rng.integers(2**63)))


def sensitivity(model: DualEncoder, tensors: Tensors, states: States, draw: Draw, job: LocalJob) -> Tensor:
    """How far noise on the input moves an embedding, for its size: a sampled Lipschitz constant, both modalities added.

    Noise is relative to the mean size of a value. It goes onto the cached states, which are the input a client has.
    """
    image, text, mask = states
    draws, rng = int(job.settings["draws"]), np.random.default_rng(draw.noise_seed)
    loss = image.new_zeros(())
    branches: tuple[tuple[Modality, Tensor, Tensor | None], ...] = (("image", image, None), ("text", text, mask))
    for modality, clean_states, visible in branches:
        clean = model.embed(tensors, modality, clean_states, visible)
        unit = clean_states.norm(dim=-1).mean() / clean_states.shape[-1] ** 0.5
        for _ in range(draws):
            sigma = rng.uniform(*NOISE)
            drawn = rng.standard_normal(tuple(clean_states.shape), dtype=np.float32)
            noise = torch.from_numpy(sigma * drawn).to(clean_states)
            if visible is not None:
                # Rows behind the tokens are no padding: a tower may keep more than tokens there.
                noise[:, : visible.shape[1]] *= visible[..., None]
            with torch.no_grad():
                noisy = model.embed(tensors, modality, clean_states + unit * noise, visible)
            # The root of exactly 0 has no gradient.
            moved = ((clean - noisy).square().sum(1) + 1e-12).sqrt()
            loss = loss + (moved / noise.flatten(1).norm(dim=1).clamp_min(1e-6)).mean() / draws
    return loss


def both_kinds(
    client: ClientData, positions: np.ndarray, job: LocalJob, rng: np.random.Generator
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


@torch.no_grad()
def embed_drawn(
    model: DualEncoder, tensors: Tensors, examples: Examples, positions: np.ndarray, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Embeddings to measure with, of pairs with one random caption each."""
    captions = rng.integers(examples.captions, size=len(positions))
    starts = range(0, max(len(positions), 1), CHUNK_PAIRS)
    chunks = [(positions[start : start + CHUNK_PAIRS], captions[start : start + CHUNK_PAIRS]) for start in starts]
    images, texts = zip(*(embed_states(model, tensors, states) for states in examples.feed(chunks)), strict=True)
    return torch.cat(images), torch.cat(texts)


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
    job: LocalJob, client: ClientData, queries: np.ndarray, pool: np.ndarray, peers: np.ndarray
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
        weights = _pool_weights(job, client, queries, pool, queries).to(image)
        own = image[len(pool) :], text[len(pool) :]
        phi[:, draw] = log_odds(*own, image, text, weights, job.temperature) + _full_batch(len(pool), job)
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
        phi[:, draw] = log_odds(*own, image, text, weights.to(image), job.temperature) + _full_batch(len(pool), job)
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
        phi[:, draw] = level + _full_batch(len(pool) - (own is not None), job)
    return phi


OBJECTIVES: dict[str, Objective] = {
    "align": Objective(draw_pairs, align),
    "displace": Objective(draw_pushed, displace, decide=displace_or_align),
    "difference": Objective(draw_both_kinds, difference, fewest=1),
    "unlearning cross-entropy": Objective(draw_both_kinds, unlearning_cross_entropy, fewest=1),
    "decouple": Objective(draw_both_kinds, loss_of_states=decouple, fewest=1),
    "sensitivity": Objective(draw_with_noise, loss_of_states=sensitivity, fewest=1),
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
