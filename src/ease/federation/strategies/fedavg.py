"""FedAvg: the model moves by the mean of the clients' updates (McMahan et al., 2017)."""

from ease.federation.strategies.base import Strategy


class FedAvg(Strategy):
    """The mean update, without any state."""
