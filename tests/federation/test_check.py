"""Answers that must not count: each way to fail is refused by name, the round goes on, and too few answers end it."""

import math
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ease.errors import ClientError, Diverged, UserError
from ease.federation.check import Checked
from ease.federation.expected import contrasted
from ease.federation.fedavg import TrainingConfig, average
from ease.federation.middleware import Guarded
from ease.federation.protocol import Capabilities, Federation, Middleware, Replay, Update
from ease.methods.ease.replay import REPLAY
from ease.model.losses import info_nce
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest
from ease.testing import FAULTS, Faulty

TRAINING = TrainingConfig()


class Altered(Middleware):
    """Client 0 answers with something else."""

    def __init__(self, inner: Federation, change) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, params, job, clients):
        for update in self.inner.run(params, job, clients):
            yield self.change(update) if update.client == 0 else update


class Together(Middleware):
    """An engine that is asked for all clients at once."""

    capabilities = Capabilities(concurrent=True)


def changed(params: Params, name: str, change) -> Params:
    return params.replace({name: change(params[name])})


def first(update: Update) -> str:
    return next(iter(update.change.tensors))


def with_value(update: Update, name: str, value: torch.Tensor | None) -> Update:
    values = {key: each for key, each in {**update.values, name: value}.items() if each is not None}
    return replace(update, values=values)


