"""Every layout as docs/data.md shows it: its tree is laid out, and its TOML loads it."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from ease.data.config import LAYOUTS, load_pairs
from ease.runs.config import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SECTION = re.compile(r"^## `(\w+)`.*?^```\n(.*?)^```.*?^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {name: (tree, toml) for name, tree, toml in SECTION.findall(PAGE)}
CAPTIONS = ["one", "two", "three", "four", "five"]


def paths(tree: str) -> list[Path]:
    """The files of an indented tree; a line that ends with a slash opens a folder."""
    found, open_folders = [], []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        here = Path(*open_folders[:depth], line.strip())
        if line.endswith("/"):
            open_folders[depth:] = [here.name]
        else:
            found.append(here)
    return found


def write_captions(file: Path, layout: str, images: list[Path]) -> None:
    """The caption file of one layout, about the pictures it belongs to."""
    names = [image.name for image in images]
    if layout == "karpathy":
        sentences = [{"raw": text} for text in CAPTIONS]
        content = {"images": [{"filename": name, "split": "train", "sentences": sentences} for name in names]}
    elif layout == "coco":
        content = {
            "images": [{"id": int(Path(name).stem), "file_name": name} for name in names],
            "annotations": [{"image_id": int(Path(name).stem), "caption": text} for name in names for text in CAPTIONS],
        }
    elif layout == "textcaps":
        content = {
            "data": [
                {"image_id": name, "image_path": f"train/{name}", "set_name": "train", "caption_str": text}
                for name in names
                for text in CAPTIONS
            ]
        }
    if file.suffix == ".json":
        file.write_text(json.dumps(content))
    elif file.suffix == ".jsonl":
        lines = [{"image": str(image.relative_to(file.parent)), "captions": CAPTIONS} for image in images]
        file.write_text("\n".join(map(json.dumps, lines)))
    else:
        file.write_text("image,caption\n" + "".join(f"{name},{text}\n" for name in names for text in CAPTIONS))


def write_arrow(file: Path, picture: Path) -> None:
    image = pa.array([{"bytes": picture.read_bytes()}], pa.struct([("bytes", pa.binary())]))
    table = pa.table({"image": image, "captions": [CAPTIONS]})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("layout", SECTIONS)
def test_the_tree_and_the_settings_fit(layout: str, tmp_path: Path, picture) -> None:
    tree, toml = SECTIONS[layout]
    files = [tmp_path / path for path in paths(tree)]
    images = [picture(file, 10 * number) for number, file in enumerate(files) if file.suffix in (".jpg", ".png")]
    lists = [file for file in files if file not in images and layout != "hf"]
    for number, file in enumerate(lists):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Where the tree shows two caption files, it shows one picture of each.
        write_captions(file, layout, images if len(lists) == 1 else [images[number]])
    arrows = [file for file in files if file.suffix == ".arrow"]
    for number, file in enumerate(arrows):
        file.parent.mkdir(parents=True)
        write_arrow(file, picture(tmp_path / "one.png", 10 * number))
        (file.parent / "state.json").write_text(json.dumps({"_data_files": [{"filename": file.name}]}))
    (tmp_path / "run.toml").write_text(toml)
    pairs = load_pairs(load_config(tmp_path / "run.toml").data, 4)
    assert len(pairs) == len(images) + len(arrows) and all(captions == tuple(CAPTIONS) for captions in pairs.captions)
    if "test_path" in toml or arrows:
        assert sorted(pairs.splits) == ["test", "train"]


def test_every_layout_is_documented() -> None:
    assert set(SECTIONS) == set(LAYOUTS)
