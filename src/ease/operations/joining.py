"""Pairs that come to a run after it was trained: of a client that joins, that joins again, or that has more by now.

A joining client is always new and has its own number. Earlier rounds stay as they were, and later requests find its
contribution. Nobody comes without a consent in the ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ease.data.membership import Holding, Joining, Membership
from ease.data.pairs import PairSet
from ease.data.partition import MINIMUM_PAIRS, set_aside
from ease.errors import UserError
from ease.federation.engines import remote_engine
from ease.federation.enrolment import check_distinct, enrolled_later
from ease.federation.wire import Deal
from ease.operations.evidence import attest
from ease.operations.ledger.names import check_accepted
from ease.operations.ledger.records import Consent, check_text, now, stamp
from ease.operations.ledger.store import Ledger
from ease.operations.ledger.work import worker_lock
from ease.requests.request import ClassRequest, every_id, leaving_clients
from ease.requests.tombstones import NAME as TOMBSTONES
from ease.requests.tombstones import Tombstones, as_json, read_tombstones
from ease.runs.answers import open_world, trained_of
from ease.runs.joined import extend
from ease.runs.resolve import find_clients
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import remove_leftovers, write_json
from ease.trainers import trainer_of


@dataclass(frozen=True)
class JoinRequest:
    """Which pairs are to come, and whose they are. With nothing named: all in the data that are no one's yet."""

    consent: str
    """The consent in the words of the person who gives it."""
    by: str
    site: str | None = None
    """Only pairs that the data say are of this site."""
    ids: frozenset[str] = frozenset()
    """Only these pairs."""
    owner: str | None = None
    """The client whose later pairs they are; absent: a client that was not there."""
    again_after: str | None = None
    """The client that left, and whose purged pairs the consent covers."""


@dataclass(frozen=True)
class Joined:
    """A client as it came."""

    holding: Holding
    consent: Consent
    left_out: int = 0
    """Pairs of a kind that was forgotten, which stay out."""
    added: bool = True
    """Whether it came just now."""


def join(run: Run, asked: JoinRequest) -> Joined:
    """Add a client to who holds what; the same asked again finds it there.

    Further rounds train with it. A closed-form head has no further rounds: the client's sums are added at once.
    """
    if not asked.consent.strip():
        raise UserError("--consent: nobody joins without one; write who agreed to what")
    check_text("consent", asked.consent)
    check_text("by", asked.by)
    with worker_lock(run.folder), run.locked():
        remove_leftovers(run.folder)
        members = _ready(run)
        joined = _known_already(run, members, asked) or _added(run, members, asked)
        if trainer_of(run.config.model) == "sums":
            extend(run, open_world(run))  # also after a process that was killed before it
        attest(run)
    return joined


def _ready(run: Run) -> Membership:
    """Who holds what, once nothing is open that began without the newcomer."""
    trained_of(run)
    if note := run.unfinished_note():  # it would continue with other clients than it began with
        raise UserError(f"{note}; a client joins after that")
    if run.config.data.canaries:
        raise UserError(f"{run.folder}: has canaries, which are drawn anew when the data grow; train without them")
    Ledger(run.folder).check_idle()
    answers = [path for path in sorted(run.folder.glob("requests/*/*")) if path.is_dir()]
    begun = [path for path in answers if not (path / "record.json").is_file()]
    if begun:
        raise UserError(f"{begun[0]}: is not finished; run the same `ease forget` again, or delete the folder")
    if names := run.unreleased():
        check_accepted(run.folder, names[0])
        raise UserError(
            f"{run.folder}: {names[0]} was answered but not released; first release it with "
            f"`ease release {run.folder} --request {names[0]}`, or delete its folder"
        )
    known = run.known()
    assert known is not None  # it is trained
    return known[0]


