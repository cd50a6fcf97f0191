"""Training in one round: clients send exact sums over their pairs, and the server solves the maps from the total."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ease.data.examples import Examples
from ease.data.rows import CAPTIONS_PER_IMAGE
from ease.errors import UserError
from ease.federation.check import each_reason
from ease.federation.client import ClientData
from ease.federation.expected import Expected, Value
from ease.federation.fedavg import Round, TrainingConfig
from ease.federation.history import History
from ease.federation.objectives import Measurement, register
from ease.federation.protocol import Federation, LocalJob, Update
from ease.federation.secure_aggregation import checksum_key, masked_expected, measure_masked, secure_total
from ease.model.closed_form import (
    IMAGE_STRENGTHS,
    LARGEST_SUM,
    POWERS,
    ROWS,
    TEXT_STRENGTHS,
    Ridge,
    Sums,
    most_pairs,
    on_grid,
    packed_size,
    solve,
    widths,
)
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.requests.request import ClientRequest, Request, SampleRequest

SUMS = "sums"
FEATURES = "features"
SECURE_SUMS = "secure: masked sums"
RANKS = "ranks"
CHECKSUMS = Value((2,), torch.int64)
"""The form of `Checksums` in an answer."""
NAMED = 3
"""How many clients an error names."""
RANK_GRID = 1 << 20
"""Steps of the grid on which reciprocal ranks are added, in any order to the same total."""


def sum_and_solve(
    params: Params,
    federation: Federation,
    config: TrainingConfig,
    seed: int,
    temperature: float,
    clients: Sequence[int],
    request: Request | None = None,
    again: History | None = None,
) -> Round:
    """The one round of a training by sums; of one that is made `again`, with its clients and its ridge strengths.

    The strengths stay as they were chosen, so that leaving pairs out is a subtraction and nothing else changes.
    """
    took_part = set(clients) if again is None else set(again.clients(1)).intersection(clients)
    check_count(params, sum(len(federation.members.get(client, ())) for client in took_part))
    job = sums_job(config, seed, temperature, request, "all" if request is None else "retain")
    if config.secure:
        found = securely_collected(federation, params, job, sorted(took_part))
    else:
        found = Collected.of(asked(federation, params, job, sorted(took_part)), kept=config.history == "server")
    ridge = choose(params, federation, job, found) if again is None else again.ridge(1)
    return found.solved(params, ridge)


def add_and_solve(
    params: Params,
    federation: Federation,
    config: TrainingConfig,
    seed: int,
    temperature: float,
    newcomers: Sequence[int],
    history: History,
) -> Round:
    """The round of a training that clients join: their sums are added to what the server keeps, and nothing else.

    With secure aggregation everyone sends again, since the newcomers' own total would be their sums.
    """
    there, known = history.clients(1), history.features(1)
    everyone = sorted({*there, *newcomers})
    check_count(params, sum(len(federation.members.get(client, ())) for client in everyone))
    job = sums_job(config, seed, temperature, None, "all")
    if config.secure:
        found = securely_collected(federation, params, job, everyone, everyone=True)
    else:
        added = all_asked(federation, params, job, newcomers, "a joining client sends sums")
        if history.updates:
            found = Collected.of(added, kept=True)
            for client in there:
                found.add(client, Sums.from_state(history.update(1, client).change), known.get(client, 0), kept=True)
        else:
            found = Collected.of(added, kept=False)
            kept = Sums.from_state(history.sums(1))
            found.total = kept if found.total is None else found.total + kept
            found.updates |= {client: Update(client, pairs, None) for client, pairs in history.pairs(1).items()}
            found.features |= known
    return found.solved(params, history.ridge(1))


@dataclass(frozen=True)
class Checksums:
    """Checksum of a client's features: one 64-bit hash for each pair, so that pairs can be taken out again.

    They are equal if the features are. Sums cannot be subtracted that are of other features than those added.
    """

    named: int
    """Checksum of the pairs in the sums."""
    others: int
    """Checksum of the client's other pairs, if a request asks for its forget pairs; otherwise 0."""

    @classmethod
    def of(cls, update: Update) -> "Checksums":
        return cls(*update.values[FEATURES].tolist())

    @property
    def all(self) -> int:
        return int(wrapped(self.named + self.others))


