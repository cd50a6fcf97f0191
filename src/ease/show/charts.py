"""The pictures of the report page, drawn as SVG that takes its colours from the page."""

import math
from collections.abc import Mapping, Sequence
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from ease.audit.band import Band
from ease.audit.records import Price, RocPoints
from ease.audit.relearn import Curve
from ease.audit.verdict import Measure
from ease.runs.records import BlockNotes
from ease.show.overview import Found
from ease.show.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Points,
    Scale,
    axes,
    legend,
    picture,
    polyline,
    spanning,
    tag,
)

STATES = {"trained": "before", "unlearned": "after", "retrain": "retrain"}
"""Models as the page calls them; each has one colour and one kind of line."""
MOST_DOTS = 120
"""Dots in one cloud; more only make a smear."""
STRIP = 240
"""Width of a strip of cosines from 0 to 1."""


def band_picture(measure: Measure) -> Markup:
    """A dot in a bar: the bar is where a retrained model would fall, the line is retrain, the dot the answer."""
    band = measure.band
    ends = [end for end in (band.low, band.high) if end is not None] if band else []
    x = spanning([measure.value, measure.retrain, *ends], 6, 94, margin=0.05)
    bar = None
    if band is not None:
        left = 0.0 if band.low is None else x(band.low)
        bar = tag("rect", x=left, y=5, width=max(x(band.high) - left, 1.0), height=10, rx=2, class_="band")
    return tag(
        "svg",
        tag("title", f"{measure.title}: {_beside(measure)}"),
        tag("line", x1=0, x2=100, y1=10, y2=10, class_="grid"),
        bar,
        tag("line", x1=x(measure.retrain), x2=x(measure.retrain), y1=3, y2=17, class_="line retrain-mark"),
        tag("circle", cx=x(measure.value), cy=10, r=4.5, class_="dot unlearned" if measure.inside else "dot outside"),
        role="img",
        viewBox="0 0 100 20",
        class_="band-picture",
    )


def _beside(measure: Measure) -> str:
    said = f"{measure.value:.{measure.digits}f} against retrain’s {measure.retrain:.{measure.digits}f}"
    if measure.band is None:
        return said
    low = "no lower end" if measure.band.low is None else f"{measure.band.low:.{measure.digits}f}"
    return f"{said}, band from {low} to {measure.band.high:.{measure.digits}f}"


def found_chart(found: Sequence[Found]) -> Markup:
    """Recall@1 as bars from 0 to 100, one below the other, each with its label above it."""
    x = Scale(0, 100, 0, WIDTH - 36)
    row = 34
    marks = []
    for number, each in enumerate(found):
        y = row * number
        marks.append(tag("text", each.label, x=0, y=y + 11, class_="tick"))
        marks.append(tag("rect", x=0, y=y + 16, width=x(100), height=11, rx=2, class_="track"))
        width = max(x(each.value), 1.5)
        marks.append(tag("rect", x=0, y=y + 16, width=width, height=11, rx=2, class_=f"found {each.kind}"))
        marks.append(tag("text", f"{each.value:.0f}", x=WIDTH, y=y + 26, class_="figure end"))
    said = "; ".join(f"{each.label}: {each.value:.0f} of 100" for each in found)
    return picture("How many of 100 pairs find their match", said, *marks, height=row * len(found))


