"""Two places for the history: the same training and the same answers, and at the server no client's update.

How far the answers may differ follows from what is rounded. With u = 2^-24, half the spacing of single precision, the
state of a round is w_t = w_(t-1) + m, m its mean update, rounded twice: w_t - w_(t-1) is m up to u (|m| + |w_t|). Of it
the clients' history uses 1 + r, r being all weights of the round over those that stay; a report is rounded once, to u
times its size, at most r times the largest update. The server's history rounds each mean, with and without, and both
round what was written in the end.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.runs.histories import BASE, CLIENT, requests_of, trained_run

from ease.audit.config import AuditConfig
from ease.audit.runner import Audit
from ease.errors import UserError
from ease.federation.client_history import client_history
from ease.federation.codec import encode_state, encode_update, job_length
from ease.federation.container import content_hash
from ease.federation.history import UPDATES, History
from ease.federation.meter import Metered
from ease.federation.protocol import Federation, LocalJob, Update
from ease.methods import make_method
from ease.methods.base import Trained
from ease.methods.ease.contribution import ForgetContribution, contribution_of
from ease.methods.ease.method import Ease
from ease.methods.ease.stored_sums import OWN_UPDATES
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import answer_of, open_world, release, trained_of
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import sha256, write_json
from ease.studies.overlap import client_overlap
from ease.testing import Encoding, Spy

GROUNDS: Mapping[str, tuple[str, ...]] = {
    "all": (),
    "half": ("training.participation=0.5",),
    "uniform, cohort": ("training.weighting=uniform", "engine=vectorized"),
}
UNIT = 2.0**-24


@dataclass(frozen=True)
class Both:
    """The same configuration with the history in either place."""

    server: Run
    client: Run
    world: World

    def requests(self) -> dict[str, Request]:
        return requests_of(self.world)


@pytest.fixture(scope="module")
def both(small_config, shared_cache, tmp_path_factory) -> Callable[[str], Both]:
    """Read them; write nothing into their folders."""
    made: dict[str, Both] = {}

    def make(ground: str) -> Both:
        if ground not in made:
            settings, folder = (*BASE, *GROUNDS[ground]), tmp_path_factory.mktemp("both")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EASE_CACHE", str(shared_cache))
                world = World.open(small_config(*settings))
            runs = [
                trained_run(folder / place, small_config(*settings, f"training.history={place}"), world)
                for place in ("server", "client")
            ]
            made[ground] = Both(*runs, world)
        return made[ground]

    return make


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, by name."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def contribution(run: Run, world: World, request: Request) -> ForgetContribution:
    return contribution_of(trained_of(run), request, run.hosted(world).federation)


def largest(params: Params) -> dict[str, float]:
    return {name: float(tensor.abs().max()) for name, tensor in params.tensors.items()}


def rounding(run: Run, world: World, request: Request) -> dict[str, float]:
    """How far the two may be apart in each tensor, from the server's own history; see above."""
    history, bound = run.history, dict.fromkeys(trained_of(run).start.tensors, 0.0)
    uniform = run.config.training.weighting == "uniform"
    stays = {shard.client: int((~forget_mask(request, shard)).sum()) for shard in world.shards}
    leaving = set(request.clients) if isinstance(request, ClientRequest) else set()
    for number in range(1, history.rounds() + 1):
        pairs = history.pairs(number)
        left = {client: stays[client] for client in pairs if client not in leaving and stays[client] >= 2}
        rest = len(left) if uniform else sum(left.values())
        ratio = (len(pairs) if uniform else sum(pairs.values())) / rest if rest else 0.0
        mean, after = largest(history.moved(number)), largest(history.state(number))
        for name in bound:
            update = max(float(history.update(number, client).change[name].abs().max()) for client in pairs)
            means, reported = mean[name] + update, ratio * update
            bound[name] += (means + (1 + ratio) * (mean[name] + after[name]) + reported + 4 * update) * UNIT
    return bound


# --- training ---


