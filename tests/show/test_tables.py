"""Tables: figures by hand, and the same results always give the same bytes."""

import copy
import re
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.mathtext import MathTextParser

from ease.show.tables import FORGET, PRINTED, RETAIN, best_of, figures, latex, markdown, mean_similarity, sheets
from ease.studies.records import Overlap


def test_means_spreads_gaps_and_the_band(results, bench) -> None:
    """Near: (24 + 26) / 2 = 25, deviation sqrt(2) = 1.4, gaps +4 and -4 cancel to 0.0; 24 lies in [18, 25].
    Far: 55 ± 7.1, gaps +30 and +30; 50 lies outside."""
    (sheet,) = sheets(bench(results))
    trained, near, far, retrain = figures(sheet, FORGET[0])
    assert (near.value, near.spread, near.note, near.inside, near.best) == ("25.0", "1.4", "+0.0", True, True)
    assert (far.value, far.spread, far.note, far.inside, far.best) == ("55.0", "7.1", "+30.0", False, False)
    assert (retrain.note, retrain.inside, retrain.best) == ("", False, False)
    assert not trained.best


def test_the_rank_adds_absolute_gaps_of_each_seed(results, bench) -> None:
    """Near: 4 + 2 + 1 = 7 on both seeds, though the forget gaps cancel in the mean; Far: 30 + 0 + 0."""
    (sheet,) = sheets(bench(results))
    assert [sheet.distance(line) for line in sheet.lines[1:]] == [[7, 7], [30, 30], [0, 0]]
    assert [line.label for line in best_of(sheet, RETAIN[-1])] == ["Near"]


def test_ties_are_won_together_and_references_never_win(results, bench) -> None:
    (sheet,) = sheets(bench(results))
    seconds = next(column for column in RETAIN if column.key == "cost/seconds")
    assert [line.label for line in best_of(sheet, seconds)] == ["Near", "Far"]


def test_cost_is_shown_with_its_share(results, bench) -> None:
    (sheet,) = sheets(bench(results))
    up = next(column for column in RETAIN if column.key == "cost/bytes_up")
    assert figures(sheet, up)[0] is None  # the trained model answered no request
    assert (figures(sheet, up)[1].value, figures(sheet, up)[1].note) == ("2.0", "20%")


def test_markdown(results, bench) -> None:
    text = markdown(bench(results))
    assert "| Near | **25.0 ± 1.4** (+0.0)° |" in text and "| Far† | 55.0 ± 7.1 (+30.0) |" in text
    assert "order 1" not in text and "MIA" not in text  # the band is no line, and no attack was made
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| Near")}
    heads = {line.count("|") for line in text.splitlines() if line.startswith("| Method")}
    assert widths == heads


COMMANDS = {
    "amsmath": {"text"},
    "booktabs": {"toprule", "midrule", "cmidrule", "bottomrule"},
    "graphicx": {"resizebox"},
    "": {"begin", "end", "centering", "setlength", "tabcolsep", "caption", "par", "vspace", "linewidth", "multicolumn"}
    | {"textbf", "scriptsize", "pm", "circ", "dagger", "rho", "Sigma"}
    | {"textbackslash", "textasciitilde", "textasciicircum"},
}
"""Every command that a table may use, under the package it comes from."""


