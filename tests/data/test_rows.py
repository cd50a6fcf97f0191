"""From rows to pairs: what is joined, dropped, counted and refused, whatever the layout."""

import gzip
import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ease.data.report import DataReport
from ease.data.rows import Row, check_relative_path, check_split, pairs_from_rows, read_text, site_of, split_by_id
from ease.errors import UserError
from ease.storage import digest

pytestmark = pytest.mark.usefixtures("own_cache")
SOURCE = Path("list.json")
FIVE = tuple("abcde")


@pytest.fixture
def row(tmp_path, picture):
    """A row whose picture has a shade of its own, numbered from 0."""

    def make(number: int, captions=FIVE, split: str | None = "train", **changes) -> Row:
        path = picture(tmp_path / "images" / f"{number}.png", number * 10)
        return replace(Row(f"id{number}", path, tuple(captions), split, f"list.json: entry {number}"), **changes)

    return make


def test_plain_rows_become_pairs_with_nothing_to_report(row):
    pairs = pairs_from_rows([row(0), row(1, split="validation"), row(2, split="test")], SOURCE, 4)
    assert pairs.ids == ("id0", "id1", "id2") and pairs.captions == (FIVE,) * 3
    assert pairs.splits == ("train", "validation", "test")
    assert pairs.pixels[:, 0, 0, 0].tolist() == [0, 10, 20]
    assert pairs.report == DataReport(splits={"train": 1, "validation": 1, "test": 1})


def test_five_captions_always(row):
    """Seven are cut to five; two are repeated in turn: 0 1 0 1 0."""
    pairs = pairs_from_rows([row(0, "abcdefg"), row(1, ["one", " two "]), row(2, ["only"])], SOURCE, 4)
    assert pairs.captions == (FIVE, ("one", "two", "one", "two", "one"), ("only",) * 5)
    assert (pairs.report.over_five, pairs.report.under_five) == (1, 2)


def test_blank_captions_are_dropped_and_images_without_any_left_out(row):
    rows = [row(0, ["a", "  ", "", "b", "c", "d", "e"]), row(1, ["\t"]), row(2, [])]
    pairs = pairs_from_rows(rows, SOURCE, 4)
    assert pairs.ids == ("id0",) and pairs.captions == (FIVE,)
    assert (pairs.report.blank_captions, pairs.report.without_caption, pairs.report.over_five) == (3, 2, 0)
    with pytest.raises(UserError, match=r"list\.json: none of the 2 images has a caption"):
        pairs_from_rows(rows[1:], SOURCE, 4)


def test_captions_without_anything_to_read_are_blank(row):
    """A zero-width space, a byte order mark and a bell show nothing; a picture of a smile and a full stop do."""
    pairs = pairs_from_rows([row(0, ["\u200b", "\ufeff ", "\a", "\u00a0", "\U0001f600", "."])], SOURCE, 4)
    assert pairs.captions[0][:2] == ("\U0001f600", ".") and pairs.report.blank_captions == 4


def test_rows_of_one_image_are_joined_and_a_caption_counts_once(row):
    pairs = pairs_from_rows([row(0, ["a"]), row(1), row(0, ["b", "a"]), row(0, ["c"])], SOURCE, 4)
    assert pairs.ids == ("id0", "id1") and pairs.captions[0] == ("a", "b", "c", "a", "b")
    assert pairs.report.joined == 2


def test_one_id_for_two_images_or_splits_is_refused_with_both_places(row):
    with pytest.raises(UserError, match=r"entry 1: id 'id0' is already used by list\.json: entry 0 for another image"):
        pairs_from_rows([row(0), row(1, id="id0")], SOURCE, 4)
    with pytest.raises(UserError, match=r"'id0' is in split test here and in train at list\.json: entry 0"):
        pairs_from_rows([row(0), row(0, split="test")], SOURCE, 4)


# --- sites ---


def test_sites_are_kept_and_part_of_the_fingerprint_only_where_there_are_any(row):
    """Without sites the fingerprint is the hash of size, ids, captions, splits and pixels, as it was before sites."""
    rows = [row(0), row(1, split="test")]
    plain = pairs_from_rows(rows, SOURCE, 4)
    pictures = [hashlib.blake2b(picture.tobytes(), digest_size=16).hexdigest() for picture in plain.pixels]
    checksum = hashlib.sha256("".join(pictures).encode()).hexdigest()
    assert plain.sites == ()
    assert plain.fingerprint == digest("pairs", 4, ["id0", "id1"], [FIVE, FIVE], ["train", "test"], checksum)
    named, other = (
        pairs_from_rows([replace(rows[0], site=site), rows[1]], SOURCE, 4, by_site=True) for site in ("north", "south")
    )
    assert named.sites == ("north", None)
    assert len({plain.fingerprint, named.fingerprint, other.fingerprint}) == 3


