"""Training strategies: what clients add to their local training, and what the server does with a round's mean update.

A new one is a file with a `Strategy`, a line in `STRATEGIES` and its name in `StrategyName`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from ease.federation.strategies.base import Strategy as Strategy
from ease.federation.strategies.fedadam import FedAdam
from ease.federation.strategies.fedavg import FedAvg
from ease.federation.strategies.fedprox import FedProx

if TYPE_CHECKING:
    from ease.federation.fedavg import TrainingConfig

StrategyName = Literal["fedavg", "fedprox", "fedadam"]
STRATEGIES: Mapping[StrategyName, Callable[["TrainingConfig"], Strategy]] = {
    "fedavg": lambda config: FedAvg(),
    "fedprox": lambda config: FedProx(config.proximal),
    "fedadam": lambda config: FedAdam(config.server_learning_rate),
}


def strategy_of(config: "TrainingConfig") -> Strategy:
    """The strategy that a configuration names, at the start of a training."""
    return STRATEGIES[config.strategy](config)
