"""The most that one of ten clients can do to a round, and what is left of it after three honest rounds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.middleware import Guarded
from ease.federation.protocol import Capabilities, LocalJob, Middleware, Update
from ease.params import Params

CLIENTS = range(10)
CONFIG = TrainingConfig(rounds=4)


class Ten:
    """Ten clients with ten pairs each, who all move towards the same state by a tenth of the way."""

    clients = tuple(CLIENTS)
    capabilities = Capabilities()

    def __init__(self, goal: Params) -> None:
        self.goal = goal
        self.members = {client: frozenset(f"{client}-{n}" for n in range(10)) for client in CLIENTS}

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            change = (self.goal - params) * (0.1 + 0.002 * client)
            yield Update(client, 10, change, {"loss": torch.tensor((self.goal - params).norm())})


class Liar(Middleware):
    """Client 3 lies in the first round."""

    def __init__(self, inner: Ten, lie: Callable[[Update], Update]) -> None:
        super().__init__(inner)
        self.lie = lie

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in self.inner.run(params, job, clients):
            yield self.lie(update) if update.client == 3 and job.round == 1 else update


def scaled(factor: float) -> Callable[[Update], Update]:
    return lambda update: replace(update, delta=update.change * factor)


def losing(value: float) -> Callable[[Update], Update]:
    return lambda update: replace(update, values={"loss": torch.tensor(value, dtype=torch.float64)})


LIES: dict[str, tuple[Callable[[Update], Update], bool]] = {
    "reversed": (scaled(-1), False),
    "reversed, a thousand times as long": (scaled(-1000), True),
    "a thousand times as long": (scaled(1000), True),
    "not a number": (scaled(math.nan), True),
    "many pairs": (lambda update: replace(update, pairs=10**12), True),
    "negative pairs": (lambda update: replace(update, pairs=-5), True),
    "loss 1.7e308": (losing(1.7e308), True),
    "loss -1e30": (losing(-1e30), True),
    "another client": (lambda update: replace(update, client=4), True),
}
"""What is sent, and whether it shows: the record names the client as rejected or as clipped."""


@pytest.mark.parametrize("name", LIES)
def test_one_of_ten_clients_does_bounded_harm_and_is_named(toy_params, name: str) -> None:
    """Distances are relative to the honest training's. Clipped to three times the median, a reversed update takes back
    at most 3 of 9 honest ones' tenths; what is left shrinks with every honest round."""
    lie, shows = LIES[name]
    start, goal = toy_params(0.0), toy_params(1.0)
    honest = list(fedavg(start, Guarded(Ten(goal), CONFIG), CONFIG, 0, 0.07))
    sound = Guarded(Liar(Ten(goal), lie), CONFIG)
    lied = list(fedavg(start, sound, CONFIG, 0, 0.07))
    named = {**sound.left_out(), **lied[0].clipped, **lied[0].rejected}
    assert (3 in named) == shows and set(named) <= {3}
    whole = (honest[0].state - start).norm()
    after_one = (lied[0].state - honest[0].state).norm() / whole
    after_four = (lied[3].state - honest[3].state).norm() / whole
    assert after_one <= 4 / 10 + 0.05 and after_four < 0.8 * after_one + 1e-9
    assert all(each.loss is not None and math.isfinite(each.loss) for each in lied)
    assert lied[0].loss == pytest.approx(honest[0].loss, rel=1e-6)
