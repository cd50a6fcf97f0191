"""What a purge leaves at the sites: pictures, ids and searched words are looked for in every byte that is kept."""

import json
import sqlite3
from pathlib import Path

import pytest
from tests.federation.on_site import SIZES, serving
from tests.operations.ledger.test_work import add, listed, run_json

from ease.data.images import decode_image
from ease.data.words import content
from ease.federation.flower import DATABASE, rewritten_database
from ease.federation.question_log import question_log
from ease.model.backbones import load_backbone
from ease.runs.run import Run

ALLOWED = "[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n[retention]\nclosed_days = 0\n"


def holding(folders: list[Path], needle: bytes) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if needle in path.read_bytes()]


def test_after_purge_and_restart_no_site_has_the_person(ease, drawn: Path, small, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    with serving(drawn, tmp_path / "w", small) as sites:
        run = sites.trained()
        (run.folder / "policy.toml").write_text(ALLOWED)
        known = run.known()
        assert known is not None
        held_out, trained = known[0].clients[0].validation_ids[0], known[0].clients[0].train_ids[0]
        photographs = [sites.folder / "a" / f"{each}.png" for each in (held_out, trained)]
        # The site that holds a picture is found by the hash of the picture, in whatever split it is.
        for photograph, split in zip(photographs, ("held_out", "train"), strict=True):
            (pair,) = run_json(ease, "request", "find", run.folder, "--image", photograph)["pairs"]
            assert (pair["id"], pair["split"], pair["client"]) == (photograph.stem, split, 0)
        captions = [json.loads(line) for line in (sites.folder / "a" / "captions.jsonl").read_text().splitlines()]
        caption = next(each["captions"][0] for each in captions if each["id"] == trained)
        words = " ".join(caption.split()[:4])
        assert content(words)
        add(ease, run.folder, "--concept", words, "--reason", "a person asked", id="words")
        add(ease, run.folder, "--samples", listed(tmp_path, [held_out, trained]), id="ids")
        finished = run_json(ease, "work", run.folder, "--no-audit")["finished"]
        assert {each["state"] for each in finished} == {"done"}
        disks = [sites.folder / "disks", run.folder, tmp_path / "cache"]
        assert holding(disks, words.encode()) and holding(disks, json.dumps(trained).encode())
        assert ease("purge", run.folder).code == 0
        for client in range(len(SIZES)):
            sites.node(client)  # opens the folder of its site as after a restart, with the photographs still in it
        backbone = load_backbone("tiny")
        for photograph in photographs:
            pixels = decode_image(photograph, backbone.image_size, backbone.crop).pixels
            assert not holding(disks, pixels.tobytes()[: 3 * backbone.image_size])
        assert not holding(disks, json.dumps(trained).encode()) and not holding(disks, json.dumps(held_out).encode())
        assert not holding(disks, words.encode())
        searches = [each for each in question_log(sites.folder / "disks" / "a").lines() if each["kind"] == "search"]
        assert searches and all("words" not in each and "words_mark" in each for each in searches)
        assert Run.load(run.folder).head.gone


def test_the_database_of_flower_keeps_nothing_of_delivered_messages(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE messages (content BLOB)")
    connection.execute("INSERT INTO messages VALUES (?)", (b"id of a person" * 100,))
    connection.commit()
    connection.execute("DELETE FROM messages")
    connection.commit()
    assert holding([tmp_path], b"id of a person")
    assert rewritten_database(tmp_path) == [] and not holding([tmp_path], b"id of a person")
    assert rewritten_database(tmp_path / "elsewhere") == []
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO messages VALUES ('x')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ease.federation.flower.SPEAKING", 0.1)
        ((what, why),) = rewritten_database(tmp_path)  # in use: said, not hidden
    assert what == str(DATABASE) and "could not be rewritten" in why
    connection.rollback()
    connection.close()
