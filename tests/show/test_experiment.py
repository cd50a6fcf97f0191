"""An experiment on the page: the same figures as in its tables, the outcome first, every variant for itself."""

import base64
import re
from html import unescape
from typing import Any

import pytest

from ease.errors import UserError
from ease.show.experiment import experiment_section
from ease.show.figures import CAPTIONS, DRAWN
from ease.show.page import Contents, page


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


def rows_of(html: str) -> list[str]:
    return [text_of(row) for row in re.findall(r"<tr>.*?</tr>", html)]


def test_the_figures_of_the_tables(results) -> None:
    """As in the tables: Near has 25 ± 1.4 for forget pairs, inside the band; the sum of its gaps is 7."""
    html = experiment_section(results)
    rows = rows_of(html)
    assert "Near25.0 ± 1.4 (+0.0)°25.0 ± 1.4 (+0.0)25.0 ± 1.4 (+0.0)" in rows
    assert "Far†55.0 ± 7.1 (+30.0)55.0 ± 7.1 (+30.0)55.0 ± 7.1 (+30.0)" in rows
    assert "<strong>25.0 ± 1.4</strong>" in html and "order 1" not in html


def test_the_outcome_comes_first(results) -> None:
    html = experiment_section(results)
    assert "Client request: Near (7.0)" in text_of(html) and html.index("verdict nearest") < html.index("<table>")


def test_one_method_alone_is_not_called_the_nearest(results) -> None:
    rows = [row for row in results["rows"] if row["label"] != "Far"]
    assert "Nearest" not in text_of(experiment_section({**results, "rows": rows}))


def test_variants_of_one_method_are_not_mixed(results) -> None:
    """Both are EASE, under their own names: 25 and 55, and not 40."""
    rows = [row | ({"method": "ease"} if row["role"] == "method" else {}) for row in results["rows"]]
    found = rows_of(experiment_section({**results, "rows": rows}))
    assert [row.split(".")[0] for row in found if row.startswith(("Near", "Far"))][:2] == ["Near25", "Far†55"]


def test_what_diverged_is_told(results) -> None:
    for row in results["rows"]:
        if row["label"] == "Near":
            row |= {"metrics": {}, "note": "diverged"}
    assert "Neardivergeddivergeddiverged" in rows_of(experiment_section(results))


def test_the_figure_travels_in_the_page(results) -> None:
    results["header"]["kind"] = "bars"
    (address,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', experiment_section(results))
    assert base64.b64decode(address).startswith(b"<?xml")
    assert CAPTIONS.keys() == DRAWN.keys()


def test_a_page_of_an_experiment_alone_asks_for_nothing_to_be_forgotten(results) -> None:
    text = text_of(page(Contents("main", "results/main", results=results)))
    assert "What was compared in main" in text and "Nothing has been forgotten" not in text


def test_subspaces_have_a_table_of_blocks(results) -> None:
    overlap = {"block": "image.projector.0", "modality": "image", "clients": [0, 1]}
    overlap["cosines"] = [[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]]
    found = {**results, "rows": [], "bands": [], "subspaces": [{"seed": 0, "overlap": [overlap]}]}
    assert "image.projector.00.500" in rows_of(experiment_section(found))


@pytest.mark.parametrize("change", [{"rows": [{}]}, {"header": {}}, {"bands": 1}])
def test_results_of_something_else_are_refused(results, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"results\.json: (rows|header|bands)"):
        experiment_section({**results, **change})
