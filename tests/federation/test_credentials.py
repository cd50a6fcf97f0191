"""Keys of a federation, who is admitted, and the line over Flower against a server that is only played."""

import json
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from ease.commands import federation as commands
from ease.commands.federation import FederationStatus, NodeStatus, RunStatus, WaitingRequest
from ease.errors import Disconnected, UserError
from ease.federation import flower
from ease.federation.credentials import (
    admit,
    expiry,
    make_authority,
    make_node_key,
    public_key,
    read_admitted,
    server_hosts,
)
from ease.federation.fedavg import TrainingConfig
from ease.federation.flower import GRID, SERVER, Flower
from ease.federation.launch import QUIET, FlowerServer, check_exposure, environment
from ease.federation.middleware import Guarded
from ease.federation.protocol import LocalJob
from ease.federation.remote import LATE, Remote
from ease.federation.wire import LENGTH, Answer, encode, receive, send
from ease.runs.world import World
from ease.storage import write_json

# --- keys ---


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """One between two ends in memory; raises what a real one would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


def test_nodes_know_their_server_by_its_authority_and_no_other(tmp_path: Path) -> None:
    ours, other = (make_authority(tmp_path / name, ("fed.example.org", "127.0.0.1")) for name in ("ours", "other"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(ours.server_certificate, ours.server_key)
    for name in ("fed.example.org", "127.0.0.1"):
        handshake(server, ssl.create_default_context(cafile=ours.certificate), name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, ssl.create_default_context(cafile=ours.certificate), "evil.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, ssl.create_default_context(cafile=other.certificate), "fed.example.org")


def test_private_keys_are_for_their_owner_and_are_never_replaced(tmp_path: Path) -> None:
    made = make_authority(tmp_path / "keys", ("localhost",))
    make_node_key(tmp_path / "node")
    for path in (made.server_key, tmp_path / "node"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="is there already"):
        make_authority(tmp_path / "keys", ("localhost",))
    with pytest.raises(UserError, match="is there already"):
        make_node_key(tmp_path / "node")
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["ca.crt", "server.crt", "server.key"]
    authority = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    assert isinstance(authority.public_key(), ec.EllipticCurvePublicKey)


def test_a_key_identifies_one_client(tmp_path: Path) -> None:
    keys = [make_node_key(tmp_path / name) for name in ("a", "b")]
    admit(tmp_path, 0, keys[0])
    admit(tmp_path, 0, keys[0])
    with pytest.raises(UserError, match="is the key of client 0 already"):
        admit(tmp_path, 1, keys[0])
    admit(tmp_path, 1, keys[1])
    assert read_admitted(tmp_path).by_key() == {public_key(k.read_bytes(), "").hex(): n for n, k in enumerate(keys)}
    (tmp_path / "rsa.pub").write_text("ssh-rsa AAAA nonsense")
    with pytest.raises(UserError, match="ease keys node FILE"):
        admit(tmp_path, 2, tmp_path / "rsa.pub")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "fed.example.org", "::"])
def test_plain_text_is_only_for_this_machine(host: str) -> None:
    with pytest.raises(UserError, match="--insecure"):
        check_exposure(host, insecure=True)
    check_exposure(host, insecure=False)
    for own in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        check_exposure(own, insecure=True)


def test_nothing_phones_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flower-superlink").touch()
    monkeypatch.setenv("EASE_FLOWER", str(tmp_path))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    found = environment(tmp_path)
    assert {name: found[name] for name in QUIET} == QUIET and found["FLWR_TELEMETRY_ENABLED"] == "0"


# --- the line ---

Reply = Callable[[dict[str, Any], bytes], Iterator[tuple[dict[str, Any], bytes]]]


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[Callable[[Reply], Flower]]:
    """Plays the stub at the server: a function says what is answered to what."""
    lines = []

    def start(reply: Reply) -> Flower:
        line = socket.socket(socket.AF_UNIX)
        line.bind(str(tmp_path / GRID))
        line.listen()
        lines.append(line)

        def serve() -> None:
            while True:
                try:
                    speaker, _ = line.accept()
                except OSError:
                    return
                with speaker, suppress(BrokenPipeError):  # a speaker may give up
                    message = receive(speaker, 1 << 30, "message")
                    end = LENGTH.size + LENGTH.unpack_from(message)[0]
                    for header, data in reply(json.loads(message[LENGTH.size : end]), message[end:]):
                        text = json.dumps(header).encode()
                        send(speaker, LENGTH.pack(len(text)) + text + data)

        threading.Thread(target=serve, daemon=True).start()
        write_json(tmp_path / SERVER, {"insecure": False})
        return Flower(tmp_path)

    yield start
    for line in lines:
        line.close()


@pytest.fixture
def keys(tmp_path: Path) -> dict[int, str]:
    """Client -> its key as Flower tells it, of two clients that are admitted."""
    found = {}
    for client in (0, 1):
        public = make_node_key(tmp_path / f"node-{client}")
        admit(tmp_path, client, public)
        found[client] = public_key(public.read_bytes(), "").hex()
    return found


def test_the_key_decides_whose_answer_it_is(grid: Callable[[Reply], Flower], keys: dict[int, str]) -> None:
    """Node 71 has the key of client 0, node 70 that of client 1; node 72 has one that no one admitted."""

    def reply(header: dict[str, Any], data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        if header["op"] == "nodes":
            reported = {70: keys[1], 71: keys[0], 72: "00ff"}
            yield {"nodes": [{"node": node, "key": key} for node, key in reported.items()]}, b""
            return
        place = 0
        for each in header["to"]:
            assert each["node"] in (70, 71)
            yield {"node": each["node"], "error": ""}, data[place : place + each["size"]] + b" to %d" % each["node"]
            place += each["size"]

    answers = dict(grid(reply).exchange({0: b"zero", 1: b"one"}, 10))
    assert answers == {0: b"zero to 71", 1: b"one to 70"}


def test_errors_and_silence_are_described(grid: Callable[[Reply], Flower], keys: dict[int, str]) -> None:
    waited = threading.Event()

    def reply(header: dict[str, Any], data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        if header["op"] == "nodes":
            yield {"nodes": [{"node": n, "key": keys[n]} for n in (0, 1)]}, b""
        else:
            yield {"node": 0, "error": "Flower error 8: stopped"}, b""
            waited.wait(60)

    line, began = grid(reply), time.monotonic()
    assert dict(line.exchange({0: b"", 1: b""}, 1.0)) == {0: "Flower error 8: stopped", 1: LATE}
    assert time.monotonic() - began < 30
    waited.set()


def test_missing_clients_are_named(grid: Callable[[Reply], Flower], keys: dict[int, str]) -> None:
    def reply(header: dict[str, Any], data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        if header["op"] == "nodes":
            yield {"nodes": [{"node": 5, "key": keys[0]}]}, b""
        else:
            yield {"node": 5, "error": ""}, b"here"

    assert dict(grid(reply).exchange({0: b"", 1: b""}, 2.0)) == {
        0: b"here",
        1: "its node is not connected to the server",
    }


def _named(client: int) -> bytes:
    return encode(Answer(client=client, nonce="0" * 32, refused="busy"))


@pytest.mark.parametrize(("seconds", "in_time"), [(30.0, True), (1.0, False)])
def test_a_node_without_a_key_has_time_to_say_who_it_is(
    grid: Callable[[Reply], Flower], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, in_time: bool
) -> None:
    """It is connected, so the grace for those who are not does not count; half of the time is left for the work."""
    monkeypatch.setattr(flower, "GRACE", 0.1)

    def reply(header: dict[str, Any], data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        if header["op"] == "nodes":
            yield {"nodes": [{"node": 70 + client, "key": ""} for client in (0, 1)]}, b""
            return
        time.sleep(0.7)
        for each in header["to"]:
            yield {"node": each["node"], "error": ""}, _named(each["node"] - 70)

    line = grid(reply)
    write_json(tmp_path / SERVER, {"insecure": True})
    answers = dict(line.exchange({0: b"", 1: b""}, seconds))
    assert sorted(answers) == [0, 1]
    for answer in answers.values():
        assert isinstance(answer, bytes) if in_time else answer == "its node is not connected to the server"


def test_without_a_server_no_client_is_to_blame(
    world: World, local_job: Callable[..., LocalJob], tmp_path: Path
) -> None:
    """The command stops and says what to do; it does not go on with whoever answered before."""
    held = {shard.client: shard.train_ids for shard in world.shards}
    sound = Guarded(Remote(Flower(tmp_path), held, held, "0" * 32, deadline=5.0), TrainingConfig())
    with pytest.raises(Disconnected, match="start it with `ease server"):
        list(sound.run(world.server.initial(), local_job(), [0, 1, 2]))


def test_a_federation_in_a_relative_folder_hands_flower_paths_that_lead_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in (("flower-superlink", "exit 0"), ("flwr", 'test -f "$3" || { echo "no file at $3"; exit 1; }')):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("EASE_FLOWER", str(programs))
    monkeypatch.chdir(tmp_path)
    admit(Path("federation"), 0, make_node_key(tmp_path / "node-0"))

    FlowerServer(Path("federation")).register()


def test_keys_are_listed_revoked_and_rotated(ease, tmp_path: Path) -> None:
    federation = tmp_path / "federation"
    assert ease("keys", "list", federation).code == 2
    assert ease("keys", "server", federation, "--host", "fed.example.org").code == 0
    for client in (2, 10):
        assert ease("keys", "node", tmp_path / f"{client}.key").code == 0
        assert ease("keys", "admit", federation, tmp_path / f"{client}.key.pub", "--id", client).code == 0
    listed = json.loads(ease("keys", "list", federation, "--json").out)
    assert list(listed["clients"]) == ["2", "10"] and all(
        key.startswith("SHA256:") for key in listed["clients"].values()
    )
    assert listed["certificate_until"] == expiry(federation / "keys" / "server.crt").date().isoformat()
    assert list(json.loads(ease("keys", "revoke", federation, "--id", 2, "--json").out)["clients"]) == ["10"]
    again = ease("keys", "revoke", federation, "--id", 2)
    assert again.code == 2 and "admitted: 10" in again.err
    before = (federation / "keys" / "ca.crt").read_bytes()
    assert ease("keys", "rotate", federation).code == 0
    assert (federation / "keys" / "ca.crt").read_bytes() != before
    assert server_hosts(federation / "keys") == ["fed.example.org", "localhost", "127.0.0.1"]
    (aside,) = (federation / "keys").glob("until-*")
    assert (aside / "ca.crt").read_bytes() == before and ease("keys", "rotate", federation).code == 2


def test_a_silent_node_and_waiting_requests_have_exit_codes() -> None:
    def status(*states: str, late: int = 0, waiting: int = 0, until: str | None = "2999-01-01") -> int:
        queue = tuple(
            WaitingRequest(id=f"r{number}", state="approved", deadline="2030-01-01") for number in range(waiting)
        )
        run = RunStatus(run=Path("run"), round=1, rounds=1, bytes_down=0, bytes_up=0, queue=queue, overdue=late)
        nodes = tuple(NodeStatus(client=number, state=state) for number, state in enumerate(states))
        found = FederationStatus(
            folder=Path("federation"), server="answers", nodes=nodes, run=run, certificate_until=until
        )
        return found.exit_code

    assert status("ready", "working") == 0 and status("ready", "no answer") == 1
    assert status("ready", waiting=1) == 4 and status("ready", waiting=2, late=1) == 5
    assert status("ready", until="2020-01-01") == 1 and status("ready", until=None) == 0


def test_a_node_that_is_turned_away_says_so_once_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Flower's end stops at once, as it does with a key that was not admitted, and is started again and again."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("flower-superlink", "flwr", "flower-supernode"):
        (programs / name).write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("EASE_FLOWER", str(programs))
    monkeypatch.setattr(commands, "RETURNING", 0.05)
    upstream = commands.Upstream("127.0.0.1:9", tmp_path / "node.key", tmp_path / "ca.crt")
    with commands.connected(upstream, tmp_path, 3, tmp_path / "node.sock"):
        until = time.monotonic() + 20
        while not (tmp_path / "starts").is_file() or (tmp_path / "starts").read_text().count("started") < 3:
            assert time.monotonic() < until
            time.sleep(0.02)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("client 3: not connected to 127.0.0.1:9") and "ease keys admit" in line and "ca.crt" in line
