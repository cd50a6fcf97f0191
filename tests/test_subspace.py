"""Theorems of the gradient subspace decomposition, on random subspaces and against dense float64 oracles."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from torch import Tensor

from ease.federation.lock import ClientLock, lock_pull
from ease.federation.steps import add_lock_gradient
from ease.params import Block, Params
from ease.subspace import (
    Basis,
    Factors,
    Spectrum,
    decompose,
    displacement,
    excise,
    gram,
    joined,
    load_bases,
    make_basis,
    orthonormal_coefficients,
    refactor,
    save_bases,
)

SHAPES = {"layer.bias": (5,), "layer.weight": (5, 9)}
VALUES = 50
DENSE = Block("layer", "image", "projector", ("layer.bias", "layer.weight"))
FACTORED = Block("adapter", "text", "lora", ("adapter.A", "adapter.B"))

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31 - 1)
energies = st.sampled_from([0.5, 0.8, 0.95, 0.99, 1.0])
deltas = st.floats(0, 1)


@dataclass(frozen=True)
class Case:
    """Forget and retained columns that share some directions, lean towards others and own the rest."""

    forget: list[Tensor]
    retain: list[Tensor]
    energy: float

    @property
    def spectrum(self) -> Spectrum:
        f, r = self.forget, self.retain
        return decompose(gram(f, f), gram(f, r), gram(r, r), self.energy)

    def basis(self, delta: float) -> Basis:
        return make_basis(self.forget, self.spectrum.coefficients, self.spectrum.unique(delta).double())


@st.composite
def cases(draw: st.DrawFn, values: int = VALUES) -> Case:
    rng = np.random.default_rng(draw(seeds))
    forget, retain = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    common = rng.normal(size=(values, 3)) * draw(st.sampled_from([0.0, 0.3, 1.0, 3.0]))

    def columns(count: int) -> list[Tensor]:
        rank = draw(st.integers(1, count))
        own = rng.normal(size=(values, rank)) @ rng.normal(size=(rank, count))
        return list(torch.from_numpy((own + common @ rng.normal(size=(3, count))).T.astype(np.float32)))

    return Case(columns(forget), columns(retain), draw(energies))


def dense_basis(columns: list[Tensor], energy: float) -> np.ndarray:
    """Oracle: thin SVD, fewest left vectors whose energy reaches the wanted share."""
    u, s, _ = np.linalg.svd(torch.stack(columns, 1).double().numpy(), full_matrices=False)
    share = np.cumsum(s**2) / np.sum(s**2)
    assume(np.abs(share[s > 1e-6 * s[0]] - energy).min() > 1e-10 or energy == 1.0)
    assume(not ((s > 1e-8 * s[0]) & (s < 1e-4 * s[0])).any())
    rank = min(int((share < energy - 1e-12).sum()) + 1, int((s > 1e-6 * s[0]).sum()))
    return u[:, :rank]


def dense_params(vector: Tensor) -> Params:
    parts = vector.split([5, 45])
    return Params({name: part.view(SHAPES[name]) for name, part in zip(DENSE.tensors, parts, strict=True)}, (DENSE,))


def apply_projector(basis: Basis, vector: Tensor) -> Tensor:
    """Pi_u x, as what excision towards zero takes away from x."""
    w = dense_params(vector)
    return (w - excise(w, w.zeros(), {"layer": basis})[0]).vector(DENSE)


def random_vector(seed: int, values: int = VALUES) -> Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(seed))


# --- spectrum ---


@quick
@given(cases())
def test_cosines_equal_principal_angles(case: Case) -> None:
    own, other = dense_basis(case.forget, case.energy), dense_basis(case.retain, case.energy)
    spectrum = case.spectrum
    p, q = own.shape[1], other.shape[1]
    assert (spectrum.forget_rank, spectrum.retain_rank) == (p, q)
    expected = np.zeros(p)
    expected[: min(p, q)] = np.sort(np.cos(subspace_angles(own, other)))[::-1]
    np.testing.assert_allclose(spectrum.cosines.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("forget", "retain"), [(6, 2), (4, 1), (3, 3), (2, 7)])
def test_more_forget_than_retained_directions_are_all_unique(forget: int, retain: int) -> None:
    rng = torch.Generator().manual_seed(forget)
    f, r = list(torch.randn(forget, 30, generator=rng)), list(torch.randn(retain, 30, generator=rng))
    spectrum = decompose(gram(f, f), gram(f, r), gram(r, r), 1.0)
    extra = max(0, forget - retain)
    assert spectrum.forget_rank == forget
    assert int((spectrum.cosines == 0).sum()) == extra == int(spectrum.unique(0.0).sum())
    angles = subspace_angles(torch.stack(f, 1).double().numpy(), torch.stack(r, 1).double().numpy())
    np.testing.assert_allclose(spectrum.cosines[: min(forget, retain)], np.cos(angles)[::-1], atol=1e-9)


def test_known_angles() -> None:
    e = torch.eye(6)
    forget = [e[0], 0.6 * e[1] + 0.8 * e[2], e[3]]
    spectrum = Case(forget, [e[0], e[1], e[4]], 1.0).spectrum
    torch.testing.assert_close(spectrum.cosines, torch.tensor([1, 0.6, 0], dtype=torch.float64), atol=1e-7, rtol=0)
    torch.testing.assert_close(spectrum.energies, torch.full((3,), 1 / 3, dtype=torch.float64), atol=1e-7, rtol=0)
    assert spectrum.unique(0.7).tolist() == [False, True, True]
    assert spectrum.retain_damage(0.7) == pytest.approx(0.36)
    assert spectrum.forget_energy(0.7) == pytest.approx(2 / 3)


@quick
@given(cases())
def test_canonical_directions_are_orthonormal(case: Case) -> None:
    square = gram(case.forget, case.forget)
    directions = case.spectrum.coefficients
    torch.testing.assert_close(
        directions.T @ square @ directions, torch.eye(directions.shape[1], dtype=torch.float64), atol=1e-6, rtol=0
    )


@quick
@given(cases(), deltas, deltas)
def test_forget_energy_grows_with_delta_to_at_least_the_energy_kept(case: Case, one: float, two: float) -> None:
    spectrum = case.spectrum
    assert spectrum.forget_energy(min(one, two)) <= spectrum.forget_energy(max(one, two))
    assert case.energy - 1e-9 <= spectrum.forget_energy(1.0) <= 1 + 1e-9


@quick
@given(cases(), deltas)
def test_forget_energy_is_the_share_of_the_columns_inside_the_unique_directions(case: Case, delta: float) -> None:
    columns = torch.stack(case.forget, 1).double()
    directions = case.basis(delta).directions.double()
    expected = (directions.T @ columns).square().sum() / columns.square().sum()
    assert case.spectrum.forget_energy(delta) == pytest.approx(float(expected), abs=1e-5)


@quick
@given(cases(), deltas, seeds)
def test_retained_states_lose_at_most_delta_squared(case: Case, delta: float, seed: int) -> None:
    other = torch.from_numpy(dense_basis(case.retain, case.energy))
    x = (other @ torch.randn(other.shape[1], generator=torch.Generator().manual_seed(seed)).double()).float()
    assert apply_projector(case.basis(delta), x).norm() ** 2 <= (delta**2 + 1e-5) * x.norm() ** 2


@quick
@given(cases(), deltas)
def test_retain_damage_is_the_largest_squared_cosine_and_attained(case: Case, delta: float) -> None:
    spectrum = case.spectrum
    damage = spectrum.retain_damage(delta)
    chosen = [c for c in spectrum.cosines.tolist() if c <= delta]
    assert damage == pytest.approx(max(chosen) ** 2 if chosen else 0.0, rel=1e-12)
    basis = case.basis(delta)
    if chosen:
        other = torch.from_numpy(dense_basis(case.retain, case.energy))
        _, values, vh = torch.linalg.svd(basis.directions.double().T @ other)
        worst = (other @ vh[0]).float()
        assert float(values[0] ** 2) == pytest.approx(damage, abs=1e-5)
        assert float(apply_projector(basis, worst).norm() ** 2) == pytest.approx(damage, abs=1e-5)
    else:
        assert basis.count == 0


def test_energy_of_dropped_directions_is_held_by_no_other() -> None:
    """3² of 3² + 1² lie in the first direction, which alone holds the 0.9 that is asked for."""
    columns = [torch.eye(4)[0] * 3, torch.eye(4)[1]]
    spectrum = Case(columns, [torch.eye(4)[2]], 0.9).spectrum
    assert spectrum.forget_rank == 1 and spectrum.forget_energy(1.0) == pytest.approx(0.9)


def test_nearly_all_energy_is_held_when_only_null_directions_were_dropped() -> None:
    rng = torch.Generator().manual_seed(0)
    base = torch.randn(400, generator=rng, dtype=torch.float64)
    columns = [base + 2e-6 * torch.randn(400, generator=rng, dtype=torch.float64) for _ in range(30)]
    spectrum = Case(columns, [torch.randn(400, generator=rng, dtype=torch.float64)], 1.0).spectrum
    assert spectrum.forget_rank == 1
    assert 1e-12 < 1 - spectrum.forget_energy(1.0) < 1e-9


# --- the projector, through excise ---


@quick
@given(cases(), deltas, seeds)
def test_projector_is_idempotent_and_self_adjoint(case: Case, delta: float, seed: int) -> None:
    basis = case.basis(delta)
    x, y = random_vector(seed), random_vector(seed + 1)
    px, py = apply_projector(basis, x), apply_projector(basis, y)
    scale = float(x.norm() * y.norm())
    torch.testing.assert_close(apply_projector(basis, px), px, atol=1e-5 * float(x.norm()), rtol=0)
    assert float(torch.dot(px, y)) == pytest.approx(float(torch.dot(x, py)), abs=1e-5 * scale)
    assert float(px.norm()) <= float(x.norm()) * (1 + 1e-5)


@quick
@given(cases(), deltas, seeds)
def test_excision_empties_the_unique_directions_and_removes_their_energy(case: Case, delta: float, seed: int) -> None:
    basis = case.basis(delta)
    w, reference = dense_params(random_vector(seed)), dense_params(random_vector(seed + 1))
    after, residuals = excise(w, reference, {"layer": basis})
    drift = (w - reference).vector(DENSE)
    assert residuals == {}
    assert after.blocks == w.blocks
    components = basis.components(drift)
    left = basis.components((after - reference).vector(DENSE))
    assert float(left.norm()) <= 1e-5 * float(drift.norm())
    removed = (w - after).norm() ** 2
    assert removed == pytest.approx(float(components.square().sum()), rel=1e-4, abs=1e-6)
    # Pythagoras: what is removed is orthogonal to what stays.
    assert removed + (after - reference).norm() ** 2 == pytest.approx(float(drift.double().norm()) ** 2, rel=1e-4)


@quick
@given(cases(), seeds, st.floats(0, 1))
def test_weights_and_share_scale_each_component(case: Case, seed: int, share: float) -> None:
    spectrum = case.spectrum
    weights = 1 - spectrum.cosines**2
    basis = make_basis(case.forget, spectrum.coefficients, weights)
    assert basis.count == int((weights > 0).sum())
    w = dense_params(random_vector(seed))
    after, _ = excise(w, w.zeros(), {"layer": basis}, share)
    expected = (1 - share * basis.weights) * basis.components(w.vector(DENSE))
    torch.testing.assert_close(basis.components(after.vector(DENSE)), expected, atol=1e-5, rtol=1e-5)


def test_blocks_without_basis_and_the_input_do_not_change() -> None:
    other = Block("other", "text", "projector", ("other.weight",))
    w = Params({**dense_params(random_vector(0)).tensors, "other.weight": torch.ones(3)}, (DENSE, other))
    before = {name: tensor.clone() for name, tensor in w.tensors.items()}
    columns = [random_vector(1)]
    basis = make_basis(columns, orthonormal_coefficients(gram(columns, columns), 1.0), torch.ones(1))
    after, _ = excise(w, w.zeros(), {"layer": basis})
    assert torch.equal(after["other.weight"], before["other.weight"])
    assert not torch.equal(after["layer.weight"], before["layer.weight"])
    assert all(torch.equal(w[name], before[name]) for name in before)
    assert all(after[name].dtype == w[name].dtype for name in before)


def test_gram_of_long_columns_is_summed_in_float64() -> None:
    rng = torch.Generator().manual_seed(3)
    left, right = torch.randn(3, 150_001, generator=rng), torch.randn(2, 150_001, generator=rng)
    exact = left.double() @ right.double().T
    torch.testing.assert_close(gram(list(left), list(right)), exact, rtol=1e-10, atol=1e-9)
    columns = list(left)
    torch.testing.assert_close(gram(columns, columns), left.double() @ left.double().T, rtol=1e-10, atol=1e-9)


# --- rank guards and empty cases ---


@quick
@given(seeds, st.integers(1, 4), st.sampled_from([0.0, 1e-8, 1e-7]), energies)
def test_copies_of_shared_columns_have_nothing_unique(seed: int, copies: int, noise: float, energy: float) -> None:
    """Duplicate, zero and nearly parallel columns add no null direction that would pose as unique."""
    rng = torch.Generator().manual_seed(seed)
    shared = torch.randn(2, VALUES, generator=rng, dtype=torch.float64)
    forget = [c * (1 + noise * torch.randn(VALUES, generator=rng)) for c in shared for _ in range(copies + 1)]
    forget.append(torch.zeros(VALUES, dtype=torch.float64))
    spectrum = Case(forget, [*shared, torch.zeros(VALUES, dtype=torch.float64)], 1.0).spectrum
    assert (spectrum.forget_rank, spectrum.retain_rank) == (2, 2)
    assert spectrum.cosines.min() > 1 - 1e-6
    own = decompose(*(gram(forget, other) for other in (forget, forget)), gram(forget, forget), energy)
    assert own.cosines.min() > 1 - 1e-6


@pytest.mark.parametrize("noise", [1e-3, 1e-4, 1e-5])
def test_directions_of_nearly_parallel_columns_are_accurate(noise: float) -> None:
    """Their coefficients are large and cancel: the sum over columns must not be taken in float32."""
    rng = torch.Generator().manual_seed(5)
    base = torch.randn(500, generator=rng)
    columns = [base, base + noise * torch.randn(500, generator=rng)]
    coefficients = orthonormal_coefficients(gram(columns, columns), 1.0)
    basis = make_basis(columns, coefficients, torch.ones(2))
    exact = np.linalg.svd(torch.stack(columns, 1).double().numpy(), full_matrices=False)[0]
    assert np.sin(subspace_angles(basis.directions.double().numpy(), exact)).max() < 1e-6


def spectrum_of(blocks: list[list[Tensor]]) -> Spectrum:
    f, r = blocks
    return decompose(gram(f, f), gram(f, r), gram(r, r), 0.95)


def test_without_retained_columns_everything_is_unique() -> None:
    forget = [random_vector(seed) for seed in range(3)]
    for retain in ([], [torch.zeros(VALUES)] * 2):
        spectrum = spectrum_of([forget, retain])
        assert spectrum.retain_rank == 0
        assert spectrum.cosines.tolist() == [0.0] * spectrum.forget_rank
        assert spectrum.forget_energy(0.0) >= 0.95
        assert spectrum.retain_damage(1.0) == 0.0


@pytest.mark.parametrize("forget", [[], [torch.zeros(VALUES)], [torch.zeros(VALUES)] * 3])
def test_without_forget_movement_nothing_is_excised(forget: list[Tensor]) -> None:
    spectrum = spectrum_of([forget, [random_vector(0)]])
    assert spectrum.forget_rank == 0
    assert spectrum.forget_energy(1.0) == spectrum.retain_damage(1.0) == 0.0
    basis = make_basis(forget, spectrum.coefficients, spectrum.unique(1.0).double())
    assert basis.count == 0
    w = dense_params(random_vector(1))
    assert basis.components(w.vector(DENSE)).shape == (0,)
    after, residuals = excise(w, w.zeros(), {"layer": basis})
    assert residuals == {}
    assert all(torch.equal(after[name], w[name]) for name in SHAPES)


def test_no_columns_at_all() -> None:
    spectrum = spectrum_of([[], []])
    assert (spectrum.forget_rank, spectrum.retain_rank) == (0, 0)
    assert spectrum.forget_energy(1.0) == spectrum.retain_damage(1.0) == 0.0


# --- factored blocks ---


def adapter(seed: int, rank: int, out: int, width: int, dtype: torch.dtype = torch.float64) -> Params:
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, width, generator=rng, dtype=torch.float64).to(dtype)
    b = torch.randn(out, rank, generator=rng, dtype=torch.float64).to(dtype)
    return Params({"adapter.A": a, "adapter.B": b}, (FACTORED,))


def product(value: Params | Factors) -> Tensor:
    left, right = (value["adapter.B"], value["adapter.A"]) if isinstance(value, Params) else (value.left, value.right)
    return left.double() @ right.double()


shapes = st.tuples(st.integers(1, 4), st.integers(4, 9), st.integers(4, 9))


@quick
@given(shapes, seeds, st.sampled_from([torch.float32, torch.float64]))
def test_displacement_of_factors_is_the_difference_of_products(shape, seed: int, dtype: torch.dtype) -> None:
    after, before = adapter(seed, *shape, dtype), adapter(seed + 1, *shape, dtype)
    change = displacement(FACTORED, after, before)
    assert change.left.shape[1] == 2 * shape[0]
    torch.testing.assert_close(product(change), product(after) - product(before), atol=1e-12, rtol=1e-12)


@quick
@given(shapes, seeds, st.integers(1, 4), st.integers(1, 4))
def test_factored_gram_equals_dense_gram(shape, seed: int, forget: int, retain: int) -> None:
    states = [adapter(seed + i, *shape, torch.float32) for i in range(forget + retain + 1)]
    columns = [displacement(FACTORED, state, states[-1]) for state in states[:-1]]
    left, right = columns[:forget], columns[forget:]
    dense = [product(c).flatten() for c in columns]
    scale = max(float(d.norm()) for d in dense) ** 2
    torch.testing.assert_close(gram(left, right), gram(dense[:forget], dense[forget:]), rtol=1e-8, atol=1e-10 * scale)
    torch.testing.assert_close(gram(left, left), gram(dense[:forget], dense[:forget]), rtol=1e-8, atol=1e-10 * scale)


def test_factored_gram_of_columns_with_different_ranks() -> None:
    rng = torch.Generator().manual_seed(1)
    columns = [
        Factors(torch.randn(6, k, generator=rng), torch.randn(k, 5, generator=rng)) for k in (1, 3, 2)
    ]  # 6 ranks over 3 columns: an even split would be silently wrong
    dense = torch.stack([product(c).flatten() for c in columns])
    torch.testing.assert_close(gram(columns, columns), dense @ dense.T)


@quick
@given(shapes, seeds, st.sampled_from([torch.float32, torch.float64]))
def test_factors_that_did_not_move_give_no_direction(shape, seed: int, dtype: torch.dtype) -> None:
    states = [adapter(seed + i, *shape, dtype) for i in range(3)]
    columns = [displacement(FACTORED, state, state) for state in states]
    assert orthonormal_coefficients(gram(columns, columns), 0.95).shape == (3, 0)


@quick
@given(shapes, seeds)
def test_repeated_small_factored_updates_give_one_direction(shape, seed: int) -> None:
    start, step = adapter(seed, *shape, torch.float32), adapter(seed + 1, *shape, torch.float32)
    columns = [displacement(FACTORED, start + 1e-4 * step, start)] * 3
    assert orthonormal_coefficients(gram(columns, columns), 1.0).shape == (3, 1)


def dense_excision(w: Tensor, reference: Tensor, columns: list[Tensor], spectrum: Spectrum, delta: float) -> Tensor:
    directions = torch.stack(columns, 1).double() @ spectrum.coefficients[:, spectrum.unique(delta)]
    drift = (w - reference).flatten()
    return w - (directions @ (directions.T @ drift)).view_as(w)


def factored_case(
    shape: tuple[int, int, int], seed: int, shared_a: bool
) -> tuple[Params, Params, list, list, Spectrum]:
    start = adapter(seed, *shape)
    states = [adapter(seed + 1 + i, *shape) for i in range(6)]
    if shared_a:
        states = [state.replace({"adapter.A": start["adapter.A"]}) for state in states]
    columns = [displacement(FACTORED, state, start) for state in states[:5]]
    forget, retain = columns[:2], columns[2:]
    spectrum = decompose(gram(forget, forget), gram(forget, retain), gram(retain, retain), 1.0)
    dense = [product(c).flatten() for c in columns]
    oracle = decompose(
        *(gram(a, b) for a, b in ((dense[:2], dense[:2]), (dense[:2], dense[2:]), (dense[2:], dense[2:]))), 1.0
    )
    torch.testing.assert_close(spectrum.cosines, oracle.cosines, atol=1e-7, rtol=0)
    return states[5], start, forget, dense[:2], spectrum


@quick
@given(st.sampled_from([(3, 7, 6), (4, 4, 9), (4, 9, 4), (2, 5, 5)]), seeds, st.sampled_from([0.5, 0.9, 1.0]))
def test_factored_excision_equals_dense_excision(shape: tuple[int, int, int], seed: int, delta: float) -> None:
    """Rank suffices when A is shared, or when r is the smaller side of the matrix."""
    w, start, forget, dense, spectrum = factored_case(shape, seed, shared_a=shape[0] < min(shape[1:]))
    assume(spectrum.unique(delta).any())
    basis = make_basis(forget, spectrum.coefficients, spectrum.unique(delta).double())
    expected = dense_excision(product(w), product(start), dense, spectrum, delta)
    assume(expected.norm() > 1e-3)
    after, residuals = excise(w, start, {"adapter": basis})
    assert residuals.keys() == {"adapter"}
    assert residuals["adapter"] < 1e-8
    assert {name: t.shape for name, t in after.tensors.items()} == {name: t.shape for name, t in w.tensors.items()}
    assert float((product(after) - expected).norm() / expected.norm()) < 1e-8
    assert float(basis.components(displacement(FACTORED, after, start)).norm()) < 1e-7


@quick
@given(st.sampled_from([(1, 6, 7), (2, 7, 6), (3, 8, 8)]), seeds)
def test_truncation_residual_is_the_dense_svd_error(shape: tuple[int, int, int], seed: int) -> None:
    w, start, forget, dense, spectrum = factored_case(shape, seed, shared_a=False)
    basis = make_basis(forget, spectrum.coefficients, spectrum.unique(1.0).double())
    expected = dense_excision(product(w), product(start), dense, spectrum, 1.0)
    u, values, vh = torch.linalg.svd(expected, full_matrices=False)
    rank = shape[0]
    assume(values[rank - 1] > values[rank] * (1 + 1e-4))
    after, residuals = excise(w, start, {"adapter": basis})
    assert residuals["adapter"] == pytest.approx(float(values[rank:].norm() / values.norm()), rel=1e-7)
    assert residuals["adapter"] > 1e-3
    best = u[:, :rank] * values[:rank] @ vh[:rank]
    assert float((product(after) - best).norm() / best.norm()) < 1e-8


def test_factored_excision_over_nearly_parallel_float32_columns() -> None:
    """Coefficients near 1e5: scaling the factors in float32 would leave errors of a percent."""
    start, step = adapter(0, 4, 4, 9, torch.float32), adapter(1, 4, 4, 9, torch.float32)
    states = [start + step, start + step + 1e-5 * adapter(2, 4, 4, 9, torch.float32)]
    forget = [displacement(FACTORED, state, start) for state in states]
    coefficients = orthonormal_coefficients(gram(forget, forget), 1.0)
    assert coefficients.shape == (2, 2)
    w = start + adapter(3, 4, 4, 9, torch.float32)
    basis = make_basis(forget, coefficients, torch.ones(2))
    after, _ = excise(w, start, {"adapter": basis})
    columns = torch.stack([product(c).flatten() for c in forget], 1)
    exact = torch.linalg.svd(columns, full_matrices=False)[0]
    drift = (product(w) - product(start)).flatten()
    expected = product(w).flatten() - exact @ (exact.T @ drift)
    assert float((product(after).flatten() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_adapter_excised_to_nothing_can_still_learn(dtype: torch.dtype) -> None:
    """B is then about zero, as at the start, but A is not: with both at zero no gradient would ever reach the block."""
    w = adapter(4, 3, 7, 6, dtype)
    start = w.replace({"adapter.B": torch.zeros_like(w["adapter.B"])})
    forget = [displacement(FACTORED, w, start)]
    basis = make_basis(forget, orthonormal_coefficients(gram(forget, forget), 1.0), torch.ones(1))
    after, residuals = excise(w, start, {"adapter": basis})
    assert float(product(after).norm()) < 1e-6
    assert residuals["adapter"] == 0.0  # nothing but rounding is left to truncate
    a = after["adapter.A"]
    torch.testing.assert_close(a @ a.T, torch.eye(3, dtype=dtype), atol=1e-5, rtol=0)


def test_refactor_of_zero_is_finite() -> None:
    factors, residual = refactor(Factors(torch.zeros(5, 6), torch.zeros(6, 4)), rank=2)
    assert residual == 0.0
    assert factors.left.shape == (5, 2)
    assert factors.right.shape == (2, 4)
    assert torch.isfinite(factors.right).all()
    assert float(product(factors).norm()) == 0.0


# --- the Forget Lock ---


def lock_on(basis: Basis, reference: Params, strength: float) -> ClientLock:
    return ClientLock(strength, {"layer": basis}, reference)


def with_lock(tensors: dict[str, Tensor], gradients: dict[str, Tensor], lock: ClientLock) -> dict[str, Tensor]:
    """One training's gradients with that of the lock added; two equal trainings in a stack get the same."""
    one, two = (
        add_lock_gradient(
            {name: tensor.expand(count, *tensor.shape) for name, tensor in tensors.items()},
            {name: tensor.expand(count, *tensor.shape) for name, tensor in gradients.items()},
            lock,
        )
        for count in (1, 2)
    )
    for name, found in two.items():
        torch.testing.assert_close(found, one[name].expand(2, *tensors[name].shape))
    return {**gradients, **{name: found[0] for name, found in one.items()}}


