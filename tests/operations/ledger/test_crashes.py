"""Work and purge with the plug pulled before any operation on a file or in the ledger: resumed, they end the same."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bitflips import TINY, inside
from tests import test_crashes as crashes
from tests.test_crashes import (
    STRIKES,
    WATCH,
    Begun,
    begin,
    command,
    few,
    hooked,
    strike_once,
    sweep_errors,
    sweep_kills,
)

from ease.operations.evidence import read_log
from ease.operations.evidence import salted as evidence_salt
from ease.operations.ledger import database
from ease.operations.ledger.store import Ledger
from ease.requests import tombstones
from ease.runs.run import Run

pytestmark = crashes.pytestmark
__all__ = ["hooked"]  # the fixture that watches files
SMALL = (*TINY, "data.test=12", "partition.clients=3", "data.train=30", "model.lora=off")
SETTINGS = [word for each in SMALL for word in ("--set", each)]
BEFORE = (
    ["train", "--out", "run", "--quiet", *SETTINGS],
    ["request", "add", "run", "--client", "1", "--approve", "--id", "c", "--quiet"],
    ["request", "add", "run", "--samples", "ids.txt", "--approve", "--id", "s", "--quiet"],
    ["request", "add", "run", "--samples", "more.txt", "--approve", "--id", "t", "--quiet"],
    ["request", "add", "run", "--client", "1", "--by", "another", "--approve", "--id", "again", "--quiet"],
)
POLICY = ["--set", "hold.retain_points=100", "--set", "retrain.forgotten_fraction=0.35"]
"""A client of three leaves; with pairs of another, more than that is gone, and all is trained from the start."""
COMMANDS = {"work": ["work", "run", "--quiet", *POLICY], "purge": ["purge", "run", "--quiet"]}


class Ticking(sqlite3.Connection):
    """A connection whose every statement can be struck before it is run."""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        WATCH.tick()
        return super().execute(*arguments)


@pytest.fixture(scope="module", autouse=True)
def one_salt_and_watched_statements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tombstones, "new_salt", lambda: "00" * 16)
        patch.setattr(evidence_salt.secrets, "token_hex", lambda size: "00" * size)
        patch.setattr(
            database,
            "connect",
            lambda uri: sqlite3.connect(uri, timeout=60, isolation_level=None, uri=True, factory=Ticking),
        )
        yield


def contents(folder: Path) -> dict[str, object]:
    """What a run came to, less what depends on the clock: files, and the ledger as it reads."""
    skipped = {
        ".lock",
        ".work.lock",
        ".ledger.lock",
        "record.json",
        "summary.json",
        "purge.json",
    }  # and evidence, by what it says
    found: dict[str, object] = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted((folder / "run").rglob("*"))
        if path.is_file()
        and path.name not in skipped
        and not path.name.startswith(database.NAME)
        and path.parent.name != "evidence"
    }
    if (folder / "run" / "evidence" / "head.json").is_file():
        lines = read_log(Run.load(folder / "run")).records
        found["log"] = [(each.kind, {**each.payload, "record": None, "answers": None}) for each in lines]
    for entry in Ledger(folder / "run").entries():
        outcome = {key: value for key, value in entry.outcome.model_dump().items() if key != "seconds"}
        found[f"ledger {entry.id}"] = (entry.state, entry.why, entry.request, outcome)
    record = folder / "run" / "purge.json"
    if record.is_file():
        text = json.loads(record.read_text())
        found["purge.json"] = [{**each, "time": ""} for each in text["passes"]]
    return found


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> dict[str, Begun]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "ids.txt").write_text("train-000000")
    with inside(folder):
        command(BEFORE[0])
        held = json.loads((folder / "run" / "membership.json").read_text())["clients"]
        (folder / "ids.txt").write_text("\n".join(held[0]["train_ids"][:2]))
        (folder / "more.txt").write_text("\n".join(held[2]["train_ids"][:2]))
        for arguments in BEFORE[1:]:
            command(arguments)
    whole = {
        name: begin(folder, arguments, tmp_path_factory.mktemp(name), contents) for name, arguments in COMMANDS.items()
    }
    head = Run.load(folder / "run").head
    assert head.renewed == 2 and len(head.releases) == 3  # one subtracted, one trained from the start, one after it
    return whole


@pytest.mark.parametrize(("name", "strike"), few(*COMMANDS, first=2))
def test_struck_before_some_operations_the_same_command_continues(begun, tmp_path, name: str, strike: str) -> None:
    strike_once(begun[name], strike, tmp_path / "struck")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_before_every_operation_the_same_command_continues(begun, tmp_path, name: str) -> None:
    sweep_kills(begun[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("strike", [strike for strike in STRIKES if strike != "killed"])
def test_failing_at_one_operation_after_the_other_the_same_command_continues(
    begun, tmp_path, name: str, strike: str
) -> None:
    sweep_errors(begun[name], strike, tmp_path / "struck")
