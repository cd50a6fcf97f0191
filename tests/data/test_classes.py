"""Pseudo-classes: clear clusters are found, the same ones everywhere, with and without bringing pairs together."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits

from ease.data import classes as module
from ease.data.classes import (
    SMALLEST_GROUP,
    Groups,
    cached_classes,
    federated_classes,
    first_centres,
    group_sums,
    local_centres,
    moved,
    nearest,
    pseudo_classes,
)
from ease.data.partition import joint_embedding
from ease.errors import UserError


def clouds(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Pooled embeddings in three clear clouds, the pair's number modulo 3."""
    rng = np.random.default_rng(0)
    centres = np.eye(3, 8) * 10
    image = centres[np.arange(pairs) % 3] + rng.normal(size=(pairs, 8)) * 0.1
    return image, np.stack([image] * 5, axis=1) + rng.normal(size=(pairs, 5, 8)) * 0.1


def test_pseudo_classes_find_clear_clusters() -> None:
    image, text = clouds(60)
    labels, centroids = pseudo_classes(image, text, 3, seed=0)
    assert centroids.shape == (3, 16) and labels.dtype == np.int64
    for cloud in range(3):
        assert len(set(labels[cloud::3])) == 1
    assert len(set(labels[:3])) == 3


def test_pseudo_classes_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    image, text = rng.normal(size=(3000, 8)), rng.normal(size=(3000, 5, 8))
    results = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            results.append(pseudo_classes(image, text, 7, seed=0))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_pseudo_classes_are_computed_once_for_the_same_embeddings(own_cache: Path, monkeypatch) -> None:
    image, text = clouds(30)
    expected = pseudo_classes(image, text, 3, seed=0)
    asked = []
    monkeypatch.setattr(module, "pseudo_classes", lambda *given: asked.append(given[2:]) or pseudo_classes(*given))
    for _ in range(2):
        for found, wanted in zip(cached_classes(image, text, 3, 0), expected, strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
    assert asked == [(3, 0)]
    cached_classes(image, text, 2, 0), cached_classes(image, text, 3, 1)
    cached_classes(image + 1, text, 3, 0), cached_classes(image, text + 1, 3, 0)
    assert asked == [(3, 0), (2, 0), (3, 1), (3, 0), (3, 0)]
    for path in (own_cache / "classes").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    np.testing.assert_array_equal(cached_classes(image, text, 3, 0)[0], expected[0])


def test_more_classes_than_pairs_are_refused() -> None:
    image, text = clouds(6)
    with pytest.raises(UserError, match=r"partition.classes = 7: more pseudo-classes than the 6 training pairs; lower"):
        pseudo_classes(image, text, 7, seed=0)


def test_more_classes_than_distinct_pairs_are_refused() -> None:
    with pytest.raises(UserError, match=r"partition.classes = 3: more pseudo-classes than distinct"):
        pseudo_classes(np.ones((6, 8)), np.ones((6, 5, 8)), 3, seed=0)


# --- without bringing pairs together ---


def scattered(clients: Sequence[int], width: int = 6, seed: int = 0) -> list[np.ndarray]:
    """Clients with so many pairs each, in five clouds that overlap; which clouds a client sees is skewed."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(5, width)) * 1.5
    shares = rng.dirichlet(np.full(5, 0.7), size=len(clients))
    return [
        centres[rng.choice(5, pairs, p=share)] + rng.normal(size=(pairs, width))
        for pairs, share in zip(clients, shares, strict=True)
    ]


def naive_step(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """One step of Lloyd's algorithm, pair by pair."""
    groups: list[list[np.ndarray]] = [[] for _ in centres]
    for point in points:
        distances = [float(np.sum((point - centre) ** 2)) for centre in centres]
        groups[distances.index(min(distances))].append(point)
    return np.array([np.mean(group, axis=0) if group else old for group, old in zip(groups, centres, strict=True)])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_step_is_lloyds_step_on_all_pairs(clients: list[int], count: int, seed: int) -> None:
    """Also where a centre has no pairs at all, and where a client has none of a centre."""
    parts = scattered(clients, seed=seed)
    centres = np.random.default_rng(seed).normal(size=(count, 6)) * 3
    found = moved(centres, [group_sums(part, centres, smallest=1) for part in parts])
    np.testing.assert_allclose(found, naive_step(np.concatenate(parts), centres), atol=1e-12)


def test_all_steps_end_where_pooled_kmeans_ends_from_the_same_centres() -> None:
    parts = scattered((80, 40, 60, 30))
    start = first_centres([local_centres(part, 5, 0, client, 1) for client, part in enumerate(parts)], 5, 0)
    found = federated_classes(parts, 5, seed=0, smallest=1)
    oracle = KMeans(5, init=start, n_init=1, tol=0).fit(np.concatenate(parts))
    np.testing.assert_allclose(found.centres, oracle.cluster_centers_, atol=1e-9)
    np.testing.assert_array_equal(np.concatenate(found.labels), oracle.labels_)
    assert 1 < found.steps < module.MOST_STEPS


def test_few_steps_are_few() -> None:
    parts = scattered((80, 40))
    one, two = (federated_classes(parts, 5, 0, most_steps=steps) for steps in (1, 2))
    assert (one.steps, two.steps) == (1, 2)
    np.testing.assert_array_equal(two.centres, moved(one.centres, [group_sums(part, one.centres) for part in parts]))


def test_clear_clusters_are_found_though_no_client_has_all_of_them() -> None:
    image, text = clouds(90)
    joint = joint_embedding(image, text)
    cloud = np.arange(90) % 3
    clients = [joint[cloud == 0], joint[cloud == 1], joint[(cloud == 2) | (np.arange(90) < 30)]]
    found = federated_classes(clients, 3, seed=0)
    truth = np.concatenate([cloud[cloud == 0], cloud[cloud == 1], cloud[(cloud == 2) | (np.arange(90) < 30)]])
    assert adjusted_rand_score(truth, np.concatenate(found.labels)) == 1


def test_the_first_message_of_a_client_has_its_own_clusters() -> None:
    """Two clouds of 20 and 12 pairs by hand; the three pairs far away are too few and join the nearer cloud."""
    rng = np.random.default_rng(0)
    near, far, stray = (rng.normal(size=(n, 2)) * 0.1 + place for n, place in ((20, 0), (12, (50, 0)), (3, (60, 90))))
    joint = np.concatenate([near, far, stray])
    found = local_centres(joint, 3, seed=0, client=4)
    order = found.sums[:, 0].argsort()
    assert found.counts[order].tolist() == [20, 15]
    np.testing.assert_allclose(found.sums[order], [near.sum(0), far.sum(0) + stray.sum(0)])
    assert local_centres(joint, 3, 0, 4, smallest=3).counts.tolist().count(3) == 1


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 50), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_group_that_leaves_a_client_is_small(pairs: int, count: int, seed: int, equal: bool) -> None:
    """And none of its pairs is lost or counted twice; the pairs may all be equal."""
    rng = np.random.default_rng(seed)
    joint = np.ones((pairs, 3)) if equal else rng.normal(size=(pairs, 3))
    found = local_centres(joint, count, seed, client=0)
    assert len(found.counts) <= count and (found.counts >= SMALLEST_GROUP).all()
    if pairs < SMALLEST_GROUP:
        assert found.sums.shape == (0, 3)
    else:
        assert found.counts.sum() == pairs
        np.testing.assert_allclose(found.sums.sum(axis=0), joint.sum(axis=0), atol=1e-9)
    later = group_sums(joint, rng.normal(size=(count, 3)))
    assert ((later.counts == 0) | (later.counts >= SMALLEST_GROUP)).all()
    assert not later.sums[later.counts == 0].any()


