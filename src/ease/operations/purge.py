"""Purge: what a closed request left on disk is removed, or made again as if its pairs had never been there.

A client's update that is merely deleted follows from the states around its round, the other updates and the counts of
pairs. So every state it had a part in is made again from what stays: round by round the mean of the updates that are
left, those of clients that hold forgotten pairs repeated without them. This is w_t without the forget contribution of
the rounds so far, and it contains nothing of what is gone. Updates that are not
stored are made from the new states instead, because later requests begin there.

One release is purged at a time, oldest first. Everything new is written beside the run; `plan.json`, written last, says
what takes which place and what goes. Until it is there nothing has happened; once it is there, only its steps are left,
and each can be repeated.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ease.config import Config, validate
from ease.data.features import cached_files
from ease.data.membership import Membership
from ease.errors import UserError
from ease.federation.engines import remote_engine
from ease.federation.fedavg import Round, average
from ease.federation.flower import rewritten_database
from ease.federation.history import AVERAGED, ROUNDS, History
from ease.federation.middleware import Guarded
from ease.federation.protocol import Replay, Update
from ease.federation.purging import purge_nodes
from ease.federation.wire import PurgeReply
from ease.methods.ease.replay import REPLAY, read_sum
from ease.operations.lost_sites import read_lost_sites
from ease.params import Params
from ease.requests.request import Request, SampleRequest, every_id, forget_mask, leaving_clients, named_in
from ease.requests.tombstones import NAME as TOMBSTONES
from ease.requests.tombstones import Tombstones, as_json, read_tombstones
from ease.runs.answers import BASE, open_world, start_hash, trained_of
from ease.runs.head import Release, ReleaseChain
from ease.runs.resolve import request_id
from ease.runs.run import PURGING, Run
from ease.runs.world import World
from ease.storage import digest, read_json, remove_leftovers, replace_file, write_json
from ease.subspace import ServerLock

RECORD = "purge.json"
PLAN = "plan.json"
KEPT_WITH_CLIENTS = (
    "the server's states, because the server has no updates: the removed contribution follows from them only "
    "together with the files of every other client"
)


class Item(Config):
    """One thing and why."""

    what: str
    why: str


class PurgePass(Config):
    """Record of the purge of one release."""

    request: Request
    time: str
    removed: tuple[Item, ...]
    rederived: tuple[Item, ...]
    stayed: tuple[Item, ...]


class PurgeRecord(Config):
    """What every purge of a run removed, made again and left, oldest first."""

    format: Literal[1] = 1
    passes: tuple[PurgePass, ...] = ()


class PurgePlan(Config):
    """The remaining work once everything new is written."""

    replaced: tuple[str, ...]
    """Files under the staging folder whose places in the run have the same names."""
    removed: tuple[str, ...]
    """Files and folders, under the run or, absolute, in the cache."""
    done: PurgePass
    nodes: bool = False
    """Whether nodes must still purge, before anything else is done."""


@dataclass(frozen=True)
class Staged:
    """A folder beside the run's files in which their successors are written."""

    run: Run

    @property
    def folder(self) -> Path:
        return self.run.folder / PURGING

    @property
    def plan_path(self) -> Path:
        return self.folder / PLAN

    def files(self) -> list[str]:
        """The written files, by their later names in the run."""
        skipped = {self.folder / "journal", self.folder / "initial.safetensors"}
        found = [
            path for path in sorted(self.folder.rglob("*")) if path.is_file() and not skipped & {path, *path.parents}
        ]
        return [path.relative_to(self.folder).as_posix() for path in found]


def read_purges(folder: Path) -> PurgeRecord:
    path = folder / RECORD
    return validate(PurgeRecord, read_json(path), str(path)) if path.is_file() else PurgeRecord()


def unpurged(head: ReleaseChain) -> tuple[Release, ...]:
    return tuple(release for release in head.releases if not release.purged)


