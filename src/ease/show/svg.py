"""Pieces of a picture in SVG: scales, axes, lines and a legend, with escaped contents."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 250
"""Small on purpose: on a phone it is shown at about this size, and its letters stay readable."""
LEFT, RIGHT, TOP, BOTTOM = 44, 350, 34, 208

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """Values to places on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else self._plain(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def _plain(self, value: float) -> tuple[float, float, float]:
        return self.low, self.high, value

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers inside the range."""
        if self.log:
            exponents = range(math.ceil(math.log10(self.low) - 1e-9), round(math.log10(self.high)) + 1)
            return [10.0**exponent for exponent in exponents]
        rough = (self.high - self.low) / most
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(number * step, 10) for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def spanning(values: Sequence[float], start: float, end: float, margin: float = 0.06) -> Scale:
    """A scale around values, with a little air; a single value is in the middle."""
    low, high = min(values), max(values)
    air = (high - low) * margin if high > low else abs(high) or 1.0
    return Scale(low - air, high + air, start, end)


def _number(value: float) -> str:
    return f"{value:g}"


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element with escaped contents; `class_` loses its line, and a child that is None is left out."""
    named = Markup().join(
        Markup(' {}="{}"').format(key.rstrip("_"), _place(value)) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, named, join(*children))


def join(*children: Any) -> Markup:
    return Markup().join(escape(child) for child in children if child is not None)


def _place(value: Any) -> str:
    """Coordinates need two decimals, and rounding them keeps the same page the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def picture(title: str, description: str, *marks: Any, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """An image with a name and a description for those who do not see it."""
    named = tag("title", title), tag("desc", description)
    return tag("svg", *named, *marks, role="img", viewBox=f"0 0 {width} {height}", class_="chart")


def axes(
    x: Scale,
    y: Scale,
    x_label: str,
    y_label: str,
    x_ticks: Mapping[float, str] | None = None,
    y_ticks: Mapping[float, str] | None = None,
) -> Markup:
    """Grid lines, ticks and labels; the label of y is above its axis, where it can be read unturned."""
    x_ticks = {tick: _number(tick) for tick in x.ticks()} if x_ticks is None else x_ticks
    y_ticks = {tick: _number(tick) for tick in y.ticks()} if y_ticks is None else y_ticks
    return join(
        *(tag("line", x1=LEFT, x2=RIGHT, y1=y(tick), y2=y(tick), class_="grid") for tick in y_ticks),
        *(tag("text", text, x=LEFT - 6, y=y(tick) + 4, class_="tick end") for tick, text in y_ticks.items()),
        *(tag("text", text, x=x(tick), y=BOTTOM + 17, class_="tick middle") for tick, text in x_ticks.items()),
        tag("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"),
        tag("text", x_label, x=RIGHT, y=BOTTOM + 36, class_="label end"),
        tag("text", y_label, x=2, y=TOP - 10, class_="label"),
    )


def polyline(points: Points, x: Scale, y: Scale, kind: str) -> Markup:
    path = " ".join(f"{'L' if i else 'M'}{x(a):.2f} {y(b):.2f}" for i, (a, b) in enumerate(points))
    return tag("path", d=path, class_=f"line {kind}")


def legend(entries: Mapping[str, str]) -> Markup:
    """Kind of line -> name, beside each other above the picture's upper right corner."""
    marks, right = [], RIGHT
    for kind, name in reversed(list(entries.items())):
        right -= round(6.8 * len(name))
        marks.append(tag("text", name, x=right, y=12, class_="tick"))
        marks.append(tag("path", d=f"M{right - 25} 8H{right - 5}", class_=f"line {kind}"))
        right -= 33
    return join(*marks)
