"""The leaderboard: gaps by hand, ranks within requests, and files that others can read."""

import csv
import re
from io import StringIO

from ease.show.leaderboard import as_csv, as_html, leaderboard


def test_methods_are_ranked_by_their_gaps_over_all_folders(results, bench) -> None:
    """Near's gaps add up to 7 and Far's to 30; the same results of another folder tie."""
    found = leaderboard([("one", bench(results)), ("two", bench(results))])
    assert [(each.rank, each.method, each.experiment) for each in found] == [
        (1, "Near", "one"),
        (2, "Near", "two"),
        (3, "Far", "one"),
        (4, "Far", "two"),
    ]
    near = found[0]
    assert (near.sum_of_gaps, near.forget_gap, near.retain_gap, near.test_gap, near.seeds) == (7, 0, -2, 1, 2)
    assert near.bytes_share == 0.2 and near.flops_share is None and near.lira_gap is None


def test_the_files_hold_every_standing(results, bench) -> None:
    results["rows"] = [
        {**row, "label": "<Near>" if row["label"] == "Near" else row["label"]} for row in results["rows"]
    ]
    found = leaderboard([("one", bench(results))])
    rows = list(csv.DictReader(StringIO(as_csv(found))))
    assert [row["method"] for row in rows] == ["<Near>", "Far"] and float(rows[1]["sum_of_gaps"]) == 30
    page = as_html(found)
    assert "&lt;Near&gt;" in page and "<Near>" not in page
    assert len(re.findall("<tr>", page)) == 3 and 'lang="en"' in page
