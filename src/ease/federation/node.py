"""A warm worker beside a client's data: it answers jobs that come as bytes over a Unix socket, and nothing else.

It holds the backbone, the pairs and what it keeps of the training. It runs no code that it is sent: it does jobs whose
objectives it knows, in the one encoding, after its own policy has agreed. Whatever else comes is refused in words.
"""

import os
import queue
import re
import shutil
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from pydantic import Field

from ease.config import Config, validate
from ease.data.classes import group_sums, local_centres, nearest
from ease.data.features import Activations, cached_files
from ease.data.membership import Holding, Membership, membership_of, shards_of
from ease.data.pairs import PairSet, picture_digest
from ease.data.partition import Shard, joint_embedding, make_shard
from ease.data.words import centred_cosines, content, says_all
from ease.errors import UserError
from ease.federation.blob_cache import BlobCache
from ease.federation.client import ClientData
from ease.federation.client_history import ClientHistory
from ease.federation.codec import decode_job, encode_update
from ease.federation.container import Limits
from ease.federation.objectives import OBJECTIVES
from ease.federation.protocol import LocalJob
from ease.federation.question_log import question_log
from ease.federation.sequential import Sequential
from ease.federation.wire import (
    CENTRES,
    COUNTS,
    NEAR,
    QUERY,
    SAYS,
    SUMS,
    UPDATE,
    Answer,
    Ask,
    Deal,
    DealReply,
    FoundPairs,
    Present,
    PurgeReply,
    SearchReply,
    decode_ask,
    encode,
    numbers_in,
    numbers_of,
    receive,
    send,
)
from ease.model.dual_encoder import DualEncoder
from ease.params import Params, layout_of
from ease.requests.request import Request, every_id, redealt, without
from ease.requests.tombstones import NAME as TOMBSTONES
from ease.requests.tombstones import Tombstones, as_json
from ease.storage import digest, read_json, write_atomic, write_json

HOUR = 3600.0
PATIENCE = 60.0
"""Seconds in which a message must have come in whole."""
REMEMBERED = 1 << 16
"""Messages that a node knows again."""
LONGEST_REASON = 300


FEWEST_PAIRS = 16
"""Default of the policy."""
SAME_WORDS = 0.999
"""Cosine of the words' embedding here and at the server: other processors round otherwise."""
DECIMALS = 3
"""Decimals of the similarity of a pair and words, as it leaves the site."""
MOST_CLOSED = 1 << 23
"""Bytes of the closed requests of a run, as JSON."""
PATHS = re.compile(r"""(^|[\s'"(=:])(?:[A-Za-z]:)?(?:[/\\][^/\\'"]*?)*[/\\]([^/\\\s'":;,)]*)""")
"""A path from the root: the text before it, and its last part."""
GROUPS = "classes"
"""Name of the search for common classes in a policy; it is not an objective."""
PURGE = "purge"
"""What it calls the dropping of what is kept of closed requests."""
SEARCH = "concepts"
"""What it calls the search for words in captions."""
PICTURES = "pictures"
"""What it calls the search for a picture by its hash."""