def test_every_training_pair_needs_a_site_where_sites_are_the_clients(row):
    """The first one without is named; pairs of other splits, and images left out, need none."""
    rows = [row(0, site="a"), row(1, split="test"), row(2, split="validation"), row(3, [" "]), row(4), row(5)]
    with pytest.raises(UserError, match=r"list\.json: entry 4: `client` or `site` is blank, and other rows have one"):
        pairs_from_rows(rows, SOURCE, 4, by_site=True)
    assert pairs_from_rows(rows[:4], SOURCE, 4, by_site=True).sites == ("a", None, None)
    assert pairs_from_rows(rows, SOURCE, 4).sites == ("a", None, None, None, None)


def test_a_pair_whose_split_is_dealt_needs_a_site_only_if_it_is_trained_on(row):
    splits = [split_by_id(f"id{number}", 0.5) for number in range(20)]
    assert {"train", "test", "validation"} == set(splits)
    sites = [f"s{number}" if split == "train" else None for number, split in enumerate(splits)]
    rows = [row(number, split=None, site=site) for number, site in enumerate(sites)]
    assert pairs_from_rows(rows, SOURCE, 4, held_out_share=0.5, by_site=True).sites == tuple(sites)


def test_without_sites_the_columns_that_there_are_are_named_before_anything_is_decoded(row, monkeypatch):
    monkeypatch.setattr("ease.data.rows.decode", lambda *_: pytest.fail("decoded"))
    rows = [row(0, columns=("image", "text")), row(1, columns=("image", "text", "year"))]
    with pytest.raises(
        UserError, match=r"list\.json: .*needs a column `client` or `site`.*is: image, text, year\); add"
    ):
        pairs_from_rows(rows, SOURCE, 4, by_site=True)


def test_rows_of_one_image_agree_on_its_site(row):
    pairs = pairs_from_rows([row(0, ["a"], site=None), row(0, ["b"], site="x"), row(0, ["c"])], SOURCE, 4, by_site=True)
    assert pairs.sites == ("x",) and pairs.captions[0][:3] == ("a", "b", "c")
    with pytest.raises(UserError, match=r"entry 0: image 'id0' is of site 'y' here and of 'x' at list\.json: entry 0"):
        pairs_from_rows([row(0, site="x"), row(0, ["b"], site="y")], SOURCE, 4)


def test_columns_that_were_not_read_are_reported_and_so_is_a_column_of_sites(row):
    rows = [
        row(0, site="x", columns=("image", "site", "year"), unused=("year",)),
        row(1, site="y", columns=("image", "site", "lens", "year"), unused=("lens", "year")),
    ]
    report = pairs_from_rows(rows, SOURCE, 4).report
    assert (report.unused_columns, report.unused_site_columns) == (("year", "lens"), ("site",))
    report = pairs_from_rows(rows, SOURCE, 4, by_site=True).report
    assert (report.unused_columns, report.unused_site_columns) == (("year", "lens"), ())


@pytest.mark.parametrize(
    ("entry", "site"),
    [
        ({}, None), ({"client": None}, None), ({"site": " "}, None), ({"client": float("nan")}, None),
        ({"client": " St. Mary "}, "St. Mary"), ({"site": 7}, "7"), ({"site": 7.0}, "7"), ({"site": 0}, "0"),
        ({"site": 1.5}, "1.5"), ({"client": "a", "site": ""}, "a"), ({"client": 3, "site": "3"}, "3"),
    ],
)  # fmt: skip
def test_a_site_is_text_or_a_number(entry, site):
    assert site_of(entry, "here") == site


@pytest.mark.parametrize("value", [True, ["a"], {"name": "a"}])
def test_a_site_that_is_neither_is_refused(value):
    with pytest.raises(UserError, match=r"here: site: must be a text or a number, got .*rename the column"):
        site_of({"site": value}, "here")


def test_two_columns_that_name_different_holders_are_refused():
    with pytest.raises(UserError, match=r"here: `client` is 'a' and `site` is 'b'; .*keep the one that does"):
        site_of({"client": "a", "site": "b"}, "here")


