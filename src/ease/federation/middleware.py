"""The middleware between a server and an engine: which layers there are, and in which order."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path

from ease.federation.check import Checked, Quorum
from ease.federation.fedavg import TrainingConfig
from ease.federation.journal import Journal
from ease.federation.meter import Cost, Metered
from ease.federation.protocol import Federation, Middleware
from ease.params import Params

Layer = Callable[[Federation], Federation]


class Guarded(Middleware):
    """An engine whose answers are checked, journaled if a folder is given, counted for the quorum, and metered.

    With `everyone` all clients must answer, whatever the quorum of the training. `known` are states that clients have
    from the training, so that they are not metered again.
    """

    def __init__(
        self,
        engine: Federation,
        training: TrainingConfig,
        journal: Path | None = None,
        key: str = "",
        everyone: bool = False,
        metered: bool = False,
        known: Sequence[Params] = (),
    ):
        self.cost = Cost()
        """Running totals, if metered."""
        self._left_out: dict[int, str] = {}
        able = engine.capabilities
        # The innermost layer comes first. The journal gets sound answers only; the meter counts replayed ones too.
        layers: list[Layer] = [
            partial(Checked, deadline=None if able.keeps_deadline else training.deadline),
            *([] if journal is None else [partial(Journal, folder=journal, key=key)]),
            partial(Quorum, share=training.quorum, patient=able.remote, everyone=everyone, left_out=self._left_out),
            *([partial(Metered, known=known, cost=self.cost)] if metered else []),
        ]
        super().__init__(reduce(lambda inner, layer: layer(inner), layers, engine))

    def left_out(self) -> dict[int, str]:
        """Client -> why it was left out, since the last call."""
        found = dict(sorted(self._left_out.items()))
        self._left_out.clear()
        return found
