"""What every training strategy is."""

from typing import ClassVar

from ease.params import Params


class Strategy:
    """A rule of training. It may keep a state from round to round."""

    averages: ClassVar[bool] = True
    """Whether the model moves by the mean update of a round. Methods that subtract stored updates rely on it."""
    proximal: float = 0.0
    """Weight of the squared distance to the start of the round in the local loss."""

    def step(self, mean: Params) -> Params:
        """The change of the model for the mean update of the next round."""
        return mean
