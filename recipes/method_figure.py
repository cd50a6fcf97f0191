"""Draws docs/figures/method.svg, the diagram on docs/method.md: python recipes/method_figure.py."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OUT = Path(__file__).parents[1] / "docs" / "figures" / "method.svg"
TRAINED, OURS, RETRAINED = "#555555", "#0b6e99", "#b35c00"
POINTS = {
    "start": (0.0, 0.0),
    "trained": (6.0, 2.6),
    "subtracted": (5.2, 0.55),
    "recovered": (6.25, 0.2),
    "retrained": (6.5, 0.0),
    "later": (8.2, 0.35),
}


def main() -> None:
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "ease"})
    figure, axes = plt.subplots(figsize=(7.6, 3.1))
    way("start", "trained", TRAINED, "-", 0.12)
    way("start", "retrained", RETRAINED, "--", 0.1)
    way("trained", "subtracted", OURS, "-")
    way("subtracted", "recovered", OURS, "-")
    way("recovered", "later", OURS, ":")
    for name, colour in (("start", TRAINED), ("trained", TRAINED), ("retrained", RETRAINED), ("recovered", OURS)):
        axes.plot(*POINTS[name], "o", color=colour, markersize=6)
    label(0.0, 0.28, r"$w_0$", TRAINED)
    label(6.12, 2.75, r"trained model $w_n$", TRAINED)
    label(1.0, 2.15, "training with all pairs", TRAINED)
    label(1.9, -0.62, "retraining without the forget pairs", RETRAINED)
    label(6.62, -0.42, r"retrained model $\tilde w$", RETRAINED)
    label(5.75, 1.45, r"1  subtract $c\,S$", OURS)
    label(3.85, 0.72, "2  recover", OURS)
    label(6.95, 0.5, "3  later rounds, locked along S", OURS)
    axes.set(xlim=(-0.3, 10.3), ylim=(-0.95, 3.2))
    axes.axis("off")
    figure.savefig(OUT, bbox_inches="tight", metadata={"Date": None})


def way(first: str, last: str, colour: str, style: str, bend: float = 0.0) -> None:
    arrow = {"arrowstyle": "->", "color": colour, "linestyle": style, "linewidth": 1.6, "shrinkA": 3, "shrinkB": 4}
    arrow["connectionstyle"] = f"arc3,rad={-bend}"
    plt.gca().annotate("", POINTS[last], POINTS[first], arrowprops=arrow)


def label(x: float, y: float, text: str, colour: str) -> None:
    plt.gca().text(x, y, text, color=colour)


if __name__ == "__main__":
    main()
