"""One answer on the report page: the verdict, the measures, and the pictures behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ease.audit.band import Band
from ease.audit.records import AuditRecord, PairRecord, Price, RocPoints
from ease.audit.verdict import EVIDENCE, Measure
from ease.runs.records import AnswerRecord, BlockNotes, SpectrumNotes
from ease.runs.resolve import request_flags
from ease.show import charts
from ease.show.overview import Extent, asked, overview, plainly
from ease.show.template import fixed, render

REFERENCE = "retrain"
HINTS = {
    "rho": "0 equals retrain, 1 the trained model",
    "ks/distance": "of the log-odds",
    "mia/share": "share, by a classifier",
    "bavaria/tpr": "share of members",
    "u-bavaria/auc": "knows the method",
    "u-bavaria/tpr": "share of members",
    "before-after/auc": "holds both models",
    "retained/auc": "are they exposed?",
    "pair/rank": "0 is the first place",
    "pair/margin": "over the nearest other",
    "pair/log_odds": "against the pool",
    "canaries/epsilon": "at least, with 95 %",
    "lira/tpr": "share of members",
    "u-lira/auc": "knows the method",
    "u-lira/tpr": "share of members",
}
"""Explanations of measures that their titles do not give."""
GROUPS = {
    "Recall of forget pairs, in percent": ("forget/",),
    "Recall of the retained pairs nearest to them": ("near/",),
    "Recall of retained pairs": ("retain/",),
    "Recall of test pairs": ("test/",),
    "Each pair in its gallery, mean": ("pair/", "retained/rank"),
    "Alignment": ("rho", "ks/"),
    "Membership attacks": (
        "mia/",
        "bavaria/",
        "u-bavaria/",
        "lira/",
        "u-lira/",
        "rmia/",
        "before-after/",
        "held-out/",
        "retained/",
        "canaries/",
    ),
    "Relearned, as a share of the loss": ("relearn/",),
    "Other": ("",),
}
"""Heading -> how the names of its measures begin; a measure is listed under the first that fits."""
STANDINGS = {True: ("good", "✓"), False: ("bad", "!"), None: ("unknown", "?")}
"""Passed or not -> the class and the mark of a verdict."""
PARTS = ["forget", "near", "retain", "test"]
TAUGHT = {"forget": "a few forget pairs", "retain": "retained pairs alone"}
PRICES = {
    "bytes_down": "bytes sent",
    "bytes_up": "bytes received",
    "messages": "messages",
    "client_steps": "client steps",
    "flops": "operations",
    "client_seconds": "client time",
    "seconds": "total time",
    "peak_memory_bytes": "peak memory",
}


@dataclass(frozen=True)
class Pair:
    """A forgotten pair as a thumbnail, with the rank of its own captions when the picture asks."""

    image: str
    """A data address."""
    caption: str
    ranks: Mapping[str, float]
    """Model -> rank; 1 is found at once."""
    resisted: bool
    """One of those that came down least."""


@dataclass(frozen=True)
class ReportedAnswer:
    """One method's result of a request, and its facts for the page."""

    name: str
    """REQUEST/METHOD"""
    record: AnswerRecord
    audit: AuditRecord | None = None
    why_no_audit: str = "This answer has not been audited, so there is no verdict yet."
    pairs: Sequence[Pair] = ()
    gallery: int = 0
    """Pairs among which the thumbnails were ranked."""
    extent: Extent | None = None
    """None where the run is not at hand."""
    before: float | None = None
    """Recall@1 of the forget pairs in the model that it began from, where no audit says it."""
    date: str = ""

    @property
    def asked(self) -> str:
        """The request in words."""
        return asked(self.record.request, self.extent)

    @property
    def request(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_reference(self) -> bool:
        """Retraining with its own settings; with others it is a method like any other."""
        return self.name.partition("/")[2] == REFERENCE

    @property
    def blocks(self) -> list[BlockNotes]:
        """Those that have directions."""
        spectrum = self.record.spectrum
        return [block for block in spectrum.blocks if block.cosines] if spectrum else []

    @property
    def standing(self) -> str:
        """The verdict in a few words."""
        if self.audit is None:
            return "not audited"
        verdict = self.audit.verdict
        if verdict.identity is not None:
            return f"{STANDINGS[verdict.passed][1]} {verdict.reason}"
        words = {True: "like retraining", False: "unlike retraining", None: "undecided"}
        joint = f" (p = {verdict.joint.p_value:.2g})" if verdict.joint else ""
        return f"{STANDINGS[verdict.passed][1]} {words[verdict.passed]}{joint}"


def answer_section(
    answer: ReportedAnswer,
    retrain: AnswerRecord | None,
    number: int,
    folder: str,
    why_no_pairs: str,
    version: str = "",
) -> Markup:
    """`retrain` is the answer of retraining to the same request."""
    audit = answer.audit
    return render(
        "answer.html",
        number=number,
        folder=folder,
        opening=overview(answer.record, audit, retrain, answer.extent, answer.before, answer.date, folder, answer.name),
        version=version,
        flags=request_flags(answer.record.request),
        record=answer.record,
        audit=audit,
        why_no_audit=answer.why_no_audit,
        rounds=_rounds(answer, retrain),
        blocks=answer.blocks,
        threshold=_threshold(answer.record.spectrum) if answer.record.spectrum else None,
        gone=_gone,
        pairs=answer.pairs,
        gallery=answer.gallery,
        why_no_pairs=why_no_pairs,
        charts=charts,
        label=_label,
        parts=PARTS,
        taught_pairs=TAUGHT,
        evidence=EVIDENCE,
        plain=plainly(audit.verdict) if audit else "",
        **(_audited(audit) if audit else {}),
    )


def _label(measure: Measure) -> str:
    """The name of a measure under its heading."""
    if "/recall@" in measure.name:
        return f"R@{measure.name.partition('@')[2]}"
    hint = f" ({HINTS[measure.name]})" if measure.name in HINTS else ""
    return f"{measure.title[0].upper()}{measure.title[1:]}{hint}"


@dataclass(frozen=True)
class Rounds:
    """Recall@1 while a method works."""

    lines: dict[str, list[float]]
    """Set of pairs -> its recall in each round."""
    before: dict[str, float]
    band: Band | None
    """Range of the forget pairs' recall in retrained models."""
    retrain: float | None
    """Its recall of forget pairs."""
    phases: list[str]


def _rounds(answer: ReportedAnswer, retrain: AnswerRecord | None) -> Rounds:
    entries = answer.record.rounds
    measured = [entry.metrics for entry in entries if entry.metrics]
    lines = {
        name: [metrics[f"{name}/recall@1"] for metrics in measured]
        for name in ("forget", "retain", "test")
        if measured and all(f"{name}/recall@1" in metrics for metrics in measured)  # pairs may not be there to measure
    }
    phases = list(dict.fromkeys(entry.phase for entry in entries))
    goal = None if retrain is None else retrain.metrics.get("forget/recall@1")
    recalls = _recalls(answer.audit) if answer.audit else {}
    before = {name: measure.before for name, measure in recalls.items() if name in lines and measure.before is not None}
    forget = recalls.get("forget")
    if forget is None or forget.band is None:
        return Rounds(lines, before, None, goal, phases)
    return Rounds(lines, before, forget.band, forget.retrain, phases)


def _recalls(audit: AuditRecord) -> dict[str, Measure]:
    """Set of pairs -> its recall@1."""
    named = {measure.name: measure for measure in audit.verdict.measures}
    return {part: named[f"{part}/recall@1"] for part in PARTS if f"{part}/recall@1" in named}


def _threshold(spectrum: SpectrumNotes) -> tuple[float, str]:
    """Start of the slider, and the setting of the result itself."""
    return round(min(max(spectrum.delta, 0.0), 1.0), 2), f"This answer used δ = {spectrum.delta:g}."


def _gone(cosines: Sequence[float], delta: float) -> str:
    return f"{sum(cosine <= delta for cosine in cosines)} of {len(cosines)}"


def _audited(audit: AuditRecord) -> dict[str, Any]:
    """What an audit adds: the measures under their headings, and the data of its pictures."""
    groups: dict[str, list[Measure]] = {heading: [] for heading in GROUPS}
    for measure in audit.verdict.measures:
        groups[next(h for h, starts in GROUPS.items() if measure.name.startswith(starts))].append(measure)
    return {
        "standing": STANDINGS[audit.verdict.passed],
        "groups": {heading: measures for heading, measures in groups.items() if measures},
        "clouds": {name: values for name in charts.STATES if (values := audit.similarities.get(name))},
        "curves": _roc_curves(audit),
        "prices": _prices(audit),
        "stopped": _stopped(audit),
        "standings": [row for pair in audit.pairs for row in _standings(pair)],
    }


def _standings(pair: PairRecord) -> list[list[str]]:
    """Position of one pair, and the span of all retrained models."""
    rows = []
    for name, values, digits in pair.rows:
        retrained = [value for model, value in values.items() if model.startswith(REFERENCE)]
        shown = [fixed(values[model], digits) for model in ("trained", "unlearned", REFERENCE)]
        rows.append([pair.id, name, *shown, f"{fixed(min(retrained), digits)} to {fixed(max(retrained), digits)}"])
    return rows


def _roc_curves(audit: AuditRecord) -> dict[str, tuple[RocPoints, float]]:
    """ROC curves of the verdict's attack, for each model, with its AUC."""
    attacked = audit.attacks.get(audit.attack, {})
    return {name: (attacked[name].roc, attacked[name].auc.value) for name in charts.STATES if name in attacked}


def _prices(audit: AuditRecord) -> dict[str, Price]:
    return {label: audit.costs.totals[name] for name, label in PRICES.items() if name in audit.costs.totals}


def _stopped(audit: AuditRecord) -> list[list[str]]:
    """Recall of retraining stopped early, of the whole, and of the answer."""
    recalls = _recalls(audit)
    early = [
        [share, *(fixed(found.get(part), 1) for part in PARTS)]
        for share, found in audit.costs.compute_matched_retrain.items()
    ]
    whole = [fixed(recalls[part].retrain, 1) if part in recalls else "" for part in PARTS]
    ours = [fixed(recalls[part].value, 1) if part in recalls else "" for part in PARTS]
    return [*early, ["retrain", *whole], ["this answer", *ours]] if early else []
