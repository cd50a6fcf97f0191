"""Decoding: every odd kind of file, identity by content, the cache, and damaged files."""

import hashlib
import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ease.data import images
from ease.data.images import COEFFICIENT_BYTES, PIXEL_BYTES, decode, decode_image, identify
from ease.storage import read_json, write_json

pytestmark = pytest.mark.usefixtures("own_cache")


def photo(path: Path, colour=(200, 30, 60), size=(40, 30)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def jpeg() -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()


def decoded(*paths, size=8):
    identities, missing = identify(paths)
    assert not missing
    return decode(paths, identities, size)


# --- one image ---


def test_plain_colour_survives_and_is_nothing_odd(tmp_path):
    picture = decode_image(photo(tmp_path / "a.png"), 16)
    assert picture.pixels.shape == (16, 16, 3) and picture.pixels.dtype == np.uint8
    assert (picture.pixels == (200, 30, 60)).all() and picture.traits == ()


def test_bytes_are_decoded_like_the_file(tmp_path):
    path = photo(tmp_path / "a.png")
    assert (decode_image(memoryview(path.read_bytes()), 8).pixels == decode_image(path, 8).pixels).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_any_mode_becomes_rgb_and_is_counted(tmp_path, mode):
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.new("RGB", (19, 17), "white").convert(mode).save(path)
    picture = decode_image(path, 8)
    assert (picture.pixels > 250).all() and picture.traits == ("converted",)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF"])
def test_the_first_of_several_frames_is_used_and_counted(tmp_path, kind):
    first, second = Image.new("RGB", (20, 20), "red"), Image.new("RGB", (20, 20), "blue")
    first.save(tmp_path / "a", kind, save_all=True, append_images=[second])
    picture = decode_image(tmp_path / "a", 4)
    assert "animated" in picture.traits
    assert picture.pixels[..., 0].min() > 250 and picture.pixels[..., 2].max() < 5


def test_the_previews_in_a_cameras_file_are_not_frames(tmp_path):
    first, preview = Image.new("RGB", (40, 40), "white"), Image.new("RGB", (20, 20))
    first.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[preview])
    picture = decode_image(tmp_path / "a.jpg", 4)
    assert (picture.pixels > 250).all() and picture.traits == ()


def test_links_are_followed(tmp_path):
    photo(tmp_path / "real.png")
    (tmp_path / "a.png").symlink_to(tmp_path / "real.png")
    (tmp_path / "lost.png").symlink_to(tmp_path / "gone.png")
    assert identify([tmp_path / "a.png"])[0] == identify([tmp_path / "real.png"])[0]
    assert identify([tmp_path / "lost.png"])[1] == {0: "No such file or directory"}


def test_one_pixel_is_counted(tmp_path):
    picture = decode_image(photo(tmp_path / "a.png", (1, 2, 3), (1, 1)), 8)
    assert (picture.pixels == (1, 2, 3)).all() and picture.traits == ("small",)
    assert decode_image(photo(tmp_path / "b.png", size=(16, 16)), 8).traits == ()
    assert decode_image(photo(tmp_path / "c.png", size=(400, 15)), 8).traits == ("small",)


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path):
    Image.fromarray(np.full((16, 16), 128 * 256, dtype=np.uint16)).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", 4).pixels == 128).all()


