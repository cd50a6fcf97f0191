"""FedProx: clients are held near the state that they were sent (Li et al., 2020)."""

from dataclasses import dataclass

from ease.federation.strategies.base import Strategy


@dataclass
class FedProx(Strategy):
    """The mean update of local trainings with `proximal / 2` times the squared distance to the start in their loss."""

    proximal: float = 0.0
