"""Draw a generated scene as a small picture: background, light, object groups and a sign with a word."""

from functools import cache

import numpy as np

from ease.data.scenery import KINDS, OUTDOOR_LIGHTS, Group, Scene

SIDE = 64
SIGN_HEIGHT = 11
OBJECT_SIDE = {"small": 10, "large": 15}
PALETTE = {
    "red": (214, 32, 36),
    "orange": (250, 136, 18),
    "yellow": (250, 226, 36),
    "green": (36, 160, 56),
    "blue": (36, 76, 222),
    "purple": (136, 42, 178),
    "pink": (252, 140, 190),
    "brown": (122, 72, 32),
    "white": (248, 248, 248),
    "black": (26, 26, 30),
}
LIGHT_TINT = {
    "day": ((1.0, 1.0, 1.0), (0, 0, 0)),
    "dusk": ((0.78, 0.60, 0.58), (38, 14, 22)),
    "night": ((0.27, 0.30, 0.42), (4, 6, 22)),
    "fog": ((0.38, 0.38, 0.38), (128, 130, 133)),
}
"""For each light the factor and the offset of the background colours."""
OBJECT_LIGHT = {"day": 1.0, "dusk": 0.92, "night": 0.82, "fog": 0.95}

FONT_ROWS = {
    "a": "010 101 111 101 101", "b": "110 101 110 101 110", "c": "011 100 100 100 011", "d": "110 101 101 101 110",
    "e": "111 100 110 100 111", "f": "111 100 110 100 100", "g": "0111 1000 1011 1001 0111",
    "h": "101 101 111 101 101", "i": "1 1 1 1 1", "j": "001 001 001 101 010", "k": "101 101 110 101 101",
    "l": "100 100 100 100 111", "m": "10001 11011 10101 10001 10001", "n": "1001 1101 1011 1001 1001",
    "o": "0110 1001 1001 1001 0110", "p": "110 101 110 100 100", "q": "0110 1001 1001 1011 0111",
    "r": "110 101 110 101 101", "s": "011 100 010 001 110", "t": "111 010 010 010 010", "u": "101 101 101 101 111",
    "v": "101 101 101 101 010", "w": "10001 10001 10101 11011 10001", "x": "101 101 010 101 101",
    "y": "101 101 010 010 010", "z": "111 001 010 100 111",
}  # fmt: skip
_rows, _columns = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """The picture of a scene, uint8 [64, 64, 3]; position, shade and pixel noise come from the stream."""
    factor, offset = LIGHT_TINT[scene.light]
    shade = rng.uniform(0.92, 1.06, 3)
    picture = (_background(scene.kind, rng) * (np.array(factor) * shade).astype(np.float32)) + _colour(offset)
    if scene.light == "night" and KINDS[scene.kind].lights == OUTDOOR_LIGHTS:
        stars = rng.integers(0, (14, SIDE), (12, 2))
        picture[stars[:, 0], stars[:, 1]] += 110
    top, bottom = 1, SIDE - 1
    if scene.sign:
        sign_on_top = rng.random() < 0.5
        _draw_sign(picture, scene.sign, 0 if sign_on_top else SIDE - SIGN_HEIGHT, rng)
        top, bottom = (SIGN_HEIGHT, bottom) if sign_on_top else (top, SIDE - SIGN_HEIGHT)
    for group, cell in zip(scene.groups, _cells(scene, top, bottom), strict=True):
        _draw_group(picture, group, cell, OBJECT_LIGHT[scene.light], rng)
    picture += rng.standard_normal((SIDE, SIDE, 3), dtype=np.float32) * 5
    return np.clip(picture, 0, 255).astype(np.uint8)


def _colour(channels: tuple[float, float, float]) -> np.ndarray:
    return np.array(channels, dtype=np.float32)