@quick
@given(cases(), seeds, st.floats(0.01, 2))
def test_lock_gradient_equals_autograd(case: Case, seed: int, strength: float) -> None:
    basis = case.basis(1.0)
    reference = dense_params(random_vector(seed))
    tensors = dict(dense_params(random_vector(seed + 1)).tensors)
    ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    found = with_lock(tensors, ones, lock_on(basis, reference, strength))
    # Oracle in float64, so that the tolerance is the library's own rounding.
    again = {n: t.double().requires_grad_() for n, t in tensors.items()}
    drift = torch.cat([(again[n] - reference[n].double()).flatten() for n in DENSE.tensors])
    (strength * (basis.directions.double().T @ drift).square().sum()).backward()
    for name, gradient in found.items():
        error = (gradient - 1).double() - again[name].grad
        assert float(error.norm()) <= 1e-6 * max(1.0, 2 * strength * float(drift.detach().norm()))


@quick
@given(cases(), seeds, st.floats(0.05, 2), st.floats(0.01, 0.99))
def test_drift_follows_its_recurrence_and_stays_bounded(case: Case, seed: int, strength: float, part: float) -> None:
    rate = part / (2 * strength)
    basis = case.basis(1.0)
    b = basis.directions
    reference = dense_params(random_vector(seed))
    lock = lock_on(basis, reference, strength)
    w = {name: tensor.clone() for name, tensor in reference.tensors.items()}

    def drift() -> Tensor:
        return b.T @ torch.cat([(w[n] - reference[n]).flatten() for n in DENSE.tensors])

    d, largest = drift(), 0.0
    for step in range(12):
        g = dense_params(random_vector(seed + 1 + step))
        g_u = b.T @ g.vector(DENSE)
        largest = max(largest, float(g_u.norm()))
        for name, gradient in with_lock(w, dict(g.tensors), lock).items():
            w[name] -= rate * gradient
        expected = (1 - 2 * rate * strength) * d - rate * g_u
        d = drift()
        torch.testing.assert_close(d, expected, atol=2e-5 * (1 + rate), rtol=1e-4)
        assert float(d.norm()) <= largest / (2 * strength) * (1 + 1e-3) + 1e-5


