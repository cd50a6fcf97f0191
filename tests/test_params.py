"""Params as a value: arithmetic, reproducible means and files that are exact or refused."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ease import storage
from ease.errors import UserError
from ease.params import Block, Params, weighted_mean
from ease.storage import read_noted

BLOCKS = (
    Block("text.projector.0", "text", "projector", ("text.projector.0.bias", "text.projector.0.weight")),
    Block("image.layer.0", "image", "lora", ("image.layer.0.A", "image.layer.0.B")),
    Block("image.layer.1", "image", "lora", ("image.layer.1.B",)),
)
SHAPES = {
    "text.projector.0.weight": (4, 3),
    "text.projector.0.bias": (4,),
    "image.layer.1.B": (6, 2),
    "image.layer.0.B": (5, 2),
    "image.layer.0.A": (2, 7),
}

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def random_params(seed: int, dtype: torch.dtype = torch.float32) -> Params:
    rng = torch.Generator().manual_seed(seed)
    return Params({name: torch.randn(shape, generator=rng).to(dtype) for name, shape in SHAPES.items()}, BLOCKS)


def same(one: Params, two: Params) -> bool:
    """Equal to the last bit, names and dtypes included."""
    return one.tensors.keys() == two.tensors.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one.tensors
    )


def flat(params: Params) -> np.ndarray:
    return np.concatenate([params[name].double().flatten().numpy() for name in sorted(SHAPES)])


def rewrite_note(path: Path, change) -> None:
    """Alter the JSON note in a file's header and keep the file well formed."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["ease"] = change(header["__metadata__"]["ease"])
    text = json.dumps(header).encode()
    changed = struct.pack("<Q", len(text)) + text + content[8 + length :]
    path.write_bytes(storage._seal(storage.SEAL.sub(storage.BLANK, changed, 1)))


# --- arithmetic ---


@quick
@given(seeds, st.floats(-3, 3, width=32))
def test_arithmetic_is_element_by_element(seed: int, factor: float) -> None:
    one, two = random_params(seed), random_params(seed + 1)
    for name in SHAPES:
        assert torch.equal((one + two)[name], one[name] + two[name])
        assert torch.equal((one - two)[name], one[name] - two[name])
        assert torch.equal((one * factor)[name], one[name] * factor)
        assert torch.equal((factor * one)[name], one[name] * factor)
        assert torch.equal((-one)[name], -one[name])
    assert (one + two).blocks == (factor * one).blocks == BLOCKS
    assert same(one - one, one.zeros())
    assert one.dot(two) == pytest.approx(flat(one) @ flat(two), rel=1e-12, abs=1e-12)
    assert one.norm() == pytest.approx(np.linalg.norm(flat(one)), rel=1e-12)


def test_operations_do_not_change_their_operands() -> None:
    one, two = random_params(1), random_params(2)
    _ = one + two, one - two, one * 2.0, -one, one.zeros(), one.replace({"image.layer.1.B": torch.zeros(6, 2)})
    _ = weighted_mean([(1.0, one), (2.0, two)])
    assert same(one, random_params(1))
    assert same(two, random_params(2))


def test_dot_does_not_depend_on_the_order_of_tensors() -> None:
    for seed in range(50):
        one = random_params(seed)
        other = Params({name: one[name] for name in sorted(SHAPES)}, BLOCKS)
        assert one.norm() == other.norm()


def test_sizes_and_vectors() -> None:
    params = random_params(0)
    assert params.size == 12 + 4 + 12 + 10 + 14
    assert params.bytes == 4 * params.size
    assert random_params(0, torch.float64).bytes == 8 * params.size
    for block in BLOCKS:
        expected = np.concatenate([params[name].flatten().numpy() for name in block.tensors])
        np.testing.assert_array_equal(params.vector(block).numpy(), expected)
    assert [block.factored for block in BLOCKS] == [False, True, False]


def test_replace_exchanges_only_what_is_named() -> None:
    params, new = random_params(0), torch.zeros(6, 2)
    replaced = params.replace({"image.layer.1.B": new})
    assert torch.equal(replaced["image.layer.1.B"], new)
    assert same(replaced.replace({"image.layer.1.B": params["image.layer.1.B"]}), params)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_seen(value: float) -> None:
    params = random_params(0)
    assert params.is_finite()
    broken = params["text.projector.0.bias"].clone()
    broken[2] = value
    assert not params.replace({"text.projector.0.bias": broken}).is_finite()


# --- weighted mean ---


@quick
@given(seeds, st.lists(st.floats(0.1, 1e4), min_size=1, max_size=8), st.sampled_from([1e-6, 1.0, 1e6]))
def test_weighted_mean_equals_the_float64_mean(seed: int, weights: list[float], scale: float) -> None:
    params = [scale * random_params(seed + i) for i in range(len(weights))]
    mean = weighted_mean(zip(weights, params, strict=True))
    expected = np.average([flat(p) for p in params], axis=0, weights=weights)
    assert mean.blocks == BLOCKS
    assert all(tensor.dtype == torch.float32 for tensor in mean.tensors.values())
    # At most the last rounding to float32, whatever cancelled on the way.
    np.testing.assert_allclose(flat(mean), expected, rtol=2**-23, atol=1e-12 * scale)


def test_mean_of_one_or_of_equals_is_exact() -> None:
    params = random_params(3)
    assert same(weighted_mean([(0.3, params)]), params)
    assert same(weighted_mean([(600.0, params), (7.0, params), (31.0, params)]), params)


