"""Membership scores by hand and against a naive loop, and gaps between them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ease.audit import membership_scores as module
from ease.audit.membership_scores import adjusted_gap, comparable, measure_scores, membership_gap, membership_scores
from ease.data.examples import Examples
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.local import measure_vectorized, work
from ease.federation.objectives import embed_states
from ease.federation.protocol import Middleware
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
    found = membership_scores(Linear(), IDENTITY, data, local_job(request=SampleRequest(ids=("0",)), temperature=1.0))
    half = math.log((math.e + 1) / 2)
    assert float(found["forget"]) == pytest.approx(1 - half / 2) and float(found["held_out"]) == pytest.approx(
        -half / 2
    )


def test_all_captions_count(local_job) -> None:
    """Two captions, (1,0) and (0,1), in front of a pool whose pairs look alike: positives 1 and 0, their mean."""
    data = toy([[1.0, 0], [0, 0], [0, 0]], [[[1.0, 0], [0, 1.0]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]])
    found = membership_scores(Linear(), IDENTITY, data, local_job(request=SampleRequest(ids=("0",)), temperature=1.0))
    assert float(found["forget"]) == pytest.approx(0.5)


def test_class_peers_count_as_much_as_the_pool(local_job) -> None:
    """Class 1 goes: pairs 0 to 2, of which each has the two others as peers; the pool, pairs 3 and 4, is all zeros.

    Pair 0 is (1,0) twice, its peers are (1,0) twice and (0,1) twice: log(1 + (e + 1) / 2) both ways. The held-out pair
    of the class, (1,0) twice, has three peers: log(1 + (2 e + 1) / 3). One of another class does not count.
    """
    both = [[1.0, 0], [1.0, 0], [0, 1.0], [0, 0], [0, 0]]
    held = [[1.0, 0], [1.0, 0]]
    data = toy(both, both, held, held, classes=[1, 1, 1, 0, 0], held_classes=[1, 0])
    found = membership_scores(Linear(), IDENTITY, data, local_job(request=ClassRequest(classes=(1,)), temperature=1.0))
    assert float(found["forget"][0]) == pytest.approx(1 - math.log(1 + (math.e + 1) / 2), rel=1e-5)
    assert found["held_out"].tolist() == pytest.approx([1 - math.log(1 + (2 * math.e + 1) / 3)], rel=1e-5)


def test_peers_are_only_of_the_same_class(local_job) -> None:
    """Two classes go; the only pair of class 2 has no peers, so the pool alone, all zeros, is compared with."""
    both = [[1.0, 0], [1.0, 0], [1.0, 0], [0, 0], [0, 0]]
    data = toy(both, both, classes=[1, 1, 2, 0, 0])
    found = membership_scores(
        Linear(), IDENTITY, data, local_job(request=ClassRequest(classes=(1, 2)), temperature=1.0)
    )
    assert found["forget"].tolist() == pytest.approx([1 - math.log(1 + math.e)] * 2 + [1.0], rel=1e-5)


def test_a_leaving_client_takes_its_own_others_as_the_pool(local_job) -> None:
    """Pairs (1,0), (0,1), (0,0), each twice: the first against the two others is 1 - log((1 + 1) / 2) = 1."""
    both = [[1.0, 0], [0, 1.0], [0, 0]]
    data = toy(both, both, [[1.0, 0]], [[1.0, 0]])
    found = membership_scores(Linear(), IDENTITY, data, local_job(request=ClientRequest(clients=(0,)), temperature=1.0))
    assert found["forget"].tolist() == pytest.approx([1.0, 1.0, -math.log((1 + 1) / 2)])
    # A held-out pair is nobody's own: all three are in its pool.
    assert found["held_out"].tolist() == pytest.approx([1 - math.log((math.e + 2) / 3)])


def test_without_anything_to_compare_with_scores_are_zero(local_job) -> None:
    """One pair, which goes: nothing is left for a pool, and neither side says anything."""
    data = toy([[1.0, 0]], [[1.0, 0]], [[1.0, 0]], [[1.0, 0]])
    found = membership_scores(Linear(), IDENTITY, data, local_job(request=SampleRequest(ids=("0",)), temperature=1.0))
    assert found["forget"].tolist() == [0.0] and found["held_out"].tolist() == [0.0]


# --- on a real client ---


def naive(learnt, data: ClientData, state: Params, request: Request, temperature: float) -> dict[str, list[float]]:
    """One pair, one caption, one direction and one negative at a time; captions are drawn by nobody, there is one."""
    named = forget_mask(request, data.shard)

    def embedded(examples) -> tuple[Tensor, Tensor]:
        rows = np.arange(len(examples))
        with torch.no_grad():
            return embed_states(learnt.world.server.model, state.tensors, examples.batch(rows, np.zeros_like(rows)))

    train, held = embedded(data.train), embedded(data.validation)

    def score(image: Tensor, text: Tensor, own: int | None, label: int) -> float:
        pool = [n for n in range(len(named)) if n != own and (not named[n] or named.all())]
        peers = [n for n in np.flatnonzero(named) if n != own and data.shard.train_classes[n] == label]
        sums = [0.0, 0.0]
        for group in (pool, peers if isinstance(request, ClassRequest) else []):
            for n in group:
                sums[0] += math.exp(float(image @ train[1][n]) / temperature) / len(group)
                sums[1] += math.exp(float(text @ train[0][n]) / temperature) / len(group)
        return float(image @ text) / temperature - (math.log(sums[0]) + math.log(sums[1])) / 2

    labels = data.shard.validation_classes
    held_out = [n for n in range(len(labels)) if not isinstance(request, ClassRequest) or labels[n] in request.classes]
    return {
        "forget": [score(train[0][n], train[1][n], n, data.shard.train_classes[n]) for n in np.flatnonzero(named)],
        "held_out": [score(held[0][n], held[1][n], None, labels[n]) for n in held_out],
    }


@pytest.mark.parametrize("scope", ["sample", "class", "client"])
def test_scores_equal_a_naive_loop(learnt, client, local_job, scope: str) -> None:
    def first(examples):
        mask = None if examples.text_mask is None else examples.text_mask[:, :1]
        return replace(examples, text=examples.text[:, :1], text_mask=mask)

    data = replace(client, train=first(client.train), validation=first(client.validation))
    request = {
        "sample": SampleRequest(ids=client.shard.train_ids[3:9]),
        "class": ClassRequest(classes=(2,)),
        "client": ClientRequest(clients=(1,)),
    }[scope]
    job = local_job(request=request, objective="membership scores")
    found = work(learnt.world.server.model, learnt.trained.final, data, job).values
    expected = naive(learnt, data, learnt.trained.final, request, job.temperature)
    for name, values in expected.items():
        assert len(values) > 0
        np.testing.assert_allclose(found[name], values, atol=1e-3)


def test_the_same_pairs_are_compared_under_every_state(learnt, client, local_job, monkeypatch) -> None:
    """In every round too: pool and captions hang on the seed and the client, not on what is measured or when."""
    seen: list[list[tuple[list[int], list[int]]]] = []
    plain = module.embedded_each

    def watched(model, tensors, modality, wanted):
        seen[-1] += [(rows.tolist(), captions.tolist()) for _, rows, captions in wanted]
        return plain(model, tensors, modality, wanted)

    monkeypatch.setattr(module, "embedded_each", watched)
    monkeypatch.setattr(module, "POOL", 10)
    job = local_job(request=SampleRequest(ids=client.shard.train_ids[:7]), objective="membership scores")
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
def test_clients_that_share_passes_measure_the_same_as_single_ones(learnt, local_job, monkeypatch, scope, at_once):
    """One that holds nothing of it and one whose pairs are cut by the end of a pass are among them."""
    model, clients = learnt.world.server.model, learnt.world.federation.data
    ids = (*clients[1].shard.train_ids[:7], *clients[2].shard.train_ids[2:4])
    request = {
        "sample": SampleRequest(ids=ids),
        "class": ClassRequest(classes=(2,)),
        "client": ClientRequest(clients=(1,)),
    }[scope]
    job = local_job(request=request, objective="membership scores")
    own = [(data, job.own(client, data.shard.train_ids)) for client, data in sorted(clients.items())]
    alone = [work(model, learnt.trained.final, *each) for each in own]
    monkeypatch.setattr(module, "CHUNK_PAIRS", at_once)
    together = measure_vectorized(model, learnt.trained.final, own)
    assert [each.client for each in together] == [each.client for each in alone]
    for one, two in zip(alone, together, strict=True):
        assert one.pairs == two.pairs and two.delta is None and one.values.keys() == two.values.keys()
        for name, value in one.values.items():
            assert two.values[name].dtype == value.dtype
            torch.testing.assert_close(two.values[name], value, rtol=0, atol=1e-4)
    assert sum(len(each.values["forget"]) for each in together) > 0


def test_measuring_changes_nothing_and_repeats(learnt, client, local_job) -> None:
    job = local_job(request=SampleRequest(ids=client.shard.train_ids[:7]), objective="membership scores")
    one, two = (work(learnt.world.server.model, learnt.trained.final, client, job) for _ in range(2))
    assert one.delta is None and one == two
    assert all(bool(torch.isfinite(value).all()) for value in one.values.values())


@pytest.mark.parametrize("scope", ["class", "sample"])
def test_a_client_without_forget_pairs_answers_with_empty_scores(learnt, client, local_job, scope: str) -> None:
    request = ClassRequest(classes=(99,)) if scope == "class" else SampleRequest(ids=("elsewhere",))
    job = local_job(request=request, objective="membership scores")
    values = work(learnt.world.server.model, learnt.trained.final, client, job).values
    assert len(values["forget"]) == 0
    assert len(values["held_out"]) == (0 if scope == "class" else len(client.validation))


def test_a_client_without_held_out_pairs_answers(learnt, client, local_job) -> None:
    bare = replace(client, validation=client.validation.take(np.arange(0)))
    bare = replace(bare, shard=replace(client.shard, validation_classes=client.shard.validation_classes[:0]))
    for request in (ClientRequest(clients=(1,)), SampleRequest(ids=client.shard.train_ids[:4])):
        values = work(
            learnt.world.server.model,
            learnt.trained.final,
            bare,
            local_job(request=request, objective="membership scores"),
        ).values
        assert len(values["held_out"]) == 0 < len(values["forget"]) and bool(torch.isfinite(values["forget"]).all())


def test_a_client_that_keeps_one_pair_measures_among_those_that_go(world, local_job) -> None:
    shard = world.shards[0]
    request = SampleRequest(ids=(*shard.train_ids[1:], world.shards[1].train_ids[0]))
    job = local_job(request=request, objective="membership scores")
    found = {update.client: update.values for update in world.federation.run(world.server.initial(), job, [0, 1])}
    assert found[0]["forget"].shape == (len(shard.train) - 1,) and found[1]["forget"].shape == (1,)
    assert all(bool(torch.isfinite(each["forget"]).all()) for each in found.values())


# --- the gap ---


def measured(forget: list[float], held_out: list[float]) -> dict[str, Tensor]:
    return {"forget": torch.tensor(forget), "held_out": torch.tensor(held_out)}


def test_the_gap_is_the_difference_of_means_over_all_clients_with_welchs_error() -> None:
    """(4, 6, 5) has mean 5 and variance 1, (1, 2, 3, 6) has mean 3 and variance 14/3."""
    gap = membership_gap({0: measured([4.0, 6.0], [1.0]), 1: measured([5.0], [2.0, 3.0, 6.0])})
    assert gap is not None
    assert gap.gap == pytest.approx(5 - 3)
    assert gap.standard_error == pytest.approx(math.sqrt(1 / 3 + 14 / 3 / 4))
    assert (gap.forget_pairs, gap.held_out_pairs) == (3, 4)


@pytest.mark.parametrize(
    ("forget", "held_out"),
    [([], []), ([1.0, 2.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [1.0, 2.0]), ([1.0, 2.0, 3.0], [])],
)
def test_with_too_few_pairs_there_is_not_a_gap(forget, held_out) -> None:
    assert membership_gap({0: measured(forget, held_out)}) is None
    assert membership_gap({0: measured(forget, held_out), 1: measured([], [])}) is None


def planted(gap: float, noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores after and before training, and who is a member: members are harder by 2 and gain `gap`; scores follow
    those before by 0.7."""
    rng = np.random.default_rng(seed)
    member = np.arange(150) < 90
    before = rng.normal(np.where(member, -2.0, 0.0), 1.5)
    after = 4 + 0.7 * before + rng.normal(0, noise, 150) + gap * member
    return torch.from_numpy(after), torch.from_numpy(before), torch.from_numpy(member).double()