# --- the identity of a pair ---


def test_a_digest_follows_picture_and_captions_and_nothing_else(row):
    """The other pairs, the split, the id, the site and the place in the file do not count."""
    first, second = row(0), row(1)
    whole = pairs_from_rows([first, second], SOURCE, 4)
    changed = replace(second, id="renamed", split="test", site="x", where="elsewhere")
    assert pairs_from_rows([changed], SOURCE, 4).digests == whole.digests[1:]
    assert len(whole.digests) == len(set(whole.digests)) == 2
    others = (replace(second, captions=(*"abcd", "f")), replace(second, image=row(2).image))
    assert not {pairs_from_rows([other], SOURCE, 4).digests[0] for other in others} & set(whole.digests)
    assert pairs_from_rows([second], SOURCE, 6).digests[0] not in whole.digests, "other pixels at another size"


def test_digests_stay_with_their_pairs_when_photographs_are_deleted(row):
    rows = [row(number) for number in range(20)]
    before = dict(zip([row.id for row in rows], pairs_from_rows(rows, SOURCE, 4).digests, strict=True))
    rows[3].image.unlink()
    rows[7].image.write_bytes(b"broken")
    after = pairs_from_rows(rows, SOURCE, 4)
    assert len(after) == 18
    assert dict(zip(after.ids, after.digests, strict=True)) == {key: before[key] for key in after.ids}


def test_the_same_picture_under_two_ids_is_counted_and_listed(row):
    twin = row(0)
    pairs = pairs_from_rows([twin, row(1), replace(twin, id="twin")], SOURCE, 4)
    assert len(pairs) == 3 and pairs.report.same_picture == 2
    (listing,) = pairs.report.listings
    assert listing.read_text() == "id0, twin\n"


def spoiled(row, count: int, bad: dict[int, bytes | None]) -> list[Row]:
    """So many rows; of the bad ones the file holds these bytes, or is gone."""
    rows = [row(number) for number in range(count)]
    for number, content in bad.items():
        rows[number].image.unlink() if content is None else rows[number].image.write_bytes(content)
    return rows


def test_a_tenth_of_the_images_may_be_missing_or_damaged_and_all_are_listed(row):
    """Two of twenty are a tenth."""
    pairs = pairs_from_rows(spoiled(row, 20, {1: None, 18: b"broken"}), SOURCE, 4)
    good = [number for number in range(20) if number not in (1, 18)]
    assert pairs.ids == tuple(f"id{number}" for number in good)
    assert pairs.pixels[:, 0, 0, 0].tolist() == [10 * number for number in good]
    assert pairs.report.unreadable == 2 and pairs.report.splits["train"] == 18 and pairs.report.blank_captions == 0
    (listing,) = pairs.report.listings
    assert [Path(line.split(" (")[0]).name for line in listing.read_text().splitlines()] == ["1.png", "18.png"]
    assert "No such file" in listing.read_text() and "not an image" in listing.read_text()


def test_more_than_a_tenth_is_a_wrong_folder_however_they_fail(row):
    """Three of twenty: neither the missing one nor the two damaged ones would be too many alone."""
    rows = spoiled(row, 20, {1: None, 2: b"broken", 3: b"broken"})
    with pytest.raises(
        UserError, match=r"3 of 20 images: .*1\.png .*2\.png .*3\.png .*; so many mean a wrong"
    ) as caught:
        pairs_from_rows(rows, SOURCE, 4)
    assert "check data.path and data.images" in str(caught.value) and "\n" not in str(caught.value)


