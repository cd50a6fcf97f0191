"""The opening of an answer on the report page: what was asked, what came of it, and what to do next, for everyone."""

from collections.abc import Sequence
from dataclasses import dataclass

from ease.audit.next_steps import next_steps
from ease.audit.records import AuditRecord
from ease.audit.verdict import Reason, Verdict
from ease.data.membership import Membership
from ease.requests.request import ClassRequest, ClientRequest, Request, forget_mask, in_words
from ease.runs.records import AnswerRecord

RECALL = "recall@1"
PLAIN = {
    Reason.IDENTICAL: "the new model is identical to one that was trained without these pairs",
    Reason.DIFFERENT: "the new model differs from one that was trained without these pairs, and it should be identical",
    Reason.LIKE_RETRAINING: "the new model is indistinguishable from models that were trained without these pairs",
    Reason.OVERDONE: "the new model knows these pairs less than one that never saw them, which is detectable as well",
    Reason.OTHERWISE: "the new model differs from models that were trained without these pairs",
    Reason.TOO_FEW: "too few models were trained without these pairs to compare the new one with",
    Reason.NO_SIGNAL: "this audit sees too little; it would overlook a model that holds a good part of these pairs",
}
"""Verdicts for those who do not know what a retraining band is."""


@dataclass(frozen=True)
class Extent:
    """How many training pairs a request names, and whose they are."""

    pairs: int
    of: int
    """All training pairs of the run."""
    holders: tuple[str, ...]
    """Clients that hold some of them, as people call them."""
    clients: int


def extent_of(members: Membership, request: Request) -> Extent:
    named = {holding.client: int(forget_mask(request, holding).sum()) for holding in members.clients}
    return Extent(
        pairs=sum(named.values()),
        of=sum(len(holding.train_ids) for holding in members.clients),
        holders=tuple(members.named(client) for client, count in named.items() if count),
        clients=len(members.clients),
    )


def asked(request: Request, extent: Extent | None = None) -> str:
    """The request in words; classes by the words that were given for them, clients by their names, where there are."""
    if isinstance(request, ClientRequest):
        named = extent.holders if extent and extent.holders else tuple(map(str, request.clients))
        return f"Forgetting client{'s' if len(named) > 1 else ''} {', '.join(named)}"
    if isinstance(request, ClassRequest):
        if any(letter.isalpha() for letter in request.text):
            return f"Forgetting “{request.text}”"
        return f"Forgetting class{'es' if len(request.classes) > 1 else ''} {', '.join(map(str, request.classes))}"
    return f"Forgetting {in_words(request)}"


def whose(request: Request, extent: Extent) -> str:
    """How many pairs of whom, in a sentence."""
    were = "was" if extent.pairs == 1 else "were"
    words = f"{extent.pairs:,} of {extent.of:,} training pairs {were} to be forgotten"
    held = (
        f"client {extent.holders[0]}"
        if len(extent.holders) == 1
        else f"{len(extent.holders)} of {extent.clients} clients"
    )
    if isinstance(request, ClientRequest):
        return f"{words}: all that {', '.join(f'client {name}' for name in extent.holders)} gave."
    return f"{words}. {'It is' if extent.pairs == 1 else 'They are'} with {held}." if extent.holders else f"{words}."


def plainly(verdict: Verdict) -> str:
    """The verdict in one sentence without figures that need explaining."""
    if verdict.joint is not None and verdict.reason is Reason.KEPT:
        return f"the new model still holds about {verdict.joint.trace.value:.0%} of what these pairs had brought"
    return PLAIN.get(verdict.reason, verdict.explanation)


@dataclass(frozen=True)
class Found:
    """Recall@1 of one set of pairs under one model."""

    label: str
    kind: str
    """The model, which has one colour on the whole page; `unseen` for pairs that no model saw."""
    value: float


@dataclass(frozen=True)
class NextStep:
    command: str
    """Empty if it is not a command."""
    why: str


@dataclass(frozen=True)
class Overview:
    """One screen."""

    asked: str
    whose: str
    """Empty where the run is not at hand."""
    found: Sequence[Found]
    summary: str
    """The same in a sentence."""
    gallery: int | None
    steps: Sequence[NextStep]
    date: str
    model_sha256: str

    @property
    def measured_before(self) -> bool:
        return any(each.kind == "trained" for each in self.found)


def overview(
    record: AnswerRecord,
    audit: AuditRecord | None,
    retrain: AnswerRecord | None,
    extent: Extent | None,
    before: float | None,
    date: str,
    folder: str,
    name: str,
) -> Overview:
    """Overview of a result; `before` is recall of the forget pairs in the model from which it began, if it was
    measured."""
    key = f"forget/{RECALL}"
    judged = next((measure for measure in audit.verdict.measures if measure.name == key), None) if audit else None
    never = retrain.metrics.get(key) if retrain else None
    if judged is not None:
        before, never = judged.before, judged.retrain
    values = {
        ("these pairs, before", "trained"): before,
        ("these pairs, now", "unlearned"): record.metrics.get(key),
        ("had it never seen them", "retrain"): never,
        ("other pairs it never saw", "unseen"): record.metrics.get(f"test/{RECALL}"),
    }
    found = [Found(label, kind, value) for (label, kind), value in values.items() if value is not None]
    gallery = record.metrics.get("gallery")
    return Overview(
        asked=asked(record.request, extent),
        whose=whose(record.request, extent) if extent else "",
        found=found,
        summary=_summary({each.kind: each.value for each in found}),
        gallery=None if gallery is None else round(gallery),
        steps=_steps(audit, folder, name),
        date=date,
        model_sha256=record.files.get("model.safetensors") or (audit.model_sha256 if audit else ""),
    )


def _summary(values: dict[str, float]) -> str:
    words = []
    if "trained" in values:
        words.append(f"{values['trained']:.0f} before")
    if "unlearned" in values:
        words.append(f"{values['unlearned']:.0f} now")
    if "unseen" in values:
        words.append(f"{values['unseen']:.0f} of pairs that it never saw")
    return ", ".join(words)


def _steps(audit: AuditRecord | None, folder: str, name: str) -> list[NextStep]:
    if audit is None:
        return [
            NextStep(
                f"ease audit {folder} --request {name} --retrain",
                "compare with models that were trained without the pairs",
            )
        ]
    if audit.verdict.passed:
        return [
            NextStep(
                f"ease release {folder} --request {name}", "continue from this model; no later round sees the pairs"
            ),
            NextStep(f"ease certificate {folder} --request {name} --html", "a signed page for the person who asked"),
        ]
    return [
        NextStep(command, why) if why and command.startswith("ease ") else NextStep("", step)
        for step in next_steps(audit, folder, name)
        for command, _, why in [step.partition(": ")]
    ]
