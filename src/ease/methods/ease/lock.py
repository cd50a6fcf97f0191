"""The Forget Lock as EASE sends it to clients: quantised directions, or the axis-aligned alternative."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ease.federation.lock import Lock, pack_directions
from ease.params import Params
from ease.subspace import Basis


def client_lock(bases: Mapping[str, Basis], reference: Params, strength: float) -> Lock:
    """Penalty strength · ||B_u^T (w - w_ref)||². Directions are sent once, in 8 bit, and used as they arrive."""
    return Lock(strength, reference, pack_directions(bases))


def importance_lock(bases: Mapping[str, Basis], reference: Params, strength: float) -> Lock:
    """The axis-aligned alternative: each value is held by its own share of the excised directions."""
    weights: dict[str, Tensor] = {name: torch.zeros_like(tensor) for name, tensor in reference.tensors.items()}
    for block in reference.blocks:
        basis = bases.get(block.name)
        if basis is None or basis.count == 0 or not isinstance(basis.directions, Tensor):
            continue
        share = (basis.directions.square() * basis.weights.to(basis.directions)).sum(1)
        share = share / share.mean() if float(share.mean()) > 0 else share
        for name, part in zip(block.tensors, share.split([reference[n].numel() for n in block.tensors]), strict=True):
            weights[name] = part.view_as(reference[name]).clamp_max(1.0)
    return Lock(strength, reference, importance=Params(weights, reference.blocks))