def test_when_too_many_are_missing_nothing_is_decoded(row, monkeypatch):
    monkeypatch.setattr("ease.data.rows.decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UserError, match="cannot read 3 of 20 images"):
        pairs_from_rows(spoiled(row, 20, dict.fromkeys((1, 2, 3))), SOURCE, 4)


@pytest.mark.parametrize("content", [None, b"broken"])
def test_strict_stops_at_the_first_unreadable_image(row, content):
    with pytest.raises(UserError, match=r"cannot read 1 of 20 images: .*7\.png .*; mend .*data\.strict = false"):
        pairs_from_rows(spoiled(row, 20, {7: content}), SOURCE, 4, strict=True)


def test_a_long_list_of_unreadable_images_names_three_and_counts_the_rest(row):
    with pytest.raises(UserError, match=r"cannot read 5 of 5 images.* and 2 others; so many") as caught:
        pairs_from_rows(spoiled(row, 5, dict.fromkeys(range(5), b"broken")), SOURCE, 4)
    listing = Path(str(caught.value).split("listed in ")[1].split(")")[0])
    assert len(listing.read_text().splitlines()) == 5 and "3.png" not in str(caught.value)


def test_twins_next_to_unreadable_images_are_named_by_their_own_ids(row):
    """Positions count all images, the missing and the damaged one at the front too."""
    rows = spoiled(row, 20, {0: None, 1: b"broken"})
    pairs = pairs_from_rows([*rows, replace(rows[5], id="twin")], SOURCE, 4)
    assert "id5, twin\n" in [path.read_text() for path in pairs.report.listings]


def test_bytes_instead_of_a_file_and_their_place_in_messages(row):
    held = replace(row(0), image=memoryview(row(0).image.read_bytes()))
    assert pairs_from_rows([held], SOURCE, 4).fingerprint == pairs_from_rows([row(0)], SOURCE, 4).fingerprint
    with pytest.raises(UserError, match=r"images: list\.json: entry 0 \(not an image"):
        pairs_from_rows([replace(held, image=memoryview(b"broken"))], SOURCE, 4)


def test_fingerprint_follows_the_content_and_not_file_times(row, picture):
    first = pairs_from_rows([row(0), row(1)], SOURCE, 4).fingerprint
    rows = [row(0), row(1)]
    os.utime(rows[0].image, (1, 1))
    assert pairs_from_rows(rows, SOURCE, 4).fingerprint == first
    changes = [[row(0), row(1, split="test")], [row(0), row(1, "abcdz")], [row(1), row(0)], [row(0), row(1, id="x")]]
    prints = [pairs_from_rows(change, SOURCE, 4).fingerprint for change in changes]
    prints.append(pairs_from_rows(rows, SOURCE, 5).fingerprint)
    picture(rows[1].image, 99)
    prints.append(pairs_from_rows(rows, SOURCE, 4).fingerprint)
    assert len({first, *prints}) == 7


def test_rows_without_a_split_are_dealt_by_their_id(row):
    pairs = pairs_from_rows([row(0, split=None), row(1, split="test")], SOURCE, 4, held_out_share=0.0)
    assert pairs.splits == ("train", "test")
    assert pairs_from_rows([row(0, split=None)], SOURCE, 4, held_out_share=0.999999).splits[0] != "train"


def test_held_out_share_is_halved_steady_and_only_grows():
    ids = [f"photo{index}" for index in range(2000)]
    splits = [split_by_id(pair_id, 0.2) for pair_id in ids]
    assert 1540 < splits.count("train") < 1660
    assert 150 < splits.count("validation") < 250 and 150 < splits.count("test") < 250
    wider = [split_by_id(pair_id, 0.4) for pair_id in ids]
    assert all(after == "test" for before, after in zip(splits, wider, strict=True) if before == "test")
    assert all(after != "train" for before, after in zip(splits, wider, strict=True) if before != "train")


def test_no_rows():
    with pytest.raises(UserError, match=r"list\.json: no images listed"):
        pairs_from_rows([], SOURCE, 4)


@pytest.mark.parametrize(("name", "ours"), [(" Train", "train"), ("VAL", "validation"), ("restval", "train")])
def test_split_names(name, ours):
    assert check_split(name, "here") == ours


@pytest.mark.parametrize("name", ["training", "", None, 3, ["train"]])
def test_unknown_splits_are_named_with_the_known_ones(name):
    with pytest.raises(UserError, match=r"here: unknown split .*; use one of: train, restval, val"):
        check_split(name, "here")


@pytest.mark.parametrize(
    "path", ["../x.png", "a/../../x.png", "/etc/x.png", "..\\x.png", "", " ", "a\0.png", None, 3, "..", ".", "./", "/"]
)
def test_paths_that_are_none_or_leave_the_folder(path):
    with pytest.raises(UserError, match=r"here: .*(leaves the image folder|must be the path of an image)"):
        check_relative_path(path, "here")


@pytest.mark.parametrize("path", ["a.png", "ä/图像 1.png", "..a/b..png", "a\\b.png"])
def test_paths_that_stay_inside(path, tmp_path):
    assert tmp_path.resolve() in (tmp_path / check_relative_path(path, "here")).resolve().parents


def test_windows_separators_and_absolute_paths_inside_the_folder(tmp_path):
    """The folder may be named through a link, as a mounted disk often is."""
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert check_relative_path("trips\\a.png", "here").as_posix() == "trips/a.png"
    for folder in (tmp_path / "real", link):
        for named in (tmp_path / "real", link):
            assert check_relative_path(f"{named}/trips/a.png", "here", folder).as_posix() == "trips/a.png"
        for outside in (tmp_path / "a.png", f"{folder}/../a.png", "/etc/a.png"):
            with pytest.raises(UserError, match=r"leaves the image folder; name one .* in data\.images"):
                check_relative_path(str(outside), "here", folder)


def test_a_web_address_is_not_a_file():
    with pytest.raises(UserError, match=r"here: 'http://x/a\.png' is a web address; download"):
        check_relative_path("http://x/a.png", "here")


def test_text_of_a_users_file(tmp_path):
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfh\xc3\xa4")
    assert read_text(tmp_path / "bom") == "hä"
    (tmp_path / "ends").write_bytes(b"a\r\nb\rc\nd")
    assert read_text(tmp_path / "ends") == "a\nb\nc\nd"
    (tmp_path / "utf16").write_bytes("hä".encode("utf-16"))
    (tmp_path / "packed").write_bytes(gzip.compress(b"x"))
    with zipfile.ZipFile(tmp_path / "zipped", "w") as file:
        file.writestr("x", "x")
    for name, message in (
        ("gone", "no such file"),
        ("utf16", "not UTF-8"),
        (".", "is a folder; name the file"),
        ("packed", "is a compressed file; unpack it"),
        ("zipped", "is a compressed file; unpack it"),
    ):
        with pytest.raises(UserError, match=message):
            read_text(tmp_path / name)


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_links_lead_out_of_the_image_folder_only_where_that_is_allowed(tmp_path, load, picture, linked):
    picture(tmp_path / "secret" / "a.png", 77)
    (tmp_path / "data" / "inside").mkdir(parents=True)
    picture(tmp_path / "data" / "real.png", 5)
    if linked == "file":
        (tmp_path / "data" / "inside" / "a.png").symlink_to(tmp_path / "secret" / "a.png")
    else:
        (tmp_path / "data" / "inside").rmdir()
        (tmp_path / "data" / "inside").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "near.png").symlink_to("real.png")
    (tmp_path / "mounted").symlink_to(tmp_path / "data")  # the folder itself may be a link
    table = tmp_path / "data" / "captions.jsonl"
    table.write_text('{"image": "near.png", "caption": "x"}')
    assert load("folder", tmp_path / "mounted").pixels[:, 0, 0, 0].tolist() == [5]
    table.write_text('{"image": "near.png", "caption": "x"}\n{"image": "inside/a.png", "caption": "y"}')
    with pytest.raises(UserError, match=r"line 2: a link leads from .*inside/a\.png to .*secret/a\.png.*follow_links"):
        load("folder", tmp_path / "mounted")
    assert load("folder", tmp_path / "mounted", follow_links=True).pixels[:, 0, 0, 0].tolist() == [5, 77]