def _cells(scene: Scene, top: int, bottom: int) -> list[tuple[int, int, int, int]]:
    """The box of each group, as (top, left, bottom, right), so that the scene's relations hold."""
    middle, centre = (top + bottom) // 2, SIDE // 2
    if len(scene.groups) == 1:
        return [(top, 1, bottom, SIDE - 1)]
    sideways = scene.relation in ("left of", "right of")
    upper, lower = (top, middle), (middle, bottom)
    left, right = (1, centre), (centre, SIDE - 1)
    rows, columns = (top, bottom), (1, SIDE - 1)
    if len(scene.groups) == 3 and sideways:
        rows, third = (lower, upper) if scene.third_side == "above" else (upper, lower)
        third_cell = (third[0], 1, third[1], SIDE - 1)
    elif len(scene.groups) == 3:
        columns, third = (right, left) if scene.third_side == "left of" else (left, right)
        third_cell = (top, third[0], bottom, third[1])
    if sideways:
        pair = [(rows[0], side[0], rows[1], side[1]) for side in (left, right)]
    else:
        pair = [(side[0], columns[0], side[1], columns[1]) for side in (upper, lower)]
    if scene.relation in ("right of", "below"):
        pair.reverse()
    return [*pair, third_cell] if len(scene.groups) == 3 else pair


