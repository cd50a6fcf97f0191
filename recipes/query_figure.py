"""Draws docs/figures/query.png, the picture of the README: what one caption of a forgotten pair finds.

ease train --out runs/first
ease forget runs/first --client 3
ease forget runs/first --client 3 --method retrain
python recipes/query_figure.py runs/first
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from PIL import Image

from ease.data.pairs import PairSet
from ease.runs.answers import open_world
from ease.runs.run import Run
from ease.runs.using import Source, encode_text, gallery, pictures

OUT = Path(__file__).parents[1] / "docs" / "figures" / "query.png"
SHOWN, CANDIDATES, CLIENT = 5, 40, 3
MODELS = {
    "trained": ("before", None),
    "ease": ("after EASE", "client-3/ease"),
    "retrain": ("retrained without\nthe client", "client-3/retrain"),
}


@dataclass(frozen=True)
class Query:
    """A caption of a forgotten pair, and where each model ranks the pair's own picture."""

    caption: str
    place: int
    found: dict[str, list[int]]
    """Model -> places of pictures, best first."""

    def ranks(self) -> dict[str, int]:
        """Rank of the pair's own picture per model, from 1."""
        return {name: found.index(self.place) + 1 for name, found in self.found.items()}


def main() -> None:
    run = Run.load(Path(sys.argv[1]))
    world = open_world(run)
    pairs, members = world.evaluator.pairs, world.shards[CLIENT].train
    places, _ = gallery(world)
    chosen = [int(place) for place in members[:CANDIDATES]]
    captions = [pairs.captions[place][0] for place in chosen]
    orders = {}
    for name, (_, request) in MODELS.items():
        source = Source.of(run, request)
        scores = encode_text(source, captions) @ pictures(world, source.state, places).T
        orders[name] = places[scores.argsort(dim=1, descending=True, stable=True).numpy()]
    queries = [
        Query(caption, place, {name: list(order[row]) for name, order in orders.items()})
        for row, (caption, place) in enumerate(zip(captions, chosen, strict=True))
    ]
    draw(pairs, typical(queries))


def typical(queries: list[Query]) -> Query:
    """The query whose rank after retraining is the median of all that the trained model ranks first."""
    learnt = sorted(
        (each for each in queries if each.ranks()["trained"] == 1), key=lambda each: each.ranks()["retrain"]
    )
    return learnt[len(learnt) // 2]


def draw(pairs: PairSet, chosen: Query) -> None:
    """One row of pictures per model; the pair's own picture has a frame."""
    figure, grid = plt.subplots(len(MODELS), SHOWN, figsize=(7.6, 4.8), squeeze=False)
    ranks = chosen.ranks()
    for row, (name, (title, _)) in zip(grid, MODELS.items(), strict=True):
        for axes, place in zip(row, chosen.found[name], strict=False):
            axes.imshow(pairs.pixels[place])
            axes.set(xticks=[], yticks=[])
            own = place == chosen.place
            for edge in axes.spines.values():
                edge.set(color="#b35c00" if own else "#cccccc", linewidth=4 if own else 1)
        row[0].set_ylabel(
            f"{title}\n\nits picture: rank {ranks[name]}", rotation=0, ha="right", va="center", fontsize=10
        )
    figure.suptitle("\n".join(wrap(f'Query: "{chosen.caption}"', 80)), fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, metadata={"Software": None})
    Image.open(buffer).convert("RGB").quantize(128).save(OUT, optimize=True)
    print(chosen.caption, ranks)


if __name__ == "__main__":
    main()
