"""Figures: every kind is drawn from results alone, shows their values, and is the same twice."""

import re
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

from ease.show.figures import (
    COLOURS,
    DARK,
    DARK_PAPER,
    DRAWN,
    INK,
    OUR_INK,
    OUR_SHADES,
    SHADES,
    SOFT,
    draw,
    encode,
    representative_pairs,
    spaced,
    tpr_grid,
)


@pytest.fixture
def drawable(results, header) -> dict[str, dict[str, Any]]:
    """The results in the shape of each kind."""

    def of(kind: str, rows: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {**results, "header": header(kind), "rows": rows, **extra}

    rows = results["rows"]
    attacked = [{**row, "metrics": {**row["metrics"], "lira/auc": 0.25, "lira/tpr": 0.02}} for row in rows]
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
        "tpr": of("grid", attacked),
        "baselines": of("baselines", rows),
        "table": of("table", rows),
        "ablation": of("ablation", rows),
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


def test_a_plain_table_has_a_ranking(drawable, bench) -> None:
    """Near's gaps add up to 7 on both seeds, Far's to 30: Near is drawn above Far."""
    sums, _ = draw(bench(drawable["table"]))["table"].axes
    assert [label.get_text() for label in sums.get_yticklabels()] == ["Far", "Near"]
    assert list(sums.lines[0].get_xdata()) == [30, 7]


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


def test_true_positives_are_means_in_percent_next_to_one_percent(drawable, bench) -> None:
    """Near finds 2 % on one seed and 6 % on the other: 4 with a deviation of 2.8."""
    results = drawable["tpr"]
    rows = [
        {**row, "metrics": {**row["metrics"], "lira/tpr": 0.06}} if (row["label"], row["seed"]) == ("Near", 1) else row
        for row in results["rows"]
    ]
    (panel,) = draw(bench({**results, "rows": rows}))["tpr"].axes
    (marks,) = panel.containers
    assert list(marks.lines[0].get_xdata()) == [2, 4, 2, 2]
    (segment,) = [each for each in marks.lines[2][0].get_segments() if each[0][1] == 1]
    assert segment[:, 0] == pytest.approx([4 - 8**0.5, 4 + 8**0.5])
    assert [list(line.get_xdata()) for line in panel.lines if line.get_linestyle() == ":"] == [[1, 1]]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["Trained", "Near", "Far", "Retrain"]
    assert panel.get_title() == "client request"


def test_a_panel_without_any_rate_says_why(drawable, bench) -> None:
    rows = drawable["bars"]["rows"]
    (panel,) = draw(bench({**drawable["tpr"], "rows": rows}))["tpr"].axes
    assert [text.get_text() for text in panel.texts] == ["too few non-members"]
    (measured,) = draw(bench(drawable["tpr"]))["tpr"].axes
    assert not measured.texts


def test_three_experiments_with_three_backbones_make_nine_panels(drawable, bench, header) -> None:
    """Rows: experiments, columns: backbones, in each panel a mark for every method and kind of request."""
    grid = drawable["tpr"]
    rows = [
        {**row, "at": {"name": "model.backbone", "value": name}, "scenario": scenario}
        for name in ("a", "b", "c")
        for scenario in ("client", "class")
        for row in grid["rows"]
    ]
    head = header("grid", vary={"model.backbone": ["a", "b", "c"]})
    varied = bench({**grid, "rows": rows, "bands": [], "header": head})
    figure = tpr_grid([varied] * 3)
    assert [panel.get_title() for panel in figure.axes] == [f"model.backbone = {name}" for name in "abc"] * 3
    assert all(len(panel.containers) == 2 for panel in figure.axes)
    assert draw(varied)["grid"].axes[2].get_title() == "model.backbone = c"


def test_baselines_show_forget_and_retained_recall(drawable, bench) -> None:
    forget, retain = draw(bench(drawable["baselines"]))["baselines"].axes
    heights = [[bar.get_height() for bar in panel.patches] for panel in (forget, retain)]
    assert heights == [[25, 55, 25], [88, 90, 90]]
    assert [label.get_text() for label in forget.get_xticklabels()] == ["Near", "Far", "Retrain"]


def test_curves_have_a_row_for_each_method(drawable, bench) -> None:
    rows = drawable["curves"]["rows"]
    far = [row | {"label": "Far", "method": "far"} for row in rows if row["role"] == "method"]
    figure = draw(bench({**drawable["curves"], "rows": rows + far}))["curves"]
    assert [panel.get_ylabel() for panel in figure.axes] == ["Near\nR@1 (%)", "Far\nR@1 (%)"]


def test_the_heat_map_shows_projectors_where_there_are_any(drawable, bench) -> None:
    """The adapter is more entangled: similarity 1 of every two clients."""
    results = drawable["subspaces"]
    projector = results["subspaces"][0]["blocks"][0]
    adapter = projector | {"block": "image.tower.blocks.3.attention.query", "cosines": [[[1.0]] * 3] * 3}

    def title(*blocks: dict[str, Any]) -> str:
        shown = {**results, "subspaces": [{"format": 2, "seed": 0, "blocks": blocks}]}
        return draw(bench(shown))["subspaces"].axes[0].get_title()

    assert title(adapter, projector).startswith("image.projector.0\n")
    assert "attention.query" in title(adapter)


def test_bars_are_as_long_as_the_values(drawable, bench) -> None:
    """Near: forget, retain and test pairs; the depths of the made-up results are alike."""
    (panel,) = draw(bench(drawable["bars"]))["bars"].axes
    lengths = {bars.get_label(): [bar.get_height() for bar in bars] for bars in panel.containers}
    assert [lengths[f"Near R@{k}"] for k in (1, 5, 10)] == [[25, 88, 31]] * 3


def test_a_deeper_rank_is_a_longer_and_paler_bar_below(drawable, bench) -> None:
    rows = [
        {**row, "metrics": row["metrics"] | {f"forget/recall@{k}": float(k + 10) for k in (1, 5, 10)}}
        for row in drawable["bars"]["rows"]
    ]
    (panel,) = draw(bench({**drawable["bars"], "rows": rows}))["bars"].axes
    shown = [
        (bars.get_label(), bars[0].get_height()) for bars in panel.containers if bars.get_label().startswith("Far")
    ]
    assert shown == [("Far R@10", 20), ("Far R@5", 15), ("Far R@1", 11)]  # in the order of drawing
    lightness = [sum(bars[0].get_facecolor()[:3]) for bars in panel.containers[:3]]
    assert lightness == sorted(lightness, reverse=True)


def test_retraining_is_an_arc_across_each_sector_of_the_bars(drawable, bench) -> None:
    """25, 90 and 30 percent, three depths each, above the hole of 25; no bar of its own."""
    (panel,) = draw(bench(drawable["bars"]))["bars"].axes
    assert [set(arc.get_ydata()) for arc in panel.lines] == [{50.0}] * 3 + [{115.0}] * 3 + [{55.0}] * 3
    assert {bars.get_label().partition(" ")[0] for bars in panel.containers} == {"Trained", "Near", "Far"}


def corners(text: Any) -> np.ndarray:
    """Of the box around a text on the page, as it is turned [4, 2]: the straight box, turned about its anchor."""
    turned = np.radians(text.get_rotation())
    text.set_rotation(0)
    box = Text.get_window_extent(text)  # an annotation's own would hold its line, too
    text.set_rotation(np.degrees(turned))
    straight = np.array([[box.x0, box.y0], [box.x1, box.y0], [box.x1, box.y1], [box.x0, box.y1]])
    if turned == 0:
        return straight
    assert text.get_rotation_mode() == "anchor"
    anchor = text.get_transform().transform(text.get_position())
    turn = np.array([[np.cos(turned), -np.sin(turned)], [np.sin(turned), np.cos(turned)]])
    return (straight - anchor) @ turn.T + anchor


def apart(one: np.ndarray, two: np.ndarray) -> bool:
    """Two convex shapes do not touch if some side of one has the other wholly behind it (separating axes)."""
    for shape in (one, two):
        for side in np.roll(shape, -1, axis=0) - shape:
            across = np.array([-side[1], side[0]])
            first, second = one @ across, two @ across
            if first.max() < second.min() or second.max() < first.min():
                return True
    return False


def test_the_measure_of_overlaps_sees_them() -> None:
    square = np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]])
    diamond = np.array([[0.0, -1.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert not apart(square, square + 1.9) and apart(square, square + 2.1)
    assert apart(square, diamond + 3.0) and not apart(square, diamond + 2.2)
    assert apart(square, diamond + 2.6)  # their upright boxes overlap


def crowded(kind: str, header: Any) -> dict[str, Any]:
    """Results as real ones are: methods in a knot around retraining, two of them in the very same place."""
    places = {
        "GradAscent": (64, 89),
        "NegGrad+": (60, 89),
        "FedOSD": (26, 88),
        "SOUL": (26, 88),
        "MultiDelete": (62, 82),
    }
    places |= {"NoT": (24, 49), "Fine-tune": (86, 91), "FedEraser": (23, 86), "EASE": (23, 89)}
    rows = []
    for scenario in ("client", "class", "sample"):
        for label, (forget, retain) in {"Trained": (87, 88), **places, "Retrain": (24, 90)}.items():
            role = {"Trained": "trained", "Retrain": "retrain"}.get(label, "method")
            for step in range(3 if role == "method" and kind == "tradeoff" else 1):
                recalls = {"forget": forget + 6 * (2 - step) % 90, "retain": retain, "test": 30}
                metrics = {
                    f"{part}/recall@{k}": float(min(v * (k + 9) / 10, 100))
                    for part, v in recalls.items()
                    for k in (1, 5, 10)
                }
                at = {"at": {"name": "rate", "value": step}} if kind == "tradeoff" and role == "method" else {}
                row = {"scenario": scenario, "seed": 0, "role": role, "method": label, "label": label}
                rows.append(row | {"settings": {"rate": step} if at else {}, "tuned": False, "metrics": metrics, **at})
    return {"format": 2, "header": header(kind, seeds=[0]), "bands": [], "rows": rows}


@pytest.mark.parametrize("kind", ["bars", "tradeoff"])
def test_no_two_labels_touch(kind, header, bench, monkeypatch) -> None:
    """Names of methods, ticks, titles and legend, each by the box around its letters, turned as they are."""
    figure = draw(bench(crowded(kind, header)))[kind]
    written, write = [], Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, renderer: (written.append(text), write(text, renderer)))
    figure.draw_without_rendering()
    boxes = [(text.get_text(), corners(text)) for text in written if text.get_visible() and text.get_text().strip()]
    assert sum(name == "EASE" for name, _ in boxes) == {"bars": 9, "tradeoff": 3}[kind]
    touching = [(a, b) for (a, one), (b, two) in combinations(boxes, 2) if not apart(one, two)]
    assert touching == []


@pytest.mark.parametrize("kind", ["bars", "tradeoff"])
def test_ease_is_highlighted_and_the_others_are_not(kind, header, bench) -> None:
    """Bold, and in a colour that no other name has."""
    figure = draw(bench(crowded(kind, header)))[kind]
    names = {"FedOSD", "SOUL", "NoT", "EASE"}
    found = {text.get_text(): text for text in figure.findobj(Text) if text.get_text() in names}
    assert found["EASE"].get_fontweight() == "bold"
    others = [found[name] for name in names - {"EASE"}]
    assert found["EASE"].get_color() not in {text.get_color() for text in others}
    assert all(text.get_fontweight() == "normal" for text in others)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_letters_can_be_read_on_white_and_on_dark_paper() -> None:
    for letters in (INK, SOFT, OUR_INK):
        assert contrast(letters, "#ffffff") >= 4.5 and contrast(DARK[letters], DARK_PAPER) >= 4.5
    for mark in (*COLOURS, OUR_SHADES[0], SHADES[0]):
        assert contrast(DARK.get(mark.lower(), mark), DARK_PAPER) >= 3
    for shades in (SHADES, OUR_SHADES):  # told apart by lightness alone, in whatever colours one sees
        for paper in (dict(zip(shades, shades, strict=True)), DARK):
            lightness = [luminance(paper[shade]) for shade in shades]
            steps = [max(a, b) / min(a, b) for a, b in pairwise([value + 0.05 for value in lightness])]
            assert min(steps) > 1.4


def test_a_drawing_brings_its_dark_colours_along(drawable, bench) -> None:
    drawing = encode(draw(bench(drawable["bars"]))["bars"], "svg").decode()
    (style,) = re.findall(r"<style[^>]*>(.*?)</style>", drawing, re.DOTALL)
    assert "prefers-color-scheme: dark" in style and f"#paper path {{fill: {DARK_PAPER}" in style
    assert drawing.count('id="paper"') == 1
    assert f"fill: {SHADES[0]}" in drawing and f"fill: {DARK[SHADES[0]]}" in style


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
def test_diverged_trials_leave_a_gap(kind, drawable, bench) -> None:
    results = drawable[kind]
    lost = [row | {"metrics": {}, "diverged": "every update was rejected"} for row in results["rows"]]
    for row in lost:
        row.pop("pairs", None)
    rows = [gone if row["label"] == "Near" else row for row, gone in zip(results["rows"], lost, strict=True)]
    figure = draw(bench({**results, "rows": rows}))[kind]
    assert encode(figure, "svg").startswith(b"<?xml")
    if kind == "bars":
        assert [text.get_text() for text in figure.axes[0].texts].count("Near (diverged)") == 3
    if kind == "grid":
        assert [text.get_text() for text in figure.axes[0].texts] == ["0.25", "diverged", "0.25", "0.25"]
