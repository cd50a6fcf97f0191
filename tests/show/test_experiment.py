"""An experiment on the page: the same figures as in its tables, the outcome first, every variant for itself."""

import base64
import re
from html import unescape

from ease.show.experiment import experiment_section
from ease.show.figures import CAPTIONS, DRAWN
from ease.show.page import Contents, page


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


def rows_of(html: str) -> list[str]:
    return [text_of(row) for row in re.findall(r"<tr>.*?</tr>", html)]


def test_the_figures_of_the_tables(results, bench) -> None:
    """As in the tables: Near has 25 ± 1.4 for forget pairs, inside the band; the sum of its gaps is 7."""
    html = experiment_section(bench(results))
    rows = rows_of(html)
    assert "Near25.0 ± 1.4 (+0.0)°25.0 ± 1.4 (+0.0)25.0 ± 1.4 (+0.0)" in rows
    assert "Far†55.0 ± 7.1 (+30.0)55.0 ± 7.1 (+30.0)55.0 ± 7.1 (+30.0)" in rows
    assert "<strong>25.0 ± 1.4</strong>" in html and "order 1" not in html


def test_the_outcome_comes_first(results, bench) -> None:
    html = experiment_section(bench(results))
    assert "Client request: Near (7.0)" in text_of(html) and html.index("verdict nearest") < html.index("<table>")


def test_a_single_method_is_not_called_the_nearest(results, bench) -> None:
    rows = [row for row in results["rows"] if row["label"] != "Far"]
    assert "Nearest" not in text_of(experiment_section(bench({**results, "rows": rows})))


def test_variants_of_one_method_are_not_mixed(results, bench) -> None:
    """Both are EASE, under their own names: 25 and 55, and not 40."""
    rows = [row | ({"method": "ease"} if row["role"] == "method" else {}) for row in results["rows"]]
    found = rows_of(experiment_section(bench({**results, "rows": rows})))
    assert [row.split(".")[0] for row in found if row.startswith(("Near", "Far"))][:2] == ["Near25", "Far†55"]


def test_divergence_is_reported(results, bench) -> None:
    for row in results["rows"]:
        if row["label"] == "Near":
            row |= {"metrics": {}, "diverged": "every update was rejected"}
    assert "Neardivergeddivergeddiverged" in rows_of(experiment_section(bench(results)))


def test_the_figure_travels_in_the_page(results, bench) -> None:
    results["header"]["experiment"]["kind"] = "bars"
    (address,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', experiment_section(bench(results)))
    assert base64.b64decode(address).startswith(b"<?xml")
    assert CAPTIONS.keys() == DRAWN.keys()


def test_a_page_of_only_an_experiment_asks_for_no_request(results, bench) -> None:
    text = text_of(page(Contents("main", "results/main", results=bench(results))))
    assert "What was compared in main" in text and "Nothing has been forgotten" not in text


def test_subspaces_have_a_table_of_blocks(results, bench) -> None:
    overlap = {"block": "image.projector.0", "modality": "image", "clients": [0, 1]}
    overlap["cosines"] = [[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]]
    found = {**results, "rows": [], "bands": [], "subspaces": [{"format": 2, "seed": 0, "blocks": [overlap]}]}
    assert "image.projector.00.500" in rows_of(experiment_section(bench(found)))
