"""The content of a certificate: an in-toto statement about one model file, and its words."""

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from ease.audit.verdict import EVIDENCE
from ease.config import Config
from ease.operations.evidence.canonical import Refuted, parse_as
from ease.runs.records import NamedMethod

PAYLOAD = "application/vnd.in-toto+json"
STATEMENT: Final = "https://in-toto.io/Statement/v1"
CERTIFICATE: Final = "urn:ease:certificate:1"
MODEL = "model.safetensors"

UNAUDITED = "No verdict: this answer was not audited, so nothing was measured beside retraining."
LIMITS = (
    f"{EVIDENCE.capitalize()} is the most that measures can show; this is not a proof of deletion.",
    "It holds for the one model file whose hash it names, and for no copy that was made of earlier models.",
    "It says nothing of what remains on disks: the run keeps its history until someone deletes it.",
    "The first signer measured the figures; anyone with the run can measure them again with ease verify.",
)

EXACT_LIMITS = (
    "The model is the one that training on the retained pairs gives; whether clients summed the pairs that they say "
    "they hold, no hash can show.",
    *LIMITS[1:],
)
"""For a closed-form head that was solved again and compared with retraining."""


class Digests(Config):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Subject(Config):
    """The file that the statement is about."""

    name: str
    digest: Digests


class Code(Config):
    """What computed all this."""

    version: str
    sources_sha256: str
    """Hash of the names and hashes of the installed package's files."""
    libraries: dict[str, str]


class Models(Config):
    """Hashes of model files."""

    before: str
    after: str
    retrain: str | None
    """Hash of the retrained model in the audit."""
    sums: str | None = None
    """Hash of the sums from which the model after was solved, if it has a closed-form head."""
    retrain_sums: str | None = None
    """Hash of the sums of retraining, if the audit compared them."""


class Directions(Config):
    """The directions that later training leaves out, and their angles to the retained contribution."""

    bases_sha256: str
    spectrum: dict[str, Any] | None
    """Principal cosines and energies of every block, as the record has them."""


class VerdictWords(Config):
    passed: bool | None
    words: str


class LogPosition(Config):
    """The last line of the run's log when this was issued."""

    sequence: int
    sha256: str
    key: str
    """Id of the key that signs the log."""


class Certificate(Config):
    """The content of a certificate."""

    format: Literal[1] = 1
    issued: str
    asked: str
    """The request in a sentence."""
    request: dict[str, Any]
    """The request; its pairs are given by their number and a salted hash."""
    answer: str
    """The answer's folder in its request."""
    method: NamedMethod
    """Its name as `method`, and its settings."""
    models: Models
    code: Code
    configuration: dict[str, Any]
    seeds: dict[str, int | str]
    files: dict[str, str]
    """The answer's files and the hash of each."""
    directions: Directions | None
    costs: dict[str, float]
    figures: dict[str, float]
    """Recall of forget, retained and test pairs in percent, and the size of the galleries."""
    audit: dict[str, Any] | None
    """Every measure with its interval and band, as the audit's record has it."""
    verdict: VerdictWords
    not_tested: tuple[str, ...]
    outstanding: tuple[str, ...] = ()
    """What could not be deleted at sites that are gone for good."""
    limits: tuple[str, ...] = LIMITS
    log: LogPosition

    @field_validator("request")
    @classmethod
    def _has_scope_and_name(cls, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("scope") not in ("client", "class", "sample") or not isinstance(request.get("name"), str):
            raise ValueError("the request has no scope or no name")
        return request


class Statement(Config):
    """An in-toto statement, version 1."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(STATEMENT, alias="_type")
    subject: tuple[Subject, ...] = Field(min_length=1, max_length=1)
    predicateType: Literal["urn:ease:certificate:1"] = CERTIFICATE
    predicate: Certificate


def asked(request: dict[str, Any]) -> str:
    """A request, as others may read it, in a sentence."""
    pairs = request["pairs"]
    those = "1 pair was" if pairs == 1 else f"{pairs} pairs were"
    match request["scope"]:
        case "client":
            named = ", ".join(map(str, request["clients"]))
            return f"Client {named} withdrew: {those} to be forgotten."
        case "class":
            named = request["text"] or ", ".join(map(str, request["classes"]))
            return f"All of one kind ({named}) was to go: {those} to be forgotten."
        case _:
            outside = {split: count for split, count in request.get("splits", {}).items() if split != "train"}
            said = ", ".join(f"{count} {split.replace('_', '-')}" for split, count in outside.items())
            never = f" Never trained on, and removed from evaluation and search: {said}." if said else ""
            return f"{those} to be forgotten, each named by its id.{never}"


def statement_of(certificate: Certificate) -> dict[str, Any]:
    subject = Subject(name=MODEL, digest=Digests(sha256=certificate.models.after))
    return Statement(subject=(subject,), predicate=certificate).model_dump(mode="json", by_alias=True)


def read_statement(content: bytes, source: str) -> Certificate:
    """The certificate in signed bytes."""
    found = parse_as(Statement, content, source)
    if found.subject[0].digest.sha256 != found.predicate.models.after:
        raise Refuted(f"{source}: its subject is not the model that it describes")
    return found.predicate
