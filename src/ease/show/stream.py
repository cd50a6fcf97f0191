"""A stream of requests as a figure: whether the forgotten returns, what retained pairs lose, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from ease.show.figures import COLOURS, FIXED, PANEL_INCHES, RECALL, STYLE

KINDS = {"client": "o", "class": "s", "sample": "^"}
COSTS = {"passed": "pairs computed", "bytes": "bytes sent", "rounds": "rounds"}


@dataclass(frozen=True)
class StreamResults:
    """Measurements after each request."""

    kinds: Sequence[str]
    """Kind of each request: client, class or sample."""
    closed: Sequence[int]
    """Method that closed each request."""
    forget: Sequence[Sequence[float]]
    """[after answer i][request j] recall@1 of j's pairs."""
    retain: Sequence[float]
    """Recall@1 after each answer of the pairs that are left at the end."""
    test: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    """Kind of cost -> until each answer, as a share of retraining after each request."""
    retrain: Mapping[str, float]
    """`forget/0`, ..., `retain` and `test` of one retraining without all."""


def stream_figure(results: StreamResults) -> Figure:
    """Three panels over the number of requests: return, erosion, cost."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3 * PANEL_INCHES, 2.2), layout="constrained")
        back, erosion, cost = figure.subplots(1, 3)
        places = [sum(closed <= answer for closed in results.closed) for answer in range(len(results.forget))]
        for number, (kind, closed) in enumerate(zip(results.kinds, results.closed, strict=True)):
            later = [each[number] - results.retrain[f"forget/{number}"] for each in results.forget[closed:]]
            back.plot(places[closed:], later, marker=KINDS[kind], color=COLOURS[number % len(COLOURS)], linewidth=0.8)
        back.axhline(0, color=FIXED["Retrain"], linestyle="--", linewidth=1)
        back.set(title="return of the forgotten", xlabel="requests", ylabel=f"forget {RECALL} less retrain's")
        for colour, part, values in zip(COLOURS, ("retain", "test"), (results.retain, results.test), strict=False):
            erosion.plot(places, values, marker="o", color=colour, label=part)
            erosion.axhline(results.retrain[part], color=colour, linestyle="--", linewidth=1)
        erosion.set(title="erosion (dashed: retrain)", xlabel="requests", ylabel=RECALL, ylim=(-3, 103))
        erosion.legend()
        for colour, (name, shares) in zip(COLOURS, results.shares.items(), strict=False):
            cost.plot(places, [100 * share for share in shares], marker="o", color=colour, label=COSTS[name])
        cost.axhline(25, color=FIXED["Retrain"], linestyle=":", linewidth=1)
        cost.legend()
        cost.set(title="cost so far", xlabel="requests", ylabel="share of retraining each time (%)")
        cost.set_ylim(bottom=0)
        return figure