def purge(folder: Path, until: int | None = None, time: str = "") -> Iterator[PurgePass]:
    """Purge released requests, oldest first, the first so many releases or all; resumes an interrupted purge."""
    run = Run.load(folder, purging=True)
    with run.locked():
        staged = Staged(run)
        if staged.plan_path.is_file():
            yield _apply(staged)
        while True:
            head = run.head
            left = [number for number, each in enumerate(head.releases[:until]) if not each.purged]
            if not left:
                shutil.rmtree(staged.folder, ignore_errors=True)  # of a process killed at its very end
                return
            _stage(staged, head, left[0], time, until)
            yield _apply(staged)


def _stage(staged: Staged, head: ReleaseChain, place: int, time: str, until: int | None) -> None:
    """Write everything that will take the place of something, and then the plan.

    Rounds before a training from the start that is purged with it need not be made again: nothing builds on them.
    """
    run, release = staged.run, head.releases[place]
    known = run.known()
    assert known is not None  # it has releases
    trained_of(run)  # refuses rounds that are missing before anything is written
    for path in staged.folder.glob("*") if staged.folder.is_dir() else ():
        if path.name != "journal":  # answers of clients, which need not be asked for again
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    world = open_world(run)
    then = head.first(place)
    # Nodes touch nothing that any closed request named, so that what they repeat is without all of it.
    gone = head.gone if run.config.remote else head.gone[: place + 1]
    before = World(world.server, world.evaluator, renewed=then.renewed).without(*gone)
    ids = every_id(release.request, known[0])
    asked = release.request
    words = (*asked.words, *asked.unless) if isinstance(asked, SampleRequest) else ()
    stones = read_tombstones(run.folder).over(known[0], ids, words)
    buried = stones.buried(known[0])
    if run.config.remote:
        _ask_nodes(run, buried, stones, dry_run=True)  # before the long work begins
    superseded = head.first(len(head.releases[:until])).renewed > place
    trained_on = named_in(release.request, known[0].clients)
    rederived = (
        []
        if superseded or not trained_on
        else list(_rederive(staged, run.hosted(before), release, run.history_of(then)))
    )
    newer = head.releases[place + 1 :]
    purged = release.model_copy(update={"request": stones.renamed(release.request), "purged": True})
    releases = (*head.releases[:place], purged, *newer)
    write_json(staged.folder / "head.json", head.model_copy(update={"releases": releases}).model_dump(mode="json"))
    write_json(staged.folder / TOMBSTONES, as_json(stones))
    write_json(staged.folder / "membership.json", buried.model_dump(mode="json"))
    removed = [*_removed(run, head, place), *_cached(world, ids)]
    removed += _replaced_rounds(run, then) if superseded else ()
    files = [line.what for line in removed]
    for path in _with_requests(run, files):
        _write_renamed(path, staged, stones)
    finished = PurgePass(
        request=stones.renamed(release.request),
        time=time,
        removed=tuple(removed),
        rederived=(*rederived, Item(what="membership.json", why="ids of forgotten pairs are stored as salted marks")),
        stayed=tuple(_stayed(run, head, place)),
    )
    _write_record(staged, finished)
    plan = PurgePlan(replaced=tuple(staged.files()), removed=tuple(files), done=finished, nodes=run.config.remote)
    write_json(staged.plan_path, plan.model_dump(mode="json"))


def _write_record(staged: Staged, finished: PurgePass) -> None:
    record = PurgeRecord(passes=(*read_purges(staged.run.folder).passes, finished))
    write_json(staged.folder / RECORD, record.model_dump(mode="json"))


def _apply(staged: Staged) -> PurgePass:
    """Do what the plan says; what is done already is passed over."""
    plan = validate(PurgePlan, read_json(staged.plan_path), str(staged.plan_path))
    folder = staged.run.folder
    if plan.nodes:
        finished = _with_nodes(staged, plan.done)
        _write_record(staged, finished)
        plan = plan.model_copy(update={"done": finished, "nodes": False})
        write_json(staged.plan_path, plan.model_dump(mode="json"))
    for name in plan.removed:
        path = folder / name  # an absolute one stays as it is
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in plan.replaced:
        if (staged.folder / name).is_file():
            replace_file(staged.folder / name, folder / name)
    shutil.rmtree(staged.folder / "journal", ignore_errors=True)
    staged.plan_path.unlink()
    shutil.rmtree(staged.folder)
    remove_leftovers(folder)
    return plan.done