UNSOUND = {
    "nan": (lambda u: replace(u, delta=changed(u.change, first(u), lambda t: t * math.nan)), "non-finite"),
    "infinite": (lambda u: replace(u, delta=changed(u.change, first(u), lambda t: t + math.inf)), "non-finite"),
    "shape": (lambda u: replace(u, delta=changed(u.change, first(u), lambda t: t[None])), "has shape"),
    "dtype": (lambda u: replace(u, delta=changed(u.change, first(u), torch.Tensor.double)), "has dtype"),
    "names": (lambda u: replace(u, delta=Params({"x": torch.zeros(1)}, u.change.blocks)), "tensor names"),
    "nothing": (lambda u: replace(u, delta=None), "no parameters"),
    "no loss": (lambda u: with_value(u, "loss", None), "lack 'loss'"),
    "loss": (lambda u: with_value(u, "loss", torch.tensor(math.nan)), "loss has non-finite"),
    "overflowing loss": (
        lambda u: with_value(u, "loss", torch.tensor(1.7e308, dtype=torch.float64)),
        "loss has values",
    ),
    "loss below any": (lambda u: with_value(u, "loss", torch.tensor(-1e30)), "loss has values outside of -0.001 to"),
    "loss above log batch + 2 / temperature": (
        lambda u: with_value(u, "loss", torch.tensor(1.03 * (math.log(16) + 2 / 0.07))),
        "loss has values outside of",
    ),
    "more": (lambda u: with_value(u, "more", torch.zeros(3)), "hold 'more'"),
    "many pairs": (lambda u: replace(u, pairs=10**12), r"reports 1000000000000 pairs and holds \d+"),
    "one pair more": (lambda u: replace(u, pairs=u.pairs + 1), r"reports \d+ pairs and holds \d+"),
    "negative": (lambda u: replace(u, pairs=-1), "reports -1 pairs"),
    "no number of pairs": (lambda u: replace(u, pairs=math.nan), "reports nan pairs, and a whole number"),
    "half a pair": (lambda u: replace(u, pairs=1.5), "whole number"),
    "no tensor": (lambda u: with_value(u, "loss", "low"), "its value 'loss' is not a tensor"),
    "no parameters": (lambda u: replace(u, delta=u.change.tensors), "its change is a .*, and parameters are expected"),
    "another id": (lambda u: replace(u, client=2), "answered as client 2"),
    "unknown id": (lambda u: replace(u, client=77), "answered as client 77"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_answer_is_refused_by_name_and_the_others_count(world, local_job, name: str) -> None:
    change, reason = UNSOUND[name]
    state, honest = world.server.initial(), world.federation
    sound = Guarded(Altered(honest, change), TRAINING)
    answers = list(sound.run(state, local_job(), [0, 1, 2]))
    assert answers == list(honest.run(state, local_job(), [1, 2]))
    left_out = sound.left_out()
    assert list(left_out) == [0] and not sound.left_out()
    assert re.search(reason, left_out[0])


@pytest.mark.parametrize("pairs", [2, 3, 17, 64])
def test_no_loss_of_unit_vectors_is_outside_its_range(toy_params, local_job, pairs: int) -> None:
    """The worst batch there is (every pair opposite, all others alike), the best one, and batches drawn at random."""
    job = local_job(batch_size=8, temperature=0.05)
    bound = contrasted(toy_params(), job, 0, pairs).values["loss"]
    size = max(len(part) for part in np.array_split(np.arange(pairs), job.batch_count(pairs)))
    one, draw = torch.eye(4)[:1].expand(size, 4), torch.Generator().manual_seed(pairs)
    random = [torch.randn(size, 4, generator=draw) for _ in range(2)]
    worst = one.clone()
    worst[0] = -one[0]
    for image, text in (
        (one, one),
        (one, -one),
        (one, worst),
        tuple(each / each.norm(dim=1, keepdim=True) for each in random),
    ):
        assert bound.least <= float(info_nce(image, text, job.temperature)) <= bound.most
    assert bound.most <= 1.02 * (math.log(16) + 2 / 0.05) + 1e-9


@pytest.mark.parametrize("lie", [1e5, 0.0, 6.0])
def test_one_of_ten_clients_moves_the_loss_of_a_round_no_further_than_to_an_honest_one(toy_params, lie: float) -> None:
    """Goals and stopping rest on it: with the mean, one of ten ended a recovery after two rounds instead of six."""
    honest = [1.0 + number / 10 for number in range(9)]

    def updates(reported: list[float]) -> list[Update]:
        return [Update(n, 10, toy_params(0.1), {"loss": torch.tensor(each)}) for n, each in enumerate(reported)]

    found = average(toy_params(), updates([*honest, lie]), TRAINING, 1).loss
    assert found is not None and 1.3 <= found <= 1.5  # between the neighbours of the middle one, 1.4


def test_honest_answers_pass_as_they_are(world, local_job) -> None:
    state = world.server.initial()
    for engine in (world.federation, Together(world.federation)):
        sound = Guarded(engine, TRAINING)
        assert list(sound.run(state, local_job(), [2, 0])) == list(world.federation.run(state, local_job(), [2, 0]))
        assert not sound.left_out() and sound.clients == world.federation.clients


def test_a_state_in_half_precision_is_answered_in_single(world, local_job) -> None:
    half = world.server.initial().map(torch.Tensor.half)
    sound = Guarded(world.federation, TRAINING)
    assert len(list(sound.run(half, local_job(), [0, 1]))) == 2 and not sound.left_out()


class Masked(Middleware):
    """Client 0 answers under the name of client 1, before client 1 does, and invents client 50."""

    capabilities = Capabilities(concurrent=True)

    def run(self, params, job, clients):
        for update in self.inner.run(params, job, clients):
            if update.client == 0:
                yield replace(update, client=1, delta=update.change * -100)
                yield replace(update, client=50)
            else:
                yield update


@pytest.mark.parametrize("concurrent", [False, True])
def test_no_client_can_act_for_another(world, local_job, concurrent: bool) -> None:
    engine = Masked(world.federation)
    engine.capabilities = Capabilities(concurrent=concurrent)
    sound = Guarded(engine, TRAINING)
    state = world.server.initial()
    assert list(sound.run(state, local_job(), [0, 1, 2])) == list(world.federation.run(state, local_job(), [1, 2]))
    left_out = sound.left_out()
    assert left_out[0] == "it answered as client 1" and left_out.keys() == ({0, 50} if concurrent else {0})


def test_one_that_breaks_down_once_is_asked_again(world, local_job) -> None:
    class Once(Middleware):
        failed = 0

        def run(self, params, job, clients):
            if 1 in clients and not self.failed:
                self.failed += 1
                raise ClientError("the line broke")
            return self.inner.run(params, job, clients)

    state = world.server.initial()
    whole = list(world.federation.run(state, local_job(), [0, 1, 2]))
    for concurrent in (False, True):
        engine = Once(world.federation)
        engine.capabilities = Capabilities(concurrent=concurrent)
        sound = Guarded(engine, TRAINING)
        assert list(sound.run(state, local_job(), [0, 1, 2])) == whole and not sound.left_out()


def test_one_that_always_breaks_down_is_named_with_its_error(world, local_job) -> None:
    sound = Guarded(Faulty(world.federation, "raise"), TRAINING)
    assert [each.client for each in sound.run(world.server.initial(), local_job(), [0, 1])] == [1]
    assert sound.left_out() == {0: "it failed: client 0 broke down"}


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("bug", [TypeError, RuntimeError, UserError])
def test_a_fault_of_the_program_is_blamed_on_no_client(world, local_job, concurrent: bool, bug: type) -> None:
    class Broken(Middleware):
        def run(self, params, job, clients):
            raise bug("a bug")

    engine = Broken(world.federation)
    engine.capabilities = Capabilities(concurrent=concurrent)
    for deadline in (None, 60.0):
        with pytest.raises(bug, match="a bug"):
            list(Guarded(engine, TrainingConfig(deadline=deadline)).run(world.server.initial(), local_job(), [0, 1]))


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_silent_client_holds_no_one_up(world, local_job, concurrent: bool) -> None:
    # Trained beforehand, so that a busy machine makes no one late.
    answers = {each.client: each for each in world.federation.run(world.server.initial(), local_job(), [0, 2])}

    class Silent(Middleware):
        def run(self, params, job, clients):
            for client in clients:
                if client == 1:
                    threading.Event().wait(600)
                yield answers[client]

    engine = Silent(world.federation)
    engine.capabilities = Capabilities(concurrent=concurrent)
    sound = Guarded(engine, TrainingConfig(deadline=2.0))
    assert [each.client for each in sound.run(world.server.initial(), local_job(), [0, 1, 2])] == [0, 2]
    assert sound.left_out() == {1: "it did not answer within 2 s"}


def test_a_reason_is_one_short_line(world, local_job) -> None:
    class Loud(Middleware):
        def run(self, params, job, clients):
            raise ClientError("a\n\x1b[31mb" + "c" * 1000)

    (refused,) = Checked(Loud(world.federation)).run(world.server.initial(), local_job(), [0])
    assert refused.refused.startswith("it failed: a [31mbccc") and len(refused.refused) == 300


# --- measurements and replays ---

SCORES = {
    "nan": ("forget", lambda t: t * math.nan, "forget has non-finite"),
    "fewer": ("forget", lambda t: t[1:], r"forget has shape \(\d+,\), expected \(\d+,\)"),
    "square": ("held_out", lambda t: t[None], "held_out has shape"),
    "too low": ("forget", lambda t: t - 50, "forget has values outside of -"),
    "too high": ("held_out", lambda t: t + 50, "held_out has values outside of -"),
    "missing": ("held_out", lambda t: None, "lack 'held_out'"),
}


@pytest.mark.parametrize("request_of", [ClientRequest(clients=(0,)), None], ids=["client", "sample"])
@pytest.mark.parametrize("name", SCORES)
def test_impossible_scores_are_refused(world, local_job, name: str, request_of) -> None:
    value, change, reason = SCORES[name]
    request = request_of or SampleRequest(ids=world.shards[0].train_ids[:4])
    job = local_job(objective="membership scores", request=request, temperature=0.07)
    state = world.server.initial()
    honest = list(world.federation.run(state, job, [0, 1]))
    sound = Guarded(world.federation, TRAINING)
    assert list(sound.run(state, job, [0, 1])) == honest and not sound.left_out()
    lying = Guarded(Altered(world.federation, lambda u: with_value(u, value, change(u.values[value]))), TRAINING)
    assert list(lying.run(state, job, [0, 1])) == honest[1:]
    assert re.search(reason, lying.left_out()[0])


REPLAYS = {
    "nan": (lambda name, t: t * math.nan, "non-finite"),
    "too large": (lambda name, t: t if name.endswith("scale") else t * 2, "outside of -1 to 1"),
    "negative scale": (lambda name, t: -t if name.endswith("scale") else t, "outside of 0 to inf"),
    "part": (lambda name, t: None if name.endswith("scale") else t, "lack"),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_impossible_replays_are_refused(world, local_job, name: str) -> None:
    change, reason = REPLAYS[name]
    state = world.server.initial()
    replays = (Replay(1, state, 0.5, 0), Replay(2, state, 0.5, 1))
    job = local_job(objective=REPLAY, request=ClassRequest(classes=(0,)), replays=replays)

    def altered(update: Update) -> Update:
        values = {key: change(key, value) for key, value in update.values.items()}
        return replace(update, values={key: value for key, value in values.items() if value is not None})

    honest = list(world.federation.run(state, job, [0, 1]))
    sound, lying = Guarded(world.federation, TRAINING), Guarded(Altered(world.federation, altered), TRAINING)
    assert list(sound.run(state, job, [0, 1])) == honest and not sound.left_out()
    assert list(lying.run(state, job, [0, 1])) == honest[1:]
    assert reason in lying.left_out()[0]


# --- too few ---


def test_below_the_quorum_the_error_names_clients_and_remedy(world, local_job) -> None:
    sound = Guarded(Faulty(world.federation, "raise"), TrainingConfig(quorum=0.7))
    with pytest.raises(UserError, match=r"round 4, align: 2 of 3 .* 3 are needed \(client 0: .*broke down\).*quorum"):
        list(sound.run(world.server.initial(), local_job(round=4), [0, 1, 2]))
    patient = Guarded(Faulty(world.federation, "raise"), TrainingConfig(quorum=0.6))
    assert len(list(patient.run(world.server.initial(), local_job(), [0, 1, 2]))) == 2


def test_if_every_update_is_nan_the_error_names_the_learning_rate(world, local_job) -> None:
    class Wild(Middleware):
        def run(self, params, job, clients):
            return (replace(u, delta=u.change * math.nan) for u in self.inner.run(params, job, clients))

    with pytest.raises(Diverged, match=r"round 1: every update was rejected .*lower training.learning_rate"):
        list(Guarded(Wild(world.federation), TRAINING).run(world.server.initial(), local_job(round=1), [0, 1]))


def test_nothing_bad_is_journaled_and_a_rerun_works(world, local_job, tmp_path: Path) -> None:
    state, job = world.server.initial(), local_job()
    spoilt = Guarded(Faulty(world.federation, "nan"), TrainingConfig(quorum=1.0), tmp_path)
    with pytest.raises(UserError, match="client 0"):
        list(spoilt.run(state, job, [0, 1]))
    assert [path.name for path in tmp_path.iterdir()] == ["00000-00001.update"]
    again = Guarded(world.federation, TrainingConfig(quorum=1.0), tmp_path)
    found = sorted(again.run(state, job, [0, 1]), key=lambda update: update.client)
    assert found == list(world.federation.run(state, job, [0, 1]))


def test_clients_left_out_stay_left_out_after_a_resume(world, local_job, tmp_path: Path) -> None:
    """Later answers were given to a state that was made without it."""
    state = world.server.initial()
    first = Guarded(Faulty(world.federation, "drop"), TRAINING, tmp_path)
    one = average(state, first.run(state, local_job(round=1), [0, 1, 2]), TRAINING, 1)
    next(iter(first.run(one.state, local_job(round=2), [1, 2])))
    again = Guarded(world.federation, TRAINING, tmp_path)
    assert average(state, again.run(state, local_job(round=1), [0, 1, 2]), TRAINING, 1).state == one.state
    assert again.left_out() == {0: "it did not answer"}


class Remembering(Middleware):
    """Each client does each job once."""

    def __init__(self, inner: Federation) -> None:
        super().__init__(inner)
        self.known: dict[tuple[int, int], list[Update]] = {}

    def run(self, params, job, clients):
        for client in clients:
            if (job.round, client) not in self.known:
                self.known[job.round, client] = list(self.inner.run(params, job, [client]))
            yield from self.known[job.round, client]


@pytest.fixture(scope="module")
def remembering(world) -> Remembering:
    return Remembering(world.federation)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("silence", "delay")])
def test_faults_come_as_often_as_they_are_asked_for(world, remembering, local_job, fault) -> None:
    state = world.server.initial()

    def left_out(seed: int) -> list[bool]:
        faulty = Faulty(remembering, fault, share=0.5, seed=seed)
        sound, found = Guarded(faulty, TRAINING), []
        for number in range(6):
            list(sound.run(state, local_job(round=number), [0, 1]))
            found.append(bool(sound.left_out()))
        assert faulty.spoilt >= sum(found)
        return found

    assert left_out(1) == left_out(1) and 0 < sum(left_out(1) + left_out(2) + left_out(3)) < 18