@pytest.mark.parametrize("ground", GROUNDS)
def test_the_training_is_the_same_and_each_keeps_its_own(both, ground: str) -> None:
    """Every byte at the server but the updates; every client the rounds in which it took part, and no other."""
    runs = both(ground)
    one, two = files(runs.server.folder), files(runs.client.folder)
    assert {name for name in two if name.startswith("rounds/")} == {
        f"rounds/{n:05d}/{name}" for n in range(1, 6) for name in ("round.json", "state.safetensors")
    }
    same = [name for name in two if name.endswith(".safetensors")]
    assert len(same) == 7 and all(one[name] == two[name] for name in same)
    took_part: dict[int, set[int]] = {}
    for number in range(1, 6):
        mine, theirs = (run.history.record(number) for run in (runs.server, runs.client))
        own = dict.fromkeys(("sha256", "updates", "bytes_down", "sent"))  # jobs say whether to keep
        assert mine.model_copy(update=own) == theirs.model_copy(update=own)
        assert list(mine.updates) == list(mine.pairs) and theirs.updates == {}
        for client in runs.server.history.clients(number):
            took_part.setdefault(client, set()).add(number)
            memory, start = client_history(runs.client.folder / "clients", client), runs.server.history.start(number)
            name = content_hash(encode_state(start))
            assert memory.start(number, name) == start
            assert memory.change(number, name) == runs.server.history.update(number, client).change
    disks = {name for name in two if name.startswith("clients/")}
    assert disks == {
        f"clients/{client:05d}/rounds/{number:05d}/{name}"
        for client, numbers in took_part.items()
        for number in numbers
        for name in ("start.state", "change.state", "round.json")
    }
    assert not any(name.startswith("clients/") for name in one)
    if ground == "half":
        assert any(len(numbers) < 5 for numbers in took_part.values())


def test_no_value_of_an_update_is_at_the_server(both) -> None:
    """Whatever the names of files say: no tensor of any client's update is in one of the server's."""
    runs = both("all")
    theirs = [data for name, data in files(runs.client.folder).items() if not name.startswith("clients/")]
    for number, client in runs.server.history.columns(5):
        for tensor in runs.server.history.update(number, client).change.tensors.values():
            values = tensor.numpy().tobytes()
            assert not any(values in data for data in theirs)