class Policy(Config):
    """The permissions of a site for its data."""

    objectives: tuple[str, ...] | None = None
    """Names of the objectives that it works for; absent: all that it knows."""
    jobs_per_hour: int | None = Field(None, ge=1)
    """Absent: as many as come."""
    smallest_cohort: int = Field(1, ge=1)
    """With fewer clients in a round it takes no part; requests of this client alone need 1."""
    most_epochs: int = Field(100, ge=1)
    """Most epochs of one job, replayed rounds included."""
    largest_message: int = Field(1 << 30, ge=1 << 12)
    """In bytes; a longer one is not even read."""
    fewest_pairs: int = Field(default_factory=lambda: FEWEST_PAIRS, ge=1)
    """Pairs of a job that trains: the change that fewer make gives their features away."""
    group_questions: int = Field(120, ge=0)
    """Searches for common classes that the node answers in all, over all runs; a run takes 51 at most."""
    searches: int = Field(200, ge=0)
    """Searches for words that it answers in all, and as many for pictures."""
    sums_of_few: int = Field(200, ge=0)
    """Sums of features over fewer than `fewest_pairs` pairs, or over all but so few, that it answers in all: they give
    those pairs away. A request to a closed-form head on so few pairs at this site needs one."""
    most_rounds: int = Field(10_000, ge=1)
    """Rounds of one run that the node keeps; larger round numbers are refused."""
    most_runs: int = Field(1000, ge=1)
    """Runs that the node takes part in."""
    largest_folder: int = Field(1 << 36, ge=1 << 20)
    """Bytes that the node's folder may hold before a job that would add a round is refused."""

    def allowance(self, kind: str) -> int | None:
        """How many questions of a kind are answered in all; None: any number."""
        limits = {"groups": self.group_questions, "sums": self.sums_of_few}
        return {**limits, "search": self.searches, "find": self.searches}.get(kind)

    def objection(self, job: LocalJob, cohort: int, times: Collection[float], now: float) -> str:
        """Why a job is not done, or nothing; `times` are those of the jobs before it."""
        epochs = job.epochs * max(1, len(job.replays))
        if epochs > self.most_epochs:
            return f"its policy allows {self.most_epochs} epochs in a job, and this one has {epochs}"
        return self.reluctance(job.objective, cohort, times, now)

    def reluctance(self, objective: str, cohort: int, times: Collection[float], now: float) -> str:
        """The same of whatever is asked under a name, in some company, at some time."""
        if self.objectives is not None and objective not in self.objectives:
            return f"its policy does not allow the objective {objective!r}"
        if cohort < self.smallest_cohort:
            return f"its policy asks for {self.smallest_cohort} clients in a round, and this one has {cohort}"
        if self.jobs_per_hour is not None and sum(now - each < HOUR for each in times) >= self.jobs_per_hour:
            return f"its policy allows {self.jobs_per_hour} jobs an hour"
        return ""


