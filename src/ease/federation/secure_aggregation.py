"""Secure aggregation of integers (Bonawitz et al., 2017): the server learns the sum over clients, and no addend.

Four rounds over any federation: clients advertise keys, send each other sealed secret shares through the server, send
masked integers, and reveal the shares that remove what does not cancel. Each round is an objective.

A client keeps one secret and derives the keys of each aggregation from it and a fresh nonce, which it advertises. It
records what it masked and what it revealed under a nonce. Under the same nonce it repeats these answers, so that a
command can be resumed, and gives no other ones.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ease.config import Config, validate
from ease.errors import ClientError, UserError
from ease.federation.check import NAMED, each_reason
from ease.federation.client import ClientData
from ease.federation.container import pack, unpack
from ease.federation.expected import Expected, Form, Value
from ease.federation.masking import (
    CARD,
    SEALED,
    SECRET,
    SHARE,
    Card,
    Keys,
    combined,
    commitment,
    derived,
    opened,
    pairwise,
    private_key,
    public_bytes,
    sealed,
    split,
    stream,
)
from ease.federation.objectives import Measurement, register
from ease.federation.protocol import Federation, LocalJob, Update
from ease.model.dual_encoder import DualEncoder
from ease.params import Params
from ease.storage import read_bytes, read_json, write_atomic, write_json

ADVERTISE = "secure: advertise keys"
EXCHANGE = "secure: share keys"
REVEAL = "secure: unmask"
KEYS, SHARES, COMMITMENTS, MASKED, ADDENDS = "keys", "shares", "commitments", "masked", "addends"
FEWEST = 2
"""Clients of an aggregation: the total of one is its own."""


def threshold(clients: int) -> int:
    """How many of so many clients must stay to the end: more than half, so that any two such groups share a client.

    A client answers for one list of survivors only. Two lists can therefore not both be unmasked.
    """
    return clients // 2 + 1


class LetterHeader(Config):
    """The facts of an aggregation that a client needs, besides cards and sealed shares."""

    kind: Literal["secure"] = "secure"
    clients: tuple[int, ...]
    """Who advertised keys, ascending."""
    threshold: int
    senders: tuple[int, ...] = ()
    """Who sent shares; these clients mask."""
    survivors: tuple[int, ...] = ()
    """Whose masked integers arrived."""


@dataclass(frozen=True)
class Letter:
    """The server's message to one client."""

    header: LetterHeader
    cards: Mapping[int, Card]
    boxes: Mapping[int, bytes]
    """Sender -> its sealed shares for this client."""

    def to_bytes(self) -> bytes:
        cards = b"".join(self.cards[client].to_bytes() for client in self.header.clients)
        tensors = {KEYS: _rows(cards, CARD)}
        if self.boxes:
            tensors[SHARES] = _rows(b"".join(self.boxes[sender] for sender in self.header.senders), SEALED)
        return pack(self.header, tensors)

    @classmethod
    def to(cls, client: int, job: LocalJob) -> "Letter":
        """The letter to one client, checked as the client must check it."""
        header, tensors = unpack(job.inbox.get(client, b""), LetterHeader, "secure aggregation")
        clients, senders, survivors = header.clients, header.senders, header.survivors
        cards, boxes = (tensors.get(name, torch.empty(0, 0)) for name in (KEYS, SHARES))
        sound = (
            sorted(set(clients)) == list(clients)
            and sorted(set(senders)) == list(senders)
            and sorted(set(survivors)) == list(survivors)
            and client in clients
            and set(survivors) <= set(senders) <= set(clients)
            and len(clients) // 2 < header.threshold <= len(clients)
            and len(clients) >= FEWEST
            and all(not group or len(group) >= header.threshold for group in (senders, survivors))
            and (cards.shape, cards.dtype) == ((len(clients), CARD), torch.uint8)
            and (not senders or (boxes.shape, boxes.dtype) == ((len(senders), SEALED), torch.uint8))
        )
        if not sound:
            raise UserError("secure aggregation: the server's message is not sound; run the same command again")
        return cls(
            header,
            {each: Card.from_bytes(row.numpy().tobytes()) for each, row in zip(clients, cards, strict=True)},
            {each: row.numpy().tobytes() for each, row in zip(senders, boxes, strict=True)} if senders else {},
        )

    @cached_property
    def session(self) -> bytes:
        """Names the aggregation: everyone who takes part, with its keys."""
        known = self.header.model_copy(update={"senders": (), "survivors": ()})
        return hashlib.sha256(Letter(known, self.cards, {}).to_bytes()).digest()

    def point(self, client: int) -> int:
        """Point at which the polynomials of secret shares are evaluated for a client."""
        return self.header.clients.index(client) + 1