def test_a_killed_training_continues_to_the_same_bytes(both, tmp_path, monkeypatch) -> None:
    """Killed when all clients have kept the third round and the server has not, and once while a client writes."""
    runs = both("half")
    run = Run.create(tmp_path / "run", runs.client.config)
    append = History.append

    def killed(self: History, finished, *rest):
        if finished.number == 3:
            raise KeyboardInterrupt
        return append(self, finished, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(History, "append", killed)
        list(run.train(runs.world))
    assert run.history.rounds() == 2
    kept = sorted(run.folder.glob("clients/*/rounds/00003/round.json"))
    assert kept
    kept[0].unlink()
    (kept[0].parent / "start.state").write_bytes(b"half")
    list(run.train(runs.world))
    assert files(run.folder) == files(runs.client.folder)


def test_more_rounds_later_are_the_same_as_all_at_once(both, small_config, tmp_path) -> None:
    runs = both("half")
    settings = (*BASE, *GROUNDS["half"], "training.history=client")
    trained_run(tmp_path / "run", small_config(*settings, "training.rounds=2"), runs.world)
    trained_run(tmp_path / "run", small_config(*settings), runs.world)
    assert files(tmp_path / "run") == files(runs.client.folder)


def test_a_run_does_not_change_the_place_of_its_history(both, small_config) -> None:
    with pytest.raises(UserError, match=r"training\.history is 'client' there and 'server' here"):
        Run.create(both("all").client.folder, small_config(*BASE))


# --- the contribution ---


@pytest.mark.parametrize("name", ["client", "two clients", "class", "sample"])
@pytest.mark.parametrize("ground", GROUNDS)
def test_both_histories_give_the_same_contribution_to_rounding(both, ground: str, name: str) -> None:
    runs = both(ground)
    request = runs.requests()[name]
    bound = rounding(runs.server, runs.world, request)
    one, two = (contribution(run, runs.world, request) for run in (runs.server, runs.client))
    assert (one.replayed_rounds, one.replaying_clients) == (two.replayed_rounds, two.replaying_clients)
    for tensor, most in bound.items():
        for mine, theirs in ((one.total, two.total), (one.own_updates, two.own_updates)):
            assert float((mine[tensor].double() - theirs[tensor].double()).abs().max()) <= most, tensor
    assert sum(bound.values()) < 1e-4 * sum(largest(one.total).values())  # far below what matters


def played(run: Run, world: World, request: Request) -> tuple[Params, Spy, Metered]:
    """EASE between bytes, its jobs and its costs; the states of the training are known to all."""
    trained = trained_of(run)
    spy = Spy(Encoding(run.hosted(world).federation))
    metered = Metered(spy, (trained.start,))
    *_, last = Ease().unlearn(trained, request, metered)
    assert not spy.inner.altered  # type: ignore[attr-defined]
    return last.state, spy, metered


@pytest.mark.parametrize("name", ["client", "class", "sample"])
def test_answers_are_the_same_and_reports_are_all_that_travels_more(both, name: str) -> None:
    """What rounding changes in S, three rounds of training keep small; every byte more is that of the reports."""
    runs = both("all")
    request = runs.requests()[name]
    (one, _, server), (two, spy, client) = (played(run, runs.world, request) for run in (runs.server, runs.client))
    moved = (one - trained_of(runs.server).start).norm()
    assert (one - two).norm() < 1e-4 * moved
    jobs = [(c, job.own(c, spy.members[c])) for c, job in spy.asked if job.objective == OWN_UPDATES]
    names = trained_of(runs.client).start.tensors.keys()
    reports = [update for update in spy.answers if update.values.keys() == names]
    if name == "client":
        assert [c for c, _ in jobs] == [1]
    elif name == "sample":  # one client holds them
        assert [c for c, _ in jobs] == [0]
    assert client.cost.messages - server.cost.messages == len(jobs) == len(reports)
    assert client.cost.bytes_up - server.cost.bytes_up == sum(len(encode_update(update)) for update in reports)
    assert client.cost.bytes_down - server.cost.bytes_down == sum(job_length(job) for _, job in jobs)
    assert client.cost.pairs_trained == server.cost.pairs_trained
    assert client.cost.pairs_passed == server.cost.pairs_passed
    replayed = [each for _, job in spy.asked for each in job.replays]
    assert replayed and all(isinstance(each.state, str) for each in replayed)


def test_a_report_is_one_sum_whatever_the_number_of_rounds(both) -> None:
    runs = both("all")
    _, spy, _ = played(runs.client, runs.world, CLIENT)
    start = trained_of(runs.client).start.tensors
    (report,) = (update for update in spy.answers if update.values.keys() == start.keys())
    assert report.delta is None
    assert {name: tensor.shape for name, tensor in report.values.items()} == {n: t.shape for n, t in start.items()}
    assert all(tensor.dtype == torch.float32 for tensor in report.values.values())


@pytest.mark.parametrize("name", ["client", "class", "sample"])
def test_the_server_works_without_the_clients_folders(both, tmp_path, name: str) -> None:
    """They are on other machines; all that the server learns comes as answers, and the state is byte-identical."""
    runs = both("all")
    request, folder = runs.requests()[name], Path(shutil.copytree(runs.client.folder, tmp_path / "server"))
    shutil.move(folder / "clients", tmp_path / "elsewhere")
    federation = runs.world.with_disks(tmp_path / "elsewhere").federation
    *_, apart = Ease().unlearn(trained_of(Run.load(folder)), request, Encoding(federation))
    together, _, _ = played(runs.client, runs.world, request)
    assert apart.state == together


# --- one request after another ---


def as_server(run: Run, folder: Path) -> Trained:
    """The same training as if the server had kept what the clients did: their updates copied to its history."""
    shutil.copytree(run.folder, folder)
    trained = replace(trained_of(run), history=History(folder))
    for number in range(1, run.history.rounds() + 1):
        name, content, places = content_hash(encode_state(trained.history.start(number))), b"", {}
        for client in trained.history.clients(number):
            client_history(folder / "clients", client).change(number, name).save(folder / "one.safetensors")
            data = (folder / "one.safetensors").read_bytes()
            places[str(client)] = {
                "offset": len(content), "bytes": len(data), "sha256": sha256(folder / "one.safetensors"),
            }  # fmt: skip
            content += data
        path = folder / "rounds" / f"{number:05d}" / UPDATES
        path.write_bytes(content)
        write_json(
            path.parent / "round.json", {**trained.history.record(number).model_dump(mode="json"), "updates": places}
        )
    return trained


def test_after_a_release_and_more_rounds_the_next_request_gets_the_same_job(both, small_config, tmp_path) -> None:
    """Client 1 is gone, its directions are held in two more rounds, its disk vanishes. Then others have requests.

    Rounding is of the order of 2^-24 of states, which are some ten times what was written.
    """
    runs = both("all")
    shutil.copytree(runs.client.folder, tmp_path / "run")
    run = Run.load(tmp_path / "run")
    list(forget(run, runs.world, CLIENT, Ease(), observe=False))
    release(run, "client-1")
    run = Run.create(run.folder, small_config(*BASE, "training.history=client", "training.rounds=7"))
    world = open_world(run)
    list(run.train(world))
    assert (run.folder / "rounds/00007/averaged.safetensors").is_file()
    assert not list(run.folder.glob(f"rounds/*/{UPDATES}"))
    assert not (run.folder / "clients/00001/rounds/00006").exists()
    server = as_server(run, tmp_path / "twin")
    shutil.rmtree(run.folder / "clients" / "00001")
    federation = run.hosted(world).federation
    held = {client: data.shard.train_ids for client, data in federation.data.items()}
    for request in (ClientRequest(clients=(2,)), SampleRequest(ids=held[0][:4]), ClassRequest(classes=(2,))):
        one, two = (contribution_of(each, request, federation) for each in (server, trained_of(run)))
        for mine, theirs in ((one.total, two.total), (one.own_updates, two.own_updates)):
            assert (mine - theirs).norm() < 1e-5 * mine.norm()
    list(forget(run, world, ClientRequest(clients=(2,)), Ease(), observe=False))
    assert not list(run.folder.glob("requests/*/*/journal"))


# --- refusals ---


@pytest.fixture
def copied(both, tmp_path: Path) -> Iterator[tuple[Run, World]]:
    shutil.copytree(both("all").client.folder, tmp_path / "run")
    yield Run.load(tmp_path / "run"), both("all").world


@pytest.mark.parametrize("name", ["fed_eraser", "fed_recover", "fed_recovery", "fukd", "pgd", "rollback"])
def test_methods_that_read_updates_at_the_server_are_refused(copied, name: str) -> None:
    run, world = copied
    before = files(run.folder)
    with pytest.raises(UserError, match=r'keeps updates at its clients.*--method ease, retrain .*history = "server"'):
        list(forget(run, world, CLIENT, make_method(name), observe=False))
    assert files(run.folder) == before


def test_an_overlap_of_updates_that_are_not_here_is_refused(both) -> None:
    with pytest.raises(UserError, match="keeps updates at its clients"):
        client_overlap(trained_of(both("all").client))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["client", "sample"])
