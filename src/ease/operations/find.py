"""Search a run for a person's pairs: by a pattern, a list of ids or a picture, over all splits and sites."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from ease.config import Config
from ease.data.images import DECODER_ERRORS, decode_image
from ease.data.membership import Membership
from ease.data.pairs import picture_digest
from ease.errors import UserError
from ease.federation.remote import Remote
from ease.federation.search import holders_of
from ease.operations.ledger.store import Ledger
from ease.operations.lost_sites import read_lost_sites
from ease.requests.request import every_id, leaving_clients
from ease.requests.tombstones import read_tombstones
from ease.runs.answers import open_world
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.runs.world import World

SIDE = 16
"""Pictures are compared by so many blocks in each direction."""
ALIKE = 6.0
"""Mean difference of two pictures' blocks, of 255, up to which one may be a copy of the other in another format."""
PURGED = "purged"
"""The split of a pair that is known by a salted mark only."""


class HeldPair(Config):
    """One pair that a run holds, and which closed requests removed it."""

    id: str
    split: str
    """`train`, `held_out`, `validation` or `test`; `purged` if only a salted mark is left."""
    client: int | None
    name: str | None
    """Name of the client, if the data name their sites."""
    closed: tuple[str, ...]
    """Closed requests that name it, by their ids in the ledger or by the names of their answers."""
    match: str
    """How it was found: `id`, `same picture` or `similar picture`."""


def matching_ids(members: Membership, patterns: Collection[str]) -> set[str]:
    """Return ids that contain one of the patterns, or fit it if it has `*`, `?` or `[`. Case does not count."""

    def fits(pair_id: str, pattern: str) -> bool:
        text, wanted = pair_id.casefold(), pattern.casefold()
        return fnmatchcase(text, wanted) if any(each in wanted for each in "*?[") else wanted in text

    return {each for each in _all_ids(members) if any(fits(each, pattern) for pattern in patterns)}


def held_pairs(run: Run, ids: Iterable[str], match: str = "id") -> tuple[HeldPair, ...]:
    """Return where a run has some pairs. Ids that were purged are recognised by their marks."""
    known = run.known()
    if known is None:
        raise UserError(f"{run.folder}: nothing is trained here yet; finish it with `ease train`")
    members, stones = known[0], read_tombstones(run.folder)
    owner = {each: holding for holding in members.clients for each in (*holding.train_ids, *holding.validation_ids)}
    splits = {each: split for split, named in members.untrained().items() for each in named}
    splits |= {each: "train" for holding in members.clients for each in holding.train_ids}
    closed = _closed(run, members)

    def found(pair_id: str) -> HeldPair | None:
        stored = pair_id if pair_id in splits else stones.mark(pair_id)
        if stored not in splits and stored not in stones.ids:
            return None
        holding = owner.get(stored)
        return HeldPair(
            id=pair_id,
            split=PURGED if stored in stones.ids else splits[stored],
            client=None if holding is None else holding.client,
            name=None if holding is None else holding.name,
            closed=tuple(name for name, named in closed.items() if stored in named),
            match=match,
        )

    return tuple(each for each in map(found, sorted(set(ids))) if each is not None)


def pairs_like(run: Run, picture: Path) -> tuple[HeldPair, ...]:
    """Return pairs that show the same picture, or one so similar that it may be a copy of it.

    Sites are asked by a hash of the decoded picture, so there only equal pictures are found. A site never gets the
    picture. Sites that left and were purged hold nothing of the run, and those that are gone for good cannot be asked.
    """
    world = open_world(run)
    backbone = world.server.backbone
    try:
        pixels = decode_image(picture, backbone.image_size, backbone.crop).pixels
    except DECODER_ERRORS as error:
        raise UserError(f"--image {picture}: cannot be read as a picture ({error}); name an image file") from error
    same, similar = _alike(world, pixels)
    if run.config.partition.on_site and isinstance(world.federation, Remote):
        same |= holders_of(world.federation, picture_digest(pixels), set(world.federation.clients) - silent_sites(run))
    return (*held_pairs(run, same, "same picture"), *held_pairs(run, similar - same, "similar picture"))


def silent_sites(run: Run) -> frozenset[int]:
    """Return sites that nobody asks any more: they are gone for good, or left and were purged."""
    left = {client for each in run.head.releases if each.purged for client in leaving_clients(each.request)}
    return read_lost_sites(run.folder).clients | left


def _alike(world: World, pixels: np.ndarray) -> tuple[set[str], set[str]]:
    """Ids whose pictures are equal to one, and those that are similar to it."""
    pairs, own = world.evaluator.pairs, _blocks(pixels)
    same, similar = set[str](), set[str]()
    for place, pair_id in enumerate(pairs.ids):
        other = np.asarray(pairs.pixels[place])
        if np.array_equal(other, pixels):
            same.add(pair_id)
        elif np.abs(_blocks(other) - own).mean() <= ALIKE:
            similar.add(pair_id)
    return same, similar


def _blocks(pixels: np.ndarray) -> np.ndarray:
    """Means of a picture's blocks [SIDE, SIDE, 3]."""
    edges = np.linspace(0, pixels.shape[0], SIDE, endpoint=False).astype(int)
    sums = np.add.reduceat(np.add.reduceat(pixels.astype(np.float64), edges, axis=0), edges, axis=1)
    lengths = np.diff([*edges, pixels.shape[0]])
    return np.asarray(sums / (lengths[:, None, None] * lengths[None, :, None]))


def _all_ids(members: Membership) -> set[str]:
    trained = {each for holding in members.clients for each in holding.train_ids}
    return trained.union(*members.untrained().values())


def _closed(run: Run, members: Membership) -> dict[str, frozenset[str]]:
    """Name of each closed request -> ids of all pairs that it names."""
    entries = Ledger(run.folder).entries()
    found: dict[str, frozenset[str]] = {}
    for number, release in enumerate(run.head.releases, start=1):
        names: Sequence[str] = [each.id for each in entries if each.outcome.release == number]
        for name in names or [request_id(release.request)]:
            found[name] = every_id(release.request, members)
    return found