def test_lock_does_not_change_other_directions_and_blocks() -> None:
    other = Block("other", "text", "projector", ("other.weight",))
    reference = Params({**dense_params(torch.zeros(VALUES)).tensors, "other.weight": torch.zeros(3)}, (DENSE, other))
    w = {name: torch.ones_like(tensor) for name, tensor in reference.tensors.items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
    direction = torch.eye(VALUES)[:, :1]
    lock = ClientLock(0.5, {"layer": Basis(direction, torch.ones(1, 1), torch.ones(1))}, reference)
    found = with_lock(w, zeros, lock)
    assert found["layer.bias"].tolist() == [1.0, 0, 0, 0, 0]
    assert not found["layer.weight"].any()
    assert not found["other.weight"].any()


@quick
@given(cases(), seeds, st.floats(0.01, 2))
def test_weights_scale_the_pull_of_each_direction(case: Case, seed: int, strength: float) -> None:
    """Soft excision is a softer lock: the gradient of strength · sum_i weight_i <c_i, w - w_ref>²."""
    basis = make_basis(case.forget, case.spectrum.coefficients, 1 - 0.9 * case.spectrum.cosines**2)
    reference, w = dense_params(random_vector(seed)), dense_params(random_vector(seed + 1))
    pull = lock_pull(DENSE, w.tensors, lock_on(basis, reference, strength))
    directions = basis.directions.double()
    drift = (w - reference).vector(DENSE).double()
    expected = directions @ (basis.weights * (directions.T @ drift))
    torch.testing.assert_close(
        torch.cat([pull[name].flatten() for name in DENSE.tensors]).double(), expected, atol=1e-4, rtol=1e-4
    )


@quick
@given(shapes, seeds, st.floats(0.01, 2), st.sampled_from([torch.float32, torch.float64]))
def test_lock_gradient_of_trained_factors_equals_autograd(shape, seed: int, strength: float, dtype) -> None:
    """The penalty is strength · sum_i <c_i, BA - B0 A0>², so the chain rule takes it to both factors."""
    w, reference, forget, dense, spectrum = factored_case(shape, seed, shared_a=False)
    w, reference = w.map(lambda t: t.to(dtype)), reference.map(lambda t: t.to(dtype))
    basis = make_basis(forget, spectrum.coefficients, torch.ones_like(spectrum.cosines))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in w.tensors.items()}
    found = with_lock(dict(w.tensors), zeros, ClientLock(strength, {"adapter": basis}, reference))
    a, b = (w[name].double().requires_grad_() for name in FACTORED.tensors)
    directions = torch.stack(dense, 1) @ spectrum.coefficients
    drift = (b @ a - product(reference)).flatten()
    (strength * (directions.T @ drift).square().sum()).backward()
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    for name, expected in zip(FACTORED.tensors, (a.grad, b.grad), strict=True):
        error = float((found[name].double() - expected).norm())
        assert error <= tolerance * max(1.0, float(expected.norm()))


