"""Retrieval against naive oracles: full sorts, enumerated tie breaking, simulated chance."""

import itertools
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from ease.errors import UserError
from ease.measures import retrieval
from ease.measures.retrieval import Recall, chance_recall, first_recall, gallery_recall, recall

KS = (1, 5, 10)


def world(pairs: int, captions: int, width: int = 16, noise: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images and captions that share a noisy meaning."""
    rng = torch.Generator().manual_seed(seed)
    meaning = torch.randn(pairs, width, generator=rng)
    image = meaning + noise * torch.randn(pairs, width, generator=rng)
    text = meaning[:, None] + noise * torch.randn(pairs, captions, width, generator=rng)
    return normalize(image, dim=-1), normalize(text, dim=-1)


def naive(image: Tensor, text: Tensor, ks: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Recall@k of both directions from one full fp64 matrix and full sorts."""
    n, captions = text.shape[:2]
    scores = image.double().numpy() @ text.reshape(n * captions, -1).double().numpy().T
    owner = np.repeat(np.arange(n), captions)
    nearest_text = owner[np.argsort(-scores, axis=1)]
    nearest_image = np.argsort(-scores.T, axis=1)
    to_text = {k: 100 * float(np.mean([i in nearest_text[i, :k] for i in range(n)])) for k in ks}
    to_image = {k: 100 * float(np.mean([owner[j] in nearest_image[j, :k] for j in range(n * captions)])) for k in ks}
    return to_text, to_image


def tie_slack(measured: Recall) -> float:
    """How far chance fp32 ties can move one direction from the fp64 oracle: its share of tied queries."""
    return 2 * measured.tie_rate + 1e-9


def enumerated(scores: np.ndarray, positive: np.ndarray, k: int) -> float:
    """Share of all orders of the items which, stably sorted by score, put a positive in the top k."""
    orders = np.array(list(itertools.permutations(range(len(scores)))))
    ranked = np.take_along_axis(orders, np.argsort(-scores[orders], axis=1, kind="stable"), 1)
    return float(positive[ranked[:, :k]].any(1).mean())


def enumerated_recall(image: Tensor, text: Tensor, k: int) -> tuple[float, float]:
    n, captions = text.shape[:2]
    # Basis vectors and their like have exact products, so the oracle sees the very same ties.
    scores = (image @ text.flatten(0, 1).T).numpy()
    owner = np.repeat(np.arange(n), captions)
    to_text = [enumerated(scores[i], owner == i, k) for i in range(n)]
    to_image = [enumerated(scores[:, j], np.arange(n) == owner[j], k) for j in range(n * captions)]
    return 100 * float(np.mean(to_text)), 100 * float(np.mean(to_image))


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.integers(2, 30),
    captions=st.integers(1, 5),
    noise=st.floats(0.1, 3),
    seed=st.integers(0, 10**6),
    chunk=st.integers(1, 40),
)
def test_recall_equals_full_sort(pairs: int, captions: int, noise: float, seed: int, chunk: int) -> None:
    image, text = world(pairs, captions, noise=noise, seed=seed)
    measured = recall(image, text, KS, chunk)
    to_text, to_image = naive(image, text, KS)
    slack = tie_slack(measured)
    assert measured.image_to_text == pytest.approx(to_text, abs=slack)
    assert measured.text_to_image == pytest.approx(to_image, abs=slack)
    assert measured.mean == pytest.approx({k: (measured.image_to_text[k] + measured.text_to_image[k]) / 2 for k in KS})


def test_larger_set_with_five_captions_equals_full_sort() -> None:
    image, text = world(200, 5, noise=1.5)
    measured = recall(image, text)
    to_text, to_image = naive(image, text, KS)
    assert measured.tie_rate < 0.5
    assert measured.image_to_text == pytest.approx(to_text, abs=tie_slack(measured))
    assert measured.text_to_image == pytest.approx(to_image, abs=tie_slack(measured))
    assert 0 < measured.text_to_image[1] < measured.image_to_text[1] < 100, "any of five captions is the easier hit"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), shape=st.sampled_from([(2, 1), (2, 3), (3, 1), (3, 2), (4, 1), (6, 1), (2, 2)]))