@dataclass
class Node:
    """One client of a federation, with all that is its own. `answer` never raises for what it is sent."""

    model: DualEncoder
    shard: Shard
    activations: Activations
    device: torch.device
    folder: Path
    """Its own disk: parts it was sent, kept rounds and closed requests of each run."""
    backbone: str
    """Hash of the frozen weights."""
    version: str = ""
    policy: Policy = field(default_factory=Policy)
    pairs: PairSet | None = None
    """With pairs on site: the client's own pairs, which it deals itself. Its `shard` is then all of them."""
    embed: Callable[[str], np.ndarray] | None = None
    """With pairs on site: embeds words with the frozen text tower."""
    log: TextIO | None = None
    busy: bool = False
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _refused: int = 0
    _nonces: dict[str, None] = field(default_factory=dict)
    _ready: tuple[object, Sequential] | None = None
    _last_refusal: str = ""

    def __post_init__(self) -> None:
        with suppress(OSError):
            self._nonces = dict.fromkeys(self._seen.read_text().split()[-REMEMBERED:])

    @property
    def blobs(self) -> BlobCache:
        return BlobCache(self.folder / "parts")

    @property
    def limits(self) -> Limits:
        return Limits(total=self.policy.largest_message)

    @property
    def _seen(self) -> Path:
        return self.folder / "messages.txt"

    def answer(self, data: bytes) -> bytes:
        """What to say to a message, whatever it holds."""
        try:
            asked = decode_ask(data, self.limits)
        except UserError as error:
            return self.refusal(str(error))
        return self.respond(*asked)

    def respond(self, ask: Ask, job: bytes, parts: dict[str, bytes]) -> bytes:
        """The same once the message is known to be one."""
        reply = self._reply(ask, job, parts)
        if ask.kind == "hello":
            return reply
        try:
            question_log(self.folder).note(ask, job, parts, reply, self._last_refusal)
        except (OSError, UserError) as error:  # the disk is full, or the list is damaged
            self._log(f"questions.jsonl: {error}")
            return self.refusal("it cannot write down what it is asked; its log says more", ask.nonce)
        return reply

    def _reply(self, ask: Ask, job: bytes, parts: dict[str, bytes]) -> bytes:
        self._last_refusal = ""
        try:
            if ask.client != self.shard.client:
                raise UserError(f"this is client {self.shard.client}, and client {ask.client} was asked")
            if ask.kind == "hello":
                return encode(self._present(ask))
            if ask.kind == "purge":
                return self._purge(ask)
            if ask.kind == "search":
                return self._matched(ask, parts.get(QUERY, b""))
            if ask.kind == "find":
                return self._found(ask)
            return self._done(ask, job, parts) if ask.kind == "task" else self._dealt(ask, parts.get(CENTRES))
        except UserError as error:
            return self.refusal(str(error), ask.nonce)
        except Exception as error:  # a job that cannot be done is the asker's fault; the worker stays up
            self._log(f"{type(error).__name__}: {error}")  # only for the site: it may quote local data
            return self.refusal(f"the work failed with {type(error).__name__}; its log says more", ask.nonce)

    def _done(self, ask: Ask, encoded: bytes, parts: dict[str, bytes]) -> bytes:
        self._once(ask.nonce)
        blobs = self.blobs
        if strange := sorted(parts.keys() - set(ask.parts)):
            raise UserError(f"part {strange[0][:12]} belongs to no job")
        blobs.put(parts)
        found = {name: blobs[name] for name in ask.parts if name in blobs}
        if missing := tuple(name for name in ask.parts if name not in found):
            self._log(f"{len(missing)} parts of the job are not here")
            return encode(Answer(client=self.shard.client, nonce=ask.nonce, missing=missing))
        job, state = decode_job(encoded, found, limits=self.limits)
        if job.objective not in OBJECTIVES:
            raise UserError(f"objective {job.objective!r} is not known here")
        now = time.time()
        if objection := self.policy.objection(job, ask.cohort, self._times, now):
            raise UserError(objection)
        self._check_layout(job, state)
        self._check_room(ask.run, job)
        self._check_gone(ask.run, ask.gone)
        engine = self._engine(ask.run, ask.gone, ask.renewed)
        self._check_pairs(job, engine)
        self._times.append(now)
        (update,) = engine.perform(state, {self.shard.client: job})
        self._close(ask.run, ask.gone)  # after the work: a job that is refused or fails changes nothing here
        self._log(f"{job.objective}, round {job.round}: done in {time.time() - now:.2f} s")
        return encode(Answer(client=self.shard.client, nonce=ask.nonce), {UPDATE: encode_update(update)})

    def _dealt(self, ask: Ask, encoded: bytes | None) -> bytes:
        """Groups of the client's pairs, or what it takes part in a run with; pairs themselves stay."""
        self._once(ask.nonce)
        now = time.time()
        if self.pairs is None or ask.deal is None:
            raise UserError('it was given its pairs, and deals none: give it partition.scheme = "on_site"')
        if objection := self.policy.reluctance(GROUPS, ask.cohort, self._times, now):
            raise UserError(objection)
        if ask.kind == "groups":
            if self._membership(ask.run) is not None:
                raise UserError("it takes part in this run already, whose classes are found")
            self._spend("groups")
        self._times.append(now)
        deal, joint = ask.deal, joint_embedding(self.activations.pooled_image, self.activations.pooled_text)
        centres = None if encoded is None else numbers_in(encoded, "<f8", deal.classes, "message")
        if centres is not None and (centres.shape[1] != joint.shape[1] or not np.isfinite(centres).all()):
            raise UserError("the centres are none of this client's backbone")
        answer = DealReply(client=self.shard.client, nonce=ask.nonce)
        if ask.kind == "join":
            if centres is None:
                raise UserError("without centres no pair is of any class")
            holding = self._joined(ask.run, deal, nearest(joint, centres))
            does = "would take" if deal.dry_run else "takes"
            self._log(f"{does} part in run {ask.run[:8]} with {len(holding.train_ids)} pairs")
            return encode(answer.model_copy(update={"holding": holding}))
        found = (
            local_centres(joint, deal.classes, deal.class_seed, self.shard.client)
            if centres is None
            else group_sums(joint, centres)
        )
        return encode(answer, {SUMS: numbers_of(found.sums), COUNTS: numbers_of(found.counts)})

    def _joined(self, run: str, deal: Deal, classes: np.ndarray) -> Holding:
        """Deal the client's pairs for a run, once: it is then known here, whatever becomes of the files."""
        assert self.pairs is not None  # seen above
        here, share = np.flatnonzero(~np.isin(classes, deal.closed)), deal.validation_share
        every, name = np.arange(len(self.pairs)), self.shard.name
        dealt = make_shard(self.shard.client, here, every, self.pairs.ids, classes, share, deal.seed, name)
        reply, known = membership_of(self.pairs, (dealt,)), self._membership(run)
        if known is not None and known != reply:
            raise UserError("it takes part in this run already, with other pairs")
        if not deal.dry_run:
            self._check_room(run)
            write_json(self._membership_path(run), reply.model_dump(mode="json"))
        return reply.clients[0]

    def _purge(self, ask: Ask) -> bytes:
        """Drop what is kept of closed requests; what they named is known by marks alone from now on.

        Each step can be repeated: a node that is killed between two is asked once more.
        """
        assert ask.purge is not None  # seen as it was read
        self._once(ask.nonce)
        if objection := self.policy.reluctance(PURGE, ask.cohort, self._times, time.time()):
            raise UserError(objection)
        members, before = self._membership(ask.run), self._stones(ask.run)
        if self.pairs is not None and members is None:
            raise UserError("it does not take part in this run; its folder is not the one it began the run with")
        if before is not None and before.salt != ask.purge.salt:
            raise UserError("its marks of this run were made with another salt; the run is not the one it knows")
        marks = frozenset(ask.purge.marks) | (before.ids if before is not None else frozenset())
        if len(marks) > (pairs := len(self.activations.pooled_image)):
            raise UserError(f"it is sent {len(marks)} marks, and there are {pairs} pairs")
        stones = Tombstones(salt=ask.purge.salt, ids=marks)
        gone = tuple(map(stones.renamed, ask.gone))
        self._check_closed(tuple(map(stones.renamed, self._closed(ask.run))), gone)
        if sum(len(each.model_dump_json()) for each in gone) > MOST_CLOSED:
            raise UserError(f"its closed requests take more than {MOST_CLOSED} bytes")
        answer = PurgeReply(client=self.shard.client, nonce=ask.nonce)
        self._check_room(ask.run)
        if ask.purge.dry_run:
            return encode(answer)
        folder = self.folder / "runs" / ask.run
        write_json(folder / TOMBSTONES, as_json(stones))  # first: a repeated request resumes from it
        write_json(self._closed_path(ask.run), ClosedRequests(requests=gone).model_dump(mode="json"))
        if members is not None:
            write_json(self._membership_path(ask.run), stones.buried(members).model_dump(mode="json"))
        removed, stayed = list(self._drop(folder, ask.purge.leaves)), list(self._left(folder))
        if words := question_log(self.folder).mark_words(ask.run, stones.mark):
            removed.append((f"words of {words} searches in its list of questions", "they stay as salted marks"))
        self._ready = None
        self._log(f"purged in run {ask.run[:8]}: {len(stones.ids)} pairs are known by marks")
        return encode(answer.model_copy(update={"removed": tuple(removed), "stayed": tuple(stayed)}))

    def _matched(self, ask: Ask, encoded: bytes) -> bytes:
        """Which of the pairs that are left say some words, and how near each is; captions themselves stay."""
        assert ask.search is not None  # seen as it was read
        self._once(ask.nonce)
        now = time.time()
        if self.pairs is None:
            raise UserError("its pairs were dealt by the server, which can look at them")
        if objection := self.policy.reluctance(SEARCH, ask.cohort, self._times, now):
            raise UserError(objection)
        self._check_closed(self._closed(ask.run), ask.gone)
        self._times.append(now)
        left = without((self._shard(ask.run, ask.gone),), ask.gone)
        if not left:
            raise UserError(f"client {self.shard.client} has left this run")
        places, wanted = left[0].train, content(ask.search.words)
        rows = numbers_in(encoded, "<f8", ask.search.rows, "message")
        if rows.shape[1] != self.activations.pooled_text.shape[-1] or not np.isfinite(rows).all() or not wanted:
            raise UserError("the words are none of this client's backbone, or name nothing")
        self._check_query(ask.search.words, rows)
        self._spend("search")
        captions = [self.pairs.captions[place] for place in places]
        says = np.array([any(says_all(text, wanted) for text in each) for each in captions], dtype=np.int64)
        near = centred_cosines(rows[0], self.activations.pooled_text[places].astype(np.float64), rows[1]).max(axis=1)
        if len(rows) == 3:
            pictures = self.activations.pooled_image[places].astype(np.float64)[:, None]
            near = (near + centred_cosines(rows[0], pictures, rows[2])[:, 0]) / 2
        self._log(f"looked for words in {len(places)} pairs; {says.sum()} say them")
        return encode(
            SearchReply(client=self.shard.client, nonce=ask.nonce),
            {SAYS: numbers_of(says), NEAR: numbers_of(near.round(DECIMALS))},
        )

    def _found(self, ask: Ask) -> bytes:
        """Which of the client's pairs show a picture, by the hash of its pixels."""
        self._once(ask.nonce)
        now, members = time.time(), self._membership(ask.run)
        if self.pairs is None or members is None:
            raise UserError("it does not take part in this run with pairs of its own")
        if objection := self.policy.reluctance(PICTURES, ask.cohort, self._times, now):
            raise UserError(objection)
        self._spend("find")
        self._times.append(now)
        (holding,) = members.clients
        own = {*holding.train_ids, *holding.validation_ids}
        places = [place for place, pair_id in enumerate(self.pairs.ids) if pair_id in own]
        ids = [self.pairs.ids[place] for place in places if picture_digest(self.pairs.pixels[place]) == ask.picture]
        self._log(f"looked for a picture in {len(places)} pairs; {len(ids)} show it")
        return encode(FoundPairs(client=self.shard.client, nonce=ask.nonce, ids=tuple(ids)))

    def _drop(self, folder: Path, leaves: bool) -> Iterator[tuple[str, str]]:
        """Delete what may hold the pairs, and say what that was."""
        if count := len(self.blobs):
            shutil.rmtree(self.blobs.folder)
            yield f"{count} parts of jobs", "states that may hold the pairs; sent again when they are needed"
        if leaves and (folder / "rounds").exists():
            shutil.rmtree(folder / "rounds")
            yield "rounds", "states and updates of a client that has left"
        for path, why in cached_files(self.pairs, self.activations) if self.pairs is not None else ():
            if path.exists():
                while path.is_dir():  # sites of one machine may share a cache and purge at the same time
                    with suppress(FileNotFoundError):
                        shutil.rmtree(path)
                path.unlink(missing_ok=True)
                yield path.name, why

    def _left(self, folder: Path) -> Iterator[tuple[str, str]]:
        yield TOMBSTONES, "salted marks, by which it knows closed pairs"
        if (folder / "rounds").exists():
            yield "rounds", "its own updates, which later requests need"
        yield "memory of the node", "pictures and activations that it has read, until it is started again"
        yield "photographs in its folder", "the site's own; they may be deleted there"

    def _membership_path(self, run: str) -> Path:
        return self.folder / "runs" / run / "membership.json"

    def _membership(self, run: str) -> Membership | None:
        """The client's pairs in a run, if it dealt them itself."""
        path = self._membership_path(run)
        return validate(Membership, read_json(path), str(path)) if path.is_file() else None

    def _shard(self, run: str, gone: tuple[Request, ...]) -> Shard:
        """The client's pairs in a run; photographs that closed requests name may have vanished, others may not."""
        if self.pairs is None:
            return self._named(run)
        members = self._membership(run)
        if members is None:
            raise UserError("it does not take part in this run; its folder is not the one it began the run with")
        forgotten = {each for request in gone for each in every_id(request, members)}
        (found,) = shards_of(members, self.pairs, forgotten)
        return found

    def _at_first(self, run: str) -> Shard | Holding:
        """The client's pairs when the run began."""
        members = None if self.pairs is None else self._membership(run)
        return self._named(run) if members is None else members.clients[0]

    def _named(self, run: str) -> Shard:
        """The pairs that it was given, purged ones by their marks."""
        stones = self._stones(run)
        if stones is None:
            return self.shard
        train_ids, validation_ids = map(stones.marked, (self.shard.train_ids, self.shard.validation_ids))
        return replace(self.shard, train_ids=train_ids, validation_ids=validation_ids)

    def _stones(self, run: str) -> Tombstones | None:
        path = self.folder / "runs" / run / TOMBSTONES
        return validate(Tombstones, read_json(path), str(path)) if path.is_file() else None

    def _closed_path(self, run: str) -> Path:
        return self.folder / "runs" / run / "gone.json"

    def _closed(self, run: str) -> tuple[Request, ...]:
        path = self._closed_path(run)
        return validate(ClosedRequests, read_json(path), str(path)).requests if path.is_file() else ()

    def _check_closed(self, closed: Sequence[Request], gone: Sequence[Request]) -> None:
        if lost := [each for each in closed if each not in gone]:
            raise UserError(f"the job would touch what a closed request took away ({lost[0].scope})")

    def _spend(self, kind: str) -> None:
        """Count a question of a kind, over all runs and restarts; refuse it once the site's allowance is used up."""
        path, allowed = self.folder / "questions.json", self.policy.allowance(kind)
        counts = validate(Questions, read_json(path), str(path)).counts if path.is_file() else {}
        if allowed is not None and counts.get(kind, 0) >= allowed:
            raise UserError(f"its policy allows {allowed} questions of this kind ({kind}), and they are used up")
        write_json(path, Questions(counts={**counts, kind: counts.get(kind, 0) + 1}).model_dump(mode="json"))

    def _check_pairs(self, job: LocalJob, engine: Sequential) -> None:
        """Refuse to train on so few pairs that their features could be read from the change; count sums over them."""
        data, fewest = engine.data[self.shard.client], self.policy.fewest_pairs
        count, asked = len(data.select(job)), OBJECTIVES[job.objective]
        if asked.trains and 0 < count < fewest:
            raise UserError(f"its policy asks for {fewest} pairs in a job, and this one has {count}")
        if asked.adds_features and any(0 < few < fewest for few in (count, len(data.train) - count)):
            self._spend("sums")

    def _check_query(self, words: str, rows: np.ndarray) -> None:
        """Refuse a search whose numbers are not those of its words: chosen ones would read activations out."""
        if self.embed is None:
            return
        own = self.embed(words)
        cosine = own @ rows[0] / max(1e-12, float(np.linalg.norm(own) * np.linalg.norm(rows[0])))
        if cosine < SAME_WORDS or (np.linalg.norm(rows[1:], axis=1) > 1 + 1e-6).any():
            raise UserError("the numbers of the search are not those of its words")

    def _check_gone(self, run: str, gone: Sequence[Request]) -> None:
        """Refuse to reopen what was closed, and lists that are too long to be requests of one client."""
        self._check_closed(self._closed(run), gone)
        length = sum(len(each.model_dump_json()) for each in gone)
        if length > MOST_CLOSED:
            raise UserError(f"its closed requests take {length} bytes, and a client keeps {MOST_CLOSED} at most")

    def _close(self, run: str, gone: tuple[Request, ...]) -> None:
        """Remember closed requests: what was closed once stays closed."""
        if gone != self._closed(run):
            write_json(self._closed_path(run), ClosedRequests(requests=gone).model_dump(mode="json"))

    def _check_room(self, run: str, job: LocalJob | None = None) -> None:
        """Refuse what would make this site store more than its policy allows."""
        runs = self.folder / "runs"
        if not (runs / run).is_dir() and runs.is_dir() and sum(1 for _ in runs.iterdir()) >= self.policy.most_runs:
            raise UserError(f"its policy allows {self.policy.most_runs} runs, and this would be one more")
        if job is None or not job.keep:
            return
        if not 1 <= job.round <= self.policy.most_rounds:
            raise UserError(f"its policy allows {self.policy.most_rounds} kept rounds, and this is round {job.round}")
        stored = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if stored > self.policy.largest_folder:
            raise UserError(f"its policy allows {self.policy.largest_folder} bytes on its disk, and they are in use")

    def _once(self, nonce: str) -> None:
        """Refuse a message that came before, since whenever this node was first started."""
        if nonce in self._nonces:
            raise UserError("this message came before; a job is done once")
        self._nonces[nonce] = None
        if len(self._nonces) > REMEMBERED:
            self._nonces.pop(next(iter(self._nonces)))
        self._seen.parent.mkdir(parents=True, exist_ok=True)
        with self._seen.open("a") as file:
            file.write(f"{nonce}\n")
            grown = file.tell() > 2 * REMEMBERED * (len(nonce) + 1)
        if grown:
            write_atomic(self._seen, "".join(f"{each}\n" for each in self._nonces).encode())

    def _check_layout(self, job: LocalJob, state: Params) -> None:
        """Refuse a state of another model before it meets the data."""
        own = self.model.initial() if job.sparse is None else None
        shapes = {name: shape for name, shape, _ in layout_of(state.tensors)}
        if own is not None and shapes != {name: shape for name, shape, _ in layout_of(own.tensors)}:
            raise UserError("the state is not one of this client's model; give server and nodes the same configuration")

    def _engine(self, run: str, gone: tuple[Request, ...], renewed: int) -> Sequential:
        """The client's data without what closed requests named."""
        if self._ready is None or self._ready[0] != (run, gone, renewed):
            here = without((self._shard(run, gone),), gone)
            left = redealt(here, {self.shard.client: self._at_first(run)}, gone[:renewed])
            if not left:
                raise UserError(f"client {self.shard.client} has left this run")
            history = ClientHistory(self.shard.client, self._closed_path(run).parent)
            data = replace(ClientData.of(left[0], self.activations, self.device), history=history)
            self._ready = (run, gone, renewed), Sequential(self.model, {self.shard.client: data})
        return self._ready[1]

    def _present(self, ask: Ask) -> Present:
        return Present(
            client=self.shard.client,
            nonce=ask.nonce,
            version=self.version,
            backbone=self.backbone,
            pairs=pairs_hash(self._at_first(ask.run).train_ids),
            parts=tuple(self.blobs),
            threads=torch.get_num_threads(),
            jobs=len(self._times),
            refused=self._refused,
            busy=self.busy,
            last=time.time() - self._times[-1] if self._times else None,
        )

    def refusal(self, reason: str, nonce: str = "0" * 32) -> bytes:
        """No, and why: the whole reason in the node's own log, and without paths of this site to the server."""
        self._refused += 1
        line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
        self._log(f"refused: {line}")
        self._last_refusal = line
        line = without_paths(line, self.folder)[:LONGEST_REASON]
        return encode(Answer(client=self.shard.client, nonce=nonce, refused=line))

    def _log(self, line: str) -> None:
        if self.log is not None:
            print(f"{time.strftime('%H:%M:%S')} client {self.shard.client}: {line}", file=self.log, flush=True)


