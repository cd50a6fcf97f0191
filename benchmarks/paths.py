"""The way that training, retraining and EASE take through the weights, in two dimensions.

    python benchmarks/paths.py --out docs/figures/paths.svg

Retraining keeps the order of the data of the training, so that it differs by the forget pairs and not by chance; how
far a retraining in another order lies from it is printed. The plane goes through the start, the trained and the
retrained model; nothing is fitted to EASE, and what lies outside of the plane is printed, too.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from ease.federation.fedavg import fedavg
from ease.methods import make_method
from ease.methods.base import Trained, retained_clients
from ease.params import Params, weighted_mean
from ease.requests.request import ClientRequest
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.show.figures import encode
from ease.show.paths import flatten, paths_figure
from ease.storage import write_atomic
from ease.studies.scenarios import scenario_config, scenario_request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/paths.svg"))
    parser.add_argument("--work", type=Path, default=Path("results/paths"))
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the run; repeatable")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    run = Run.create(asked.work, scenario_config(load_config(None, tuple(asked.settings)), "client"))
    world = open_world(run)
    for _ in run.train(world):
        pass
    trained, request = trained_of(run), scenario_request(world, "client", run.config.seed)
    assert isinstance(request, ClientRequest)
    ways = walked(trained, request, world)
    ends = {name: states[-1] for name, states in ways.items()}
    ends["retraining in another order"] = flat([each.state for each in answer("retrain", trained, request, world)][-1])
    for name, end in ends.items():
        print(f"{name}: {np.linalg.norm(end - ends['retraining']):.2f} from the retrained model")
    places = flatten(ways, along="retraining", across="training")
    for name, distance in places.outside.items():
        print(f"{name}: {distance:.2f} outside of the plane")
    number = ", ".join(map(str, request.clients))
    write_atomic(asked.out, encode(paths_figure(places, f"without client {number}"), "svg"))


def walked(trained: Trained, request: ClientRequest, world: World) -> dict[str, np.ndarray]:
    """Every state of each way, flat: [states, size]."""
    history, rounds = trained.history, range(1, trained.training.rounds + 1)
    training = [history.state(number) for number in (0, *rounds)]
    clients = retained_clients(request, world.federation)
    again = fedavg(
        trained.initial, world.federation, trained.training, trained.seed, trained.temperature, clients, request=request
    )
    ways = {
        "training": training,
        "retraining": [training[0], *(finished.state for finished in again)],
        "counterfactual": counterfactual(trained, request),
        "EASE": [step.state for step in answer("ease", trained, request, world)],
    }
    return {name: np.stack([flat(state) for state in states]) for name, states in ways.items()}


def counterfactual(trained: Trained, request: ClientRequest) -> list[Params]:
    """Round by round w_t - S_t: the stored updates of all others, averaged without those of who leaves."""
    history, states = trained.history, [trained.history.state(0)]
    for number in range(1, trained.training.rounds + 1):
        updates = [history.update(number, each) for each in history.clients(number) if each not in request.clients]
        mean = weighted_mean((trained.training.weight(each.pairs), each.change) for each in updates)
        states.append(states[-1] + mean)
    return states


def answer(method: str, trained: Trained, request: ClientRequest, world: World):
    return make_method(method).unlearn(trained, request, world.federation)


def flat(state: Params) -> np.ndarray:
    return np.concatenate([tensor.double().flatten().numpy() for tensor in state.tensors.values()])


if __name__ == "__main__":
    main()
