"""Products with the L-BFGS matrix, against the matrix itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ease.methods.lbfgs import DAMPING, Secant, hessian_product, make_secant
from ease.params import Block, Params

BLOCKS = (Block("b", "image", "projector", ("x", "y")),)


def params(vector: Tensor) -> Params:
    """A vector of six values in two tensors."""
    return Params({"x": vector[:4].view(2, 2), "y": vector[4:]}, BLOCKS)


def flat(value: Params) -> Tensor:
    return value.vector(BLOCKS[0])


def dense_bfgs(moves: list[Tensor], turns: list[Tensor]) -> Tensor:
    """The textbook update B <- B - B s s^T B / s^T B s + y y^T / y^T s, from (y^T s / s^T s) I of the last secant."""
    s, y = moves[-1], turns[-1]
    matrix = (y @ s) / (s @ s) * torch.eye(len(s), dtype=torch.float64)
    for s, y in zip(moves, turns, strict=True):
        matrix = matrix - torch.outer(matrix @ s, matrix @ s) / (s @ matrix @ s) + torch.outer(y, y) / (y @ s)
    return matrix


def quadratic(seed: int, count: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Moves and turns of a random strongly convex quadratic, and a vector."""
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    hessian = root @ root.T + torch.eye(6, dtype=torch.float64)
    moves = [torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(count)]
    return moves, [hessian @ move for move in moves], torch.randn(6, generator=rng, dtype=torch.float64)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 4))
def test_the_product_is_that_of_the_dense_matrix(seed: int, count: int) -> None:
    moves, turns, vector = quadratic(seed, count)
    secants = [Secant(params(move), params(turn)) for move, turn in zip(moves, turns, strict=True)]
    expected = dense_bfgs(moves, turns) @ vector
    torch.testing.assert_close(flat(hessian_product(secants, params(vector))), expected, rtol=1e-6, atol=1e-6)


def test_the_last_secant_holds_exactly() -> None:
    """The secant equation: B times the last move is the last turn."""
    moves, turns, _ = quadratic(3, 3)
    secants = [Secant(params(move), params(turn)) for move, turn in zip(moves, turns, strict=True)]
    torch.testing.assert_close(flat(hessian_product(secants, params(moves[-1]))), turns[-1])


def test_one_secant_by_hand() -> None:
    """s = 2 e1, y = 6 e1 + 2 e2: sigma = 12 / 4 = 3. B e1 = y / 2 = 3 e1 + e2 by the secant equation.

    B = 3 I - 3 e1 e1^T + y y^T / 12, so B e2 = 3 e2 + y · 2 / 12 = e1 + (3 + 1/3) e2.
    """
    e1, e2 = torch.eye(6, dtype=torch.float64)[:2]
    secants = [Secant(params(2 * e1), params(6 * e1 + 2 * e2))]
    torch.testing.assert_close(flat(hessian_product(secants, params(e1))), 3 * e1 + e2)
    torch.testing.assert_close(flat(hessian_product(secants, params(e2))), e1 + (10 / 3) * e2)


def test_the_same_secant_twice_is_solved_as_one() -> None:
    """Two equal moves make the system singular; the product stays that of one."""
    (move,), (turn,), vector = quadratic(5, 1)
    secant = Secant(params(move), params(turn))
    torch.testing.assert_close(
        flat(hessian_product([secant, secant], params(vector))), flat(hessian_product([secant], params(vector)))
    )


def test_without_secants_nothing_is_known() -> None:
    assert hessian_product([], params(torch.ones(6))).norm() == 0


@pytest.mark.parametrize("turn", [-1.0, 0.0, 1e-9, torch.nan])
def test_secants_without_curvature_are_left_out(turn: float) -> None:
    assert make_secant(params(torch.ones(6)), params(torch.full((6,), turn))) is None


def test_no_move_is_not_a_secant() -> None:
    assert make_secant(params(torch.zeros(6)), params(torch.ones(6))) is None


def test_secants_are_damped_and_doubled() -> None:
    secant = make_secant(params(torch.ones(6)), params(torch.full((6,), 2.0)))
    assert secant is not None
    torch.testing.assert_close(flat(secant.turn), torch.full((6,), 2 + DAMPING, dtype=torch.float64))
