"""Writes the pictures of five hospitals and of the server's test set, for the tutorial docs/hospitals.md.

    python examples/hospitals/make_data.py hospitals

Generated scenes stand in for photographs. Each site gets a folder with pictures and a captions.jsonl of its own.
"""

import json
import sys
from pathlib import Path

from PIL import Image

from ease.data.scenes import load_scenes

SITES = {"aachen": 120, "bern": 90, "cork": 70, "delft": 60, "espoo": 60}
TEST_PAIRS = 80


def main() -> None:
    folder = Path(sys.argv[1])
    pairs = load_scenes(seed=0, train=sum(SITES.values()), validation=0, test=TEST_PAIRS)
    place = 0
    for name, count in [*SITES.items(), ("server", TEST_PAIRS)]:
        site = folder / name
        site.mkdir(parents=True, exist_ok=True)
        with (site / "captions.jsonl").open("w") as lines:
            for number in range(count):
                Image.fromarray(pairs.pixels[place]).save(site / f"{name}-{number:03}.png")
                row = {"image": f"{name}-{number:03}.png", "captions": pairs.captions[place]}
                print(json.dumps(row if name == "server" else {**row, "site": name}), file=lines)
                place += 1
    print(f"{place} pictures in {folder}")


if __name__ == "__main__":
    main()
