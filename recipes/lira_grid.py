"""The paper's grid of attacks as one figure: a row for each experiment, a column for each backbone or kind of request.

python recipes/lira_grid.py results/lira-flickr30k results/lira-coco results/lira-textcaps --out lira-grid.pdf
"""

import argparse
from pathlib import Path

import matplotlib

from ease.runs.records import read_record
from ease.show.figures import STYLE, encode, tpr_grid
from ease.storage import write_atomic
from ease.studies.records import BenchResults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that `ease bench` wrote, from top to bottom")
    parser.add_argument("--out", required=True, type=Path, help="a file that ends in .pdf, .svg or .png")
    arguments = parser.parse_args()
    found = [read_record(BenchResults, folder / "results.json") for folder in arguments.folders]
    with matplotlib.rc_context(STYLE):
        figure = tpr_grid(found)
    write_atomic(arguments.out, encode(figure, arguments.out.suffix.removeprefix(".")))


if __name__ == "__main__":
    main()
