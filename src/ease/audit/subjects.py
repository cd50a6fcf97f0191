"""The pairs that an audit looks at: forget pairs, unseen pairs that resemble them, and a pool of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ease.data.partition import Shard
from ease.errors import UserError
from ease.measures.ranks import FEW
from ease.requests.request import Request, forget_mask
from ease.runs.evaluation import evaluation_sets
from ease.runs.resolve import named_ids
from ease.runs.world import World
from ease.seeding import generator

Readings = Mapping[str, np.ndarray]
"""Statistic -> values [pairs], or [pairs, shadows]."""
MOST_MISMATCH = 0.1
"""Total variation distance allowed between the class mix of the forget pairs and that of the non-members."""


@dataclass(frozen=True)
class Candidates:
    """The pairs whose membership is tested: forget pairs, and pairs like them that the target never saw."""

    positions: np.ndarray
    member: np.ndarray
    """bool [n]: trained on by the target."""
    home: np.ndarray
    """The client that holds each, or would hold it."""
    classes: np.ndarray
    ids: tuple[str, ...]
    mismatch: float
    """Total variation distance of the class mixes of members and non-members."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def members(self) -> int:
        return int(self.member.sum())

    @property
    def others(self) -> int:
        return len(self) - self.members

    def why_no_attack(self, fewest: int = FEW) -> str:
        """Why attacks are impossible; empty if they are possible."""
        if self.members < fewest:
            return f"attacks compare many pairs, {fewest} at least, and the request names {self.members}"
        if self.others < 2:
            return (
                f"attacks compare forget pairs with pairs of no client, and {self.others} of those are of the forget "
                "pairs' pseudo-classes"
            )
        return ""

    def included(self, shadow: int, seed: int) -> np.ndarray:
        """Which candidates a shadow trains on: bool [n].

        Shadows 2j and 2j + 1 are complementary, so every pair is in exactly half of any even number of them, and more
        shadows can be added later. Coin flips would leave some pairs without a shadow on one side.
        """
        drawn = generator(seed, "shadow", shadow // 2).permutation(len(self)) < len(self) / 2
        return drawn if shadow % 2 == 0 else ~drawn


def choose_candidates(
    shards: Sequence[Shard],
    request: Request,
    others: np.ndarray,
    other_classes: np.ndarray,
    ids: Sequence[str],
    seed: int,
) -> Candidates:
    """Forget pairs and as many of `others`, which no client holds, as have the same mix of pseudo-classes.

    There may be few of either kind; `why_no_attack` reports whether they suffice for attacks.
    Non-members of another mix would let an attack score by telling the classes apart. Each gets a home where pairs of
    its class are forgotten, since shadows train on it there.
    """
    rng = generator(seed, "candidates")
    masks = [forget_mask(request, shard) for shard in shards]
    forget = np.concatenate([shard.train[mask] for shard, mask in zip(shards, masks, strict=True)])
    classes = np.concatenate([shard.train_classes[mask] for shard, mask in zip(shards, masks, strict=True)])
    home = np.concatenate([np.full(mask.sum(), shard.client) for shard, mask in zip(shards, masks, strict=True)])
    if not len(forget):
        raise UserError("the request names no pair that a client holds: there is nothing to measure")
    order = rng.permutation(len(others))
    chosen = order[match_classes(classes, other_classes[order])]
    homes = np.array([rng.choice(home[classes == label]) for label in other_classes[chosen]], dtype=home.dtype)
    return Candidates(
        positions=np.concatenate([forget, others[chosen]]),
        member=np.arange(len(forget) + len(chosen)) < len(forget),
        home=np.concatenate([home, homes]),
        classes=np.concatenate([classes, other_classes[chosen]]),
        ids=tuple(ids[position] for position in np.concatenate([forget, others[chosen]])),
        mismatch=_mismatch(classes, other_classes[chosen]) if len(chosen) else 0.0,
    )


def match_classes(wanted: np.ndarray, available: np.ndarray) -> np.ndarray:
    """As many indices into `available` classes as keep their mix within `MOST_MISMATCH` of the wanted one."""
    shares = np.bincount(wanted, minlength=int(available.max(initial=0)) + 1) / len(wanted)
    places = {label: np.flatnonzero(available == label) for label in np.flatnonzero(shares)}
    for total in range(len(available), 0, -1):
        kept = [place[: round(shares[label] * total)] for label, place in places.items()]
        chosen = np.concatenate(kept)
        if len(chosen) and _mismatch(wanted, available[chosen]) <= MOST_MISMATCH:
            return np.sort(chosen)
    return np.zeros(0, dtype=np.int64)


def _mismatch(a: np.ndarray, b: np.ndarray) -> float:
    size = int(max(a.max(), b.max())) + 1
    shares = [np.bincount(labels, minlength=size) / len(labels) for labels in (a, b)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


@dataclass(frozen=True)
class Subjects:
    """The pairs that an audit measures."""

    candidates: Candidates
    population: np.ndarray
    """Further pairs that no model saw, of any class."""
    pool: np.ndarray

    @classmethod
    def of(cls, world: World, request: Request, pool: int) -> "Subjects":
        """Split the pairs of no client into the pool, the matched non-members and the rest."""
        world.check_together("an attack by shadows")
        named = len(named_ids(world.server.membership, request))
        there = sum(int(forget_mask(request, shard).sum()) for shard in world.evaluator.shards)
        if there < named:
            raise UserError(
                f"{named - there} of the {named} photographs of this request have vanished: what a model holds of "
                "them cannot be measured any more; audit a request before its data are deleted"
            )
        spare = np.concatenate([world.evaluator.spare, world.evaluator.test])
        if len(spare) < pool + 2:
            raise UserError(
                f"the audit's pool of {pool} pairs and its non-members come from validation and test pairs, and there "
                f"are {len(spare)}: lower --pool or add pairs"
            )
        order = generator(world.config.seed, "audit pool").permutation(spare)
        rest = np.sort(order[pool:])
        shards, others = _comparable(world, request, rest)
        candidates = choose_candidates(
            shards,
            request,
            others,
            world.evaluator.classes_of(others),
            world.evaluator.pairs.ids,
            world.config.seed,
        )
        return cls(candidates, np.setdiff1d(rest, candidates.positions), np.sort(order[:pool]))

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([self.candidates.positions, self.population])

    def split(self, read: Readings) -> tuple[Readings, Readings]:
        """Readings of the candidates, and of the population."""
        count = len(self.candidates)
        return {k: v[:count] for k, v in read.items()}, {k: v[count:] for k, v in read.items()}


def _comparable(world: World, request: Request, unseen: np.ndarray) -> tuple[Sequence[Shard], np.ndarray]:
    """Whose membership can be tested, and the pairs of no client to compare with: data with data, canaries with
    canaries, because a mismatched pair is easy to distinguish from others."""
    canaries = world.evaluator.canaries
    if not len(canaries):
        return world.shards, unseen
    if np.isin(evaluation_sets(world, request)["forget"], canaries).all():
        return world.shards, np.setdiff1d(canaries, np.concatenate([shard.train for shard in world.evaluator.shards]))
    return [shard.keep(~np.isin(shard.train, canaries)) for shard in world.shards], unseen
