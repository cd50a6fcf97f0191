"""One page that shows what was forgotten and how well: self-contained, readable anywhere, the same bytes each time."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ease.show.answer import Answer, CheckedAnswer, answer_section, asked, check, told
from ease.show.experiment import experiment_section
from ease.show.markup import Markup, json_script, missing, table, tag

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
    answers: Sequence[Answer] = ()
    results: Mapping[str, Any] | None = None
    """Of an experiment, as `ease bench` wrote them."""
    why_no_pairs: str = ""


def page(contents: Contents) -> str:
    """The whole document."""
    answers = check(contents.answers)
    shown = [read for read in answers if not read.answer.is_reference]
    shown.sort(key=lambda read: (read.audit is None, read.record.method_name != "ease", read.answer.name))
    style, script = (files("ease.show").joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    spectra = [[{"cosines": b.cosines, "shares": b.shares} for b in read.blocks] for read in shown]
    parts: list[Markup] = [
        answer_section(read, number, contents.folder, contents.why_no_pairs) for number, read in enumerate(shown)
    ]
    if not shown and contents.results is None:
        parts.append(
            missing("Nothing has been forgotten in this run yet.", f"ease forget {contents.folder} --client 0")
        )
    if answers:
        parts.append(_comparison(answers))
    if contents.results is not None:
        parts.append(experiment_section(contents.results))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("title", f"Unlearning report: {contents.title}"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the verdict", href="#main", class_="skip"),
        tag(
            "header",
            tag("p", "Unlearning report", class_="kicker"),
            tag(
                "h1", f"What was {'forgotten' if shown or contents.results is None else 'compared'} in {contents.title}"
            ),
            _contents_list(shown),
        ),
        tag("main", *parts, id="main"),
        _how_to_read(),
        json_script("spectra", spectra),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _policy(style: str, script: str) -> str:
    """Nothing may be fetched, and no other script than ours may run, whatever the data holds."""

    def known(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return f"default-src 'none'; img-src data:; style-src {known(style)}; script-src {known(script)}"


def _contents_list(shown: Sequence[CheckedAnswer]) -> Markup | None:
    if len(shown) < 2:
        return None
    entries = [
        tag(
            "li",
            tag("a", f"{asked(read.record)} by {read.record.method_name}", href=f"#answer-{number}"),
            " ",
            tag("span", _state(read), class_="small"),
        )
        for number, read in enumerate(shown)
    ]
    return tag("nav", tag("ul", *entries), aria_label="Answers on this page")


def _state(read: CheckedAnswer) -> str:
    if read.audit is None:
        return "not audited"
    kind, mark, *_ = told(read.audit)
    return f"{mark} " + {"good": "like retraining", "bad": f"outside on {len(read.audit.outside)}"}.get(
        kind, "no verdict"
    )


def _comparison(answers: Sequence[CheckedAnswer]) -> Markup:
    """Every stored answer, retraining last in its request."""
    ordered = sorted(answers, key=lambda r: (r.answer.request, r.answer.is_reference, r.answer.name))
    rows = [
        [
            read.answer.name,
            *(_optional(read.record.metrics.get(key), ".1f") for key in COLUMNS),
            _share(read, "cost/bytes_down", "cost/bytes_up"),
            _share(read, "cost/seconds"),
        ]
        for read in ordered
    ]
    return tag(
        "section",
        tag("h2", "All stored answers", id="all"),
        table(
            ["Answer", *COLUMNS.values(), "bytes", "time"],
            rows,
            "Recall in percent. Bytes and time are shares of retraining’s.",
        ),
        aria_labelledby="all",
    )


def _share(read: CheckedAnswer, *keys: str) -> str:
    """Part of retraining's cost, where both are known."""
    if read.retrain is None:
        return ""
    ours, theirs = (sum(record.metrics.get(key, 0.0) for key in keys) for record in (read.record, read.retrain))
    return f"{ours / theirs:.0%}" if theirs else ""


def _how_to_read() -> Markup:
    return tag(
        "footer",
        tag("h2", "How to read this"),
        tag(
            "p",
            "Retraining without the forgotten data is the reference: a model that forgot well behaves as that one "
            "does, neither holding the pairs more strongly nor less. Before is the trained model, after this answer. ",
            "R@k says how often the right caption or picture is among the first k. ",
            "This is evidence, not a proof of deletion.",
        ),
    )


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
