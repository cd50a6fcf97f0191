"""Generated scenes: pictures with five captions each, made from a seed, so a first run needs no download."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ease.data.cache import cached
from ease.data.pairs import SPLITS, PairSet
from ease.data.render import SIDE, draw
from ease.data.scenery import COLOURS, KINDS, OWNERS, TOWNS, WORDS, Group, Scene, draw_scene, pick
from ease.errors import UserError
from ease.seeding import generator
from ease.storage import cache_folder, digest, map_array, new_array, read_json, write_json

GENERATOR_VERSION = 3
"""Raise it whenever the same arguments would give other pictures or captions."""
CAPTIONS_PER_SCENE = 5
MENTION = {"size": 0.25, "texture": 0.3, "colour": 0.7, "count": 0.5, "every group": 0.35, "private": 0.8}
"""How often a caption mentions a detail. People leave most out, so several pictures fit a caption that was never
seen."""
PRETRAINING_MENTION = dict.fromkeys(MENTION, 1.0) | {"private": 0.0}
"""Pretraining captions mention everything visible, so that the backbone learns to see it, and nothing private."""

NOUN_WORDS = {
    "ball": (("ball", "balls"),),
    "star": (("star", "stars"),),
    "house": (("house", "houses"), ("cottage", "cottages")),
    "boat": (("boat", "boats"), ("sailboat", "sailboats")),
    "car": (("car", "cars"), ("automobile", "automobiles")),
    "tree": (("tree", "trees"),),
    "kite": (("kite", "kites"),),
    "umbrella": (("umbrella", "umbrellas"), ("parasol", "parasols")),
    "bottle": (("bottle", "bottles"), ("flask", "flasks")),
    "cup": (("cup", "cups"), ("mug", "mugs")),
    "fish": (("fish", "fish"),),
    "hat": (("hat", "hats"),),
}
COLOUR_WORDS = {colour: (colour,) for colour in COLOURS} | {"purple": ("purple", "violet")}
TEXTURE_WORDS = {
    "solid": ("", "", "plain"),
    "striped": ("striped", "banded"),
    "dotted": ("dotted", "spotted"),
    "checked": ("checked", "chequered"),
}
SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}
COUNT_WORDS = {2: ("two",), 3: ("three",), 4: ("four",)}
VAGUE_COUNTS = ("some", "several")
RELATION_WORDS = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
NEARBY = ("next to", "near", "beside")
SIDE_WORDS = {
    "left of": ("on the left",),
    "right of": ("on the right",),
    "above": ("above", "at the top"),
    "below": ("below", "at the bottom"),
}
LIGHT_WORDS = {
    "day": ("on a bright day", "in daylight"),
    "dusk": ("at dusk", "at sunset"),
    "night": ("at night", "after dark"),
    "fog": ("in thick fog", "in the mist"),
}
LIGHT_ADJECTIVES = {"day": ("bright",), "dusk": ("evening",), "night": ("dark", "night"), "fog": ("foggy", "misty")}
PRIVATE_PHRASES = (
    ", taken by {owner} in {town}",
    ", photo by {owner} near {town}",
    ", from the trip of {owner} to {town}",
)
SIGN_PHRASES = (' and a sign saying "{}"', ' by a sign reading "{}"', ' and a board with "{}"')
TEMPLATES = {
    "place": ("{related} {place}.",),
    "place first": ("{place} we see {listed}.", "{place} there {is_or_are} {listed}."),
    "no place": ("a picture of {related}{sign}.", "a view of {related}{sign}."),
    "light": ("{listed} {light}.",),
    "mood": ("a {mood} scene with {listed}.", "a {mood} picture {place}."),
    "sign first": ('the word "{word}" is written beside {listed}.', 'it says "{word}" {place}.'),
    "here": ("here {is_or_are} {listed}.", "{listed} seen {light} {place}."),
}


def lexicon() -> tuple[str, ...]:
    """Every word that can occur in a caption, sorted."""
    phrases: list[str] = [*WORDS, *OWNERS, *TOWNS, *VAGUE_COUNTS, *NEARBY, *SIGN_PHRASES, "a an and with is are"]
    for table in (COLOUR_WORDS, TEXTURE_WORDS, SIZE_WORDS, COUNT_WORDS, RELATION_WORDS, SIDE_WORDS, LIGHT_WORDS):
        phrases += [phrase for synonyms in table.values() for phrase in synonyms]
    phrases += [re.sub(r"{\w*}", " ", phrase) for phrase in PRIVATE_PHRASES]
    for table in (LIGHT_ADJECTIVES, TEMPLATES):
        phrases += [re.sub(r"{\w*}", " ", phrase) for synonyms in table.values() for phrase in synonyms]
    phrases += [form for synonyms in NOUN_WORDS.values() for forms in synonyms for form in forms]
    phrases += [place for kind in KINDS.values() for place in kind.places]
    return tuple(sorted({word for phrase in phrases for word in re.findall("[a-z]+", phrase.lower())}))


def caption_scene(scene: Scene, rng: np.random.Generator, mention: Mapping[str, float] = MENTION) -> tuple[str, ...]:
    """Five captions of different wording; most leave something out, and most mention who took the picture and where."""
    names = [name for name in TEMPLATES if scene.sign or name != "sign first"]
    order = rng.permutation(len(names))[:CAPTIONS_PER_SCENE]
    return tuple(_fill(pick(rng, TEMPLATES[names[index]]), scene, rng, mention) for index in order)


def _fill(template: str, scene: Scene, rng: np.random.Generator, mention: Mapping[str, float]) -> str:
    shown = scene.groups if rng.random() < mention["every group"] else (pick(rng, scene.groups),)
    described = [_describe(group, rng, mention) for group in shown]
    makers = {
        "related": lambda: _related(scene, described, rng),
        "listed": lambda: _listed(described),
        "place": lambda: pick(rng, KINDS[scene.kind].places),
        "light": lambda: pick(rng, LIGHT_WORDS[scene.light]),
        "mood": lambda: pick(rng, LIGHT_ADJECTIVES[scene.light]),
        "is_or_are": lambda: "is" if shown[0].count == 1 else "are",
        "word": lambda: (scene.sign or "").upper(),
        "sign": lambda: pick(rng, SIGN_PHRASES).format(scene.sign.upper()) if scene.sign else "",
    }
    text = template.format(**{name: make() for name, make in makers.items() if f"{{{name}}}" in template})
    text = text.replace("a evening", "an evening")
    if rng.random() < mention["private"]:
        text = (
            text.removesuffix(".")
            + pick(rng, PRIVATE_PHRASES).format(owner=scene.owner.title(), town=scene.town.title())
            + "."
        )
    return text[0].upper() + text[1:]


def _related(scene: Scene, described: list[str], rng: np.random.Generator) -> str:
    """The first two groups by their relation; the third by its side."""
    if len(described) == 1:
        return described[0]
    sideways = scene.relation in ("left of", "right of")
    words = NEARBY if sideways and rng.random() < 0.25 else RELATION_WORDS[scene.relation]
    text = f"{described[0]} {pick(rng, words)} {described[1]}"
    return text + (f" with {described[2]} {pick(rng, SIDE_WORDS[scene.third_side])}" if described[2:] else "")


def _listed(described: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(described[:-1]), described[-1]]))


def _describe(group: Group, rng: np.random.Generator, mention: Mapping[str, float]) -> str:
    """A group in words, each detail mentioned or left out at random."""
    singular, plural = pick(rng, NOUN_WORDS[group.noun])
    words = [
        pick(rng, SIZE_WORDS[group.size]) if rng.random() < mention["size"] else "",
        pick(rng, TEXTURE_WORDS[group.texture]) if rng.random() < mention["texture"] else "",
        pick(rng, COLOUR_WORDS[group.colour]) if rng.random() < mention["colour"] else "",
        singular if group.count == 1 else plural,
    ]
    phrase = " ".join(filter(None, words))
    if group.count == 1:
        return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"
    return f"{pick(rng, COUNT_WORDS[group.count] if rng.random() < mention['count'] else VAGUE_COUNTS)} {phrase}"


def pretraining_scenes(
    seed: int, count: int, start: int = 0, mention: Mapping[str, float] = PRETRAINING_MENTION
) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Captions and pixels of scenes `start` to `start + count` for pretraining, free of held-out combinations."""
    captions, pixels = [], np.empty((count, SIDE, SIDE, 3), dtype=np.uint8)
    for offset in range(count):
        rng = generator(seed, "pretraining scenes", start + offset)
        scene = draw_scene(rng, federated=False)
        captions.append(caption_scene(scene, rng, mention))
        pixels[offset] = draw(scene, rng)
    return captions, pixels


