"""FedRecover: when clients are asked, and what their updates are guessed to be."""

import pytest
import torch

from ease.errors import UserError
from ease.federation.fedavg import TrainingConfig, average
from ease.federation.history import History
from ease.federation.protocol import Middleware, Update
from ease.methods import make_method
from ease.methods.base import Trained
from ease.methods.fed_recover import Limits, estimate
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest

CLIENT = ClientRequest(clients=(2,))
NAME = "text.projector.0.weight"
RATE = 0.1
CURVATURE = {0: 0.2, 1: 0.5, 2: 0.9}
OPTIMUM = {0: 1.0, 1: -1.0, 2: 2.0}


class Quadratics:
    """Clients whose loss is curvature / 2 · |w - optimum|² and who take one gradient step: no estimate can be wrong."""

    clients = (0, 1, 2)

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    def run(self, params: Params, job, clients):
        self.asked.append((job.round, list(clients)))
        for client in clients:
            step = params.map(lambda t, c=client: -RATE * CURVATURE[c] * (t - OPTIMUM[c]))
            yield Update(client, 5, step)


def train(federation, start: Params, folder, rounds: int, clients) -> tuple[Trained, Params]:
    config = TrainingConfig(rounds=rounds)
    history = History(folder)
    start.save(history.initial_path)
    state = start
    for number in range(1, rounds + 1):
        finished = average(state, federation.run(state, config.job(number, 0, 0.07), clients), config, number)
        history.append(finished)
        state = finished.state
    return Trained(history, config, temperature=0.07, seed=0), state


def test_on_quadratic_losses_it_is_retraining(toy_params, tmp_path) -> None:
    """A secant of a quadratic is its Hessian along the move, so every estimate is what the client would have sent.

    All curvatures are multiples of the identity: the L-BFGS matrix is exact everywhere. Up to the damping of 0.001 the
    result must be that of training without client 2, though clients are asked in 4 of 12 rounds.
    """
    start = toy_params(seed=3)
    trained, with_all = train(Quadratics(), start, tmp_path / "all", 12, (0, 1, 2))
    _, without = train(Quadratics(), start, tmp_path / "without", 12, (0, 1))
    federation = Quadratics()
    *_, last = make_method("fed_recover", ("tolerance=0",)).unlearn(trained, CLIENT, federation)
    assert [number for number, clients in federation.asked if clients] == [1, 2, 3, 12]
    assert (last.state - without).norm() < 0.01 * (with_all - without).norm()


def test_the_schedule(toy_params, tmp_path) -> None:
    """Warm-up of 3, then every 4th round, and the last 2 of 14: rounds 1-3, 7, 11, 13, 14."""
    trained, _ = train(Quadratics(), toy_params(seed=3), tmp_path / "all", 14, (0, 1, 2))
    method = make_method("fed_recover", ("correction_interval=4", "final_rounds=2", "tolerance=0"))
    federation = Quadratics()
    steps = list(method.unlearn(trained, CLIENT, federation))
    assert [number for number, clients in federation.asked if clients == [0, 1]] == [1, 2, 3, 7, 11, 13, 14]
    phases = ["warm-up"] * 3 + ["estimation"] * 3 + ["correction"] + ["estimation"] * 3 + ["correction"]
    assert [step.phase for step in steps] == [*phases, "estimation", "final tuning", "final tuning"]


def test_an_abnormal_client_is_corrected_by_itself(toy_params, tmp_path) -> None:
    """From -3 the first steps are 0.1 · 0.2 · 4 = 0.08 for client 0 and 0.1 · 0.5 · 2 = 0.1 for client 1.

    Under a tolerance of 90 % the smaller one is the limit. Both steps shrink on the way: the recovered state is -2.74
    after 3 rounds and -2.66 after 4, where client 1 still steps by 0.087 and 0.083, and client 0 by less than 0.08.
    """
    trained, _ = train(Quadratics(), toy_params(-3.0), tmp_path / "all", 6, (0, 1, 2))
    federation = Quadratics()
    steps = list(make_method("fed_recover", ("tolerance=0.9",)).unlearn(trained, CLIENT, federation))
    assert [clients for number, clients in federation.asked if number in (4, 5)] == [[1], [1]]
    assert [step.notes["asked"] for step in steps if step.phase == "estimation"] == [[1], [1]]