def rounds_chart(
    lines: Mapping[str, Sequence[float]],
    before: Mapping[str, float],
    band: Band | None,
    retrain: float | None,
) -> Markup:
    """Recall@1 of forget, retained and test pairs over the rounds, and the level of retrain's forget pairs."""
    rounds = max(map(len, lines.values()))
    x = Scale(-1 if before else 0, max(rounds - 1, 1), LEFT + 14, RIGHT - 8)
    y = Scale(0, 100, BOTTOM, TOP)
    step = max(1, math.ceil(rounds / 10))
    ticks = ({-1.0: "before"} if before else {}) | {float(n): str(n) for n in range(0, rounds, step)}
    marks = []
    if band is not None:
        top, bottom = y(min(band.high, 100.0)), y(max(band.low or 0.0, 0.0))
        marks.append(tag("rect", x=LEFT, y=top, width=RIGHT - LEFT, height=max(bottom - top, 1.5), class_="band"))
    if retrain is not None:
        marks.append(polyline([(x.low, retrain), (x.high, retrain)], x, y, "retrain"))
    kinds = {"forget": "unlearned", "retain": "kept", "test": "other"}
    said = []
    for name, values in lines.items():
        points = [*([(-1.0, before[name])] if name in before else []), *((float(n), v) for n, v in enumerate(values))]
        marks.append(polyline(points, x, y, kinds[name]))
        marks += [tag("circle", cx=x(a), cy=y(b), r=2.5, class_=f"dot {kinds[name]}") for a, b in points]
        said.append(f"{name} pairs from {points[0][1]:.1f} to {points[-1][1]:.1f}")
    if retrain is not None:
        said.append(f"retrain's forget pairs {retrain:.1f}")
    shown = {kinds[name]: name for name in lines} | ({"retrain": "retrain, forget"} if retrain is not None else {})
    return picture(
        "Recall@1 per round",
        "; ".join(said),
        axes(x, y, "round", "", ticks),
        *marks,
        legend(shown),
    )


def strip(block: BlockNotes, delta: float) -> Markup:
    """The directions of one block by cosine: filled ones go at this threshold; larger ones hold more forget energy."""
    x = Scale(0, 1, 8, STRIP - 8)
    dots = [
        tag(
            "circle",
            cx=x(min(max(cosine, 0.0), 1.0)),
            cy=14,
            r=3 + 9 * math.sqrt(share),
            class_="direction goes" if cosine <= delta else "direction",
        )
        for cosine, share in zip(block.cosines, block.energies, strict=True)
    ]
    return tag(
        "svg",
        tag("title", f"Cosines of {len(dots)} directions of {block.block}"),
        tag("line", x1=x(0), x2=x(1), y1=14, y2=14, class_="axis"),
        *dots,
        _threshold(x, delta, 0, 28),
        role="img",
        viewBox=f"0 0 {STRIP} 28",
        class_="strip",
    )


def tradeoff_chart(blocks: Sequence[BlockNotes], delta: float) -> Markup:
    """eta_f and eta_r over the threshold."""
    x, y = Scale(0, 1, LEFT, RIGHT - 8), Scale(0, 1, BOTTOM, TOP)
    steps = [step / 100 for step in range(101)]
    removed = [(step, forget_energy(blocks, step)) for step in steps]
    touched = [(step, retain_damage(blocks, step)) for step in steps]
    now = forget_energy(blocks, delta), retain_damage(blocks, delta)
    return picture(
        "Forget energy removed and retained directions touched, over the threshold",
        f"At delta {delta:.2f}, eta_f is {now[0]:.2f} and eta_r {now[1]:.2f}",
        axes(x, y, "threshold δ", ""),
        polyline(removed, x, y, "unlearned"),
        polyline(touched, x, y, "trained"),
        _threshold(x, delta, TOP, BOTTOM),
        _at(x, y, delta, now[0], "dot unlearned at-removed"),
        _at(x, y, delta, now[1], "dot trained at-touched"),
        legend({"unlearned": "forget energy removed", "trained": "retained touched"}),
    )


def _threshold(x: Scale, delta: float, top: int, bottom: int) -> Markup:
    """A line that the slider moves; it says from where and how far."""
    place = {"data-from": x.start, "data-width": x.end - x.start}
    return tag("line", x1=x(delta), x2=x(delta), y1=top, y2=bottom, class_="threshold", **place)


def _at(x: Scale, y: Scale, delta: float, value: float, kind: str) -> Markup:
    """A dot that the slider moves along a curve."""
    place = {
        "data-from": x.start,
        "data-width": x.end - x.start,
        "data-bottom": y.start,
        "data-height": y.start - y.end,
    }
    return tag("circle", cx=x(delta), cy=y(value), r=4, class_=kind, **place)


