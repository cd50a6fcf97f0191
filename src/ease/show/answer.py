"""One answer on the report page: the verdict, the measures, and the pictures behind them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ease.config import validate
from ease.show import charts
from ease.show.markup import Markup, figure, join, missing, table, tag
from ease.show.records import Audit, Block, Measure, Record

REFERENCE = "retrain"
ETA_F, ETA_R = (join("η", tag("sub", letter)) for letter in "fr")
LABELS = {
    "rho": ("Residual (0 as retrain, 1 as before)", "alignment residual"),
    "ks/distance": ("Distance of log-odds to retrain’s (KS)", "distance of log-odds"),
    "mia/share": ("Called members by a classifier, share", "pairs called members"),
    "lira/auc": ("Strongest attack, AUC", "strongest attack"),
    "lira/tpr": ("Strongest attack, members found", "members found by the strongest attack"),
    "u-lira/auc": ("Knowing the method, AUC", "attack that knows the method"),
    "u-lira/tpr": ("Knowing the method, members found", "members found by an attack that knows the method"),
    "rmia/auc": ("RMIA, AUC", "RMIA"),
    "relearn/forget/share": ("After a few forget pairs", "relearning from forget pairs"),
    "relearn/retain/share": ("After retained pairs alone", "relearning from retained pairs"),
}
"""Name of a measure -> what it is called under its heading, and in a sentence."""
GROUPS = {
    "Recall of forget pairs, in percent": ("forget/",),
    "Recall of the retained pairs nearest to them": ("near/",),
    "Recall of retained pairs": ("retain/",),
    "Recall of test pairs": ("test/",),
    "Alignment": ("rho", "ks/"),
    "Membership attacks": ("mia/", "lira/", "u-lira/", "rmia/"),
    "Comes back by relearning, share of what was lost": ("relearn/",),
    "Other": ("",),
}
"""Heading -> how the names of its measures begin; a measure stands under the first that fits."""
PARTS = ("forget", "near", "retain", "test")
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
class Answer:
    """One method's answer to a request, as it is stored."""

    name: str
    """REQUEST/METHOD"""
    source: str
    """Its folder, for error messages."""
    record: dict[str, Any]
    audit: dict[str, Any] | None = None
    why_no_audit: str = "This answer has not been audited, so there is no verdict yet."
    pairs: Sequence[Pair] = ()
    gallery: int = 0
    """Pairs among which the thumbnails were ranked."""

    @property
    def request(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_reference(self) -> bool:
        """Retraining with its own settings; with others it is a method like any other."""
        return self.name.partition("/")[2] == REFERENCE


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer whose files have been checked."""

    answer: Answer
    record: Record
    audit: Audit | None
    retrain: Record | None = None
    """Retraining's answer to the same request."""

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self.record.rounds[0].notes.blocks if block.cosines]


def check(answers: Sequence[Answer]) -> list[CheckedAnswer]:
    """Check every file; the first mistake is a user error that names the file and the field."""
    records = [validate(Record, answer.record, f"{answer.source}/record.json") for answer in answers]
    retrained = {answer.request: record for answer, record in zip(answers, records, strict=True) if answer.is_reference}
    return [
        CheckedAnswer(
            answer,
            record,
            None if answer.audit is None else validate(Audit, answer.audit, f"{answer.source}/audit.json"),
            retrained.get(answer.request),
        )
        for answer, record in zip(answers, records, strict=True)
    ]


def answer_section(read: CheckedAnswer, number: int, folder: str, why_no_pairs: str) -> Markup:
    answer = read.answer
    audit_command = f"ease audit {folder} --request {answer.name} --retrain"
    return tag(
        "section",
        tag(
            "h2", asked(read.record), tag("span", f" by {read.record.method_name}", class_="by"), id=f"answer-{number}"
        ),
        missing(answer.why_no_audit, audit_command) if read.audit is None else _verdict(read.audit),
        None if read.audit is None else _measures(read.audit),
        _rounds(read),
        _spectrum(read, number, folder),
        None if read.audit is None else _evidence(read.audit),
        _pairs(answer, why_no_pairs),
        None if read.audit is None else _caveats(read.audit),
        aria_labelledby=f"answer-{number}",
    )


def asked(record: Record) -> str:
    """The request in words."""
    request = record.request
    for one, several, numbers in (("client", "clients", request.clients), ("class", "classes", request.classes)):
        if numbers:
            return f"Forgetting {one if len(numbers) == 1 else several} {', '.join(map(str, numbers))}"
    return f"Forgetting {len(request.ids)} single pairs"


def _flags(record: Record) -> str:
    """The request as the command line takes it."""
    named = [f"--client {number}" for number in record.request.clients]
    named += [f"--class {number}" for number in record.request.classes]
    return " ".join(named) or "--samples ids.txt"


