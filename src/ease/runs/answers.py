"""Answers to requests as they are kept in a run, and the trained model that they began from."""

from dataclasses import dataclass
from pathlib import Path

from ease.errors import UserError
from ease.methods import make_method
from ease.methods.base import Trained, Unlearner
from ease.params import Params
from ease.requests.request import Request
from ease.runs.records import AnswerRecord, read_record
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.storage import digest


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
    def bases_path(self) -> Path:
        """Directions that later training must keep locked."""
        return self.folder / "bases.safetensors"

    @property
    def held_path(self) -> Path:
        """The state at which they are held."""
        return self.folder / "held.safetensors"

    @property
    def done(self) -> bool:
        return self.record_path.is_file()

    def model(self) -> Params:
        return Params.load(self.model_path)

    def record(self) -> AnswerRecord:
        if not self.done:
            raise UserError(
                f"{self.folder}: this request is not finished; run the same `ease forget` again to continue it"
            )
        return read_record(AnswerRecord, self.record_path)


def trained_of(run: Run) -> Trained:
    """The finished training of a run."""
    rounds, wanted = run.history.rounds(), run.config.training.rounds
    if rounds < wanted:
        raise UserError(
            f"{run.folder}: training stopped after round {rounds} of {wanted}; finish it first with `ease train`"
        )
    return Trained(run.history, run.config.training, run.config.model.temperature, run.config.seed)


def trained_hash(trained: Trained) -> str:
    """Names the trained state that an answer begins from, by the hash that its round recorded."""
    return trained.history.record(trained.training.rounds)["sha256"]["state.safetensors"]


def check_current(run: Run, stored: StoredAnswer) -> None:
    """Refuse an answer that was given before the run was trained further."""
    if stored.record().trained_sha256 != trained_hash(trained_of(run)):
        raise UserError(
            f"{stored.folder}: this answer began from a model that the run has been trained beyond; delete the folder "
            "and run `ease forget` again"
        )


def answer_of(run: Run, request: Request, method: Unlearner) -> StoredAnswer:
    """Where a method's answer to a request lives; other settings of the method get another folder."""
    settings = method.model_dump(mode="json")
    label = method.name if method == type(method)() else f"{method.name}-{digest(settings)[:8]}"
    return StoredAnswer(run.folder / "requests" / request_id(request) / label)


def find_answer(run: Run, name: str) -> tuple[StoredAnswer, Request, Unlearner]:
    """The finished stored that `REQUEST` or `REQUEST/METHOD` names, e.g. `client-3` or `client-3/retrain`."""
    request_name, _, label = name.partition("/")
    stored = StoredAnswer(run.folder / "requests" / request_name / (label or "ease"))
    if not stored.done:
        known = sorted(
            str(p.parent.relative_to(run.folder / "requests")) for p in run.folder.glob("requests/*/*/record.json")
        )
        raise UserError(
            f"{name}: no finished request of that name in {run.folder}; finished: {', '.join(known) or 'none'}"
        )
    check_current(run, stored)
    record = stored.record()
    return stored, record.request, make_method(record.method_name, table=record.method)


def continuation(stored: StoredAnswer, rounds: int, locked: bool) -> StoredAnswer:
    """Where further training after a request is kept."""
    return StoredAnswer(stored.folder / f"after-{rounds}-{'locked' if locked else 'free'}")