def test_ties_give_the_mean_over_all_tie_breaks(data: st.DataObject, shape: tuple[int, int]) -> None:
    pairs, captions = shape
    directions = st.integers(0, 2)
    image_at = data.draw(st.lists(directions, min_size=pairs, max_size=pairs).filter(lambda at: len(set(at)) > 1))
    size = pairs * captions
    text_at = data.draw(st.lists(directions, min_size=size, max_size=size).filter(lambda at: len(set(at)) > 1))
    image = one_hot(torch.tensor(image_at), 3).float()
    text = one_hot(torch.tensor(text_at), 3).float().reshape(pairs, captions, 3)
    measured = recall(image, text, ks=range(1, 8))
    for k in range(1, 8):
        expected = enumerated_recall(image, text, k)
        assert (measured.image_to_text[k], measured.text_to_image[k]) == pytest.approx(expected)


def test_two_clusters_by_hand() -> None:
    image = torch.eye(2)[[0, 0, 1, 1]]
    measured = recall(image, image[:, None].repeat(1, 2, 1), ks=(1, 2, 3))
    assert measured.text_to_image == pytest.approx({1: 50, 2: 100, 3: 100})
    # Four tied captions, two of them right: 1 - C(2, s) / C(4, s).
    assert measured.image_to_text == pytest.approx({1: 50, 2: 100 * 5 / 6, 3: 100})
    assert measured.tie_rate == 100


def test_captions_repeated_within_a_pair_are_not_ties() -> None:
    image = torch.eye(6)
    measured = recall(image, image[:, None].repeat(1, 5, 1))
    assert measured.tie_rate == 0 and measured.mean == {1: 100, 5: 100, 10: 100}


def test_copies_tie_exactly_at_every_position() -> None:
    """Half of the pairs are copies of the other half in dense, odd-sized matrices, where kernels have edges."""
    image, text = world(61, 3, width=37)
    order = torch.randperm(122, generator=torch.Generator().manual_seed(1))
    image, text = image.repeat(2, 1)[order], text.repeat(2, 1, 1)[order]
    for chunk in (1, 7, 122):
        assert recall(image, text, chunk=chunk).tie_rate == 100


def test_nearly_collapsed_model_scores_near_chance() -> None:
    """All but one pair alike: strict comparison would read 100 %."""
    image = torch.eye(2)[[0] * 99 + [1]]
    measured = recall(image, image[:, None], ks=(1,))
    # Each of the 99 hits with probability 1/99, the odd one always: 2 hits in 100 queries.
    assert measured.mean[1] == pytest.approx(2)
    assert measured.tie_rate == pytest.approx(99)


def test_perfect_embeddings() -> None:
    image = torch.eye(50)
    assert recall(image, image[:, None]).mean == {1: 100, 5: 100, 10: 100}


def test_random_embeddings_are_at_chance() -> None:
    image, text = world(400, 5, width=64)
    _, other = world(400, 5, width=64, seed=1)
    measured = recall(image, other)
    for k in KS:
        # 400 + 2,000 queries; four standard errors of the smaller set of queries.
        assert abs(measured.mean[k] - measured.chance[k]) < 4 * 100 * (k / 400 / 400) ** 0.5
    assert recall(image, text).mean[1] > 10 * measured.chance[1]


def test_chance_by_simulation() -> None:
    pairs, captions, trials = 7, 3, 40_000
    rng = np.random.default_rng(0)
    chance = chance_recall(pairs, captions, KS)
    ranks = np.argsort(rng.random((trials, pairs * captions)), axis=1)
    best_caption = ranks[:, :captions].min(1)
    image_rank = rng.integers(pairs, size=trials)
    for k in KS:
        simulated = 50 * ((best_caption < k).mean() + (image_rank < k).mean())
        assert chance[k] == pytest.approx(simulated, abs=0.7)
    assert chance_recall(1000, 1)[5] == pytest.approx(0.5)
    assert recall(*world(7, 3)).chance == chance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    image, text = (embeddings.bfloat16().to(dtype) for embeddings in world(80, 5))
    assert recall(image, text) == recall(image.float(), text.float())