def test_an_audit_does_not_depend_on_who_stores_the_history(small_config, tmp_path, name: str) -> None:
    """Shadows are the evaluator's own and the same to the byte, and so is all that answers are held against."""
    world, shadows, yardsticks = World.open(small_config(*BASE, "data.test=120")), [], []
    request = CLIENT if name == "client" else SampleRequest(ids=world.shards[0].train_ids[:8])
    for place in ("server", "client"):
        config = small_config(*BASE, "data.test=120", f"training.history={place}")
        run = trained_run(tmp_path / place, config, world)
        for method in (make_method("retrain"), Ease()):
            list(forget(run, world, request, method, observe=False))
        settings = AuditConfig(shadows=4, retrains=2, pool=32, fpr=0.1, workers=1)
        audit = Audit(run, world, answer_of(run, request, Ease()), request, Ease(), settings)
        list(audit.shadows())
        shadows.append({path.name: path.read_bytes() for path in run.folder.glob("shadows/*/*.safetensors")})
        measures = audit.judge().verdict.measures
        yardsticks.append([(each.name, each.retrain, each.before, each.band) for each in measures])
    assert len(shadows[0]) >= 4 and shadows[0] == shadows[1]
    assert yardsticks[0] and yardsticks[0] == yardsticks[1]


@pytest.mark.parametrize("name", ["retrain", "finetune", "grad_ascent"])
def test_methods_that_read_no_updates_give_the_same_bytes(both, copied, tmp_path, name: str) -> None:
    (run, world), request, method = copied, CLIENT, make_method(name)
    shutil.copytree(both("all").server.folder, tmp_path / "server")
    answers = []
    for each in (run, Run.load(tmp_path / "server")):
        list(forget(each, world, request, method, observe=False))
        answers.append(answer_of(each, request, method).model_path.read_bytes())
    assert answers[0] == answers[1]


def test_a_vanished_client_is_refused_and_leaves_the_run_as_it_was(copied) -> None:
    run, world = copied
    shutil.rmtree(run.folder / "clients" / "00001")
    before = files(run.folder)
    with pytest.raises(UserError, match=r"client 1 cannot report its updates.*--method retrain"):
        list(forget(run, world, CLIENT, Ease(), observe=False))
    assert files(run.folder) == before
    list(forget(run, world, CLIENT, Ease(contribution_source="remaining"), observe=False))
    list(forget(run, world, ClientRequest(clients=(2,)), Ease(), observe=False))  # the others lack nothing


