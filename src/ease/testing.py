"""What every method keeps to, as checks that anyone can run: `check_method(MyMethod)` says what is wrong in a sentence.

The checks build small runs of generated scenes themselves and look at the method from outside: its states, the jobs it
gives to clients, what it needs, and what it does when it is stopped or a client fails.
"""

import hashlib
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from shutil import copytree
from typing import Literal, get_args

import numpy as np
import torch

from ease.config import to_toml, validate
from ease.data.features import Activations
from ease.data.readers.check import check_reader as check_reader
from ease.errors import ClientError, UserError
from ease.federation.codec import decode_job, decode_update, encode_job, encode_update
from ease.federation.engines import make_engine
from ease.federation.history import UPDATES, History
from ease.federation.journal import Journal
from ease.federation.meter import Cost, Metered
from ease.federation.middleware import Guarded
from ease.federation.objectives import objective
from ease.federation.protocol import Engine, Federation, LocalJob, Middleware, Update, own_jobs
from ease.methods.base import Step, Trained, Unlearner
from ease.model.check import check_backbone as check_backbone
from ease.params import Params, layout_of
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import trained_of
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator

LEAVING_CLIENT = 1
FAILING = 0
"""The client whose training goes wrong, where one does."""
SCOPES = ("client", "class", "sample")
SMALL = (
    "data.train=60",
    "data.validation=0",
    "data.test=20",
    "partition.clients=3",
    "partition.classes=3",
    "partition.scheme=iid",
    "partition.validation_share=0.3",
    "training.rounds=5",
    "training.local_epochs=1",
    "training.batch_size=8",
    "model.hidden=16",
    "model.embedding=8",
    "gallery=20",
)
"""60 pairs at 3 clients, 5 rounds: every phase of a method has a round."""
MORE = ("partition.clients=4", "training.participation=0.67", "training.learning_rate=0.3")
STAGES: Mapping[str, tuple[str, ...]] = {
    "sequential": ("engine=sequential",),
    "vectorized, some clients a round": ("engine=vectorized", *MORE),
    "sequential, both LoRA factors, some clients a round": ("engine=sequential", "model.lora=full", *MORE),
    "vectorized, both LoRA factors": ("engine=vectorized", "model.lora=full", "training.learning_rate=0.3"),
}
"""Any two of: the engine, what LoRA trains, and who takes part, meet in one of these."""


class Spy(Middleware):
    """A federation that notes every job of every client, each answer, and the longest wait for one."""

    def __init__(self, inner: Federation):
        super().__init__(inner)
        self.asked: list[tuple[int, LocalJob]] = []
        self.answers: list[Update] = []
        self.longest_wait = 0.0

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        self.asked += [(client, job) for client in clients]
        since = time.monotonic()
        for update in super().run(params, job, clients):
            self.longest_wait = max(self.longest_wait, time.monotonic() - since)
            self.answers.append(update)
            yield update
            since = time.monotonic()


class Failing(Spy):
    """One client's training went wrong: each number of what it learnt is not a number."""

    spoilt = 0

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in super().run(params, job, clients):
            if update.client == FAILING and "loss" in update.values:
                delta = None if update.delta is None else update.delta * torch.nan
                values = {n: v * torch.nan if v.is_floating_point() else v for n, v in update.values.items()}
                update = replace(update, delta=delta, values=values)
                self.spoilt += 1
            yield update


class Encoding(Middleware):
    """A federation between whose server and clients there is nothing but bytes."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.engine = engine
        self.altered: list[str] = []
        """What did not arrive as it was sent."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        arrived, state = {}, params
        for client, own in own_jobs(self.inner, job, clients).items():
            arrived[client], state = decode_job(*encode_job(own, params))
            if arrived[client] != own or state != params:
                self.altered.append(f"the job {own.objective!r} of round {own.round} to client {client}")
        for update in self.engine.perform(state, arrived):
            received = decode_update(encode_update(update))
            if received != update:
                self.altered.append(f"the answer of client {update.client} to {job.objective!r}")
            yield received


