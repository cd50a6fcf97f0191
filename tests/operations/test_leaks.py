"""What a purge leaves of a person: marked names and pictures are planted, every command is run, and each byte of run,
cache, ledger, logs and temporary folders is searched."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.operations.ledger.test_work import listed, run_json
from tests.photographs import FOLDER, draw_photographs

from ease.commands.train import train_run
from ease.data.images import decode_image
from ease.model.backbones import load_backbone
from ease.runs.config import load_config
from ease.runs.run import Run

NAME = "lovelace"
"""Of the person. It is in ids, captions, reasons and searched words, and in no other file."""
POLICY = "[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n[retention]\nclosed_days = 0\n"
PHOTOGRAPHS = 6


def plant(folder: Path) -> list[Path]:
    """Photographs of one person among others, in all splits by their ids, and what they are called."""
    rng, made = np.random.default_rng(7), []
    with (folder / "captions.jsonl").open("a") as file:
        for number in range(PHOTOGRAPHS):
            path = folder / f"{NAME}-{number}.png"
            Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
            split = ("train", "train", "train", "train", "validation", "test")[number]
            line = {"image": path.name, "captions": [f"{NAME} in a red boat"], "split": split}
            file.write("\n" + json.dumps(line))
            made.append(path)
    return made


def needles(photographs: list[Path]) -> dict[str, bytes]:
    """Bytes that tell of the person: the name, each file, and the pixels as they are cached."""
    backbone = load_backbone("tiny")
    found = {"name": NAME.encode(), "Name": NAME.title().encode()}
    for path in photographs:
        pixels = decode_image(path, backbone.image_size, backbone.crop).pixels
        found[f"pixels of {path.name}"] = pixels.tobytes()[: 3 * backbone.image_size]
        found[f"file {path.name}"] = path.read_bytes()[64:192]
    return found


def leaks(folders: list[Path], wanted: dict[str, bytes]) -> set[tuple[str, str]]:
    """(file, what it holds) for each file that holds something, and for each that is named by it."""
    found = set()
    for folder in folders:
        for path in folder.rglob("*"):
            named = [what for what, needle in wanted.items() if needle in path.name.encode()]
            content = path.read_bytes() if path.is_file() else b""
            found |= {(path.relative_to(folder).as_posix(), what) for what in named}
            found |= {
                (path.relative_to(folder).as_posix(), what) for what, needle in wanted.items() if needle in content
            }
    return found


@pytest.fixture
def place(small, tmp_path: Path, monkeypatch) -> tuple[Path, list[Path]]:
    """A run over photographs, of which some show the person, with a cache and a folder for temporary files."""
    for name in ("cache", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    draw_photographs(tmp_path / "photos")
    photographs = plant(tmp_path / "photos")
    config = load_config(None, (*small, *FOLDER, "data.held_out_share=0.3", f'data.path="{tmp_path / "photos"}"'))
    train_run(config, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "policy.toml").write_text(POLICY)
    return tmp_path, photographs


def test_after_purge_nothing_of_a_person_is_left(ease, place: tuple[Path, list[Path]], tmp_path: Path) -> None:
    here, photographs = place
    run, wanted = here / "run", needles(photographs)
    pairs = run_json(ease, "request", "find", run, NAME, "--image", photographs[0])["pairs"]
    ids = [each["id"] for each in pairs]
    assert len(ids) == PHOTOGRAPHS and {"train", "validation", "test"} <= {each["split"] for each in pairs}
    (here / "elsewhere").mkdir()
    list_of_ids = listed(here / "elsewhere", ids)
    # Everything that writes: previews, answers by several methods, quick looks, pages, exports, certificates.
    run_json(ease, "search", run, NAME)
    assert ease("forget", run, "--concept", NAME, "--dry-run").code == 0
    for method in ("finetune", "ease"):
        run_json(ease, "forget", run, "--concept", NAME, "--method", method)
    run_json(ease, "request", "add", run, "--concept", NAME, "--id", "words", "--reason", f"{NAME} asked", "--by", NAME)
    run_json(ease, "request", "add", run, "--samples", list_of_ids, "--id", "all", "--ground", f"letter of {NAME}")
    for id in ("words", "all"):
        run_json(ease, "request", "approve", run, id, "--by", "officer")
    assert [each["state"] for each in run_json(ease, "work", run)["finished"]] == ["done", "done"]
    name = Run.load(run).head.releases[0].answer
    assert NAME not in name
    assert ease("certificate", run, "--request", name, "--html").code == 0
    ease("audit", run, "--request", name, "--quick")
    assert ease("report", run).code == 0 and ease("export", run, "--request", name).code == 0
    assert NAME not in (run / "evidence" / "log.jsonl").read_text()
    assert leaks([run, here / "cache"], wanted)  # the search finds what is there before
    # The photographs go from the disk before the purge, so an older version of the cache still has them.
    for path in photographs:
        path.unlink()
    run_json(ease, "search", run, "a picture")
    assert any(what.startswith("pixels") for _, what in leaks([here / "cache"], wanted))
    assert ease("purge", run).code == 0
    assert leaks([run, here / "cache", here / "tmp"], wanted) == set()
    shown = run_json(ease, "request", "find", run, "--ids", list_of_ids)["pairs"]
    assert {each["split"] for each in shown} == {"purged"}  # it is still known what was removed, by marks
    assert ease("search", run, "a picture").code == 0
    shutil.rmtree(here / "elsewhere")
