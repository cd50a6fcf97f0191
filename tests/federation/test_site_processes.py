"""What a person does at the server while sites are processes: words, an audit, a purge, and nodes that die."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.federation.on_site import SIZES, Sites

from ease.federation.remote import node_socket, spoken
from ease.federation.wire import Ask, encode
from ease.runs.run import Run
from ease.storage import read_json

pytestmark = pytest.mark.slow
PATIENCE = 120.0


@dataclass
class Processes:
    """A node for each site."""

    sites: Sites
    started: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, *clients: int) -> None:
        """They listen when this returns."""
        for client in clients:
            site = sorted(SIZES)[client]
            command = [
                sys.executable,
                "-c",
                "from ease.cli import main; main()",
                "node",
                "--quiet",
                "--id",
                str(client),
            ]
            command += ["--data", str(self.sites.folder / site), "--folder", str(self.sites.folder / "disks" / site)]
            command += ["--policy", str(Path(__file__).parent / "small_jobs.toml")]
            command += [part for each in self.sites.assignments() for part in ("--set", each)]
            self.started[client] = subprocess.Popen(command)
        until = time.monotonic() + PATIENCE
        for client in clients:
            hello = encode(Ask(kind="hello", client=client, nonce="0" * 32, run="0" * 32))
            while isinstance(spoken(self.socket(client), hello, time.monotonic() + PATIENCE), str):
                assert self.started[client].poll() is None and time.monotonic() < until
                time.sleep(0.2)

    def kill(self, client: int) -> None:
        self.started[client].kill()
        self.started.pop(client).wait()

    def socket(self, client: int) -> Path:
        return node_socket(self.sites.folder / "fed", client)


@pytest.fixture(scope="module")
def processes(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("processes") / "w"
    shutil.copytree(drawn, folder)
    made = Processes(Sites(folder, small, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        made.start(0, 1, 2)
        yield made
    for client in list(made.started):
        made.kill(client)


def run_json(ease: Callable, *arguments: object) -> dict:
    found = ease(*arguments, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_a_request_from_its_words_to_its_purge(ease: Callable, processes: Processes) -> None:
    sites, run = processes.sites, processes.sites.folder / "run"
    settings = [part for each in sites.assignments() for part in ("--set", each)]
    assert ease("train", *settings, "--out", run, "--quiet").code == 0
    captions = [json.loads(line) for line in (sites.folder / "a" / "captions.jsonl").read_text().splitlines()]
    held = Run.load(run).known()[0].clients[0].train_ids  # type: ignore[index]
    word = next(
        word for each in captions if each["id"] in held for word in each["captions"][0].lower().split() if len(word) > 4
    )
    seen = run_json(ease, "forget", run, "--concept", word, "--dry-run")
    assert seen["ids"] and seen["impact"]["clients"] and seen["examples"] == []
    name = run_json(ease, "forget", run, "--concept", word)["id"]
    # An audit needs every node; a killed one is named, and the same command goes on.
    audit = ("audit", run, "--request", name, "--retrain", "--retrains", 1)
    processes.kill(2)
    refused = ease(*audit)
    assert refused.code == 2 and "client 2: no node answers" in " ".join(refused.err.split())
    processes.start(2)
    verdict = run_json(ease, *audit)["verdict"]
    assert verdict["reason"] == "too few retrainings" and {"pair/rank", "test/recall@1"} <= {
        each["name"] for each in verdict["measures"]
    }
    assert ease("release", run, "--request", name).code == 0
    # So does a purge, which changes nothing as long as one is missing.
    processes.kill(1)
    refused = ease("purge", run)
    words = " ".join(refused.err.split())
    assert refused.code == 2 and "client 1: no node answers" in words and "nothing was purged" in words
    assert not (run / "purge.json").exists()
    processes.start(1)
    (done,) = run_json(ease, "purge", run)["purged"]
    assert {line["what"].partition(":")[0] for line in done["stayed"]} >= {f"client {each}" for each in range(3)}
    spelt = [json.dumps(pair_id).encode() for pair_id in seen["ids"]]
    kept = [path for path in (sites.folder / "disks").rglob("*") if path.is_file()]
    assert kept and not any(each in path.read_bytes() for path in kept for each in spelt)
    # Photographs may go, nodes be started again, and the run answers more requests.
    for pair_id in seen["ids"]:
        (sites.folder / pair_id[0] / f"{pair_id}.png").unlink()
    processes.kill(0)
    processes.start(0)
    assert run_json(ease, "forget", run, "--client", "c")["id"] == "client-2"
    assert read_json(run / "name.json")["name"] in {
        path.name for path in (sites.folder / "disks" / "a" / "runs").iterdir()
    }
