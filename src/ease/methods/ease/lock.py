"""The Forget Lock as clients carry it: quantised directions, or the axis-aligned alternative."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ease.federation.protocol import Lock, from_8bit, to_8bit
from ease.params import Params
from ease.storage import digest
from ease.subspace import Basis, Factors


def client_lock(bases: Mapping[str, Basis], reference: Params, strength: float) -> Lock:
    """Penalty strength · ||B_u^T (w - w_ref)||². Directions are sent once, in 8 bit, and used as they arrive."""
    packed: dict[str, Tensor] = {}
    received: dict[str, Basis] = {}
    for name, basis in bases.items():
        if basis.count == 0:
            continue
        if isinstance(basis.directions, Tensor):
            sent = to_8bit({f"{name}:{i}": column for i, column in enumerate(basis.directions.T)})
            received[name] = Basis(
                torch.stack(list(from_8bit(sent).values()), dim=1), basis.coefficients, basis.weights
            )
        else:
            sent = to_8bit(
                {
                    f"{name}:{side}:{i}": getattr(f, side)
                    for i, f in enumerate(basis.directions)
                    for side in ("left", "right")
                }
            )
            tensors = from_8bit(sent)
            columns = range(len(basis.directions))
            factors = tuple(
                Factors(tensors[f"{name}:left:{i}"].double(), tensors[f"{name}:right:{i}"].double()) for i in columns
            )
            received[name] = Basis(factors, basis.coefficients, basis.weights)
            sent[f"{name}:coefficients"] = basis.coefficients
        packed |= {**sent, f"{name}:weights": basis.weights}
    return Lock(strength, received, packed, reference, key=digest(strength, sorted(bases)))


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
    importance = Params(weights, reference.blocks)
    return Lock(strength, {}, dict(importance.tensors), reference, digest(strength, "importance"), importance)
