"""Gradient subspace decomposition: which directions only the forget updates use, and projection along them.

Everything is computed from the Gram matrix of stored updates, in float64. Directions are coefficient vectors over
those updates, so a LoRA product is never formed as a dense matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ease.errors import UserError
from ease.params import Block, Params
from ease.storage import read_tensors, write_tensors

NULL = 1e-6
"""Singular values below this share of the largest are rounding, not directions."""
CHUNK_VALUES = 1 << 16
BESIDE = 1e-6
"""Squared sine of the angle above which a direction is outside a span: stored in fp32, less is rounding."""


@dataclass(frozen=True)
class Factors:
    """A low-rank matrix left · right, left [out, k], right [k, in]."""

    left: Tensor
    right: Tensor


Column = Tensor | Factors
"""A block's update: a flat vector, or factors when both LoRA factors are trained."""


def displacement(block: Block, after: Params, before: Params) -> Column:
    """The effective change of a block. For trained factors it is B1·A1 - B0·A0, exact at rank 2r.

    Written as (B1 - B0)·A1 + B0·(A1 - A0): a factor that did not move adds exact zeros, where the difference of two
    products would leave rounding that the rank guard would take for a direction.
    """
    if not block.factored:
        return after.vector(block) - before.vector(block)
    a, b = block.tensors
    a1, b1, a0, b0 = (tensor.double() for tensor in (after[a], after[b], before[a], before[b]))
    return Factors(torch.cat([b1 - b0, b0], dim=1), torch.cat([a1, a1 - a0], dim=0))


def gram(left: Sequence[Column], right: Sequence[Column]) -> Tensor:
    """Inner products of every left with every right column: float64 [len(left), len(right)]."""
    if not left or not right:
        return torch.zeros(len(left), len(right), dtype=torch.float64)
    if isinstance(left[0], Factors):
        return _factored_gram(_factors(left), _factors(right))
    same, left, right = left is right, _vectors(left), _vectors(right)
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left[0].device)
    for start in range(0, left[0].numel(), CHUNK_VALUES):
        part = slice(start, start + CHUNK_VALUES)
        rows = torch.stack([column[part] for column in left]).double()
        total += rows @ (rows if same else torch.stack([column[part] for column in right]).double()).T
    return total.cpu()


def _vectors(columns: Sequence[Column]) -> list[Tensor]:
    return [column for column in columns if isinstance(column, Tensor)]


def _factors(columns: Sequence[Column]) -> list[Factors]:
    return [column for column in columns if isinstance(column, Factors)]


def _factored_gram(left: Sequence[Factors], right: Sequence[Factors]) -> Tensor:
    """<L1 R1, L2 R2> = sum((L1^T L2) * (R1 R2^T)), one left column at a time against all right ones."""
    l2 = torch.cat([c.left for c in right], dim=1).double()
    r2 = torch.cat([c.right for c in right]).double()
    owner = torch.block_diag(*(l2.new_ones(c.left.shape[1], 1) for c in right))
    rows = [((c.left.double().T @ l2) * (c.right.double() @ r2.T)).sum(dim=0) for c in left]
    return (torch.stack(rows) @ owner).cpu()


def orthonormal_coefficients(square: Tensor, energy: float) -> Tensor:
    """Coefficients [columns, rank] of the fewest orthonormal directions that hold `energy` of the columns."""
    values, vectors = torch.linalg.eigh((square + square.T) / 2)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    if len(values) == 0 or values[0] <= 0:
        return torch.zeros(len(square), 0, dtype=torch.float64)
    real = int((values > values[0] * NULL**2).sum())
    share = values.cumsum(0) / values.sum()
    rank = min(real, int((share < energy - 1e-12).sum()) + 1)
    return vectors[:, :rank] / values[:rank].sqrt()


@dataclass(frozen=True)
class Spectrum:
    """The entanglement spectrum of one block: canonical directions of the forget subspace and their cosines."""

    cosines: Tensor
    """kappa [p], descending: 1 means shared with the retained updates, 0 means the forget updates' own."""
    coefficients: Tensor
    """Unit canonical directions over the forget columns [forget columns, p]."""
    energies: Tensor
    """Share of the forget columns' energy along each direction [p]."""
    retain_rank: int

    @property
    def forget_rank(self) -> int:
        return len(self.cosines)

    def unique(self, delta: float) -> Tensor:
        """Which directions are the forget updates' own at this threshold: bool [p]."""
        return self.cosines <= delta

    def forget_energy(self, delta: float) -> float:
        """eta_f: share of the forget energy that the unique directions hold."""
        return float(self.energies[self.unique(delta)].sum())

    def retain_damage(self, delta: float) -> float:
        """eta_r: largest share of a retained direction that excision can take, max kappa² over the unique set."""
        chosen = self.cosines[self.unique(delta)]
        return float(chosen.max() ** 2) if len(chosen) else 0.0


