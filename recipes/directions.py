"""Directions of the paper's algorithm for each block: their cosines, and how many a threshold takes.

python recipes/directions.py results --delta 0.1 0.3 0.5

Reads every finished answer of `ease_paper` with the reference `initial` and `--probe` in results/runs/, as `ease bench`
leaves them. Runs of one data set make one table, over all of their seeds.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ease.runs.records import AnswerRecord, BlockNotes, read_record
from ease.runs.run import Run

SCOPES = ("client", "class", "sample")
Found = Mapping[tuple[str, str], Sequence[BlockNotes]]
"""(block, kind of request) -> its notes, one for each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out folder of `ease bench`")
    parser.add_argument("--delta", type=float, nargs="+", default=[0.3], help="thresholds of the cosine")
    parser.add_argument("--probe", type=int, default=2, help="probe_round of class and sample requests")
    arguments = parser.parse_args()
    for world, (seeds, found) in collect(arguments.folder, arguments.probe).items():
        print(f"{world}, seeds {', '.join(map(str, sorted(seeds)))}\n")
        print(table(found, arguments.delta), end="\n\n")


def collect(folder: Path, probe: int) -> dict[str, tuple[set[int], Found]]:
    """The notes of each data set, once for each request, whatever else the method did after its decomposition."""
    seeds, found = defaultdict[str, set[int]](set), defaultdict[str, dict[tuple[str, str], list[BlockNotes]]](dict)
    for place in sorted(folder.glob("runs/*")):
        config, answered = Run.load(place).config, set[str]()
        world = config.data.name if config.data.path is None else config.data.path.stem
        for path in sorted(place.glob("requests/*/ease_paper*/record.json")):
            record = read_record(AnswerRecord, path)
            settings, scope = record.method, record.request.scope
            usual = settings.get("reference") == "initial" and settings.get("modalities", "both") == "both"
            if record.spectrum is None or not usual or scope in answered:
                continue
            if scope != "client" and settings.get("probe_round") != probe:
                continue
            answered.add(scope)
            seeds[world].add(config.seed)
            for block in record.spectrum.blocks:
                found[world].setdefault((block.short_name, scope), []).append(block)
    return {world: (seeds[world], found[world]) for world in found}


def table(found: Found, deltas: Sequence[float]) -> str:
    """A row for each block. A cell: least to largest cosine, then directions up to each threshold, of all, as means."""
    head = ["block", *(f"{scope}: cosines, up to {' / '.join(f'{d:g}' for d in deltas)}" for scope in SCOPES)]
    blocks = dict.fromkeys(name for name, _ in found)
    rows = [[name, *(cell(found.get((name, scope), ()), deltas) for scope in SCOPES)] for name in blocks]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def cell(notes: Sequence[BlockNotes], deltas: Sequence[float]) -> str:
    if not notes:
        return ""
    cosines = [cosine for each in notes for cosine in each.cosines]
    taken = [sum(cosine <= delta for cosine in cosines) / len(notes) for delta in deltas]
    counts = " / ".join(f"{number:.3g}" for number in taken)
    return f"{min(cosines):.2f} to {max(cosines):.2f}, {counts} of {len(cosines) / len(notes):.3g}"


if __name__ == "__main__":
    main()