def test_transparent_pixels_are_white(tmp_path):
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(tmp_path / "a.png")
    palette = Image.new("P", (16, 16), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(tmp_path / "b.png", transparency=1)
    assert (decode_image(tmp_path / "a.png", 4).pixels == 255).all()
    assert (decode_image(tmp_path / "b.png", 4).pixels == 255).all()


def thirds(path: Path, across: bool) -> Path:
    """Black, white and black thirds of a picture three times as long as it is wide; resizing blurs their edges."""
    stripes = np.repeat([0, 255, 0], 20)[:, None, None].repeat(20, axis=1).repeat(3, axis=2).astype(np.uint8)
    Image.fromarray(stripes.transpose(1, 0, 2) if across else stripes).save(path)
    return path


@pytest.mark.parametrize("across", [False, True])
def test_the_middle_square_or_all_of_it_squashed(tmp_path, across):
    path = thirds(tmp_path / "a.png", across)
    assert (decode_image(path, 12, crop=True).pixels > 230).all()
    squashed = decode_image(path, 12).pixels
    first, middle = (squashed[:, 1], squashed[:, 6]) if across else (squashed[1], squashed[6])
    assert first.max() < 60 and middle.min() > 195
    both = [decode([path], identify([path])[0], 12, crop).pixels for crop in (False, True)]
    assert not np.array_equal(*both), "each has a cache of its own"


def test_a_turned_picture_is_cropped_upright_and_a_thin_one_costs_nothing(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    with Image.open(thirds(tmp_path / "a.png", across=True)) as picture:
        picture.save(tmp_path / "turned.png", exif=exif)
    assert (decode_image(tmp_path / "turned.png", 12, crop=True).pixels > 230).all()
    assert decode_image(photo(tmp_path / "thin.png", size=(50000, 1)), 224, crop=True).pixels.shape == (224, 224, 3)


def test_exif_rotation_is_applied_and_counted(tmp_path):
    sideways = np.zeros((20, 20, 3), dtype=np.uint8)
    sideways[:10] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(sideways).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = decode_image(tmp_path / "a.jpg", 20)
    assert upright.pixels[:8].max() < 20 and upright.pixels[12:].min() > 235 and upright.traits == ("rotated",)


@pytest.mark.parametrize("note", [b"Exif\0\0rubbish", b"Exif\0\0MM\0*\0\0\0"])
def test_a_damaged_exif_note_does_not_damage_the_picture(tmp_path, note):
    Image.new("RGB", (20, 20), "white").save(tmp_path / "a.png", exif=note)
    picture = decode_image(tmp_path / "a.png", 4)
    assert (picture.pixels == 255).all() and picture.traits == ()


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_an_orientation_that_turns_nothing_is_not_counted(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (20, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert decode_image(tmp_path / "a.jpg", 4).traits == ()


def test_a_large_jpeg_is_close_to_full_decoding(tmp_path):
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp[None, :, None], (480, 640, 3)).copy()).save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as image:
        full = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC))
    assert np.abs(decode_image(tmp_path / "a.jpg", 32).pixels.astype(int) - full).max() <= 4


# --- identity ---


def test_identity_follows_the_content_not_name_or_time(tmp_path):
    first = photo(tmp_path / "a.png")
    copy = Path(shutil.copy(first, tmp_path / "renamed.png"))
    os.utime(copy, (1, 1))
    other = photo(tmp_path / "b.png", (200, 30, 61))
    (one, two, three, held), missing = identify([first, copy, other, memoryview(first.read_bytes())])
    assert one == two == held != three and not missing


@pytest.mark.parametrize("place", [0, 20_000, 40_000, 3_000_000, 4_000_000 - 1])
def test_a_change_anywhere_in_a_large_file_is_seen(place):
    content = bytearray(4_000_000)
    changed = content.copy()
    changed[place] = 1
    longer = content + b"\0"
    (before, after, grown), _ = identify([memoryview(bytes(item)) for item in (content, changed, longer)])
    assert len({before, after, grown}) == 3


