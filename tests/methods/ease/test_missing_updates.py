"""Updates that the server did not store: their clients repeat them, and nobody else can change what they add up to."""

from dataclasses import replace

import pytest

from ease.errors import UserError
from ease.federation.history import History
from ease.federation.protocol import Middleware
from ease.methods.base import Trained
from ease.methods.ease.contribution import contribution_of
from ease.methods.ease.missing_updates import (
    LONGEST_REPLAY,
    MissingUpdate,
    able_to_repeat,
    repeated_sum,
    sent_length,
    stale_clients,
)
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest
from ease.testing import Spy

CLIENT = ClientRequest(clients=(1,))
MISSING = [MissingUpdate(2, 1, 0.5), MissingUpdate(5, 1, -2.0), MissingUpdate(5, 3, 1.5)]


class Some(History):
    """A history in which the updates of client 1 in rounds 2 and 5, and of client 3 in round 5, were not stored."""

    def stores(self, number: int, client: int) -> bool:
        return (number, client) not in {(each.round, each.client) for each in MISSING}

    def update(self, number: int, client: int):
        assert self.stores(number, client), "it reads what is not stored"
        return super().update(number, client)


@pytest.fixture
def some(learnt) -> Trained:
    return replace(learnt.trained, history=Some(learnt.trained.history.folder))


def expected_sum(learnt) -> Params:
    total = learnt.trained.initial.zeros()
    for each in MISSING:
        total = total + each.factor * learnt.trained.history.update(each.round, each.client).change
    return total


def test_clients_repeat_their_own_rounds_and_no_others(learnt, some) -> None:
    spy = Spy(learnt.world.federation)
    total, repeated = repeated_sum(some, spy, MISSING, [1, 3])
    expected = expected_sum(learnt)
    assert (total - expected).norm() < 1e-3 * expected.norm()
    assert repeated == {1: {2, 5}, 3: {5}}
    assert [client for client, _ in spy.asked] == [1, 3]
    for client, job in spy.asked:
        own = job.own(client, learnt.world.federation.members[client])
        assert {each.round for each in own.replays} == repeated[client] and own.request == SampleRequest(ids=())


@pytest.mark.parametrize("source", ["leaving", "remaining"])
def test_a_contribution_is_the_same_with_updates_that_are_not_stored(learnt, some, source) -> None:
    """If the remaining clients report, those of client 1 are not needed."""
    spy = Spy(learnt.world.federation)
    found = contribution_of(some, CLIENT, spy, source=source)
    whole = contribution_of(learnt.trained, CLIENT, learnt.world.federation)
    assert (found.total - whole.total).norm() < 1e-3 * whole.total.norm()
    assert {client for client, _ in spy.asked} == ({1} if source == "leaving" else {3})
    assert found.replaying_clients == 1 and found.replayed_rounds == (2 if source == "leaving" else 1)


def test_a_repeated_update_is_shortened_as_it_was_in_training(learnt, some) -> None:
    """The server averaged a clipped update, and clients compute the unclipped one."""

    class Clipped(Some):
        def record(self, number: int):
            return super().record(number).model_copy(update={"clipped": {3: 0.25}})

    clipped = replace(some, history=Clipped(some.history.folder))
    one, _ = repeated_sum(clipped, learnt.world.federation, MISSING[2:], [3])
    expected = 0.25 * 1.5 * learnt.trained.history.update(5, 3).change
    assert (one - expected).norm() < 1e-3 * expected.norm()


def test_a_client_that_is_absent_is_named_with_what_else_can_be_done(learnt, some) -> None:
    gone = learnt.world.without(ClientRequest(clients=(3,))).federation
    with pytest.raises(UserError, match=r"client 3: 1 of its updates are not stored.*--method retrain") as refusal:
        repeated_sum(some, gone, MISSING, able_to_repeat(some, gone))
    assert "contribution_source=remaining" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_client_that_does_not_answer_is_named(learnt, some) -> None:
    class Silent(Middleware):
        def run(self, params, job, clients):
            return super().run(params, job, [client for client in clients if client != 3])

    with pytest.raises(UserError, match=r"client 3: it did not repeat 1 rounds .*contribution_source=remaining"):
        repeated_sum(some, Silent(learnt.world.federation), MISSING, [1, 3])


def test_no_client_can_report_more_than_a_multiple_of_its_mean_length(learnt, some) -> None:
    class Loud(Middleware):
        def run(self, params, job, clients):
            for update in super().run(params, job, clients):
                values = {n: v * 1e4 if n.endswith("scale") else v for n, v in update.values.items()}
                yield replace(update, values=values)

    total, _ = repeated_sum(some, Loud(learnt.world.federation), MISSING[2:], [3])
    assert total.norm() == pytest.approx(LONGEST_REPLAY * 1.5 * sent_length(some, 5, 3), rel=1e-3)


def test_the_length_of_an_update_that_is_not_stored_has_a_bound(learnt, some) -> None:
    history = learnt.trained.history
    assert sent_length(some, 1, 1) == pytest.approx(history.update(1, 1).change.norm(), rel=1e-5)
    assert sent_length(some, 2, 1) == pytest.approx(4 * (history.state(2) - history.state(1)).norm(), rel=1e-5)


def test_only_clients_with_all_their_pairs_can_repeat(learnt) -> None:
    """Closed requests took pairs from client 0 and all of client 3."""
    gone = (SampleRequest(ids=learnt.world.shards[0].train_ids[:5]), ClientRequest(clients=(3,)))
    federation = learnt.world.without(*gone).federation
    trained = replace(learnt.trained, gone=gone, answered=learnt.trained.final)
    assert stale_clients(trained, federation, range(1, 7)) == {0}
    assert able_to_repeat(trained, federation) == {1, 2}
    assert able_to_repeat(learnt.trained, learnt.world.federation) == {0, 1, 2, 3}