def _verdict(audit: Audit) -> Markup:
    """One sentence; its colour only repeats what its first words say."""
    kind, mark, headline, sentence = told(audit)
    return tag(
        "p",
        tag("span", mark, class_="mark", aria_hidden="true"),
        tag("span", tag("strong", headline), " ", sentence),
        class_=f"verdict {kind}",
    )


def told(audit: Audit) -> tuple[str, str, str, str]:
    """The verdict's kind, its mark, a headline and a sentence."""
    judged = sum(measure.inside is not None for measure in audit.measures)
    if audit.verdict.startswith("no "):
        return "unknown", "?", "No verdict.", _sentence(audit.verdict.partition(": ")[2])
    if not judged:
        return "unknown", "?", "No verdict.", "No measure has a band of retrained models."
    passed = audit.verdict.startswith(audit.words)
    sentence = f"All {judged} measures lie where a retrained model’s would: {audit.words}."
    if audit.outside:
        names = ", ".join(_in_words(name) for name in audit.outside)
        lie = "lies" if len(audit.outside) == 1 else "lie"
        sentence = f"{len(audit.outside)} of {judged} measures {lie} outside the band of retrained models: {names}."
        sentence += f" By chance alone about {0.05 * judged:.0f} would."
    if passed:
        return "good", "✓", "Like retraining, as far as it was measured.", sentence
    return "bad", "!", "Not like retraining yet.", sentence


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _label(name: str) -> str:
    """What a measure is called under its heading."""
    return LABELS[name][0] if name in LABELS else f"R@{name.partition('@')[2]}" if "/recall@" in name else name


def _in_words(name: str) -> str:
    """What a measure is called where no heading says what it belongs to."""
    return LABELS[name][1] if name in LABELS else name.replace("/recall@", " R@")


def _measures(audit: Audit) -> Markup:
    grouped: dict[str, list[Measure]] = {heading: [] for heading in GROUPS}
    for measure in audit.measures:
        grouped[next(h for h, starts in GROUPS.items() if measure.name.startswith(starts))].append(measure)
    bodies = [
        tag(
            "tbody",
            tag("tr", tag("th", heading, scope="rowgroup", colspan=5)),
            *(_measure_row(measure) for measure in measures),
        )
        for heading, measures in grouped.items()
        if measures
    ]
    caption = (
        "Bar: where one more retrained model would fall, 95 times in 100. Line in it: retrain. Dot: this answer. "
        "The aim is retrain’s value, not zero: what a model never saw it can still partly guess."
    )
    columns = ("Measure", "Before", "After", "Retrain", "Against the band")
    notes = [(m.name, m.note) for m in audit.measures if m.note]
    return join(
        tag("h3", "Each measure beside retraining"),
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", *(tag("th", column, scope="col") for column in columns))),
            *bodies,
            class_="measures",
        ),
        tag(
            "details",
            tag("summary", "Intervals and notes for each measure"),
            tag("dl", *(join(tag("dt", _in_words(name)), tag("dd", note)) for name, note in notes)),
        )
        if notes
        else None,
    )


def _measure_row(measure: Measure) -> Markup:
    digits = 1 if "recall@" in measure.name else 3
    numbers = [f"{value:.{digits}f}" if value is not None else "" for value in (measure.before, measure.value)]
    word = {True: "inside", False: "outside", None: "no band"}[measure.inside]
    said = f"{numbers[1]} against retrain’s {measure.retrain:.{digits}f}"
    if measure.high is not None:
        low = "no lower end" if measure.low is None else f"{measure.low:.{digits}f}"
        said += f", band from {low} to {measure.high:.{digits}f}"
    return tag(
        "tr",
        tag("th", _label(measure.name), scope="row"),
        *(tag("td", number, class_="number") for number in (*numbers, f"{measure.retrain:.{digits}f}")),
        tag(
            "td",
            charts.band_picture(measure, _in_words(measure.name), said),
            tag("span", word, class_=f"word {word.replace(' ', '-')}"),
        ),
    )


def _rounds(read: CheckedAnswer) -> Markup:
    lines = {
        name: [entry.metrics[f"{name}/recall@1"] for entry in read.record.rounds if f"{name}/recall@1" in entry.metrics]
        for name in ("forget", "retain", "test")
    }
    lines = {name: values for name, values in lines.items() if values}
    heading = tag("h3", "Recall, round by round")
    if not lines:
        return join(heading, tag("p", "No recalls were measured between the rounds of this answer.", class_="missing"))
    before, band = {}, None
    retrain = None if read.retrain is None else read.retrain.metrics.get("forget/recall@1")
    if read.audit is not None:
        measures = {name: read.audit.measure(f"{name}/recall@1") for name in lines}
        before = {n: m.before for n, m in measures.items() if m is not None and m.before is not None}
        forget = measures.get("forget")
        if forget is not None and forget.low is not None and forget.high is not None:
            band, retrain = (forget.low, forget.high), forget.retrain
    phases = list(dict.fromkeys(entry.phase for entry in read.record.rounds if entry.phase))
    return join(
        heading,
        figure(
            charts.rounds_chart(lines, before, band, retrain),
            "Recall@1 in percent. ",
            "The shaded band is where the forget pairs of retrained models lie. " if band else None,
            f"Phases in order: {', '.join(phases)}." if phases else None,
        ),
        tag("p", "No retraining of this request is stored, so there is nothing to compare with.", class_="missing")
        if retrain is None
        else None,
    )