def test_mean_ignores_a_common_factor_of_the_weights_to_rounding() -> None:
    pairs = [(float(w), random_params(w)) for w in (3, 5, 9)]
    one, two = weighted_mean(pairs), weighted_mean([(w / 17, p) for w, p in pairs])
    np.testing.assert_allclose(flat(one), flat(two), rtol=2**-23)


@pytest.mark.parametrize("values", [[], [(0.0, random_params(0))]])
def test_mean_of_nothing_is_refused(values: list) -> None:
    with pytest.raises(UserError, match="no update to aggregate"):
        weighted_mean(values)


# --- files ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_round_trip_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    params = random_params(5, dtype)
    params.save(tmp_path / "a.safetensors")
    loaded = Params.load(tmp_path / "a.safetensors")
    assert same(loaded, params)
    assert loaded.blocks == params.blocks
    assert loaded.norm() == params.norm()
    assert read_noted(tmp_path / "a.safetensors")[1]["blocks"] == [json.loads(json.dumps(vars(b))) for b in BLOCKS]


def test_special_values_survive(tmp_path: Path) -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, float("inf"), float("nan")])
    params = Params({"b": values}, (Block("x", "text", "projector", ("b",)),))
    params.save(tmp_path / "a")
    assert Params.load(tmp_path / "a")["b"].numpy().tobytes() == values.numpy().tobytes()


def test_equal_states_have_equal_bytes(tmp_path: Path) -> None:
    params = random_params(6)
    files = [tmp_path / name for name in ("a", "b", "c", "d")]
    params.save(files[0])
    params.save(files[1])
    Params({name: params[name] for name in reversed(SHAPES)}, BLOCKS).save(files[2])
    Params.load(files[0]).save(files[3])
    assert len({file.read_bytes() for file in files}) == 1
    (random_params(6) * 2.0).save(files[0])  # an existing file is replaced whole
    assert same(Params.load(files[0]), params * 2.0)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b", "c", "d"}


def test_views_and_gradients_are_saved_by_value(tmp_path: Path) -> None:
    whole = torch.randn(4, 6, requires_grad=True)
    block = Block("x", "image", "lora", ("A", "B"))
    Params({"A": whole[:2], "B": whole[2:, ::2].T}, (block,)).save(tmp_path / "a")
    loaded = Params.load(tmp_path / "a")
    assert torch.equal(loaded["A"], whole[:2].detach())
    assert torch.equal(loaded["B"], whole[2:, ::2].T.detach())
    assert not loaded["A"].requires_grad


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.safetensors: no such file"):
        Params.load(tmp_path / "absent.safetensors")


def test_truncated_file_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    random_params(0).save(path)
    content = path.read_bytes()
    for kept in [*range(0, len(content), 37), 7, 8, 9, len(content) - 1]:
        path.write_bytes(content[:kept])
        with pytest.raises(UserError, match=r"cut\.safetensors"):
            Params.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=r"cut\.safetensors"):
        Params.load(path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_garbled_file_is_refused_or_still_a_state(tmp_path_factory, data: st.DataObject) -> None:
    """Whatever happens to the header, the reader says so in one line; no other exception comes out."""
    path = tmp_path_factory.getbasetemp() / "garbled.safetensors"
    random_params(0).save(path)
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        loaded = Params.load(path)
    except UserError as error:
        assert "garbled.safetensors" in str(error)
    else:
        assert sorted(n for block in loaded.blocks for n in block.tensors) == sorted(loaded.tensors)


@pytest.mark.parametrize("content", [b"", b"not tensors at all, but long enough", b"\xff" * 64])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"notes\.safetensors"):
        Params.load(path)


def test_tensors_of_another_tool_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match=r"foreign\.safetensors: .*it has no seal"):
        Params.load(tmp_path / "foreign.safetensors")
    storage.write_tensors(tmp_path / "other.safetensors", {"x": torch.zeros(2)})
    with pytest.raises(UserError, match=r"other\.safetensors: not a parameter file"):
        Params.load(tmp_path / "other.safetensors")


def altered(**fields):
    """A change of the first block's fields; None removes one."""

    def change(text: str) -> str:
        note = json.loads(text)
        for name, value in fields.items():
            if value is None:
                del note["blocks"][0][name]
            else:
                note["blocks"][0][name] = value
        return json.dumps(note)

    return change


def blocks_changed(function):
    return lambda text: json.dumps({**json.loads(text), "blocks": function(json.loads(text)["blocks"])})


@pytest.mark.parametrize(
    "change",
    [
        altered(tensors=["text.projector.0.bias"]),
        altered(tensors=["text.projector.0.bias", "text.projector.0.other"]),
        altered(tensors=["text.projector.0.bias", "text.projector.0.weight", "image.layer.1.B"]),
        altered(tensors=5),
        altered(tensors=[["text.projector.0.bias"], "text.projector.0.weight"]),
        altered(tensors=None),
        altered(name=None),
        altered(name=7),
        altered(name="image.layer.0"),
        altered(modality="sound"),
        altered(modality=["text"]),
        altered(kind="head"),
        altered(extra=1),
        blocks_changed(lambda blocks: blocks[1:]),
        blocks_changed(lambda blocks: [*blocks, blocks[0]]),
        blocks_changed(lambda blocks: 3),
        blocks_changed(lambda blocks: ["x"]),
        blocks_changed(lambda blocks: None),
        lambda text: text[:-5],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "",
    ],
)
def test_tampered_block_list_is_refused(tmp_path: Path, change) -> None:
    path = tmp_path / "state.safetensors"
    random_params(0).save(path)
    rewrite_note(path, lambda text: text)
    assert same(Params.load(path), random_params(0))
    rewrite_note(path, change)
    with pytest.raises(UserError, match=r"state\.safetensors: "):
        Params.load(path)
