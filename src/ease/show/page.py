"""One page that shows what was forgotten and how well: self-contained, readable anywhere, the same bytes each time."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ease.runs.records import AnswerRecord
from ease.show.answer import ReportedAnswer, answer_section
from ease.show.experiment import experiment_section
from ease.show.template import fixed, render, source
from ease.studies.records import BenchResults

COLUMNS = {
    "forget/recall@1": "forget R@1",
    "forget/recall@10": "forget R@10",
    "retain/recall@1": "retain R@1",
    "test/recall@1": "test R@1",
}


@dataclass(frozen=True)
class Contents:
    """Everything that the page of a folder shows."""

    title: str
    folder: str
    """The run, quoted as the commands on the page name it."""
    answers: Sequence[ReportedAnswer] = ()
    results: BenchResults | None = None
    """Results of an experiment."""
    why_no_pairs: str = ""
    version: str = ""
    """Version of this package."""


def page(contents: Contents) -> str:
    """The whole document."""
    answers = contents.answers
    references = {answer.request: answer.record for answer in answers if answer.is_reference}
    shown = [answer for answer in answers if not answer.is_reference]
    shown.sort(key=lambda answer: (answer.audit is None, answer.record.method_name != "ease", answer.name))
    style, script = source("page.css"), source("page.js")
    return render(
        "page.html",
        title=contents.title,
        folder=contents.folder,
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        listed=[(f"{answer.asked} by {answer.record.method_name}", answer.standing) for answer in shown],
        sections=[
            answer_section(
                answer,
                references.get(answer.request),
                number,
                contents.folder,
                contents.why_no_pairs,
                contents.version,
            )
            for number, answer in enumerate(shown)
        ],
        columns=["Answer", *COLUMNS.values(), "bytes", "time"],
        compared=_comparison(answers, references),
        experiment=experiment_section(contents.results) if contents.results else "",
        spectra=[
            [{"cosines": block.cosines, "energies": block.energies} for block in answer.blocks] for answer in shown
        ],
    )


def policy(style: str, script: str) -> str:
    """Nothing may be fetched, and no other script than ours may run, whatever the data holds."""

    def known(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return f"default-src 'none'; img-src data:; style-src {known(style)}; script-src {known(script)}"


def _comparison(answers: Sequence[ReportedAnswer], references: Mapping[str, AnswerRecord]) -> list[list[str]]:
    """Every stored answer, retraining last in its request."""
    ordered = sorted(answers, key=lambda answer: (answer.request, answer.is_reference, answer.name))
    return [
        [
            answer.name,
            *(fixed(answer.record.metrics.get(key), 1) for key in COLUMNS),
            _share(answer.record, references.get(answer.request), "cost/bytes_down", "cost/bytes_up"),
            _share(answer.record, references.get(answer.request), "cost/seconds"),
        ]
        for answer in ordered
    ]


def _share(record: AnswerRecord, retrain: AnswerRecord | None, *keys: str) -> str:
    """Part of retraining's cost, where both are known."""
    if retrain is None:
        return ""
    ours, theirs = (sum(of.metrics.get(key, 0.0) for key in keys) for of in (record, retrain))
    return f"{ours / theirs:.0%}" if theirs else ""
