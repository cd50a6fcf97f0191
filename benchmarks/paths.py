"""The way that training, retraining and EASE take through the weights, in two dimensions.

    python benchmarks/paths.py --out docs/figures/paths.svg

Retraining keeps the order of the data of the training, so that it differs by the forget pairs and not by chance; how
far a retraining in another order lies from it is printed. The plane goes through the start, the trained and the
retrained model; nothing is fitted to EASE, and what lies outside of the plane is printed, too.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ease.federation.fedavg import fedavg
from ease.methods import make_method
from ease.methods.base import Trained, retained_clients
from ease.params import Params, weighted_mean
from ease.requests.request import ClientRequest
from ease.runs.answers import open_world, trained_of
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.show.figures import COLOURS, FIXED, INK, OUR_INK, SOFT, STYLE, TRADEOFF_INCHES, encode, settle
from ease.show.placing import Name, write_names
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


STYLES = {
    "training": (FIXED["Trained"], "-", "o"),
    "retraining": (INK, "-", "s"),
    "counterfactual": (COLOURS[0], "--", "^"),
    "EASE": (FIXED["EASE"], "-", "D"),
}
"""Colour, line and mark of each way."""


@dataclass(frozen=True)
class Flat:
    """Ways as places in a plane through the start of them all."""

    places: Mapping[str, np.ndarray]
    """Way -> [states, 2]."""
    outside: Mapping[str, float]
    """Way -> how far its last state lies from the plane."""


def flatten(ways: Mapping[str, np.ndarray], along: str, across: str) -> Flat:
    """In the plane of the common start and the ends of two ways, the first of which ends on the first axis.

    Ways are [states, size] and begin at one state, but for those that go on from where another ended.
    """
    start = ways[along][0]
    first = ways[along][-1] - start
    first = first / np.linalg.norm(first)
    second = ways[across][-1] - start
    second = second - (second @ first) * first
    second = second / np.linalg.norm(second)
    places, outside = {}, {}
    for name, states in ways.items():
        away = states - start
        places[name] = np.stack([away @ first, away @ second], axis=1)
        last = away[-1] - places[name][-1, 0] * first - places[name][-1, 1] * second
        outside[name] = float(np.linalg.norm(last))
    return Flat(places, outside)


def paths_figure(flat: Flat, title: str) -> Figure:
    """Left the whole ways, right where they end; one unit is as long in either direction."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * TRADEOFF_INCHES + 0.8, TRADEOFF_INCHES + 0.4), layout="constrained")
        whole, ends = figure.subplots(1, 2)
        for panel in (whole, ends):
            for name, places in flat.places.items():
                colour, line, mark = STYLES[name]
                style = {"color": colour, "linestyle": line, "marker": mark, "markersize": 2.5}
                panel.plot(
                    *places.T, linewidth=2 if name == "EASE" else 1.1, zorder=4 if name == "EASE" else 3, **style
                )
                panel.plot(*places[-1], marker=mark, markersize=6, color=colour, zorder=5)
            panel.set(xlabel="towards the retrained model", aspect="equal")
        whole.set(title=title, ylabel="across, towards the trained one")
        ends.set_title("the ends, closer")
        _around(whole, np.concatenate(list(flat.places.values())), air=1.15)
        _around(ends, np.array([places[-1] for places in flat.places.values()]), air=1.8)
        settle(figure)
        for panel in (whole, ends):
            shown = {name: [tuple(place) for place in places] for name, places in flat.places.items()}
            write_names(panel, [_name(name, flat) for name in shown], list(shown.values()))
        return figure


def _around(panel: Axes, places: np.ndarray, air: float) -> None:
    """Show a square around places, so many times as wide as they are."""
    middle, half = (places.min(0) + places.max(0)) / 2, air * np.ptp(places, axis=0).max() / 2
    panel.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))


def _name(name: str, flat: Flat) -> Name:
    ours = name == "EASE"
    letters = {"fontsize": 7, "color": OUR_INK if ours else SOFT, "fontweight": "bold" if ours else "normal"}
    x, y = flat.places[name][-1]
    return Name(name, (float(x), float(y)), letters, STYLES[name][0])


if __name__ == "__main__":
    main()
