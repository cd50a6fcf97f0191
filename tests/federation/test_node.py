"""Nodes over Unix sockets: the same bytes as in one process, and nothing but well-formed jobs gets to the data."""

import copy
import hashlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ease.audit.config import AuditConfig
from ease.commands.audit import audit_run
from ease.commands.federation import sharing
from ease.errors import UserError
from ease.federation.codec import decode_update, encode_job, encode_state, encode_update, state_length
from ease.federation.container import PREFIX
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.meter import Metered
from ease.federation.middleware import Guarded
from ease.federation.node import Node, Policy, listen, pairs_hash, private_folder, serve, without_paths
from ease.federation.protocol import LocalJob, Replay, Update
from ease.federation.remote import LATE, Remote, Sockets, node_socket, spoken
from ease.federation.wire import JOB, LENGTH, UPDATE, Answer, Ask, decode_answer, decode_present, encode
from ease.methods import make_method
from ease.methods.ease.replay import REPLAY
from ease.operations.joining import JoinRequest, join
from ease.operations.ledger.retention import purge_released
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import open_world, release
from ease.runs.config import RunConfig
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import sha256

RUN = "ab" * 16
UNEQUAL = ("partition.scheme=dirichlet", "partition.beta=0.7", "training.rounds=3")
HISTORIES = [
    "training.history=server",
    pytest.param("training.history=client", marks=pytest.mark.slow),
    pytest.param("training.history_every=2", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Site:
    """A federation of nodes in threads of this process, each with a socket of its own."""

    folder: Path
    nodes: dict[int, Node]

    def sockets(self) -> Sockets:
        return Sockets({client: node_socket(self.folder, client) for client in self.nodes})


def node_of(world: World, client: int, folder: Path, policy: Policy | None = None) -> Node:
    shard = world.shards[client]
    frozen = {id(each): each for each in world.server.model.parameters() if not each.requires_grad}
    model = copy.deepcopy(world.server.model, frozen)
    fingerprint = world.server.backbone.fingerprint
    return Node(
        model, shard, world.evaluator.activations, world.server.device, folder, fingerprint, policy=policy or Policy()
    )


@pytest.fixture
def site(world: World, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Starts the nodes of a world."""
    lines = []

    def start(of: World = world, folder: Path = tmp_path / "federation") -> Site:
        nodes = {shard.client: node_of(of, shard.client, folder / str(shard.client)) for shard in of.shards}
        for client, node in nodes.items():
            lines.append(listen(node_socket(folder, client)))
            threading.Thread(target=serve, args=(node, lines[-1]), daemon=True).start()
        return Site(folder, nodes)

    yield start
    for line in lines:
        line.close()


def remote_of(world: World, site: Site, deadline: float | None = 30.0) -> Remote:
    held = {shard.client: shard.train_ids for shard in world.shards}
    return Remote(site.sockets(), held, held, RUN, backbone=world.server.backbone.fingerprint, deadline=deadline)


def task(job: LocalJob, state: Params, client: int = 0, **changes: object) -> bytes:
    """A message as the server makes it."""
    encoded, parts = encode_job(job, state)
    nonce = uuid.uuid4().hex
    fields = {"kind": "task", "client": client, "nonce": nonce, "run": RUN, "parts": tuple(sorted(parts)), **changes}
    return encode(Ask(**fields), {JOB: encoded, **parts})


def refused(node: Node, message: bytes) -> str:
    return decode_answer(node.answer(message))[0].refused


# --- the same bytes ---


@pytest.mark.parametrize("history", HISTORIES)
def test_nodes_give_the_bytes_of_one_process(
    site: Callable[..., Site], small_config: Callable[..., RunConfig], tmp_path: Path, history: str
) -> None:
    """Training, a client that leaves, and single pairs with their rounds replayed, at three unequal clients."""
    settings = (*UNEQUAL, history, "model.lora=ffa")
    here = small_config(*settings, "engine=sequential")
    world = World.open(here)
    assert len({len(shard.train) for shard in world.shards}) == 3
    there = small_config(*settings, "engine=nodes", f"federation={tmp_path / 'federation'}")
    site(world)
    wanted = SampleRequest(ids=(*world.shards[0].train_ids[:2], *world.shards[1].train_ids[:1]))
    found = {
        name: digests(tmp_path / name, config, wanted) for name, config in (("sequential", here), ("nodes", there))
    }
    assert found["nodes"] == found["sequential"]
    assert len(found["sequential"]) >= 3 + 2 * 2  # rounds of the training, and steps of each answer


def digests(folder: Path, config: RunConfig, wanted: Request) -> list[str]:
    """Hash of every state of a run: its rounds, and each step of a client's and a sample request."""
    run = Run.create(folder, config)
    found = [run.history.state_sha256(each.number) for each in run.train(open_world(run))]
    found += [hashed(step.state) for step, _ in forget(run, open_world(run), wanted, make_method("ease"), False)]
    release(run, next((run.folder / "requests").iterdir()).name)
    for request in (ClassRequest(classes=(0,)), ClientRequest(clients=(2,))):  # what was closed is gone at the nodes
        steps = forget(run, open_world(run), request, make_method("ease"), False)
        found += [hashed(step.state) for step, _ in steps]
    return found


def hashed(state: Params) -> str:
    return hashlib.sha256(encode_state(state)).hexdigest()


@pytest.mark.parametrize("history", HISTORIES)
def test_a_purge_over_nodes_is_that_of_one_process(
    site: Callable[..., Site], small_config: Callable[..., RunConfig], tmp_path: Path, history: str
) -> None:
    """Single pairs and a client are purged in turn, and a class is forgotten after that."""
    settings = (*UNEQUAL, history)
    here = small_config(*settings, "engine=sequential")
    world = World.open(here)
    started = site(world)
    there = small_config(*settings, "engine=nodes", f"federation={tmp_path / 'federation'}")
    wanted = SampleRequest(ids=(*world.shards[0].train_ids[:2], *world.shards[1].train_ids[:1]))
    found = {}
    for name, config in (("sequential", here), ("nodes", there)):
        run = Run.create(tmp_path / name, config)
        list(run.train(open_world(run)))
        for request in (wanted, ClientRequest(clients=(2,))):
            list(forget(run, open_world(run), request, make_method("ease"), False))
            release(run, run.unreleased()[0])
            assert len(list(purge_released(run.folder))) == 1
        list(forget(Run.load(run.folder), open_world(run), ClassRequest(classes=(0,)), make_method("ease"), False))
        clients = run.folder / "clients"
        every = [path for path in sorted(run.folder.rglob("*.safetensors")) if clients not in path.parents]
        found[name] = {str(path.relative_to(run.folder)): sha256(path) for path in every}
    assert found["nodes"] == found["sequential"]
    kept = {client: list(node.folder.glob("runs/*/rounds/*")) for client, node in started.nodes.items()}
    assert bool(kept[0]) == (history == "training.history=client") and not kept[2]


def test_nodes_that_deal_configured_data_accept_no_join(
    site: Callable[..., Site], small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    site(World.open(small_config("engine=sequential")))
    run = Run.create(tmp_path / "run", small_config("engine=nodes", f"federation={tmp_path / 'federation'}"))
    list(run.train(open_world(run)))
    with pytest.raises(UserError, match="a new one has no node; use engine"):
        join(run, JoinRequest("they agree", "ada"))


@pytest.mark.slow
def test_an_audit_over_nodes_is_that_of_one_process(
    site: Callable[..., Site], small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Where every machine opens the whole data set, nodes retrain, and the evaluator simulates shadows and measures."""
    here = small_config("engine=sequential")
    site(World.open(here))
    settings, found = AuditConfig(shadows=4, retrains=1, pool=16, workers=1), {}
    for config in (here, small_config("engine=nodes", f"federation={tmp_path / 'federation'}")):
        run = Run.create(tmp_path / config.engine, config)
        list(run.train(open_world(run)))
        list(forget(run, open_world(run), ClientRequest(clients=(1,)), make_method("ease"), False))
        record = audit_run(run.folder, "client-1", settings, retrain=True, quiet=True)
        found[config.engine] = record.verdict, record.model_sha256, record.retrain_sha256, record.attacks
    assert found["nodes"] == found["sequential"]


def test_nodes_repeat_rounds_of_a_training_made_again_as_one_process_does(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    """Batches are drawn as that training drew them, from what was left by then."""
    gone, state = SampleRequest(ids=world.shards[0].train_ids[::3]), world.server.initial()
    job = local_job(
        request=SampleRequest(ids=()), objective=REPLAY, replays=(Replay(1, state, 1.0, 0, (0,)),), data="all"
    )
    remote, found = remote_of(world, site()), []
    remote.gone = (gone,)
    for renewed in (0, 1):
        remote.renewed = renewed
        here = World(world.server, world.evaluator, renewed=renewed).without(gone).federation
        (one,), (two,) = (list(each.run(state, job, [0])) for each in (here, remote))
        assert encode_update(one) == encode_update(two)
        found.append(encode_update(two))
    assert found[0] != found[1]


def test_bytes_on_the_line_are_those_that_are_accounted_for(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    remote = remote_of(world, site())
    list(remote.run(world.server.initial(), local_job(), remote.clients))  # who is who is asked once
    remote.sent = remote.received = 0
    metered, state = Metered(remote), world.server.initial()
    for number in range(2, 6):
        answers = list(metered.run(state, local_job(round=number), remote.clients))
        state = state + answers[0].change
    down, up = metered.cost.bytes_down - metered_initial(world), metered.cost.bytes_up
    assert remote.sent == pytest.approx(down, rel=0.05) and remote.received == pytest.approx(up, rel=0.05)
    envelope = (remote.received - up) / (4 * 3)
    assert 0 < envelope < 400  # the same for a large model, of which it is nothing


def metered_initial(world: World) -> int:
    """The first state is counted for each of three clients, and was there already."""
    return 3 * state_length(world.server.initial())


# --- what a node refuses ---


@pytest.fixture
def node(world: World, tmp_path: Path) -> Node:
    return node_of(world, 0, tmp_path / "node")


def test_a_job_is_done(node: Node, world: World, local_job: Callable[..., LocalJob]) -> None:
    answer, update = decode_answer(node.answer(task(local_job(), world.server.initial())))
    (expected,) = world.federation.run(world.server.initial(), local_job(), [0])
    assert not answer.refused and update is not None and decode_update(update) == expected


@pytest.mark.parametrize(
    "message", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04cos\nsystem\n.", b"EASEWIRE" + b"\0" * 90]
)
def test_garbage_is_refused(node: Node, message: bytes) -> None:
    assert refused(node, message)


def test_every_cut_and_flipped_message_is_refused(node: Node, world: World, local_job: Callable[..., LocalJob]) -> None:
    whole = task(local_job(), world.server.initial())
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        assert refused(node, whole[:length])
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        altered = bytearray(whole)
        altered[place] ^= 0x10
        assert "altered or cut" in refused(node, bytes(altered))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"objective": "exfiltrate"}, "'exfiltrate' is not known here"),
        ({"epochs": 10_000}, "its policy allows 100 epochs in a job, and this one has 10000"),
    ],
)
def test_unknown_and_endless_work_is_refused(
    node: Node, world: World, local_job: Callable[..., LocalJob], changes: dict[str, object], reason: str
) -> None:
    assert reason in refused(node, task(local_job(**changes), world.server.initial()))


def test_a_state_of_another_model_is_refused(node: Node, toy_params, local_job: Callable[..., LocalJob]) -> None:
    assert "not one of this client's model" in refused(node, task(local_job(), toy_params()))


def test_another_clients_job_is_refused(node: Node, world: World, local_job: Callable[..., LocalJob]) -> None:
    message = task(local_job(), world.server.initial(), client=1)
    assert refused(node, message) == "this is client 0, and client 1 was asked"


def test_a_repeated_message_is_refused_even_by_a_new_process(
    node: Node, world: World, local_job: Callable[..., LocalJob], tmp_path: Path
) -> None:
    message = task(local_job(), world.server.initial())
    assert not refused(node, message)
    assert "came before" in refused(node, message)
    assert "came before" in refused(node_of(world, 0, tmp_path / "node"), message)


def test_closed_pairs_stay_closed(node: Node, world: World, local_job: Callable[..., LocalJob]) -> None:
    gone = (SampleRequest(ids=world.shards[0].train_ids[:5]),)
    _, update = decode_answer(node.answer(task(local_job(), world.server.initial(), gone=gone)))
    assert update is not None and decode_update(update).pairs == len(world.shards[0].train) - 5
    assert "a closed request took away" in refused(node, task(local_job(), world.server.initial()))


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "exfiltrate"},
        {"epochs": 10_000},
        {"objective": REPLAY, "replays": (Replay(1, "0" * 64, 1.0, 0),)},  # of a round that it does not keep
        {"keep": True, "round": 10_001},
        {"keep": True, "round": 0},
    ],
)
def test_a_refused_job_changes_nothing_at_the_node(
    node: Node, world: World, local_job: Callable[..., LocalJob], changes: dict[str, object]
) -> None:
    """Not even what it says is closed: what is closed once stays closed, so a refused job could end the training."""
    gone = (ClassRequest(classes=(0,)), SampleRequest(ids=world.shards[0].train_ids[:5]))
    assert refused(node, task(local_job(**changes), world.server.initial(), gone=gone))
    assert not (node.folder / "runs").exists()
    assert not refused(node, task(local_job(), world.server.initial()))


def test_a_round_that_no_training_has_is_not_a_job(
    node: Node, world: World, local_job: Callable[..., LocalJob]
) -> None:
    encoded, parts = encode_job(local_job(keep=True), world.server.initial())
    header = json.dumps(
        {**json.loads(encoded[PREFIX.size : -PREFIX.unpack_from(encoded)[3]]), "round": 10**30}
    ).encode()
    magic, version, _, payload = PREFIX.unpack_from(encoded)
    job = PREFIX.pack(magic, version, len(header), payload) + header + encoded[-payload:]
    ask = Ask(kind="task", client=0, nonce=uuid.uuid4().hex, run=RUN, parts=tuple(parts))
    assert "round: Input should be less than" in refused(node, encode(ask, {JOB: job, **parts}))
    assert not (node.folder / "runs").exists()


def test_a_server_cannot_make_a_site_store_more_than_its_policy_allows(
    world: World, local_job: Callable[..., LocalJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of(world, 0, tmp_path / "node", Policy(most_runs=2, most_rounds=5, largest_folder=1 << 20))
    for run in range(2):
        assert not refused(node, task(local_job(keep=True), world.server.initial(), run=f"{run:032x}"))
    assert "allows 2 runs" in refused(node, task(local_job(), world.server.initial(), run="f" * 32))
    assert "allows 5 kept rounds" in refused(
        node, task(local_job(keep=True, round=6), world.server.initial(), run=f"{0:032x}")
    )
    many = (SampleRequest(ids=("x" * 1000,) * 10_000),)
    assert "closed requests take" in refused(
        node, task(local_job(), world.server.initial(), run=f"{0:032x}", gone=many)
    )
    (node.folder / "filler").write_bytes(bytes(1 << 20))
    assert "bytes on its disk" in refused(
        node, task(local_job(keep=True, round=2), world.server.initial(), run=f"{0:032x}")
    )
    assert len(list(node.folder.glob("runs/*/rounds/*"))) == 2
    monkeypatch.setattr("ease.federation.node.REMEMBERED", 10)
    for _ in range(50):
        node.answer(task(local_job(epochs=10_000), world.server.initial()))
    assert len((node.folder / "messages.txt").read_text().split()) <= 21


def test_a_refusal_shows_the_server_no_path_of_the_site(
    node: Node, world: World, local_job: Callable[..., LocalJob], capsys: pytest.CaptureFixture[str]
) -> None:
    node.log = sys.stderr
    damaged = node.folder / "runs" / RUN / "gone.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    reported = refused(node, task(local_job(), world.server.initial()))
    assert "gone.json" in reported and str(node.folder) not in reported and reported.startswith("runs/")
    assert str(damaged) in capsys.readouterr().err  # whoever runs the site is told where


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("/srv/site a/node/runs/x.json: damaged", "x.json: damaged"),
        ("cannot open '/etc/x y/pw.txt' or /home/u/secret.png; retry", "cannot open 'pw.txt' or secret.png; retry"),
        (r"see C:\Users\bob\x.png now", "see x.png now"),
        ("allows 1/2 of a round", "allows 1/2 of a round"),
    ],
)
def test_paths_are_left_out(line: str, reported: str) -> None:
    assert without_paths(line, Path("/elsewhere")) == reported


def test_a_part_that_was_altered_is_not_kept(node: Node, world: World, local_job: Callable[..., LocalJob]) -> None:
    encoded, parts = encode_job(local_job(), world.server.initial())
    (name,) = parts
    spoilt = bytearray(parts[name])
    spoilt[-1] ^= 1
    ask = Ask(kind="task", client=0, nonce=uuid.uuid4().hex, run=RUN, parts=(name,))
    assert "altered on the way" in refused(node, encode(ask, {JOB: encoded, name: bytes(spoilt)}))
    assert len(node.blobs) == 0


def test_names_of_parts_are_not_paths(
    node: Node, world: World, local_job: Callable[..., LocalJob], tmp_path: Path
) -> None:
    encoded, _ = encode_job(local_job(), world.server.initial())
    ask = Ask(kind="task", client=0, nonce=uuid.uuid4().hex, run=RUN)
    assert "belongs to no job" in refused(node, encode(ask, {JOB: encoded, "../../evil": b"x"}))
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(objectives=("probe",)), "its policy does not allow the objective 'align'"),
        (Policy(smallest_cohort=2), "its policy asks for 2 clients in a round, and this one has 1"),
    ],
)
def test_a_site_can_refuse_by_policy(
    world: World, local_job: Callable[..., LocalJob], tmp_path: Path, policy: Policy, reason: str
) -> None:
    node = node_of(world, 0, tmp_path / "node", policy)
    assert refused(node, task(local_job(), world.server.initial())) == reason
    assert not refused(node_of(world, 0, tmp_path / "other"), task(local_job(), world.server.initial()))


def test_a_site_can_refuse_too_many_jobs(world: World, local_job: Callable[..., LocalJob], tmp_path: Path) -> None:
    node = node_of(world, 0, tmp_path / "node", Policy(jobs_per_hour=2))
    said = [refused(node, task(local_job(), world.server.initial())) for _ in range(3)]
    assert said == ["", "", "its policy allows 2 jobs an hour"]


def test_a_message_that_is_too_long_is_refused_before_it_is_read(site: Callable[..., Site]) -> None:
    path = node_socket(site().folder, 0)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.sendall(LENGTH.pack(1 << 40))  # and nothing after it
        line.settimeout(10)
        length = LENGTH.unpack(line.recv(8))[0]
        assert "1099511627776 bytes" in decode_answer(line.recv(length))[0].refused


def test_only_its_owner_may_connect_to_a_node(site: Callable[..., Site]) -> None:
    path = node_socket(site().folder, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="another process answers there"):
        listen(path)


def test_a_killed_nodes_socket_is_taken_over_and_a_file_is_not(tmp_path: Path) -> None:
    listen(tmp_path / "a.sock").close()
    listen(tmp_path / "a.sock").close()
    (tmp_path / "photo.png").write_bytes(b"photo")
    with pytest.raises(UserError, match="is not a socket"):
        listen(tmp_path / "photo.png")


def test_a_hello_is_answered_while_a_slow_speaker_talks(site: Callable[..., Site], world: World) -> None:
    started = site()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(node_socket(started.folder, 0)))
        slow.sendall(LENGTH.pack(1000) + b"EASE")
        reported = remote_of(world, started).present()[0]
    assert not isinstance(reported, str) and reported.pairs == pairs_hash(world.shards[0].train_ids)


# --- what the server makes of nodes that fail or lie ---


class Lying(Sockets):
    """A line on which one client's answers are changed on their way."""

    def __init__(self, paths, client: int, change: Callable[[bytes], bytes | str]):
        super().__init__(paths)
        object.__setattr__(self, "liar", client)
        object.__setattr__(self, "change", change)

    def exchange(self, messages, seconds):
        for client, data in super().exchange(messages, seconds):
            lies = client == self.liar and isinstance(data, bytes) and b'"kind":"answer"' in data
            yield client, self.change(data) if lies else data


def with_update(change: Callable[[Update], Update]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        answer, update = decode_answer(data)
        assert update is not None
        return encode(answer, {UPDATE: encode_update(change(decode_update(update)))})

    return changed


def with_update_bytes(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        answer, update = decode_answer(data)
        assert update is not None
        return encode(answer, {UPDATE: change(update)})

    return changed


def scaled(factor: float) -> Callable[[Update], Update]:
    return lambda update: replace(update, delta=update.change.map(lambda tensor: tensor * factor))


FAULTS: dict[str, tuple[Callable[[bytes], bytes | str], str]] = {
    "garbled": (lambda data: data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2), "altered or cut"),
    "cut": (lambda data: data[:-7], "altered or cut"),
    "not ours": (lambda data: b"\x80\x04cposix\nsystem\n", "none of this tool"),
    "damaged and sealed again": (
        with_update_bytes(lambda update: update[:-9]),
        "do not add up",
    ),
    "not numbers": (with_update(scaled(float("nan"))), "non-finite"),
    "another shape": (
        with_update(lambda u: replace(u, delta=u.change.map(lambda tensor: tensor.reshape(-1)))),
        "has shape",
    ),
    "foreign id": (with_update(lambda update: replace(update, client=1)), "answered as client 1"),
    "more pairs than it has": (with_update(lambda update: replace(update, pairs=10**6)), "reports 1000000 pairs"),
    "a refusal of its own": (
        lambda data: encode(Answer(client=0, nonce=decode_answer(data)[0].nonce, refused="no\nway \x1b[31m")),
        r"its node refuses: no way \[31m",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_answer_is_named_and_the_round_continues(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob], fault: str
) -> None:
    change, reason = FAULTS[fault]
    started = site()
    remote = remote_of(world, started)
    remote.line = Lying(started.sockets().paths, 0, change)
    sound = Guarded(remote, TrainingConfig())
    answers = {update.client: update for update in sound.run(world.server.initial(), local_job(), remote.clients)}
    expected = world.federation.run(world.server.initial(), local_job(), [1, 2])
    assert answers == {update.client: update for update in expected}
    left_out = sound.left_out()
    assert list(left_out) == [0] and re.search(reason, left_out[0]), left_out


def test_a_huge_update_is_shortened(world: World, site: Callable[..., Site], tmp_path: Path) -> None:
    """It is finite and of the right shape, so it counts, but not for more than the median allows."""
    started = site()
    remote = remote_of(world, started)
    remote.line = Lying(started.sockets().paths, 0, with_update(scaled(1e6)))
    training = world.config.training
    (finished, *_) = fedavg(world.server.initial(), Guarded(remote, training), training, 0, 0.07)
    assert finished.clipped[0] < 1e-4 and finished.state.is_finite()


def test_yesterdays_answer_is_not_todays(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    started, first = site(), list[bytes]()

    def repeat(data: bytes) -> bytes:
        first.append(data)
        return first[0]

    remote = remote_of(world, started)
    remote.line = Lying(started.sockets().paths, 0, repeat)
    state = world.server.initial()
    assert not any(update.refused for update in remote.run(state, local_job(round=1), [0, 1]))
    found = {update.client: update.refused for update in remote.run(state, local_job(round=2), [0, 1])}
    assert found == {0: "it answered another message than the one it was sent", 1: ""}


def test_late_answers_are_discarded_and_the_client_returns(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, waited, answered = site(), threading.Event(), threading.Event()
    respond = started.nodes[2].respond

    def slow(ask: Ask, *rest: object) -> bytes:
        assert ask.kind != "task" or waited.wait(60)
        answer = respond(ask, *rest)  # type: ignore[arg-type]
        if ask.kind == "task":
            answered.set()
        return answer

    monkeypatch.setattr(started.nodes[2], "respond", slow)
    remote, state = remote_of(world, started, deadline=1.5), world.server.initial()
    found = {update.client: update.refused for update in remote.run(state, local_job(round=1), [0, 1, 2])}
    assert found == {0: "", 1: "", 2: "it did not answer in time"} and not waited.is_set()
    waited.set()
    assert answered.wait(60)
    again = {update.client: update for update in remote.run(state, local_job(round=2), [0, 1, 2])}
    assert again == {update.client: update for update in world.federation.run(state, local_job(round=2), [0, 1, 2])}


def test_a_node_that_hangs_takes_no_time_from_the_jobs_of_the_others(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    started, given = site(), list[float | None]()

    class OneHangs(Sockets):
        """Client 2 accepts messages and never answers."""

        def exchange(self, messages: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
            given.append(seconds)
            yield from super().exchange({client: data for client, data in messages.items() if client != 2}, seconds)
            if 2 in messages:
                time.sleep(0.1)  # stands for the whole deadline
                yield 2, LATE

    remote = remote_of(world, started)
    remote.line = OneHangs(started.sockets().paths)
    found = {u.client: u.refused for u in remote.run(world.server.initial(), local_job(round=1), [0, 1, 2])}
    assert found == {0: "", 1: "", 2: LATE} and given == [30.0, 30.0]


def test_a_node_that_lost_its_disk_is_sent_everything_again(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    started = site()
    remote, state = remote_of(world, started), world.server.initial()
    list(remote.run(state, local_job(round=1), [0]))
    for path in started.nodes[0].blobs.folder.iterdir():
        path.unlink()
    (update,) = remote.run(state, local_job(round=2), [0])
    (expected,) = world.federation.run(state, local_job(round=2), [0])
    assert update == expected


def test_other_weights_and_other_data_are_not_worked_with(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    started = site()
    started.nodes[0].backbone = "other"
    started.nodes[1].shard = replace(started.nodes[1].shard, train_ids=("x",) * len(world.shards[1].train_ids))
    found = {u.client: u.refused for u in remote_of(world, started).run(world.server.initial(), local_job(), [0, 1, 2])}
    assert "other weights" in found[0] and "other training pairs" in found[1] and not found[2]


def test_a_node_sees_only_its_own_ids(
    world: World, site: Callable[..., Site], local_job: Callable[..., LocalJob]
) -> None:
    started, sent = site(), dict[int, bytes]()

    class Watched(Sockets):
        def exchange(self, messages, seconds):
            sent.update(messages)
            return super().exchange(messages, seconds)

    remote = remote_of(world, started)
    remote.line = Watched(started.sockets().paths)
    ids = [shard.train_ids[0] for shard in world.shards]
    remote.gone = (SampleRequest(ids=tuple(ids)),)
    remote.members = {client: set(held) - set(ids) for client, held in remote.holdings.items()}
    wanted = SampleRequest(ids=tuple(shard.train_ids[1] for shard in world.shards))
    list(remote.run(world.server.initial(), local_job(request=wanted, data="retain"), [0, 1, 2]))
    for client, message in sent.items():
        for shard in world.shards:
            reported = [each.encode() in message for each in shard.train_ids[:2]]
            assert reported == [shard.client == client] * 2


def test_no_node_is_said_in_words(tmp_path: Path) -> None:
    assert "start it with `ease node`" in str(spoken(tmp_path / "none.sock", b"", None))


def test_present_lists_connected_clients(world: World, site: Callable[..., Site]) -> None:
    started = site()
    data = started.nodes[1].answer(encode(Ask(kind="hello", client=1, nonce="0" * 32, run=RUN)))
    reported = decode_present(data)
    assert (reported.client, reported.jobs, reported.busy, reported.threads) == (1, 0, False, torch.get_num_threads())


# --- real processes ---


class Killing(Sockets):
    """A line that kills a node, as kill -9 does, while it has a message of some kind before it."""

    def __init__(self, paths, process: "subprocess.Popen[bytes]", client: int, mark: bytes):
        super().__init__(paths)
        object.__setattr__(self, "victim", (process, client, mark))

    def exchange(self, messages, seconds):
        process, client, mark = self.victim
        if mark in messages.get(client, b"") and process.poll() is None:
            process.send_signal(signal.SIGSTOP)  # so that it cannot be done before
            threading.Timer(0.3, process.kill).start()
        return super().exchange(messages, seconds)


@pytest.fixture
def processes(small: tuple[str, ...], tmp_path: Path) -> Iterator[Callable[[int], "subprocess.Popen[bytes]"]]:
    """Starts the node of a client as a process; it listens when this returns."""
    started: list[subprocess.Popen[bytes]] = []

    def start(client: int) -> "subprocess.Popen[bytes]":
        path = node_socket(tmp_path / "federation", client)
        settings = [part for each in (*small, *UNEQUAL) for part in ("--set", each)]
        settings += ["--policy", str(Path(__file__).parent / "small_jobs.toml")]
        run = [sys.executable, "-c", "from ease.cli import main; main()", "node", "--quiet", *settings]
        started.append(subprocess.Popen([*run, "--id", str(client), "--socket", str(path)]))
        hello = encode(Ask(kind="hello", client=client, nonce="0" * 32, run=RUN))
        while isinstance(spoken(path, hello, time.monotonic() + 60), str):
            assert started[-1].poll() is None
            time.sleep(0.2)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_node_that_is_killed_is_named_and_its_request_waits_for_it(
    processes: Callable[[int], "subprocess.Popen[bytes]"],
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "federation"
    here = small_config(*UNEQUAL, "engine=sequential")
    there = small_config(*UNEQUAL, "engine=nodes", f"federation={folder}")
    nodes = {client: processes(client) for client in (0, 1, 2)}
    # In the second round of the training, client 1.
    run = Run.create(tmp_path / "killed", there)
    world = run.hosted(open_world(run))
    world.federation.line = Killing(world.federation.line.paths, nodes[1], 1, b'"round":2')  # type: ignore[attr-defined]
    rejected = {}
    for finished in run.train(world):
        rejected[finished.number] = finished.rejected
        if finished.number == 2:
            nodes[1] = processes(1)
    assert {number: list(each) for number, each in rejected.items()} == {1: [], 2: [1], 3: []}
    assert "its node went away" in rejected[2][1]
    # In a replay, client 0, of a run that nothing happened to.
    runs = {}
    for name, config in (("here", here), ("there", there)):
        runs[name] = Run.create(tmp_path / name, config)
        list(runs[name].train(open_world(runs[name])))
    ids = [holding.train_ids[0] for holding in runs["here"].known()[0].clients[:2]]
    request, world = SampleRequest(ids=tuple(ids)), runs["there"].hosted(open_world(runs["there"]))
    world.federation.line = Killing(world.federation.line.paths, nodes[0], 0, b'"objective":"replay"')  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"1 of 2 clients gave a sound answer and 2 are needed \(client 0: its node went"
    ):
        list(forget(runs["there"], world, request, make_method("ease"), False))
    assert not list((tmp_path / "there").glob("requests/*/*/record.json"))  # it is not done, and no one says so
    processes(0)
    found = {
        name: [hashed(step.state) for step, _ in forget(each, open_world(each), request, make_method("ease"), False)]
        for name, each in runs.items()
    }
    assert found["here"] == found["there"] and found["here"]


@pytest.mark.slow
def test_the_papers_lock_reaches_node_processes(
    processes: Callable[[int], "subprocess.Popen[bytes]"],
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    """Directions and reference are sent to other processes, and every step has the bytes of one process."""
    folder = tmp_path / "federation"
    configs = (
        small_config(*UNEQUAL, "engine=sequential"),
        small_config(*UNEQUAL, "engine=nodes", f"federation={folder}"),
    )
    for client in (0, 1, 2):
        processes(client)
    method, found = make_method("ease_paper", ("reference=initial", "excision_share=0.5")), []
    for config in configs:
        run = Run.create(tmp_path / config.engine, config)
        list(run.train(open_world(run)))
        states, pairs = [], tuple(pair for each in run.known()[0].clients for pair in each.train_ids[:3])
        for request in (ClientRequest(clients=(1,)), ClassRequest(classes=(0,)), SampleRequest(ids=pairs)):
            steps = list(forget(run, open_world(run), request, method, False))
            states += [hashed(step.state) for step, _ in steps]
            assert steps[-1][0].bases
        found.append(states)
    assert found[0] == found[1] and len(found[0]) == len(set(found[0])) + 1 >= 10  # both probes begin at one state


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_reaches_neither_the_node_nor_what_it_keeps(site: Callable[..., Site]) -> None:
    """What an app bundle can do at worst, when Flower runs as a user of its own and the socket is not for its group."""
    started = site()
    private_folder(started.folder / "0")
    (started.folder / "0" / "photo").write_bytes(b"photo")
    for parent in (started.folder, *started.folder.parents[:-2]):
        parent.chmod(0o755)
    path = node_socket(started.folder, 0)
    kept = started.folder / "0"
    hostile = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
line = socket.socket(socket.AF_UNIX)
for attempt, where in ((os.listdir, {str(kept)!r}), (open, {str(kept / "photo")!r}), (line.connect, {str(path)!r})):
    try:
        attempt(where)
    except PermissionError:
        print("refused")
    else:
        print("reached")
"""
    reported = subprocess.run([sys.executable, "-I", "-c", hostile], capture_output=True, text=True, timeout=60)
    assert reported.stdout.split() == ["refused"] * 3, reported


def test_nodes_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert sharing(1000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert sharing(1000)["OMP_NUM_THREADS"] == "7"  # whoever says otherwise
