"""A malicious server against a real node process: hundreds of hostile messages, and the site is as it was."""

import json
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.federation.on_site import Sites
from tests.federation.test_node import task
from tests.test_fuzzing import alter_bytes

from ease.data.partition import joint_embedding
from ease.errors import UserError
from ease.federation.node import Node
from ease.federation.objectives import OBJECTIVES
from ease.federation.protocol import LocalJob, Replay
from ease.federation.question_log import question_log
from ease.federation.remote import node_socket, spoken
from ease.federation.wire import (
    CENTRES,
    LENGTH,
    QUERY,
    Ask,
    Deal,
    PurgeRequest,
    Search,
    decode_answer,
    decode_deal_reply,
    encode,
    numbers_of,
)
from ease.methods import import_all
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest

pytestmark = pytest.mark.slow
import_all()
MESSAGES = 400
PATIENCE = 120.0
OWN_RUN, OTHER_RUNS = "ab" * 16, tuple(f"{number:032x}" for number in range(8))
DEAL = Deal(classes=2, class_seed=0, seed=0, validation_share=0.3)
LARGEST_FOLDER = 1 << 24
POLICY = f"""
fewest_pairs = 8
group_questions = 15
searches = 10
sums_of_few = 3
most_epochs = 5
most_rounds = 5
most_runs = 4
largest_message = {1 << 24}
largest_folder = {LARGEST_FOLDER}
"""
NUMBERS = (0, -1, 2**31, 2**63, -(2**70), 10**30, 1e308, 1e-300, float("nan"), float("inf"), "x", None, True)


@dataclass
class Site:
    """A node process, and what a server knows of it."""

    process: "subprocess.Popen[bytes]"
    line: Path
    folder: Path
    twin: Node
    """The same node in this process, for states and centres."""
    errors: Path

    def say(self, message: bytes) -> bytes:
        reply = spoken(self.line, message, time.monotonic() + PATIENCE)
        assert isinstance(reply, bytes), reply
        return reply

    def update(self, message: bytes) -> bytes:
        answer, update = decode_answer(self.say(message))
        assert update is not None and not answer.refused, answer.refused
        return update