def scene_at(seed: int, split: str, index: int) -> tuple[Scene, np.random.Generator]:
    """The federated scene with this place in its split, and its stream which captions and drawing continue."""
    rng = generator(seed, "scenes", split, index)
    return draw_scene(rng, federated=True), rng


def load_scenes(seed: int = 0, train: int = 2000, validation: int = 300, test: int = 1000) -> PairSet:
    """The generated data set; each scene depends on seed, split and its number only, not on the sizes asked for."""
    sizes = dict(zip(SPLITS, (train, validation, test), strict=True))
    for field, value in {"seed": seed, **sizes}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"data.{field}: must be a whole number of 0 or more, not {value!r}")
    if not any(sizes.values()):
        raise UserError("data.train, data.validation, data.test: all are 0; ask for at least one scene")
    fingerprint = digest("scenes", GENERATOR_VERSION, seed, sizes)
    folder = cache_folder() / f"scenes-{fingerprint}"
    places = [(split, index) for split in SPLITS for index in range(sizes[split])]
    captions, pixels = cached(partial(_drawn, folder), partial(_draw_all, folder, seed, places))
    return PairSet(
        ids=tuple(f"{split}-{index:06d}" for split, index in places),
        captions=captions,
        pixels=pixels,
        splits=tuple(split for split, _ in places),
        fingerprint=fingerprint,
        # A scene is all that its place in the generated world makes of it, so that its pixels need not be read.
        digests=tuple(digest("scene", GENERATOR_VERSION, seed, split, index) for split, index in places),
    )


def _drawn(folder: Path) -> tuple[tuple[tuple[str, ...], ...], np.ndarray]:
    captions = read_json(folder / "captions.json")["captions"]
    return tuple(tuple(five) for five in captions), map_array(folder / "pixels.npy")


def _draw_all(folder: Path, seed: int, places: Sequence[tuple[str, int]]) -> None:
    captions = []
    with new_array(folder / "pixels.npy", (len(places), SIDE, SIDE, 3), np.uint8) as pixels:
        for row, (split, index) in enumerate(places):
            scene, rng = scene_at(seed, split, index)
            captions.append(caption_scene(scene, rng))
            pixels[row] = draw(scene, rng)
    write_json(folder / "captions.json", {"captions": captions})
