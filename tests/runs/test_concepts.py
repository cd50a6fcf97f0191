"""Words find the pairs that say them or are near them, pair by pair, and words that fit nothing find a remedy."""

from dataclasses import replace

import numpy as np
import pytest

from ease.data.words import content, has_phrase, says_all, stem
from ease.errors import UserError
from ease.requests.request import SampleRequest
from ease.runs.concepts import calibrated, class_words, held_out_matches, match_concept, nearness
from ease.runs.world import World


@pytest.mark.parametrize(
    "forms",
    [
        ("snow", "snows", "snowing", "snowed"),
        ("dog", "dogs"),
        ("baby", "babies"),
        ("beach", "beaches"),
        ("glass", "glasses"),
        ("run", "runs", "running", "ran"),
        ("ride", "rides", "riding", "rode"),
        ("jump", "jumped", "jumping"),
        ("child", "children"),
        ("bus",),
        ("swimming", "swim", "swam", "swimmer"),
        ("surf", "surfs", "surfing", "surfed", "surfer", "surfers", "surfboard", "surfboards"),
        ("ski", "skis", "skiing", "skier", "skiers"),
        ("skate", "skating", "skaters", "skateboard", "skateboarder", "skateboarding"),
        ("runner", "running"),
        ("large", "larger"),
    ],
)
def test_forms_of_one_word_have_one_stem(forms: tuple[str, ...]) -> None:
    assert len({stem(form) for form in forms}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("car", "card"),
        ("arm", "army"),
        ("sing", "sink"),
        ("bus", "bush"),
        ("string", "stre"),
        ("flower", "flow"),
        ("corner", "corn"),
        ("snowman", "snow"),
    ],
)
def test_different_words_stay_apart(one: str, other: str) -> None:
    assert stem(one) != stem(other)


def test_filling_words_say_nothing_and_all_others_must_be_in_one_caption() -> None:
    assert content("in the snow") == content("Snow") == ("snow",)
    assert content("with the") == () and content(" ,.!") == ()
    wanted = content("a dog in the snow")
    assert says_all("Two DOGS, running: snow!", wanted)
    assert not says_all("A dog on the beach.", wanted) and not says_all("A snowman and a hotdog.", wanted)
    assert says_all("一只狗在雪地里", content("雪地")) and not says_all("一只狗", content("雪地"))


def test_words_inside_of_an_excluded_phrase_do_not_count() -> None:
    dog, phrase = content("dog"), [content("hot dog")]
    assert not says_all("A man eats hot dogs.", dog, phrase) and says_all("A man eats hot dogs.", dog)
    assert says_all("A dog eats a hot dog.", dog, phrase), "one of two dogs is outside of the phrase"
    assert says_all("A dog in the hot sun.", dog, phrase), "the phrase is its words one after the other"
    assert has_phrase("Two hot dogs.", phrase[0]) and not has_phrase("A dog, hot.", phrase[0])


def test_the_threshold_is_the_middle_one_of_those_that_say_the_words() -> None:
    near = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    says = np.array([1, 1, 1, 0, 1, 0, 0, 1], dtype=bool)
    assert calibrated(near, says) == 0.7, "sorted 0.2 0.5 0.7 0.8 0.9"
    assert calibrated(near, ~says) is None, "three are too few to go by"
    assert calibrated(near[::-1], np.array([0, 0, 0, 1, 1, 1, 1, 1], dtype=bool)) == 0.7
    assert calibrated(near, np.array([0, 1, 0, 1, 0, 1, 1, 1], dtype=bool)) is None, "3 of 6 is no guide"


def _with_captions(world: World, *captions: str) -> World:
    """The same world, whose first training pairs say something else."""
    pairs, changed = world.evaluator.pairs, list(world.evaluator.pairs.captions)
    for place, caption in zip(world.evaluator.shards[0].train, captions, strict=False):
        changed[place] = (caption, *changed[place][1:])
    return replace(world, evaluator=replace(world.evaluator, pairs=replace(pairs, captions=tuple(changed))))


