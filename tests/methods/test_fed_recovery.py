"""FedRecovery: what a client made of each round is taken out of the trained model, on the server alone."""

from dataclasses import replace

import pytest
import torch

from ease.errors import UserError
from ease.methods import make_method
from ease.requests.request import ClassRequest, ClientRequest

CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(0,))


@pytest.fixture
def nobody(scripted, toy_params):
    """Clients 0, 1 and 2 with 1, 2 and 3 pairs, who must not be asked."""
    return scripted(dict.fromkeys((0, 1, 2), toy_params(torch.nan)), {0: 1, 1: 2, 2: 3})


def values_of(params, *values: float):
    return {client: params(value) for client, value in enumerate(values)}


def assert_filled(state, value: float) -> None:
    for tensor in state.tensors.values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, value))


def test_two_rounds_by_hand(toy_params, past, nobody) -> None:
    """Clients 0, 1, 2 have 1, 2, 3 pairs; 1 leaves. They sent 1, 2, 3, then 1, 7, -2, in each of six values.

    Round 1: mean 14/6 = 7/3, without client 1: 10/4, so D is -1/6. Round 2: 9/6 = 3/2 and -5/4, so D is 11/4.
    Squared norms are as 49/9 to 9/4, or 196 to 81. The sum is (196 · -1/6 + 81 · 11/4) / 277, taken from 7/3 + 3/2.
    """
    trained = past(values_of(toy_params, 1, 2, 3), values_of(toy_params, 1, 7, -2))
    (step,) = make_method("fed_recovery").unlearn(trained, CLIENT, nobody)
    assert_filled(step.state, 7 / 3 + 3 / 2 - (196 * -1 / 6 + 81 * 11 / 4) / 277)
    assert not nobody.asked
    (twice,) = make_method("fed_recovery", ("strength=2",)).unlearn(trained, CLIENT, nobody)
    assert_filled(twice.state, 7 / 3 + 3 / 2 - 2 * (196 * -1 / 6 + 81 * 11 / 4) / 277)


def test_the_sum_of_residuals_is_subtracted_in_a_chosen_share(toy_params, past, nobody) -> None:
    """The residuals of the two rounds above are -1/6 and 11/4; the trained state is 7/3 + 3/2."""
    trained = past(values_of(toy_params, 1, 2, 3), values_of(toy_params, 1, 7, -2))
    method = make_method("fed_recovery", ("weights=sum", "strength=0.82"))
    (step,) = method.unlearn(trained, CLIENT, nobody)
    assert_filled(step.state, 7 / 3 + 3 / 2 - 0.82 * (-1 / 6 + 11 / 4))
    assert not nobody.asked


def test_recovery_trains_the_retained_clients_from_the_subtracted_state(toy_params, past, scripted) -> None:
    """Each of two rounds has the mean 3, and 3.5 without client 1, so 6 becomes 7. In the recovery round clients 0 and
    2 send 1 and 5, whose mean is 3."""
    rounds = [values_of(toy_params, 1, 2, 6)] * 2
    trained = past(*rounds, weighting="uniform")
    federation = scripted(values_of(toy_params, 1, 9, 5), {0: 1, 1: 2, 2: 3})
    method = make_method("fed_recovery", ("weights=sum", "recovery_share=0.5"))
    subtracted, recovered = method.unlearn(trained, CLIENT, federation)
    assert method.rounds(trained.training, CLIENT) == 2
    assert [subtracted.phase, recovered.phase] == ["subtraction", "finetune"]
    assert_filled(subtracted.state, 6 - 2 * (3 - 3.5))
    assert_filled(recovered.state, 7 + 3)
    ((job, clients, start),) = federation.asked
    assert clients == [0, 2] and job.data == "retain" and job.request == CLIENT
    assert_filled(start, 7)


def test_the_weights_of_the_training_are_those_of_the_means(toy_params, past, nobody) -> None:
    """Uniform: mean (1 + 2 + 6) / 3 = 3, without client 1: 3.5. So 3 - (3 - 3.5)."""
    trained = past(values_of(toy_params, 1, 2, 6), weighting="uniform")
    (step,) = make_method("fed_recovery").unlearn(trained, CLIENT, nobody)
    assert_filled(step.state, 3.5)


def test_a_round_of_only_the_leaving_client_is_removed_and_one_without_it_stays(toy_params, past, nobody) -> None:
    """Round 1 is client 1's: D = 2. Round 2 has clients 0 and 2: D = 0. Both moved by 2 and weigh the same."""
    trained = past({1: toy_params(2.0)}, {0: toy_params(2.0), 2: toy_params(2.0)}, participation=0.5)
    (step,) = make_method("fed_recovery").unlearn(trained, CLIENT, nobody)
    assert_filled(step.state, 4 - (2 + 0) / 2)


def test_contributions_of_earlier_requests_are_not_removed_again(toy_params, past, scripted) -> None:
    """Client 2 is gone: of clients 0 and 1 the mean is (1 + 4) / 3 and without 1 it is 1. What is left starts at 10."""
    trained = replace(
        past(values_of(toy_params, 1, 2, 3)), answered=toy_params(10.0), gone=(ClientRequest(clients=(2,)),)
    )
    federation = scripted(dict.fromkeys((0, 1), toy_params(torch.nan)), {0: 1, 1: 2})
    (step,) = make_method("fed_recovery").unlearn(trained, CLIENT, federation)
    assert_filled(step.state, 10 - (5 / 3 - 1))


def test_a_class_counts_by_the_share_that_each_client_keeps(toy_params, past, scripted) -> None:
    """Client 1 keeps one of two pairs, so the round was (1 · 1 + 1 · 2 + 3 · 3) / 5 = 2.4 without the others, not 7/3.

    The epoch that told it moved the state by 0.6: 7/3 + 0.6 - (7/3 - 2.4) = 3.
    """
    federation = scripted(values_of(toy_params, 0.6, 0.6, 0.6), {0: 1, 1: 1, 2: 3}, held={0: 1, 1: 2, 2: 3})
    (step,) = make_method("fed_recovery").unlearn(past(values_of(toy_params, 1, 2, 3)), CLASS, federation)
    assert_filled(step.state, 3.0)
    ((job, clients, _),) = federation.asked
    assert clients == [0, 1, 2] and job.data == "retain" and job.epochs == 1


def test_noise_has_the_given_norm(learnt) -> None:
    """The norm of 74,000 normal numbers is within 2 % of its expectation."""
    plain, noisy = (
        next(make_method("fed_recovery", (f"noise={share}",)).unlearn(learnt.trained, CLIENT, learnt.world.federation))
        for share in (0.0, 0.5)
    )
    taken = (learnt.trained.final - plain.state).norm()
    assert (noisy.state - plain.state).norm() == pytest.approx(0.5 * taken, rel=0.02)


def test_a_damaged_update_is_refused(toy_params, past, nobody) -> None:
    trained = past(values_of(toy_params, 1, 2, 3))
    path = trained.history.update_path(1, 1)
    toy_params(9.0).save(path)
    with pytest.raises(UserError, match=str(path)):
        list(make_method("fed_recovery").unlearn(trained, CLIENT, nobody))
