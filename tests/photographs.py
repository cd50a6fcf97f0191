"""A folder of sixty photographs, and the settings of a run over them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES = 60
FOLDER = ("data.name=folder", "partition.clients=3", "partition.validation_share=0.2", "data.held_out_share=0.3")


def draw_photographs(folder: Path) -> None:
    """Sixty different pictures in a folder, each with a caption of its own."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for number in range(PICTURES):
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).resize((64, 64)).save(
            folder / f"{number}.png"
        )
        lines.append({"image": f"{number}.png", "captions": [f"a picture of number {number}", f"the {number}"]})
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)))