@dataclass(frozen=True)
class Sent:
    """A client's sums as they arrive."""

    sums: Sums
    checksums: Checksums


@dataclass
class Collected:
    """What clients' sums come to, added as they arrive: the total, and who sent what."""

    total: Sums | None = None
    updates: dict[int, Update] = field(default_factory=dict)
    """Client -> how many pairs its sums are of, with the sums themselves where the server keeps them."""
    rejected: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, Checksums] = field(default_factory=dict)
    """Those of everyone who sent sums, be they of no pair."""
    features: dict[int, int] = field(default_factory=dict)
    """Client -> checksum of the features that its sums are of."""

    @classmethod
    def of(cls, arriving: Iterable[tuple[int, Sent | str]], kept: bool) -> "Collected":
        """From the sums of each client, or why it sent none that can be used; sums of no pair do not count."""
        found = cls()
        for client, sent in arriving:
            if isinstance(sent, str):
                found.rejected[client] = sent
            else:
                found.add(client, sent.sums, sent.checksums.named, kept)
                found.checksums[client] = sent.checksums
        return found

    def add(self, client: int, sums: Sums, features: int, kept: bool) -> None:
        """Add a client's sums, and the checksum of the features that they are of."""
        if sums.count:
            self.total = sums if self.total is None else self.total + sums
            self.updates[client] = Update(client, pairs_in(sums), sums.state() if kept else None)
            self.features[client] = features

    def solved(self, params: Params, ridge: Ridge) -> Round:
        """The round that these sums make: the same for equal sums, however they were come by."""
        if self.total is None:
            raise UserError("no client sent sums of any pair, so that there is nothing to solve; run the command again")
        updates = tuple(update for _, update in sorted(self.updates.items()))
        state = solve(self.total, ridge, params)
        features = dict(sorted(self.features.items()))
        return Round(1, state, updates, self.rejected, sums=self.total.state(), ridge=ridge, features=features)


def pairs_in(sums: Sums) -> int:
    return sums.count // CAPTIONS_PER_IMAGE


def check_features(history: History, checksums: Mapping[int, Checksums]) -> None:
    """Refuse to subtract sums of clients that compute other features now than when they trained."""
    trained = history.features(1)
    other = [client for client, found in sorted(checksums.items()) if trained.get(client, found.all) != found.all]
    if other:
        raise UserError(
            f"{clients_named(other)}: features are computed otherwise now than when they were trained on, so that sums "
            "of them cannot be subtracted; restore the cache of features, or answer with --method retrain"
        )


def clients_named(clients: Sequence[int]) -> str:
    """The first few clients, for a message."""
    named = ", ".join(f"client {client}" for client in clients[:NAMED])
    return f"{named} and {len(clients) - NAMED} more" if len(clients) > NAMED else named


def check_count(params: Params, pairs: int) -> None:
    """Refuse more pairs than 64-bit sums can hold, before any client computes."""
    most = most_pairs(*widths(params), CAPTIONS_PER_IMAGE)
    if pairs > most:
        raise UserError(
            f"{pairs} pairs: exact sums of features this wide hold {most} at most; train on fewer, or with "
            'model.projector = "mlp"'
        )


# --- sums ---


def sums_job(
    config: TrainingConfig,
    seed: int,
    temperature: float,
    request: Request | None,
    data: Literal["all", "retain", "forget"],
) -> LocalJob:
    """The job that asks clients for sums over all, retained or forget pairs; of the state it needs the widths only."""
    return config.job(1, seed, temperature, SUMS, request=request, data=data, objective=SUMS, epochs=1)


def asked(
    federation: Federation, state: Params, job: LocalJob, clients: Sequence[int]
) -> Iterator[tuple[int, Sent | str]]:
    """The sums of each client, or why it sent none that can be used."""
    for update in federation.run(state, job, clients):
        yield update.client, update.refused or Sent(Sums(update.values[SUMS]), Checksums.of(update))


HOLDERS = "exact forgetting needs the sums of everyone who may hold forget pairs"