# --- on disk ---


def test_bases_return_as_they_were_saved(tmp_path: Path) -> None:
    columns = [random_vector(seed) for seed in range(3)]
    spectrum = spectrum_of([columns, [random_vector(9)]])
    dense = make_basis(columns, spectrum.coefficients, 1 - spectrum.cosines**2)
    w, start, forget, _, factored = factored_case((3, 7, 6), 0, shared_a=False)
    adapters = make_basis(forget, factored.coefficients, torch.ones_like(factored.cosines))
    empty = make_basis(columns, spectrum.coefficients, torch.zeros_like(spectrum.cosines))
    save_bases(tmp_path / "bases.safetensors", {"layer": dense, "adapter": adapters, "idle": empty})
    loaded = load_bases(tmp_path / "bases.safetensors")
    assert loaded.keys() == {"layer", "adapter", "idle"} and loaded["idle"].count == 0
    assert torch.equal(loaded["layer"].directions, dense.directions)
    assert torch.equal(loaded["layer"].weights, dense.weights)
    before, after = excise(w, start, {"adapter": adapters})[0], excise(w, start, loaded)[0]
    assert all(torch.equal(before[name], after[name]) for name in before.tensors)


# --- directions of several requests ---


def operator(basis: Basis) -> torch.Tensor:
    """What a lock along a basis takes of any displacement, as one matrix."""
    if isinstance(basis.directions, torch.Tensor):
        directions = basis.directions.double()
    else:
        columns = torch.stack([(f.left.double() @ f.right.double()).flatten() for f in basis.directions], dim=1)
        directions = columns @ basis.coefficients
    return directions @ torch.diag(basis.weights.double()) @ directions.T