def without_paths(line: str, folder: Path) -> str:
    """The same words with names of files in place of their paths."""
    for each in (folder, folder.absolute(), folder.resolve(), Path.home()):
        line = line.replace(f"{each}{os.sep}", "")
    return PATHS.sub(lambda found: f"{found[1]}{found[2]}", line)


class Questions(Config):
    """How many questions of each kind a node has answered."""

    counts: dict[str, int] = Field(default_factory=dict)


class ClosedRequests(Config):
    """Requests that are closed at a client."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class ClosedPairs:
    """What closed requests named in the runs of a node: ids whose photographs may be missing."""

    ids: Set[str]
    stones: Sequence[Tombstones]
    """Pairs that were purged and are known only by marks."""
    held: Set[str]
    """Ids that some run still has."""

    def __contains__(self, pair_id: object) -> bool:
        return pair_id in self.ids or self._purged(str(pair_id))

    def bars(self, pair_id: str) -> bool:
        """Whether a photograph is not to be opened again: it was purged from a run, and no other run has it."""
        return pair_id not in self.held and self._purged(pair_id)

    def _purged(self, pair_id: str) -> bool:
        return any(each.bars(pair_id) for each in self.stones)


def closed_pairs(folder: Path) -> ClosedPairs:
    """What closed requests named in runs in which the node of this folder took part."""
    found, held = set[str](), set[str]()
    marks = [validate(Tombstones, read_json(path), str(path)) for path in folder.glob(f"runs/*/{TOMBSTONES}")]
    for path in folder.glob("runs/*/membership.json"):
        known = validate(Membership, read_json(path), str(path))
        held |= {each for holding in known.clients for each in (*holding.train_ids, *holding.validation_ids)}
        closed = path.with_name("gone.json")
        requests = validate(ClosedRequests, read_json(closed), str(closed)).requests if closed.is_file() else ()
        found |= {each for request in requests for each in every_id(request, known)}
    return ClosedPairs(found, marks, held)


def pairs_hash(ids: Sequence[str]) -> str:
    """Names what a client holds without telling it."""
    return digest("pairs", list(ids))


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can read."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def listen(path: Path, group: int | None = None) -> socket.socket:
    """A socket that its owner alone may speak to, or also the members of one group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(os.fsencode(path)) > 100:
        raise UserError(f"{path}: too long for a socket; choose a folder with a shorter path")
    if path.exists():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"{path}: exists and is not a socket; choose another --socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()  # of a killed process
            else:
                raise UserError(f"{path}: another process answers there; stop it or choose another --socket")
    line = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)  # never open to others, not even for a moment
    try:
        line.bind(str(path))
    finally:
        os.umask(mask)
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(0o660)
    line.listen(16)
    return line