@pytest.mark.parametrize("gap", [-1.0, 0.0, 2.5])
def test_given_the_scores_before_training_a_planted_gap_is_found(gap: float) -> None:
    after, before, member = planted(gap, noise=0.0)
    found, error = adjusted_gap(after, member, [before])
    assert found == pytest.approx(gap, abs=1e-9) and error < 1e-9
    plain, _ = adjusted_gap(after, member, [])
    assert plain < gap - 0.7  # the harder pairs hide what membership adds


def test_the_error_says_how_far_off_the_gap_is() -> None:
    """Over many draws the estimate scatters as much as its standard error says."""
    found = []
    for seed in range(200):
        after, before, member = planted(1.0, 0.8, seed)
        found.append(adjusted_gap(after, member, [before]))
    gaps, errors = np.array(found).T
    assert gaps.mean() == pytest.approx(1.0, abs=4 * gaps.std() / math.sqrt(200))
    assert errors.mean() == pytest.approx(gaps.std(), rel=0.2)


def test_covariates_that_are_all_alike_change_nothing() -> None:
    score, member = torch.tensor([4.0, 6.0, 5.0, 1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 1, 1, 0, 0, 0]).double()
    plain, covaried = adjusted_gap(score, member, []), adjusted_gap(score, member, [torch.ones(6).double()])
    assert covaried == pytest.approx(plain)