def all_asked(
    federation: Federation, state: Params, job: LocalJob, clients: Sequence[int], why: str = HOLDERS
) -> Iterator[tuple[int, Sent]]:
    """The sums of each client as they arrive, where no one may be missing; `why` is what an error says."""
    silent = dict.fromkeys(clients, "no sound answer")
    for client, found in asked(federation, state, job, clients):
        if isinstance(found, str):
            silent[client] = found
        else:
            silent.pop(client, None)
            yield client, found
    if silent:
        raise UserError(f"{why} ({each_reason(silent)}); run the same command again once they answer")


def securely_collected(
    federation: Federation, state: Params, job: LocalJob, clients: Sequence[int], everyone: bool = False
) -> Collected:
    """What clients' sums come to, where the server learns the total and the counts only."""
    added = secure_total(federation, state, replace(job, objective=SECURE_SUMS), clients, everyone)
    total, pairs = Sums(added.packed), sum(added.counts.values())
    if reason := total_fault(total, pairs, widths(state)):
        raise UserError(
            f"the total of {len(added.counts)} clients is refused: {reason.removeprefix('its ')}; secure "
            "aggregation cannot show whose sums are wrong: run the command again, or train without "
            "training.secure to find out"
        )
    updates = {client: Update(client, count, None) for client, count in added.counts.items() if count}
    checksums = {client: Checksums(*values[FEATURES].tolist()) for client, values in added.clear.items()}
    features = {client: checksums[client].named for client in updates}
    return Collected(total if pairs else None, updates, dict(added.refused), checksums, features)


def total_fault(total: Sums, pairs: int, sides: tuple[int, int]) -> str | None:
    """Why a total cannot be the sums of so many pairs, or None when it may be."""
    low, high = total.packed.aminmax()
    if int(low) < -LARGEST_SUM or int(high) > LARGEST_SUM:
        return "sums are larger than those of any pairs"
    if total.count != pairs * CAPTIONS_PER_IMAGE:
        return f"sums are of {total.count / CAPTIONS_PER_IMAGE:g} pairs, and {pairs} are expected"
    return total.fault(*sides)


def measure_sums(
    model: DualEncoder, params: Params, client: ClientData, job: LocalJob, secret: bytes = b""
) -> dict[str, Tensor]:
    """Sums over the pairs that a job names, from the frozen features, and the features' checksums."""
    named = client.select(job)
    others = np.setdiff1d(np.arange(len(client.train)), named) if job.data == "forget" else named[:0]
    total, checksums = Sums.none(sum(widths(params)) + 1), [0, 0]
    for place, positions in enumerate((named, others)):
        for start in range(0, len(positions), ROWS):
            image, text = map(on_grid, features(model, client.train, positions[start : start + ROWS]))
            checksums[place] += checksum(image, text, secret)
            if place == 0:
                total += Sums.of(image, text)
    return {SUMS: total.packed, FEATURES: torch.tensor([wrapped(each) for each in checksums])}


def checksum(image: Tensor, text: Tensor, secret: bytes) -> int:
    """The hashes of each pair's features, added. With a secret they say nothing to those who do not know it."""
    rows = torch.cat([image, text.flatten(1)], dim=1).int().cpu().numpy()
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=8, key=secret).digest() for row in rows)
    return sum(int.from_bytes(each, "little") for each in hashes)


def wrapped(number: int) -> int:
    """The number as 64 bits hold it, with a sign."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def features(model: DualEncoder, examples: Examples, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features of the frozen towers: image [pairs, width] and text [pairs, captions, width]."""
    chosen = [(positions, np.full(len(positions), caption)) for caption in range(examples.captions)]
    pictures, words = [], []
    for image, text, mask in examples.feed(chosen):
        pictures.append(model.image.tower(image, None, model.image.first))
        words.append(model.text.tower(text, mask, model.text.first))
    return pictures[0], torch.stack(words, dim=1)


