"""FUSED: which layers are critical, and an adapter that leaves the rest of the model as it is."""

import pytest
import torch

from ease.federation.meter import Metered
from ease.federation.protocol import Update
from ease.methods import make_method
from ease.methods.fused import critical, mean_changes
from ease.params import Block, Params
from ease.requests.request import ClientRequest

CLIENT = ClientRequest(clients=(1,))


def test_mean_changes_by_hand() -> None:
    """A projector block of 4 values and a pair of factors a [1, 2], b [2, 1] with product b·a of 4 values.

    Client 0, 1 pair: the projector changes by (1, -1, 2, 0), mean 1; the factors stay. Client 1, 3 pairs: the projector
    stays; a goes from (1, 1) to (1, 3) and b from (0, 2) to (1, 2): the product from [[0, 0], [2, 2]] to
    [[1, 3], [2, 6]], mean change (1 + 3 + 0 + 4) / 4 = 2. Weighted by pairs: 1/4 · 1 and 3/4 · 2.
    """
    blocks = (Block("p", "image", "projector", ("p",)), Block("l", "text", "lora", ("l.A", "l.B")))
    base = Params({"p": torch.zeros(4), "l.A": torch.ones(1, 2), "l.B": torch.tensor([[0.0], [2.0]])}, blocks)
    updates = [
        Update(0, 1, base.zeros().replace({"p": torch.tensor([1.0, -1.0, 2.0, 0.0])})),
        Update(1, 3, base.zeros().replace({"l.A": torch.tensor([[0.0, 2.0]]), "l.B": torch.tensor([[1.0], [0.0]])})),
    ]
    assert mean_changes(base, updates) == {"p": pytest.approx(0.25), "l": pytest.approx(1.5)}


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, ["i1", "t0"]), (3, ["i0", "i1", "t0"]), (4, ["i0", "i1", "i2", "t0"]), (9, ["i0", "i1", "i2", "t0", "t1"])],
)
def test_each_modality_has_a_layer_however_few_there_are(count: int, expected: list[str]) -> None:
    """Ranked i1, i0, i2, t0, t1: by rank alone the text side would get nothing out of three."""
    changes = {"i0": 4.0, "i1": 5.0, "i2": 3.0, "t0": 2.0, "t1": 1.0}
    blocks = [Block(name, "image" if name[0] == "i" else "text", "projector", (name,)) for name in changes]
    assert [block.name for block in critical(blocks, changes, count)] == expected


def test_only_kept_values_of_the_chosen_layers_change(learnt) -> None:
    final = learnt.trained.final
    first, *rest = make_method("fused", ("layers=2", "density=0.05")).unlearn(
        learnt.trained, CLIENT, learnt.world.federation
    )
    assert first.state is final and len(first.notes["layers"]) == 2 and rest
    chosen = {name for block in final.blocks if block.name in first.notes["layers"] for name in block.tensors}
    for step in rest:
        for name, tensor in step.state.tensors.items():
            moved = int((tensor != final[name]).sum())
            assert moved <= (max(16, -(-final[name].numel() // 20)) if name in chosen else 0)
    assert (rest[-1].state - rest[0].state).norm() > 0


def test_after_the_first_round_only_the_adapter_travels(learnt) -> None:
    """Three retained clients: one dense round, which brings the base, then sparse ones that cost a small part of it."""
    metered = Metered(learnt.world.federation)
    costs = []
    for _ in make_method("fused").unlearn(learnt.trained, CLIENT, metered):
        costs.append((metered.cost.bytes_down, metered.cost.bytes_up))
    rounds = [(b[0] - a[0], b[1] - a[1]) for a, b in zip([(0, 0), *costs], costs, strict=False)]
    assert rounds[0][0] > 3 * learnt.trained.final.bytes
    for down, up in rounds[1:]:
        assert down < 0.2 * rounds[0][0] and up < 0.2 * rounds[0][1]
