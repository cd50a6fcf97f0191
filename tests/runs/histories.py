"""What tests of histories share: a training in a folder, and a request of each kind."""

from pathlib import Path

from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.config import RunConfig
from ease.runs.run import Run
from ease.runs.world import World

BASE = ("partition.clients=4", "partition.validation_share=0.3", "training.rounds=5")
CLIENT = ClientRequest(clients=(1,))


def trained_run(folder: Path, config: RunConfig, world: World) -> Run:
    run = Run.create(folder, config)
    list(run.train(world))
    return run


def requests_of(world: World) -> dict[str, Request]:
    return {
        "client": CLIENT,
        "two clients": ClientRequest(clients=(0, 2)),
        "class": ClassRequest(classes=(2,)),
        "sample": SampleRequest(ids=world.shards[0].train_ids[:5]),
    }