Fault = Literal["raise", "silence", "drop", "repeat", "delay", "nan", "shape", "pairs", "mask"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
SILENT_SECONDS = 600.0
PATIENCE = 1.0
"""The least seconds that the checks wait for a client that is silent; honest ones need a small part of it."""


class Faulty(Middleware):
    """One client fails or sends false answers in a given way, in a share of its answers that a seed chooses.

    Its work raises a `ClientError`, takes forever (`silence`: once), gets lost, comes twice, comes after all others,
    holds NaN, has another shape, claims pairs that it does not hold, or names another client."""

    def __init__(self, inner: Federation, fault: Fault, client: int = FAILING, share: float = 1.0, seed: int = 0):
        super().__init__(inner)
        self.fault, self.client, self.share = fault, client, share
        self.rng = generator(seed, "faulty", fault, client)
        self.spoilt = 0

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        if self.fault == "delay":  # all are asked at once, as ever: apart, engines that train them together round anew
            late = [] if self.client not in clients or self.rng.random() >= self.share else [self.client]
            answers = list(self.inner.run(params, job, clients))
            yield from sorted(answers, key=lambda update: update.client in late)
            return
        for client in clients:
            if client != self.client or self.rng.random() >= self.share:
                yield from self.inner.run(params, job, [client])
                continue
            self.spoilt += 1
            if self.fault == "raise":
                raise ClientError(f"client {client} broke down")
            if self.fault == "silence" and self.spoilt == 1:
                threading.Event().wait(SILENT_SECONDS)
            for update in self.inner.run(params, job, [client]):
                yield from spoilt(update, self.fault, self.rng)


def spoilt(update: Update, fault: Fault, rng: np.random.Generator) -> list[Update]:
    """What arrives of an answer."""
    if fault == "drop":
        return []
    if fault == "repeat":
        return [update, update]
    if fault == "pairs":
        return [replace(update, pairs=10**12)]
    if fault == "mask":
        return [replace(update, client=update.client + 1)]
    if fault in ("nan", "shape"):
        tensors = {**(update.delta.tensors if update.delta else {}), **update.values}
        chosen = str(rng.choice(sorted(name for name in tensors if tensors[name].is_floating_point()) or [""]))
        change = _no_number if fault == "nan" else _longer
        values = {name: change(value) if name == chosen else value for name, value in update.values.items()}
        delta = update.delta
        if delta is not None and chosen in delta.tensors:
            delta = delta.replace({chosen: change(delta[chosen])})
        return [replace(update, delta=delta, values=values)]
    return [update]


def _no_number(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().clone().index_fill(0, torch.tensor([0]), torch.nan).view_as(tensor)


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor])


@dataclass(frozen=True)
class MethodRun:
    """One method's answer to one request, seen from outside."""

    steps: list[Step]
    asked: list[tuple[int, LocalJob]]
    answers: list[Update]
    longest_wait: float
    cost: Cost
    given: tuple[dict[str, str], dict[str, str]]
    """Inputs of the method, before and after: hashes of its files and of the states in memory."""