def serve(node: Node, line: socket.socket) -> None:
    """Answer all connections, for ever, in this thread: a hello at once, jobs one after the other.

    Threads of their own read and write, so that no slow speaker keeps the others waiting.
    """
    waiting: queue.SimpleQueue[tuple[tuple[Ask, bytes, dict[str, bytes]], socket.socket]] = queue.SimpleQueue()

    def attend(speaker: socket.socket) -> None:
        try:
            asked = decode_ask(
                receive(speaker, node.policy.largest_message, "message", time.monotonic() + PATIENCE), node.limits
            )
        except (UserError, TimeoutError) as error:
            say(speaker, node.refusal(str(error) or f"it did not come in within {PATIENCE:g} s"))
        except OSError:
            speaker.close()
        else:
            if asked[0].kind == "hello":
                say(speaker, node.respond(*asked))
            else:
                waiting.put((asked, speaker))

    def say(speaker: socket.socket, data: bytes) -> None:
        with suppress(OSError), speaker:  # who has gone meanwhile hears nothing
            speaker.settimeout(PATIENCE)
            send(speaker, data)

    def accept() -> None:
        while True:
            try:
                speaker, _ = line.accept()
            except OSError:
                return
            threading.Thread(target=attend, args=(speaker,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    while True:
        asked, speaker = waiting.get()
        node.busy = True
        answer = node.respond(*asked)
        node.busy = False
        threading.Thread(target=say, args=(speaker, answer), daemon=True).start()