def _spectrum(read: CheckedAnswer, number: int, folder: str) -> Markup:
    heading = tag("h3", "Which directions could go")
    blocks = read.blocks
    if not blocks:
        text = f"The method {read.record.method_name} does not decompose updates; EASE does."
        return join(heading, missing(text, f"ease forget {folder} {_flags(read.record)} --method ease"))
    delta, told = _threshold(read)
    table = tag(
        "table",
        tag("caption", "Each dot is a direction: far left the forget data’s own, far right shared with retained data."),
        tag(
            "thead",
            tag("tr", *(tag("th", name, scope="col") for name in ("Block, cosine 0 to 1", "go", ETA_F, ETA_R))),
        ),
        tag("tbody", *(_block_row(block, delta) for block in blocks)),
        class_="spectrum",
    )
    weighing = (
        "weighed by the energy stored for each"
        if all(block.energies for block in blocks)
        else "count the same, since no energies are stored"
    )
    return tag(
        "div",
        heading,
        tag(
            "p",
            "A direction with cosine at most δ is excised. ",
            ETA_F,
            f" is the share of the forget energy that goes: directions {weighing}, mean of the blocks. ",
            ETA_R,
            " is the largest share that could be taken from a retained direction: the greatest cosine² among those ",
            "that go. ",
            told,
        ),
        tag(
            "div",
            tag("label", "Try a threshold δ", for_=f"delta-{number}"),
            tag(
                "input",
                type="range",
                id=f"delta-{number}",
                min=0,
                max=1,
                step=0.01,
                value=f"{delta:.2f}",
                aria_valuetext=f"delta {delta:.2f}",
            ),
            class_="control",
            hidden=True,
        ),
        tag("output", _now(blocks, delta), for_=f"delta-{number}", aria_live="polite", aria_atomic="true"),
        tag("div", figure(charts.tradeoff_chart(blocks, delta), "The price of each threshold."), table, class_="pair"),
        data_spectrum=number,
    )


def _threshold(read: CheckedAnswer) -> tuple[float, str]:
    """Where the slider starts, and what the answer itself did."""
    notes, blocks = read.record.rounds[0].notes, read.blocks
    if isinstance(notes.delta, float):
        return round(min(max(notes.delta, 0.0), 1.0), 2), f"This answer used δ = {notes.delta:g}."
    done = [block.forget_energy for block in blocks if block.forget_energy is not None]
    if len(done) < len(blocks):
        return 0.5, ""
    grid = [step / 100 for step in range(101)]
    same = next((delta for delta in grid if charts.forget_energy(blocks, delta) >= fmean(done) - 1e-9), 1.0)
    depth = "" if notes.depth is None else f", all to a depth of {notes.depth:.2f}"
    told = (
        f"This answer used no threshold: each direction went by 1 − cosine²{depth}, together {fmean(done):.2f} of the "
    )
    return same, f"{told}forget energy. The slider starts at the threshold that takes as much."


def _now(blocks: Sequence[Block], delta: float) -> Markup:
    """What the threshold does, in words whose numbers the slider changes."""
    total = sum(len(block.cosines) for block in blocks)
    gone = sum(cosine <= delta for block in blocks for cosine in block.cosines)

    def shown(name: str, text: str) -> Markup:
        return tag("span", text, data_now=name)

    return join(
        "At δ = ",
        shown("delta", f"{delta:.2f}"),
        ", ",
        shown("gone", f"{gone} of {total}"),
        " directions go: ",
        ETA_F,
        " = ",
        shown("removed", f"{charts.forget_energy(blocks, delta):.2f}"),
        ", ",
        ETA_R,
        " = ",
        shown("touched", f"{charts.retain_damage(blocks, delta):.2f}"),
        ".",
    )


def _block_row(block: Block, delta: float) -> Markup:
    name = block.block.replace(".tower.blocks.", ".").replace(".attention", "")
    gone = sum(cosine <= delta for cosine in block.cosines)
    return tag(
        "tr",
        tag("th", tag("span", name), charts.strip(block, delta), scope="row"),
        tag("td", f"{gone} of {len(block.cosines)}", class_="number"),
        tag("td", f"{charts.forget_energy([block], delta):.2f}", class_="number"),
        tag("td", f"{charts.retain_damage([block], delta):.2f}", class_="number"),
    )