def test_without_curvature_a_client_keeps_its_stored_update(toy_params, tmp_path) -> None:
    """Clients whose answers never depend on the state give no secant; the replay is then the plain mean of the others.

    Each round adds (1 + 2) / 2 = 1.5 to every value, and 5 rounds make 7.5.
    """

    class Constant(Quadratics):
        def run(self, params, job, clients):
            yield from (Update(client, 5, params.zeros().map(lambda t, c=client: t + c + 1)) for client in clients)

    trained, _ = train(Constant(), toy_params(0.0), tmp_path / "all", 5, (0, 1, 2))
    *_, last = make_method("fed_recover").unlearn(trained, CLIENT, Constant())
    torch.testing.assert_close(last.state[NAME], torch.full((1, 3), 7.5))


def test_estimates_by_hand(toy_params) -> None:
    """Stored 1 in all six values, correction 0.25: the estimate is 0.75. Its length is 0.75 · sqrt(6)."""
    one, quarter = toy_params(1.0), toy_params(0.25).map(torch.Tensor.double)
    fine = estimate(one, quarter, Limits(value=1.0, norm=one.norm()))
    assert fine is not None and fine[NAME].dtype == one[NAME].dtype
    torch.testing.assert_close(fine[NAME], torch.full((1, 3), 0.75))
    short = estimate(one, quarter, Limits(value=1.0, norm=one.norm() / 4))  # twice a quarter of sqrt(6) is allowed
    assert short is not None
    torch.testing.assert_close(short[NAME], torch.full((1, 3), 0.5))


def test_an_abnormal_estimate_is_none(toy_params) -> None:
    """1.25 where no stored value exceeded 1.2."""
    correction = toy_params(-0.25).map(torch.Tensor.double)
    assert estimate(toy_params(1.0), correction, Limits(value=1.2, norm=100.0)) is None
    assert estimate(toy_params(1.0), correction, Limits(value=1.3, norm=100.0)) is not None


@pytest.mark.parametrize(("correction", "kept"), [(4.9, -3.9), (5.1, 1.0), (torch.nan, 1.0)])
def test_a_correction_that_can_only_be_noise_is_dropped(toy_params, correction: float, kept: float) -> None:
    """Up to five times the stored update it counts; beyond, or if it is no number, the stored update stands."""
    estimated = estimate(toy_params(1.0), toy_params(correction).map(torch.Tensor.double), Limits(100.0, 100.0))
    assert estimated is not None
    torch.testing.assert_close(estimated[NAME], torch.full((1, 3), kept))


def test_asked_clients_take_the_data_order_of_training(learnt) -> None:
    """From w_0 a retained client then sends its stored update again: later differences are the state's doing."""

    class ClientHistory(Middleware):
        def run(self, params, job, clients):
            for update in super().run(params, job, clients):
                if job.round == 1:
                    stored = learnt.trained.history.update(1, update.client).change
                    assert all(torch.equal(stored[name], update.change[name]) for name in stored.tensors)
                yield update

    assert (
        next(make_method("fed_recover").unlearn(learnt.trained, CLIENT, ClientHistory(learnt.world.federation))).phase
        == "warm-up"
    )


def test_a_refused_answer_teaches_nothing(toy_params, tmp_path) -> None:
    """Client 1 breaks in the warm-up; its later estimates must rest on nothing it sent."""

    class Breaking(Quadratics):
        def run(self, params, job, clients):
            for update in super().run(params, job, clients):
                broken = update.client == 1 and job.round <= 3
                yield Update(1, 5, update.change * torch.nan) if broken else update

    trained, _ = train(Quadratics(), toy_params(seed=3), tmp_path / "all", 6, (0, 1, 2))
    steps = list(make_method("fed_recover", ("tolerance=0",)).unlearn(trained, CLIENT, Breaking()))
    assert all(1 in step.notes["rejected"] for step in steps[:3])
    assert all(step.state.is_finite() and not step.notes.get("rejected") for step in steps[3:])


def test_absent_clients_are_not_asked(toy_params, tmp_path) -> None:
    trained, _ = train(Quadratics(), toy_params(seed=3), tmp_path / "all", 4, (1, 2))
    federation = Quadratics()
    list(make_method("fed_recover").unlearn(trained, CLIENT, federation))
    assert {client for _, clients in federation.asked for client in clients} == {1}


def test_class_requests_keep_every_client(toy_params, tmp_path) -> None:
    trained, _ = train(Quadratics(), toy_params(seed=3), tmp_path / "all", 4, (0, 1, 2))
    federation = Quadratics()
    list(make_method("fed_recover").unlearn(trained, ClassRequest(classes=(0,)), federation))
    assert federation.asked[0] == (1, [0, 1, 2])


def test_a_warm_up_that_cannot_fill_the_secants_is_refused() -> None:
    with pytest.raises(UserError, match="warm_up must be larger than secants"):
        make_method("fed_recover", ("warm_up=2",))