def test_matmul_switches_have_no_say() -> None:
    image, text = world(80, 5)
    expected = recall(image, text)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert recall(image, text) == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("chunk", [1, 3, 64, 299, 10_000])
def test_chunks_do_not_change_the_result(chunk: int) -> None:
    image, text = world(60, 5)
    image[10:20], text[10:20] = image[:10].clone(), text[:10].clone()
    assert recall(image, text, chunk=chunk) == recall(image, text)


def test_more_places_than_items_always_hit() -> None:
    measured = recall(*world(3, 2, noise=5), ks=(3, 6, 100))
    assert measured.text_to_image == {3: 100, 6: 100, 100: 100} and measured.image_to_text[6] == 100


def test_metrics_keys() -> None:
    measured = recall(*world(10, 2), ks=(1,))
    assert measured.metrics("forget") == {
        "forget/recall@1": measured.mean[1],
        "forget/recall@1/image_to_text": measured.image_to_text[1],
        "forget/recall@1/text_to_image": measured.text_to_image[1],
        "forget/recall@1/chance": measured.chance[1],
        "forget/tie_rate": measured.tie_rate,
    }


def broken(kind: str) -> tuple[Tensor, Tensor]:
    image, text = world(6, 2)
    match kind:
        case "nan":
            text[3, 1, 0] = float("nan")
        case "infinite":
            image[0, 0] = float("inf")
        case "zero":
            image[2] = 0
        case "equal":
            image = image[:1].repeat(6, 1)
        case "nearly equal":
            text = text[:1, :1].repeat(6, 2, 1) + 1e-8 * torch.randn(6, 2, 16)
        case "long":
            image = 3 * image
        case "one pair":
            image, text = image[:1], text[:1]
        case "shapes":
            text = text[:5]
        case "no captions":
            text = text[:, :0]
        case "flat text":
            text = text[:, 0]
    return image, text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nan", "1 of 12 text embeddings are not finite"),
        ("infinite", "1 of 6 image embeddings are not finite"),
        ("zero", "1 of 6 image embeddings are zero"),
        ("equal", "all 6 image embeddings are equal"),
        ("nearly equal", "all 12 text embeddings are equal"),
        ("long", "normalise"),
        ("one pair", "at least 2 pairs"),
        ("shapes", r"\[6, 16\] and \[5, 2, 16\]"),
        ("no captions", r"\[6, 0, 16\]"),
        ("flat text", r"\[6, 16\] and \[6, 16\]"),
    ],
)
def test_refusals_are_one_clear_line(kind: str, words: str) -> None:
    for measure in (recall, lambda image, text: gallery_recall(image, text, 4, 2, np.random.default_rng(0))):
        with pytest.raises(UserError, match=words) as refusal:
            measure(*broken(kind))
        assert "\n" not in str(refusal.value)


def test_ks_size_and_draws_are_checked() -> None:
    image, text = world(6, 2)
    for ks in ((), (0, 1), (1, 1)):
        with pytest.raises(UserError, match="ks"):
            recall(image, text, ks)
    for size, draws in ((1, 5), (4, 0)):
        with pytest.raises(UserError, match="at least 2 pairs and 1 draw"):
            gallery_recall(image, text, size, draws, np.random.default_rng(0))


def test_whole_gallery_says_so_and_equals_recall() -> None:
    image, text = world(40, 3)
    full = recall(image, text)
    for size in (40, 1000):
        drawn = gallery_recall(image, text, size, 20, np.random.default_rng(0))
        assert (drawn.whole, drawn.size, drawn.draws, drawn.chance) == (True, 40, 1, full.chance)
        for k in KS:
            assert drawn[f"recall@{k}"].mean == pytest.approx(full.mean[k])
            assert drawn[f"recall@{k}/image_to_text"].mean == pytest.approx(full.image_to_text[k])
            assert drawn[f"recall@{k}/text_to_image"].mean == pytest.approx(full.text_to_image[k])
        assert drawn["recall@1"].low < full.mean[1] < drawn["recall@1"].high


