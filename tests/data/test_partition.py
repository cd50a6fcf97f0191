"""Who holds what: every pair dealt once, skewed as asked, with enough for everyone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ease.data.partition import (
    MINIMUM_PAIRS,
    joint_embedding,
    make_shards,
    partition,
    partition_by_site,
)
from ease.errors import UserError

LABELS = np.repeat(np.arange(4), 50)


@given(
    scheme=st.sampled_from(["iid", "dirichlet", "uniform"]),
    clients=st.integers(1, 12),
    beta=st.sampled_from([0.2, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_every_pair_is_dealt_exactly_once_or_the_deal_is_refused(scheme, clients, beta, seed) -> None:
    try:
        dealt = partition(scheme, LABELS, clients, beta, seed)
    except UserError as error:
        assert scheme == "dirichlet" and "partition.beta" in str(error)
        return
    assert len(dealt) == clients and min(map(len, dealt)) >= MINIMUM_PAIRS
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.arange(len(LABELS)))


@pytest.mark.parametrize("scheme", ["iid", "dirichlet", "uniform"])
def test_the_seed_decides_the_deal(scheme) -> None:
    one, same, other = (partition(scheme, LABELS, 4, 1.0, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_uniform_gives_every_client_the_same_of_every_class() -> None:
    for positions in partition("uniform", LABELS, 4, 0.5, seed=0):
        counts = np.bincount(LABELS[positions], minlength=4)
        assert set(counts) <= {12, 13}  # 50 pairs of a class for 4 clients


def test_uniform_spreads_the_remainders() -> None:
    labels = np.repeat(np.arange(30), 5)  # each class leaves one pair over
    sizes = [len(positions) for positions in partition("uniform", labels, 4, 0.5, seed=0)]
    assert max(sizes) - min(sizes) < 30


def largest_class_share(beta: float) -> float:
    deals = [partition("dirichlet", LABELS, 4, beta, seed) for seed in range(5)]
    shares = [np.bincount(LABELS[p], minlength=4).max() / len(p) for dealt in deals for p in dealt]
    return float(np.mean(shares))


def test_a_smaller_beta_is_more_skewed() -> None:
    assert largest_class_share(0.3) > largest_class_share(3.0) > largest_class_share(1000.0)
    assert largest_class_share(1000.0) < 0.35


def test_too_many_clients_are_refused() -> None:
    assert len(partition("iid", np.zeros(10, int), 5, 1.0, 0)) == 5
    with pytest.raises(UserError, match=r"partition.clients = 6: 10 pairs cannot give every client 2; use fewer"):
        partition("iid", np.zeros(10, int), 6, 1.0, 0)


def test_a_shard_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match=r"partition.beta = 0.001: client \d+ got [01] pairs.*raise partition.beta"):
        partition("dirichlet", LABELS, 10, 0.001, 0)


def shards_of(share: float, dealt: list[np.ndarray] | None = None):
    pool = np.arange(1000, 1200)
    ids = tuple(f"pair-{index}" for index in range(1200))
    return make_shards(pool, ids, LABELS, dealt or partition("iid", LABELS, 4, 1.0, 0), share, seed=3)


def test_each_client_sets_its_validation_share_aside() -> None:
    for shard in shards_of(0.1):
        assert len(shard.validation) == 5 and len(shard.train) == 45
        assert not set(shard.train) & set(shard.validation)
        assert shard.train_ids == tuple(f"pair-{position}" for position in shard.train)
        np.testing.assert_array_equal(shard.train_classes, LABELS[shard.train - 1000])
        np.testing.assert_array_equal(shard.validation_classes, LABELS[shard.validation - 1000])
    together = np.concatenate([part for shard in shards_of(0.1) for part in (shard.train, shard.validation)])
    np.testing.assert_array_equal(np.sort(together), np.arange(1000, 1200))


def test_the_validation_share_never_takes_the_last_training_pairs() -> None:
    (shard,) = shards_of(0.9, [np.arange(3)])
    assert (len(shard.train), len(shard.validation)) == (2, 1)
    (shard,) = shards_of(0.0, [np.arange(3)])
    assert (len(shard.train), len(shard.validation)) == (3, 0)


def test_sites_are_numbered_in_the_order_of_their_names() -> None:
    names, dealt = partition_by_site(["b", "a 10", "b", "a 2", "a 2", "a 10", "b"])
    assert names == ("a 10", "a 2", "b")
    assert [positions.tolist() for positions in dealt] == [[1, 5], [3, 4], [0, 2, 6]]


def test_a_site_with_one_pair_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"site 'north' has 1 training pair, at least 2 are needed; add pairs, join it"):
        partition_by_site(["south", "north", "south"])


def test_shards_keep_the_names_of_sites_and_simulated_clients_have_none() -> None:
    dealt = [np.arange(5), np.arange(5, 9)]
    shards = make_shards(np.arange(9), tuple("abcdefghi"), LABELS[:9], dealt, 0.2, 0, ("north", "south"))
    assert [(shard.client, shard.name) for shard in shards] == [(0, "north"), (1, "south")]
    assert {shard.name for shard in shards_of(0.1)} == {None}


def test_joint_embedding_joins_unit_vectors_and_bears_zeros() -> None:
    rng = np.random.default_rng(0)
    image, text = rng.normal(size=(6, 8)), rng.normal(size=(6, 5, 8))
    image[0] = 0
    joint = joint_embedding(image, text)
    np.testing.assert_allclose(np.linalg.norm(joint[1:, :8], axis=1), 1)
    np.testing.assert_allclose(np.linalg.norm(joint[:, 8:], axis=1), 1)
    assert not joint[0, :8].any()