# --- at the nodes ---


def _with_nodes(staged: Staged, done: PurgePass) -> PurgePass:
    """The same pass once every node has dropped what it keeps, with what each says of that."""
    run = staged.run
    buried = validate(Membership, read_json(staged.folder / "membership.json"), "membership.json")
    replies = _ask_nodes(run, buried, read_tombstones(staged.folder))

    def lines(name: Literal["removed", "stayed"]) -> tuple[Item, ...]:
        return tuple(
            Item(what=f"client {client}: {what}", why=why)
            for client, dropped in sorted(replies.items())
            for what, why in getattr(dropped, name)
        )

    outstanding = tuple(
        Item(what=site.what, why=f"the site is gone for good ({site.why}; {site.by}, {site.time[:10]})")
        for site in read_lost_sites(run.folder).sites
        if site.client not in replies
    )
    relayed = [Item(what=what, why=why) for what, why in rewritten_database(run.config.federation_folder)]
    stayed = (*done.stayed, *lines("stayed"), *outstanding, *relayed)
    return done.model_copy(update={"removed": (*done.removed, *lines("removed")), "stayed": stayed})


def _ask_nodes(run: Run, buried: Membership, stones: Tombstones, dry_run: bool = False) -> dict[int, PurgeReply]:
    """Send every node the marks of its own pairs. Nodes that left and purged earlier have nothing more."""
    head, config = run.head, run.config
    withdrawn = {client for each in head.releases if each.purged for client in leaving_clients(each.request)}
    # By marks: the message itself may stay in a database on its way.
    holdings = {holding.client: holding for holding in buried.clients}
    remote = remote_engine(
        config.engine,
        config.federation_folder,
        run.name,
        {client: holding.train_ids for client, holding in holdings.items()},
        dict.fromkeys(holdings, ()),
        tuple(map(stones.renamed, head.gone)),
        head.renewed,
        "",
        config.training.deadline,
        {client: holding.validation_ids for client, holding in holdings.items()},
    )
    marks = {
        holding.client: [each for each in (*holding.train_ids, *holding.validation_ids) if each in stones.ids]
        for holding in buried.clients
        if holding.client not in withdrawn
    }
    leaving = {client for request in head.gone for client in leaving_clients(request)}
    return purge_nodes(remote, stones.salt, marks, leaving, dry_run, read_lost_sites(run.folder).clients)


# --- the history ---


def _replaced_rounds(run: Run, head: ReleaseChain) -> Iterator[Item]:
    """The trainings that a head comes from, if they are still there."""
    for place in head.places:
        for name in (place, _starts(place)):
            if (run.folder / name).exists():
                yield Item(what=name, why="it was made again from the start since, without the pairs")


def _starts(rounds: str) -> str:
    """Folder of the states from which rounds began, next to those rounds, if no file of the run has them."""
    return rounds.removesuffix(ROUNDS) + "starts"