def decompose(forget: Tensor, cross: Tensor, retain: Tensor, energy: float) -> Spectrum:
    """Principal angles between forget and retain updates, from Gram blocks [f, f], [f, r] and [r, r]."""
    own = orthonormal_coefficients(forget, energy)
    other = orthonormal_coefficients(retain, energy)
    p, q = own.shape[1], other.shape[1]
    rotation, values, _ = torch.linalg.svd(own.T @ cross @ other, full_matrices=True)
    cosines = torch.zeros(p, dtype=torch.float64)
    cosines[: min(p, q)] = values[: min(p, q)].clamp(0, 1)
    directions = own @ rotation
    along = directions.T @ forget
    total = forget.diagonal().sum().clamp_min(1e-300)
    return Spectrum(cosines, directions, along.square().sum(dim=1) / total, q)


@dataclass(frozen=True)
class Basis:
    """Directions of one block, each with the share of it that is to be excised."""

    directions: Tensor | tuple[Factors, ...]
    """Dense [values, directions], orthonormal; or the forget columns themselves when the block is factored."""
    coefficients: Tensor
    """Over the forget columns [columns, directions]; used when the block is factored."""
    weights: Tensor
    """Share of each direction to remove, 0..1 [directions]."""

    @property
    def count(self) -> int:
        return len(self.weights)

    def to(self, device: torch.device) -> "Basis":
        """The basis on another device; with factors, the numbers that combine them, which are few, stay on the CPU."""
        if isinstance(self.directions, Tensor):
            return Basis(self.directions.to(device), self.coefficients, self.weights.to(device))
        factors = tuple(Factors(f.left.to(device), f.right.to(device)) for f in self.directions)
        return Basis(factors, self.coefficients, self.weights)

    def weighted(self, weights: Tensor) -> "Basis":
        """The same directions with other shares; those of share 0 are left out."""
        kept = weights > 0
        directions = self.directions[:, kept] if isinstance(self.directions, Tensor) else self.directions
        return Basis(directions, self.coefficients[:, kept], weights[kept])

    def components(self, drift: Column) -> Tensor:
        """Inner product of a displacement with every direction, float64 [directions]."""
        if self.count == 0:
            return self.weights.new_zeros(0, dtype=torch.float64)
        if isinstance(self.directions, Tensor):
            assert isinstance(drift, Tensor)  # a dense basis belongs to a dense block
            return (self.directions.T @ drift.to(self.directions)).double()
        return self.coefficients.T @ gram(self.directions, [drift])[:, 0]


def make_basis(columns: Sequence[Column], coefficients: Tensor, weights: Tensor) -> Basis:
    """Turn coefficient vectors over stored columns into directions that can be applied."""
    kept = weights > 0
    coefficients, weights = coefficients[:, kept], weights[kept]
    if columns and isinstance(columns[0], Factors):
        return Basis(tuple(_factors(columns)), coefficients, weights)
    if not columns:
        return Basis(torch.zeros(0, int(kept.sum())), coefficients, weights)
    vectors = _vectors(columns)
    # Coefficients over nearly parallel columns are large and cancel, so the sum needs float64.
    stacked = torch.stack([vector.cpu() for vector in vectors], dim=1).double()
    return Basis(_orthonormal(stacked @ coefficients).float().to(vectors[0].device), coefficients, weights)


def _orthonormal(directions: Tensor) -> Tensor:
    """Mend the rounding of directions [values, directions] that are orthonormal by construction.

    Cholesky of their small Gram is much cheaper than QR of the tall matrix; QR serves where rounding went too far.
    """
    if directions.shape[1] == 0:
        return directions
    lower, failed = torch.linalg.cholesky_ex(directions.T @ directions)
    if int(failed) == 0:
        return torch.linalg.solve_triangular(lower, directions.T, upper=False).T
    q, r = torch.linalg.qr(directions)
    return q * r.diagonal().sign()


def excise(
    params: Params, reference: Params, bases: dict[str, Basis], share: float = 1.0, drifted: Params | None = None
) -> tuple[Params, dict[str, float]]:
    """w <- w - share · sum_i weight_i c_i <c_i, w - w_ref>, block by block; or by how far another state has `drifted`.

    Returns the new state and, for factored blocks, the relative residual that truncation to rank r left.
    """
    changed: dict[str, Tensor] = {}
    residuals: dict[str, float] = {}
    for block in params.blocks:
        basis = bases.get(block.name)
        if basis is None or basis.count == 0:
            continue
        drift = displacement(block, params if drifted is None else drifted, reference)
        amounts = share * basis.weights * basis.components(drift)
        if not amounts.any():  # nothing to remove: factors keep their values, not only their product
            continue
        if isinstance(basis.directions, Tensor):
            whole = basis.directions @ amounts.to(basis.directions)
            sizes = [params[name].numel() for name in block.tensors]
            for name, part in zip(block.tensors, whole.split(sizes), strict=True):
                changed[name] = params[name] - part.view_as(params[name]).to(params[name])
        else:
            a, b = block.tensors
            gamma = basis.coefficients @ amounts
            # Scaled in float64: over nearly parallel columns gamma is large and the terms cancel.
            removed = [g * c.left.double() for g, c in zip(gamma.tolist(), basis.directions, strict=True)]
            corrected = Factors(
                torch.cat([params[b], *(-part for part in removed)], dim=1),
                torch.cat([params[a], *(c.right for c in basis.directions)], dim=0),
            )
            refactored, residuals[block.name] = refactor(corrected, rank=params[b].shape[1])
            changed[b], changed[a] = refactored.left.to(params[b].dtype), refactored.right.to(params[a].dtype)
    return params.replace(changed), residuals