def check_latex(text: str) -> None:
    """What a compiler would stop at: an open group, a command of no package, a row that does not fit its columns, a
    special character that means something else than itself."""
    first, *lines = text.split("\n")
    assert first == r"% Needs \usepackage{amsmath,booktabs,graphicx}"
    used = set(re.findall(r"\\([A-Za-z]+)", "\n".join(lines)))
    assert used <= set().union(*COMMANDS.values()), used
    opened: list[str] = []
    columns = 0
    for line in lines:
        for kind, name in re.findall(r"\\(begin|end)\{([^}]*)\}", line):
            assert kind == "begin" or opened.pop() == name
            opened += [name] if kind == "begin" else []
        if found := re.match(r"\\begin\{tabular\}\{([lc]*)\}", line):
            columns = len(found[1])
        plain = re.sub(r"\\[&%#_{}$]", "", line)  # what is escaped means itself
        assert plain.count("$") % 2 == 0
        outside = re.sub(r"\$[^$]*\$", "", plain)
        assert not set("#_^~<>|`") & set(outside) and outside.isascii()
        assert "%" not in outside.removesuffix("%")  # at the very end it only joins lines
        if plain.endswith(r"\\"):
            wider = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", plain))
            assert plain.count("&") + 1 + wider == columns and opened[-1] == "tabular"
        else:
            assert "&" not in plain
    bare = re.sub(r"\\[&%#_{}$]", "", "\n".join(lines))
    for formula in set(re.findall(r"\$[^$]*\$", bare)):
        MathTextParser("path").parse(formula)
    depth = [{"{": 1, "}": -1}.get(character, 0) for character in bare]
    assert opened == [] and sum(depth) == 0 and min(accumulate(depth)) == 0


LABELS = st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1)


@given(near=LABELS, far=LABELS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@pytest.mark.slow
def test_latex_would_compile_whatever_a_label_says(results, bench, near, far) -> None:
    labels = {"Near": near, "Far": far}
    rows = [dict(row, label=labels.get(row["label"], row["label"])) for row in results["rows"]]
    check_latex(latex(bench({**results, "rows": rows})))


def test_latex_of_every_shape_would_compile(results, bench) -> None:
    """Attacked, with three scenarios, a varied setting of the run, and a method that diverged."""
    for row in results["rows"]:
        row["metrics"] |= {"mia": 0.25, "lira/auc": 0.5}
        row["at"] = {"name": "model.backbone", "value": "clip_b32"}
    lose(results, "Far", 0, 1)
    results["rows"] = [dict(row, scenario=name) for name in ("client", "class", "sample") for row in results["rows"]]
    results["header"]["experiment"]["vary"] = {"model.backbone": ["clip_b32"]}
    text = latex(bench(results))
    check_latex(text)
    assert r"(model.backbone = clip\_b32)" in text and "MIA" in text and text.count(r"\begin{tabular}") == 3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"\end{tabular}", ""),
        (r"\toprule", r"\topline"),
        (r"A \& B", "A & B"),
        (r" & \textbf", r" \textbf"),
        (r"(20\%)", "(20%)"),
        (r"$^\circ$", r"^\circ"),
        (r"\caption{", r"\caption"),
    ],
)
def test_the_check_of_latex_finds_errors(results, bench, right, wrong) -> None:
    text = latex(bench(results))
    assert right in text
    with pytest.raises((AssertionError, IndexError)):
        check_latex(text.replace(right, wrong))


def test_latex_by_hand(results, bench) -> None:
    text = latex(bench(results))
    assert r"A \& B" in text and r"\textbf{25.0}{\scriptsize$\pm$1.4} (+0.0)$^\circ$" in text
    assert r"Far$^\dagger$" in text and r"(20\%)" in text
    assert text.index(r"\midrule" + "\nRetrain") > text.index("Far")  # the reference stands apart


def test_scenarios_are_side_by_side_in_latex(results, bench) -> None:
    """Three recalls of forget pairs; three of retained ones and two kinds of bytes; test recall, rho, time and rank."""
    other = [dict(copy.deepcopy(row), scenario="class") for row in results["rows"]]
    text = latex(bench({**results, "rows": results["rows"] + other}))
    assert re.findall(r"\\begin\{tabular\}\{l(c*)\}", text) == ["c" * 6, "c" * 10, "c" * 8]
    assert text.count(r"\begin{table*}") == 1
    assert r"\multicolumn{3}{c}{Client request} & \multicolumn{3}{c}{Class request}" in text


def test_every_column_is_printed_once() -> None:
    assert sorted(column.title for part in PRINTED.values() for column in part) == sorted(
        c.title for c in (*FORGET, *RETAIN)
    )


