"""Membership: which client holds which pair, by id, stored when a run is trained."""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from ease.config import Config
from ease.data.pairs import PairSet
from ease.data.partition import Shard
from ease.errors import UserError

NAMED_IN_MESSAGE = 3


class Joining(Config):
    """How pairs joined a trained run."""

    after_round: int
    after_releases: int
    """How many requests were closed by then: answers to those know nothing of these pairs."""
    owner: int | None
    """The client whose later pairs these are; None: a new client."""
    returned: int
    """How many of the pairs had been forgotten before."""
    consent: str
    """Hash of who consented, when and in which words; the ledger has the words."""


class Holding(Config):
    """One client's pairs by their ids, and the pseudo-class of each."""

    client: int
    name: str | None = None
    """What people call it, where the data name their sites."""
    train_ids: tuple[str, ...]
    train_classes: tuple[int, ...]
    validation_ids: tuple[str, ...]
    validation_classes: tuple[int, ...]
    joined: Joining | None = None
    """None: it was there when the run was first trained."""


class Membership(Config):
    """All pairs of a run with owner, split, pseudo-class and content hash."""

    format: Literal[1] = 1
    clients: tuple[Holding, ...]
    test: tuple[str, ...]
    validation: tuple[str, ...]
    """Pairs that no client holds."""
    digests: dict[str, str]
    """Id -> hash of the pair's picture and captions."""

    def named(self, client: int) -> str:
        """The name of a client, or its number."""
        found = next(holding.name for holding in self.clients if holding.client == client)
        return str(client) if found is None else found

    @property
    def names(self) -> dict[int, str]:
        """Clients that have a name, by their numbers."""
        return {holding.client: holding.name for holding in self.clients if holding.name is not None}

    def untrained(self) -> dict[str, frozenset[str]]:
        """Split -> ids of its pairs, which no client trains on: held out by clients, for validation and for testing."""
        held_out = frozenset(each for holding in self.clients for each in holding.validation_ids)
        return {"held_out": held_out, "validation": frozenset(self.validation), "test": frozenset(self.test)}

    def owned(self, clients: Collection[int]) -> set[int]:
        """Clients together with the numbers under which they added pairs later."""
        later = {each.client: each.joined.owner for each in self.clients if each.joined is not None}
        return {*clients, *(number for number, owner in later.items() if owner in clients)}

    def before(self, releases: int) -> "Membership":
        """The membership after this number of releases, without clients that joined later."""
        there = [each for each in self.clients if each.joined is None or each.joined.after_releases <= releases]
        return self.model_copy(update={"clients": tuple(there)})


def membership_of(pairs: PairSet, shards: Sequence[Shard]) -> Membership:
    """The membership of shards, by id."""

    def ids(positions: np.ndarray) -> tuple[str, ...]:
        return tuple(pairs.ids[position] for position in positions)

    holdings = tuple(
        Holding(
            client=shard.client,
            name=shard.name,
            train_ids=shard.train_ids,
            train_classes=tuple(shard.train_classes.tolist()),
            validation_ids=ids(shard.validation),
            validation_classes=tuple(shard.validation_classes.tolist()),
        )
        for shard in shards
    )
    return Membership(
        clients=holdings,
        test=ids(pairs.indices("test")),
        validation=ids(pairs.indices("validation")),
        digests=dict(zip(pairs.ids, pairs.digests, strict=True)),
    )


def shards_of(membership: Membership, pairs: PairSet, forgotten: Collection[str] = ()) -> tuple[Shard, ...]:
    """The clients' pairs as positions in what is there now; pairs in `forgotten` may have vanished, others may not.

    Pairs that came after the training belong to no one here.
    """
    position = {pair_id: place for place, pair_id in enumerate(pairs.ids)}
    _check_present(membership, pairs, position, forgotten)
    shards = []
    for holding in membership.clients:
        places = np.array([n for n, each in enumerate(holding.train_ids) if each in position], dtype=np.int64)
        held_out = [n for n, each in enumerate(holding.validation_ids) if each in position]
        shards.append(
            Shard(
                client=holding.client,
                train=np.array([position[holding.train_ids[n]] for n in places], dtype=np.int64),
                validation=np.array([position[holding.validation_ids[n]] for n in held_out], dtype=np.int64),
                train_ids=tuple(holding.train_ids[n] for n in places),
                train_classes=np.array(holding.train_classes, dtype=np.int64)[places],
                validation_classes=np.array(holding.validation_classes, dtype=np.int64)[held_out],
                name=holding.name,
                places=places,
                dealt=len(holding.train_ids),
                validation_ids=tuple(holding.validation_ids[n] for n in held_out),
            )
        )
    return tuple(shards)


def positions_of(ids: Sequence[str], pairs: PairSet) -> np.ndarray:
    """Positions of some ids in the pair set, ascending; missing ones are left out."""
    wanted = set(ids)
    return np.array([place for place, pair_id in enumerate(pairs.ids) if pair_id in wanted], dtype=np.int64)


def _check_present(
    membership: Membership, pairs: PairSet, position: dict[str, int], forgotten: Collection[str]
) -> None:
    """Refuse other data than those of the training: a missing pair that no one asked to forget, or changed content."""
    may_go = set(forgotten)
    missing = [each for each in membership.digests if each not in position and each not in may_go]
    changed = [
        each
        for each, known in membership.digests.items()
        if each in position and pairs.digests[position[each]] != known
    ]
    for ids, what in ((missing, "are missing"), (changed, "have changed")):
        if ids:
            more = "" if len(ids) <= NAMED_IN_MESSAGE else f" and {len(ids) - NAMED_IN_MESSAGE} more"
            raise UserError(
                f"{len(ids)} of the {len(membership.digests)} pairs this run was trained with {what} "
                f"({', '.join(ids[:NAMED_IN_MESSAGE])}{more}); restore them, or ask for them to be forgotten first"
            )
