"""Requests, cancellations, work, releases and purges in random order, in processes killed at random moments."""

import io
import os
import random
import signal
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from benchmarks.bitflips import TINY, inside
from benchmarks.kills import command, run_and_kill

from ease.operations.evidence import read_log
from ease.operations.ledger.store import Ledger
from ease.operations.purge import PLAN
from ease.requests.request import ClientRequest, SampleRequest
from ease.requests.tombstones import read_tombstones
from ease.runs.run import PURGING, Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork"),
]
WORLD = (*TINY, "partition.clients=4", "data.train=64", "data.test=12", "model.lora=off")
POLICY = ("--set", "hold.retain_points=100", "--set", "retrain.forgotten_fraction=1", "--quiet")
STEPS = 1000 if os.environ.get("EASE_SWEEP") == "all" else 40
PER_RUN = 20
"""Steps before a new run is begun: there is only so much to forget."""


class Decided:
    """What was decided of each request, beside the run."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.asked: dict[str, tuple[str, ...]] = {}
        self.cancelled: set[str] = set()
        self.direct: set[str] = set()
        """Pairs that someone forgot and released without the queue."""
        self.members = [holding.train_ids for holding in Run.load(folder / "run").known()[0].clients]  # type: ignore[index]

    def do(self, *arguments: str, kill: bool = False) -> int:
        """A command in a process of its own, perhaps killed once; its exit code."""
        after = self.draw.randrange(1, 40) if kill else None
        reported, _ = run_and_kill(self.folder, arguments, after, self.draw.random() * 0.005, False)
        assert reported.code in (0, 2, -signal.SIGKILL) and "Traceback" not in reported.said, reported.said
        return reported.code

    def ask(self) -> None:
        id, kill = f"r{len(self.asked)}", self.draw.random() < 0.3
        client = self.draw.randrange(1, 4)
        what = ("--client", str(client))
        self.asked[id] = self.members[client]
        if self.draw.random() < 0.6:
            ids = tuple(self.draw.sample(self.members[client], 2))
            (self.folder / f"{id}.txt").write_text("\n".join(ids))
            what, self.asked[id] = ("--samples", f"{id}.txt"), ids
        self.do("request", "add", "run", *what, "--id", id, "--approve", "--quiet", kill=kill)
        known = {each.id: each.state for each in Ledger(self.folder / "run").entries()}
        if id not in known:  # killed before, or all of it is gone: nobody was told that it was taken
            del self.asked[id]
        elif known[id] == "submitted":  # killed between
            self.do("request", "approve", "run", id)

    def cancel(self) -> None:
        if not self.asked:
            return
        id = self.draw.choice(sorted(self.asked))
        if self.do("request", "cancel", "run", id) == 0:
            self.cancelled.add(id)

    def release(self) -> None:
        """Forget one more pair and release that model, past the queue; the release may be killed and is run again."""
        pair = self.draw.choice(self.members[0])
        name = f"direct-{len(self.direct)}"
        (self.folder / f"{name}.txt").write_text(pair)
        if self.do("forget", "run", "--samples", f"{name}.txt", "--name", name, "--quiet"):
            return  # it is gone already, or a request in work comes first
        self.direct.add(pair)
        release = ("release", "run", "--request", name)
        if self.do(*release, kill=self.draw.random() < 0.8) == -signal.SIGKILL:
            self.do(*release)

    def check(self) -> None:
        run = Run.load(self.folder / "run", purging=True)
        entries = {each.id: each for each in Ledger(run.folder).entries()}
        assert entries.keys() == self.asked.keys()  # none is lost and none is made up
        assert {id for id, each in entries.items() if each.state == "cancelled"} == self.cancelled
        gone = run.head.gone
        assert len(set(map(repr, gone))) == len(gone)  # none is done twice
        wanted = {pair for id, ids in self.asked.items() if id not in self.cancelled for pair in ids} | self.direct
        if (run.folder / PURGING / PLAN).is_file():
            return  # half of the ids are marks
        done, stones = self.done(run), read_tombstones(run.folder)
        assert done <= wanted | set(map(stones.mark, wanted))  # none is done that was cancelled, or for anyone else

    def done(self, run: Run) -> set[str]:
        """Ids of all pairs that are gone, purged ones by their marks."""
        found = set[str]()
        for request in run.head.gone:
            if isinstance(request, ClientRequest):
                found |= {pair for client in request.clients for pair in self.members[client]}
            elif isinstance(request, SampleRequest):
                found |= set(request.ids)
        return found

    def finish(self) -> None:
        for _ in range(2):
            self.do("work", "run", *POLICY)
            self.do("purge", "run", "--quiet")
        run = Run.load(self.folder / "run")
        states = {each.id: each.state for each in Ledger(run.folder).entries()}
        assert all(states[id] in ("done", "refused") for id in self.asked if id not in self.cancelled), states
        done, stones = self.done(run), read_tombstones(run.folder)
        for id, pairs in self.asked.items():
            if states[id] == "done":  # and not only said to be
                assert all({pair, stones.mark(pair)} & done for pair in pairs), id
        if run.head.releases:
            released = [each.payload["release"] for each in read_log(run).of_kind("released")]
            assert released == list(range(1, len(run.head.releases) + 1))


@pytest.mark.parametrize("number", range(max(1, STEPS // PER_RUN)))
def test_killed_at_random_moments_nothing_is_lost_doubled_or_done_wrongly(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    settings = tuple(word for each in WORLD for word in ("--set", each))
    with inside(tmp_path), redirect_stdout(io.StringIO()):
        command("train", "--out", "run", *settings, "--quiet")
    decided = Decided(tmp_path, draw)
    for _ in range(PER_RUN):
        step = draw.random()
        if step < 0.35:
            decided.ask()
        elif step < 0.5:
            decided.cancel()
        elif step < 0.78:
            decided.do("work", "run", *POLICY, kill=draw.random() < 0.8)
        elif step < 0.9:
            decided.release()
        else:
            decided.do("purge", "run", "--quiet", kill=draw.random() < 0.8)
        if decided.asked:
            decided.check()
    decided.finish()
    decided.check()
