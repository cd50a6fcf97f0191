"""A client's Hessian estimated from its past: products with the L-BFGS matrix, never formed, in double precision."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ease.params import Params

LEAST_CURVATURE = 1e-8
DAMPING = 1e-3


@dataclass(frozen=True)
class Secant:
    """Two states apart by `move`, whose gradients are apart by `turn`."""

    move: Params
    turn: Params


def make_secant(move: Params, turn: Params) -> Secant | None:
    """A damped secant, or None where the loss does not curve upwards: it would make the matrix indefinite."""
    move, turn = (params.map(torch.Tensor.double) for params in (move, turn))
    length = move.dot(move)
    if not move.dot(turn) > LEAST_CURVATURE * length:
        return None
    return Secant(move, turn + DAMPING * move)


def hessian_product(secants: Sequence[Secant], vector: Params) -> Params:
    """B·v for the BFGS matrix B that starts from sigma·I and takes in the secants, oldest first.

    In compact form, with moves W and turns G as columns and W^T G = L + D + (upper part), L strictly lower:
    B v = sigma v - [G, sigma W] p, where [[-D, L^T], [L, sigma W^T W]] p = [G^T v; sigma W^T v].
    """
    if not secants:
        return vector.zeros()
    moves, turns = [secant.move for secant in secants], [secant.turn for secant in secants]
    inner = _products(moves, turns)
    sigma = float(inner[-1, -1]) / moves[-1].dot(moves[-1])
    diagonal, lower = inner.diagonal().diag(), inner.tril(-1)
    system = torch.cat(
        [torch.cat([-diagonal, lower.T], dim=1), torch.cat([lower, sigma * _products(moves, moves)], dim=1)]
    )
    right = torch.cat([_products(turns, [vector]), sigma * _products(moves, [vector])])
    # Nearly parallel moves make the system singular; the pseudo-inverse leaves out what they cannot separate.
    weights = (torch.linalg.pinv(system, rtol=1e-12, hermitian=True) @ right)[:, 0].tolist()
    product = sigma * vector
    for weight, column in zip(weights, [*turns, *(sigma * move for move in moves)], strict=True):
        product = product - weight * column
    return product


def _products(left: Sequence[Params], right: Sequence[Params]) -> torch.Tensor:
    return torch.tensor([[one.dot(two) for two in right] for one in left], dtype=torch.float64)