@pytest.fixture(scope="module")
def site(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("s") / "w"
    sites = Sites(place, small, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        place.mkdir()
        for name in ("a", "server"):
            (place / name).symlink_to(drawn / name)
        twin = sites.node(0)
        folder, errors = place / "disk", place / "errors.txt"
        (place / "policy.toml").write_text(POLICY)
        command = [sys.executable, "-c", "from ease.cli import main; main()", "node", "--id", "0"]
        command += ["--data", str(place / "a"), "--folder", str(folder), "--policy", str(place / "policy.toml")]
        command += [part for each in sites.assignments() for part in ("--set", each)]
        with errors.open("wb") as file:
            process = subprocess.Popen(command, stderr=file)
        line, until = node_socket(place / "fed", 0), time.monotonic() + PATIENCE
        hello = encode(Ask(kind="hello", client=0, nonce="0" * 32, run="0" * 32))
        while isinstance(spoken(line, hello, time.monotonic() + PATIENCE), str):
            assert process.poll() is None and time.monotonic() < until, errors.read_text()
            time.sleep(0.2)
        yield Site(process, line, folder, twin, errors)
        process.kill()
        process.wait()


@dataclass
class Hostile:
    """Messages of a server that wants what the protocol does not give."""

    draw: random.Random
    twin: Node
    job: LocalJob
    state: Params
    valid: bytes

    def message(self) -> bytes:
        kinds = (self.odd_job, self.odd_job, self.odd_state, self.altered, self.question, self.odd_closing)
        return self.draw.choice(kinds)()

    def run(self) -> str:
        return self.draw.choice((*OTHER_RUNS, OWN_RUN))

    def odd_job(self) -> bytes:
        """A job of any objective with one or two fields that no method sends."""
        ids = self.twin.shard.train_ids
        odd = {
            "epochs": NUMBERS,
            "batch_size": (1, *NUMBERS),
            "temperature": (1e-30, 1e30, *NUMBERS),
            "round": (5, 6, *NUMBERS),
            "seed": NUMBERS,
            "clip": NUMBERS,
            "radius": NUMBERS,
            "keep": (True,),
            "stream": ("", "x" * 10**5, "\0"),
            "data": ("retain", "forget", "validation", 7),
            "settings": tuple({name: value} for name in ("retained", "threshold", "noise") for value in NUMBERS),
            "request": (
                SampleRequest(ids=ids[:1]),
                SampleRequest(ids=ids[1:]),
                SampleRequest(ids=("../../etc/passwd", "\x1b[2J") * 1000),
                ClassRequest(classes=(0,)),
                ClientRequest(clients=(0,)),
            ),
            "replays": ((Replay(1, self.state, 1e300, 0),), (Replay(10**9, "0" * 64, 1.0, 0),) * 5),
        }
        changes = {name: self.draw.choice(odd[name]) for name in self.draw.sample(sorted(odd), self.draw.randint(1, 2))}
        changes["objective"] = self.draw.choice((*OBJECTIVES, "align", "__import__", "x" * 10**5))
        try:
            return task(replace(self.job, **changes), self.state, run=self.run(), cohort=self.draw.choice((1, 10**9)))
        except Exception:  # such a job cannot even be written down
            return self.altered()

    def odd_state(self) -> bytes:
        change = self.draw.choice(
            (
                lambda t: t * float("nan"),
                lambda t: t * float("inf"),
                lambda t: t * 1e38,
                lambda t: t.reshape(-1),
                lambda t: t[:0],
                lambda t: t.half(),
                lambda t: t * 0,
            )
        )
        return task(self.job, self.state.map(change), run=OWN_RUN)

    def altered(self) -> bytes:
        """A message that was cut, flipped or doubled somewhere."""
        return alter_bytes(self.valid, self.draw)

    def question(self) -> bytes:
        """Groups around chosen centres, searches along axes, pictures by guessed hashes, pairs dealt anew."""
        features = self.twin.activations
        points = joint_embedding(features.pooled_image, features.pooled_text).shape[1]
        width = self.twin.activations.pooled_text.shape[-1]
        size = self.draw.choice((points, width, 3))
        odd = np.full((2, size), self.draw.choice((0.0, 1e308, np.nan, -1.0)))
        odd[0, 0] = self.draw.random()
        kind = self.draw.choice(("groups", "join", "search", "find", "purge"))
        more: dict[str, object] = {
            "groups": {"deal": DEAL},
            "join": {"deal": DEAL.model_copy(update={"closed": (0, 1)})},
            "search": {"search": Search(words="red", rows=2)},
            "find": {"picture": f"{self.draw.getrandbits(128):032x}"},
            "purge": {
                "purge": PurgeRequest(salt="0" * 32, marks=tuple(f"gone-{n:024x}" for n in range(500)), leaves=True)
            },
        }[kind]
        blobs = {"search": QUERY, "groups": CENTRES, "join": CENTRES}
        run = self.draw.choice(OTHER_RUNS) if kind in ("purge", "join") else self.run()
        ask = Ask(kind=kind, client=0, nonce=uuid.uuid4().hex, run=run, **more)  # type: ignore[arg-type]
        return encode(ask, {blobs[kind]: numbers_of(odd)} if kind in blobs else {})

    def odd_closing(self) -> bytes:
        """Jobs of other runs that close everything, or more than a site keeps."""
        gone = self.draw.choice(
            (
                (ClientRequest(clients=(0,)),),
                (SampleRequest(ids=self.twin.shard.train_ids),) * 50,
                (SampleRequest(ids=("x" * 900,) * 3000),) * 5,
            )
        )
        return task(self.job, self.state, run=self.draw.choice(OTHER_RUNS), gone=gone, renewed=self.draw.choice((0, 9)))


def test_a_malicious_server_gets_no_more_than_the_policy_allows_and_leaves_the_site_as_it_was(
    site: Site, local_job
) -> None:
    twin, state = site.twin, site.twin.model.initial()
    joint = joint_embedding(twin.activations.pooled_image, twin.activations.pooled_text)
    centres = {CENTRES: numbers_of(joint[:2])}
    join = Ask(kind="join", client=0, nonce=uuid.uuid4().hex, run=OWN_RUN, deal=DEAL)
    holding = decode_deal_reply(site.say(encode(join, centres)))[0].holding
    assert holding is not None and len(holding.train_ids) > 16
    honest = local_job(keep=True)
    before = site.update(task(honest, state, run=OWN_RUN))
    hostile = Hostile(random.Random(0), twin, local_job(), state, task(local_job(), state, run=OWN_RUN))
    answered, refusals = 0, set[str]()
    for number in range(MESSAGES):
        if number % 40 == 0:
            cut_short(site.line, hostile.draw)
        reply = site.say(hostile.message())
        with suppress(UserError):
            answer = decode_answer(reply)[0]
            refusals.add(answer.refused.partition("(")[0][:60])
            assert str(site.folder) not in answer.refused and "/w/" not in answer.refused
            answered += not answer.refused
        assert site.process.poll() is None, site.errors.read_text()[-2000:]
    # The honest work goes on, with the same bytes.
    assert site.update(task(honest, state, run=OWN_RUN)) == before
    stored = sum(path.stat().st_size for path in site.folder.rglob("*") if path.is_file())
    assert stored < 2 * LARGEST_FOLDER
    assert len(list((site.folder / "runs").iterdir())) <= 4
    counts = json.loads((site.folder / "questions.json").read_text())["counts"]
    assert counts.get("groups", 0) <= 15 and counts.get("search", 0) <= 10 and counts.get("find", 0) <= 10
    assert counts.get("sums", 0) <= 3
    noted = question_log(site.folder).lines()
    assert len(noted) > MESSAGES // 2 and all(len(json.dumps(each)) < 4000 for each in noted)
    assert not any(each in json.dumps(noted) for each in holding.train_ids)
    errors = site.errors.read_text()
    assert "Traceback" not in errors
    assert len(refusals) > 15  # it was tried in many ways
    print(f"{MESSAGES} messages, {answered} answered, {len(refusals)} kinds of refusals")


def cut_short(line: Path, draw: random.Random) -> None:
    """Frames with a false length, and speakers that leave in the middle."""
    for length in (0, 5, 1 << 23, 1 << 40, (1 << 64) - 1):
        with socket.socket(socket.AF_UNIX) as speaker, suppress(OSError):
            speaker.connect(str(line))
            speaker.sendall(LENGTH.pack(length) + draw.randbytes(5))
