"""Objectives against naive loops and cases by hand: what log-odds are, and how others forget."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ease.data.examples import Examples
from ease.data.partition import Shard
from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.local import work
from ease.federation.objectives import (
    ALIGN,
    OBJECTIVES,
    Loss,
    both_kinds,
    objective,
    own_log_probabilities,
    register,
)
from ease.model.losses import log_odds
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest


@pytest.fixture(scope="module")
def client(learnt) -> ClientData:
    return learnt.world.federation.data[1]


def unit(count: int, seed: int, width: int = 5) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, width, generator=rng), dim=1)


def naive_log_odds(image, text, pool_image, pool_text, weights, temperature: float) -> list[float]:
    """One pair, one direction and one negative at a time."""
    levels = []
    for n in range(len(image)):
        positive = float(image[n] @ text[n]) / temperature
        sums = [0.0, 0.0]
        for m in range(len(pool_image)):
            sums[0] += float(weights[n, m]) * math.exp(float(image[n] @ pool_text[m]) / temperature)
            sums[1] += float(weights[n, m]) * math.exp(float(text[n] @ pool_image[m]) / temperature)
        levels.append(positive - (math.log(sums[0]) + math.log(sums[1])) / 2)
    return levels


def test_log_odds_equal_a_naive_loop() -> None:
    image, text, pool_image, pool_text = (unit(count, seed) for seed, count in enumerate((4, 4, 7, 7)))
    weights = torch.rand(4, 7, generator=torch.Generator().manual_seed(9))
    weights[0, :5] = 0
    found = log_odds(image, text, pool_image, pool_text, weights, 0.2)
    np.testing.assert_allclose(found, naive_log_odds(image, text, pool_image, pool_text, weights, 0.2), atol=1e-5)


def test_a_negative_of_weight_zero_is_left_out_of_value_and_gradient() -> None:
    image, text = unit(3, 0).requires_grad_(), unit(3, 1)
    pool = unit(5, 2), unit(5, 3)
    weights = torch.ones(3, 5)
    weights[:, 4] = 0
    phi = log_odds(image, text, *pool, weights, 0.1)
    phi.sum().backward()
    torch.testing.assert_close(phi, log_odds(image, text, pool[0][:4], pool[1][:4], weights[:, :4], 0.1))
    assert image.grad is not None and torch.isfinite(image.grad).all()


def batch_loss(objective: Loss, model, tensors, client: ClientData, positions: np.ndarray, job) -> Tensor:
    draw = objective.draw(client, positions, job, np.random.default_rng(0))
    assert draw is not None
    return objective.at(model, tensors, client.train.batch(draw.rows, draw.captions), draw, job)


# --- the registry ---


def test_an_unknown_objective_is_one_line_and_a_name_is_given_once() -> None:
    with pytest.raises(UserError, match="objective 'magic': not known here; install the method that brings it"):
        objective("magic")
    with pytest.raises(ValueError, match="align: an objective of this name exists already"):
        register("align", ALIGN)


# --- forgetting by other objectives ---


class Linear:
    """A model of two matrices: a state is its embedding after the matrix of its modality."""

    def embed(self, tensors, modality: str, states: Tensor, mask: Tensor | None = None) -> Tensor:
        return states.flatten(1) @ tensors[modality]


SWAP = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
FIRST = SampleRequest(ids=("0",))


def toy(image: list[list[float]], text: list[list[float]]) -> ClientData:
    """A client whose pairs are called 0, 1, 2... with one caption each."""
    count, no_one = len(image), np.zeros(0, dtype=int)
    positions = np.arange(count)
    shard = Shard(0, positions, no_one, tuple(map(str, positions)), np.zeros(count, dtype=int), no_one)
    images, texts = torch.tensor(image), torch.tensor(text)
    examples = Examples(images, texts[:, None], None)
    return ClientData(shard, examples, examples.take(no_one))


def loss_of(name: str, client: ClientData, job, tensors=None, positions: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    tensors = tensors or {"image": torch.eye(2), "text": torch.eye(2)}
    return batch_loss(OBJECTIVES[name], Linear(), tensors, client, np.array(positions), job)


def test_own_probabilities_equal_a_naive_loop_and_negatives_stay_where_they_are() -> None:
    image, text = unit(5, 0), unit(5, 1)
    found = own_log_probabilities(image, text, 2, 0.3)
    for n in range(2):
        to_text = [math.exp(float(image[n] @ text[m]) / 0.3) for m in range(5)]
        to_image = [math.exp(float(text[n] @ image[m]) / 0.3) for m in range(5)]
        expected = [math.log(each[n] / sum(each)) for each in (to_text, to_image)]
        np.testing.assert_allclose(found[:, n], expected, atol=1e-5)
    own_log_probabilities(image.requires_grad_(), text.requires_grad_(), 2, 0.3).sum().backward()
    for embedding in (image, text):
        assert embedding.grad is not None
        assert embedding.grad[:2].any(1).all() and not embedding.grad[2:].any()


def test_both_kinds_fill_half_a_batch_with_what_there_is(client, local_job) -> None:
    """Ten forget pairs, two of them in the batch, and a batch of 16: six more are drawn, no pair twice."""
    request = SampleRequest(ids=client.shard.train_ids[:10])
    batch = np.array([20, 4, 21, 9])
    forget, retained = both_kinds(client, batch, local_job(request=request, batch_size=16), np.random.default_rng(0))
    assert list(forget[:2]) == [4, 9] and list(retained[:2]) == [20, 21]
    assert len(set(forget)) == len(set(retained)) == 8
    assert max(forget) < 10 <= min(retained)
    everything = ClientRequest(clients=(1,))
    forget, retained = both_kinds(client, batch, local_job(request=everything, batch_size=4), np.random.default_rng(0))
    assert list(forget) == list(batch) and len(retained) == 0


@pytest.mark.parametrize("objective", ["difference", "unlearning cross-entropy", "decouple", "sensitivity"])
def test_a_single_forget_pair_is_not_without_effect(learnt, client, local_job, objective: str) -> None:
    """In a batch of its own it would have no negatives, and a gradient of exactly 0."""
    job = local_job(
        request=SampleRequest(ids=client.shard.train_ids[:1]), data="forget", objective=objective,
        settings={"retain": 0.0, "forget": 1.0, "draws": 2}, reference=learnt.trained.final,
    )  # fmt: skip
    update = work(learnt.world.server.model, learnt.trained.final, client, job)
    assert update.pairs == 1 and update.delta is not None
    assert update.delta.is_finite() and update.delta.norm() > 1e-5
    assert work(learnt.world.server.model, learnt.trained.final, client, replace(job, objective="align")).delta is None


@pytest.mark.parametrize("objective", ["difference", "unlearning cross-entropy", "decouple"])
def test_a_client_without_retained_pairs_uses_its_forget_pairs_as_negatives(
    learnt, client, local_job, objective: str
) -> None:
    job = local_job(
        request=ClientRequest(clients=(1,)), data="forget", objective=objective,
        settings={"retain": 1.0, "forget": 1.0}, reference=learnt.trained.final,
    )  # fmt: skip
    update = work(learnt.world.server.model, learnt.trained.final, client, job)
    assert update.pairs == len(client.train) and update.delta is not None
    assert update.delta.is_finite() and update.delta.norm() > 1e-3


def test_the_difference_weighs_both_kinds(local_job) -> None:
    """Temperature 1. Pair 0 is (1,0) twice, pairs 1 and 2 are (0,1) twice.

    Pair 0 as anchor: similarities 1, 0, 0, so L_f = log(e + 2) - 1 = 0.5514, below log 3. The retained pairs cannot
    be told from each other: L_r = log 2. With weights 0.9 and 0.1 the loss is 0.9 · 0.6931 - 0.1 · 0.5514 = 0.5687.
    """
    both = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    job = local_job(request=FIRST, temperature=1.0, batch_size=2, settings={"retain": 0.9, "forget": 0.1})
    expected = 0.9 * math.log(2) - 0.1 * (math.log(math.e + 2) - 1)
    assert float(loss_of("difference", toy(both, both), job)) == pytest.approx(expected, rel=1e-5)


def test_ascent_stops_at_chance(local_job) -> None:
    """Pair 0 against pair 1, temperature 1, captions (c, 0) and (0, 0): log(1 + e^-c) to text, log 2 to image.

    Their mean is at chance, log 2, for c = 0. With c > 0 the caption is found and ascent lowers c; with c < 0 it is
    found less often than by chance, and the loss is flat.
    """
    gradients = {}
    for level in (1.0, -1.0):
        client = toy([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]])
        text = torch.tensor([[level, 0.0], [0.0, 0.0]], requires_grad=True)
        job = local_job(request=FIRST, temperature=1.0, batch_size=2, settings={"retain": 0.0, "forget": 1.0})
        loss = loss_of("difference", client, job, {"image": torch.eye(2), "text": text}, (0, 1))
        loss.backward()
        assert text.grad is not None
        gradients[level] = float(text.grad[0, 0])
        assert loss.item() == pytest.approx(-min(math.log(2), (math.log(1 + math.exp(-level)) + math.log(2)) / 2))
    assert gradients[1.0] == pytest.approx(0.5 / (1 + math.e)) and gradients[-1.0] == 0


def test_unlearning_cross_entropy_by_hand(local_job) -> None:
    """All embeddings alike: p = 1/3 both ways, so the loss is -log(1 - 1/6)."""
    same = [[1.0, 0.0]] * 3
    job = local_job(request=FIRST, batch_size=2)
    assert float(loss_of("unlearning cross-entropy", toy(same, same), job)) == pytest.approx(-math.log(5 / 6))


def test_decoupling_by_hand(local_job) -> None:
    """Pair 0 is (1,0) twice, pair 1 (0,1) twice, pair 2 (1,0) with (0,1); pair 0 goes. The teacher is the identity.

    The stranger of pair 0 is its image with the caption of pair 2, of similarity 0. The teacher itself: (1 - 0)² = 1,
    and nothing has drifted. Text swapped: pair 0 has similarity 0, no loss; both retained captions moved by 1 + 1 = 2.
    Products: pair 1 from (0,1) to (0,0), pair 2 from (0,0) to (1,0), 1 each. Images: 0. Together 0 + 2 + 1 = 3.
    """
    client = toy([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    teacher = Params({"image": torch.eye(2), "text": torch.eye(2)}, ())
    job = local_job(request=FIRST, batch_size=2, settings={"forget": 0.7}, reference=teacher)
    assert float(loss_of("decouple", client, job)) == pytest.approx(0.7)
    swapped = {"image": torch.eye(2), "text": SWAP}
    assert float(loss_of("decouple", client, job, swapped)) == pytest.approx(3.0)


def test_the_sensitivity_of_a_scaling_is_its_factor(local_job) -> None:
    """f(x) = 3 x moves by 3 · unit · |noise|, with unit the mean norm over sqrt(2): 1.5 / sqrt(2) and 4 / sqrt(2)."""
    client = toy([[1.0, 0.0], [0.0, 2.0]], [[4.0, 0.0], [0.0, 4.0]])
    tensors = {"image": 3 * torch.eye(2), "text": 3 * torch.eye(2)}
    loss = loss_of("sensitivity", client, local_job(settings={"draws": 5}), tensors, (0, 1))
    assert float(loss) == pytest.approx(3 * (1.5 + 4) / 2**0.5, rel=1e-4)


def test_sensitivity_is_finite_where_nothing_moves(local_job) -> None:
    """A model that answers 0 to all: the distance is 0, whose square root has no slope."""
    client = toy([[1.0, 0.0], [0.0, 2.0]], [[4.0, 0.0], [0.0, 4.0]])
    tensors = {name: torch.zeros(2, 2, requires_grad=True) for name in ("image", "text")}
    loss = loss_of("sensitivity", client, local_job(settings={"draws": 2}), tensors, (0, 1))
    loss.backward()
    assert loss.item() < 1e-4
    assert all(tensor.grad is not None and torch.isfinite(tensor.grad).all() for tensor in tensors.values())


def test_noise_does_not_change_padding(adapted, local_job) -> None:
    """Its norm counts real tokens only, so padding cannot make a caption look insensitive."""
    client = adapted.world.federation.data[1]
    mask = client.train.text_mask
    assert mask is not None and not mask.all()
    tokens = mask.shape[2]
    padded = replace(client, train=replace(
        client.train,
        text=torch.cat([client.train.text[:, :, :tokens], client.train.text], 2),  # what is no token stays behind
        text_mask=torch.cat([mask, torch.zeros_like(mask)], 2),
    ))  # fmt: skip
    job = local_job(settings={"draws": 40})
    arguments = OBJECTIVES["sensitivity"], adapted.world.server.model, adapted.trained.final.tensors
    one, other = (float(batch_loss(*arguments, each, np.arange(8), job)) for each in (client, padded))
    assert other == pytest.approx(one, rel=0.1)
