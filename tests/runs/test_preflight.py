"""What cannot work is refused before a picture is decoded, and what cannot be written before anything is computed."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ease.data.config
import ease.data.rows
from ease.errors import Unwritable, UserError
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import check_writable, write_atomic, write_remedy


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    """Whoever decodes or draws a picture has begun too early."""

    def too_early(*_: object, **__: object) -> None:
        raise AssertionError("pictures were touched")

    for module, names in ((ease.data.rows, ("identify", "decode")), (ease.data.config, ("load_scenes",))):
        for name in names:
            monkeypatch.setattr(module, name, too_early)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten pictures with captions."""
    lines = []
    for number in range(10):
        Image.fromarray(np.full((20, 20, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        split = "test" if number < 2 else "train"
        lines.append(json.dumps({"image": f"{number}.png", "captions": [f"picture {number}"], "split": split}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (("model.projector=none",), 'model.projector = "none": the towers of tiny end in different spaces'),
        (("model.lora_blocks=9",), "model.lora_blocks = 9: the tower has 4 blocks"),
        (("model.lora_rank=500",), "model.lora_rank = 500"),
        (("model.checkpointing=true",), "model.checkpointing: tiny is small and has none"),
        (("model.adapter=nowhere",), "nowhere/adapter_config.json: no such file"),
        (("partition.clients=31", "data.train=60"), "partition.clients = 31: 60 pairs cannot give every client 2"),
        (("partition.classes=61", "data.train=60"), "partition.classes = 61: more pseudo-classes than the 60"),
        (("data.canaries=5", "data.validation=4"), "data.canaries = 5"),
        (("partition.scheme=sites",), "generated pairs are of no site"),
    ],
)
def test_settings_that_cannot_work_cost_no_picture(small, settings: tuple[str, ...], part: str) -> None:
    with pytest.raises(UserError) as refused:
        World.open(load_config(None, (*small, "model.lora=ffa", *settings)))
    assert part in str(refused.value)


@pytest.mark.usefixtures("no_pictures")
def test_too_many_clients_for_a_folder_cost_no_picture(small, folder: Path) -> None:
    settings = ("data.name=folder", f"data.path={folder}", "partition.clients=5", "partition.classes=2")
    with pytest.raises(UserError, match=r"partition\.clients = 5: 8 pairs cannot give"):
        World.open(load_config(None, (*small, *settings)))


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "this disk is read-only"),
        (errno.EACCES, "change its permissions"),
        (errno.ENOENT, "the folder is gone"),
        (errno.EIO, "does not answer"),
    ],
)
def test_every_refusal_to_write_has_its_own_remedy(monkeypatch, tmp_path: Path, code: int, part: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("ease.storage.os.replace", refuse)
    with pytest.raises(Unwritable, match=part):
        write_atomic(tmp_path / "file", b"")
    assert part in write_remedy(OSError(code, ""))


def test_a_folder_that_cannot_be_written_is_refused_first(monkeypatch, small, tmp_path: Path) -> None:
    monkeypatch.setattr("ease.storage.os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match=r"you may not write in .*choose another --out"):
        Run.plan(tmp_path / "deep" / "run", load_config(None, small))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file"):
        check_writable(tmp_path / "file" / "run", "choose another")


def test_a_vanished_run_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no such folder; in .*runs there are: first; check the path"):
        Run.load(tmp_path / "runs" / "frist")


def test_a_terminal_in_a_deleted_folder_gets_one_line(ease, monkeypatch, tmp_path: Path) -> None:
    def gone() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr("ease.cli.entry.Path.cwd", gone)
    result = ease("methods")
    assert result.code == 2 and "has been deleted or moved; go to another: cd ~" in result.err