def test_a_holder_that_lost_a_state_cannot_replay_and_is_named(copied) -> None:
    run, world = copied
    (run.folder / "clients/00000/rounds/00002/start.state").unlink()
    request = SampleRequest(ids=world.shards[0].train_ids[:5])
    with pytest.raises(UserError, match=r"00002/start\.state: missing, so client 0 cannot report its updates"):
        list(forget(run, world, request, Ease(), observe=False))


def test_clients_without_a_disk_say_so(both) -> None:
    """A world that was opened without the run's folder."""
    runs = both("all")
    with pytest.raises(UserError, match="client 1: keeps nothing of the training, and is asked about it"):
        contribution_of(trained_of(runs.client), CLIENT, runs.world.federation)


def test_a_record_contains_the_cost_of_a_report(copied) -> None:
    run, world = copied
    request = CLIENT
    list(forget(run, world, request, Ease(), observe=False))
    record = json.loads(answer_of(run, request, Ease()).record_path.read_text())
    state = trained_of(run).start
    assert record["metrics"]["cost/bytes_up"] > state.bytes  # a sum in single precision is among them


def test_the_server_remembers_norm_and_hash_of_each_update_that_it_does_not_keep(
    both: Callable[[str], Both],
) -> None:
    """With them a sum that a client reports is bounded, and an update that it sends again is recognised."""
    made = both("half")
    history, disks = made.client.history, made.client.folder / "clients"
    rounds = range(1, history.rounds() + 1)
    for number in rounds:
        for client in history.clients(number):
            start = content_hash(encode_state(history.start(number)))
            change = client_history(disks, client).change(number, start)
            assert history.sent_norm(number, client) == pytest.approx(change.norm(), rel=1e-6)
            assert history.is_sent(number, client, change) and not history.is_sent(number, client, change * 1.001)
            assert not history.is_sent(number, client + 50, change)
    client = history.clients(1)[0]
    factors = {number: 0.5 for number in rounds if client in history.clients(number)}
    most = history.longest_sum(client, factors)
    own = [
        client_history(disks, client).change(number, content_hash(encode_state(history.start(number))))
        for number in factors
    ]
    honest = own[0].map(torch.zeros_like)
    for change in own:
        honest = honest + change * 0.5
    assert most is not None and honest.norm() <= most * (1 + 1e-6) < (honest * 100).norm()
    assert made.server.history.longest_sum(client, factors) is None  # there the updates themselves are read


class Lying:
    """A federation whose clients report multiples of their sums, or also of their single updates."""

    def __init__(self, inner: Federation, factor: float, always: bool) -> None:
        self.inner, self.factor, self.always = inner, factor, always
        self.clients, self.members = inner.clients, inner.members
        self.asked: list[int] = []

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in self.inner.run(params, job, clients):
            if job.objective == OWN_UPDATES:
                self.asked.append(len(job.replays))
                factor = self.factor if len(job.replays) > 1 or self.always else 1.0
                update = replace(update, values={name: factor * tensor for name, tensor in update.values.items()})
            yield update


@pytest.mark.parametrize("factor", [100.0, -1.0, 1.01 * 2])
def test_a_false_sum_of_a_leaving_client_is_replaced_by_the_updates_that_it_sent(
    both: Callable[[str], Both], factor: float
) -> None:
    """A hundred times as long, the others would forget as well; reversed, nothing would be forgotten."""
    made = both("all")
    engine, trained = made.client.hosted(made.world).federation, trained_of(made.client)
    request, rounds = made.requests()["client"], made.client.history.rounds()
    honest = Lying(engine, 1.0, always=False)
    expected = contribution_of(trained, request, honest)
    assert honest.asked == [rounds]  # no honest sum is asked for again
    liar = Lying(engine, factor, always=False)
    found = contribution_of(trained, request, liar)
    assert liar.asked == [rounds] + [1] * rounds
    assert (found.total - expected.total).norm() <= 4 * rounds * UNIT * expected.own_updates.norm()
    with pytest.raises(UserError, match=r"client \d+: its sum of updates does not fit .* its update of round 1"):
        contribution_of(trained, request, Lying(engine, factor, always=True))
