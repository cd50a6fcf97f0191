"""Flower's client and server for the common work; a module, so that Ray's processes import it and are sent no data.

Reads the folder of the work from EASE_CONTENDER.
"""

import os
import time
from pathlib import Path

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, Parameters, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from work import Work, train_client

ENDS: list[float] = []
LAST: list[Parameters] = []
LOADED: dict[str, Work] = {}


def work() -> Work:
    """Read once in every process."""
    if "work" not in LOADED:
        torch.set_num_threads(1)
        LOADED["work"] = Work.load(Path(os.environ["EASE_CONTENDER"]) / "work.npz")
    return LOADED["work"]


class Client(NumPyClient):
    def __init__(self, client: int):
        self.client = client

    def fit(self, parameters, config):  # type: ignore[no-untyped-def]
        own = work()
        model = own.model()
        model.load_state_dict(dict(zip(own.start, map(torch.from_numpy, parameters), strict=True)))
        train_client(model, own, own.rate, own.batches(int(config["round"]), self.client))
        found = model.state_dict()
        return [found[name].numpy() for name in own.start], own.pairs[self.client], {}


def client_of(context: Context):  # type: ignore[no-untyped-def]
    return Client(int(context.node_config["partition-id"])).to_client()


class Timed(FedAvg):
    """Takes the time after every round and keeps the last weights."""

    def aggregate_fit(self, server_round, results, failures):  # type: ignore[no-untyped-def]
        if failures:
            raise RuntimeError(f"{len(failures)} clients failed: {failures[0]}")
        found = super().aggregate_fit(server_round, results, failures)
        ENDS.append(time.perf_counter())
        LAST[:] = [found[0]]
        return found


def server(context: Context) -> ServerAppComponents:
    own = work()
    strategy = Timed(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=len(own.pairs),
        min_available_clients=len(own.pairs),
        on_fit_config_fn=lambda number: {"round": number},
        initial_parameters=ndarrays_to_parameters([tensor.numpy() for tensor in own.start.values()]),
    )
    ENDS.append(time.perf_counter())
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=own.rounds))


APPS = ServerApp(server_fn=server), ClientApp(client_fn=client_of)