@pytest.mark.parametrize("kept_bytes", [0, 2**30])
def test_galleries_equal_recall_on_the_same_draws(monkeypatch: pytest.MonkeyPatch, kept_bytes: int) -> None:
    """With and without the kept score matrix."""
    monkeypatch.setattr(retrieval, "MATRIX_BYTES", kept_bytes)
    image, text = world(50, 3)
    image[5:9], text[5:9] = image[:4].clone(), text[:4].clone()
    drawn = gallery_recall(image, text, 20, 30, np.random.default_rng(4))
    rng = np.random.default_rng(4)
    draws = [torch.from_numpy(np.sort(rng.choice(50, 20, replace=False))) for _ in range(30)]
    each = [recall(image[members], text[members]) for members in draws]
    assert (drawn.whole, drawn.size, drawn.draws) == (False, 20, 30)
    assert drawn.chance == each[0].chance
    assert drawn["tie_rate"].mean == pytest.approx(np.mean([one.tie_rate for one in each])) and each[0].tie_rate > 0
    for k in KS:
        assert drawn[f"recall@{k}"].mean == pytest.approx(np.mean([one.mean[k] for one in each]))
        assert drawn[f"recall@{k}/text_to_image"].mean == pytest.approx(np.mean([one.text_to_image[k] for one in each]))


def test_fixed_size_makes_sets_of_different_size_comparable() -> None:
    small, large = world(100, 2, noise=1.2, seed=5), world(600, 2, noise=1.2, seed=6)
    assert recall(*small).mean[1] > recall(*large).mean[1] + 10, "the same model looks worse in a larger gallery"
    a, b = (gallery_recall(*pairs, 60, 40, np.random.default_rng(0))["recall@1"] for pairs in (small, large))
    assert a.low < b.mean < a.high
    assert b.high - b.low < a.high - a.low, "more pairs, narrower interval"


def test_interval_width_matches_the_binomial_case() -> None:
    """One caption and independent hits: the interval over pairs is about 1.96 standard errors of a mean."""
    image, text = world(400, 1, noise=1.2)
    full = gallery_recall(image, text, 400, 1, np.random.default_rng(0), ks=(1,))["recall@1/image_to_text"]
    share = full.mean / 100
    assert (full.high - full.low) / 2 == pytest.approx(196 * (share * (1 - share) / 400) ** 0.5, rel=0.1)


@pytest.mark.parametrize("pairs", [1, 7, 100])
def test_bootstrap_equals_a_loop_over_replicates(pairs: int) -> None:
    rng = np.random.default_rng(3)
    totals, counts = rng.random((pairs, 2)), rng.integers(1, 9, pairs).astype(float)
    mean, low, high = retrieval._bootstrap(totals, counts, np.random.default_rng(8))
    drawn, replicates = np.random.default_rng(8), []
    for _ in range(retrieval.REPLICATES):
        chosen = drawn.integers(pairs, size=pairs)
        replicates.append(
            [sum(totals[i, column] for i in chosen) / sum(counts[i] for i in chosen) for column in (0, 1)]
        )
    assert mean == pytest.approx(totals.sum(0) / counts.sum())
    assert low == pytest.approx(np.percentile(replicates, 2.5, axis=0))
    assert high == pytest.approx(np.percentile(replicates, 97.5, axis=0))


