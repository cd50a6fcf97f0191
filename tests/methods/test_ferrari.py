"""Ferrari: what it minimises falls, and only holders of forget pairs take part in that."""

import numpy as np
import pytest
import torch

from ease.methods.ferrari import Ferrari, draw_with_noise, sensitivity
from ease.requests.request import ClientRequest, forget_mask

CLIENT = ClientRequest(clients=(1,))


@pytest.mark.parametrize("scope", ["client", "sample"])
def test_the_inputs_of_forget_pairs_come_to_matter_less(learnt, few, local_job, scope: str) -> None:
    request = CLIENT if scope == "client" else few
    client = learnt.world.federation.data[1]
    forget = np.flatnonzero(forget_mask(request, client.shard))

    def measured(state) -> float:
        job = local_job(settings={"draws": 10})
        draw = draw_with_noise(client, forget, job, np.random.default_rng(0))
        states = client.train.batch(draw.rows, draw.captions)
        with torch.no_grad():
            return float(sensitivity(learnt.world.server.model, state.tensors, states, draw, job))

    method = Ferrari(noise_draws=4, finetune_share=0)
    states = [step.state for step in method.unlearn(learnt.trained, request, learnt.world.federation)]
    assert len(states) == 3 == method.rounds(learnt.trained.training, request)
    levels = [measured(state) for state in (learnt.trained.final, *states)]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] < 0.95 * levels[0]


def test_a_clients_pairs_fall_and_others_are_repaired(effect) -> None:
    found = effect(CLIENT, "ferrari", "rate=10", "noise_draws=4")
    assert found.after < found.before - 0.4 and found.kept_after > found.kept_before


def test_only_the_leaving_client_works_and_is_then_left_out(jobs) -> None:
    given = jobs(CLIENT, "ferrari", "forget_rounds=2", "noise_draws=3")
    assert [(client, job.objective) for client, job in given] == [
        (1, "sensitivity"), (1, "sensitivity"), (0, "align"), (2, "align"), (3, "align"),
    ]  # fmt: skip
    assert given[0][1].settings == {"draws": 3} and given[0][1].clip == 1.0 and given[0][1].data == "forget"