def test_clients_that_score_other_pairs_the_second_time_are_left_out() -> None:
    one = {client: measured([1.0, 2.0], [3.0, 4.0]) for client in range(4)}
    two = {**one, 3: measured([1.0, 2.0], [3.0]), 4: measured([1.0], [1.0])}
    del two[0]
    kept = comparable(one, two)
    assert [list(each) for each in kept] == [[1, 2], [1, 2]]


# --- asking for scores ---


def test_the_state_goes_to_those_who_are_named_and_answers_come_in_their_order(learnt) -> None:
    class Backwards(Middleware):
        def __init__(self, inner) -> None:
            super().__init__(inner)
            self.calls: list[tuple] = []

        def run(self, params, job, clients):
            self.calls.append((params, job, list(clients)))
            yield from reversed(list(super().run(params, job, clients)))

    asked, request = Backwards(learnt.world.federation), ClassRequest(classes=(0,))
    scores = measure_scores(learnt.trained, learnt.trained.final, request, asked, [1, 3, 2])
    ((state, job, clients),) = asked.calls
    assert state is learnt.trained.final and clients == [1, 3, 2] and list(scores) == [1, 2, 3]
    assert job.objective == "membership scores" and job.request == request


def test_unseen_pairs_have_no_gap_and_training_pairs_do(learnt) -> None:
    """Before training no one is a member; after it the training pairs stand out."""
    request, federation = ClientRequest(clients=(0, 1, 2, 3)), learnt.world.federation
    gaps = [
        membership_gap(measure_scores(learnt.trained, state, request, federation, federation.clients))
        for state in (learnt.trained.initial, learnt.trained.final)
    ]
    assert gaps[0] is not None and gaps[1] is not None
    assert abs(gaps[0].gap) < 4 * gaps[0].standard_error
    assert gaps[1].gap > 4 * gaps[1].standard_error


def test_a_client_without_forget_pairs_still_reports_its_held_out_scores(learnt) -> None:
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[:3])
    scores = measure_scores(learnt.trained, learnt.trained.final, request, learnt.world.federation, [0, 1, 2, 3])
    assert [len(values["forget"]) for values in scores.values()] == [3, 0, 0, 0]
    assert [len(values["held_out"]) for values in scores.values()] == [len(s.validation) for s in learnt.world.shards]
