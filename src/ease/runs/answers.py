"""Stored results of requests, and the run as a request finds it."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ease.errors import Busy, UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.history import ROUNDS
from ease.methods import make_method
from ease.methods.base import Trained, Unlearner
from ease.methods.unlearning_base import UnlearningBase
from ease.params import Params
from ease.requests.request import REQUESTS, Request, SampleRequest, every_id, in_words
from ease.requests.tombstones import Tombstones, read_tombstones
from ease.runs.head import Release, ReleaseChain, count_releases, write_head
from ease.runs.records import AnswerRecord, read_record
from ease.runs.resolve import request_id
from ease.runs.run import Run, check_answer_file, released_model
from ease.runs.world import World
from ease.storage import digest, read_json, remove_leftovers, sha256
from ease.trainers import trainer_of

BASE = "base.safetensors"


@dataclass(frozen=True)
class StoredAnswer:
    """One method's result for one request, in its own folder. It is complete once `record.json` exists."""

    folder: Path

    @property
    def model_path(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def record_path(self) -> Path:
        return self.folder / "record.json"

    @property
    def audit_path(self) -> Path:
        """Path of the audit's record."""
        return self.folder / "audit.json"

    @property
    def quick_path(self) -> Path:
        """Path of the quick check's record."""
        return self.folder / "quick.json"

    @property
    def bases_path(self) -> Path:
        """Path of the directions that later training keeps locked."""
        return self.folder / "bases.safetensors"

    @property
    def base_path(self) -> Path:
        """Path of the state that the next answer builds on."""
        return self.folder / BASE

    @property
    def rounds_path(self) -> Path:
        """Folder of the rounds of a training from the start that later requests continue."""
        return self.folder / ROUNDS

    @property
    def done(self) -> bool:
        return self.record_path.is_file()

    def model(self) -> Params:
        """The model, checked against the hash in its record."""
        record = self.record()
        if not self.model_path.is_file():
            check_answer_file(record, self.model_path)
        return Params.load(self.model_path, record.files.get(self.model_path.name), f"restore it, or {record.remedy}")

    @property
    def model_sha256(self) -> str:
        """The recorded hash of the model."""
        return self.record().files[self.model_path.name]

    def base(self) -> UnlearningBase | None:
        """The state that the next request builds on, or None if the method leaves none."""
        record = self.record()
        if BASE not in record.files:
            return None
        check_answer_file(record, self.base_path)
        return UnlearningBase.load(self.base_path)

    def record(self) -> AnswerRecord:
        if not self.done:
            raise UserError(
                f"{self.folder}: this request is not finished; run the same `ease forget` again to continue it"
            )
        return read_record(AnswerRecord, self.record_path)


def _before(run: Run, request: Request | None) -> tuple[ReleaseChain, TrainingConfig]:
    """The head and the training that a request starts from, or started from if it is closed.

    The last finished round is a usable model, so a training that stopped early does not keep requests waiting.
    """
    training = run.training
    if not training.rounds:
        raise UserError(f"{run.folder}: nothing is trained here yet; finish it with `ease train`")
    if lost := [each.answer for each in run.head.releases if each.after_round > training.rounds]:
        # An older round would contain what the release has forgotten.
        raise UserError(f"{run.folder}: rounds before the release of {lost[-1]} are missing; restore them")
    head = run.head if request is None else run.head.before(request)
    closed = next((each for each in run.head.releases if each.request == request), None)
    if closed is not None and closed.purged:
        raise UserError(
            f"{run.folder}: {closed.answer} was purged and the model before it is gone; audit and compare before that"
        )
    if closed is not None:
        training = training.model_copy(update={"rounds": closed.after_round})
    return head, training


@dataclass(frozen=True)
class Snapshot:
    """A run as a request finds it. A command reads it once and uses it from its checks to its summary."""

    run: Run
    request: Request | None
    head: ReleaseChain
    """Releases before the request."""
    trained: Trained
    """The training and the model that a method starts from."""
    start_sha256: str
    """Hash of that model."""

    @classmethod
    def of(cls, run: Run, request: Request | None = None) -> "Snapshot":
        """The run now, or, for a closed request, as it was before the request was answered."""
        head, training = _before(run, request)
        history = run.history_of(head)
        release = head.follows(training.rounds)
        lock = run.held(head)
        if release is None:
            start, base, start_sha256 = None, None, history.state_sha256(training.rounds)
        else:
            start = released_model(run, release) if lock is None else lock.state
            base = StoredAnswer(run.model_path(release).parent).base()
            start_sha256 = release.model_sha256
        trained = Trained(
            history,
            training,
            run.config.model.temperature,
            run.config.seed,
            answered=start,
            gone=head.gone,
            locked={} if lock is None else lock.bases,
            base=base,
        )
        return cls(run, request, head, trained, start_sha256)

    def check_unchanged(self) -> None:
        """Refuse a run that another process trained further or released in since; the caller holds the run's lock."""
        if _before(self.run, self.request) != (self.head, self.trained.training):
            raise Busy(f"{self.run.folder}: another process has changed this run; run the same command again")


def trained_of(run: Run, request: Request | None = None) -> Trained:
    """The training that a method starts from; for a closed request, as it was before the request was answered."""
    return Snapshot.of(run, request).trained


def check_method(run: Run, method: Unlearner) -> None:
    """Refuse a method, or settings of it, that cannot answer requests of this run."""
    trainer = trainer_of(run.config.model, run.config.training)
    if trainer not in method.trainers and trainer == "sums":
        raise UserError(
            f"--method {method.name}: this run has a closed-form head, and forgets exactly by subtracting sums; leave "
            "out --method"
        )
    if trainer not in method.trainers and trainer == "shards":
        raise UserError(
            f"--method {method.name}: this run was trained in shards, and its model is their mean; choose sharded "
            "or retrain"
        )
    if method.trainers == {"shards"}:
        method.check(run.config.training)
    if trainer not in method.trainers:
        raise UserError(
            f"--method {method.name}: only for runs with a closed-form head; leave out --method, or train with "
            "--set model.projector=closed_form --set model.lora=off"
        )
    method.check(run.config.training)


def default_method(run: Run) -> Unlearner:
    """The default method for requests of a run."""
    names = {"fedavg": "ease", "sums": "exact", "shards": "sharded"}
    return make_method(names[trainer_of(run.config.model, run.config.training)])


def start_hash(run: Run, request: Request | None = None) -> str:
    """Hash of the model that a request starts from."""
    head, training = _before(run, request)
    release = head.follows(training.rounds)
    if release is not None:
        released_model(run, release)
        return release.model_sha256
    return run.history_of(head).state_sha256(training.rounds)


def open_world(run: Run, request: Request | None = None, stones: Tombstones | None = None) -> World:
    """The world of a run now, or, for a closed request, as it was when the request was answered.

    Pairs that a finished result forgot may be missing from disk. Pairs that `stones` bar are not read; by default
    these are the run's tombstones.
    """
    head = run.head if request is None else run.head.before(request)
    known = run.known(len(head.releases))
    forgotten = set() if known is None else {each for asked in _answered(run) for each in every_id(asked, known[0])}
    stones = stones or read_tombstones(run.folder)
    world = World.open(run.config, known, forgotten, stones.bars if stones.ids else None)
    name = run.name if run.config.remote and known is not None else world.run_name
    # Pairs outside training are erased for every reader, also in results from before the request was closed.
    world = world.erasing(*run.head.gone, *(() if request is None else (request,)))
    return replace(world.without(*head.gone), renewed=head.renewed, run_name=name)


def _answered(run: Run) -> list[Request]:
    """The requests that have a finished result."""
    stored = [StoredAnswer(path.parent) for path in sorted(run.folder.glob("requests/*/*/record.json"))]
    return [each.record().request for each in stored]


def release(run: Run, name: str) -> Release:
    """Make a finished result the run's model; its request is closed and its pairs are gone.

    Releasing it again has no effect, so a command that failed afterwards can be repeated.
    """
    stored, request, _ = find_answer(run, name)
    answer = stored.folder.relative_to(run.folder / "requests").as_posix()
    with run.locked():
        remove_leftovers(run.folder)  # of a release that was killed while it wrote the head
        closed = next((each for each in run.head.releases if each.request == request), None)
        if closed is not None and closed.answer == answer:
            count_releases(run.folder, run.head)  # a release that was killed may not have
            return closed
        if closed is not None:
            raise UserError(f"{name}: this request is closed already by {closed.answer}; the run continues from there")
        if (journal := stored.folder / "journal").exists():
            shutil.rmtree(journal)  # of an answer that was killed during its cleanup: nothing else removes it
        again = replace(run.history, place=stored.rounds_path.relative_to(run.folder).as_posix())
        if stored.rounds_path.exists() and again.rounds() < run.history.rounds():
            raise UserError(
                f"{stored.rounds_path}: rounds of this training are missing; delete {stored.folder} and run `ease "
                "forget` again"
            )
        made = Release(
            request=request,
            answer=answer,
            model_sha256=sha256(stored.model_path),
            after_round=run.history.rounds(),
            rounds=again.place if stored.rounds_path.exists() else "",
        )
        head = run.head.model_copy(update={"releases": (*run.head.releases, made)})
        write_head(run.folder / "head.json", head)
        count_releases(run.folder, head)
    return made


def release_only_result(run: Run) -> Release | None:
    """Release the only result before more rounds are trained.

    If there are several, training refuses until a person has chosen one. A result that another release has replaced
    cannot be chosen.
    """
    grows = (run.folder / "run.json").is_file() and run.history.rounds() < run.config.training.rounds
    answered = run.unreleased() if grows else []
    if grows and run.head.releases:
        with run.locked():
            count_releases(run.folder, run.head)  # a process that was killed after it released may not have
    for name in answered:
        for record in sorted((run.folder / "requests" / name).glob("*/record.json")):
            check_current(Run.load(run.folder), StoredAnswer(record.parent))
    if len(answered) != 1 or not (run.folder / "requests" / answered[0] / "ease" / "record.json").is_file():
        return None
    return release(Run.load(run.folder), answered[0])


def check_current(run: Run, stored: StoredAnswer) -> None:
    """Refuse a result that started from another model than the run has now."""
    record = stored.record()
    name = stored.folder.relative_to(run.folder / "requests").as_posix()
    if any(each.purged and each.answer == name for each in run.head.releases):
        return  # it was released from there; what was there is gone
    if record.trained_sha256 == start_hash(run, record.request):
        return
    after = run.history.rounds()
    overtaking = [
        each.answer
        for each in run.head.releases
        if each.after_round == after and start_hash(run, each.request) == record.trained_sha256
    ]
    if overtaking:
        raise UserError(
            f"{stored.folder}: this answer began from the model before {overtaking[0]} was released, and the run "
            "continues from that release; delete the folder, and run `ease forget` again if the request is still open"
        )
    raise UserError(
        f"{stored.folder}: this answer began from a model that the run has been trained beyond; delete the folder "
        "and run `ease forget` again"
    )


def check_named(run: Run, request: Request) -> None:
    """Refuse a name that another answered request has."""
    if not isinstance(request, SampleRequest) or not request.name:
        return
    asked = read_tombstones(run.folder).renamed(request)
    for path in sorted((run.folder / "requests" / request.name).glob("*/request.json")):
        found = REQUESTS.validate_python(read_json(path).get("request"))
        if found not in (request, asked):
            raise UserError(
                f"--name {request.name}: another request has this name ({in_words(found)}); choose another name"
            )


def answer_of(run: Run, request: Request, method: Unlearner) -> StoredAnswer:
    """The place of a method's result for a request; other settings of the method get another folder."""
    settings = method.model_dump(mode="json")
    label = method.name if method == type(method)() else f"{method.name}-{digest(settings)[:8]}"
    return StoredAnswer(run.folder / "requests" / request_id(request) / label)


def find_answer(run: Run, name: str) -> tuple[StoredAnswer, Request, Unlearner]:
    """The finished result that `REQUEST` or `REQUEST/METHOD` names, such as `client-3` or `client-3/retrain`."""
    request_name, _, label = name.partition("/")
    if ".." in Path(name).parts or Path(name).is_absolute() or Path(label).is_absolute() or "\0" in name:
        raise UserError(f"{name!r}: leads out of the run; write REQUEST or REQUEST/METHOD, such as client-3/ease")
    stored = StoredAnswer(run.folder / "requests" / request_name / (label or default_method(run).name))
    if not label and not stored.done:  # the queue may have answered by another method
        released = [each.answer for each in run.head.releases if each.answer.startswith(f"{request_name}/")]
        stored = StoredAnswer(run.folder / "requests" / released[-1]) if released else stored
    if not stored.done:
        known = ", ".join(finished_answers(run)) or "none"
        raise UserError(f"{name}: no finished request of that name in {run.folder}; finished: {known}")
    check_current(run, stored)
    record = stored.record()
    return stored, record.request, make_method(record.method_name, table=record.method)


def finished_answers(run: Run) -> list[str]:
    """The names of all finished results."""
    return sorted(
        path.parent.relative_to(run.folder / "requests").as_posix()
        for path in run.folder.glob("requests/*/*/record.json")
    )


def continuation(stored: StoredAnswer, rounds: int, locked: bool) -> StoredAnswer:
    """The place of further training after a request."""
    return StoredAnswer(stored.folder / f"after-{rounds}-{'locked' if locked else 'free'}")