def _evidence(audit: Audit) -> Markup:
    """The pictures an audit adds, two beside each other where there is room."""
    parts = [_clouds(audit), _attack(audit), *_costs(audit), *_relearning(audit)]
    return tag("div", *(tag("div", part) for part in parts if part is not None), class_="pair")


def _clouds(audit: Audit) -> Markup | None:
    clouds = {name: values for name in charts.STATES if (values := audit.similarities.get(name))}
    if not clouds:
        return None
    most = max(map(len, clouds.values()))
    return join(
        tag("h3", "How strongly each forgotten pair is held"),
        figure(
            charts.raincloud(clouds),
            "One dot for each forget pair",
            f" ({charts.MOST_DOTS} of {most} are drawn)" if most > charts.MOST_DOTS else None,
            "; the box holds the middle half. After should look like retrain.",
        ),
    )


def _attack(audit: Audit) -> Markup | None:
    attacked = audit.attacks.get(audit.attack, {})
    curves = {
        name: (attack.roc, attack.auc.value)
        for name in charts.STATES
        if (attack := attacked.get(name)) is not None and len(attack.roc.fpr) > 1
    }
    if not curves:
        return None
    aucs = ", ".join(f"{charts.STATES[name]} {auc:.3f}" for name, (_, auc) in curves.items())
    return join(
        tag("h3", "Can an attacker tell who was a member?"),
        figure(
            charts.roc_chart(curves),
            f"{audit.attack}, the strongest attack before unlearning. On the diagonal it only guesses; "
            f"zero is drawn at the edge. AUC: {aucs}.",
        ),
    )


def _costs(audit: Audit) -> Iterator[Markup]:
    prices = {label: audit.costs.totals[name] for name, label in PRICES.items() if name in audit.costs.totals}
    if prices:
        caption = "Share of what retraining from the start costs."
        yield join(tag("h3", "What it cost"), figure(charts.cost_chart(prices), caption))
    stopped = audit.costs.compute_matched_retrain
    if stopped:
        answer = {part: measure for part in PARTS if (measure := audit.measure(f"{part}/recall@1")) is not None}
        rows = [
            *([share, *(_recall(found.get(part)) for part in PARTS)] for share, found in stopped.items()),
            ["retrain", *(_recall(answer[part].retrain if part in answer else None) for part in PARTS)],
            ["this answer", *(_recall(answer[part].value if part in answer else None) for part in PARTS)],
        ]
        caption = "Recall@1 in percent after a share of retraining’s rounds, and of the whole."
        yield join(tag("h3", "What retraining gives for less"), table(["Rounds", *PARTS], rows, caption))


def _recall(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _relearning(audit: Audit) -> Iterator[Markup]:
    for taught, curves in audit.relearning.items():
        if curves:
            yield join(
                tag("h3", f"Back after {TAUGHT.get(taught, taught)}?"),
                figure(
                    charts.relearn_chart(curves, taught),
                    "How much more strongly other forget pairs are held than unseen ones, in log-odds, while the model "
                    "is taught again.",
                ),
            )


def _pairs(answer: Answer, why_no_pairs: str) -> Markup | None:
    if not answer.pairs:
        return tag("p", why_no_pairs, class_="missing") if why_no_pairs else None
    groups = {
        "These came down most": [pair for pair in answer.pairs if not pair.resisted],
        "These came down least": [pair for pair in answer.pairs if pair.resisted],
    }
    return join(
        tag("h3", "Some of the forgotten pairs"),
        tag(
            "p",
            f"The rank of a picture’s own captions among those of {answer.gallery} pairs, forgotten and unseen.",
        ),
        *(
            join(tag("h4", heading), tag("ul", *map(_thumbnail, pairs), class_="thumbnails"))
            for heading, pairs in groups.items()
            if pairs
        ),
    )


def _thumbnail(pair: Pair) -> Markup:
    ranks = [
        join(tag("dt", charts.STATES[name]), tag("dd", f"{rank:g}"))
        for name in charts.STATES
        if (rank := pair.ranks.get(name)) is not None
    ]
    image = tag("img", src=pair.image, alt=f"Picture with the caption: {pair.caption}", width=96, height=96)
    return tag("li", image, tag("p", pair.caption), tag("dl", *ranks))


def _caveats(audit: Audit) -> Markup:
    return join(
        tag("h3", "Before you believe it"),
        tag("ul", *(tag("li", _sentence(warning)) for warning in audit.warnings)) if audit.warnings else None,
        tag("p", tag("strong", "Not tested: "), "; ".join(audit.not_tested), ".") if audit.not_tested else None,
        tag("p", f"{_sentence(audit.words)[:-1]} is the most that such measures can show."),
    )