def _known_already(run: Run, members: Membership, asked: JoinRequest) -> Joined | None:
    """Who came by the same wish, where no more pairs than came then are named now."""
    consents = {each.client: each for each in Ledger(run.folder).consents()}
    for holding in members.clients:
        consent = consents.get(holding.client)
        if holding.joined is None or consent is None or consent.content_hash != holding.joined.consent:
            continue
        same = (consent.text, consent.given_by) == (asked.consent, asked.by)
        whole = asked.ids == {*holding.train_ids, *holding.validation_ids} if asked.ids else None
        apart = run.config.partition.on_site  # a site comes once, with all that it has
        if same and (apart or whole or (whole is None and not _pool(run, members, asked).named(asked))):
            return Joined(holding, consent, added=False)
    return None


def _added(run: Run, members: Membership, asked: JoinRequest) -> Joined:
    return _from_its_site(run, members, asked) if run.config.partition.on_site else _from_the_data(run, members, asked)


def _from_the_data(run: Run, members: Membership, asked: JoinRequest) -> Joined:
    """A client of pairs that are stored with all others."""
    if run.config.remote:
        raise UserError(
            f"{run.folder}: its nodes deal the data among the clients of the configuration, and a new one has no node; "
            'use engine = "sequential", or partition.scheme = "on_site", where each site has its own pairs'
        )
    pool = _pool(run, members, asked)
    number, owner = 1 + max(holding.client for holding in members.clients), _owner(run, members, asked)
    ids = pool.named(asked)
    for each in ids:
        if reason := pool.bar(each):
            raise UserError(f"{each}: {reason}")
    positions = np.array([pool.places[each] for each in ids], dtype=np.int64)
    classes = pool.world.evaluator.classes_of(positions)
    kept = ~np.isin(classes, _closed_classes(run))
    if kept.sum() < MINIMUM_PAIRS:
        raise UserError(
            f"{run.folder}: {int(kept.sum())} pairs could join, and a client needs {MINIMUM_PAIRS}; put new ones into "
            "the data, or name some with --samples (pairs that were forgotten and purged need --again-after)"
        )
    ids, classes = [each for each, keep in zip(ids, kept, strict=True) if keep], classes[kept]
    train, validation = _as_before(run, members, asked, pool.stones, ids)
    fresh = np.setdiff1d(np.arange(len(ids)), np.concatenate([train, validation]))
    if len(fresh):
        parts = set_aside(fresh, run.config.partition.validation_share, run.config.seed, number)
        train, validation = (np.sort(np.concatenate(each)) for each in zip((train, validation), parts, strict=True))
    contents = {each: pool.pairs.digests[pool.places[each]] for each in ids}
    holding = Holding(
        client=number,
        name=_name(members, asked, owner, number),
        train_ids=tuple(ids[place] for place in train),
        train_classes=tuple(classes[train].tolist()),
        validation_ids=tuple(ids[place] for place in validation),
        validation_classes=tuple(classes[validation].tolist()),
    )
    return _written(run, members, asked, holding, owner, contents, int((~kept).sum()))