# --- clients ---


class AnswerHashes(Config):
    """Hashes of a client's answers under one nonce."""

    masked: str
    """Hash of the addends and of the masking clients."""
    senders: str
    survivors: str = ""


@dataclass(frozen=True)
class Participant:
    """A client's part in an aggregation, after its keys were advertised."""

    client: int
    letter: Letter
    keys: Keys
    folder: Path

    @classmethod
    def of(cls, data: ClientData, job: LocalJob) -> "Participant":
        client, folder = data.shard.client, data.required_history.folder
        letter = Letter.to(client, job)
        keys = Keys.of(client_secret(folder), letter.cards[client].nonce)
        if keys.card != letter.cards[client]:
            raise UserError(f"client {client}: the advertised keys are not its own; run the same command again")
        return cls(client, letter, keys, folder)

    def shares(self) -> tuple[bytes, bytes]:
        """Sealed shares for everyone, and commitments to them for the server, in the order of clients."""
        known, randomness = self.letter, derived(self._polynomials, self.letter.session, b"shares")
        points = [known.point(each) for each in known.header.clients]
        secrets = self.keys.self_mask, self.keys.masking.private_bytes_raw()
        both = [
            split(secret, points, known.header.threshold, derived(randomness, b"", bytes([place])))
            for place, secret in enumerate(secrets)
        ]
        messages = [b"".join(each[point] for each in both) for point in points]
        boxes = (
            sealed(self.keys.sealing, known.cards[each].sealing, known.session, _way(self.client, each), message)
            for each, message in zip(known.header.clients, messages, strict=True)
        )
        bound = (commitment(message[:SHARE]) + commitment(message[SHARE:]) for message in messages)
        return b"".join(boxes), b"".join(bound)

    @property
    def _polynomials(self) -> bytes:
        return derived(self.keys.sealing.private_bytes_raw(), self.keys.nonce, b"polynomials")

    def opened(self) -> dict[int, bytes]:
        """Sender -> the two shares that it sent to this client."""
        if self.client not in self.letter.header.senders:
            raise UserError(f"client {self.client}: is not among those who sent shares; run the same command again")
        found = {
            sender: opened(
                self.keys.sealing,
                self.letter.cards[sender].sealing,
                self.letter.session,
                _way(sender, self.client),
                box,
            )
            for sender, box in self.letter.boxes.items()
        }
        altered = [sender for sender, message in found.items() if message is None]
        if altered:
            raise UserError(f"client {self.client}: the shares that client {altered[0]} sent were altered on the way")
        return {sender: message for sender, message in found.items() if message is not None}

    def masked(self, addends: Tensor) -> Tensor:
        """The addends with all masks, the only form in which they leave the client."""
        self.opened()  # refuse altered shares before anything is sent
        self._mask_once(addends)
        total = addends.cpu().numpy().view(np.uint64).copy()
        total += stream(self.keys.self_mask, len(total))
        for other in self.letter.header.senders:
            if other != self.client:
                key, card = self.keys.masking, self.letter.cards[other]
                total += pairwise(key, card.masking, self.letter.session, self.client < other, len(total))
        return torch.from_numpy(total.view(np.int64))

    def revealed(self) -> bytes:
        """For each sender one share: of its self-mask if it survived, else of the key of its pairwise masks."""
        survivors = set(self.letter.header.survivors)
        if self.client not in survivors:
            raise UserError(
                f"client {self.client}: is not among those who sent masked sums; run the same command again"
            )
        self._reveal_once()
        shares = self.opened()
        return b"".join(
            shares[sender][:SHARE] if sender in survivors else shares[sender][SHARE:]
            for sender in self.letter.header.senders
        )

    def _mask_once(self, addends: Tensor) -> None:
        """Record what is masked. A mask that hides two different inputs would reveal their difference."""
        senders = self._hash(repr(self.letter.header.senders).encode())
        now = AnswerHashes(masked=self._hash(senders.encode(), addends.cpu().numpy().tobytes()), senders=senders)
        before = self._before()
        if before is not None and before.masked != now.masked:
            raise UserError(
                f"client {self.client}: its pairs or the other clients changed since it masked its sums with these "
                "keys; delete the journal folder of the answer to begin with new keys"
            )
        if before is None:
            write_json(self._path, now.model_dump(mode="json"))

    def _reveal_once(self) -> None:
        """Record for which survivors shares are revealed. Two lists could reveal both masks of a client."""
        before, survivors = self._before(), self._hash(repr(self.letter.header.survivors).encode())
        if before is None or before.senders != self._hash(repr(self.letter.header.senders).encode()):
            raise UserError(f"client {self.client}: it masked nothing in this aggregation; run the same command again")
        if before.survivors not in ("", survivors):
            raise UserError(
                f"client {self.client}: it already revealed shares for another list of clients under these keys; "
                "delete the journal folder of the answer to begin with new keys"
            )
        write_json(self._path, before.model_copy(update={"survivors": survivors}).model_dump(mode="json"))

    def _before(self) -> AnswerHashes | None:
        return validate(AnswerHashes, read_json(self._path), str(self._path)) if self._path.is_file() else None

    @property
    def _path(self) -> Path:
        return self.folder / "secure" / f"{self.keys.nonce.hex()}.json"

    def _hash(self, *parts: bytes) -> str:
        return hashlib.sha256(self.letter.session + b"".join(parts)).hexdigest()