def _draw_group(
    picture: np.ndarray, group: Group, cell: tuple[int, int, int, int], light: float, rng: np.random.Generator
) -> None:
    top, left, bottom, right = cell
    side = OBJECT_SIDE[group.size]
    columns = min(group.count, (right - left) // side)
    if group.count == 4 and columns == 3:
        columns = 2
    rows = -(-group.count // columns)
    step_x = min(side + 3, (right - left) // columns)
    step_y = min(side + 3, (bottom - top) // rows)
    origin_x = left + int(rng.integers(max(1, right - left - step_x * (columns - 1) - side + 1)))
    origin_y = top + int(rng.integers(max(1, bottom - top - step_y * (rows - 1) - side + 1)))
    colour = np.clip(_colour(PALETTE[group.colour]) + rng.uniform(-10, 10, 3), 0, 255)
    # Mixing towards the far end of the scale keeps the second tone clear for light and dark colours alike.
    second = colour * 0.3 + (70 if colour.mean() > 190 else 175)
    parts = _shape(group.noun, side)
    pattern = _pattern(group.texture, side)[..., None]
    surface = np.where(pattern, second, colour)
    outline = _colour((225, 225, 225) if group.colour == "black" else (20, 20, 24))
    tile = np.select([parts[..., None] == 1, parts[..., None] == 2], [surface, outline], np.float32(235)) * light
    for number in range(group.count):
        y, x = origin_y + step_y * (number // columns), origin_x + step_x * (number % columns)
        place = picture[y : y + side, x : x + side]
        np.copyto(place, tile, where=parts[..., None] > 0, casting="unsafe")


@cache
def _pattern(texture: str, side: int) -> np.ndarray:
    y, x = np.mgrid[0:side, 0:side]
    patterns = {
        "solid": np.zeros((side, side), dtype=bool),
        "striped": y % 4 < 2,
        "dotted": (y % 3 == 1) & (x % 3 == 1),
        "checked": (y // 3 + x // 3) % 2 == 0,
    }
    return patterns[texture]


@cache
def _shape(noun: str, side: int) -> np.ndarray:
    """Parts of an object: 0 nothing, 1 coloured surface, 2 outline and dark parts, 3 light parts."""
    y, x = (np.mgrid[0:side, 0:side] + 0.5) * 2 / side - 1
    radius, angle = np.hypot(x, y), np.arctan2(x, -y)
    nowhere = np.zeros_like(x, dtype=bool)
    body, dark, light = nowhere, nowhere, nowhere
    if noun == "ball":
        body = radius < 1
    elif noun == "star":
        spoke = np.abs(2 * ((angle * 5 / (2 * np.pi)) % 1) - 1)
        body = radius < 0.42 + 0.7 * spoke**1.5
    elif noun == "house":
        roof = (y < -0.1) & (np.abs(x) < (y + 1) * 1.15)
        body = roof | ((np.abs(x) < 0.75) & (y >= -0.1))
        dark = (np.abs(x) < 0.2) & (y > 0.35)
    elif noun == "boat":
        body = (y > 0.3) & (np.abs(x) < 1.25 - 0.75 * y) | ((x > 0.05) & (y < 0.1) & (x < (y + 1) * 0.8))
        dark = (np.abs(x) < 0.1) & (y <= 0.3)
    elif noun == "car":
        body = ((np.abs(y - 0.2) < 0.35) & (np.abs(x) < 1)) | ((np.abs(y + 0.35) < 0.35) & (np.abs(x) < 0.6 + 0.3 * y))
        dark = np.hypot(np.abs(x) - 0.55, y - 0.6) < 0.32
        light = (np.abs(y + 0.35) < 0.2) & (np.abs(x) < 0.32)
    elif noun == "tree":
        body = np.hypot(x, y + 0.3) < 0.72
        dark = (np.abs(x) < 0.18) & (y > 0.3)
    elif noun == "kite":
        body = np.abs(x) * 1.1 + np.abs(y + 0.25) < 0.78
        dark = (y > 0.5) & (np.abs(x - 0.25 * np.sin(y * 9)) < 0.16)
    elif noun == "umbrella":
        body = (np.hypot(x, y) < 1) & (y < 0.0)
        dark = ((np.abs(x) < 0.1) & (y >= 0)) | ((np.abs(x - 0.2) < 0.3) & (y > 0.78))
    elif noun == "bottle":
        body = ((np.abs(x) < 0.5) & (y > -0.2)) | ((np.abs(x) < 0.24) & (y > -0.8))
        dark = (np.abs(x) < 0.3) & (y < -0.75)
    elif noun == "cup":
        body = (np.abs(x + 0.2) < 0.65) & (np.abs(y) < 0.75)
        dark = (np.abs(np.hypot(x - 0.45, y) - 0.4) < 0.13) & (x > 0.45)
    elif noun == "fish":
        body = (((x + 0.25) / 0.75) ** 2 + (y / 0.6) ** 2 < 1) | ((x > 0.3) & (np.abs(y) < (x - 0.2) * 0.8))
        light = np.hypot(x + 0.6, y + 0.1) < 0.16
    elif noun == "hat":
        body = ((np.abs(y - 0.5) < 0.2) & (np.abs(x) < 1)) | ((np.abs(x) < 0.55) & (np.abs(y + 0.1) < 0.6))
        dark = (np.abs(x) < 0.55) & (np.abs(y - 0.22) < 0.12)
    padded = np.pad(body | dark | light, 1)
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    edge = body & ~inside if side > OBJECT_SIDE["small"] else nowhere  # small objects would be all outline
    return np.select([light, dark | edge, body], [3, 2, 1], 0)


@cache
def _word_bitmap(word: str) -> np.ndarray:
    letters = [np.array([[bit == "1" for bit in row] for row in FONT_ROWS[letter].split()]) for letter in word]
    gap = np.zeros((5, 1), dtype=bool)
    return np.hstack([column for letter in letters for column in (letter, gap)][:-1])


def _draw_sign(picture: np.ndarray, word: str, top: int, rng: np.random.Generator) -> None:
    bitmap = _word_bitmap(word)
    height, width = bitmap.shape
    left = int(rng.integers(1, SIDE - width - 6))
    top += int(rng.integers(2))
    picture[top : top + height + 4, left : left + width + 4] = (30, 30, 34)
    picture[top + 1 : top + height + 3, left + 1 : left + width + 3] = (252, 250, 235)
    picture[top + 2 : top + 2 + height, left + 2 : left + 2 + width][bitmap] = (24, 20, 60)


def _background(kind: str, rng: np.random.Generator) -> np.ndarray:
    """The look of a kind of place in daylight, float32 [64, 64, 3]."""
    horizon = int(rng.integers(24, 38))
    phase = float(rng.uniform(0, 40))
    sky, ground = _GROUNDS[kind]
    picture = np.empty((SIDE, SIDE, 3), dtype=np.float32)
    fade = 1 + (np.arange(SIDE, dtype=np.float32)[:, None, None] - horizon) / 260
    picture[:horizon] = sky
    picture[horizon:] = ground
    picture *= fade
    across, upper, lower = _columns + phase, _rows < horizon, _rows >= horizon
    if kind == "beach":
        picture[horizon - 9 : horizon] = (60, 150, 205)
        picture[horizon - 1 : horizon + 1] = (240, 245, 245)
    elif kind == "street":
        towers = _rows > horizon - 8 - 14 * np.abs(np.sin(across // 11 * 2.3))
        picture[towers & upper] = (128, 118, 122)
        picture[towers & upper & (across % 11 % 4 < 2) & (_rows % 5 < 2)] = (214, 204, 150)
        picture[(np.abs(_rows - horizon - 14) < 1) & (across % 16 < 9)] = (235, 230, 210)
    elif kind == "forest":
        picture[(across % 13 < 4) & (_rows < horizon + 4)] = (84, 60, 38)
        picture[(_rows < 9 + 4 * np.sin(across / 3))] = (28, 84, 40)
    elif kind == "kitchen":
        picture[upper & ((_rows % 8 < 1) | (across % 8 < 1))] = (160, 188, 194)
        picture[horizon : horizon + 3] = (108, 70, 44)
    elif kind == "snow":
        flakes = rng.integers(0, SIDE, (45, 2))
        picture[flakes[:, 0], flakes[:, 1]] = (255, 255, 255)
        picture[lower & (_rows < horizon + 3 + 3 * np.sin(across / 7))] = (214, 226, 240)
    elif kind == "harbour":
        picture[lower & (np.sin(across / 3 + _rows * 1.3) > 0.8)] = (120, 166, 190)
        picture[56:] = (134, 100, 66)
        picture[56:][across[56:] % 9 < 1] = (80, 56, 36)
    elif kind == "desert":
        picture[_rows > horizon + 5 * np.sin(across / 8)] = (232, 178, 98)
        picture[_rows > horizon + 14 + 4 * np.sin(across / 11 + 2)] = (214, 152, 76)
    elif kind == "farm":
        picture[lower & ((across - 32) * 8 // np.maximum(_rows - horizon + 10, 1) % 2 < 1)] = (120, 98, 48)
        picture[(np.abs(_rows - horizon + 3) < 1) | (upper & (_rows > horizon - 8) & (across % 10 < 2))] = (
            236,
            228,
            210,
        )
    elif kind == "classroom":
        picture[4 : horizon - 3, 5:59] = (146, 100, 58)
        picture[6 : horizon - 5, 7:57] = (38, 82, 64)
    elif kind == "market":
        picture[_rows < 10 + 2 * np.abs(np.sin(across / 4))] = (240, 236, 226)
        picture[(_rows < 12) & (across % 12 < 6)] = (204, 60, 52)
        picture[lower & ((_rows % 6 < 1) | ((across + _rows // 6 * 4) % 8 < 1))] = (118, 108, 104)
    elif kind == "stage":
        picture += (upper * np.sin(across / 2) * 26)[..., None] * _colour((1, 0.3, 0.3))
        picture[np.hypot((_columns - 32) / 2, _rows - 50) < 9] += (56, 50, 30)
    elif kind == "mountains":
        ridge = np.abs((across % 34) - 17) * 1.5
        picture[upper & (_rows > ridge + horizon - 26)] = (118, 122, 140)
        picture[upper & (_rows > ridge + horizon - 26) & (_rows < horizon - 17 + np.sin(across) * 1.5)] = (
            246,
            248,
            252,
        )
    return picture


_GROUNDS = {
    "beach": ((150, 210, 245), (238, 216, 160)),
    "street": ((190, 204, 216), (92, 92, 98)),
    "forest": ((58, 118, 66), (72, 92, 44)),
    "kitchen": ((222, 236, 238), (176, 124, 82)),
    "snow": ((186, 210, 232), (240, 244, 250)),
    "harbour": ((170, 196, 214), (48, 104, 142)),
    "desert": ((250, 216, 160), (226, 168, 90)),
    "farm": ((140, 200, 250), (112, 170, 66)),
    "classroom": ((232, 220, 190), (186, 146, 100)),
    "market": ((226, 200, 160), (152, 142, 136)),
    "stage": ((132, 24, 36), (126, 84, 50)),
    "mountains": ((160, 202, 240), (104, 150, 88)),
}
"""Colours above and below the horizon."""