def _as_before(
    run: Run, members: Membership, asked: JoinRequest, stones: Tombstones, ids: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of pairs that return: those that were trained on, and those that were held out.

    They keep their part, so that a closed-form head gets back the sums that it had before the client left.
    """
    parts: tuple[set[str], set[str]] = (set(), set())
    if asked.again_after is not None:
        client = _one(members, asked.again_after, "--again-after")
        left = next(each for each in members.clients if each.client == client)
        parts = set(left.train_ids), set(left.validation_ids)
    marks = [stones.mark(each) for each in ids]
    train, validation = (
        np.array([place for place, mark in enumerate(marks) if mark in part], dtype=np.int64) for part in parts
    )
    return train, validation


def _from_its_site(run: Run, members: Membership, asked: JoinRequest) -> Joined:
    """A client whose pairs are at its own node, which deals them and reports their ids and classes.

    It is asked twice: nothing is kept at the site before the server has agreed.
    """
    if asked.ids or asked.site is not None or asked.owner is not None:
        raise UserError("--samples, --site and --of: a new site joins with all that its node opens; leave them out")
    number, world, config = 1 + max(holding.client for holding in members.clients), open_world(run), run.config
    none: dict[int, tuple[str, ...]] = {number: ()}
    place, backbone = config.federation_folder, world.server.backbone.fingerprint
    remote = remote_engine(config.engine, place, run.name, none, none, (), 0, backbone, config.training.deadline)
    deal = Deal(
        classes=len(world.server.centroids),
        class_seed=config.data.seed,
        seed=config.seed,
        validation_share=config.partition.validation_share,
        closed=tuple(_closed_classes(run)),
    )
    enrolled = enrolled_later(remote, deal.model_copy(update={"dry_run": True}), world.server.centroids)
    stones, covered, gone = read_tombstones(run.folder), _covered(run, members, asked), _gone(run, members)
    for each in (*enrolled.train_ids, *enrolled.validation_ids):
        if each in gone:
            raise UserError(f"{each}: {_unpurged(run.folder)}")
        if stones.bars(each) and stones.mark(each) not in covered:
            raise UserError(f"{each}: {PURGED}")
        if each in members.test:
            raise UserError(f"{each}: is for testing; give it another id at the site, or take it out there")
    check_distinct((*members.clients, enrolled))
    holding = enrolled_later(remote, deal, world.server.centroids)
    if holding != enrolled:
        raise UserError(
            f"client {number}: its node now reports other pairs than at the first call; run the same command again"
        )
    return _written(run, members, asked, holding, None, {}, 0)


def _written(
    run: Run,
    members: Membership,
    asked: JoinRequest,
    holding: Holding,
    owner: int | None,
    contents: Mapping[str, str],
    left_out: int,
) -> Joined:
    """Keep who came, with the consent; `contents` are hashes of pairs, where the server has them."""
    ids, stones = (*holding.train_ids, *holding.validation_ids), read_tombstones(run.folder)
    returned = [each for each in ids if stones.bars(each)]
    given = Consent(
        client=holding.client,
        time=stamp(now()),
        given_by=asked.by,
        text=asked.consent,
        pairs=len(ids),
        returned=len(returned),
    )
    joined = Joining(
        after_round=run.history.rounds(),
        after_releases=len(run.head.releases),
        owner=owner,
        returned=len(returned),
        consent=given.content_hash,
    )
    holding = holding.model_copy(update={"joined": joined})
    Ledger(run.folder).record_consent(given)
    if returned:
        allowed = stones.without(returned, [contents[each] for each in returned if each in contents])
        write_json(run.folder / TOMBSTONES, as_json(allowed))
    grown = members.model_copy(
        update={
            "clients": (*members.clients, holding),
            "validation": tuple(each for each in members.validation if each not in contents),
            "digests": {**members.digests, **contents},
        }
    )
    write_json(run.folder / "membership.json", grown.model_dump(mode="json"))  # last: it makes the rest count
    return Joined(holding, given, left_out)


def _closed_classes(run: Run) -> list[int]:
    return sorted({label for each in run.head.gone if isinstance(each, ClassRequest) for label in each.classes})


PURGED = "was forgotten; it can return only as a new client's pair, with --again-after and the client that left"


def _unpurged(folder: Path) -> str:
    return f"was forgotten here and what it left is not purged yet; first run: ease purge {folder}"


@dataclass(frozen=True)
class Pool:
    """All pairs in the data of a run, and why some of them cannot join."""

    folder: Path
    members: Membership
    world: World
    """With the purged pairs in it that the consent covers."""
    stones: Tombstones
    covered: frozenset[str]
    """Marks of those."""
    gone: frozenset[str]
    """Ids of pairs that were forgotten and not purged."""

    @property
    def pairs(self) -> PairSet:
        return self.world.evaluator.pairs

    @cached_property
    def places(self) -> dict[str, int]:
        return {pair_id: place for place, pair_id in enumerate(self.pairs.ids)}

    @cached_property
    def holders(self) -> dict[str, int]:
        return {
            pair_id: holding.client
            for holding in self.members.clients
            for pair_id in (*holding.train_ids, *holding.validation_ids)
        }

    @cached_property
    def forgotten(self) -> set[str]:
        """Contents of pairs that are not purged yet."""
        return {self.members.digests[each] for each in self.gone if each in self.members.digests}

    def named(self, asked: JoinRequest) -> list[str]:
        """Ids that a wish names, in the order of the data; those that are not there last."""
        if asked.ids:
            named = [each for each in self.pairs.ids if each in asked.ids] + sorted(asked.ids - set(self.pairs.ids))
        else:
            named = [each for each in self.pairs.ids if each not in self.members.digests and self._trains(each)]
        if asked.site is None:
            return named
        return [each for each in named if each in self.places and self._site(each) == asked.site]

    def _trains(self, pair_id: str) -> bool:
        return self.pairs.splits[self.places[pair_id]] == "train"

    def _site(self, pair_id: str) -> str | None:
        return self.pairs.sites[self.places[pair_id]] if self.pairs.sites else None

    def bar(self, pair_id: str) -> str:
        """Why a pair cannot join; nothing when it can."""
        if pair_id in self.gone:
            return _unpurged(self.folder)
        if pair_id not in self.places and self.stones.bars(pair_id):
            return PURGED
        if pair_id not in self.places:
            return "no such pair in the data of this run; put it there first"
        if pair_id in self.holders:
            return f"client {self.members.named(self.holders[pair_id])} holds it already; leave it out"
        if pair_id in self.members.test or self.pairs.splits[self.places[pair_id]] == "test":
            return "is for testing; leave it out"
        content = self.pairs.digests[self.places[pair_id]]
        known = self.stones.bars(pair_id, content) or content in self.forgotten
        if known and self.stones.mark(pair_id) not in self.covered:
            return "shows what was forgotten under another id; leave it out"
        return ""


def _pool(run: Run, members: Membership, asked: JoinRequest) -> Pool:
    stones, covered = read_tombstones(run.folder), _covered(run, members, asked)
    world = open_world(run, stones=stones.model_copy(update={"ids": stones.ids - covered}))
    return Pool(run.folder, members, world, stones, covered, _gone(run, members))


def _gone(run: Run, members: Membership) -> frozenset[str]:
    """Ids of pairs that were forgotten and are not purged."""
    gone = {each for request in run.head.gone for each in every_id(request, members)}
    if run.config.partition.on_site:  # where no content of theirs is known
        return frozenset(gone - read_tombstones(run.folder).ids)
    return frozenset(gone & members.digests.keys())


def _left(run: Run) -> set[int]:
    """Clients that withdrew."""
    return {each for request in run.head.gone for each in leaving_clients(request)}


def _covered(run: Run, members: Membership, asked: JoinRequest) -> frozenset[str]:
    """Marks of the purged pairs that the consent names."""
    if asked.again_after is None:
        return frozenset()
    client = _one(members, asked.again_after, "--again-after")
    if client not in _left(run):
        raise UserError(f"--again-after {asked.again_after}: this client has not left; leave the option out")
    holding = next(each for each in members.clients if each.client == client)
    return read_tombstones(run.folder).ids & {*holding.train_ids, *holding.validation_ids}


def _owner(run: Run, members: Membership, asked: JoinRequest) -> int | None:
    """The client to whom the new pairs belong: the given one, or that of the site if it still takes part."""
    if asked.owner is not None:
        client = _one(members, asked.owner, "--of")
        if client in _left(run):
            raise UserError(f"--of {asked.owner}: this client has left; what it brings now is a new client's")
        return client
    same = [each.client for each in members.clients if asked.site is not None and each.name == asked.site]
    return next((client for client in same if client not in _left(run) and asked.again_after is None), None)


def _one(members: Membership, named: str, option: str) -> int:
    found = find_clients(members, [named])
    holdings = [each for each in members.clients if each.client in found]
    first = [each.client for each in holdings if each.joined is None or each.joined.owner not in found]
    if len(first) != 1:
        raise UserError(f"{option} {named}: no such client in this run")
    return first[0]


def _name(members: Membership, asked: JoinRequest, owner: int | None, number: int) -> str | None:
    """What people call it: its site, with its number where the site has another one."""
    names = {holding.client: holding.name for holding in members.clients}
    name = asked.site if owner is None else names[owner]
    return f"{name} ({number})" if name is not None and name in names.values() else name