@dataclass(frozen=True)
class ServerLock:
    """The Forget Lock at the server: directions along which every later state keeps the place of `state`."""

    bases: Mapping[str, Basis]
    state: Params

    def apply(self, params: Params) -> Params:
        """The parameters without their displacement from `state` along the directions."""
        return excise(params, self.state, dict(self.bases))[0]


def joined(newer: Mapping[str, Basis], older: Mapping[str, Basis]) -> dict[str, Basis]:
    """Directions of both, orthonormal again: the newer ones keep their span and lose no weight to the older ones.

    The part of the older directions in that span adds to its weights, because two locks hold more than one. The rest
    becomes further directions with their weights."""
    found = {name: basis for name, basis in {**older, **newer}.items() if name not in older or name not in newer}
    for name in newer:
        if name in older:
            found[name] = _joined(newer[name], older[name])
    return found


def _joined(newer: Basis, older: Basis) -> Basis:
    columns = [*_columns(newer), *_columns(older)]
    first, second = _coefficients(newer), _coefficients(older)
    new = torch.cat([first, first.new_zeros(len(second), newer.count)])
    old = torch.cat([second.new_zeros(len(first), older.count), second])
    square = gram(columns, columns)
    weights, earlier = newer.weights.double(), older.weights.double()
    cross = new.T @ square @ old
    passed = (1 - weights).clamp_min(0).sqrt()
    left = torch.eye(newer.count, dtype=torch.float64) - (cross * earlier) @ cross.T
    inside, turned = torch.linalg.eigh(passed[:, None] * left * passed)
    beside = old - new @ cross
    lengths, turned_old = torch.linalg.eigh(beside.T @ square @ beside)
    real = lengths > BESIDE
    turned_old = turned_old[:, real]
    coefficients = torch.cat([new @ turned, beside @ turned_old / lengths[real].sqrt()], dim=1)
    kept = torch.cat([1 - inside, (turned_old.square() * earlier[:, None]).sum(0)]).clamp(0, 1)
    return make_basis(columns, coefficients, kept)


def _columns(basis: Basis) -> list[Column]:
    return list(basis.directions.T) if isinstance(basis.directions, Tensor) else list(basis.directions)


def _coefficients(basis: Basis) -> Tensor:
    """Over the columns, in double precision."""
    if isinstance(basis.directions, Tensor):
        return torch.eye(basis.count, dtype=torch.float64)
    return basis.coefficients.double()


def refactor(matrix: Factors, rank: int) -> tuple[Factors, float]:
    """The best rank-r factors of a product, by thin QR and a small SVD, and the relative residual.

    The right factor has orthonormal rows, as `A` has at the start: were the singular values split between both, a
    direction removed to nothing would be zero in both, get no gradient and never be learned again.
    """
    q_left, r_left = torch.linalg.qr(matrix.left.double())
    q_right, r_right = torch.linalg.qr(matrix.right.double().T)
    u, values, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    left, right = q_left @ (u[:, :rank] * values[:rank]), vh[:rank] @ q_right.T
    total = values.norm()
    rounding = NULL**2 * matrix.left.norm() * matrix.right.norm()
    return Factors(left, right), float(values[rank:].norm() / total) if total > rounding else 0.0


def save_bases(path: Path, bases: Mapping[str, Basis]) -> None:
    """Keep the directions of a request, so that later training can stay locked along them."""
    tensors: dict[str, Tensor] = {}
    for name, basis in bases.items():
        tensors[f"{name}:weights"] = basis.weights
        if isinstance(basis.directions, Tensor):
            tensors[f"{name}:directions"] = basis.directions
        else:
            tensors[f"{name}:coefficients"] = basis.coefficients
            tensors[f"{name}:left"] = torch.stack([column.left for column in basis.directions])
            tensors[f"{name}:right"] = torch.stack([column.right for column in basis.directions])
    write_tensors(path, tensors)


def load_bases(path: Path) -> dict[str, Basis]:
    """Read what `save_bases` wrote."""
    tensors = read_tensors(path)
    try:
        return _bases_of(tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not the directions of blocks ({error}); the file was altered, restore it") from error


def _bases_of(tensors: dict[str, Tensor]) -> dict[str, Basis]:
    bases = {}
    for name in [key.removesuffix(":weights") for key in tensors if key.endswith(":weights")]:
        weights = tensors[f"{name}:weights"]
        if f"{name}:directions" in tensors:
            bases[name] = Basis(tensors[f"{name}:directions"], torch.zeros(0, len(weights)), weights)
        else:
            columns = zip(tensors[f"{name}:left"], tensors[f"{name}:right"], strict=True)
            factors = tuple(Factors(left, right) for left, right in columns)
            bases[name] = Basis(factors, tensors[f"{name}:coefficients"], weights)
    return bases
