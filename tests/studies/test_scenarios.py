"""Requests of each kind, and those that settings are chosen by."""

import numpy as np
import pytest

from ease.errors import UserError
from ease.requests.request import forget_mask
from ease.studies.scenarios import scenario_config, scenario_request, validation_request


def named(world, request) -> set[int]:
    return {int(p) for shard in world.shards for p in shard.train[forget_mask(request, shard)]}


@pytest.mark.parametrize("scenario", ["client", "class", "sample"])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_validation_request_shares_no_pair_with_the_reported_one(learnt, scenario, seed) -> None:
    reported = named(learnt.world, scenario_request(learnt.world, scenario, seed))
    validation = named(learnt.world, validation_request(learnt.world, scenario, seed))
    assert reported and validation and not reported & validation


def test_a_sample_request_names_a_tenth_of_the_pairs(learnt) -> None:
    total = sum(len(shard.train) for shard in learnt.world.shards)
    for make in (scenario_request, validation_request):
        assert len(make(learnt.world, "sample", 0).ids) == round(total / 10)


def test_the_client_is_of_middle_size(learnt) -> None:
    sizes = {shard.client: len(shard.train) for shard in learnt.world.shards}
    (client,) = scenario_request(learnt.world, "client", 0).clients
    assert sizes[client] == np.sort(list(sizes.values()))[len(sizes) // 2]


def test_a_second_class_is_needed_to_choose_settings(small_config) -> None:
    from ease.runs.world import World

    world = World.open(small_config("partition.classes=1"))
    with pytest.raises(UserError, match="second class"):
        validation_request(world, "class", 0)


def test_class_requests_spread_every_class(small_config) -> None:
    config = small_config("partition.scheme=dirichlet")
    assert scenario_config(config, "class").partition.scheme == "uniform"
    assert scenario_config(config, "client") is config


def test_declared_sites_stay_who_they_are(small_config) -> None:
    config = small_config("data.name=folder", "data.path=.", "partition.scheme=sites")
    assert all(scenario_config(config, scenario) is config for scenario in ("client", "class", "sample"))
