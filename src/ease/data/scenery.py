"""The generated world: what a scene can hold, and how one is drawn by lot."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from ease.seeding import stream_seed

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "white", "black")
TEXTURES = ("solid", "striped", "dotted", "checked")
SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
OUTDOOR_LIGHTS = ("day", "dusk", "night", "fog")
INDOOR_LIGHTS = ("day", "dusk", "night")
NOUNS = ("ball", "star", "house", "boat", "car", "tree", "kite", "umbrella", "bottle", "cup", "fish", "hat")

TYPICAL_SHARE = 0.7
"""How often a scene draws an object or a sign word typical of its kind; this is what makes kinds cluster."""
SIGN_SHARE = 0.35
HELD_OUT_SHARE = 0.4

T = TypeVar("T")
Combination = tuple[str, str, str]
"""(noun, colour, texture)"""


@dataclass(frozen=True)
class Kind:
    """A kind of scene: its places in words, and the objects and sign words usual there."""

    places: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]
    lights: tuple[str, ...] = OUTDOOR_LIGHTS


KINDS: dict[str, Kind] = {
    "beach": Kind(
        ("on the beach", "by the sea", "on the sand"),
        ("ball", "umbrella", "kite", "fish"),
        ("swim", "waves", "surf", "sunny", "lemon"),
    ),
    "street": Kind(
        ("in the street", "on city roads", "in town"),
        ("car", "house", "umbrella", "hat"),
        ("stop", "taxi", "hotel", "bank", "exit"),
    ),
    "forest": Kind(
        ("in the forest", "in the woods", "among tall trunks"),
        ("tree", "kite", "house", "hat"),
        ("trail", "camp", "wolf", "quiet", "moss"),
    ),
    "kitchen": Kind(
        ("in the kitchen", "on a counter", "against kitchen tiles"),
        ("cup", "bottle", "fish", "hat"),
        ("soup", "sugar", "salt", "cook", "bread"),
        INDOOR_LIGHTS,
    ),
    "snow": Kind(
        ("in the snow", "in snow fields", "on white ground"),
        ("tree", "hat", "house", "ball"),
        ("ice", "ski", "frost", "lodge", "polar"),
    ),
    "harbour": Kind(
        ("in the harbour", "at the dock", "at the port"),
        ("boat", "fish", "bottle", "house"),
        ("ferry", "crab", "pier", "sail", "anchor"),
    ),
    "desert": Kind(
        ("in the desert", "among the dunes", "on dry dunes"),
        ("car", "tree", "bottle", "star"),
        ("water", "oasis", "camel", "heat", "gas"),
    ),
    "farm": Kind(
        ("on a farm", "in a field", "on farm land"),
        ("house", "tree", "car", "hat"),
        ("milk", "eggs", "corn", "barn", "hay"),
    ),
    "classroom": Kind(
        ("in the classroom", "at school", "by the blackboard"),
        ("cup", "star", "ball", "umbrella"),
        ("math", "learn", "read", "quiz", "book"),
        INDOOR_LIGHTS,
    ),
    "market": Kind(
        ("at the market", "under an awning", "between market stalls"),
        ("bottle", "fish", "cup", "umbrella"),
        ("sale", "fruit", "apple", "open", "cheap"),
    ),
    "stage": Kind(
        ("on stage", "in the theatre", "before a curtain"),
        ("star", "hat", "umbrella", "ball"),
        ("show", "jazz", "magic", "dance", "opera"),
        INDOOR_LIGHTS,
    ),
    "mountains": Kind(
        ("in the mountains", "below high peaks", "in alpine hills"),
        ("kite", "tree", "star", "boat"),
        ("hike", "peak", "cabin", "lake", "view"),
    ),
}
WORDS = tuple(word for kind in KINDS.values() for word in kind.words)


OWNERS, TOWNS = (
    tuple(names.split())
    for names in (
        "alice boris clara david elena felix greta hugo irene jonas karin lucas maria nadia oscar paula rafael sofia "
        "tomas ursula viktor wanda xavier yusuf zelda anton bella cosmo daria emil flora gustav hanna igor julia "
        "kamal leila",
        "oslo paris lima cairo quito delhi tokyo seoul hanoi dakar accra lagos tunis malta porto milan turin genoa "
        "basel ghent lille lyon nantes york leeds derby perth sydney boston dallas denver miami fargo salem austin "
        "reno",
    )
)
"""Who took a picture and where: private facts that captions state and pictures do not show."""


@dataclass(frozen=True)
class Group:
    """One to four equal objects."""

    noun: str
    colour: str
    texture: str
    size: str
    count: int

    @property
    def combination(self) -> Combination:
        return (self.noun, self.colour, self.texture)


@dataclass(frozen=True)
class Scene:
    """Everything a picture shows and its captions may mention.

    The second group is opposite to the first along `relation` (the first is `relation` the second), and the
    third, across that axis, is `third_side` of both.
    """

    kind: str
    light: str
    groups: tuple[Group, ...]
    relation: str
    third_side: str
    sign: str | None
    owner: str
    town: str


@cache
def combinations(held_out: bool) -> tuple[Combination, ...]:
    """The fixed partition of all (noun, colour, texture): held out from pretraining, or not."""
    return tuple(
        (noun, colour, texture)
        for noun in NOUNS
        for colour in COLOURS
        for texture in TEXTURES
        if is_held_out((noun, colour, texture)) == held_out
    )


@cache
def is_held_out(combination: Combination) -> bool:
    return stream_seed(0, "held out", *combination) % 1000 < 1000 * HELD_OUT_SHARE


@cache
def _looks(noun: str, held_out: bool) -> tuple[Combination, ...]:
    return tuple(combination for combination in combinations(held_out) if combination[0] == noun)


def draw_scene(rng: np.random.Generator, federated: bool) -> Scene:
    """Draw a scene: a federated one always holds a combination never seen in pretraining, other scenes never do."""
    kind_name = pick(rng, tuple(KINDS))
    kind = KINDS[kind_name]
    group_count = int(rng.choice(3, p=(0.25, 0.5, 0.25))) + 1
    nouns: list[str] = []
    while len(nouns) < group_count:
        noun = pick(rng, kind.nouns if rng.random() < TYPICAL_SHARE else NOUNS)
        if noun not in nouns:  # two groups of one noun could not be distinguished in short captions
            nouns.append(noun)
    unseen = int(rng.integers(group_count))
    groups = []
    for position, noun in enumerate(nouns):
        held_out = federated and (position == unseen or rng.random() < HELD_OUT_SHARE)
        _, colour, texture = pick(rng, _looks(noun, held_out))
        size = pick(rng, SIZES)
        most = 2 if group_count == 3 and size == "large" else 4  # more would not fit the picture
        groups.append(Group(noun, colour, texture, size, int(rng.integers(1, most + 1))))
    relation = pick(rng, RELATIONS)
    across = ("above", "below") if relation in ("left of", "right of") else ("left of", "right of")
    sign = None
    if rng.random() < SIGN_SHARE:
        sign = pick(rng, kind.words if rng.random() < TYPICAL_SHARE else WORDS)
    light, third_side = pick(rng, kind.lights), pick(rng, across)
    return Scene(kind_name, light, tuple(groups), relation, third_side, sign, pick(rng, OWNERS), pick(rng, TOWNS))


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]