def _rederive(staged: Staged, world: World, release: Release, history: History) -> Iterator[Item]:
    """Stage the rounds that the request's pairs were in, without them; `world` is the one without them."""
    run, request = staged.run, release.request
    if not history.updates:
        return
    shutil.copyfile(history.initial_path, _made(staged.folder) / "initial.safetensors")
    scratch = replace(history, folder=staged.folder)
    leaving = leaving_clients(request)
    if run.config.remote:  # nor do nodes repeat anything for a client that has left since
        leaving |= {client for each in run.head.gone for client in leaving_clients(each)}
    known = run.known()
    assert known is not None
    holders = {holding.client for holding in known[0].clients if forget_mask(request, holding).any()} - leaving
    now = {client: len(ids) for client, ids in world.federation.members.items()}
    lost = read_lost_sites(run.folder).clients
    held, trained, training = run.held(run.head), trained_of(run), run.config.training
    sound = Guarded(world.federation, training, staged.folder / "journal", digest(release.model_dump(mode="json")))
    for number in range(1, release.after_round + 1):
        old, record = history.start(number), history.record(number)
        if history.start_path(number) in (history.initial_path, history.state_path(number - 1)):
            start_path = scratch.state_path(number - 1)
            start = Params.load(start_path)
        else:  # a release that came between: moved by as much as the state before it
            start = old + (scratch.state(number - 1) - history.state(number - 1))
            start_path = staged.folder / _starts(history.place) / f"{number:05d}.safetensors"
            start.save(start_path)
        there = [client for client in history.clients(number) if client not in leaving]
        touched = sorted(leaving & set(history.clients(number))) or [client for client in there if client in holders]
        # Missing updates are made from the new state: later requests repeat them from there.
        unstored = [client for client in there if not history.stores(number, client)]
        new_start = unstored if touched or start != old else []
        old_start = [client for client in there if client in holders and client not in unstored]
        # A site that is gone for good can repeat nothing, so the round is made again without it.
        unreachable = lost & {*old_start, *new_start}
        there, unstored, new_start, old_start = (
            [client for client in each if client not in unreachable] for each in (there, unstored, new_start, old_start)
        )
        updates = [history.update(number, client) for client in there if client not in (*old_start, *unstored)]
        asked = sorted((*old_start, *new_start))
        if asked:
            begun = ((old, old_start), (start, new_start))
            replays = tuple(Replay(number, state, 1.0, 0, tuple(clients)) for state, clients in begun if clients)
            job = trained.training_job(0, request=SampleRequest(ids=()), objective=REPLAY, replays=replays)
            answers = {answer.client: answer for answer in sound.run(old, job, asked)}
            silent = [client for client in asked if client not in answers]
            if silent:
                raise UserError(
                    f"client {silent[0]}: no sound answer about round {number}, and what it sent then cannot be made "
                    "again without it; run the same command again once it answers"
                )
            for client in asked:
                change = read_sum(answers[client].values, 0, old)
                if change is not None:  # else too few pairs are left to train on
                    change = change.zip(lambda tensor, like: tensor.to(like.dtype), old)
                    updates.append(Update(client, now[client], change))
        if unstored and not new_start:  # nothing has changed yet
            updates += [Update(client, history.pairs(number)[client], None) for client in unstored]
            state = start.zip(lambda tensor, by: (tensor.double() + by).to(tensor.dtype), history.moved(number))
            finished = Round(number, state, tuple(sorted(updates, key=lambda update: update.client)))
        else:
            finished = average(start, updates, training, number, clip=bool(new_start))
        if AVERAGED in record.sha256 and held is not None:
            locked = ServerLock(held.bases, start).apply(finished.state)
            finished = replace(finished, state=locked, averaged=finished.state)
        finished = replace(finished, rejected={c: why for c, why in record.rejected.items() if c not in leaving})
        scratch.append(finished, record.bytes_down, record.bytes_up, start_path, record.loss)
        times = history.record_path(number).stat()
        os.utime(scratch.record_path(number), ns=(times.st_atime_ns, times.st_mtime_ns))  # how long rounds took
        if touched:
            who = ", ".join(map(str, touched))
            yield Item(what=f"{history.place}/{number:05d}", why=f"updates of {who} and the state that they made")


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


# --- everything else ---


