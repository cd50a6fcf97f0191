"""The ways of several trainings through the weights, in two dimensions, as a figure."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ease.show.figures import COLOURS, FIXED, INK, OUR_INK, SOFT, STYLE, TRADEOFF_INCHES, settle
from ease.show.placing import Name, write_names

STYLES = {
    "training": (FIXED["Trained"], "-", "o"),
    "retraining": (INK, "-", "s"),
    "counterfactual": (COLOURS[0], "--", "^"),
    "EASE": (FIXED["EASE"], "-", "D"),
}
"""Colour, line and mark of each way."""


@dataclass(frozen=True)
class Flat:
    """Ways as places in a plane through the start of them all."""

    places: Mapping[str, np.ndarray]
    """Way -> [states, 2]."""
    outside: Mapping[str, float]
    """Way -> distance of its last state from the plane."""


def flatten(ways: Mapping[str, np.ndarray], along: str, across: str) -> Flat:
    """In the plane of the common start and the ends of two ways, the first of which ends on the first axis.

    Ways are [states, size] and begin at one state, except those that continue from the end of another.
    """
    start = ways[along][0]
    first = ways[along][-1] - start
    first = first / np.linalg.norm(first)
    second = ways[across][-1] - start
    second = second - (second @ first) * first
    second = second / np.linalg.norm(second)
    places, outside = {}, {}
    for name, states in ways.items():
        away = states - start
        places[name] = np.stack([away @ first, away @ second], axis=1)
        last = away[-1] - places[name][-1, 0] * first - places[name][-1, 1] * second
        outside[name] = float(np.linalg.norm(last))
    return Flat(places, outside)


def paths_figure(flat: Flat, title: str) -> Figure:
    """Left the whole ways, right where they end; one unit is as long in either direction."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * TRADEOFF_INCHES + 0.8, TRADEOFF_INCHES + 0.4), layout="constrained")
        whole, ends = figure.subplots(1, 2)
        for panel in (whole, ends):
            for name, places in flat.places.items():
                colour, line, mark = STYLES[name]
                style = {"color": colour, "linestyle": line, "marker": mark, "markersize": 2.5}
                panel.plot(
                    *places.T, linewidth=2 if name == "EASE" else 1.1, zorder=4 if name == "EASE" else 3, **style
                )
                panel.plot(*places[-1], marker=mark, markersize=6, color=colour, zorder=5)
            panel.set(xlabel="towards the retrained model", aspect="equal")
        whole.set(title=title, ylabel="across, towards the trained one")
        ends.set_title("the ends, closer")
        _around(whole, np.concatenate(list(flat.places.values())), air=1.15)
        _around(ends, np.array([places[-1] for places in flat.places.values()]), air=1.8)
        settle(figure)
        for panel in (whole, ends):
            shown = {name: [tuple(place) for place in places] for name, places in flat.places.items()}
            write_names(panel, [_name(name, flat) for name in shown], list(shown.values()))
        return figure


def _around(panel: Axes, places: np.ndarray, air: float) -> None:
    """Show a square around places, so many times as wide as they are."""
    middle, half = (places.min(0) + places.max(0)) / 2, air * np.ptp(places, axis=0).max() / 2
    panel.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))


def _name(name: str, flat: Flat) -> Name:
    ours = name == "EASE"
    letters = {"fontsize": 7, "color": OUR_INK if ours else SOFT, "fontweight": "bold" if ours else "normal"}
    x, y = flat.places[name][-1]
    return Name(name, (float(x), float(y)), letters, STYLES[name][0])
