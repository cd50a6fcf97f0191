"""Frozen activations: what the towers give, computed once, and whole or absent on disk."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ease.data.features import Activations, cached_activations, cached_cut
from ease.data.pairs import PairSet
from ease.data.scenes import load_scenes
from ease.errors import UserError
from ease.model.backbones import Tower
from ease.model.tiny import TinyBackbone, load_tiny

FIRST = 3


@pytest.fixture(scope="module")
def backbone() -> TinyBackbone:
    return load_tiny()


@pytest.fixture
def pairs(cache: Path) -> PairSet:
    return load_scenes(seed=5, train=10, validation=0, test=3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: PairSet) -> Path:
    """An empty cache for the activations; the scenes come from the shared one."""
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    return tmp_path


def same(one: Activations, two: Activations) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in vars(one))


def test_they_are_what_the_towers_give(pairs, backbone) -> None:
    made = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    with torch.no_grad():
        states, _ = backbone.image.prefix(torch.from_numpy(np.array(pairs.pixels)), FIRST)
        pooled = backbone.image(states, None, FIRST)
        tokens = backbone.tokenize(pairs.captions[4])
        text_states, mask = backbone.text.prefix(tokens, FIRST)
        text_pooled = backbone.text(text_states, mask, FIRST)
    np.testing.assert_allclose(made.image, states, atol=1e-5)
    np.testing.assert_allclose(made.pooled_image, pooled, atol=1e-3)
    np.testing.assert_allclose(made.text[4], text_states, atol=1e-5)
    np.testing.assert_allclose(made.pooled_text[4], text_pooled, atol=1e-3)
    assert made.text_mask is not None
    np.testing.assert_array_equal(made.text_mask[4], mask)


def test_the_rest_of_the_tower_runs_from_them(pairs, backbone) -> None:
    made = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    with torch.no_grad():
        pooled = backbone.image(torch.from_numpy(np.array(made.image)), None, FIRST)
    np.testing.assert_allclose(made.pooled_image, pooled, atol=1e-3)


def test_batches_do_not_show(pairs, backbone, monkeypatch, tmp_path) -> None:
    whole = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    monkeypatch.setattr("ease.data.features.BATCH_PAIRS", 4)
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "other"))
    parts = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    assert parts.text.shape == whole.text.shape and parts.image.shape == whole.image.shape
    np.testing.assert_allclose(parts.text, whole.text, atol=1e-5)
    np.testing.assert_allclose(parts.image, whole.image, atol=1e-5)


@pytest.mark.parametrize("batch", [4, 6, 16])
def test_every_batch_has_the_same_size(pairs, backbone, monkeypatch, batch: int) -> None:
    """On some processors the batch size selects the kernel, and with it the last bits."""
    sizes, prefix = [], backbone.image.prefix
    monkeypatch.setattr("ease.data.features.BATCH_PAIRS", batch)
    monkeypatch.setattr(backbone.image, "prefix", lambda rows, first: (sizes.append(len(rows)), prefix(rows, first))[1])
    cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    assert sizes == [batch] * math.ceil(13 / batch)


@pytest.mark.parametrize("first", [FIRST, 4], ids=["states", "pooled"])
def test_activations_of_a_pair_do_not_depend_on_the_other_pairs(cache, backbone, first: int) -> None:
    """A site encodes only its own pairs, and must get the same bits as one process with all pairs."""
    pairs = load_scenes(seed=5, train=37, validation=0, test=3)
    whole = cached_activations(pairs, backbone, first, first, "cpu")
    for kept in (np.arange(11), np.arange(20, 40), np.arange(39, 0, -2)):
        there = cached_activations(part_of(pairs, kept), backbone, first, first, "cpu")
        for name, values in vars(there).items():
            assert values is None or np.array_equal(values, getattr(whole, name)[kept]), name


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batches_are_encoded_on_one_thread_each(pairs, backbone, monkeypatch, tmp_path, threads: int) -> None:
    """More threads add in another order, so that they take a batch each instead of sharing one."""
    monkeypatch.setattr("ease.data.features.BATCH_PAIRS", 2)
    alone = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    seen, prefix, before = [], backbone.image.prefix, torch.get_num_threads()

    def counted(rows, first):
        seen.append(torch.get_num_threads())
        return prefix(rows, first)

    monkeypatch.setattr(backbone.image, "prefix", counted)
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "other"))
    try:
        torch.set_num_threads(threads)
        together = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
        assert torch.get_num_threads() == threads, "the setting is left as it was"
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * math.ceil(13 / 2)
    assert same(alone, together)


def part_of(pairs: PairSet, kept: np.ndarray) -> PairSet:
    ids, captions, splits = ([values[each] for each in kept] for values in (pairs.ids, pairs.captions, pairs.splits))
    return PairSet(tuple(ids), tuple(captions), pairs.pixels[kept], tuple(splits), f"part {kept}")


def test_with_nothing_adapted_the_states_are_the_pooled_output(pairs, backbone) -> None:
    made = cached_activations(pairs, backbone, backbone.image.depth, backbone.text.depth, "cpu")
    assert made.text_mask is None
    np.testing.assert_array_equal(made.image, made.pooled_image)
    np.testing.assert_array_equal(made.text, made.pooled_text)


def refuse_to_compute(*_: object) -> None:
    raise AssertionError("it was computed again")


def test_a_second_time_nothing_is_computed(pairs, backbone, monkeypatch) -> None:
    first = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    monkeypatch.setattr("ease.data.features._compute", refuse_to_compute)
    assert same(cached_activations(pairs, backbone, FIRST, FIRST, "cpu"), first)
    with pytest.raises(AssertionError, match="again"):
        cached_activations(pairs, backbone, FIRST - 1, FIRST, "cpu")


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "marker"])
def test_a_damaged_cache_is_made_again(pairs, backbone, tmp_path, damage: str) -> None:
    first = cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    expected = Activations(**{name: np.array(value) for name, value in vars(first).items()})
    (folder,) = (tmp_path / "activations").iterdir()
    array = folder / "text.npy"
    if damage == "missing":
        array.unlink()
    elif damage == "marker":
        (folder / "complete.json").write_text("{")
    else:
        array.write_bytes(array.read_bytes()[: 0 if damage == "empty" else 5000])
    assert same(cached_activations(pairs, backbone, FIRST, FIRST, "cpu"), expected)


def test_an_interruption_leaves_nothing_that_looks_complete(pairs, backbone, monkeypatch, tmp_path) -> None:
    class Interrupted(Exception):
        pass

    def stop(self: Tower, *_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(type(backbone.text), "prefix", stop)
        with pytest.raises(Interrupted):
            cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    (folder,) = (tmp_path / "activations").iterdir()
    assert not (folder / "complete.json").exists()
    assert cached_activations(pairs, backbone, FIRST, FIRST, "cpu").image.shape[0] == len(pairs)


def test_a_full_disk_is_named_and_leaves_nothing(pairs, backbone, monkeypatch, small_disk) -> None:
    disk = small_disk(128)
    monkeypatch.setenv("EASE_CACHE", str(disk))
    with pytest.raises(UserError, match=r"\.npy: cannot write .No space left.*free some space"):
        cached_activations(pairs, backbone, FIRST, FIRST, "cpu")
    assert not [path for path in disk.rglob("*") if path.is_file()]


def test_cut_captions_are_counted_once(pairs, backbone, own_cache, monkeypatch) -> None:
    """The tiny backbone reads 31 words."""
    long = replace(pairs, captions=(("boat " * 40, "house " * 32), *pairs.captions), fingerprint="long")
    assert (cached_cut(pairs, backbone), cached_cut(long, backbone)) == (0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(backbone, "tokenize", lambda _: pytest.fail("tokenised again"))
        assert (cached_cut(pairs, backbone), cached_cut(long, backbone)) == (0, 2)
    for path in (own_cache / "activations").glob("cut-*.json"):
        path.write_text("")
    assert cached_cut(long, backbone) == 2
