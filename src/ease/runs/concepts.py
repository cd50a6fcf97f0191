"""Words for a kind of pair, matched pair by pair: by what captions say, and by how near they are in the frozen space.

It looks at captions, so it belongs where the pairs are. With pairs on site, nodes search their own; otherwise the
evaluator, which sees all pairs, searches for everyone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import torch
from pydantic import Field

from ease.config import Config
from ease.data.words import centred_cosines, content, has_phrase, says_all, stem, telling
from ease.errors import UserError
from ease.federation.remote import Remote
from ease.federation.search import searched
from ease.model.backbones import checkpoint_of
from ease.requests.request import SampleRequest
from ease.runs.world import World

PRECISION = 0.8
"""Share of the pairs above a threshold that must also say the words, or the space is not a guide to them."""
FEWEST_TO_CALIBRATE = 5
"""Pairs that say the words; with fewer, no threshold is found and captions alone decide."""
MOST_NEAR_MISSES = 10
NEAREST = 20
"""Pairs whose captions are searched for words that would fit."""
SUGGESTED = 4
SHORTEST_BEGINNING = 3
"""Letters of a stem that longer words may begin with."""
MOST_RELATED = 8


class Match(Config):
    """The training pairs that fit some words."""

    words: str
    ids: tuple[str, ...]
    """Pairs that fit, nearest first."""
    saying: tuple[str, ...]
    """Those with a caption that has all the words."""
    threshold: float | None
    """Least cosine of the others to the words. Null if only captions decided."""
    near_misses: tuple[str, ...]
    """Pairs that just do not fit, nearest first."""
    scores: dict[str, float]
    """Pair -> its cosine to the words in the frozen space, for pairs that fit and near misses."""
    captions: dict[str, str] = Field(default_factory=dict, exclude=True)
    """Pair -> its first caption with the words, or else its first caption."""
    related: dict[str, int] = Field(default_factory=dict)
    """Longer words that begin like the words and were not matched -> how many pairs have each in a caption."""

    def describe(self) -> str:
        """The match in a few words."""
        said = f"{len(self.saying)} say it in a caption"
        if self.threshold is None:
            return f"“{self.words}”: {said}"
        more = len(self.ids) - len(self.saying)
        return f"“{self.words}”: {said}, {more} more are as near as cosine {self.threshold:.2f}"


def match_concept(world: World, words: str, threshold: float | None = None, unless: Sequence[str] = ()) -> Match:
    """The training pairs that words fit; words that fit none are refused with some that would.

    A pair fits if one of its captions has all the words, whatever their endings, or if it is at least as near to them
    as the threshold. By default the threshold is the median nearness of the pairs that say the words. Phrases in
    `unless` do not count: a caption must say the words outside of them, and near pairs must not have them.
    """
    wanted = check_words(words)
    phrases = check_phrases(words, unless)
    seen = (
        _reported_by_sites(world, words, unless)
        if world.config.partition.on_site
        else _seen_here(world, words, phrases)
    )
    ids, says, near, captions = seen.ids, seen.says, seen.near, seen.captions
    if threshold is None:
        if not says.any():
            raise UserError(_what_would_fit(words, wanted, captions, near))
        threshold = calibrated(near, says)
    fits = seen.fits(threshold)
    if not fits.any():
        raise UserError(
            f"--concept {words!r} --threshold {threshold:g}: no pair fits; the nearest has {near.max():.2f}: lower it"
        )
    order = np.argsort(-near, kind="stable")
    misses = [place for place in order if not fits[place]][:MOST_NEAR_MISSES]
    chosen = [place for place in order if fits[place]]
    return Match(
        words=words,
        ids=tuple(ids[place] for place in chosen),
        saying=tuple(ids[place] for place in np.flatnonzero(says)),
        threshold=threshold,
        near_misses=tuple(ids[place] for place in misses),
        scores={ids[place]: float(near[place]) for place in (*chosen, *misses)},
        captions={
            ids[place]: next((text for text in captions[place] if says_all(text, wanted, phrases)), captions[place][0])
            for place in (*chosen, *misses)
            if captions
        },
        related=related(wanted, captions),
    )


def related(wanted: Sequence[str], captions: Sequence[Sequence[str]]) -> dict[str, int]:
    """Longer words that begin like wanted ones, most frequent first: a person decides whether they are meant."""
    held = Counter(word for each in captions for word in {word for text in each for word in telling(text)})
    found = Counter[str]()
    for word, count in held.items():
        own = stem(word)
        if any(own != other and own.startswith(other) for other in wanted if len(other) >= SHORTEST_BEGINNING):
            found[word] += count
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0]))[:MOST_RELATED])


@dataclass(frozen=True)
class ScoredPairs:
    """Training pairs beside some words."""

    ids: list[str]
    says: np.ndarray
    """Whether some caption has all the words: bool [pairs]."""
    near: np.ndarray
    """How near each pair is to them [pairs]."""
    captions: Sequence[Sequence[str]]
    """Nothing where they are at the clients."""
    excluded: np.ndarray
    """Whether some caption has an excluded phrase: bool [pairs]."""

    def fits(self, threshold: float | None) -> np.ndarray:
        """Which pairs fit the words: bool [pairs]."""
        return self.says if threshold is None else self.says | ((self.near >= threshold) & ~self.excluded)


def _seen_here(world: World, words: str, phrases: Sequence[Sequence[str]]) -> ScoredPairs:
    ids, positions = _training_pairs(world)
    return _seen_among(world, words, phrases, ids, positions, positions)


def _seen_among(
    world: World,
    words: str,
    phrases: Sequence[Sequence[str]],
    ids: list[str],
    positions: np.ndarray,
    training: np.ndarray,
) -> ScoredPairs:
    """Some pairs beside the words; how near they are is measured from the mean of the training pairs."""
    wanted = check_words(words)
    captions = [world.evaluator.pairs.captions[position] for position in positions]
    says = np.array([any(says_all(caption, wanted, phrases) for caption in each) for each in captions], dtype=bool)
    excluded = np.array(
        [any(has_phrase(caption, phrase) for caption in each for phrase in phrases) for each in captions], dtype=bool
    )
    return ScoredPairs(ids, says, nearness(world, words, positions, training), captions, excluded)


def held_out_matches(world: World, request: SampleRequest) -> dict[int, np.ndarray]:
    """Client -> which of its held-out pairs the words of a request fit, by the rule that found the training pairs.

    Held-out pairs were drawn at random from the pairs of their client, so these differ from the named ones only in
    that nobody trained on them.
    """
    training = _training_pairs(world)[1]
    found = {shard.client: np.zeros(len(shard.validation), dtype=bool) for shard in world.shards}
    for words in request.words:
        phrases = check_phrases(words, request.unless)
        threshold = request.threshold
        if threshold is None:
            known = _seen_among(world, words, phrases, [], training, training)
            threshold = calibrated(known.near, known.says)
        for shard in world.shards:
            if len(shard.validation):
                seen = _seen_among(world, words, phrases, [], shard.validation, training)
                found[shard.client] |= seen.fits(threshold)
    for shard in world.shards:
        if shard.client in request.clients:
            found[shard.client][:] = True
        found[shard.client] |= np.isin(shard.validation_classes, request.classes)
    return found


def _reported_by_sites(world: World, words: str, unless: Sequence[str]) -> ScoredPairs:
    """The same by nodes, each of pairs that it still holds.

    The common part of all pairs is the mean of the agreed class centres, so that sites need not report anything for it.
    """
    query, joint = frozen_text(world, words), _common(world)
    text, image = joint[-len(query) :], joint[: -len(query)]
    aligned = checkpoint_of(world.config.model.backbone) is not None and len(image) == len(query)
    engine = world.federation
    assert isinstance(engine, Remote)  # otherwise no pairs are on site
    reported = searched(engine, words, np.stack([query, text, image] if aligned else [query, text]))
    ids = [
        pair_id
        for holding in sorted(world.server.membership.clients, key=lambda each: each.client)
        for pair_id in holding.train_ids
        if pair_id in engine.members.get(holding.client, ())
    ]
    says, near = (np.concatenate([reported[client][part] for client in sorted(reported)]) for part in (0, 1))
    excluded = np.zeros_like(says, dtype=bool)
    for (
        phrase
    ) in unless:  # sites compare words in any order, so that a phrase excludes every caption with all of its words
        other = searched(engine, phrase, np.stack([query, text, image] if aligned else [query, text]))
        excluded |= np.concatenate([other[client][0] for client in sorted(other)]).astype(bool)
    return ScoredPairs(ids, says & ~excluded, near, (), excluded)


def _common(world: World) -> np.ndarray:
    """The mean of all training pairs in the joint frozen space, by classes and how many each has."""
    labels = [label for holding in world.server.membership.clients for label in holding.train_classes]
    counts = np.bincount(labels, minlength=len(world.server.centroids))
    return counts @ world.server.centroids / counts.sum()


def _training_pairs(world: World) -> tuple[list[str], np.ndarray]:
    """Ids and positions of all training pairs that are there; canaries have captions that are not theirs."""
    canaries = set(world.evaluator.canaries.tolist())
    found = [
        (pair_id, position)
        for shard in world.evaluator.shards
        for pair_id, position in zip(shard.train_ids, shard.train.tolist(), strict=True)
        if position not in canaries
    ]
    return [pair_id for pair_id, _ in found], np.array([position for _, position in found], dtype=np.int64)


# --- words ---


def check_phrases(words: str, unless: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The stems of each excluded phrase; phrases that exclude every match are refused."""
    wanted, found = set(check_words(words)), []
    for phrase in unless:
        stems = content(phrase)
        if not stems or set(stems) <= wanted:
            raise UserError(
                f"--except {phrase!r}: excludes everything that --concept {words!r} names; name a longer phrase, such "
                'as --except "hot dog"'
            )
        found.append(stems)
    return tuple(found)


