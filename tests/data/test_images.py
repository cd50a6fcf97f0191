"""Decoding: every odd kind of file, the cache, and damaged files."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ease.data import images
from ease.data.images import decode_image, decode_images, decode_readable, with_progress
from ease.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))


def photo(path: Path, colour=(200, 30, 60), size=(40, 30)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def truncated(path: Path) -> Path:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG")
    path.write_bytes(buffer.getvalue()[:900])
    return path


def test_plain_colour_survives(tmp_path):
    pixels = decode_images([photo(tmp_path / "a.png")], 16, "key")
    assert pixels.shape == (1, 16, 16, 3) and pixels.dtype == np.uint8
    assert (pixels == (200, 30, 60)).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_any_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.new("RGB", (9, 7), "white").convert(mode).save(path)
    assert (decode_image(path, 8) > 250).all()


def test_one_pixel(tmp_path):
    assert (decode_image(photo(tmp_path / "a.png", (1, 2, 3), (1, 1)), 8) == (1, 2, 3)).all()


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path):
    Image.fromarray(np.full((6, 6), 128 * 256, dtype=np.uint16)).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", 4) == 128).all()


def test_transparent_pixels_are_white(tmp_path):
    Image.new("RGBA", (6, 6), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", 4) == 255).all()


def test_exif_rotation_is_applied(tmp_path):
    sideways = np.zeros((20, 20, 3), dtype=np.uint8)
    sideways[:10] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(sideways).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = decode_image(tmp_path / "a.jpg", 20)
    assert upright[:8].max() < 20 and upright[12:].min() > 235


def test_a_large_jpeg_is_close_to_full_decoding(tmp_path):
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp[None, :, None], (480, 640, 3)).copy()).save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as image:
        full = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC))
    assert np.abs(decode_image(tmp_path / "a.jpg", 32).astype(int) - full).max() <= 4


def test_cached_and_not_decoded_twice(tmp_path, monkeypatch):
    path = photo(tmp_path / "a.png")
    first = np.array(decode_images([path], 8, "key"))
    monkeypatch.setattr(images, "decode_image", lambda *_: pytest.fail("decoded again"))
    assert (decode_images([path], 8, "key") == first).all()


def test_damaged_cache_is_made_again(tmp_path):
    path = photo(tmp_path / "a.png")
    decode_images([path], 8, "key")
    (array,) = (tmp_path / "cache" / "pixels").glob("*.npy")
    array.write_bytes(array.read_bytes()[:50])
    assert (decode_images([path], 8, "key") == (200, 30, 60)).all()


def test_corrupt_files_are_named_and_counted(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    paths = [photo(tmp_path / "good.png"), truncated(tmp_path / "cut.jpg"), tmp_path / "empty.jpg"]
    with pytest.raises(UserError, match=r"cut\.jpg.*and 1 other;.*skip_corrupt = true"):
        decode_images(paths, 8, "key")
    assert not list((tmp_path / "cache" / "pixels").glob("*.npy"))


def test_corrupt_files_can_be_skipped(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    good = [photo(tmp_path / f"{shade}.png", (shade, shade, shade)) for shade in (10, 20)]
    paths = [truncated(tmp_path / "cut.jpg"), good[0], tmp_path / "text.png", good[1]]
    for _ in range(2):  # computed, then from the cache
        pixels, readable, problems = decode_readable(paths, 8, "key")
        assert readable.tolist() == [False, True, False, True]
        assert pixels[:, 0, 0, 0].tolist() == [10, 20]
        assert [path.name for path, _ in problems] == ["cut.jpg", "text.png"] and all(why for _, why in problems)
    with pytest.raises(UserError, match="skip_corrupt"):
        decode_images(paths, 8, "key")


def test_progress_passes_everything_on_a_terminal(monkeypatch):
    monkeypatch.setattr(images, "SECONDS_BEFORE_PROGRESS", -1.0)
    monkeypatch.setattr("sys.stderr", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert list(with_progress(range(5), 5, "Counting")) == [0, 1, 2, 3, 4]
