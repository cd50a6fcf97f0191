"""Canaries: mismatched, planted by a fair coin, and data to no one."""

import numpy as np
import pytest

from ease.data.canaries import SPLIT, plant, toss, with_canaries
from ease.data.pairs import PairSet
from ease.data.partition import Shard
from ease.errors import UserError

NONE = np.zeros(0, dtype=np.int64)


def pair_set() -> PairSet:
    splits = ("train",) * 10 + ("validation",) * 20 + ("test",) * 5
    ids = tuple(f"{split}-{n}" for n, split in enumerate(splits))
    captions = tuple((f"about {name}",) * 5 for name in ids)
    return PairSet(ids, captions, np.zeros((35, 1, 1, 3), np.uint8), splits, "f", digests=tuple(f"d{n}" for n in ids))


def test_a_canary_is_a_validation_picture_with_the_captions_of_another() -> None:
    pairs, found = pair_set(), with_canaries(pair_set(), 8, seed=0)
    canaries = found.indices(SPLIT)
    assert len(canaries) == 8 and set(canaries) <= set(pairs.indices("validation"))
    reported = [found.captions[each] for each in canaries]
    assert all(found.captions[each] != pairs.captions[each] for each in canaries)
    assert sorted(reported) == sorted(pairs.captions[each] for each in canaries), "no other pair's captions are used"
    assert all(found.ids[each] == f"canary-{pairs.ids[each]}" for each in canaries)
    others = np.setdiff1d(np.arange(35), canaries)
    for field in ("ids", "captions", "splits", "digests"):
        assert [getattr(found, field)[n] for n in others] == [getattr(pairs, field)[n] for n in others]
    assert not {found.digests[n] for n in canaries} & set(pairs.digests)
    assert found.fingerprint not in {pairs.fingerprint, with_canaries(pairs, 8, seed=1).fingerprint}
    assert found.ids == with_canaries(pairs, 8, seed=0).ids


def test_no_canaries_change_nothing_and_more_than_there_are_pairs_are_refused() -> None:
    pairs = pair_set()
    assert with_canaries(pairs, 0, seed=0) is pairs
    for count in (1, 21):
        with pytest.raises(UserError, match=rf"data.canaries = {count}: .* 2 or more, and there are 20"):
            with_canaries(pairs, count, seed=0)


def test_the_coin_is_fair_and_each_is_its_own() -> None:
    ids = [f"c{n}" for n in range(4000)]
    drawn = toss(ids, (3, 5, 8), seed=0)
    assert abs(drawn.heads.mean() - 0.5) < 3 * 0.5 / 4000**0.5
    assert set(drawn.home) == {3, 5, 8} and np.bincount(drawn.home).max() < 4000 / 3 + 3 * (4000 * 2 / 9) ** 0.5
    assert abs(np.corrcoef(drawn.heads, drawn.home)[0, 1]) < 3 / 4000**0.5
    np.testing.assert_array_equal(toss(ids[:7], (3, 5, 8), seed=0).heads, drawn.heads[:7])
    assert (toss(ids, (3, 5, 8), seed=1).heads != drawn.heads).mean() > 0.4


def test_heads_are_at_their_homes_and_tails_nowhere() -> None:
    pairs = with_canaries(pair_set(), 20, seed=0)
    shards = tuple(
        Shard(client, own, NONE, tuple(pairs.ids[n] for n in own), np.zeros(5, np.int64), NONE)
        for client, own in ((0, np.arange(5)), (1, np.arange(5, 10)))
    )
    planted = plant(shards, pairs, lambda positions: positions % 3, seed=0)
    drawn = toss([pairs.ids[n] for n in pairs.indices(SPLIT)], (0, 1), seed=0)
    assert 0 < drawn.heads.sum() < 20
    for before, after in zip(shards, planted, strict=True):
        expected = pairs.indices(SPLIT)[drawn.heads & (drawn.home == before.client)]
        np.testing.assert_array_equal(after.train, [*before.train, *expected])
        assert after.train_ids == tuple(pairs.ids[n] for n in after.train)
        np.testing.assert_array_equal(after.train_classes[5:], expected % 3)
    assert plant(shards, pair_set(), lambda positions: positions, seed=0) is shards