def test_pairs_are_matched_by_what_their_captions_say(world: World) -> None:
    world_of = _with_captions(world, "Zebras under the moon.", "one zebra", "a moon", "moons and a zebra")
    first = world.evaluator.shards[0].train_ids
    found = match_concept(world_of, "zebra")
    assert set(found.ids) == {first[0], first[1], first[3]} == set(found.saying) and found.threshold is None
    assert found.captions[first[1]] == "one zebra" and not set(found.near_misses) & set(found.ids)
    assert set(match_concept(world_of, "the zebras and the moon").ids) == {first[0], first[3]}
    order = [found.scores[each] for each in found.ids]
    assert order == sorted(order, reverse=True)


def test_a_threshold_takes_in_what_is_near_and_near_misses_are_the_next(world: World) -> None:
    world_of = _with_captions(world, "one zebra")
    ids = [each for shard in world_of.evaluator.shards for each in shard.train_ids]
    every = np.concatenate([shard.train for shard in world_of.evaluator.shards])
    near = nearness(world_of, "zebra", every, every)
    limit = float(np.sort(near)[-8])
    found = match_concept(world_of, "zebra", limit)
    first = world_of.evaluator.shards[0].train_ids[0]
    assert set(found.ids) == {each for each, score in zip(ids, near, strict=True) if score >= limit} | {first}
    rest = sorted((-score, each) for each, score in zip(ids, near, strict=True) if each not in found.ids)
    assert {each for _, each in rest[:10]} == set(found.near_misses)


def test_pairs_of_an_excluded_phrase_stay_and_longer_words_are_named(world: World) -> None:
    world_of = _with_captions(
        world, "a zebra", "a zebra crossing", "a zebra on a zebra crossing", "zebrafish", "zebrafish"
    )
    first = world.evaluator.shards[0].train_ids
    found = match_concept(world_of, "zebra", unless=["zebra crossing"])
    assert set(found.ids) == {first[0], first[2]} and found.related == {"zebrafish": 2}
    near = match_concept(world_of, "zebra", -1.0, unless=["zebra crossing"])
    assert first[1] not in near.ids and first[3] in near.ids, "not by nearness either"
    with pytest.raises(UserError, match=r"--except 'zebras': excludes everything"):
        match_concept(world_of, "zebra", unless=["zebras"])


def test_held_out_pairs_are_matched_by_the_same_rule(world: World) -> None:
    world_of = _with_captions(world, "one zebra")
    pairs, changed = world_of.evaluator.pairs, list(world_of.evaluator.pairs.captions)
    shard = world_of.evaluator.shards[1]
    changed[shard.validation[1]] = ("zebras", *changed[shard.validation[1]][1:])
    world_of = replace(world_of, evaluator=replace(world_of.evaluator, pairs=replace(pairs, captions=tuple(changed))))
    request = SampleRequest(ids=match_concept(world_of, "zebra").ids, words=("zebra",))
    found = held_out_matches(world_of, request)
    assert {client: np.flatnonzero(mask).tolist() for client, mask in found.items() if mask.any()} == {1: [1]}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("", ["--concept ''", "there are no words"]),
        ("  ", ["there are no words"]),
        ("in the", ["these words name nothing"]),
        ("zebraa", ["no caption has “zebraa”", "spelt alike: zebra", "--threshold", "--dry-run"]),
        ("xylophone", ["no caption has “xylophone”", "come nearest have:"]),
        ("zebra moon", ["no caption has these words together"]),
    ],
)
def test_words_that_fit_nothing_are_refused_with_what_would(world: World, words: str, parts: list[str]) -> None:
    world_of = _with_captions(world, "one zebra", "a moon")
    with pytest.raises(UserError) as refused:
        match_concept(world_of, words)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_the_words_of_a_class_are_said_more_often_there_than_elsewhere(world: World) -> None:
    seen = world.evaluator
    for label in range(3):
        words = class_words(world, label)
        assert words
        said = {True: [], False: []}
        for shard in seen.shards:
            for place, own in zip(shard.train, shard.train_classes, strict=True):
                said[own == label].append(words[0] in " ".join(seen.pairs.captions[place]).lower())
        assert np.mean(said[True]) > np.mean(said[False])
