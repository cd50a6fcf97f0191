"""A history of some updates: the same training in less space, the same answers where clients repeat what is missing.

How far a contribution may differ from that of the whole history follows from what is rounded. The sum that a client
reports is scaled to 1 and sent in half precision, which is off by at most 2^-12 of its largest value. Besides,
everything is added in other orders, in single and double precision, which is far less. Twice the bound holds both.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.runs.histories import BASE, CLIENT, requests_of, trained_run

from ease.errors import UserError
from ease.federation.history import UPDATES, History
from ease.federation.middleware import Guarded
from ease.federation.protocol import LocalJob, Replay
from ease.methods import METHODS, make_method
from ease.methods.base import Trained
from ease.methods.ease.contribution import ForgetContribution, contribution_of
from ease.methods.ease.method import Ease
from ease.methods.ease.replay import REPLAY, read_sum
from ease.methods.ease.stored_sums import Source
from ease.operations.purge import purge
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import open_world, release, trained_of
from ease.runs.forget import forget
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.runs.world import World
from ease.studies.overlap import client_overlap
from ease.testing import Encoding, Spy

GROUNDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one round in two": ((), ("training.history_every=2",)),
    "one in three, half of the clients a round": (("training.participation=0.5",), ("training.history_every=3",)),
    "one in two, uniform weights": (("training.weighting=uniform",), ("training.history_every=2",)),
}
EVERY = "one round in two"
HALF_STEP = 2.0**-12


@dataclass(frozen=True)
class Both:
    """The same configuration with all updates stored and with some."""

    whole: Run
    some: Run
    world: World

    def requests(self) -> dict[str, Request]:
        return requests_of(self.world)


@pytest.fixture(scope="module")
def both(small_config, shared_cache, tmp_path_factory) -> Callable[[str], Both]:
    """Read them; write nothing into their folders."""
    made: dict[str, Both] = {}

    def make(ground: str) -> Both:
        if ground not in made:
            (settings, thinned), folder = GROUNDS[ground], tmp_path_factory.mktemp("both")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EASE_CACHE", str(shared_cache))
                world = World.open(small_config(*BASE, *settings))
            whole = trained_run(folder / "whole", small_config(*BASE, *settings), world)
            some = trained_run(folder / "some", small_config(*BASE, *settings, *thinned), world)
            made[ground] = Both(whole, some, world)
        return made[ground]

    return make


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, by name."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def counts(request: Request, world: World) -> dict[int, int]:
    return {shard.client: int(forget_mask(request, shard).sum()) for shard in world.shards}


def contribution(
    trained: Trained, world: World, request: Request, source: Source = "leaving"
) -> tuple[ForgetContribution, list[tuple[int, LocalJob]]]:
    """S of a request, and which client was asked to replay what."""
    spy = Spy(Encoding(world.federation))
    found = contribution_of(trained, request, spy, source=source)
    assert not spy.inner.altered  # type: ignore[attr-defined]
    return found, [(client, job) for client, job in spy.asked if job.objective == REPLAY]


def largest(params: Params) -> dict[str, float]:
    return {name: float(tensor.abs().max()) for name, tensor in params.tensors.items()}


def rounding(runs: Both, request: Request) -> dict[str, float]:
    """How far the two may be apart in each tensor, by the updates that are not stored in one; see above."""
    history, world = runs.whole.history, runs.world
    bound = dict.fromkeys(trained_of(runs.whole).start.tensors, 1e-6)  # single precision
    uniform = runs.whole.config.training.weighting == "uniform"
    leaving = set(request.clients) if isinstance(request, ClientRequest) else set()
    goes = counts(request, world)
    for number in range(1, history.rounds() + 1):
        pairs = history.pairs(number)
        left = {c: pairs[c] - goes[c] for c in pairs if c not in leaving and pairs[c] - goes[c] >= 2}
        rest = len(left) if uniform else sum(left.values())
        for client in (each for each in pairs if not runs.some.history.stores(number, each)):
            factor = (1 if uniform else pairs[client]) / rest if rest else 0.0
            for name, most in largest(history.update(number, client).change).items():
                bound[name] += 2 * HALF_STEP * factor * most
    return bound


def assert_near(one: ForgetContribution, two: ForgetContribution, bound: Mapping[str, float]) -> None:
    for mine, theirs in ((one.total, two.total), (one.own_updates, two.own_updates)):
        for name, most in bound.items():
            assert float((mine[name].double() - theirs[name].double()).abs().max()) <= most, name


# --- training ---


@pytest.mark.parametrize("ground", GROUNDS)
def test_the_training_is_the_same_and_less_of_it_is_stored(both, ground: str) -> None:
    """Every state to the byte; of the updates those that are drawn, whole; of the others no value anywhere."""
    runs = both(ground)
    some, one, two = runs.some.history, files(runs.whole.folder), files(runs.some.folder)
    assert all(one[name] == two[name] for name in one if name.endswith(".safetensors"))
    some.verify()
    stored = 0
    for number, client in runs.whole.history.columns(5):
        change = runs.whole.history.update(number, client).change
        if some.stores(number, client):
            stored += 1
            assert some.update(number, client).change == change
        else:
            with pytest.raises(UserError, match=r"not stored: .*training\.history_every.*--method ease, retrain"):
                some.update(number, client)
            values = max(change.tensors.values(), key=lambda tensor: tensor.numel()).numpy().tobytes()
            assert not any(values in data for data in two.values())
    columns = runs.whole.history.columns(5)
    assert 0 < stored < len(columns)
    sizes = [sum(len(data) for name, data in found.items() if name.endswith(UPDATES)) for found in (one, two)]
    assert sizes[1] * len(columns) == sizes[0] * stored
    every = runs.some.config.training.history_every
    if every > 1:
        rounds = {number for number, client in columns if some.stores(number, client)}
        assert (
            rounds == set(range(1, 6, every))
            and {int(path.parent.name) for path in runs.some.folder.glob(f"rounds/*/{UPDATES}")} == rounds
        )


def test_the_identity_of_a_run_says_which_updates_are_stored(small_config) -> None:
    for every, settings in ((1, ()), (2, ("training.history_every=2",))):
        assert small_config(*settings).model_dump(mode="json")["training"]["history_every"] == every
    assert small_config("training.history_every=2").identity() != small_config().identity()


def test_a_run_does_not_change_what_it_stores(both, small_config) -> None:
    with pytest.raises(UserError, match=r"training\.history_every is 2 there and 1 here"):
        Run.create(both(EVERY).some.folder, small_config(*BASE))


@pytest.mark.parametrize("killed_at", [2, 3])
def test_a_killed_training_continues_to_the_same_bytes(both, tmp_path, monkeypatch, killed_at: int) -> None:
    """Between a round whose updates are stored and one whose are not, either way, and in the midst of it."""
    runs = both(EVERY)
    run = Run.create(tmp_path / "run", runs.some.config)
    write = History._write_tensors

    def killed(self: History, folder: Path, finished):
        if finished.number == killed_at:
            finished.state.save(folder / "state.safetensors")
            raise KeyboardInterrupt
        return write(self, folder, finished)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(History, "_write_tensors", killed)
        list(run.train(runs.world))
    assert run.history.rounds() == killed_at - 1
    list(run.train(runs.world))
    assert files(run.folder) == files(runs.some.folder)


def test_missing_stored_updates_are_damage(both, tmp_path) -> None:
    run = Run.load(Path(shutil.copytree(both(EVERY).some.folder, tmp_path / "run")))
    (run.folder / "rounds/00003" / UPDATES).unlink()
    with pytest.raises(UserError, match=r"00003.*missing from the history"):
        run.history.verify()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (('training.history="client"', "training.history_every=2"), 'training.history = "client" stores no update'),
        (('training.aggregation="median"', "training.history_every=2"), 'needs training.aggregation = "mean"'),
        (("training.history_every=0",), "history_every"),
    ],
)
def test_settings_that_cannot_work_are_refused(small_config, settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        small_config(*settings)


# --- the contribution ---


@pytest.mark.parametrize("name", ["client", "two clients", "class", "sample"])
@pytest.mark.parametrize("ground", GROUNDS)
def test_repeated_updates_equal_the_sent_ones(both, ground: str, name: str) -> None:
    runs = both(ground)
    request = runs.requests()[name]
    bound = rounding(runs, request)
    one, asked_before = contribution(trained_of(runs.whole), runs.world, request)
    two, asked = contribution(trained_of(runs.some), runs.world, request)
    assert_near(one, two, bound)
    assert sum(bound.values()) < 1e-2 * sum(largest(one.total).values())  # far below what is told apart
    # Beside replays without the pairs, whole rounds alone are repeated, and only what is not stored.
    more = asked[len(asked_before) :]
    assert all(job.request == SampleRequest(ids=()) for _, job in more)
    again = {(each.round, client) for _, job in more for each in job.replays for client in each.clients}
    assert not any(runs.some.history.stores(*each) for each in again)
    if name == "client":
        missing = [n for n, c in runs.whole.history.columns(5) if c == 1 and not runs.some.history.stores(n, c)]
        few = {n for n in missing if len(runs.whole.history.clients(n)) > 2}  # of two, either tells as much
        assert few <= {n for n, client in again if client == 1} and two.replayed_rounds == len({n for n, _ in again})
        assert two.replaying_clients == len({client for _, client in again})
    if name == "class" and all(counts(request, runs.world).values()):
        assert not more  # all replay without the pairs, and nothing else is needed
    if name == "sample":
        assert {client for client, _ in more} <= {0} or ground != EVERY


@pytest.mark.parametrize("name", ["client", "class"])
def test_answers_are_the_same(both, name: str) -> None:
    """What rounding changes in S, recovery keeps small."""
    runs = both(EVERY)
    request = runs.requests()[name]
    (*_, one), (*_, two) = (
        Ease().unlearn(trained_of(run), request, runs.world.federation) for run in (runs.whole, runs.some)
    )
    assert (one.state - two.state).norm() < 4 * HALF_STEP * (one.state - trained_of(runs.whole).start).norm()


# --- clients that are gone ---


@pytest.mark.parametrize("source", ["leaving", "remaining"])
def test_the_others_repeat_rounds_of_an_absent_leaving_client(both, source: Source) -> None:
    """Its updates are stored in rounds 1, 3 and 5 only. If another client is gone too, it is named."""
    runs = both(EVERY)
    one, _ = contribution(trained_of(runs.whole), runs.world, CLIENT)
    two, asked = contribution(trained_of(runs.some), runs.world.without(CLIENT), CLIENT, source)
    assert {client for client, _ in asked} == {0, 2, 3}
    assert_near(one, two, rounding(runs, CLIENT))
    both_gone = runs.world.without(CLIENT, ClientRequest(clients=(3,)))
    said = r"client 3: 2 of its updates are not stored .*contribution_source=remaining, or use --method retrain"
    with pytest.raises(UserError, match=said):
        contribution(trained_of(runs.some), both_gone, CLIENT, source)


def test_a_leaving_client_that_fails_is_named_with_what_else_can_be_done(both) -> None:
    runs = both(EVERY)

    class Silent(Spy):
        def run(self, params, job, clients):
            yield from super().run(params, job, [c for c in clients if job.objective != REPLAY])

    sound = Guarded(Silent(runs.world.federation), runs.some.config.training)
    said = r"client 1: it did not answer.*contribution_source=remaining"
    with pytest.raises(UserError, match=said) as refusal:
        contribution_of(trained_of(runs.some), CLIENT, sound)
    assert "\n" not in str(refusal.value)


# --- everyone else who reads updates ---

READERS = sorted(name for name, kind in METHODS.items() if "history" in kind.needs and "fedavg" in kind.trainers)


@pytest.mark.parametrize("name", READERS)
def test_methods_that_read_all_updates_are_refused_at_once(both, tmp_path, name: str) -> None:
    runs = both(EVERY)
    if name == "ease":
        make_method(name).check(runs.some.config.training)
        return
    run = Run.load(Path(shutil.copytree(runs.some.folder, tmp_path / "run")))
    with pytest.raises(UserError, match=rf"{name}: this run stores only some.*--method ease, retrain.*it at 1"):
        list(forget(run, runs.world, CLIENT, make_method(name)))
    assert not (run.folder / "requests").exists()


def test_the_overlap_is_of_what_is_stored(both) -> None:
    runs = both(EVERY)
    for block in client_overlap(trained_of(runs.some)):
        assert block.clients == (0, 1, 2, 3) and len(block.cosines[0][0]) == 3  # rounds 1, 3 and 5


# --- one request after another, and purges ---


def closed(run: Run, world: World, tmp_path: Path, request: Request = CLIENT) -> Run:
    copy = Run.load(Path(shutil.copytree(run.folder, tmp_path / run.folder.name)))
    list(forget(copy, world, request, Ease(), observe=False))
    release(copy, request_id(request))
    return copy


@pytest.mark.parametrize(("name", "repeat"), [("client", {0, 2, 3}), ("sample", {1, 2, 3})])
def test_after_a_release_those_with_all_their_pairs_repeat_what_is_not_stored(both, tmp_path, name, repeat) -> None:
    """One client is gone, or no longer has the pairs it had. Nobody can tell what it added to the means of rounds that
    are not stored, so the others repeat them."""
    runs = both(EVERY)
    first, request = runs.requests()[name], ClientRequest(clients=(2,))
    whole, some = (closed(run, runs.world, tmp_path, first) for run in (runs.whole, runs.some))
    world = open_world(some)
    one, _ = contribution(trained_of(whole), world, request)
    # What the client reported after the first request is the same to rounding; here it is to be the same.
    two, asked = contribution(replace(trained_of(some), base=trained_of(whole).base), world, request)
    rounds = {(each.round, client) for _, job in asked for each in job.replays for client in each.clients}
    assert rounds == {(number, client) for number in (2, 4) for client in repeat}
    assert (two.total - one.total).norm() < 2e-3 * one.total.norm()


def test_with_all_reports_no_stored_update_is_needed(both, tmp_path) -> None:
    """A class is gone that everyone had pairs of: no stored update is of use any more, and none is missed."""
    runs = both(EVERY)
    first = ClassRequest(classes=(2,))
    assert all(counts(first, runs.world).values())
    whole, some = (closed(run, runs.world, tmp_path, first) for run in (runs.whole, runs.some))
    world = open_world(some)
    for request in (ClientRequest(clients=(2,)), ClassRequest(classes=(0,))):
        one, before = contribution(trained_of(whole), world, request)
        two, asked = contribution(replace(trained_of(some), base=trained_of(whole).base), world, request)
        assert (one.total, one.own_updates) == (two.total, two.own_updates) and asked == before


@pytest.mark.parametrize("first", ["client", "sample"])
@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.slow
def test_after_a_purge_every_round_is_the_mean_of_what_its_clients_send(
    both, tmp_path, ground: str, first: str
) -> None:
    """Of what is stored and, where it is not, of what they repeat from the state that the round has now, to the
    rounding of half precision: so the next request goes by what was really averaged."""
    runs = both(ground)
    run = closed(runs.some, runs.world, tmp_path, runs.requests()[first])
    assert len(list(purge(run.folder))) == 1
    history, world, nothing = run.history, open_world(run), SampleRequest(ids=())
    trained = trained_of(run)
    history.verify()
    for number in range(1, 6):
        pairs, changes = history.pairs(number), {}
        assert pairs.keys() == runs.some.history.pairs(number).keys() - ({1} if first == "client" else set())
        stored = set(history.record(number).updates)
        assert stored == {client for client in pairs if history.stores(number, client)}
        for client in pairs:
            if client in stored:
                changes[client] = history.update(number, client).change
                continue
            replays = (Replay(number, history.start(number), 1.0, 0, (client,)),)
            job = trained.training_job(0, request=nothing, objective=REPLAY, replays=replays)
            (answer,) = world.federation.run(trained.start, job, [client])
            change = read_sum(answer.values, 0, trained.start)
            assert change is not None
            changes[client] = change
        weights = {client: run.config.training.weight(count) for client, count in pairs.items()}
        for name, moved in history.moved(number).tensors.items():
            mean = sum(weights[c] * changes[c][name].double() for c in pairs) / sum(weights.values())
            most = max(float(change[name].abs().max()) for change in changes.values())
            assert float((mean - moved).abs().max()) <= 4 * HALF_STEP * most
    # Nothing changes before the pairs were first there.
    concerned = 1 if first == "client" else 0
    begun = min(n for n in range(1, 6) if concerned in runs.some.history.clients(n))
    assert all(history.state(n) == runs.some.history.state(n) for n in range(1, begun))
    found, asked = contribution(trained, world, ClientRequest(clients=(2,)))
    assert found.total.norm() > 0 and bool(asked) == bool(found.replaying_clients)
