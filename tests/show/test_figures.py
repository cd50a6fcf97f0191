"""Figures: every kind is drawn from results alone, shows their values, and is the same twice."""

from typing import Any

import numpy as np
import pytest

from ease.show.figures import DRAWN, draw, encode, representative_pairs, spaced


@pytest.fixture
def drawable(results, header) -> dict[str, dict[str, Any]]:
    """The results in the shape of each kind."""

    def of(kind: str, rows: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {**results, "header": header(kind), "rows": rows, **extra}

    rows = results["rows"]
    attacked = [{**row, "metrics": {**row["metrics"], "lira/auc": 0.25}} for row in rows]
    steps = [
        {**row, "at": {"name": "delta", "value": value}, "settings": {"delta": value}}
        for row in rows
        if row["label"] == "Near"
        for value in (0.1, 0.5)
    ]
    varied = [row for row in rows if row["role"] != "method"] + steps
    cloudy = [{**row, "pairs": {"forget": [0.1, 0.2, 0.4], "retain": [0.5, 0.6, 0.7]}} for row in rows]
    cosines = [[[1.0, 1.0] if i == j else [0.9, 0.1 * (i + j)] for j in range(3)] for i in range(3)]
    overlap = {"block": "image.projector.0", "modality": "image", "clients": [0, 1, 2], "cosines": cosines}
    return {
        "curves": of("curves", varied),
        "grid": of("grid", attacked),
        "tradeoff": of("tradeoff", varied),
        "bars": of("bars", rows),
        "raincloud": of("raincloud", cloudy),
        "subspaces": of("subspaces", [], subspaces=[{"format": 2, "seed": 0, "blocks": [overlap]}]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(DRAWN))
def test_the_same_results_give_the_same_bytes(kind, drawable, bench) -> None:
    for form, start in (("svg", b"<?xml"), ("pdf", b"%PDF")):
        first, second = (encode(draw(bench(drawable[kind]))[kind], form) for _ in range(2))
        assert first == second and first.startswith(start)


def test_a_plain_table_has_no_figure(results, bench) -> None:
    assert draw(bench(results)) == {}


def test_curves_show_means_with_deviations_and_retraining_dashed(drawable, bench) -> None:
    """Near's forget recall is 24 and 26 over seeds, so 25 at both values; retrain's 20 and 30 give 25."""
    (panel,) = draw(bench(drawable["curves"]))["curves"].axes
    drawn = {
        line.get_linestyle(): line
        for line in panel.lines
        if line.get_color() == "#0072B2" and len(line.get_xdata()) == 2
    }
    assert list(drawn["-"].get_ydata()) == [25, 25] and list(drawn["--"].get_ydata()) == [25, 25]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.1", "0.5"]


def test_the_tradeoff_ends_at_retraining(drawable, bench) -> None:
    (panel,) = draw(bench(drawable["tradeoff"]))["tradeoff"].axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}
    assert drawn["Retrain"] == ([25], [90]) and drawn["Trained"] == ([80], [90])
    assert drawn["Near"] == ([25, 25], [88, 88])


def test_the_grid_writes_every_value(drawable, bench) -> None:
    panel = draw(bench(drawable["grid"]))["grid"].axes[0]
    assert [text.get_text() for text in panel.texts] == ["0.25"] * 4
    assert [label.get_text() for label in panel.get_yticklabels()] == ["Trained", "Near", "Far", "Retrain"]


def test_bars_are_as_long_as_the_values(drawable, bench) -> None:
    (panel,) = draw(bench(drawable["bars"]))["bars"].axes
    lengths = [bar.get_height() for bar in panel.containers[1]]
    assert lengths == [25] * 3 + [88] * 3 + [31] * 3  # Near: forget, retain and test, three depths each


def test_retraining_is_an_arc_across_each_sector_of_the_bars(drawable, bench) -> None:
    """25, 90 and 30 percent, three depths each, above the hole of 25; no bar of its own."""
    (panel,) = draw(bench(drawable["bars"]))["bars"].axes
    assert [set(arc.get_ydata()) for arc in panel.lines] == [{50.0}] * 3 + [{115.0}] * 3 + [{55.0}] * 3
    assert [bars.get_label() for bars in panel.containers] == ["Trained", "Near", "Far"]


def test_curves_name_their_lines_at_the_end(drawable, bench) -> None:
    """Near ends at 25, 88 and 31: the last is moved up, so that two words do not lie on each other."""
    (panel,) = draw(bench(drawable["curves"]))["curves"].axes
    assert {text.get_text(): text.xy[1] for text in panel.texts} == {"forget": 25, "retain": 88, "test": 34}
    assert panel.get_xlabel() == "entanglement threshold δ"


def test_labels_are_moved_apart_and_not_reordered() -> None:
    assert spaced([50, 10, 12, 90], 9) == [50, 10, 19, 90]
    assert spaced([5, 5, 5], 9) == [5, 14, 23]


def test_the_strongest_setting_has_the_large_mark_and_panels_share_their_scale(drawable, bench) -> None:
    figure = draw(bench(drawable["tradeoff"]))["tradeoff"]
    (panel,) = figure.axes
    large = [line for line in panel.lines if line.get_markersize() == 7]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in large] == [([25], [88])]
    low, high = panel.get_ylim()
    assert high <= 103 and high - low >= 12


def test_a_label_with_a_comma_is_one_line_of_the_tradeoff(drawable, bench) -> None:
    rows = [row | ({"label": "Near, late"} if row["label"] == "Near" else {}) for row in drawable["tradeoff"]["rows"]]
    (panel,) = draw(bench({**drawable["tradeoff"], "rows": rows}))["tradeoff"].axes
    drawn = {line.get_label(): len(line.get_xdata()) for line in panel.lines}
    assert drawn["Near, late"] == 2


def test_pairs_from_the_most_to_the_least_alike() -> None:
    """Similarities 0.9, 0.5 and 0.1 of three pairs: all three in that order, or the ends alone."""
    similarity = np.array([[1.0, 0.5, 0.1], [0.5, 1.0, 0.9], [0.1, 0.9, 1.0]])
    assert representative_pairs(similarity) == [(1, 2), (0, 1), (0, 2)]
    assert representative_pairs(similarity, 2) == [(1, 2), (0, 2)]


@pytest.mark.parametrize("kind", sorted(DRAWN))
def test_what_diverged_leaves_a_gap(kind, drawable, bench) -> None:
    results = drawable[kind]
    lost = [row | {"metrics": {}, "diverged": "every update was rejected"} for row in results["rows"]]
    for row in lost:
        row.pop("pairs", None)
    rows = [gone if row["label"] == "Near" else row for row, gone in zip(results["rows"], lost, strict=True)]
    figure = draw(bench({**results, "rows": rows}))[kind]
    assert encode(figure, "svg").startswith(b"<?xml")
    if kind == "bars":
        assert "Near (diverged)" in [text.get_text() for text in figure.legends[0].get_texts()]
    if kind == "grid":
        assert [text.get_text() for text in figure.axes[0].texts] == ["0.25", "diverged", "0.25", "0.25"]