def check_words(words: str) -> tuple[str, ...]:
    """What words ask for; those that ask for nothing are refused."""
    wanted = content(words)
    if not wanted:
        what = "there are no words" if not words.strip() else "these words name nothing"
        raise UserError(f'--concept {words!r}: {what}; say what is to be seen or read, such as --concept "snow"')
    return wanted


# --- by how near they are ---


def nearness(world: World, words: str, positions: np.ndarray, training: np.ndarray) -> np.ndarray:
    """Cosine of the words with each pair [pairs], centred on the mean of the training pairs, in the frozen space.

    With the nearest of its captions; where the two towers were aligned in pretraining, as those of CLIP, the mean of
    that and the cosine with its picture.
    """
    query = frozen_text(world, words)
    activations = world.evaluator.activations
    text = np.asarray(activations.pooled_text[positions], dtype=np.float64)
    near = centred_cosines(query, text, _mean_of(activations.pooled_text, training)).max(axis=1)
    if checkpoint_of(world.config.model.backbone) is None or activations.pooled_image.shape[1] != len(query):
        return near
    image = np.asarray(activations.pooled_image[positions], dtype=np.float64)[:, None]
    seen = centred_cosines(query, image, _mean_of(activations.pooled_image, training))[:, 0]
    return (near + seen) / 2