def _removed(run: Run, head: ReleaseChain, place: int) -> Iterator[Item]:
    """Files of the run that hold the pairs, or a model that does, and are needed no more."""
    folder, release = run.folder, head.releases[place]
    answer = folder / "requests" / release.answer
    current = start_hash(run)
    for path in sorted(folder.glob("requests/*/*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() or path.relative_to(folder / "requests").as_posix() in _answers(head):
            continue
        record = path / "record.json"
        begun = read_json(record).get("trained_sha256") if record.is_file() else None
        if path.parent == answer.parent:
            yield Item(what=name, why="another answer to the same request")
        elif begun != current:
            yield Item(what=name, why="an answer that began from a model that still held the pairs")
    for path in sorted(answer.glob("*")):
        if path.is_dir() and not (release.rounds and path.name in (ROUNDS, _starts(ROUNDS))):
            yield Item(what=path.relative_to(folder).as_posix(), why="a trial or a journal of the released answer")
    since = head.releases[head.renewed :]
    locking = next((each for each in reversed(since) if run.locks_directions(each)), None)
    for older in head.releases[:place]:  # the newest purged one stays: later ones began from it
        for name in (
            "model.safetensors",
            BASE,
            *(("bases.safetensors",) if older != locking else ()),
        ):
            if (folder / "requests" / older.answer / name).is_file():
                yield Item(what=f"requests/{older.answer}/{name}", why="an older release, which held the pairs")
    for name in ("shadows", "exports"):
        if (folder / name).exists():
            yield Item(what=name, why="models that may hold the pairs, made again when they are needed")
    for name in ("previews", "searches"):
        if (folder / name).exists():
            yield Item(what=name, why="shows pictures, captions and ids of pairs; made again when someone looks")
    for path in sorted(folder.rglob("report.html")):
        yield Item(what=path.relative_to(folder).as_posix(), why="may show the pictures; ease report writes it again")
    for client in sorted(leaving_clients(release.request)):
        if (folder / "clients" / f"{client:05d}").exists():
            yield Item(what=f"clients/{client:05d}", why="what the client kept on its own disk")


def _answers(head: ReleaseChain) -> set[str]:
    return {release.answer for release in head.releases}


def _cached(world: World, ids: frozenset[str]) -> Iterator[Item]:
    """Cached pixels, activations and lists of this run's data; generated scenes belong to no client, and with pairs on
    site the server has only its own."""
    members = world.server.membership
    elsewhere = world.config.partition.on_site and ids.isdisjoint({*members.test, *members.validation})
    if world.config.data.name == "scenes" or elsewhere:
        return
    for path, why in cached_files(world.evaluator.pairs, world.evaluator.activations, ids):
        yield Item(what=str(path), why=why)


def _with_requests(run: Run, gone: list[str]) -> Iterator[Path]:
    """Files that spell requests out and stay."""
    for name in ("record.json", "request.json", "audit.json", "quick.json"):
        for path in sorted(run.folder.glob(f"requests/*/*/{name}")):
            name = path.relative_to(run.folder).as_posix()
            if not any(name == each or name.startswith(f"{each}/") for each in gone):
                yield path


def _write_renamed(path: Path, staged: Staged, stones: Tombstones) -> None:
    found = read_json(path)
    renamed = stones.without_names(found)
    if isinstance(found.get("request"), dict) and found["request"].get("scope") == "sample":
        renamed["request"] = stones.renamed(SampleRequest.model_validate(found["request"])).model_dump(mode="json")
    if renamed != found:
        write_json(staged.folder / path.relative_to(staged.run.folder), renamed)


def _stayed(run: Run, head: ReleaseChain, place: int) -> Iterator[Item]:
    release = head.releases[place]
    yield Item(what=f"requests/{release.answer}/model.safetensors", why="the run continues from it")
    if (run.folder / "requests" / release.answer / "bases.safetensors").is_file():
        yield Item(
            what=f"requests/{release.answer}/bases.safetensors",
            why="directions, without lengths, of what the pairs wrote: the lock needs them",
        )
    if (run.folder / "requests" / release.answer / BASE).is_file():
        yield Item(
            what=f"requests/{release.answer}/{BASE}",
            why="the model before recovery, without the pairs, and sums of what others would have sent without them",
        )
    if not run.history.updates:
        yield Item(what="rounds", why=KEPT_WITH_CLIENTS)
    yield Item(what="classes.safetensors", why="centres of pseudo-classes, each a mean over many pairs")
    yield Item(what="ledger.sqlite", why="who asked for what and when; ids of pairs are stored as salted marks")
    yield Item(what="initial.safetensors", why="saw no one's pairs")
    yield Item(what=f"name of requests/{request_id(release.request)}", why="a chosen name or a hash of ids")
    yield Item(what="copies, backups, exports elsewhere, the photographs", why="no command reaches them")
