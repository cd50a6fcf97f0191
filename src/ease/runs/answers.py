"""Answers to requests as they are kept in a run, and the trained model that they began from."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig
from ease.federation.history import ROUNDS
from ease.methods import make_method
from ease.methods.base import Trained, Unlearner
from ease.methods.unlearning_base import UnlearningBase
from ease.params import Params
from ease.requests.request import REQUESTS, Request, SampleRequest, every_id, in_words
from ease.requests.tombstones import Tombstones, read_tombstones
from ease.runs.head import Head, Release, write_head
from ease.runs.records import AnswerRecord, read_record
from ease.runs.resolve import request_id
from ease.runs.run import Run, check_answer_file, check_released_model
from ease.runs.world import World
from ease.storage import digest, read_json, remove_leftovers, sha256
from ease.trainers import trainer_of

BASE = "base.safetensors"


@dataclass(frozen=True)
class StoredAnswer:
    """One method's answer to one request, in its own folder. It is complete once `record.json` exists."""

    folder: Path

    @property
    def model_path(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def record_path(self) -> Path:
        return self.folder / "record.json"

    @property
    def audit_path(self) -> Path:
        """What `ease audit` found."""
        return self.folder / "audit.json"

    @property
    def quick_path(self) -> Path:
        """What a quick look found."""
        return self.folder / "quick.json"

    @property
    def bases_path(self) -> Path:
        """Directions that later training must keep locked."""
        return self.folder / "bases.safetensors"

    @property
    def held_path(self) -> Path:
        """The state at which they are held."""
        return self.folder / "held.safetensors"

    @property
    def base_path(self) -> Path:
        """What the next answer builds on."""
        return self.folder / BASE

    @property
    def rounds_path(self) -> Path:
        """Rounds of a training from the start that later requests can go on from."""
        return self.folder / ROUNDS

    @property
    def done(self) -> bool:
        return self.record_path.is_file()

    def model(self) -> Params:
        check_answer_file(self.record(), self.model_path)
        return Params.load(self.model_path)

    def base(self) -> UnlearningBase | None:
        """None: its method leaves nothing for the next one to build on."""
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


def _before(run: Run, request: Request | None) -> tuple[Head, TrainingConfig]:
    """The head and the training that a request begins from, or began from if it is closed already.

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


def trained_of(run: Run, request: Request | None = None) -> Trained:
    """What a method starts from: the finished training, or the last release; for a request that is closed already,
    what was there before it."""
    head, training = _before(run, request)
    release = head.follows(training.rounds)
    start = None if release is None else Params.load(check_released_model(run, release))
    held = run.held(head)
    answer = None if release is None else StoredAnswer(run.model_path(release).parent)
    return Trained(
        run.history_of(head),
        training,
        run.config.model.temperature,
        run.config.seed,
        answered=start,
        gone=head.gone,
        locked={} if held is None else held.bases,
        base=None if answer is None else answer.base(),
    )


def check_method(run: Run, method: Unlearner) -> None:
    """Refuse a method that cannot answer requests of such a run, or settings of it that cannot."""
    trainer = trainer_of(run.config.model)
    if trainer not in method.trainers and trainer == "sums":
        raise UserError(
            f"--method {method.name}: this run has a closed-form head, and forgets exactly by subtracting sums; leave "
            "out --method"
        )
    if trainer not in method.trainers:
        raise UserError(
            f"--method {method.name}: only for runs with a closed-form head; leave out --method, or train with "
            "--set model.projector=closed_form --set model.lora=off"
        )
    method.check(run.config.training)


def usual_method(run: Run) -> Unlearner:
    """The method by which requests of a run are answered where none is named."""
    return make_method("exact" if trainer_of(run.config.model) == "sums" else "ease")


def start_hash(run: Run, request: Request | None = None) -> str:
    """Names the state that an answer begins from."""
    head, training = _before(run, request)
    release = head.follows(training.rounds)
    if release is not None:
        check_released_model(run, release)
        return release.model_sha256
    return run.history_of(head).state_sha256(training.rounds)


def open_world(run: Run, request: Request | None = None, stones: Tombstones | None = None) -> World:
    """The world of a run as it is now, or as it was when a request that is closed since was answered.

    What some finished answer forgot may have vanished from disk. What `stones` bar is not read; by default those of
    the run.
    """
    head = run.head if request is None else run.head.before(request)
    known = run.known(len(head.releases))
    forgotten = set() if known is None else {each for asked in _answered(run) for each in every_id(asked, known[0])}
    stones = stones or read_tombstones(run.folder)
    world = World.open(run.config, known, forgotten, stones.bars if stones.ids else None)
    name = run.name if run.config.remote and known is not None else world.run_name
    # Pairs outside training are erased for whoever looks, also at what came before the request was closed.
    world = world.erasing(*run.head.gone, *(() if request is None else (request,)))
    return replace(world.without(*head.gone), renewed=head.renewed, run_name=name)


def _answered(run: Run) -> list[Request]:
    """Every request that has a finished answer."""
    stored = [StoredAnswer(path.parent) for path in sorted(run.folder.glob("requests/*/*/record.json"))]
    return [each.record().request for each in stored]


def release(run: Run, name: str) -> Release:
    """Make a finished answer the model that the run continues from: its request is closed, its pairs are gone.

    An answer that is released already is the release that it became, so a command that failed after it can be repeated.
    """
    stored, request, _ = find_answer(run, name)
    answer = stored.folder.relative_to(run.folder / "requests").as_posix()
    with run.locked():
        remove_leftovers(run.folder)  # of a release that was killed while it wrote the head
        closed = next((each for each in run.head.releases if each.request == request), None)
        if closed is not None and closed.answer == answer:
            return closed
        if closed is not None:
            raise UserError(f"{name}: this request is closed already by {closed.answer}; the run continues from there")
        if (journal := stored.folder / "journal").exists():
            shutil.rmtree(journal)  # of an answer that was struck while it cleaned up: nobody comes back to it
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
        write_head(run.folder / "head.json", Head(releases=(*run.head.releases, made)))
    return made


def settle_head(run: Run) -> Release | None:
    """Before more rounds: what the one answered request left is what the run goes on from; more than one answer is
    for a person to choose from, and training refuses until someone has. No one can choose an answer that a release
    has overtaken."""
    grows = (run.folder / "run.json").is_file() and run.history.rounds() < run.config.training.rounds
    answered = run.unreleased() if grows else []
    for name in answered:
        for record in sorted((run.folder / "requests" / name).glob("*/record.json")):
            check_current(Run.load(run.folder), StoredAnswer(record.parent))
    if len(answered) != 1 or not (run.folder / "requests" / answered[0] / "ease" / "record.json").is_file():
        return None
    return release(Run.load(run.folder), answered[0])


def check_current(run: Run, stored: StoredAnswer) -> None:
    """Refuse an answer that began from another model than the run has now."""
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
            f"{stored.folder}: this answer began from the model before {overtaking[0]} was released, and the run goes "
            "on from that release; delete the folder, and run `ease forget` again if the request still stands"
        )
    raise UserError(
        f"{stored.folder}: this answer began from a model that the run has been trained beyond; delete the folder "
        "and run `ease forget` again"
    )


def check_named(run: Run, request: Request) -> None:
    """Refuse a name under which another request was answered: its folder holds what was done for that one."""
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
    """Where a method's answer to a request lives; other settings of the method get another folder."""
    settings = method.model_dump(mode="json")
    label = method.name if method == type(method)() else f"{method.name}-{digest(settings)[:8]}"
    return StoredAnswer(run.folder / "requests" / request_id(request) / label)


def find_answer(run: Run, name: str) -> tuple[StoredAnswer, Request, Unlearner]:
    """The finished answer that `REQUEST` or `REQUEST/METHOD` names, e.g. `client-3` or `client-3/retrain`."""
    request_name, _, label = name.partition("/")
    if ".." in Path(name).parts or Path(name).is_absolute() or Path(label).is_absolute() or "\0" in name:
        raise UserError(f"{name!r}: leads out of the run; write REQUEST or REQUEST/METHOD, such as client-3/ease")
    stored = StoredAnswer(run.folder / "requests" / request_name / (label or usual_method(run).name))
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
    """The names of all finished answers."""
    return sorted(
        path.parent.relative_to(run.folder / "requests").as_posix()
        for path in run.folder.glob("requests/*/*/record.json")
    )


def continuation(stored: StoredAnswer, rounds: int, locked: bool) -> StoredAnswer:
    """Where further training after a request is kept."""
    return StoredAnswer(stored.folder / f"after-{rounds}-{'locked' if locked else 'free'}")
