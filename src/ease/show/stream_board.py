"""Methods on the same stream of requests, the nearest to retraining first."""

from collections.abc import Sequence
from statistics import mean

import numpy as np

from ease.config import Config
from ease.runs.records import Metrics
from ease.show.leaderboard import page
from ease.studies.records import StreamRecord, StreamResults

COLUMNS = {
    "rank": "Rank",
    "method": "Method",
    "answered": "Requests",
    "verdict": "Closer to",
    "kept": "Way kept",
    "forget_gap": "Signed",
    "distance": "Forget",
    "returned": "Return",
    "retain_gap": "Retain gap",
    "test_gap": "Test gap",
    "pairs_share": "Pairs",
    "bytes_share": "Bytes",
    "rounds_share": "Rounds",
}
CAPTION = (
    "R@1 in points after the last request, beside the mean of {retrains} retrainings without all {requests}. Forget: "
    "mean gap of a request's pairs without its sign. Return: change since a request was closed. Closer to: the "
    "relative test over all forgotten pairs. Costs are shares of retraining after each request."
)


class StreamStanding(Config):
    """One method after a stream; gaps in points of R@1."""

    rank: int
    method: str
    answered: int
    """Requests that it answered."""
    verdict: str
    """The nearer kind of model: retrained or trained."""
    kept: float | None
    """Share of the way from retrained models to the trained one."""
    forget_gap: float | None
    """Share of all forgotten pairs."""
    distance: float | None
    """Mean absolute gap of a request's pairs."""
    returned: float | None
    """Mean change of a request's pairs since it was closed."""
    retain_gap: float | None
    test_gap: float | None
    pairs_share: float | None
    """Pairs passed through the model, beside retraining after each request."""
    bytes_share: float | None
    rounds_share: float | None
    stopped: str = ""
    """Why it did not answer all requests."""


def standings(results: StreamResults) -> tuple[StreamStanding, ...]:
    """Every method, the nearest to retraining first; methods that stopped come last."""
    found = [_standing(each, results) for each in results.streams]
    found.sort(key=lambda each: (bool(each.stopped), -each.answered, _score(each)))
    return tuple(each.model_copy(update={"rank": place}) for place, each in enumerate(found, 1))


def retrained_again(results: StreamResults) -> tuple[float, float, float]:
    """Chance values of another retraining: distance, and absolute gaps of retained and test pairs."""
    models = results.reference.retrained
    found = []
    for number, each in enumerate(models):
        others = [other for place, other in enumerate(models) if place != number]
        gaps = _gaps(each, others, len(results.reference.kinds))
        found.append((float(np.mean(np.abs(gaps[:-2]))), abs(gaps[-2]), abs(gaps[-1])))
    distance, retain, test = np.mean(found, axis=0).tolist()
    return distance, retain, test


def _score(each: StreamStanding) -> float:
    return abs(each.distance or 0) + abs(each.retain_gap or 0) + abs(each.test_gap or 0)


def _gaps(model: Metrics, others: Sequence[Metrics], requests: int) -> list[float]:
    """R@1 less the others' mean: of each request's pairs, then of retained and test pairs."""
    names = [*(f"forget/{number}" for number in range(requests)), "retain", "test"]
    return [model[f"{name}/recall@1"] - mean(each[f"{name}/recall@1"] for each in others) for name in names]


def _standing(found: StreamRecord, results: StreamResults) -> StreamStanding:
    common = {"rank": 0, "method": found.label, "answered": len(found.steps), "stopped": found.stopped}
    if not found.steps or found.stopped:
        missing = [name for name in StreamStanding.model_fields if name not in (*common, "verdict")]
        return StreamStanding(**common, verdict="stopped", **dict.fromkeys(missing))
    reference, last = results.reference, found.steps[-1]
    *requests, retain, test = _gaps(last.metrics, reference.retrained, len(reference.kinds))
    weights = [reference.pairs[f"forget/{number}"] for number in range(len(requests))]
    back = [
        last.metrics[f"forget/{number}/recall@1"] - step.metrics[f"forget/{number}/recall@1"]
        for number, step in enumerate(found.steps[:-1])
    ]
    relative = found.relative
    return StreamStanding(
        **common,
        verdict="no signal" if relative is None else relative.closer,
        kept=None if relative is None else relative.share.value,
        forget_gap=float(np.average(requests, weights=weights)),
        distance=float(np.mean(np.abs(requests))),
        returned=mean(back) if back else 0.0,
        retain_gap=retain,
        test_gap=test,
        **{f"{name}_share": share for name, share in last.shares.items()},
    )


def cell(standing: StreamStanding, column: str) -> str:
    """A value as tables show it."""
    value = getattr(standing, column)
    if value is None:
        return ""
    if column.endswith("_share"):
        return f"{value:.0%}"
    if column == "kept":
        return f"{value:+.0%}"
    if column == "distance":
        return f"{value:.1f}"
    return f"{value:+.1f}" if isinstance(value, float) else str(value)


def caption(results: StreamResults) -> str:
    """Meaning of the columns, and chance values."""
    counts = {"retrains": len(results.reference.retrained), "requests": len(results.reference.kinds)}
    distance, retain, test = retrained_again(results)
    words = CAPTION.format(**counts)
    return f"{words} Another retraining: forget {distance:.1f}, retain {retain:.1f}, test {test:.1f}."


def as_html(found: Sequence[StreamStanding], results: StreamResults) -> str:
    """The leaderboard as a page of its own."""
    few = " Made smaller by --quick; it proves nothing." if results.reduced else ""
    rows = [[cell(each, column) for column in COLUMNS] for each in found]
    return page(results.title, f"{caption(results)}{few}", list(COLUMNS.values()), rows, left=2)