def forget_energy(blocks: Sequence[BlockNotes], delta: float) -> float:
    """eta_f: share of the forget energy along directions whose cosine is at most delta, mean of the blocks."""
    found = [
        sum(share for cosine, share in zip(block.cosines, block.energies, strict=True) if cosine <= delta)
        for block in blocks
    ]
    return sum(found) / len(found)


def retain_damage(blocks: Sequence[BlockNotes], delta: float) -> float:
    """eta_r: the largest share that excision can take from a retained direction, over all blocks."""
    return max((c * c for block in blocks for c in block.cosines if c <= delta), default=0.0)


def raincloud(clouds: Mapping[str, Sequence[float]]) -> Markup:
    """For each model a half violin, a box of the quartiles, and the pairs themselves as dots."""
    outlines = {name: density(values) for name, values in clouds.items()}
    x = spanning([end for where, _ in outlines.values() for end in (where[0], where[-1])], LEFT + 14, RIGHT, margin=0)
    y = Scale(0, 1, BOTTOM, TOP - 16)
    lane = (BOTTOM - TOP + 16) / len(clouds)
    marks, said = [], []
    for lane_number, (name, values) in enumerate(clouds.items()):
        middle = TOP - 16 + lane * (lane_number + 0.55)
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        where, height = outlines[name]
        outline = [f"{x(a):.2f} {middle - 3 - lane * 0.45 * b:.2f}" for a, b in zip(where, height, strict=True)]
        floor = f"{middle - 3:.2f}"
        path = f"M{x(where[0]):.2f} {floor}L{'L'.join(outline)}L{x(where[-1]):.2f} {floor}Z"
        marks.append(tag("path", d=path, class_=f"violin {name}"))
        marks.append(tag("rect", x=x(low), y=middle, width=x(high) - x(low), height=7, rx=1, class_=f"box {name}"))
        marks.append(tag("line", x1=x(median), x2=x(median), y1=middle - 1, y2=middle + 8, class_="axis"))
        marks += [
            tag("circle", cx=x(value), cy=middle + 12 + jitter * lane * 0.2, r=1.6, class_=f"rain {name}")
            for value, jitter in zip(some(values), _jitter(), strict=False)
        ]
        marks.append(tag("text", STATES.get(name, name), x=2, y=middle + 8, class_="tick"))
        said.append(f"{STATES.get(name, name)}: median {median:.2f}, middle half {low:.2f} to {high:.2f}")
    return picture(
        "Similarity of picture and caption, for each forget pair",
        "; ".join(said),
        axes(x, y, "cosine of picture and caption", "", y_ticks={}),
        *marks,
    )


def density(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """A Gaussian kernel density on a grid, scaled to height 1; the width is Silverman's."""
    found = np.asarray(values, dtype=float)
    quarter = np.subtract(*np.quantile(found, [0.75, 0.25])) / 1.349
    spread = min(value for value in (found.std(), quarter, math.inf) if value > 0)
    width = 0.9 * spread * len(found) ** -0.2 if math.isfinite(spread) else 1e-3
    grid = np.linspace(found.min() - 2 * width, found.max() + 2 * width, 80)
    height = np.exp(-(((grid[:, None] - found[None]) / width) ** 2) / 2).sum(1)
    return grid.tolist(), (height / height.max()).tolist()


def some(values: Sequence[float]) -> list[float]:
    """Evenly spaced order statistics: the shape stays, whichever pairs are drawn."""
    ordered = sorted(values)
    if len(ordered) <= MOST_DOTS:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (MOST_DOTS - 1)] for i in range(MOST_DOTS)]


def _jitter() -> Any:
    """Spread that looks random and is the same every time."""
    return (number * 0.618034 % 1 for number in count(1))


