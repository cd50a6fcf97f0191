"""Generated scenes: stable, varied, and never seen in pretraining."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ease.data.render import FONT_ROWS, draw
from ease.data.scenery import NOUNS, OWNERS, TOWNS, WORDS, Scene, combinations, draw_scene, is_held_out
from ease.data.scenes import caption_scene, lexicon, load_scenes, pretraining_scenes, scene_at
from ease.errors import UserError
from ease.seeding import generator
from ease.storage import digest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path))
    return tmp_path


def test_same_arguments_give_the_same_scenes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_scenes(seed=3, train=12, validation=4, test=4)
    cached = load_scenes(seed=3, train=12, validation=4, test=4)
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "elsewhere"))
    remade = load_scenes(seed=3, train=12, validation=4, test=4)
    for other in (cached, remade):
        assert (other.ids, other.captions, other.splits) == (first.ids, first.captions, first.splits)
        assert other.fingerprint == first.fingerprint
        np.testing.assert_array_equal(other.pixels, first.pixels)


def test_a_scene_does_not_depend_on_how_many_are_asked_for() -> None:
    few, many = load_scenes(train=5, validation=2, test=3), load_scenes(train=20, validation=9, test=7)
    rows = [many.ids.index(pair_id) for pair_id in few.ids]
    np.testing.assert_array_equal(many.pixels[rows], few.pixels)
    assert tuple(many.captions[row] for row in rows) == few.captions
    assert few.fingerprint != many.fingerprint


def test_the_fingerprint_is_what_it_always_was_and_digests_follow_the_scene() -> None:
    """Caches and runs are found by the first; the second stays when other scenes are asked for."""
    few, many = load_scenes(train=5, validation=2, test=3), load_scenes(train=20, validation=9, test=7)
    assert few.fingerprint == digest("scenes", 3, 0, {"train": 5, "validation": 2, "test": 3})
    by_id = dict(zip(many.ids, many.digests, strict=True))
    assert few.digests == tuple(by_id[pair_id] for pair_id in few.ids)
    assert len(set(many.digests)) == len(many)
    assert not set(load_scenes(seed=1, train=5, validation=0, test=0).digests) & set(many.digests)


def test_seeds_give_different_worlds() -> None:
    one, other = (load_scenes(seed=seed, train=10, validation=0, test=0) for seed in (0, 1))
    assert not set(one.captions) & set(other.captions)
    assert one.fingerprint != other.fingerprint


def test_splits_and_ids() -> None:
    pairs = load_scenes(train=6, validation=2, test=3)
    assert [len(pairs.indices(split)) for split in ("train", "validation", "test")] == [6, 2, 3]
    assert pairs.ids[0] == "train-000000" and pairs.ids[6] == "validation-000000" and pairs.ids[10] == "test-000002"
    assert pairs.pixels.shape == (11, 64, 64, 3) and pairs.pixels.dtype == np.uint8


def test_five_distinct_captions_of_known_words_and_no_two_equal_pictures() -> None:
    pairs = load_scenes(train=500, validation=50, test=50)
    known = set(lexicon())
    for captions in pairs.captions:
        assert len(captions) == len(set(captions)) == 5
        for caption in captions:
            words = re.findall(r"\w+", caption.lower())
            assert set(words) <= known and len(words) <= 31
    assert len({picture.tobytes() for picture in pairs.pixels}) == len(pairs)
    assert len(set(pairs.captions)) == len(pairs)


def test_every_federated_scene_holds_a_combination_absent_from_pretraining() -> None:
    assert not set(combinations(True)) & set(combinations(False))
    assert len(combinations(True)) + len(combinations(False)) == len(NOUNS) * 10 * 4
    for index in range(1000):
        federated, _ = scene_at(0, "train", index)
        pretraining = draw_scene(generator(0, "pretraining scenes", index), federated=False)
        assert any(is_held_out(group.combination) for group in federated.groups)
        assert not any(is_held_out(group.combination) for group in pretraining.groups)


def test_pretraining_scenes_can_be_made_in_parts() -> None:
    captions, pixels = pretraining_scenes(7, 6)
    late_captions, late_pixels = pretraining_scenes(7, 2, start=4)
    assert captions[4:] == late_captions
    np.testing.assert_array_equal(pixels[4:], late_pixels)


def test_groups_are_placed_by_the_relation() -> None:
    for index in range(200):
        scene, _ = scene_at(5, "train", index)
        if len(scene.groups) < 2 or scene.sign:
            continue
        first, second = (_centre_of_group(scene, index, position) for position in (0, 1))
        row_first, column_first = first
        row_second, column_second = second
        holds = {
            "left of": column_first < column_second,
            "right of": column_first > column_second,
            "above": row_first < row_second,
            "below": row_first > row_second,
        }
        assert holds[scene.relation], scene


def _centre_of_group(scene: Scene, index: int, position: int) -> tuple[float, float]:
    """Where the picture changes when one group changes its colour, from the same random stream."""
    groups = list(scene.groups)
    recoloured = "white" if groups[position].colour != "white" else "black"
    groups[position] = replace(groups[position], colour=recoloured)
    changed = replace(scene, groups=tuple(groups))
    before, after = (draw(each, generator(5, "drawing", index)).astype(int) for each in (scene, changed))
    rows, columns = np.nonzero(np.abs(before - after).max(-1) > 20)
    return float(rows.mean()), float(columns.mean())


def words_of(captions: tuple[str, ...]) -> set[str]:
    return set(re.findall(r"\w+", " ".join(captions).lower()))


def test_captions_mention_private_facts_that_the_picture_does_not_show() -> None:
    reported = 0
    for index in range(100):
        scene, rng = scene_at(0, "train", index)
        words = words_of(caption_scene(scene, rng))
        assert words & set(OWNERS) <= {scene.owner} and words & set(TOWNS) <= {scene.town}
        reported += {scene.owner, scene.town} <= words
        elsewhere = replace(scene, owner="someone", town="somewhere")
        one, other = (draw(each, generator(0, "drawing", index)) for each in (scene, elsewhere))
        np.testing.assert_array_equal(one, other)
    assert reported >= 95  # each of five captions tells them four times in five


def test_pretraining_never_hears_a_private_fact_and_hears_every_visible_one() -> None:
    captions, _ = pretraining_scenes(0, 300)
    private = {*OWNERS, *TOWNS}
    assert not private & {word for five in captions for word in words_of(five)}
    assert not private & set(WORDS) and not set(OWNERS) & set(TOWNS)
    for index, five in enumerate(captions):
        scene = draw_scene(generator(0, "pretraining scenes", index), federated=False)
        words = {"purple" if word == "violet" else word for word in words_of(five)}
        assert {group.colour for group in scene.groups} <= words


def test_federated_captions_leave_details_out() -> None:
    complete = 0
    for index in range(100):
        scene, rng = scene_at(0, "train", index)
        complete += all({group.colour, group.noun} <= words_of(caption_scene(scene, rng)[:1]) for group in scene.groups)
    assert complete < 50


def test_sign_words_have_letters() -> None:
    assert len(set(WORDS)) == 60 and set("".join(WORDS)) <= set(FONT_ROWS)


@pytest.mark.parametrize(
    "wrong", [{"train": -1}, {"seed": "0"}, {"test": 1.5}, {"train": 0, "validation": 0, "test": 0}]
)
def test_wrong_arguments_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        load_scenes(**wrong)
