"""Tables: figures by hand, and the same results always give the same bytes."""

import copy

from ease.report.tables import FORGET, RETAIN, best_of, figures, latex, markdown, mean_similarity, sheets


def test_means_spreads_gaps_and_the_band(results) -> None:
    """Near: (24 + 26) / 2 = 25, deviation sqrt(2) = 1.4, gaps +4 and -4 cancel to 0.0; 24 lies in [18, 25].
    Far: 55 ± 7.1, gaps +30 and +30; 50 lies outside."""
    (sheet,) = sheets(results)
    trained, near, far, retrain = figures(sheet, FORGET[0])
    assert (near.value, near.spread, near.note, near.inside, near.best) == ("25.0", "1.4", "+0.0", True, True)
    assert (far.value, far.spread, far.note, far.inside, far.best) == ("55.0", "7.1", "+30.0", False, False)
    assert (retrain.note, retrain.inside, retrain.best) == ("", False, False)
    assert not trained.best


def test_the_rank_adds_absolute_gaps_of_each_seed(results) -> None:
    """Near: 4 + 2 + 1 = 7 on both seeds, though the forget gaps cancel in the mean; Far: 30 + 0 + 0."""
    (sheet,) = sheets(results)
    assert [sheet.distance(line) for line in sheet.lines[1:]] == [[7, 7], [30, 30], [0, 0]]
    assert [line.label for line in best_of(sheet, RETAIN[-1])] == ["Near"]


def test_ties_are_won_together_and_references_never_win(results) -> None:
    (sheet,) = sheets(results)
    seconds = next(column for column in RETAIN if column.key == "cost/seconds")
    assert [line.label for line in best_of(sheet, seconds)] == ["Near", "Far"]


def test_cost_is_told_with_its_share(results) -> None:
    (sheet,) = sheets(results)
    up = next(column for column in RETAIN if column.key == "cost/bytes_up")
    assert figures(sheet, up)[0] is None  # the trained model answered no request
    assert (figures(sheet, up)[1].value, figures(sheet, up)[1].note) == ("2.0", "20%")


def test_markdown(results) -> None:
    text = markdown(results)
    assert "| Near | **25.0 ± 1.4** (+0.0)° |" in text and "| Far† | 55.0 ± 7.1 (+30.0) |" in text
    assert "order 1" not in text and "MIA" not in text  # the band is no line, and no attack was made
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| Near")}
    heads = {line.count("|") for line in text.splitlines() if line.startswith("| Method")}
    assert widths == heads


def test_latex_has_no_bare_special_character(results) -> None:
    text = latex(results)
    assert r"A \& B" in text and r"\textbf{25.0}{\scriptsize$\pm$1.4} (+0.0)$^\circ$" in text
    assert r"Far$^\dagger$" in text and r"(20\%)" in text
    body = text.replace(r"\&", "").replace(r"\%", "")
    assert "%" not in body.replace("{!}{%", "") and not set("°†±_") & set(body)
    for line in body.splitlines():
        if line.endswith(r"\\") and not line.startswith(" &"):
            assert line.count("&") in (4, 8)  # forget: three recalls and rho; retain: four recalls, three costs, rank


def test_scenarios_stand_side_by_side_in_latex(results) -> None:
    other = [dict(copy.deepcopy(row), scenario="class") for row in results["rows"]]
    text = latex({**results, "rows": results["rows"] + other})
    assert text.count(r"\begin{tabular}{lcccccccc}") == 1 and text.count(r"\begin{table*}") == 1
    assert r"\multicolumn{4}{c}{Client request} & \multicolumn{4}{c}{Class request}" in text


def test_a_varied_setting_of_the_run_makes_sheets_and_of_a_method_makes_lines(results) -> None:
    at = {"name": "partition.clients", "value": 4}
    header = {**results["header"], "experiment": {"vary": {"partition.clients": [4]}, "seeds": [0, 1]}}
    bands = [{**results["bands"][0], "at": at}]
    varied = {"header": header, "bands": bands, "rows": [{**row, "at": at} for row in results["rows"]]}
    (sheet,) = sheets(varied)
    assert sheet.name == "Client request, partition.clients = 4" and sheet.lines[1].label == "Near"
    assert figures(sheet, FORGET[0])[1].inside

    rows = [dict(row, at={"name": "delta", "value": 0.3}) if row["label"] == "Near" else row for row in results["rows"]]
    (sheet,) = sheets({**results, "rows": rows})
    assert sheet.name == "Client request" and [line.label for line in sheet.lines][1] == "Near, delta = 0.3"


def test_similarity_of_different_clients_alone() -> None:
    """Cosines 1 and 0 have the mean 0.5; a client's likeness to itself does not count."""
    overlap = {"cosines": [[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]]}
    assert mean_similarity(overlap) == 0.5


def test_gaps_of_opposite_sign_do_not_cancel_when_a_column_is_won(results) -> None:
    """Far's gaps become +1 and +3: its mean gap 2 is larger than Near's (+4 - 4) / 2 = 0, its mean |gap| 2 is less."""
    for row in results["rows"]:
        if row["label"] == "Far":
            row["metrics"]["forget/recall@1"] = {0: 21.0, 1: 33.0}[row["seed"]]
    (sheet,) = sheets(results)
    assert [line.label for line in best_of(sheet, FORGET[0])] == ["Far"]


def lose(results: dict, label: str, *seeds: int) -> None:
    """Make a method diverge on some seeds."""
    for row in results["rows"]:
        if row["label"] == label and row["seed"] in seeds:
            row |= {"metrics": {}, "note": "diverged", "reason": "every update was rejected"}


def test_a_seed_that_diverged_is_left_out_of_means_and_told(results) -> None:
    """Of Near only seed 1 is left: 26, gap -4. It wins nothing with fewer seeds than others."""
    lose(results, "Near", 0)
    (sheet,) = sheets(results)
    near = figures(sheet, FORGET[0])[1]
    assert (near.value, near.spread, near.note, near.best) == ("26.0", "", "-4.0, 1 diverged", False)
    assert [line.label for line in best_of(sheet, FORGET[0])] == ["Far"]


def test_a_method_without_a_model_is_shown_as_diverged(results) -> None:
    lose(results, "Near", 0, 1)
    assert "| Near | diverged | diverged |" in markdown(results)
    assert "Near & diverged & diverged" in latex(results)