def test_the_server_weighs_centres_by_their_pairs() -> None:
    """One common centre of 30 pairs at 0 and 10 at 8 lies at 2; two of them stay where they are."""
    answers = [Groups(np.array([[0.0], [80.0]]), np.array([30, 10])), Groups(np.zeros((0, 1)), np.zeros(0, int))]
    np.testing.assert_allclose(first_centres(answers, 1, seed=0), [[2.0]])
    np.testing.assert_allclose(sorted(first_centres(answers, 2, seed=0).ravel()), [0.0, 8.0])


def test_the_nearest_centre_is_the_first_of_the_nearest() -> None:
    centres = np.array([[0.0, 0], [2, 0], [2, 0], [9, 9]])
    assert nearest(np.array([[1.0, 0], [2, 1], [8, 8], [-5, 0]]), centres).tolist() == [0, 1, 3, 0]
    assert nearest(np.zeros((0, 2)), centres).shape == (0,)


def test_bytes_are_those_of_what_is_given() -> None:
    """Two clients, width 6, three classes: eight bytes for every number of every sum and for every count."""
    found = federated_classes(scattered((40, 4)), 3, seed=0)
    groups = len(local_centres(scattered((40, 4))[0], 3, 0, 0).counts)
    assert found.bytes_up == 8 * (groups * 7 + found.steps * 2 * 3 * 7)
    assert found.bytes_down == 8 * (found.steps + 1) * 2 * 3 * 6


def test_too_few_centres_are_refused_with_the_way_out() -> None:
    message = (
        r"partition.classes = 3: the clients' groups of at least 5 pairs have {} distinct centres; lower it.*pooled"
    )
    for parts, centres in (
        ([np.ones((20, 2)), np.ones((9, 2))], 1),
        ([np.arange(8.0).reshape(4, 2)] * 3, 0),
        (scattered((5, 6), width=2), 2),
    ):
        with pytest.raises(UserError, match=message.format(centres)):
            federated_classes(parts, 3, seed=0)


def test_clients_find_the_same_classes_again_whatever_the_threads() -> None:
    parts = scattered((300, 200, 100), width=32)
    results = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            results.append(federated_classes(parts, 5, seed=0))
    np.testing.assert_array_equal(results[0].centres, results[1].centres)
    assert not np.array_equal(results[0].centres, federated_classes(parts, 5, seed=1).centres)


def test_federated_classes_are_cached_for_these_clients(own_cache: Path, monkeypatch) -> None:
    image, text = clouds(60)
    deals = [np.arange(30), np.arange(30, 60)], [np.arange(0, 60, 2), np.arange(1, 60, 2)]
    asked = []
    real = module.federated_classes
    monkeypatch.setattr(module, "federated_classes", lambda *given: asked.append(given[1:]) or real(*given))
    for dealt in deals:
        joint = joint_embedding(image, text)
        expected = real([joint[own] for own in dealt], 3, 0)
        for _ in range(2):
            labels, centroids = cached_classes(image, text, 3, 0, dealt)
            np.testing.assert_array_equal(centroids, expected.centres)
            for own, classes in zip(dealt, expected.labels, strict=True):
                np.testing.assert_array_equal(labels[own], classes)
    assert asked == [(3, 0), (3, 0)]
    cached_classes(image, text, 3, 0)
    assert len(asked) == 2 and len(list((own_cache / "classes").iterdir())) == 3
