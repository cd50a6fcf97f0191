"""Several experiments side by side: every method of every results folder, the nearest to retraining first."""

import csv
import statistics
from collections.abc import Sequence
from html import escape
from io import StringIO

from ease.config import Config
from ease.show.tables import sheets
from ease.studies.records import BenchResults


class Standing(Config):
    """One method of one experiment on one kind of request; gaps in points of R@1, means over seeds."""

    rank: int
    request: str
    method: str
    experiment: str
    seeds: int
    sum_of_gaps: float
    forget_gap: float
    retain_gap: float
    test_gap: float
    lira_gap: float | None
    """Distance of the attack's AUC to retraining's."""
    bytes_share: float | None
    """Sent by clients, beside retraining."""
    flops_share: float | None
    reduced: bool
    """Whether `--quick` made the experiment smaller."""


def leaderboard(named: Sequence[tuple[str, BenchResults]]) -> tuple[Standing, ...]:
    """All methods with a model, ranked within each kind of request by the sum of their gaps."""
    found = [standing for name, results in named for standing in _standings(name, results)]
    ranked: list[Standing] = []
    for request in dict.fromkeys(each.request for each in found):
        here = sorted((each for each in found if each.request == request), key=lambda each: each.sum_of_gaps)
        ranked += [each.model_copy(update={"rank": place}) for place, each in enumerate(here, 1)]
    return tuple(ranked)


def _standings(name: str, results: BenchResults) -> list[Standing]:
    found = []
    for sheet in sheets(results):
        for line in sheet.lines:
            distances = sheet.distance(line) if line.role == "method" and line.seeds else []
            if not distances:
                continue
            forget, retain, test = (
                statistics.mean(sheet.gaps(line, f"{part}/recall@1")) for part in ("forget", "retain", "test")
            )
            found.append(
                Standing(
                    rank=0,
                    request=sheet.scenario + (f", {sheet.title}" if sheet.title else ""),
                    method=line.label,
                    experiment=name,
                    seeds=len(distances),
                    sum_of_gaps=statistics.mean(distances),
                    forget_gap=forget,
                    retain_gap=retain,
                    test_gap=test,
                    lira_gap=_mean([abs(each) for each in sheet.gaps(line, "lira/auc")]),
                    bytes_share=_mean(list(line.values("ratio/bytes_up").values())),
                    flops_share=_mean(list(line.values("ratio/flops").values())),
                    reduced=results.header.experiment.reduced,
                )
            )
    return found


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def as_csv(standings: Sequence[Config], kind: type[Config] = Standing) -> str:
    """The leaderboard as a file for spreadsheets."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(list(kind.model_fields))
    for each in standings:
        writer.writerow(["" if value is None else value for value in each.model_dump().values()])
    return text.getvalue()


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>%s</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%%; }
th, td { border-bottom: 1px solid #8886; padding: .3rem .5rem; text-align: right; }
th:nth-child(-n+%d), td:nth-child(-n+%d) { text-align: left; }
</style>
<h1>%s</h1>
<p>%s</p>
<table><thead><tr>%s</tr></thead>
<tbody>
%s
</tbody></table>
</html>
"""
COLUMNS = {
    "rank": "Rank",
    "request": "Request",
    "method": "Method",
    "experiment": "Experiment",
    "seeds": "Seeds",
    "sum_of_gaps": "Sum of gaps",
    "forget_gap": "Forget gap",
    "retain_gap": "Retain gap",
    "test_gap": "Test gap",
    "lira_gap": "LiRA gap",
    "bytes_share": "Bytes",
    "flops_share": "FLOPs",
}


def cell(standing: Standing, column: str) -> str:
    """A value as tables show it."""
    value = getattr(standing, column)
    if value is None:
        return ""
    if column.endswith("_share"):
        return f"{value:.0%}"
    if column in ("forget_gap", "retain_gap", "test_gap"):
        return f"{value:+.1f}"
    return f"{value:.2f}" if column == "lira_gap" else f"{value:.1f}" if isinstance(value, float) else str(value)


INTRO = (
    "Methods by the sum of their gaps to retraining at R@1 (forget, retained and test pairs; less is better). Compare "
    "only experiments of the same data and settings. Costs are shares of retraining's."
)


def as_html(standings: Sequence[Standing]) -> str:
    """The leaderboard as a page of its own."""
    few = " Some were made smaller by --quick and prove nothing." if any(each.reduced for each in standings) else ""
    rows = [[cell(each, column) for column in COLUMNS] for each in standings]
    return page("Leaderboard", INTRO + few, list(COLUMNS.values()), rows, left=4)


def page(title: str, intro: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A page with one table, whose first columns are text."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return PAGE % (escape(title), left, left, escape(title), escape(intro), head, body)