def test_gallery_metrics_keys_and_repeatability() -> None:
    image, text = world(30, 2)
    first, again = (gallery_recall(image, text, 10, 5, np.random.default_rng(3), ks=(1,)) for _ in range(2))
    assert first == again
    flat = first.metrics("retain")
    assert flat["retain/recall@1"] == first["recall@1"].mean and flat["retain/gallery_pairs"] == 10
    assert flat["retain/recall@1/low"] <= flat["retain/recall@1"] <= flat["retain/recall@1/high"]
    assert set(flat) >= {"retain/recall@1/image_to_text/low", "retain/recall@1/chance", "retain/tie_rate"}


MEMORY = """
import torch
from torch.nn.functional import normalize
from ease.measures.retrieval import recall
from ease.runs.memory import peak_memory
image, text = normalize(torch.randn(5000, 64), dim=-1), normalize(torch.randn(5000, 5, 64), dim=-1)
recall(image, text)
print(peak_memory(torch.device("cpu")))  # not getrusage's, which begins with what the parent held
"""


@pytest.mark.slow
def test_a_gallery_of_5000_images_and_25000_captions_is_never_one_matrix() -> None:
    """Measured: a third of a GiB in chunks, 1.8 GiB in one piece; the promise is less than 2."""
    ended = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True)
    assert int(ended.stdout) < 2**30


def test_only_the_queries_count_and_all_of_them_are_in_every_gallery() -> None:
    """One query and three others on a plane. Its caption lies 30° off; one other's image and caption hide it.

    Others at 0° and 10° of the query's caption: among galleries of three (the query and two of three others), the image
    finds its caption unless a nearer one is there. The exact expectation is the mean over the three pairs of others.
    """
    angles = np.deg2rad([0.0, 20.0, 90.0, 180.0])
    points = torch.tensor(np.stack([np.cos(angles), np.sin(angles)], 1))
    turned = np.deg2rad([30.0, 10.0, 100.0, 190.0])
    captions = torch.tensor(np.stack([np.cos(turned), np.sin(turned)], 1))[:, None]
    found = gallery_recall(points, captions, 3, 400, np.random.default_rng(0), ks=(1,), queries=1)
    # image 0 at 0°: caption 1 at 10° is nearer than its own at 30°; caption 0 at 30°: image 1 at 20° is nearer.
    # So it is a miss in both directions whenever pair 1 is there, in two of the three galleries.
    assert found.size == 3
    assert found["recall@1"].mean == pytest.approx(100 / 3, abs=6)
    alone = gallery_recall(points[[0, 2, 3]], captions[[0, 2, 3]], 3, 1, np.random.default_rng(0), ks=(1,), queries=1)
    assert alone["recall@1"].mean == 100


@pytest.mark.parametrize("queries", [0, 4])
def test_queries_must_fit_into_a_gallery(queries: int) -> None:
    points = torch.nn.functional.normalize(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    with pytest.raises(UserError, match=f"queries={queries}"):
        gallery_recall(points, points[:, None], 3, 1, np.random.default_rng(0), queries=queries)


def test_the_first_pair_of_each_gallery_by_full_sorts() -> None:
    """Three galleries of their own; a naive count of who is nearer to the first pair of each."""
    galleries = [world(12, 3, noise=1.5, seed=seed) for seed in range(3)]
    image, text = (torch.stack(parts) for parts in zip(*galleries, strict=True))
    found = first_recall(image, text, np.random.default_rng(0), KS)
    assert (found.size, found.draws) == (12, 1) and found.chance == chance_recall(12, 3, KS)
    for k in KS:
        to_text, to_image = [], []
        for pictures, captions in galleries:
            best = max(float(pictures[0] @ caption) for caption in captions[0])
            above = sum(float(pictures[0] @ caption) > best for other in captions[1:] for caption in other)
            to_text.append(above < k)
            for caption in captions[0]:
                to_image.append(sum(float(caption @ each) > float(caption @ pictures[0]) for each in pictures[1:]) < k)
        assert found[f"recall@{k}/image_to_text"].mean == pytest.approx(100 * np.mean(to_text))
        assert found[f"recall@{k}/text_to_image"].mean == pytest.approx(100 * np.mean(to_image))
    assert 0 < found["recall@1"].mean < 100
