"""Levels by hand and against a naive loop: who is compared with whom, and always the same pairs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ease.data.examples import Examples
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.local import measure_together, work
from ease.federation.objectives import embed_states
from ease.methods.ease import levels as levels_module
from ease.methods.ease.levels import levels
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask


class Linear:
    """A model of two matrices: a state is its embedding after the matrix of its modality."""

    def embed(self, tensors, modality: str, states: Tensor, mask: Tensor | None = None) -> Tensor:
        return states.flatten(1) @ tensors[modality]


IDENTITY = Params({"image": torch.eye(2), "text": torch.eye(2)}, ())


def toy(image, text, held_image=(), held_text=(), classes=None, held_classes=None) -> ClientData:
    """Pairs called 0, 1, 2... with the captions that are given, and pairs that are held out."""

    def examples(images, texts) -> Examples:
        images = torch.tensor(images).reshape(-1, 2)
        texts = torch.tensor(texts).reshape(len(images), -1, 2) if len(images) else torch.zeros(0, 1, 2)
        return Examples(images, texts, None)

    count, held = np.arange(len(image)), np.arange(len(held_image))
    shard = Shard(
        0, count, held, tuple(map(str, count)),
        np.zeros_like(count) if classes is None else np.array(classes),
        np.zeros_like(held) if held_classes is None else np.array(held_classes),
    )  # fmt: skip
    return ClientData(shard, examples(image, text), examples(held_image, held_text))


@pytest.fixture(scope="module")
def client(learnt) -> ClientData:
    return learnt.world.federation.data[1]


# --- by hand ---


def test_log_odds_of_a_tiny_case_by_hand(local_job) -> None:
    """Temperature 1; pair 0 is forgotten, pairs 1 and 2 are the pool and count a half each.

    Pair 0 is (1,0) with (1,0): positive 1. To texts (0,1) and (1,0): log((e^0 + e^1) / 2). To images (0,1), (0,1): 0.
    The held-out pair (0,1) with (1,0): positive 0; to texts log((e + 1) / 2), its text to images 0.
    """
    data = toy([[1.0, 0], [0, 1.0], [0, 1.0]], [[1.0, 0], [0, 1.0], [1.0, 0]], [[0, 1.0]], [[1.0, 0]])
    found = levels(Linear(), IDENTITY, data, local_job(request=SampleRequest(ids=("0",)), temperature=1.0))
    half = math.log((math.e + 1) / 2)
    assert float(found["forget"]) == pytest.approx(1 - half / 2) and float(found["kin"]) == pytest.approx(-half / 2)


def test_all_captions_count(local_job) -> None:
    """Two captions, (1,0) and (0,1), in front of a pool whose pairs look alike: positives 1 and 0, their mean."""
    data = toy([[1.0, 0], [0, 0], [0, 0]], [[[1.0, 0], [0, 1.0]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]])
    found = levels(Linear(), IDENTITY, data, local_job(request=SampleRequest(ids=("0",)), temperature=1.0))
    assert float(found["forget"]) == pytest.approx(0.5)


def test_class_peers_count_as_much_as_the_pool(local_job) -> None:
    """Class 1 goes: pairs 0 to 2, of which each has the two others as peers; the pool, pairs 3 and 4, is all zeros.

    Pair 0 is (1,0) twice, its peers are (1,0) twice and (0,1) twice: log(1 + (e + 1) / 2) both ways. The held-out pair
    of the class, (1,0) twice, has three peers: log(1 + (2 e + 1) / 3). One of another class is no kin.
    """
    both = [[1.0, 0], [1.0, 0], [0, 1.0], [0, 0], [0, 0]]
    held = [[1.0, 0], [1.0, 0]]
    data = toy(both, both, held, held, classes=[1, 1, 1, 0, 0], held_classes=[1, 0])
    found = levels(Linear(), IDENTITY, data, local_job(request=ClassRequest(classes=(1,)), temperature=1.0))
    assert float(found["forget"][0]) == pytest.approx(1 - math.log(1 + (math.e + 1) / 2), rel=1e-5)
    assert found["kin"].tolist() == pytest.approx([1 - math.log(1 + (2 * math.e + 1) / 3)], rel=1e-5)


def test_peers_are_of_the_same_class_alone(local_job) -> None:
    """Two classes go; the only pair of class 2 has no peers, so the pool alone, all zeros, is compared with."""
    both = [[1.0, 0], [1.0, 0], [1.0, 0], [0, 0], [0, 0]]
    data = toy(both, both, classes=[1, 1, 2, 0, 0])
    found = levels(Linear(), IDENTITY, data, local_job(request=ClassRequest(classes=(1, 2)), temperature=1.0))
    assert found["forget"].tolist() == pytest.approx([1 - math.log(1 + math.e)] * 2 + [1.0], rel=1e-5)


def test_a_leaving_client_takes_its_own_others_as_the_pool(local_job) -> None:
    """Pairs (1,0), (0,1), (0,0), each twice: the first against the two others is 1 - log((1 + 1) / 2) = 1."""
    both = [[1.0, 0], [0, 1.0], [0, 0]]
    data = toy(both, both, [[1.0, 0]], [[1.0, 0]])
    found = levels(Linear(), IDENTITY, data, local_job(request=ClientRequest(clients=(0,)), temperature=1.0))
    assert found["forget"].tolist() == pytest.approx([1.0, 1.0, -math.log((1 + 1) / 2)])
    # A held-out pair is nobody's own: all three are in its pool.
    assert found["kin"].tolist() == pytest.approx([1 - math.log((math.e + 2) / 3)])


def test_without_anything_to_compare_with_levels_are_zero(local_job) -> None:
    """One pair, which goes: nothing is left for a pool, and neither side says anything."""
    data = toy([[1.0, 0]], [[1.0, 0]], [[1.0, 0]], [[1.0, 0]])
    found = levels(Linear(), IDENTITY, data, local_job(request=SampleRequest(ids=("0",)), temperature=1.0))
    assert found["forget"].tolist() == [0.0] and found["kin"].tolist() == [0.0]


# --- on a real client ---


def naive(learnt, data: ClientData, state: Params, request: Request, temperature: float) -> dict[str, list[float]]:
    """One pair, one caption, one direction and one negative at a time; captions are drawn by nobody, there is one."""
    named = forget_mask(request, data.shard)

    def embedded(examples) -> tuple[Tensor, Tensor]:
        rows = np.arange(len(examples))
        with torch.no_grad():
            return embed_states(learnt.world.server.model, state.tensors, examples.batch(rows, np.zeros_like(rows)))

    train, held = embedded(data.train), embedded(data.validation)

    def level(image: Tensor, text: Tensor, own: int | None, label: int) -> float:
        pool = [n for n in range(len(named)) if n != own and (not named[n] or named.all())]
        peers = [n for n in np.flatnonzero(named) if n != own and data.shard.train_classes[n] == label]
        sums = [0.0, 0.0]
        for group in (pool, peers if isinstance(request, ClassRequest) else []):
            for n in group:
                sums[0] += math.exp(float(image @ train[1][n]) / temperature) / len(group)
                sums[1] += math.exp(float(text @ train[0][n]) / temperature) / len(group)
        return float(image @ text) / temperature - (math.log(sums[0]) + math.log(sums[1])) / 2

    labels = data.shard.validation_classes
    kin = [n for n in range(len(labels)) if not isinstance(request, ClassRequest) or labels[n] in request.classes]
    return {
        "forget": [level(train[0][n], train[1][n], n, data.shard.train_classes[n]) for n in np.flatnonzero(named)],
        "kin": [level(held[0][n], held[1][n], None, labels[n]) for n in kin],
    }


@pytest.mark.parametrize("scope", ["sample", "class", "client"])
def test_levels_equal_a_naive_loop(learnt, client, local_job, scope: str) -> None:
    def first(examples):
        mask = None if examples.text_mask is None else examples.text_mask[:, :1]
        return replace(examples, text=examples.text[:, :1], text_mask=mask)

    data = replace(client, train=first(client.train), validation=first(client.validation))
    request = {
        "sample": SampleRequest(ids=client.shard.train_ids[3:9]),
        "class": ClassRequest(classes=(2,)),
        "client": ClientRequest(clients=(1,)),
    }[scope]
    job = local_job(request=request, objective="levels")
    found = work(learnt.world.server.model, learnt.trained.final, data, job).values
    expected = naive(learnt, data, learnt.trained.final, request, job.temperature)
    for name, values in expected.items():
        assert len(values) > 0
        np.testing.assert_allclose(found[name], values, atol=1e-3)


def test_the_same_pairs_are_compared_under_every_state(learnt, client, local_job, monkeypatch) -> None:
    """In every round too: pool and captions hang on the seed and the client, not on what is measured or when."""
    seen: list[list[tuple[list[int], list[int]]]] = []
    plain = levels_module.embedded_each

    def watched(model, tensors, modality, wanted):
        seen[-1] += [(rows.tolist(), captions.tolist()) for _, rows, captions in wanted]
        return plain(model, tensors, modality, wanted)

    monkeypatch.setattr(levels_module, "embedded_each", watched)
    monkeypatch.setattr(levels_module, "POOL", 10)
    job = local_job(request=SampleRequest(ids=client.shard.train_ids[:7]), objective="levels")
    for state, number in ((learnt.trained.initial, 1), (learnt.trained.final, 1), (learnt.trained.final, 5)):
        seen.append([])
        work(learnt.world.server.model, state, client, replace(job, round=number))
    assert seen[0] == seen[1] == seen[2]
    pool = seen[0][0][0]
    assert len(pool) == 10 == len(set(pool)) and min(pool) >= 7
    seen.append([])
    work(learnt.world.server.model, learnt.trained.final, client, replace(job, seed=1))
    assert seen[3][0] != seen[0][0]


@pytest.mark.parametrize("at_once", [1, 7, 512])
@pytest.mark.parametrize("scope", ["sample", "class", "client"])
def test_clients_that_share_passes_measure_what_each_measures_alone(learnt, local_job, monkeypatch, scope, at_once):
    """One that holds nothing of it and one whose pairs are cut by the end of a pass are among them."""
    model, clients = learnt.world.server.model, learnt.world.federation.data
    ids = (*clients[1].shard.train_ids[:7], *clients[2].shard.train_ids[2:4])
    request = {
        "sample": SampleRequest(ids=ids),
        "class": ClassRequest(classes=(2,)),
        "client": ClientRequest(clients=(1,)),
    }[scope]
    job = local_job(request=request, objective="levels")
    own = [(data, job.own(client, data.shard.train_ids)) for client, data in sorted(clients.items())]
    alone = [work(model, learnt.trained.final, *each) for each in own]
    monkeypatch.setattr(levels_module, "CHUNK_PAIRS", at_once)
    together = measure_together(model, learnt.trained.final, own)
    assert [each.client for each in together] == [each.client for each in alone]
    for one, two in zip(alone, together, strict=True):
        assert one.pairs == two.pairs and two.delta is None and one.values.keys() == two.values.keys()
        for name, value in one.values.items():
            assert two.values[name].dtype == value.dtype
            torch.testing.assert_close(two.values[name], value, rtol=0, atol=1e-4)
    assert sum(len(each.values["forget"]) for each in together) > 0


def test_measuring_changes_nothing_and_repeats(learnt, client, local_job) -> None:
    job = local_job(request=SampleRequest(ids=client.shard.train_ids[:7]), objective="levels")
    one, two = (work(learnt.world.server.model, learnt.trained.final, client, job) for _ in range(2))
    assert one.delta is None and one == two
    assert all(bool(torch.isfinite(value).all()) for value in one.values.values())


@pytest.mark.parametrize("scope", ["class", "sample"])
def test_a_client_without_forget_pairs_answers_with_empty_levels(learnt, client, local_job, scope: str) -> None:
    request = ClassRequest(classes=(99,)) if scope == "class" else SampleRequest(ids=("elsewhere",))
    job = local_job(request=request, objective="levels")
    values = work(learnt.world.server.model, learnt.trained.final, client, job).values
    assert len(values["forget"]) == 0
    assert len(values["kin"]) == (0 if scope == "class" else len(client.validation))


def test_a_client_without_held_out_pairs_answers(learnt, client, local_job) -> None:
    bare = replace(client, validation=client.validation.take(np.arange(0)))
    bare = replace(bare, shard=replace(client.shard, validation_classes=client.shard.validation_classes[:0]))
    for request in (ClientRequest(clients=(1,)), SampleRequest(ids=client.shard.train_ids[:4])):
        values = work(
            learnt.world.server.model, learnt.trained.final, bare, local_job(request=request, objective="levels")
        ).values
        assert len(values["kin"]) == 0 < len(values["forget"]) and bool(torch.isfinite(values["forget"]).all())


def test_a_client_that_keeps_one_pair_measures_among_those_that_go(world, local_job) -> None:
    shard = world.shards[0]
    request = SampleRequest(ids=(*shard.train_ids[1:], world.shards[1].train_ids[0]))
    job = local_job(request=request, objective="levels")
    found = {update.client: update.values for update in world.federation.run(world.server.initial(), job, [0, 1])}
    assert found[0]["forget"].shape == (len(shard.train) - 1,) and found[1]["forget"].shape == (1,)
    assert all(bool(torch.isfinite(each["forget"]).all()) for each in found.values())
