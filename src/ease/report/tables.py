"""An experiment's results as Markdown and LaTeX: every figure beside retraining, the mean over seeds and its spread."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RANKED = ("forget/recall@1", "retain/recall@1", "test/recall@1")
"""Their absolute gaps to retraining add up to the rank."""


@dataclass(frozen=True)
class Line:
    """One model of one scenario over all seeds."""

    scenario: str
    role: str
    """`trained`, `method`, `band` (a retraining in another order) or `retrain`."""
    label: str
    tuned: bool
    at: Any
    """Value of the varied setting, if there is one."""
    seeds: dict[int, dict[str, float]]
    """Seed -> metrics."""

    def values(self, key: str) -> dict[int, float]:
        return {seed: metrics[key] for seed, metrics in self.seeds.items() if key in metrics}


@dataclass(frozen=True)
class Sheet:
    """One scenario at one value of the run's varied setting: the lines that may be compared, and their reference."""

    scenario: str
    title: str
    lines: tuple[Line, ...]
    retrain: Line
    retrained: tuple[Line, ...]
    """All retrainings, on the seed that has several."""

    def gaps(self, line: Line, key: str) -> list[float]:
        """Signed gaps to retraining of the same seed."""
        reference = self.retrain.values(key)
        return [value - reference[seed] for seed, value in line.values(key).items() if seed in reference]

    def distance(self, line: Line) -> list[float]:
        """Sum of the absolute gaps of forget, retain and test R@1, for each seed."""
        return [sum(map(abs, parts)) for parts in zip(*(self.gaps(line, key) for key in RANKED), strict=True)]

    def inside(self, line: Line, key: str, bands: "Bands") -> bool:
        """Whether a value lies in the retrain band, on the first seed, where the band was measured."""
        band = bands.get((self.scenario, self.title, key))
        values = list(line.values(key).values())
        return band is not None and bool(values) and band[0] <= values[0] <= band[1]


Bands = Mapping[tuple[str, str, str], tuple[float, float]]
"""(scenario, sheet, metric) -> where a further retraining would fall."""


@dataclass(frozen=True)
class Column:
    """One column: what it is called, where its values come from and how they are told."""

    title: str
    key: str
    latex: str
    digits: int = 1
    scale: float = 1.0
    judged: str = "gap"
    """`gap`: the best is nearest to retraining; `low`: the smallest; `share`: the smallest, told as a share too."""


def _recalls(side: str, part: str) -> tuple[Column, ...]:
    return tuple(Column(f"{side}-R@{k}", f"{part}/recall@{k}", rf"${side}\text{{-}}R@{k}$") for k in (1, 5, 10))


FORGET = (
    *_recalls("F", "forget"),
    Column("MIA %", "mia", r"MIA \%", scale=100),
    Column("LiRA AUC", "lira/auc", "LiRA", digits=2),
    Column("rho", "rho", r"$\rho$", digits=2, judged="low"),
)
RETAIN = (
    *_recalls("R", "retain"),
    _recalls("T", "test")[0],
    Column("up MB", "cost/bytes_up", "Up", scale=1e-6, judged="share"),
    Column("down MB", "cost/bytes_down", "Down", scale=1e-6, judged="share"),
    Column("time s", "cost/seconds", "Time", scale=1, judged="share"),
    Column("sum of gaps", "rank", r"$\Sigma|$gap$|$", judged="rank"),
)
SIDES = (("Forgetting", FORGET), ("Keeping, cost and rank", RETAIN))
NOTE = (
    "Recall in percent, mean ± standard deviation over seeds, in brackets the gap to retraining of the same seed; for cost, "
    "the share of retraining's. ° inside the retrain band: a 95 % prediction interval from {models} retrainings of the "
    "first seed. Bold: nearest to retraining, or least. Sum of gaps: |forget| + |retain| + |test| at R@1, the rank."
)
TUNED = "† settings chosen by `ease sweep`, with the same budget for every method."


def sheets(results: Mapping[str, Any]) -> list[Sheet]:
    """Group the rows: over seeds into lines, and lines that share a retraining into sheets."""
    grouped: dict[tuple[str, str], dict[tuple[str, str, str], list[Mapping[str, Any]]]] = {}
    run_setting = next(iter(results["header"]["experiment"]["vary"]), None)
    for row in results["rows"]:
        at = row.get("at")
        of_run = at is not None and at["name"] == run_setting
        title = f"{at['name']} = {at['value']}" if of_run else ""
        label = row["label"] if at is None or of_run else f"{row['label']}, {at['name']} = {at['value']}"
        lines = grouped.setdefault((row["scenario"], title), {})
        lines.setdefault((row["role"], label, str(row["settings"])), []).append(row)
    found = []
    for (scenario, title), groups in grouped.items():
        lines = [_line(scenario, role, label, rows) for (role, label, _), rows in groups.items()]
        retrain = next(line for line in lines if line.role == "retrain")
        shown = tuple(line for line in lines if line.role != "band")
        found.append(Sheet(scenario, title, shown, retrain, tuple(x for x in lines if x.role in ("retrain", "band"))))
    return found


def _line(scenario: str, role: str, label: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    at = rows[0].get("at")
    metrics = {row["seed"]: dict(row["metrics"]) for row in rows}
    return Line(scenario, role, label, rows[0]["tuned"], at["value"] if at else None, metrics)