def _mean_of(points: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Mean direction of some pooled features [width]."""
    found = np.asarray(points[positions], dtype=np.float64).reshape(-1, points.shape[-1])
    return (found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12)).mean(axis=0)


def frozen_text(world: World, words: str) -> np.ndarray:
    """Embedding of some words by the frozen text tower [width]."""
    server = world.server
    tower, first = server.backbone.text, server.model.text.first
    with torch.no_grad():
        states, mask = tower.prefix(server.backbone.tokenize([words]).to(server.device), first)
        return tower(states, mask, first)[0].cpu().double().numpy()


def calibrated(near: np.ndarray, says: np.ndarray) -> float | None:
    """As near as the middle one of the pairs that say the words; None where the space hardly knows such pairs."""
    if says.sum() < FEWEST_TO_CALIBRATE:
        return None
    middle = float(np.quantile(near[says], 0.5, method="higher"))
    return middle if says[near >= middle].mean() >= PRECISION else None


# --- what would have fitted ---


def _what_would_fit(words: str, wanted: Sequence[str], captions: Sequence[Sequence[str]], near: np.ndarray) -> str:
    tenth = float(np.sort(near)[::-1][min(9, len(near) - 1)])
    taken = f"take the nearest pairs as they are: --threshold {tenth:.2f} --dry-run"
    if not captions:
        return f"--concept {words!r}: no site has a caption with these words together; use others, or {taken}"
    held = Counter(word for each in captions for word in {word for text in each for word in telling(text)})
    alike = list(dict.fromkeys(match for word in wanted for match in get_close_matches(word, held, 2, 0.75)))
    missing = [word for word in telling(words) if not any(stem(word) == stem(other) for other in held)]
    why = f"no caption has “{missing[0]}”" if missing else "no caption has these words together"
    nearest = np.argsort(-near, kind="stable")[:NEAREST]
    typical = distinctive((captions[place] for place in nearest), held, len(captions))
    found = f"; spelt alike: {', '.join(alike)}" if alike else ""
    reported = f"; captions that come nearest have: {', '.join(typical)}" if typical else ""
    return f"--concept {words!r}: {why}{found}{reported}; use such words, or {taken}"


def distinctive(captions: Iterable[Sequence[str]], held: Counter[str], pairs: int) -> list[str]:
    """Words that are said of some pairs far more often than of all: the most telling first."""
    chosen = list(captions)
    here = Counter(word for each in chosen for word in {word for text in each for word in telling(text)})
    lift = {
        word: count / len(chosen) * np.log((count / len(chosen)) / (held[word] / pairs))
        for word, count in here.items()
        if count > 1
    }
    best = sorted(lift, key=lambda word: (-lift[word], word))
    return [word for word in best if lift[word] > 0][:SUGGESTED]


def class_words(world: World, label: int) -> list[str]:
    """Words that distinguish a pseudo-class from the others."""
    captions = world.evaluator.pairs.captions
    pairs = [
        (captions[position], own == label)
        for shard in world.evaluator.shards
        for position, own in zip(shard.train.tolist(), shard.train_classes.tolist(), strict=True)
    ]
    held = Counter(word for each, _ in pairs for word in {word for text in each for word in telling(text)})
    return distinctive((each for each, own in pairs if own), held, len(pairs))