def test_a_varied_setting_of_the_run_makes_sheets_and_of_a_method_makes_lines(results, bench, header) -> None:
    at = {"name": "partition.clients", "value": 4}
    bands = [{**results["bands"][0], "at": at}]
    rows = [{**row, "at": at} for row in results["rows"]]
    varied = {**results, "header": header(vary={"partition.clients": [4]}), "bands": bands, "rows": rows}
    (sheet,) = sheets(bench(varied))
    assert sheet.name == "Client request, partition.clients = 4" and sheet.lines[1].label == "Near"
    assert figures(sheet, FORGET[0])[1].inside

    rows = [dict(row, at={"name": "delta", "value": 0.3}) if row["label"] == "Near" else row for row in results["rows"]]
    (sheet,) = sheets(bench({**results, "rows": rows}))
    assert sheet.name == "Client request" and [line.label for line in sheet.lines][1] == "Near, delta = 0.3"


def test_similarity_only_of_different_clients() -> None:
    """Cosines 1 and 0 have the mean 0.5; a client's likeness to itself does not count."""
    cosines = (((1.0, 1.0), (1.0, 0.0)), ((1.0, 0.0), (1.0, 1.0)))
    assert mean_similarity(Overlap(block="a", modality="image", clients=(0, 1), cosines=cosines)) == 0.5


def test_gaps_of_opposite_sign_do_not_cancel_when_a_column_is_won(results, bench) -> None:
    """Far's gaps become +1 and +3: its mean gap 2 is larger than Near's (+4 - 4) / 2 = 0, its mean |gap| 2 is less."""
    for row in results["rows"]:
        if row["label"] == "Far":
            row["metrics"]["forget/recall@1"] = {0: 21.0, 1: 33.0}[row["seed"]]
    (sheet,) = sheets(bench(results))
    assert [line.label for line in best_of(sheet, FORGET[0])] == ["Far"]


def lose(results: dict, label: str, *seeds: int) -> None:
    """Make a method diverge on some seeds."""
    for row in results["rows"]:
        if row["label"] == label and row["seed"] in seeds:
            row |= {"metrics": {}, "diverged": "every update was rejected"}


def test_a_diverged_seed_is_left_out_of_means_and_reported(results, bench) -> None:
    """Of Near only seed 1 is left: 26, gap -4. It wins nothing with fewer seeds than others."""
    lose(results, "Near", 0)
    (sheet,) = sheets(bench(results))
    near = figures(sheet, FORGET[0])[1]
    assert (near.value, near.spread, near.note, near.best) == ("26.0", "", "-4.0, 1 diverged", False)
    assert [line.label for line in best_of(sheet, FORGET[0])] == ["Far"]


def test_a_method_without_a_model_is_shown_as_diverged(results, bench) -> None:
    lose(results, "Near", 0, 1)
    assert "| Near | diverged | diverged |" in markdown(bench(results))
    assert "Near & diverged & diverged" in latex(bench(results))


def test_names_of_others_stay_in_their_cells(results, bench) -> None:
    """Of two cells, four heads and no line of its own: a label can neither break a table nor be markup in it."""
    evil = "Near | x\n## y `z` <b> [l](u) \\ \x1b[31m"
    for found in results["rows"]:
        found["label"] = evil if found["label"] == "Near" else found["label"]
    results["header"]["command"] = "ease `bench`\n# x"
    results["header"]["experiment"]["title"] = "Small\n| a |"
    text = markdown(bench(results))
    label = r"| Near \| x ## y \`z\` \<b> \[l\](u) \\ \x1b\[31m |"
    assert sum(line.startswith(label) for line in text.splitlines()) == 2
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith(label)]
    heads = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| Method")]
    assert bars == heads
    assert text.startswith("# Small \\| a \\|\n\n`` ease `bench` # x ``, 2 seeds.\n") and "\x1b" not in text
    assert "\x1b" not in latex(bench(results)) and "## y" not in latex(bench(results)).splitlines()
