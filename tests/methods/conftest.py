"""What tests of several methods share: a request for single pairs, a method's effect on the small run, and rounds that
were made by hand."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ease.federation.fedavg import TrainingConfig, average
from ease.federation.history import History
from ease.federation.protocol import LocalJob, Update
from ease.methods import make_method
from ease.methods.base import Trained
from ease.params import Params
from ease.requests.request import Request, SampleRequest
from ease.testing import Spy


@dataclass(frozen=True)
class Effect:
    """Levels of the named pairs and of others, in the trained state and in the method's last one."""

    before: float
    after: float
    kept_before: float
    kept_after: float


@pytest.fixture(scope="session")
def few(learnt) -> SampleRequest:
    """Six pairs each of three of the four clients."""
    return SampleRequest(ids=tuple(pair_id for shard in learnt.world.shards[:3] for pair_id in shard.train_ids[:6]))


@pytest.fixture(scope="session")
def effect(learnt) -> Callable[..., Effect]:
    """Run a method with some settings to its end; every state is finite and there are as many as it announces."""
    shards = [shard for shard in learnt.world.shards if shard.client != 1]  # the client that tests let go
    others = SampleRequest(ids=tuple(pair_id for shard in shards for pair_id in shard.train_ids[6:20]))

    def run(request: Request, name: str, *settings: str) -> Effect:
        method = make_method(name, settings)
        states = [step.state for step in method.unlearn(learnt.trained, request, learnt.world.federation)]
        assert len(states) == method.rounds(learnt.trained.training, request)
        assert all(state.is_finite() for state in states)
        final = learnt.trained.final
        before, kept_before = (learnt.level(final, each) for each in (request, others))
        return Effect(before, learnt.level(states[-1], request), kept_before, learnt.level(states[-1], others))

    return run


@pytest.fixture(scope="session")
def jobs(learnt) -> Callable[..., list[tuple[int, LocalJob]]]:
    """Run a method with some settings to its end and say which client was given which job, in order."""

    def run(request: Request, name: str, *settings: str) -> list[tuple[int, LocalJob]]:
        spy = Spy(learnt.world.federation)
        list(make_method(name, settings).unlearn(learnt.trained, request, spy))
        return spy.asked

    return run


class Scripted:
    """Clients that answer with prepared changes, and notes of what they were asked."""

    def __init__(self, changes: dict[int, Params], pairs: dict[int, int], held: dict[int, int] | None = None) -> None:
        self.changes, self.pairs, self.asked = changes, pairs, []
        self.clients = sorted(changes)
        self.members = {
            client: [f"pair-{client}-{n}" for n in range(count)] for client, count in (held or pairs).items()
        }

    def run(self, params, job, clients):
        self.asked.append((job, list(clients), params))
        yield from (Update(client, self.pairs[client], self.changes[client]) for client in clients)


@pytest.fixture
def scripted() -> type[Scripted]:
    """A federation without data: {client: change}, {client: pairs} and, where it is more, {client: pairs it holds}."""
    return Scripted


@pytest.fixture
def past(toy_params, tmp_path):
    """A history of hand-made rounds: {client: change} each, every client with as many pairs as its number + 1."""

    def make(*rounds: dict[int, Params], **settings) -> Trained:
        config = TrainingConfig(rounds=len(rounds), local_epochs=4, **settings)
        history = History(tmp_path / "history")
        state = toy_params(0.0)
        state.save(history.initial_path)
        for number, changes in enumerate(rounds, start=1):
            updates = [Update(c, c + 1, delta) for c, delta in changes.items()]
            finished = average(state, updates, config, number, clip=False)
            history.append(finished)
            state = finished.state
        return Trained(history, config, temperature=0.07, seed=0)

    return make