def test_half_a_character_in_a_path_is_one_line(tmp_path, load):
    (tmp_path / "captions.jsonl").write_text('{"image": "\\ud800.png", "caption": "x"}')
    with pytest.raises(UserError, match=r"line 1: image: '\\ud800\.png' holds half a character"):
        load("folder", tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\u202eb", "a\u2028b", "\ud800"])
def test_ids_and_sites_that_would_break_a_list_or_steer_a_terminal_are_refused(tmp_path, load, picture, name):
    picture(tmp_path / "a.png")
    for column, problem in (("id", "id"), ("site", "site")):
        row = {"image": "a.png", "caption": "x", column: name}
        (tmp_path / "captions.jsonl").write_text(json.dumps(row))
        with pytest.raises(
            UserError, match=rf"line 1: {problem}.*(control characters or line breaks|half a char)"
        ) as caught:
            load("folder", tmp_path)
        assert not set(name) & set("\n\x1b\u202e\u2028\ud800") & set(str(caught.value))


def test_the_list_of_unreadable_images_has_one_line_each(tmp_path, load, picture):
    for number in range(20):
        picture(tmp_path / f"{number}.png")
    rows = [{"image": f"{number}.png", "caption": "x"} for number in range(20)]
    rows.append({"image": "a\n\x1b[31m.png", "id": "odd", "caption": "x"})
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (listing,) = load("folder", tmp_path).report.listings[:1]
    (line,) = listing.read_text().splitlines()
    assert line == rf"{tmp_path}/a\n\x1b[31m.png (No such file or directory)"