def roc_chart(curves: Mapping[str, tuple[RocPoints, float]]) -> Markup:
    """Members found over false alarms on logarithmic axes: an attack matters where it is almost never wrong."""
    positive = [v for roc, _ in curves.values() for v in (*roc.fpr, *roc.tpr) if v > 0]
    least = max(10.0 ** math.floor(math.log10(min(positive))), 1e-4)
    x, y = Scale(least, 1, LEFT, RIGHT - 10, log=True), Scale(least, 1, BOTTOM, TOP, log=True)
    marks = [polyline([(least, least), (1, 1)], x, y, "chance")]
    for name, (roc, _) in curves.items():
        points = [(max(f, least), max(t, least)) for f, t in zip(roc.fpr, roc.tpr, strict=True)]
        corners = [p for i, p in enumerate(points) if i in (0, len(points) - 1) or not _between(points, i)]
        marks.append(polyline(corners, x, y, name))
    ticks = {tick: _percent(tick) for tick in x.ticks()}
    return picture(
        "Members found over false alarms, both on logarithmic axes",
        "; ".join(f"{STATES.get(name, name)}: AUC {auc:.3f}" for name, (_, auc) in curves.items()),
        axes(x, y, "non-members called member", "members found", ticks, ticks),
        *marks,
        legend({name: STATES.get(name, name) for name in curves}),
    )


def _between(points: Points, i: int) -> bool:
    """A point on the way straight up or straight right adds nothing to the picture."""
    (a, b), (c, d), (e, f) = points[i - 1 : i + 2]
    return a == c == e or b == d == f


def cost_chart(prices: Mapping[str, Price]) -> Markup:
    """Costs of the result as a share of retraining."""
    most = max(1.0, *(price.ratio for price in prices.values()))
    x = Scale(0, most, 110, RIGHT - 46)
    row, top = 26, 24
    height = top + row * len(prices) + 6
    marks = [
        tag("line", x1=x(1), x2=x(1), y1=top - 4, y2=height - 4, class_="line retrain"),
        tag("text", "retrain", x=x(1), y=12, class_="tick middle"),
    ]
    for number, (name, price) in enumerate(prices.items()):
        y = top + row * number
        marks.append(tag("text", name, x=2, y=y + 13, class_="tick"))
        marks.append(tag("rect", x=x(0), y=y + 2, width=max(x(price.ratio) - x(0), 1.0), height=14, class_="bar"))
        marks.append(tag("text", f"{price.ratio:.0%}", x=x(price.ratio) + 5, y=y + 14, class_="tick halo"))
    said = "; ".join(f"{name} {price.ratio:.0%}" for name, price in prices.items())
    return picture("Cost as a share of retraining", said, *marks, height=height)


def relearn_chart(curves: Mapping[str, Curve], taught: str) -> Markup:
    """Margin of forget pairs over unseen ones while a model is taught again; thin lines are further retrainings."""
    steps = next(iter(curves.values())).steps
    x = Scale(0, len(steps) - 1, LEFT + 8, RIGHT - 8)
    before = fmean(curve.levels[0] + curve.lost for curve in curves.values())
    y = spanning([before, 0.0, *(level for curve in curves.values() for level in curve.levels)], BOTTOM, TOP)
    main = {name: curves[name] for name in STATES if name in curves}
    others = [curve for name, curve in curves.items() if name not in STATES]
    marks = [polyline([(x.low, before), (x.high, before)], x, y, "trained")]
    marks += [polyline(list(enumerate(curve.levels)), x, y, "further") for curve in others]
    marks += [polyline(list(enumerate(curve.levels)), x, y, name) for name, curve in main.items()]
    said = [f"{STATES[name]} from {c.levels[0]:.2f} to {c.levels[-1]:.2f}" for name, c in main.items()]
    further = {"further": "other retrains"} if others else {}
    return picture(
        f"Relearning from {taught} pairs",
        "; ".join(said),
        axes(x, y, "training steps", "", {float(i): str(step) for i, step in enumerate(steps)}),
        *marks,
        legend({"trained": "before"} | {name: STATES[name] for name in main} | further),
    )


def _percent(value: float) -> str:
    return f"{100 * value:g}%"
