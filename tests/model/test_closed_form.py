"""The closed-form head: sums are exact, and the maps are those of a plain ridge CCA."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from ease.errors import UserError
from ease.model.backbones import load_backbone
from ease.model.closed_form import (
    GRID,
    LARGEST_SUM,
    Ridge,
    Sums,
    most_pairs,
    on_grid,
    one_thread,
    packed_size,
    size_of,
    solve,
    solves,
    widths,
)
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.params import Block, Params

IMAGE, TEXT, CAPTIONS = 7, 5, 5
Grid = tuple[torch.Tensor, torch.Tensor]


def drawn(pairs: int, seed: int = 0) -> Grid:
    """Related pictures and captions on the grid."""
    rng = torch.Generator().manual_seed(seed)
    meaning = torch.randn(pairs, 3, generator=rng)
    image = torch.cat([meaning, meaning**2], 1) @ torch.randn(6, IMAGE, generator=torch.Generator().manual_seed(1))
    words = meaning[:, None] + 0.3 * torch.randn(pairs, CAPTIONS, 3, generator=rng)
    text = words @ torch.randn(3, TEXT, generator=torch.Generator().manual_seed(2))
    return on_grid(image + 0.1 * torch.randn(pairs, IMAGE, generator=rng)), on_grid(text)


def sums_of(grid: Grid, rows: slice | list[int] = slice(None)) -> Sums:
    return Sums.of(grid[0][rows], grid[1][rows])


def layout(rank: int = 4) -> Params:
    """A state of maps, in the layout of a model."""
    shapes = {"image": IMAGE, "text": TEXT}
    tensors = {
        f"{side}.projector.0.{part}": torch.zeros(shape)
        for side, width in shapes.items()
        for part, shape in (("bias", (rank,)), ("weight", (rank, width)))
    }
    names = {side: tuple(name for name in tensors if name.startswith(side)) for side in shapes}
    return Params(tensors, tuple(Block(f"{s}.projector.0", s, "closed_form", names[s]) for s in ("image", "text")))


# --- sums ---


def test_sums_are_the_products_that_a_loop_over_whole_numbers_gives() -> None:
    image, text = drawn(6)
    size = IMAGE + TEXT + 1
    expected = np.zeros((size, size), dtype=object)
    for picture, captions in zip(image.long().tolist(), text.long().tolist(), strict=True):
        for words in captions:
            both = np.array([*picture, *words, 1], dtype=object)  # Python's whole numbers never round
            expected += np.outer(both, both)
    found = Sums.of(image, text)
    assert found.packed.dtype == torch.int64
    assert found.packed.tolist() == [expected[i, j] for i in range(size) for j in range(i, size)]
    assert found.count == 6 * CAPTIONS == expected[-1, -1]
    assert found.matrix().long().tolist() == expected.tolist()


@given(st.permutations(range(20)), st.integers(0, 20))
def test_subtracting_what_was_added_restores_the_bytes(order: list[int], cut: int) -> None:
    grid = drawn(20)
    kept, gone = order[:cut], order[cut:]
    whole, one_by_one = sums_of(grid), Sums.none(IMAGE + TEXT + 1)
    for row in order:
        one_by_one += sums_of(grid, [row])
    assert torch.equal(one_by_one.packed, whole.packed)
    assert torch.equal((whole - sums_of(grid, gone)).packed, sums_of(grid, kept).packed)
    assert torch.equal(((whole - sums_of(grid, gone)) + sums_of(grid, gone)).packed, whole.packed)


def test_sums_and_maps_do_not_depend_on_the_number_of_threads() -> None:
    image, text = on_grid(torch.randn(3000, 96)), on_grid(torch.randn(3000, CAPTIONS, 64))
    rank = 32
    like = Params(
        {
            **{f"image.projector.0.{part}": torch.zeros(shape) for part, shape in (("bias", 32), ("weight", (32, 96)))},
            **{f"text.projector.0.{part}": torch.zeros(shape) for part, shape in (("bias", 32), ("weight", (32, 64)))},
        },
        (
            Block("image.projector.0", "image", "closed_form", ("image.projector.0.bias", "image.projector.0.weight")),
            Block("text.projector.0", "text", "closed_form", ("text.projector.0.bias", "text.projector.0.weight")),
        ),
    )
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums = Sums.of(image, text)
            found.append((sums.packed, solve(sums, Ridge(), like)))
            assert torch.get_num_threads() == threads, "solving leaves the setting as it was"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1]["image.projector.0.weight"].shape == (rank, 96)


def test_more_than_64_bits_hold_is_refused() -> None:
    huge = Sums(torch.full((packed_size(3),), LARGEST_SUM))
    with pytest.raises(UserError, match="64-bit"):
        huge + huge
    with pytest.raises(UserError, match="64-bit"):
        Sums(-huge.packed) - huge
    assert (huge - huge).count == 0


def test_as_many_pairs_as_are_allowed_fit() -> None:
    """The largest entry is a sum of squares: of pairs whose vectors have the largest length."""
    pairs = most_pairs(1280, 384, CAPTIONS)
    assert pairs > 10_000_000
    assert pairs * CAPTIONS * 1280 * (GRID + 1) ** 2 <= LARGEST_SUM


def test_features_that_are_too_large_for_float64_products_are_refused() -> None:
    with pytest.raises(UserError, match="too large"):
        Sums.of(torch.full((2, 3), 2.0**26), torch.zeros(2, 1, 2))


@given(st.integers(1, 3000))
def test_the_size_follows_from_the_packed_length(size: int) -> None:
    assert size_of(packed_size(size)) == size


# --- what no pairs can have summed ---


def test_sound_sums_have_no_fault_however_few_pairs_they_are_of() -> None:
    for pairs in (1, 2, 5, 50):
        assert sums_of(drawn(pairs)).fault(IMAGE, TEXT) is None
    assert Sums.none(IMAGE + TEXT + 1).fault(IMAGE, TEXT) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda full: full[0, 1].mul_(-3), "positive semi-definite"),
        (lambda full: full.mul_(-1), "negative"),
        (lambda full: full[:IMAGE, :IMAGE].mul_(40), "larger than"),
        (lambda full: full[2, -1].add_(GRID * 4000), "positive semi-definite"),
    ],
)
def test_sums_that_no_pairs_have_are_named(damage: Callable[[torch.Tensor], object], reason: str) -> None:
    full = sums_of(drawn(30)).matrix().long()
    damage(full)
    rows, columns = torch.triu_indices(*full.shape)
    assert reason in str(Sums(full[rows, columns]).fault(IMAGE, TEXT))


def test_another_client_s_pairs_cannot_be_subtracted() -> None:
    left = sums_of(drawn(10)) - sums_of(drawn(10, seed=3), slice(1))
    assert "positive semi-definite" in str(left.fault(IMAGE, TEXT))


# --- the maps ---


def test_the_maps_are_those_of_a_plain_ridge_cca() -> None:
    """Against numpy: means and deviations of the raw features, inverse square roots, one SVD."""
    grid, ridge = drawn(200), Ridge(image=0.7, text=0.2, power=0.5)
    found = solve(sums_of(grid), ridge, layout())
    x = (grid[0] / GRID).repeat_interleave(CAPTIONS, 0).numpy()
    y = (grid[1] / GRID).flatten(0, 1).numpy()
    zx, zy = ((each - each.mean(0)) / each.std(0) for each in (x, y))

    def whitening(z: np.ndarray, strength: float) -> np.ndarray:
        values, axes = np.linalg.eigh(z.T @ z / len(z) + strength * np.eye(z.shape[1]))
        return axes / np.sqrt(values) @ axes.T

    wx, wy = whitening(zx, ridge.image), whitening(zy, ridge.text)
    u, s, vt = np.linalg.svd(wx @ (zx.T @ zy / len(zx)) @ wy)
    expected = {"image": zx @ wx @ u[:, :4] * s[:4] ** 0.5, "text": zy @ wy @ vt[:4].T * s[:4] ** 0.5}
    for side, features in (("image", x), ("text", y)):
        weight, bias = (found[f"{side}.projector.0.{part}"].double().numpy() for part in ("weight", "bias"))
        mapped = features @ weight.T + bias
        signs = np.sign((mapped * expected[side]).sum(0))
        np.testing.assert_allclose(mapped * signs, expected[side], atol=2e-5)
    both = [
        np.sign((features @ found[f"{side}.projector.0.weight"].double().numpy().T * expected[side]).sum(0))
        for side, features in (("image", zx * x.std(0)), ("text", zy * y.std(0)))
    ]
    assert np.array_equal(*both), "a direction is turned on both sides or on none"


def test_a_constant_feature_is_left_out() -> None:
    image, text = drawn(50)
    image[:, 2] = GRID
    maps = solve(Sums.of(image, text), Ridge(), layout())
    assert maps.is_finite()
    assert not maps["image.projector.0.weight"][:, 2].any()
    assert maps["image.projector.0.weight"][:, 1].any()


def test_the_grid_is_that_of_the_normalised_features() -> None:
    features = torch.randn(4, 3, 16)
    normed = F.layer_norm(features.double(), (16,))
    assert (on_grid(features) / GRID - normed).abs().max() <= 0.5 / GRID
    assert torch.equal(on_grid(features), on_grid(features).round())


def test_one_thread_ends_with_its_block() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before


# --- the model ---


def test_a_model_with_a_closed_form_head_embeds_with_unit_norm_by_its_maps() -> None:
    config = ModelConfig(projector="closed_form", lora="off", embedding=8)
    model = DualEncoder(load_backbone("tiny"), config, seed=0)
    state = model.initial()
    assert solves(state)
    assert widths(state) == (model.image.tower.width, model.text.tower.width)
    features = torch.randn(3, model.image.tower.width)
    weight, bias = (state[f"image.projector.0.{part}"] for part in ("weight", "bias"))
    expected = F.normalize(F.layer_norm(features, features.shape[-1:]) @ weight.T + bias, dim=-1)
    torch.testing.assert_close(model.embed(dict(state.tensors), "image", features), expected)


def test_no_more_directions_than_the_narrower_tower_has_features() -> None:
    backbone = load_backbone("tiny")
    model = DualEncoder(backbone, ModelConfig(projector="closed_form", lora="off", embedding=4096), seed=0)
    assert len(model.initial()["text.projector.0.weight"]) == min(backbone.image.width, backbone.text.width)


def test_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="frozen towers"):
        ModelConfig(projector="closed_form")
