"""The queue from end to end: what a request touches, each one answered from the head, released and closed once."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmarks.bitflips import command, end_after

from ease.commands.train import train_run
from ease.operations.evidence.keys import new_key, read_signing_key
from ease.operations.ledger.database import writing
from ease.operations.ledger.records import Event, RequestPlan
from ease.operations.ledger.steps import link
from ease.operations.ledger.store import Ledger
from ease.params import Params
from ease.requests.request import (
    ClassRequest,
    ClientRequest,
    SampleRequest,
    combined,
    forget_mask,
    remaining,
    without,
)
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets
from ease.runs.run import Run


@pytest.fixture(scope="module")
def kept(small, shared_cache, tmp_path_factory) -> Path:
    """A small finished run; the bound on retained recall is lifted, for two rounds teach next to nothing, and so is the
    one from which all is trained from the start, for each client holds a quarter."""
    folder = tmp_path_factory.mktemp("queue") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        train_run(load_config(None, (*small, "partition.clients=4")), folder, quiet=True)
    (folder / "policy.toml").write_text("[hold]\nretain_points = 100\n[retrain]\nforgotten_fraction = 1\n")
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


def run_json(ease, *arguments: object, code: int = 0) -> dict:
    result = ease(*arguments, "--json")
    assert result.code == code, result.err
    return json.loads(result.out)


def add(ease, run: Path, *options: object, id: str, approve: bool = True) -> dict:
    return run_json(ease, "request", "add", run, *options, "--id", id, *(["--approve"] if approve else []))


def ids_of(run: Path, client: int, count: int | None = None) -> list[str]:
    membership, _ = Run.load(run).known() or pytest.fail("no membership")
    return list(membership.clients[client].train_ids[:count])


def listed(tmp_path: Path, ids: list[str]) -> Path:
    path = tmp_path / f"ids-{len(list(tmp_path.iterdir()))}.txt"
    path.write_text("\n".join(ids))
    return path


def states(run: Path) -> dict[str, str]:
    return {entry.id: entry.state for entry in Ledger(run).entries()}


# --- before anything is computed ---


def test_show_says_what_a_request_touches(ease, run: Path, tmp_path: Path) -> None:
    ids = [*ids_of(run, 0, 2), *ids_of(run, 3, 3)]
    add(ease, run, "--samples", listed(tmp_path, ids), id="s", approve=False)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if "ledger" not in path.name}
    shown = run_json(ease, "request", "show", run, "s")
    touches = shown["impact"]
    total = sum(len(holding.train_ids) for holding in Run.load(run).known()[0].clients)
    assert (touches["named"], touches["already_forgotten"], touches["remaining"]) == (5, 0, total)
    assert touches["clients"] == {"0": 2, "3": 3} and touches["rounds"] == [1, 2]
    assert touches["models"] == ["trained, round 2"] and touches["seconds"] > 0
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if "ledger" not in path.name}
    assert shown["state"] == "submitted" and [each["after"] for each in shown["events"]] == ["submitted"]
    assert ease("request", "show", run, "s").code == 0 and ease("request", "list", run).code == 0


def test_expected_cost_is_rounds_times_the_measured_seconds_of_one(ease, run: Path) -> None:
    for number, time in enumerate((100.0, 104.0), start=1):
        os.utime(run / "rounds" / f"{number:05d}" / "round.json", (time, time))
    shown = add(ease, run, "--client", 1, id="c", approve=False)
    # One round of recovery, at 4 s; retraining takes two rounds.
    assert shown["impact"]["seconds"] == 4.0 and shown["impact"]["cost_fraction"] == 0.5


def test_impossible_requests_are_refused_at_once(ease, run: Path, tmp_path: Path) -> None:
    for options, said in (
        (("--client", 9), "client 9"),
        (("--samples", listed(tmp_path, ["nobody"])), "nobody"),
        (("--client", 0, "--client", 1, "--client", 2, "--client", 3), "all training data"),
        (("--client", 1, "--due", "soon"), "--due"),
        ((), "name what to forget"),
    ):
        result = ease("request", "add", run, *options)
        assert result.code == 2 and said in result.err and "Traceback" not in result.err
    assert not Ledger(run).exists or not Ledger(run).entries()
    result = ease("request", "show", run, "nothing")
    assert result.code == 2 and "no such request" in result.err


def test_only_approved_requests_are_worked_on(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="c", approve=False)
    assert run_json(ease, "work", run)["finished"] == [] and states(run) == {"c": "submitted"}
    run_json(ease, "request", "cancel", run, "c", "--reason", "a mistake")
    assert ease("request", "approve", run, "c").code == 2 and states(run) == {"c": "cancelled"}


# --- a chain of releases ---


def test_each_request_is_released_before_the_next_begins(ease, run: Path, tmp_path: Path) -> None:
    add(ease, run, "--samples", listed(tmp_path, ids_of(run, 0, 3)), id="pairs")
    add(ease, run, "--client", 1, id="client")
    add(ease, run, "--class", 0, id="class", approve=True)
    finished = run_json(ease, "work", run)["finished"]
    assert [(each["ids"], each["state"], each["outcome"]["release"]) for each in finished] == [
        (["pairs"], "done", 1),
        (["client"], "done", 2),
        (["class"], "done", 3),
    ]
    loaded = Run.load(run)
    head = loaded.head
    assert [type(request) for request in head.gone] == [SampleRequest, ClientRequest, ClassRequest]
    records = [json.loads((run / "requests" / each.answer / "record.json").read_text()) for each in head.releases]
    assert [record["trained_sha256"] for record in records[1:]] == [each.model_sha256 for each in head.releases[:-1]]
    assert trained_of(loaded).start.tensors.keys() == Params.load(loaded.model_path(head.releases[-1])).tensors.keys()
    steps = [(each.request, each.after) for each in Ledger(run).events() if each.after in ("running", "done")]
    assert steps == [(id, state) for id in ("pairs", "client", "class") for state in ("running", "done")]
    assert run_json(ease, "work", run)["finished"] == []  # nothing is done twice


def test_overlapping_requests_have_clear_ends(ease, run: Path, tmp_path: Path) -> None:
    """The same client twice, pairs of a client that left, and a client some of whose pairs went before."""
    own = ids_of(run, 1, 2)
    add(ease, run, "--client", 1, id="first")
    add(ease, run, "--client", 1, id="again")
    add(ease, run, "--samples", listed(tmp_path, own), id="inside")
    add(ease, run, "--samples", listed(tmp_path, [*own, *ids_of(run, 2, 2)]), id="partly")
    add(ease, run, "--client", 1, "--client", 3, id="both")
    finished = {each["ids"][0]: each for each in run_json(ease, "work", run)["finished"]}
    assert {id: each["state"] for id, each in finished.items()} == dict.fromkeys(finished, "done")
    for id in ("again", "inside"):
        assert "nothing left to forget" in finished[id]["why"] and finished[id]["outcome"]["answer"] is None
    gone = Run.load(run).head.gone
    assert gone == (
        ClientRequest(clients=(1,)),
        SampleRequest(ids=tuple(sorted(ids_of(run, 2, 2)))),
        ClientRequest(clients=(3,)),
    )
    assert [shard.client for shard in open_world(Run.load(run)).shards] == [0, 2]


def test_requests_that_became_impossible_are_refused_with_their_reason(ease, run: Path) -> None:
    add(ease, run, "--client", 0, "--client", 1, "--client", 2, id="most")
    add(ease, run, "--client", 3, id="rest")
    finished = run_json(ease, "work", run)["finished"]
    assert [each["state"] for each in finished] == ["done", "refused"] and "delete the run" in finished[1]["why"]
    assert Ledger(run).events("rest")[-1].after == "refused"


def test_one_excision_answers_requests_of_all_kinds(ease, run: Path, tmp_path: Path) -> None:
    single = ids_of(run, 0, 2)
    add(ease, run, "--client", 1, id="a")
    add(ease, run, "--samples", listed(tmp_path, single), id="s")
    add(ease, run, "--client", 2, id="b")
    finished = run_json(ease, "work", run, "--together")["finished"]
    assert [each["ids"] for each in finished] == [["a", "s", "b"]]
    (gone,) = Run.load(run).head.gone
    assert isinstance(gone, SampleRequest) and gone.clients == (1, 2) and gone.singles == 2
    assert set(gone.ids) == {*single, *ids_of(run, 1), *ids_of(run, 2)}
    assert Ledger(run).entry("a").outcome == Ledger(run).entry("b").outcome


def test_leaving_clients_stay_leaving_clients_in_a_batch(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="a")
    add(ease, run, "--client", 2, id="b")
    assert [each["ids"] for each in run_json(ease, "work", run, "--together")["finished"]] == [["a", "b"]]
    assert Run.load(run).head.gone == (ClientRequest(clients=(1, 2)),)


def test_a_batch_that_would_remove_all_clients_runs_one_by_one(ease, run: Path) -> None:
    for client in range(4):
        add(ease, run, "--client", client, id=f"c{client}")
    run_json(ease, "work", run, "--together", code=4)
    assert states(run)["c0"] == "done" and Run.load(run).head.gone[0] == ClientRequest(clients=(0,))


@pytest.fixture
def perfect_before(monkeypatch) -> None:
    """The model before each request found every retained pair: whatever follows falls short of it."""
    monkeypatch.setattr("ease.operations.ledger.work.measure", lambda *_: {"retain/recall@1": 100.0})


def test_a_model_that_costs_too_much_is_held_for_a_person(ease, run: Path, perfect_before) -> None:
    add(ease, run, "--client", 1, id="c")
    (run / "policy.toml").unlink()
    finished = run_json(ease, "work", run, "--set", "hold.retain_points=0", code=4)["finished"]
    fell = 100 - finished[0]["outcome"]["retain_after"]
    assert f"fell by {fell:.1f} points" in finished[0]["why"]
    assert finished[0]["state"] == "held" and not Run.load(run).head.gone
    assert run_json(ease, "work", run, "--set", "hold.retain_points=0")["finished"] == []  # it waits for a person
    model = run / "requests" / "client-1" / "ease" / "model.safetensors"
    written = model.stat().st_mtime_ns
    run_json(ease, "request", "approve", run, "c", "--by", "bo")
    finished = run_json(ease, "work", run, "--set", "hold.retain_points=0")["finished"]
    assert finished[0]["state"] == "done" and model.stat().st_mtime_ns == written
    assert Run.load(run).head.gone == (ClientRequest(clients=(1,)),)


def test_a_held_model_that_others_overtook_is_made_again_from_the_head(ease, run: Path, perfect_before) -> None:
    add(ease, run, "--client", 1, id="held")
    run_json(ease, "work", run, "--set", "hold.retain_points=0", code=4)
    add(ease, run, "--client", 2, id="other")
    assert run_json(ease, "work", run, "--set", "hold.retain_points=100")["finished"][0]["state"] == "done"
    run_json(ease, "request", "approve", run, "held")
    finished = run_json(ease, "work", run, "--set", "hold.retain_points=100")["finished"]
    assert finished[0]["state"] == "done"
    record = json.loads((run / "requests" / "client-1" / "ease" / "record.json").read_text())
    assert record["trained_sha256"] == Run.load(run).head.releases[0].model_sha256


def test_missing_clients_leave_a_request_pending_and_the_next_call_continues(ease, run: Path, monkeypatch) -> None:
    import ease.operations.ledger.work as module
    from ease.errors import UserError

    add(ease, run, "--client", 1, id="c")
    whole = module.forget

    def silent(*arguments, **more):
        raise UserError("round 1, align: 1 of 3 clients gave a sound answer and 2 are needed")

    monkeypatch.setattr(module, "forget", silent)
    finished = run_json(ease, "work", run, code=4)["finished"]
    assert finished[0]["state"] == "pending" and "2 are needed" in finished[0]["why"]
    monkeypatch.setattr(module, "forget", whole)
    assert run_json(ease, "work", run)["finished"][0]["state"] == "done"
    assert [each.after for each in Ledger(run).events("c")][-3:] == ["pending", "running", "done"]


def test_while_another_command_holds_the_run_a_request_is_given_back(ease, run: Path) -> None:
    add(ease, run, "--client", 1, id="c")
    with Run.load(run).locked():
        result = ease("work", run)
    assert result.code == 2 and "another process" in result.err and states(run) == {"c": "approved"}
    assert run_json(ease, "work", run)["finished"][0]["state"] == "done"


# --- several processes ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork")
def test_two_workers_do_each_request_once(ease, run: Path, tmp_path: Path) -> None:
    for client in (1, 2):
        add(ease, run, "--client", client, id=f"c{client}")
    workers = {}
    for number in range(2):
        said = (tmp_path / f"said-{number}").open("w+")
        worker = os.fork()
        if worker == 0:
            end_after(lambda: command("work", str(run), "--json", "--quiet"), tmp_path, said.fileno())
        workers[worker] = said
    done = []
    for worker, said in workers.items():
        _, status = os.waitpid(worker, 0)
        with said:
            said.seek(0)
            out = said.read()
        assert os.waitstatus_to_exitcode(status) == 0, out
        done += [each["ids"][0] for each in json.loads(out)["finished"]]
    assert sorted(done) == ["c1", "c2"] and len(Run.load(run).head.releases) == 2
    assert [each.after for each in Ledger(run).events() if each.after == "running"] == ["running"] * 2


# --- requests as values ---


def test_combined_and_remaining_name_what_masks_say(world) -> None:
    shards, members = world.shards, world.server.membership
    clients, classes = ClientRequest(clients=(0,)), ClassRequest(classes=(1,), text="a")
    ids = SampleRequest(ids=shards[1].train_ids[:3])
    held = members.clients
    assert combined([clients, ClientRequest(clients=(2, 0))], held) == ClientRequest(clients=(0, 2))
    assert combined([classes, ClassRequest(classes=(0,), text="b")], held) == ClassRequest(classes=(0, 1), text="a, b")
    assert combined([ids, SampleRequest(ids=("x",))], held).ids == tuple(sorted({*ids.ids, "x"}))
    mixed = combined([clients, classes, ids], held)
    for shard in shards:
        masks = [forget_mask(each, shard) for each in (clients, classes, ids)]
        assert (forget_mask(mixed, shard) == np.any(masks, axis=0)).all()
    for request in (ClientRequest(clients=(0, 1)), ClassRequest(classes=(0, 1)), SampleRequest(ids=(*ids.ids, "z"))):
        for gone in ([], [clients], [classes], [ids, clients]):
            left = remaining(request, members.clients, gone)
            here = without(shards, gone)
            assert sum(forget_mask(left, shard).sum() for shard in here) == sum(
                forget_mask(request, shard).sum() for shard in here
            )
            if isinstance(left, SampleRequest):
                assert set(left.ids) - {"z"} <= {each for shard in here for each in shard.train_ids}


def test_a_client_in_a_mixed_request_withdraws_as_a_single_one(world) -> None:
    mixed = combined([ClientRequest(clients=(0,)), ClassRequest(classes=(1,))], world.server.membership.clients)
    left = without(world.shards, [mixed])
    assert [shard.client for shard in left] == [shard.client for shard in world.shards if shard.client != 0]
    assert all(1 not in shard.train_classes for shard in left)
    kept = world.evaluator.classes_of(evaluation_sets(world, mixed)["test"])
    assert 1 not in kept and len(kept) == (world.evaluator.classes_of(world.evaluator.test) != 1).sum()


# --- a ledger that someone rewrote, digests included ---


def rewritten(run: Path, id: str, **changes: object) -> None:
    entry = Ledger(run).entry(id)
    with writing(Ledger(run).path) as tables:
        tables.write(entry.number, entry.model_copy(update=changes))


def test_a_request_that_was_exchanged_for_another_client_is_not_carried_out(ease, run: Path) -> None:
    """Digests of rows can be computed by anyone; the chain of steps holds what was handed in."""
    add(ease, run, "--client", 2, id="r")
    rewritten(run, "r", request=ClientRequest(clients=(3,)))
    stopped = ease("work", run)
    assert stopped.code == 2 and "what was handed in" in " ".join(stopped.err.split())
    assert not Run.load(run).head.gone and states(run) == {"r": "approved"}


def test_a_signed_approval_cannot_be_replayed_for_another_request(ease, run: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "ada.key")
    key = read_signing_key(tmp_path / "ada.key")
    add(ease, run, "--client", 1, id="a", approve=False)
    add(ease, run, "--client", 2, id="b", approve=False)
    Ledger(run).approve("a", "ada", key)
    signed = Ledger(run).events("a")[-1]
    rewritten(run, "b", state="approved", approved_by=("ada",))
    with writing(Ledger(run).path) as tables:
        last = tables.last(Event)
        assert last is not None
        tables.write(4, signed.model_copy(update={"request": "b", "previous": link(last)}))
    stopped = ease("work", run)
    assert stopped.code == 2 and "step 4 (b): its signature does not hold" in " ".join(stopped.err.split())
    assert not Run.load(run).head.gone


@pytest.mark.parametrize(
    ("policy", "missing"), [("signed = true", "1 signed approvals"), ("people = 2", "2 approvals")]
)
def test_requests_without_the_required_approvals_are_held(ease, run: Path, policy: str, missing: str) -> None:
    """The command asks for signatures and people; a row that was written past it has neither."""
    add(ease, run, "--client", 2, id="r")
    with (run / "policy.toml").open("a") as file:
        file.write(f"[approval]\n{policy}\n")
    (finished,) = run_json(ease, "work", run, code=4)["finished"]
    assert finished["state"] == "held" and missing in finished["why"]
    assert not Run.load(run).head.gone and run_json(ease, "work", run)["finished"] == []


def test_a_plan_for_another_client_is_dropped(ease, run: Path) -> None:
    """No step holds a plan. A process that died after it wrote one is continued with it."""
    add(ease, run, "--client", 2, id="r")
    ledger = Ledger(run)
    ledger.claim("worker", together=False)
    ledger.plan(["r"], RequestPlan(request=ClientRequest(clients=(3,)), method={"method": "ease"}))
    (finished,) = run_json(ease, "work", run, code=4)["finished"]
    assert finished["state"] == "pending" and "names 14 pairs or clients" in finished["why"]
    assert run_json(ease, "work", run)["finished"][0]["state"] == "done"
    assert Run.load(run).head.gone == (ClientRequest(clients=(2,)),)
