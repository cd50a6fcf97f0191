"""Activations on the device and activations streamed from the cache give the same batches."""

import numpy as np
import pytest
import torch

from ease.data import examples as module
from ease.data.examples import Examples, Streamed, examples_at
from ease.data.features import Activations


@pytest.fixture(params=[True, False], ids=["mask", "no mask"])
def activations(request) -> Activations:
    rng = np.random.default_rng(0)
    shape = (9, 5, 4)
    mask = rng.random(shape) < 0.5 if request.param else None
    image, text = rng.random((9, 3, 2), dtype=np.float32), rng.random((*shape, 2), dtype=np.float32)
    return Activations(image, text, mask, rng.random((9, 6), dtype=np.float32), rng.random((9, 5, 7), dtype=np.float32))


POSITIONS = np.array([8, 1, 5, 2, 7])
BATCHES = [
    (np.array([4, 0, 0]), np.array([1, 2, 4])),
    (np.array([3]), np.array([0])),
    (np.array([2, 1]), np.zeros(2, int)),
]


@pytest.mark.parametrize("resident", [True, False])
def test_a_batch_holds_the_named_pairs_and_captions(activations: Activations, resident: bool) -> None:
    examples = examples_at(activations, POSITIONS, "cpu", resident)
    assert isinstance(examples.image, Streamed) is not resident
    assert len(examples) == 5 and examples.captions == 5
    for (rows, captions), states in zip(BATCHES, examples.feed(BATCHES), strict=True):
        image, text, mask = states
        np.testing.assert_array_equal(image, activations.image[POSITIONS[rows]])
        np.testing.assert_array_equal(text, activations.text[POSITIONS[rows], captions])
        if activations.text_mask is None:
            assert mask is None
        else:
            assert mask is not None and mask.dtype == torch.bool
            np.testing.assert_array_equal(mask, activations.text_mask[POSITIONS[rows], captions])


@pytest.mark.parametrize("resident", [True, False])
def test_some_of_the_examples_are_the_examples_of_some_pairs(activations: Activations, resident: bool) -> None:
    whole = examples_at(activations, POSITIONS, "cpu", resident)
    chosen = np.array([3, 0])
    taken, expected = whole.take(chosen), examples_at(activations, POSITIONS[chosen], "cpu", resident)
    run, expected_run = whole.part(1, 4), examples_at(activations, POSITIONS[1:4], "cpu", resident)
    for one, other in ((taken, expected), (run, expected_run)):
        everything = np.arange(len(one)), np.full(len(one), 2)
        assert len(one) == len(other)
        torch.testing.assert_close(one.batch(*everything), other.batch(*everything), rtol=0, atol=0)


def test_no_batches_are_not_batches(activations: Activations) -> None:
    for resident in (True, False):
        assert list(examples_at(activations, POSITIONS, "cpu", resident).feed([])) == []


def test_streaming_starts_where_half_of_the_free_memory_ends(activations: Activations, monkeypatch) -> None:
    """A pair takes 3·2·4 bytes of picture and 5·4·2·4 bytes of captions, 184 together."""
    cuda = torch.device("cuda")
    for pairs, free, fits in ((5, 2 * 5 * 184, True), (5, 2 * 5 * 184 - 2, False), (4, 2 * 5 * 184 - 2, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**9))
        assert module._fits(activations, pairs, cuda) is fits
    assert module._fits(activations, 10**9, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_streamed_to_a_gpu_arrive_whole(activations: Activations) -> None:
    """Buffers are used again while copies are under way; a batch must never show the next one's values."""
    rng = np.random.default_rng(1)
    batches = [(rng.integers(5, size=4), rng.integers(5, size=4)) for _ in range(200)]
    here: Examples = examples_at(activations, POSITIONS, "cpu")
    there = examples_at(activations, POSITIONS, "cuda", resident=False)
    for one, other in zip(here.feed(batches), there.feed(batches), strict=True):
        assert all(a is None if b is None else torch.equal(a, b.cpu()) for a, b in zip(one, other, strict=True))