@dataclass(frozen=True)
class Stage:
    """A small trained run, and what methods do on it."""

    name: str
    world: World
    trained: Trained
    scratch: Path

    @cached_property
    def requests(self) -> dict[str, Request]:
        ids = tuple(pair_id for shard in self.world.shards[:2] for pair_id in shard.train_ids[:4])
        return {
            "client": ClientRequest(clients=(LEAVING_CLIENT,)),
            "class": ClassRequest(classes=(2,)),
            "sample": SampleRequest(ids=ids),
        }

    @cached_property
    def _played(self) -> dict[tuple[type[Unlearner], str], MethodRun]:
        return {}

    def play(self, kind: type[Unlearner], scope: str) -> MethodRun:
        """The method with its default settings, once."""
        if (kind, scope) not in self._played:
            before = fingerprint(self.trained)
            spy = Spy(self.world.federation)
            metered = Metered(spy)
            steps = list(self.unlearn(kind, scope, metered))
            given = (before, fingerprint(self.trained))
            self._played[kind, scope] = MethodRun(steps, spy.asked, spy.answers, spy.longest_wait, metered.cost, given)
        return self._played[kind, scope]

    def unlearn(
        self, kind: type[Unlearner], scope: str, federation: Federation, trained: Trained | None = None
    ) -> Iterator[Step]:
        return kind().unlearn(trained or self.trained, self.requests[scope], federation)

    def folder(self) -> Path:
        """An empty one of its own."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


def make_stage(name: str, folder: Path, *assignments: str) -> Stage:
    """Train a small run in a folder; assignments change it further."""
    config = load_config(None, (*SMALL, *STAGES[name], *assignments))
    world = World.open(config)
    run = Run.create(folder / "run", config)
    for _ in run.train(world):
        pass
    (folder / "scratch").mkdir()
    return Stage(name, run.hosted(world), trained_of(run), folder / "scratch")


def check_method(kind: type[Unlearner], stages: Collection[str] = tuple(STAGES)) -> None:
    """Raise an AssertionError that says what a method does not keep to; nothing is raised if it keeps to everything.

    Takes the class, registered or not, and tries it with its default settings on every kind of request, over both
    engines, with all and with some of the clients in a round, and with both kinds of adapters.
    """
    for check in CHECKS_OF_CLASSES:
        with _place_words(f"{kind.__name__}, check {check.__name__}"):
            check(kind)
    for name in stages:
        with tempfile.TemporaryDirectory(prefix="ease-check-") as folder:
            stage = make_stage(name, Path(folder))
            for scope, behaves in product(SCOPES, CHECKS):
                with _place_words(f"{kind.name}, {scope} request ({name}), check {behaves.__name__}"):
                    behaves(stage, kind, scope)


@contextmanager
def _place_words(where: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None
    except Exception as error:
        raise AssertionError(f"{where}: it fails with {type(error).__name__}: {error}") from error


def _require(condition: object, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


# --- what a class says of itself ---


def says_what_it_is(kind: type[Unlearner]) -> None:
    for each in ("name", "title", "source"):
        _require(isinstance(getattr(kind, each, None), str) and getattr(kind, each), f"it has no {each}")
    _require(kind.__doc__, "it has no docstring")
    for name, field in kind.model_fields.items():
        _require(field.description or name == "method", f"its setting {name} has no description below it")
    of_method = kind.model_fields.get("method")
    _require(of_method is not None and of_method.default == kind.name, "its field `method` does not hold its name")


def settings_survive_toml(kind: type[Unlearner]) -> None:
    method = kind()
    again = validate(kind, tomllib.loads(to_toml(method)), kind.name)
    _require(again == method, "its settings are others after they were written as TOML and read again")


# --- what it does ---


def every_round_gives_a_finite_state(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    """States have the same layout, are as many as announced, and the last differs from the start."""
    steps, start = stage.play(kind, scope).steps, stage.trained.start
    announced = _announced(stage, kind, scope)
    _require(
        len(steps) in announced and 0 not in announced,
        f"it announces {_rounds(announced)} and yields {len(steps)} steps",
    )
    for number, step in enumerate(steps):
        _require(step.phase, f"step {number} has no phase")
        _require(step.state.is_finite(), f"the state of step {number} is not finite")
        same = step.state.blocks == start.blocks and layout_of(step.state.tensors) == layout_of(start.tensors)
        _require(same, f"the state of step {number} has other tensors than the model")
    _require(steps[-1].state != start, "its last state is the one it started from")


def _announced(stage: Stage, kind: type[Unlearner], scope: str) -> range:
    """How many steps there may be."""
    training, request = stage.trained.training, stage.requests[scope]
    return range(kind().rounds(training, request), kind().most_rounds(training, request) + 1)


def _rounds(announced: range) -> str:
    return " to ".join(map(str, sorted({announced[0], announced[-1]}))) + " rounds"


def needs_no_more_than_it_says(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    """Whatever it does not list is taken away or spoilt, and its states stay the same to the byte."""
    world, request, trained = stage.world, stage.requests[scope], stage.trained
    gone = {LEAVING_CLIENT} if scope == "client" and "leaving client" not in kind.needs else set()
    federation: Engine = world.federation
    if gone or "forget data" not in kind.needs:
        activations = world.evaluator.activations if "forget data" in kind.needs else poisoned(world, request)
        shards = [shard for shard in world.shards if shard.client not in gone]
        federation = make_engine(world.config.engine, world.server.model, shards, activations, world.server.device)
    if "history" not in kind.needs:
        history = History(copytree(trained.history.folder, stage.folder() / "history"))
        ends = {history.state_path(number) for number in (0, trained.training.rounds)}
        for path in {*history.folder.rglob("*.safetensors"), *history.folder.rglob(UPDATES)} - ends:
            path.unlink()
        trained = replace(trained, history=history)
    starved = [step.state for step in stage.unlearn(kind, scope, federation, trained)]
    listed = ", ".join(sorted(kind.needs)) or "nothing"
    same = starved == [step.state for step in stage.play(kind, scope).steps]
    _require(same, f"its states change when all that it does not need is taken away; it lists {listed}")


def jobs_name_only_what_it_may_read(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    for client, job in stage.play(kind, scope).asked:
        _require(job.request == stage.requests[scope], f"the job {job.objective!r} does not carry the request")
        if "forget data" not in kind.needs:
            _require(job.data == "retain", f"it needs no forget data, and asks for {job.data} pairs")
            reads = objective(job.objective).reads
            _require("forget" not in reads, f"it needs no forget data, and {job.objective!r} reads forget pairs")
        if scope == "client" and "leaving client" not in kind.needs:
            _require(client != LEAVING_CLIENT, "it asks the client that withdraws, and does not list that it needs it")


def stopping_changes_no_byte(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    """Stopped after every round, each time one round further from the journal, with bytes between all.

    The last run is the whole method, asking no one again. Every job and every answer arrives as it was sent.
    """
    whole, folder, asked = stage.play(kind, scope), stage.folder(), 0
    posted = Encoding(stage.world.federation)
    steps: list[Step] = []
    for stop in range(1, len(whole.steps) + 1):
        spy = Spy(posted)
        steps = list(islice(stage.unlearn(kind, scope, Journal(spy, folder)), stop))
        asked += len(spy.asked)
    _require(not posted.altered, f"{', '.join(posted.altered[:1])} does not survive its encoding as bytes")
    _require(asked == len(whole.asked), f"stopped after every round, it asks {asked} times, not {len(whole.asked)}")
    for number, (one, two) in enumerate(zip(steps, whole.steps, strict=True)):
        same = one.state == two.state and one.notes == two.notes and one.loss == two.loss
        _require(same, f"stopped after every round and given its jobs as bytes, its step {number} is another")


def nothing_given_is_changed(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    before, after = stage.play(kind, scope).given
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    _require(before and not changed, f"it changes what it was given: {', '.join(changed[:3])}")


def a_failing_client_is_refused(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    """A client that sends no numbers is named, and the round continues without it."""
    failing, whole = Failing(stage.world.federation), stage.play(kind, scope)
    steps = list(stage.unlearn(kind, scope, failing))
    announced = _announced(stage, kind, scope)
    _require(len(steps) in announced, f"it announces {_rounds(announced)} and yields {len(steps)} when a client fails")
    _require(all(step.state.is_finite() for step in steps), "a client that fails makes its states not finite")
    refused = {client for step in steps for client in step.notes.get("rejected", {})}
    expected = {FAILING} if failing.spoilt else set()
    _require(refused == expected, f"clients {sorted(expected)} fail, and its notes refuse {sorted(refused)}")
    learnt = [update.delta for update in whole.answers if update.client == FAILING and "loss" in update.values]
    if any(delta is None or delta.norm() > 0 for delta in learnt):
        _require(steps[-1].state != whole.steps[-1].state, "what a failing client would have sent is used all the same")


def a_faulty_client_is_named(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    """In one of the ways to fail, another for every method and request; the checks below try them all."""
    chosen = int(generator(0, "fault", kind.name, scope).integers(len(FAULTS)))
    withstands(stage, kind, scope, FAULTS[chosen])


def withstands(stage: Stage, kind: type[Unlearner], scope: str, fault: Fault) -> None:
    """The method ends in finite states without the faulty client, or in one line; either names it."""
    engine, late = stage.world.federation, fault == "delay"
    patience = max(PATIENCE, 5 * stage.play(kind, scope).longest_wait) if fault == "silence" else None
    training = stage.trained.training.model_copy(update={"deadline": patience})
    sound = Guarded(engine if late else Faulty(engine, fault), training)
    # Checks put answers in order, so what is late has to be so after them for the method to notice.
    federation = Faulty(sound, fault) if late else sound
    expected = {FAILING} if faulty_at_all(stage, kind, scope) and not late else set()
    try:
        steps = list(stage.unlearn(kind, scope, federation))
    except UserError as error:
        named = f"client {FAILING}: " in str(error) and "\n" not in str(error)
        _require(expected and named, f"a client's {fault} ends it with: {error}")
        return
    announced = _announced(stage, kind, scope)
    problem = f"a client's {fault} makes it yield {len(steps)} steps, and it announces {_rounds(announced)}"
    _require(len(steps) in announced, problem)
    _require(all(step.state.is_finite() for step in steps), f"a client's {fault} makes its states not finite")
    found = set(sound.left_out())
    _require(found == expected, f"clients {sorted(expected)} fail ({fault}), and {sorted(found)} are named")
    if late:
        same = [step.state for step in steps] == [step.state for step in stage.play(kind, scope).steps]
        _require(same, "its states depend on the order in which answers arrive")


def faulty_at_all(stage: Stage, kind: type[Unlearner], scope: str) -> bool:
    """Whether the method asks the client that fails."""
    return any(client == FAILING for client, _ in stage.play(kind, scope).asked)


def what_travels_is_metered(stage: Stage, kind: type[Unlearner], scope: str) -> None:
    cost, asked = stage.play(kind, scope).cost, stage.play(kind, scope).asked
    counted = cost.messages == len(asked) and (not asked or min(cost.bytes_down, cost.bytes_up, cost.pairs_passed) > 0)
    _require(counted, "it asks clients in ways that the meter does not see")


CHECKS_OF_CLASSES: tuple[Callable[[type[Unlearner]], None], ...] = (says_what_it_is, settings_survive_toml)
CHECKS: tuple[Callable[[Stage, type[Unlearner], str], None], ...] = (
    every_round_gives_a_finite_state,
    needs_no_more_than_it_says,
    jobs_name_only_what_it_may_read,
    stopping_changes_no_byte,
    nothing_given_is_changed,
    a_failing_client_is_refused,
    a_faulty_client_is_named,
    what_travels_is_metered,
)


def poisoned(world: World, request: Request) -> Activations:
    """Activations in which everything a request names is NaN: code that reads it cannot hide it."""
    named = np.concatenate([shard.train[forget_mask(request, shard)] for shard in world.shards])

    def spoilt(array: np.ndarray) -> np.ndarray:
        copied = np.array(array)
        copied[named] = np.nan
        return copied

    kept = world.evaluator.activations
    arrays = (kept.image, kept.text, kept.pooled_image, kept.pooled_text)
    image, text, pooled_image, pooled_text = map(spoilt, arrays)
    return Activations(image, text, kept.text_mask, pooled_image, pooled_text)


def fingerprint(trained: Trained) -> dict[str, str]:
    """Hashes of every file of the history, and of both ends of the training as they are held in memory."""
    files = [path for path in trained.history.folder.rglob("*") if path.is_file()]
    contents = {str(path): path.read_bytes() for path in files}
    for end, state in {"initial": trained.initial, "final": trained.final}.items():
        contents |= {f"{end}/{name}": tensor.numpy().tobytes() for name, tensor in state.tensors.items()}
    return {name: hashlib.sha256(each).hexdigest() for name, each in contents.items()}
