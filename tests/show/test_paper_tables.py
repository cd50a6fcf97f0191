"""The paper's layout: values by hand, and LaTeX that a compiler would take."""

import re

import pytest
from tests.show.test_tables import lose

from ease.show.paper_tables import NOTE, paper_latex

ALLOWED = {"providecommand", "scriptsize", "textcolor", "uparrow", "downarrow", "textbf", "underline", "textit"}
ALLOWED |= {"up", "down", "gap", "best", "second", "begin", "end", "centering", "setlength", "tabcolsep", "caption"}
ALLOWED |= {"par", "vspace", "resizebox", "linewidth", "Xhline", "rowcolor", "multicolumn", "cmidrule", "hline"}
ALLOWED |= {"text", "rho"}
"""Commands of the packages that the first line names, and those that the file defines."""


def row_of(text: str, label: str, table: int) -> list[str]:
    tabular = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL)[table]
    (line,) = [line for line in tabular.splitlines() if line.startswith(f"{label} &")]
    return [cell.strip() for cell in line.removesuffix(r"\\").split("&")[1:]]


def test_values_gaps_and_ranks_by_hand(results, bench) -> None:
    """Retrain forgets to 25 and retains 90. Near: 25, gap 0, |gaps| 4 and 4. Far: 55, gap 30. Retained: 88 and 90.
    Both send 2 MB up and 4 MB down, so both are least."""
    text = paper_latex(bench(results))
    assert row_of(text, "Near", 0) == [r"\best{25.0}"] * 3
    assert row_of(text, "Far", 0) == [r"\second{55.0} \down{30.0}"] * 3
    assert row_of(text, r"\textit{Retrain}", 0) == ["25.0"] * 3
    assert row_of(text, "Near", 1) == [r"\second{88.0} \down{2.0}"] * 3 + [r"\best{6.0}"]
    assert row_of(text, "Far", 1) == [r"\best{90.0}"] * 3 + [r"\best{6.0}"]
    assert "Trained" not in text


def test_less_than_retraining_is_green_for_forget_and_more_for_retained_pairs(results, bench) -> None:
    for row in results["rows"]:
        if row["label"] == "Near":
            row["metrics"] |= {"forget/recall@1": 20.0, "retain/recall@1": 95.0}
    text = paper_latex(bench(results))
    assert row_of(text, "Near", 0)[0] == r"\best{20.0} \up{5.0}"
    assert row_of(text, "Near", 1)[0] == r"\second{95.0} \up{5.0}"


def test_membership_is_a_gap_without_a_direction(results, bench) -> None:
    for row in results["rows"]:
        row["metrics"]["mia"] = {"Near": 0.3, "Far": 0.1}.get(row["label"], 0.25)
    text = paper_latex(bench(results))
    assert row_of(text, "Near", 0)[3] == r"\best{30.0} \gap{5.0}"
    assert row_of(text, "Far", 0)[3] == r"\second{10.0} \gap{15.0}"


def test_an_ablation_reports_rho_where_others_report_bytes(results, bench, header) -> None:
    for row in results["rows"]:
        row["metrics"]["rho"] = {"Near": 0.2, "Far": 0.4}.get(row["label"], 0.0)
    text = paper_latex(bench({**results, "header": header("ablation")}))
    assert row_of(text, "Near", 1)[3] == r"\best{0.20} \down{0.20}" and "Comm" not in text
    assert r"\textbf{Variant}" in text and r"\textit{Retrain}" in text
    assert row_of(text, r"\textit{Retrain}", 1)[3] == "0.00"


def test_a_method_that_diverged_is_named_and_not_ranked(results, bench) -> None:
    lose(results, "Near", 0, 1)
    text = paper_latex(bench(results))
    assert row_of(text, "Near", 0) == ["diverged"] * 3 and row_of(text, "Far", 0)[0].startswith(r"\best")


@pytest.mark.parametrize("scenarios", [("client",), ("client", "class", "sample")])
def test_every_row_fits_its_columns_and_every_group_is_closed(results, bench, scenarios) -> None:
    results["rows"] = [dict(row, scenario=name) for name in scenarios for row in results["rows"]]
    results["rows"] = [dict(row, label="R_1 & {x} 50 %") if row["label"] == "Far" else row for row in results["rows"]]
    text = paper_latex(bench(results))
    assert r"\usepackage[table,dvipsnames]{xcolor}" in text.splitlines()[0]
    assert set(re.findall(r"\\([A-Za-z]+)", text.split("\n", 1)[1])) <= ALLOWED
    columns = 0
    for line in text.splitlines():
        if found := re.match(r"\\begin\{tabular\}\{([lc|]*)\}", line):
            columns = len(found[1].replace("|", ""))
            assert found[1].count("|") == len(scenarios)
        plain = re.sub(r"\\[&%#_{}$]", "", line)
        if plain.endswith(r"\\"):
            wider = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", plain))
            assert plain.count("&") + 1 + wider == columns
    bare = re.sub(r"\\[&%#_{}$]", "", text)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert text.count(NOTE.split(",")[0]) == 1


def test_each_value_of_a_run_setting_has_its_table(results, bench, header) -> None:
    results["rows"] = [
        dict(row, at={"name": "model.backbone", "value": name}) for name in ("a_1", "b") for row in results["rows"]
    ]
    results |= {"bands": [], "header": header(vary={"model.backbone": ["a_1", "b"]})}
    text = paper_latex(bench(results))
    assert text.count(r"\begin{table*}") == 2 and r"(model.backbone = a\_1)" in text