def test_a_picture_in_which_rows_are_blacked_out_is_another_picture(tmp_path):
    """A BMP keeps its size, and by these dates its time and most of its bytes."""
    path = tmp_path / "a.bmp"
    pixels = np.random.default_rng(0).integers(1, 256, (300, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    times, size = (path.stat().st_atime_ns, path.stat().st_mtime_ns), path.stat().st_size
    before = np.array(decoded(path, size=200).pixels[0])
    pixels[80:120] = 0
    Image.fromarray(pixels).save(path)
    os.utime(path, ns=times)
    assert path.stat().st_size == size > 64 * 1024
    assert not np.array_equal(decoded(path, size=200).pixels[0], before)


def test_unreadable_images_are_named_by_position(tmp_path):
    (tmp_path / "folder.png").mkdir()
    identities, missing = identify([tmp_path / "gone.png", photo(tmp_path / "a.png"), tmp_path / "folder.png"])
    assert len(identities) == 1
    assert missing == {0: "No such file or directory", 2: "Is a directory"}


# --- many images and the cache ---


def test_cached_and_not_decoded_twice(tmp_path, monkeypatch):
    path = photo(tmp_path / "a.png")
    first = decoded(path)
    moved = Path(shutil.move(path, tmp_path / "moved.png"))
    monkeypatch.setattr(images, "decode_image", lambda *_: pytest.fail("decoded again"))
    again = decoded(moved)
    assert (again.pixels == first.pixels).all() and again[1:] == first[1:]


def test_another_size_is_another_cache(tmp_path):
    path = photo(tmp_path / "a.png")
    assert decoded(path, size=8).pixels.shape == (1, 8, 8, 3)
    assert decoded(path, size=6).pixels.shape == (1, 6, 6, 3)


@pytest.mark.parametrize("suffix", ["npy", "json"])
@pytest.mark.parametrize("damage", [lambda content: content[:50], lambda content: b"{}", lambda content: b""])
def test_damaged_cache_is_made_again(tmp_path, own_cache, suffix, damage):
    path = photo(tmp_path / "a.png")
    decoded(path)
    (file,) = (own_cache / "pixels").glob(f"*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    assert (decoded(path).pixels == (200, 30, 60)).all()


def test_interrupted_decoding_leaves_nothing_and_starts_again(tmp_path, own_cache, monkeypatch):
    paths = [photo(tmp_path / f"{shade}.png", (shade, 0, 0)) for shade in range(20)]
    begun = []

    def interrupted(image, size, crop):
        begun.append(image)
        if image == paths[3]:
            raise KeyboardInterrupt
        time.sleep(0.3 if image in paths[4:] else 0)  # time enough for the interruption to arrive
        return decode_image(image, size)

    with monkeypatch.context() as patch:
        patch.setattr(images, "decode_image", interrupted)
        patch.setattr(images, "_usable_cores", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            decoded(*paths)
    assert len(begun) < 20, "what had not begun is dropped"
    assert not [path for path in own_cache.rglob("*") if path.is_file()]
    assert decoded(*paths).pixels[:, 0, 0, 0].tolist() == list(range(20))


def test_corrupt_files_are_left_out_with_a_reason(tmp_path, monkeypatch):
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.jpg").write_bytes(jpeg()[:900])
    (tmp_path / "empty.jpg").write_bytes(b"")
    good = [photo(tmp_path / f"{shade}.png", (shade, shade, shade)) for shade in (10, 20)]
    paths = [tmp_path / "cut.jpg", good[0], tmp_path / "text.png", good[1], tmp_path / "empty.jpg"]
    for _ in range(2):  # decoded, then from the cache
        result = decoded(*paths)
        assert result.pixels[:, 0, 0, 0].tolist() == [10, 20]
        assert sorted(result.unreadable) == [0, 2, 4] and all(result.unreadable.values())
        assert "truncated" in result.unreadable[0]
        assert result.unreadable[2] == result.unreadable[4] == "not an image, or damaged at its beginning"
        monkeypatch.setattr(images, "decode_image", lambda *_: pytest.fail("damaged files cost a second pass"))


def test_a_decompression_bomb_is_refused_and_a_large_picture_is_not(tmp_path, monkeypatch):
    """Pillow warns above its limit and refuses above twice its limit: 40 * 30 = 1200 pixels are between, then above."""
    path, other = photo(tmp_path / "a.png"), photo(tmp_path / "b.png", (1, 1, 1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    assert not decoded(path).unreadable
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    assert "bomb" in decoded(other).unreadable[0]


def test_equal_pictures_are_found_and_the_checksum_follows_the_pixels(tmp_path):
    red = photo(tmp_path / "a.png", (250, 0, 0))
    Image.new("RGB", (30, 30), (250, 0, 0)).save(tmp_path / "other.bmp")  # other bytes, the same picture
    blue = photo(tmp_path / "b.png", (0, 0, 250))
    result = decoded(red, blue, tmp_path / "other.bmp")
    assert result.same_picture == [[0, 2]]
    assert decoded(red, blue, red).checksum == result.checksum
    assert decoded(red, blue, blue).checksum != result.checksum
    assert decoded(blue, red, red).checksum != result.checksum


def test_every_readable_picture_has_its_digest_in_order(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    one, other = photo(tmp_path / "a.png", (250, 0, 0)), photo(tmp_path / "b.png", (0, 0, 250))
    for _ in range(2):  # decoded, then from the cache
        result = decoded(one, tmp_path / "text.png", other, one)
        expected = [hashlib.blake2b(picture.tobytes(), digest_size=16).hexdigest() for picture in result.pixels]
        assert result.digests == expected and expected[0] == expected[2] != expected[1]
        assert result.checksum == hashlib.sha256("".join(expected).encode()).hexdigest()


def test_a_record_that_lacks_a_digest_is_made_again(tmp_path, own_cache):
    path = photo(tmp_path / "a.png")
    expected = decoded(path).digests
    (file,) = (own_cache / "pixels").glob("*.json")
    write_json(file, {**read_json(file), "digests": []})
    assert decoded(path).digests == expected


def test_traits_are_counted(tmp_path):
    Image.new("L", (30, 30)).save(tmp_path / "grey.png")
    Image.new("L", (3, 3)).save(tmp_path / "speck.png")
    result = decoded(tmp_path / "grey.png", tmp_path / "speck.png", photo(tmp_path / "a.png"))
    assert result.traits == {"converted": 2, "small": 1}


# --- what a stranger may put there ---


def chunk(kind: bytes, content: bytes) -> bytes:
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def bomb(path: Path, side: int) -> Path:
    """A PNG of so many transparent pixels each way, in a file that is a thousand times smaller."""
    packer, at_once = zlib.compressobj(9, wbits=-15), 100
    lines = packer.compress(bytes(at_once * (1 + 4 * side))) + packer.flush(zlib.Z_FULL_FLUSH)
    last, checksum = packer.flush(), struct.pack(">HH", side * (1 + 4 * side) % 65521, 1)  # Adler-32 of zeros
    packed = b"\x78\xda" + lines * (side // at_once) + last + checksum
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b""))
    return path


def in_a_process_of_its_own(code: str, *arguments: object) -> list[str]:
    """What it prints. `alone(work)` does the work in a further one and prints the most memory it takes more, in MB."""
    measured = (
        "import os, resource, sys\nfrom pathlib import Path\n"
        "from ease.data.images import decode, identify, decode_image\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "def alone(work):\n"
        "    if os.fork():\n"
        "        return os.wait()\n"
        "    before = peak()\n"
        "    work()\n"
        "    print(peak() - before, flush=True)\n"
        "    os._exit(0)\n"
    )
    command = [sys.executable, "-c", f"{measured}{code}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_pipes_sockets_and_devices_are_not_images_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.png"))
        (tmp_path / "device.png").symlink_to("/dev/zero")
        paths = [tmp_path / f"{name}.png" for name in ("pipe", "socket", "device")]
        _, unreadable = identify(paths)
    assert unreadable == {0: "Not a regular file", 1: "No such device or address", 2: "Not a regular file"}
    for path in (paths[0], paths[2]):
        with pytest.raises(OSError, match="Not a regular file"):
            decode_image(path, 8)


def test_a_name_that_no_file_can_have_is_unreadable_not_a_crash(tmp_path):
    assert set(identify([tmp_path / "\ud800.png", tmp_path / ("x" * 5000)])[1]) == {0, 1}


def test_a_small_file_of_very_many_pixels_is_refused_by_its_header(tmp_path):
    """The file of a known attack: 13300 x 13300 took 2.8 GB for each thread."""
    paths = [bomb(tmp_path / "a.png", 13300)]
    paths.append(Path(shutil.copy(paths[0], tmp_path / "b.png")))
    assert paths[0].stat().st_size < 1_000_000
    code = (
        "p = [Path(a) for a in sys.argv[1:]]\n"
        "alone(lambda: print(list(decode(p, identify(p)[0], 64).unreadable.values())))"
    )
    reasons, grown = in_a_process_of_its_own(code, *paths)
    assert reasons.count("too large: needs 4,048 MB to decode, at most 1,024 are taken") == 2
    assert int(grown) < 150


@pytest.mark.slow
def test_no_picture_takes_more_than_is_reckoned_for_it(tmp_path):
    """2000 x 2000, turned by its note, so that every step of the way has a copy of its own."""
    exif = Image.Exif()
    exif[0x0112] = 6
    side, plain, lossy = 2000, PIXEL_BYTES * 2000**2, COEFFICIENT_BYTES * 2000**2 + PIXEL_BYTES * (2000 // 8) ** 2
    reckoned = {}
    for mode in ("RGB", "RGBA", "LA", "I;16", "I", "CMYK"):
        path = tmp_path / f"{mode}.{'tiff' if mode in ('CMYK', 'I') else 'png'}"
        Image.new(mode, (side, side)).save(path, exif=exif)
        reckoned[path] = plain
    noise = Image.effect_noise((side, side), 50).convert("RGB")
    for progressive in (False, True):
        path = tmp_path / f"{progressive}.jpg"
        noise.save(path, exif=exif, progressive=progressive, subsampling=0)
        reckoned[path] = lossy
    code = "for path in sys.argv[1:]:\n    alone(lambda: decode_image(Path(path), 64))"
    grown = dict(zip(reckoned, map(int, in_a_process_of_its_own(code, *reckoned)), strict=True))
    assert min(grown.values()) > 0
    for path, bytes_reckoned in reckoned.items():
        assert grown[path] << 20 <= bytes_reckoned + (12 << 20), f"{path.name}: {grown[path]} MB"


def test_all_threads_together_keep_to_the_memory_of_one(tmp_path, monkeypatch):
    """Room for two pictures of 40 x 30 and not for three: eight threads never decode more than two at once."""
    paths = [photo(tmp_path / f"{shade}.png", (shade, 0, 0)) for shade in range(12)]
    at_once, most, lock, met = 0, 0, threading.Lock(), threading.Event()

    def watched(image, stock=images._to_rgb):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            if most == 2:
                met.set()
        met.wait(10)  # the first one, until there is a second
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return stock(image)

    monkeypatch.setattr(images, "_to_rgb", watched)
    monkeypatch.setattr(images, "_usable_cores", lambda: 8)
    monkeypatch.setattr(images, "BYTES_AT_ONCE", 2 * 40 * 30 * PIXEL_BYTES + 100)
    assert decoded(*paths).pixels[:, 0, 0, 0].tolist() == list(range(12))
    assert most == 2
    monkeypatch.setattr(images, "BYTES_AT_ONCE", 40 * 30 * PIXEL_BYTES - 1)
    assert "too large" in decoded(*paths, size=6).unreadable[0]


def test_no_other_program_is_asked_to_read_a_picture(tmp_path, monkeypatch):
    """Pillow would hand PostScript to an interpreter."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("interpreted"))
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png", "EPS")
    assert decoded(tmp_path / "a.png").unreadable == {0: "not an image, or damaged at its beginning"}
