"""The three kinds of request that methods are compared on, and a second one of each kind to choose settings by."""

from typing import Literal

import numpy as np

from ease.errors import UserError
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.config import RunConfig
from ease.runs.world import World
from ease.seeding import generator

Scenario = Literal["client", "class", "sample"]
SAMPLE_SHARE = 0.1
"""Share of the pairs that a sample request names."""


def scenario_config(config: RunConfig, scenario: Scenario) -> RunConfig:
    """For a class request every client should hold some of every class; declared sites hold what they hold."""
    if scenario != "class" or config.partition.scheme == "sites":
        return config
    return config.model_copy(update={"partition": config.partition.model_copy(update={"scheme": "uniform"})})


def scenario_request(world: World, scenario: Scenario, seed: int) -> Request:
    """A typical request of each kind: the client or class of middle size, or a tenth of all pairs."""
    return _request(world, scenario, seed, 0)


def validation_request(world: World, scenario: Scenario, seed: int) -> Request:
    """Another typical request that shares no pair with the first: settings are chosen by it, and it is not reported."""
    request = _request(world, scenario, seed, 1)
    if request == _request(world, scenario, seed, 0):
        raise UserError(f"settings are chosen on a second {scenario}, and this run has one; train with more of them")
    return request


def _request(world: World, scenario: Scenario, seed: int, number: int) -> Request:
    world.check_together("a study")
    if scenario == "client":
        by_size = sorted(world.shards, key=lambda shard: len(shard.train))
        return ClientRequest(clients=(by_size[len(by_size) // 2 - number].client,))
    if scenario == "class":
        counts = np.bincount(
            np.concatenate([shard.train_classes for shard in world.shards]), minlength=len(world.server.centroids)
        )
        return ClassRequest(classes=(int(counts.argsort(kind="stable")[len(counts) // 2 - number]),))
    ids = [pair_id for shard in world.shards for pair_id in shard.train_ids]
    count = max(1, round(SAMPLE_SHARE * len(ids)))
    chosen = list(generator(seed, "sample request").choice(ids, count, replace=False))
    if number:
        others = sorted(set(ids).difference(chosen))
        chosen = list(generator(seed, "validation request").choice(others, count, replace=False))
    return SampleRequest(ids=tuple(sorted(map(str, chosen))))
