"""From pairs to clients: real sites keep what they have, simulated clients are dealt as before, classes as asked."""

import json
from pathlib import Path

import numpy as np
import pytest

from ease.data.classes import federated_classes, pseudo_classes
from ease.data.config import PartitionConfig
from ease.data.dealing import deal
from ease.data.features import Activations
from ease.data.pairs import PairSet
from ease.data.partition import joint_embedding, partition
from ease.errors import UserError
from ease.runs.config import load_config
from ease.runs.world import World

pytestmark = pytest.mark.usefixtures("own_cache")
SITES = ("west", "east", "north")
TEST = (4, 17, 30)
"""Positions of test pairs, which name no site."""


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    ids = tuple(f"pair-{number}" for number in range(93))
    splits = tuple("test" if number in TEST else "train" for number in range(93))
    sites = tuple(None if number in TEST else SITES[number % 3] for number in range(93))
    return PairSet(ids, (), np.zeros((93, 1, 1, 3), np.uint8), splits, "fingerprint", sites=sites)


@pytest.fixture(scope="module")
def activations() -> Activations:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(4, 8))[rng.integers(4, size=93)] + 0.3 * rng.normal(size=(93, 8))
    text = np.stack([image] * 5, axis=1) + 0.2 * rng.normal(size=(93, 5, 8))
    return Activations(image, text, None, image, text)


def classes_by_position(shards) -> dict[int, int]:
    parts = [(s.train, s.train_classes) for s in shards] + [(s.validation, s.validation_classes) for s in shards]
    return {int(p): int(c) for positions, classes in parts for p, c in zip(positions, classes, strict=True)}


def test_sites_keep_their_pairs_and_find_classes_without_pooling(pairs, activations) -> None:
    """Numbered by name; the number of simulated clients does not count."""
    settings = PartitionConfig(scheme="sites", clients=50, classes=4, validation_share=0.2)
    shards, centroids = deal(settings, pairs, activations, 5, 7)
    assert [(shard.client, shard.name) for shard in shards] == [(0, "east"), (1, "north"), (2, "west")]
    held = [np.sort(np.concatenate([shard.train, shard.validation])) for shard in shards]
    for positions, name in zip(held, sorted(SITES), strict=True):
        assert positions.tolist() == [n for n in range(93) if n % 3 == SITES.index(name) and n not in TEST]
    own = [joint_embedding(activations.pooled_image[p], activations.pooled_text[p]) for p in held]
    expected = federated_classes(own, 4, seed=5)
    np.testing.assert_array_equal(centroids, expected.centres)
    found = classes_by_position(shards)
    for positions, labels in zip(held, expected.labels, strict=True):
        assert [found[position] for position in positions] == labels.tolist()


def test_sites_may_be_clustered_in_one_place(pairs, activations) -> None:
    shards, centroids = deal(PartitionConfig(scheme="sites", classes=4, clustering="pooled"), pairs, activations, 5, 7)
    pool = pairs.indices("train")
    labels, centres = pseudo_classes(activations.pooled_image[pool], activations.pooled_text[pool], 4, 5)
    np.testing.assert_array_equal(centroids, centres)
    assert classes_by_position(shards) == dict(zip(pool.tolist(), labels.tolist(), strict=True))


@pytest.mark.parametrize("scheme", ["iid", "dirichlet", "uniform"])
@pytest.mark.parametrize("clustering", ["auto", "federated"])
def test_simulated_clients_are_dealt_by_the_classes_of_all_pairs(pairs, activations, scheme, clustering) -> None:
    """Whatever they call a class afterwards, so that one setting changes one thing."""
    settings = PartitionConfig(scheme=scheme, clients=3, beta=5.0, classes=4, clustering=clustering)
    shards, centroids = deal(settings, pairs, activations, 5, 7)
    pool = pairs.indices("train")
    labels, centres = pseudo_classes(activations.pooled_image[pool], activations.pooled_text[pool], 4, 5)
    dealt = partition(scheme, labels, 3, 5.0, 7)
    assert [shard.name for shard in shards] == [None] * 3
    for shard, positions in zip(shards, dealt, strict=True):
        assert sorted([*shard.train, *shard.validation]) == pool[positions].tolist()
    if clustering == "federated":
        joint = joint_embedding(activations.pooled_image[pool], activations.pooled_text[pool])
        found = federated_classes([joint[positions] for positions in dealt], 4, 5)
        centres = found.centres
        for positions, own in zip(dealt, found.labels, strict=True):
            labels[positions] = own
    np.testing.assert_array_equal(centroids, centres)
    assert classes_by_position(shards) == dict(zip(pool.tolist(), labels.tolist(), strict=True))


@pytest.mark.parametrize(
    ("scheme", "clustering", "federated"),
    [
        ("sites", "auto", True), ("sites", "pooled", False), ("sites", "federated", True),
        ("iid", "auto", False), ("dirichlet", "auto", False), ("uniform", "federated", True),
    ],
)  # fmt: skip
def test_classes_are_federated_for_real_sites_or_when_asked(scheme, clustering, federated) -> None:
    assert PartitionConfig(scheme=scheme, clustering=clustering).federated_classes is federated


@pytest.fixture
def photos(tmp_path: Path, picture) -> Path:
    """Thirty training pictures of three hospitals and four test pictures of none."""
    rows = [
        {
            "image": picture(tmp_path / "photos" / f"{n}.png", 7 * n).name,
            "captions": [f"scan {n}", f"film {n}"],
            "split": "train" if n < 30 else "test",
            "site": f"Hospital {n % 3}" if n < 30 else "",
            "ward": n,
        }
        for n in range(34)
    ]
    (tmp_path / "photos" / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "photos"


def open_world(photos: Path, *settings: str) -> World:
    small = ("data.name=folder", f"data.path={photos}", "partition.classes=2", "model.hidden=16", "model.embedding=8")
    return World.open(load_config(None, (*small, *settings)))


def test_a_run_over_real_sites(photos: Path) -> None:
    world = open_world(photos, "partition.scheme=sites")
    assert [shard.name for shard in world.shards] == ["Hospital 0", "Hospital 1", "Hospital 2"]
    assert {pair_id for shard in world.shards for pair_id in shard.train_ids} <= {str(n) for n in range(30)}
    assert list(world.evaluator.pairs.report.lines())[-1] == "  columns not used: ward"
    assert set(world.federation.clients) == {0, 1, 2}


def test_a_simulated_run_says_that_there_are_sites(photos: Path) -> None:
    world = open_world(photos, "partition.scheme=iid", "partition.clients=2")
    assert [shard.name for shard in world.shards] == [None, None]
    last = list(world.evaluator.pairs.report.lines())[-1]
    assert last == '  columns not used: ward, site (set partition.scheme = "sites" to deal by it)'


def test_generated_pairs_are_of_no_site() -> None:
    with pytest.raises(UserError, match=r'data\.name = "scenes": generated pairs are of no site; choose another'):
        World.open(load_config(None, ("partition.scheme=sites",)))