def drawn_basis(seed: int, count: int, weights: list[float]) -> Basis:
    drawn = torch.randn(40, count, generator=torch.Generator().manual_seed(seed))
    return Basis(torch.linalg.qr(drawn)[0], torch.zeros(0, count), torch.tensor(weights, dtype=torch.float64))


def test_whole_directions_of_two_requests_span_both() -> None:
    one, two = drawn_basis(0, 3, [1.0] * 3), drawn_basis(1, 2, [1.0] * 2)
    mixed = torch.linalg.qr(torch.cat([two.directions[:, :1], one.directions[:, :1]], 1))[0]
    shared = Basis(mixed, torch.zeros(0, 2), one.weights[:2])
    for newer, older in ((one, two), (shared, one), (one, one)):
        both = torch.linalg.matrix_rank(torch.cat([newer.directions, older.directions], 1))
        found = joined({"b": newer}, {"b": older})["b"]
        left = torch.linalg.svd(torch.cat([newer.directions, older.directions], 1), full_matrices=False)[0][:, :both]
        torch.testing.assert_close(operator(found), left.double() @ left.double().T, atol=1e-4, rtol=0)
        assert found.count == both


def test_joined_directions_are_orthonormal_and_hold_no_less_than_the_newer() -> None:
    newer, older = drawn_basis(2, 3, [0.2, 0.9, 0.5]), drawn_basis(3, 4, [0.7, 1.0, 0.1, 0.4])
    tilted = Basis(
        torch.linalg.qr(newer.directions @ torch.randn(3, 2) + 0.1 * older.directions[:, :2])[0],
        torch.zeros(0, 2),
        torch.tensor([0.8, 0.3], dtype=torch.float64),
    )
    for other in (older, tilted):
        found = joined({"b": newer}, {"b": other})["b"]
        torch.testing.assert_close(found.directions.T @ found.directions, torch.eye(found.count), atol=1e-5, rtol=0)
        assert float(found.weights.min()) > 0 and float(found.weights.max()) <= 1
        more = torch.linalg.eigvalsh(operator(found) - operator(newer))
        assert float(more.min()) > -1e-5
    apart = joined({"a": newer}, {"b": older})
    assert apart == {"a": newer, "b": older}


def test_factored_directions_join_as_dense_ones_do() -> None:
    rng = torch.Generator().manual_seed(5)

    def factored(count: int) -> tuple[Basis, Basis]:
        columns = tuple(
            Factors(torch.randn(6, 2, generator=rng), torch.randn(2, 5, generator=rng)) for _ in range(count)
        )
        coefficients = orthonormal_coefficients(gram(columns, columns), 1.0)
        weights = torch.linspace(0.3, 1.0, coefficients.shape[1], dtype=torch.float64)
        flat = torch.stack([(c.left @ c.right).flatten() for c in columns], 1).double() @ coefficients
        return Basis(columns, coefficients, weights), Basis(flat.float(), torch.zeros(0, count), weights)

    (one, one_dense), (two, two_dense) = factored(2), factored(3)
    found, dense = joined({"b": one}, {"b": two})["b"], joined({"b": one_dense}, {"b": two_dense})["b"]
    torch.testing.assert_close(operator(found), operator(dense), atol=1e-4, rtol=0)