def client_secret(folder: Path) -> bytes:
    """A client's long-lived secret, made at its first use, for its owner only (0600)."""
    path = folder / "secure.key"
    if not path.exists():
        write_atomic(path, os.urandom(SECRET))
    secret = read_bytes(path, SECRET)
    if len(secret) != SECRET:
        raise UserError(f"{path}: damaged; delete it, and the journal folder of an unfinished answer")
    return secret


@contextmanager
def _fails_as_client() -> Iterator[None]:
    """Turn a user error into a client error: if a client refuses or cannot read something, the others continue without
    it."""
    try:
        yield
    except UserError as error:
        raise ClientError(str(error)) from error


@_fails_as_client()
def checksum_key(client: ClientData) -> bytes:
    """A client's key for checksums of what it masks, so that they say nothing to others."""
    return derived(client_secret(client.required_history.folder), b"", b"checksums")


@_fails_as_client()
def measure_keys(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    """Fresh keys, as they are advertised."""
    keys = Keys.of(client_secret(client.required_history.folder), os.urandom(SECRET))
    return {KEYS: _rows(keys.card.to_bytes(), CARD)[0]}


@_fails_as_client()
def measure_shares(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    boxes, commitments = Participant.of(client, job).shares()
    return {SHARES: _rows(boxes, SEALED), COMMITMENTS: _rows(commitments, 2 * SECRET)}


@_fails_as_client()
def measure_masked(client: ClientData, job: LocalJob, addends: Tensor, count: int) -> dict[str, Tensor]:
    """The measurement of the third round: masked addends, and their number in the clear."""
    return {MASKED: Participant.of(client, job).masked(addends), ADDENDS: torch.tensor(count)}


@_fails_as_client()
def measure_revealed(model: DualEncoder, params: Params, client: ClientData, job: LocalJob) -> dict[str, Tensor]:
    return {SHARES: _rows(Participant.of(client, job).revealed(), SHARE)}


def keys_expected(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    return Expected(values={KEYS: Value((CARD,), torch.uint8)}, abstains=False)


def shares_expected(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    everyone = len(Letter.to(client, job).header.clients)
    forms = {SHARES: Value((everyone, SEALED), torch.uint8), COMMITMENTS: Value((everyone, 2 * SECRET), torch.uint8)}
    return Expected(values=forms, abstains=False)


def masked_expected(length: int, pair_count: int, fault: Callable[[int], str | None], clear: Form) -> Expected:
    """Any integers, for that is what masked ones look like; `fault` judges the count that is sent with them.

    `clear` are other values that are sent without a mask.
    """
    forms = {MASKED: Value((length,), torch.int64), ADDENDS: Value((), torch.int64, 0, pair_count)}
    return Expected(values={**forms, **clear}, abstains=False, fault=lambda update: fault(int(update.values[ADDENDS])))


def revealed_expected(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    senders = len(Letter.to(client, job).header.senders)
    return Expected(values={SHARES: Value((senders, SHARE), torch.uint8)}, abstains=False)


register(ADVERTISE, Measurement(measure=measure_keys, expects=keys_expected, passes=0.0))
register(EXCHANGE, Measurement(measure=measure_shares, expects=shares_expected, passes=0.0))
register(REVEAL, Measurement(measure=measure_revealed, expects=revealed_expected, passes=0.0))


# --- the server ---


@dataclass(frozen=True)
class Total:
    """The sum over clients, and how many addends each client said that it has."""

    packed: Tensor
    counts: Mapping[int, int]
    refused: Mapping[int, str]
    clear: Mapping[int, Mapping[str, Tensor]]
    """Client -> what it sent without a mask."""


def secure_total(
    federation: Federation, state: Params, job: LocalJob, clients: Sequence[int], everyone: bool = False
) -> Total:
    """The total of what clients measure under a masked objective. Clients may drop out, unless `everyone` is needed.

    Drop-outs after the masked integers have arrived change nothing, as long as enough clients stay.
    """
    if len(clients) < FEWEST:
        raise UserError(
            f"secure aggregation: {len(clients)} client takes part, whose sums would be the total; at least {FEWEST} "
            "are needed: train without training.secure"
        )
    return Aggregation(federation, state, job, len(clients), everyone).total(sorted(clients))


@dataclass
class Aggregation:
    """One secure aggregation, as the server goes through it."""

    federation: Federation
    state: Params
    job: LocalJob
    asked: int
    everyone: bool

    def total(self, clients: Sequence[int]) -> Total:
        refused: dict[int, str] = {}
        keys = self._enough("advertised keys", self._answers(ADVERTISE, clients), refused, clients)
        cards = {client: Card.from_bytes(_bytes(update, KEYS)) for client, update in keys.items()}
        header = LetterHeader(clients=tuple(cards), threshold=threshold(self.asked))
        first = Letter(header, cards, {})
        sent = self._enough(
            "sent shares", self._answers(EXCHANGE, header.clients, lambda client: first), refused, header.clients
        )
        header = header.model_copy(update={"senders": tuple(sent)})
        boxes = {
            client: {sender: _row(sent[sender], SHARES, place) for sender in sent}
            for place, client in enumerate(header.clients)
        }
        packed, answers = self._masked(header, cards, boxes, refused)
        counts = {client: int(update.values[ADDENDS]) for client, update in answers.items()}
        header = header.model_copy(update={"survivors": tuple(sorted(counts))})
        revealed = self._enough(
            "revealed shares",
            self._answers(REVEAL, header.survivors, lambda client: Letter(header, cards, boxes[client])),
            refused,
        )
        masks = Unmasking(Letter(header, cards, {}), sent, revealed).masks(len(packed))
        clear = {client: update.values for client, update in answers.items()}
        return Total(torch.from_numpy((packed - masks).view(np.int64)), counts, refused, clear)

    def _masked(
        self,
        header: LetterHeader,
        cards: Mapping[int, Card],
        boxes: Mapping[int, Mapping[int, bytes]],
        refused: dict[int, str],
    ) -> tuple[np.ndarray, dict[int, Update]]:
        """The sum of masked integers, added as they arrive, and what each client sent with them."""
        arriving = self._answers(
            self.job.objective, header.senders, lambda client: Letter(header, cards, boxes[client])
        )
        total: np.ndarray | None = None

        def added() -> Iterable[Update]:
            nonlocal total
            for update in arriving:
                if not update.refused:
                    addend = update.values[MASKED].numpy().view(np.uint64)
                    total = addend.copy() if total is None else total + addend
                yield replace(update, values={name: each for name, each in update.values.items() if name != MASKED})

        answers = self._enough("sent masked sums", added(), refused, header.senders)
        assert total is not None  # enough of them arrived
        return total, answers

    def _answers(
        self, objective: str, clients: Sequence[int], letter: Callable[[int], Letter] | None = None
    ) -> Iterable[Update]:
        inbox = {} if letter is None else {client: letter(client).to_bytes() for client in clients}
        job = replace(self.job, objective=objective, inbox=inbox)
        if objective != self.job.objective:
            job = replace(job, request=None, data="all")  # keys and shares are of no pairs
        return self.federation.run(self.state, job, clients)

    def _enough(
        self, did: str, updates: Iterable[Update], refused: dict[int, str], needed: Sequence[int] = ()
    ) -> dict[int, Update]:
        """Answers by client, ascending; an error if they are too few to continue."""
        answers = {update.client: update for update in updates}
        refused |= {client: update.refused for client, update in answers.items() if update.refused}
        found = {client: update for client, update in sorted(answers.items()) if not update.refused}
        refused |= {client: "no sound answer" for client in needed if client not in found and client not in refused}
        least = self.asked if self.everyone and needed else threshold(self.asked)
        if len(found) < least:
            silent = each_reason(dict(sorted(refused.items())[:NAMED]))
            raise UserError(
                f"secure aggregation: {len(found)} of {self.asked} clients {did} and {least} are needed"
                f"{f' ({silent})' if silent else ''}; run the same command again once they answer"
            )
        return found


@dataclass(frozen=True)
class Unmasking:
    """Removes the masks that do not cancel, by the shares that survivors revealed."""

    letter: Letter
    sent: Mapping[int, Update]
    """Sender -> its answer with commitments to its shares."""
    revealed: Mapping[int, Update]
    """Survivor -> its shares, one of each sender."""

    def masks(self, length: int) -> np.ndarray:
        """Self-masks of survivors, and survivors' pairwise masks with those who dropped out."""
        header, total = self.letter.header, np.zeros(length, dtype=np.uint64)
        for place, sender in enumerate(header.senders):
            survived = sender in header.survivors
            secret = self._secret(sender, place, survived)
            if survived:
                total += stream(secret, length)
                continue
            for survivor in header.survivors:
                other = self.letter.cards[survivor].masking
                total += pairwise(private_key(secret), other, self.letter.session, survivor < sender, length)
        return total

    def _secret(self, sender: int, place: int, survived: bool) -> bytes:
        """A client's self-mask seed or masking key, from shares that are those it committed to."""
        shares: dict[int, bytes] = {}
        for client, update in self.revealed.items():
            share = _row(update, SHARES, place)
            bound = _row(self.sent[sender], COMMITMENTS, self.letter.header.clients.index(client))
            if commitment(share) == (bound[:SECRET] if survived else bound[SECRET:]):
                shares[self.letter.point(client)] = share
        needed = self.letter.header.threshold
        if len(shares) < needed:
            false = sorted(set(self.revealed) - {self.letter.header.clients[point - 1] for point in shares})
            raise UserError(
                f"secure aggregation: {len(shares)} sound shares of client {sender}'s secret arrived and {needed} "
                f"are needed (false shares from {', '.join(f'client {each}' for each in false[:NAMED])}); run the same "
                "command again"
            )
        secret, card = combined(dict(list(shares.items())[:needed])), self.letter.cards[sender]
        found = None if secret is None else commitment(secret) if survived else public_bytes(secret)
        if secret is None or found != (card.commitment if survived else card.masking):
            raise UserError(
                f"secure aggregation: client {sender} shared another secret than it masked with; run the same command "
                "again"
            )
        return secret


def _way(sender: int, recipient: int) -> bytes:
    return f"{sender} to {recipient}".encode()


def _rows(data: bytes, width: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, width)


def _bytes(update: Update, name: str) -> bytes:
    return update.values[name].numpy().tobytes()


def _row(update: Update, name: str, place: int) -> bytes:
    return update.values[name][place].numpy().tobytes()
