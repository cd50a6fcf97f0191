"""FUKD: what a client sent is subtracted, and the old model teaches on retained pairs."""

import math
from dataclasses import replace

import pytest
import torch

from ease.federation.objectives import draw_pairs, embed_states
from ease.methods import make_method
from ease.methods.fukd import IMITATE, imitate
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest
from ease.seeding import generator

CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(0,))


def assert_filled(state: Params, value: float) -> None:
    for tensor in state.tensors.values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize(("subtraction", "left"), [(1.0, 23 / 6 - 3), (0.5, 23 / 6 - 1.5)])
def test_all_that_the_client_sent_is_subtracted_by_its_weight(
    toy_params, past, scripted, subtraction: float, left: float
) -> None:
    """Clients 0, 1, 2 have 1, 2, 3 pairs and sent 1, 2, 3, then 1, 7, -2: w_n = 7/3 + 3/2. Client 1: (2 + 7) / 3 = 3.

    One round of distillation follows, which clients 0 and 2 answer with 0.25.
    """
    rounds = ({c: toy_params(v) for c, v in enumerate(values)} for values in ((1.0, 2.0, 3.0), (1.0, 7.0, -2.0)))
    trained = past(*rounds)
    federation = scripted(dict.fromkeys((0, 1, 2), toy_params(0.25)), {0: 1, 1: 2, 2: 3})
    steps = list(make_method("fukd", (f"subtraction={subtraction}",)).unlearn(trained, CLIENT, federation))
    assert [step.phase for step in steps] == ["subtraction", "distillation"]
    assert_filled(steps[0].state, left)
    assert_filled(steps[1].state, left + 0.25)
    ((job, clients, _),) = federation.asked
    assert clients == [0, 2] and job.objective == IMITATE and job.data == "retain"
    assert job.reference == trained.final


def test_each_client_loses_its_share_of_a_class(toy_params, past, scripted) -> None:
    """Client 1 keeps one of two pairs: half of 2/6 · 2 goes. The epoch that told it moved the state by 0.6."""
    trained = past({client: toy_params(client + 1.0) for client in (0, 1, 2)})
    federation = scripted(dict.fromkeys((0, 1, 2), toy_params(0.6)), {0: 1, 1: 1, 2: 3}, held={0: 1, 1: 2, 2: 3})
    (step,) = make_method("fukd", ("share=0",)).unlearn(trained, CLASS, federation)
    assert_filled(step.state, 7 / 3 + 0.6 - 1 / 3)


def test_the_loss_is_the_divergence_of_softened_choices(learnt) -> None:
    """One pair, one direction and one candidate at a time."""
    client, model = learnt.world.federation.data[0], learnt.world.server.model
    softness = 3.0
    job = learnt.trained.training_job(1, settings={"softness": softness}, reference=learnt.trained.final)
    draw = draw_pairs(client, torch.arange(5).numpy(), job, generator(0, "draw"))
    (states,) = client.train.feed([(draw.rows, draw.captions)])
    student = learnt.trained.initial
    rows = {}
    for who, params in (("student", student), ("teacher", learnt.trained.final)):
        image, text = embed_states(model, params.tensors, states)
        rows[who] = (image.double() @ text.double().T / (softness * job.temperature)).tolist()

    def chosen(scores: list[float]) -> list[float]:
        total = math.fsum(math.exp(score) for score in scores)
        return [math.exp(score) / total for score in scores]

    expected = 0.0
    for n in range(5):
        for axis in (0, 1):
            p, q = (
                chosen([rows[who][n][m] if axis == 0 else rows[who][m][n] for m in range(5)])
                for who in ("teacher", "student")
            )
            expected += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / (2 * 5)
    found = float(imitate(model, student.tensors, states, draw, job))
    assert found == pytest.approx(softness**2 * expected, rel=1e-4) and found > 0.01
    same = replace(job, reference=student)
    assert float(imitate(model, student.tensors, states, draw, same)) == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_student_nears_the_teacher_and_forget_pairs_stay_low(learnt) -> None:
    first, *taught = make_method("fukd", ("share=0.7", "softness=1")).unlearn(
        learnt.trained, CLIENT, learnt.world.federation
    )
    losses = [step.loss for step in taught]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2
    distances = [(step.state - learnt.trained.final).norm() for step in (first, *taught)]
    assert distances == sorted(distances, reverse=True)
    assert learnt.level(taught[-1].state, CLIENT) < learnt.level(learnt.trained.final, CLIENT) - 1
