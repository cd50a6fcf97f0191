"""The same federation over Flower, with real processes: equal bytes, and whoever has no key stays out."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ease.errors import Disconnected
from ease.federation.credentials import Authority, admit, make_authority, make_node_key, told_key
from ease.federation.flower import Flower
from ease.federation.launch import descendants, die_with_parent, flower_programs, free_port, start_supernode, stop
from ease.federation.remote import node_socket
from ease.storage import read_json

pytestmark = pytest.mark.engine

CLIENTS = (0, 1, 2)
PATIENCE = 300.0
UNEQUAL = ("partition.scheme=dirichlet", "partition.beta=0.7", "training.rounds=2")


@dataclass
class Federation:
    """A server and three nodes with keys, each a process of its own."""

    folder: Path
    settings: tuple[str, ...]
    port: int = field(default_factory=free_port)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def ease(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE * 2)

    def begin(self, name: str, *arguments: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command(*arguments), stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def serve(self) -> None:
        self.begin("server", "server", self.folder, "--port", self.port)

    def join(self, client: int) -> None:
        keys = self.folder / "keys"
        known = ("--key", keys / f"node-{client}", "--ca", keys / "ca.crt")
        place = ("--socket", node_socket(self.folder, client), "--server", f"127.0.0.1:{self.port}")
        self.begin(f"node-{client}", "node", "--id", client, *place, *known, *assigned(self.settings))

    def await_nodes(self, count: int = len(CLIENTS)) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if len(Flower(self.folder).nodes()) == count and all(map(self._listens, CLIENTS)):
                    return
            except (Disconnected, TimeoutError):
                pass
            assert self.processes["server"].poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.5)
        raise AssertionError((self.folder / "server.log").read_text())

    def _listens(self, client: int) -> bool:
        return "listening" in (self.folder / f"node-{client}.log").read_text()

    def kill(self, name: str) -> None:
        """With what it started, as when the machine loses power."""
        process = self.processes.pop(name)
        for pid in (process.pid, *descendants(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            stop(process)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from ease.cli import main; main()", *map(str, arguments)]


def assigned(settings: tuple[str, ...]) -> list[str]:
    return [part for each in settings for part in ("--set", each)]


@pytest.fixture(scope="module")
def federation(
    small: tuple[str, ...], shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Federation]:
    flower_programs()  # missing is an error: whoever asks for these tests has it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        made = Federation(tmp_path_factory.mktemp("fed"), (*small, *UNEQUAL))
        make_authority(made.folder / "keys", ("localhost", "127.0.0.1"))
        for client in CLIENTS:
            admit(made.folder, client, make_node_key(made.folder / "keys" / f"node-{client}"))
        try:
            made.serve()
            for client in CLIENTS:
                made.join(client)
            made.await_nodes()
            yield made
        finally:
            made.end()


@dataclass(frozen=True)
class Both:
    """One configuration in one process and over Flower."""

    here: Path
    there: Path

    def states(self) -> dict[str, list[bytes]]:
        """Every state of either, in order."""
        return {
            place.name: [path.read_bytes() for path in sorted(place.rglob("*.safetensors"))]
            for place in (self.here, self.there)
        }


@pytest.fixture(scope="module")
def both(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("runs")
    runs = Both(folder / "here", folder / "there")
    engines = {runs.here: ("engine=loop",), runs.there: ("engine=flower", f"federation={federation.folder}")}
    for out, engine in engines.items():
        told = federation.ease("train", "--out", out, "--quiet", *assigned((*federation.settings, *engine)))
        assert told.returncode == 0, told.stderr
    return runs


def test_training_gives_the_bytes_of_one_process(both: Both) -> None:
    states = both.states()
    assert states["here"] == states["there"] and len(states["here"]) >= 4  # the first, two rounds, the classes
    sizes = read_json(both.there / "rounds" / "00001" / "round.json")["pairs"]
    assert len(set(sizes.values())) == 3


def test_requests_with_replay_give_the_bytes_of_one_process(both: Both, federation: Federation, tmp_path: Path) -> None:
    ids = [holding["train_ids"][0] for holding in read_json(both.here / "membership.json")["clients"][:2]]
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    before = len(both.states()["here"])
    for request in (("--samples", tmp_path / "ids.txt"), ("--client", 2, "--method", "finetune")):
        for run in (both.here, both.there):
            told = federation.ease("forget", run, *request, "--quiet")
            assert told.returncode == 0, told.stderr
    states = both.states()
    assert states["here"] == states["there"] and len(states["here"]) > before + 3


def test_bytes_on_the_wire_are_those_of_the_record(both: Both, federation: Federation) -> None:
    """Flower's own log of what it moved would be the best witness; it has none, so the node's disk is: every state
    that the record counts was sent once."""
    record = read_json(both.there / "rounds" / "00002" / "round.json")
    parts = {client: federation.folder / "nodes" / str(client) / "parts" for client in CLIENTS}
    largest = {client: max(path.stat().st_size for path in folder.iterdir()) for client, folder in parts.items()}
    assert sum(largest.values()) == pytest.approx(record["bytes_down"], rel=0.05)


def test_a_server_that_is_killed_is_resumed_from(both: Both, federation: Federation, tmp_path: Path) -> None:
    """Killed inside a round; started again, the nodes come back by themselves and the same command ends as if
    nothing had happened. A node that is killed too is named and left out of its round."""
    out, settings = tmp_path / "run", (*federation.settings, "engine=flower", f"federation={federation.folder}")
    arguments = ("train", "--out", out, "--quiet", *assigned(settings))
    training = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    await_file(out / "rounds" / "00001" / "round.json", training)
    federation.kill("server")
    _, told = training.communicate(timeout=PATIENCE)
    assert training.returncode == 2 and "ease server" in told and "same command" in told
    federation.serve()
    federation.await_nodes()
    again = federation.ease(*arguments)
    assert again.returncode == 0, again.stderr
    for number in (1, 2):
        name = Path("rounds") / f"{number:05d}" / "state.safetensors"
        assert (out / name).read_bytes() == (both.here / name).read_bytes()


def test_a_node_that_is_killed_in_a_round_is_left_out_and_comes_back(federation: Federation, tmp_path: Path) -> None:
    """No deadline is set, so that a busy machine changes nothing: Flower finds out within a minute or so."""
    out = tmp_path / "run"
    settings = (*federation.settings, "engine=flower", f"federation={federation.folder}", "training.rounds=3")
    arguments = ("train", "--out", out, "--quiet", *assigned(settings))
    training = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    await_file(out / "rounds" / "00001" / "round.json", training)
    federation.kill("node-1")
    await_file(out / "rounds" / "00002" / "round.json", training)
    federation.join(1)
    _, told = training.communicate(timeout=PATIENCE * 2)
    assert training.returncode == 0, told
    records = {number: read_json(out / "rounds" / f"{number:05d}" / "round.json") for number in (1, 2, 3)}
    left_out = {number: list(record["rejected"]) for number, record in records.items()}
    assert left_out[1] == [] and left_out[2] == ["1"]
    federation.await_nodes()


def await_file(path: Path, process: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + PATIENCE
    while not path.is_file():
        assert process.poll() is None and time.monotonic() < until, process.poll()
        time.sleep(0.05)


@pytest.mark.parametrize("stranger", ["no key that was admitted", "another authority", "in the clear"])
def test_strangers_stay_out(federation: Federation, tmp_path: Path, stranger: str) -> None:
    key, authority = tmp_path / "key", Authority(federation.folder / "keys")
    make_node_key(key)
    if stranger == "another authority":
        authority = make_authority(tmp_path / "keys", ("localhost", "127.0.0.1"))
        key = federation.folder / "keys" / "node-0"
    known = (None, None) if stranger == "in the clear" else (key, authority.certificate)
    process = start_supernode(tmp_path, 7, tmp_path / "7.sock", f"127.0.0.1:{federation.port}", *known)
    log = tmp_path / "flower" / "node-7.log"
    reasons = {
        "no key that was admitted": ("2004", "305"),
        "another authority": ("CERTIFICATE_VERIFY_FAILED",),
        "in the clear": ("disconnected", "retrying", "failed"),
    }
    try:
        until = time.monotonic() + 40
        while time.monotonic() < until and not any(each in log.read_text() for each in reasons[stranger]):
            time.sleep(0.3)
        assert any(each in log.read_text() for each in reasons[stranger]), log.read_text()
        assert len(Flower(federation.folder).nodes()) <= len(CLIENTS)
    finally:
        stop(process)


def test_an_admitted_node_cannot_speak_for_another(federation: Federation) -> None:
    """A key is of one client: whatever its node says, its answers count as that client's."""
    line = Flower(federation.folder)
    line._found(set(CLIENTS), None)
    bound = line._identified()
    assert sorted(bound) == list(CLIENTS) and len(set(bound.values())) == 3
    keys = {each["node"]: each["key"] for each in line.nodes()}
    for client in CLIENTS:
        text = (federation.folder / "flower" / f"client-{client}.pub").read_bytes()
        assert keys[bound[client]] == told_key(text, "key").hex()


def test_status_tells_who_is_there(both: Both, federation: Federation) -> None:
    told = federation.ease("status", federation.folder, "--run", both.there)
    assert told.returncode == 0 and "3 nodes are connected" in told.stdout and "round 2 of 2" in told.stdout
    assert told.stdout.count("ready") == 3


def test_nothing_phones_home(federation: Federation, environ_of: Callable[[int], dict[str, str]]) -> None:
    for process in federation.processes.values():
        for pid in descendants(process.pid):
            environment = environ_of(pid)
            if environment.get("FLWR_HOME"):
                assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
                assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1" and environment["UV_OFFLINE"] == "1"


@pytest.fixture
def environ_of() -> Callable[[int], dict[str, str]]:
    """The environment of a running process."""

    def read(pid: int) -> dict[str, str]:
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return {}
        return dict(part.split("=", 1) for part in content.decode(errors="replace").split("\0") if "=" in part)

    return read