def sums_expected(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    """Sums of the right size and count that some pairs could have."""
    image, text = widths(state)
    exact = pairs_expected(job, client, pair_count)

    def fault(update: Update) -> str | None:
        sums = Sums(update.values[SUMS])
        pairs = f"{sums.count / CAPTIONS_PER_IMAGE:g}"
        if exact is not None and sums.count != exact * CAPTIONS_PER_IMAGE:
            return f"its sums are of {pairs} pairs, and {exact} are expected"
        if sums.count % CAPTIONS_PER_IMAGE or not 0 <= sums.count <= pair_count * CAPTIONS_PER_IMAGE:
            return f"its sums are of {pairs} pairs, and it holds {pair_count}"
        return sums.fault(image, text)

    form = Value((packed_size(image + text + 1),), torch.int64, -LARGEST_SUM, LARGEST_SUM)
    return Expected(values={SUMS: form, FEATURES: CHECKSUMS}, abstains=False, fault=fault)


def measure_masked_sums(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """The same sums with masks, for secure aggregation."""
    found = measure_sums(model, params, client, job, checksum_key(client))
    sums = Sums(found[SUMS])
    return {**measure_masked(client, job, sums.packed, pairs_in(sums)), FEATURES: found[FEATURES]}


def masked_sums_expected(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    """Masked sums of the right size, and the right count where the server knows it."""
    exact = pairs_expected(job, client, pair_count)

    def fault(pairs: int) -> str | None:
        return None if exact in (None, pairs) else f"its sums are of {pairs} pairs, and {exact} are expected"

    return masked_expected(packed_size(sum(widths(state)) + 1), pair_count, fault, {FEATURES: CHECKSUMS})


def pairs_expected(job: LocalJob, client: int, pair_count: int) -> int | None:
    """Number of pairs that a job names, if the server knows it; only the client knows it for a class."""
    if job.data == "all" or job.request is None:
        return pair_count
    if isinstance(job.request, SampleRequest):
        named = len(job.request.ids)  # narrowed to the client's own
    elif isinstance(job.request, ClientRequest):
        named = pair_count if client in job.request.clients else 0
    else:
        return None
    return named if job.data == "forget" else pair_count - named


register(
    SUMS, Measurement(measure=measure_sums, expects=sums_expected, all_forget=True, adds_features=True, passes=0.0)
)
register(
    SECURE_SUMS,
    Measurement(
        measure=measure_masked_sums, expects=masked_sums_expected, all_forget=True, adds_features=True, passes=0.0
    ),
)


# --- the choice of ridge strengths ---


def choose(params: Params, federation: Federation, job: LocalJob, found: Collected) -> Ridge:
    """The strengths under which clients find their own held-out pairs best, chosen one after the other."""
    ranks = replace(job, objective=RANKS)
    scores: dict[Ridge, int] = {}

    def best(choices: Iterable[Ridge]) -> Ridge:
        tried = list(choices)
        for ridge in tried:
            if ridge not in scores:
                answers = federation.run(found.solved(params, ridge).state, ranks, sorted(found.updates))
                scores[ridge] = sum(int(update.values[RANKS]) for update in answers if not update.refused)
        return max(tried, key=scores.__getitem__)

    power = best(Ridge(power=power) for power in POWERS).power
    text = best(Ridge(text=text, power=power) for text in TEXT_STRENGTHS).text
    return best(Ridge(image=image, text=text, power=power) for image in IMAGE_STRENGTHS)


def measure_ranks(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """Reciprocal ranks of held-out pairs among themselves, both ways, added on a grid."""
    held_out = client.validation
    if not len(held_out):
        return {RANKS: torch.tensor(0)}
    tensors, captions = dict(params.tensors), range(held_out.captions)
    everyone = np.arange(len(held_out))
    pictures, words = [], []
    for image, text, mask in held_out.feed([(everyone, np.full(len(everyone), caption)) for caption in captions]):
        pictures.append(model.embed(tensors, "image", image))
        words.append(model.embed(tensors, "text", text, mask))
    similarity = torch.einsum("nd,mcd->nmc", pictures[0], torch.stack(words, dim=1))
    own = similarity.diagonal().T  # [pairs, captions]
    by_text = 1 + (similarity > own[None]).sum(0)
    by_image = 1 + (similarity > own.amax(1)[:, None, None]).sum((1, 2))
    ranks = torch.cat([by_text.flatten(), by_image])
    return {RANKS: (RANK_GRID / ranks.double()).round().long().sum()}


def ranks_expected(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    return Expected(values={RANKS: Value((), torch.int64, 0, LARGEST_SUM)}, abstains=False)


register(RANKS, Measurement(measure=measure_ranks, expects=ranks_expected, passes=1 / 3))
