"""Tables of one's own: JSONL, CSV and Parquet say the same, and every way they can be wrong."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ease.data.rows import split_by_id
from ease.errors import UserError


@pytest.fixture
def folder(tmp_path, picture):
    for shade, name in enumerate(("a.png", "b.jpg", "sub/a.png", "ünï 图.png")):
        picture(tmp_path / "data" / name, shade * 20)
    return tmp_path / "data"


@pytest.fixture
def jsonl(folder, load):
    def read(*lines, **settings):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / "captions.jsonl").write_text(text, encoding="utf-8")
        return load("folder", folder, **settings)

    return read


@pytest.fixture
def csv(folder, load):
    def read(text: str, encoding: str = "utf-8", **settings):
        (folder / "list.csv").write_text(text, encoding=encoding, newline="")
        return load("table", folder / "list.csv", **settings)

    return read


@pytest.fixture
def parquet(folder, load):
    def read(columns: dict, **settings):
        pq.write_table(pa.table(columns), folder / "list.parquet")
        return load("table", folder / "list.parquet", **settings)

    return read


# --- what a table may say ---


def test_a_share_of_the_images_is_chosen_by_their_ids(jsonl):
    lines = [{"image": "a.png", "caption": "words", "id": f"id-{number}"} for number in range(400)]
    half, tenth = (set(jsonl(*lines, share=share).ids) for share in (0.5, 0.1))
    assert 160 < len(half) < 240 and 20 < len(tenth) < 60 and tenth < half
    fewer = [line for line in lines if line["id"] not in sorted(half)[:7]]
    assert set(jsonl(*fewer, share=0.5).ids) == half - set(sorted(half)[:7]), "what goes changes no other choice"


def test_everything_a_line_may_say(jsonl):
    pairs = jsonl(
        {"image": "a.png", "caption": "ein Hündchen", "split": "val"},
        "",
        {"file_name": "sub/a.png", "captions": ["one", "two"], "split": "test", "id": "mine"},
        {"image": "b.jpg", "text": "words", "id": 17},
        {"image": "ünï 图.png", "caption_10": "last", "caption_2": "second", "caption_0": "first"},
        "",
    )
    assert pairs.ids == ("a", "mine", "17", "ünï 图")
    assert pairs.captions[:3] == (("ein Hündchen",) * 5, ("one", "two", "one", "two", "one"), ("words",) * 5)
    assert pairs.captions[3][:3] == ("first", "second", "last")
    assert pairs.splits == ("validation", "test", split_by_id("17", 0.2), split_by_id("ünï 图", 0.2))
    assert pairs.pixels[:, 0, 0, 0].tolist() == [0, 40, 20, 60]


def test_default_ids_keep_subfolders_apart(jsonl):
    pairs = jsonl({"image": "a.png", "caption": "x"}, {"image": "sub/a.png", "caption": "y"})
    assert pairs.ids == ("a", "sub/a")


def test_all_kinds_of_table_give_the_same_pairs(jsonl, csv, parquet):
    """One image with two captions, one without a split, and an empty cell; the fingerprint covers all of it."""
    lines = [
        {"image": "a.png", "captions": ["a dog, running", 'a "hound"'], "split": "test"},
        {"image": "b.jpg", "captions": ["two\nlines", ""], "split": None},
    ]
    expected = jsonl(*lines)
    assert expected.report.blank_captions == 1
    rows = ['a.png,"[""a dog, running"", ""a \\""hound\\""""]",test', 'b.jpg,"[""two\\nlines"", """"]",']
    from_csv = csv("\r\n".join(["image,captions,split", *rows]))
    from_parquet = parquet({key: [line[key] for line in lines] for key in lines[0]})
    assert from_csv.captions == from_parquet.captions == expected.captions
    assert from_csv.fingerprint == from_parquet.fingerprint == expected.fingerprint
    assert from_csv.report == from_parquet.report == expected.report


def test_a_line_for_each_caption(csv):
    pairs = csv("image,caption\na.png,one\nb.jpg,x\na.png,two\na.png,\n")
    assert pairs.ids == ("a", "b") and pairs.captions[0] == ("one", "two", "one", "two", "one")
    assert (pairs.report.joined, pairs.report.blank_captions) == (2, 1)


def test_csv_as_spreadsheets_write_it(csv):
    """Byte order mark, Windows line ends, quotes, a line break inside a cell, and U+2028, which ends no line."""
    pairs = csv('image,caption\r\na.png,"two ""odd""\r\nlines"\r\n\r\nb.jpg,one\u2028two\r\n', "utf-8-sig")
    assert [captions[0] for captions in pairs.captions] == ['two "odd"\nlines', "one\u2028two"]


def test_csv_headers_as_people_write_them(csv):
    pairs = csv("Image, Caption\na.png, x\n")
    assert pairs.ids == ("a",) and pairs.captions[0][0] == "x"


def test_a_caption_column_that_holds_nothing_gives_way_to_the_next(jsonl):
    pairs = jsonl({"image": "a.png", "captions": None, "caption": "x", "split": ""})
    assert pairs.captions[0][0] == "x" and pairs.splits == (split_by_id("a", 0.2),)


def test_absolute_paths_inside_the_image_folder(jsonl, folder):
    assert jsonl({"image": str(folder / "sub" / "a.png"), "caption": "x"}).ids == ("sub/a",)


def test_a_caption_that_only_looks_like_a_list(csv):
    assert csv("image,caption\na.png,[sic] a dog\n").captions[0][0] == "[sic] a dog"


def test_jsonl_with_byte_order_mark_and_windows_line_ends(folder, load):
    line = json.dumps({"image": "a.png", "caption": "x"})
    (folder / "captions.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n")
    assert load("folder", folder).ids == ("a",)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_parquet_with_images_inside(parquet, folder, kind):
    content = [(folder / name).read_bytes() for name in ("b.jpg", "a.png")]
    plain = parquet({"image": pa.array(content, kind), "caption": ["x", "y"]})
    assert plain.ids == ("row-000000", "row-000001") and plain.pixels[:, 0, 0, 0].tolist() == [20, 0]
    struct = pa.struct([("bytes", kind), ("path", pa.string())])
    values = [{"bytes": content[0], "path": "/home/x/one.jpg"}, {"bytes": None, "path": "sub/a.png"}]
    both = parquet({"image": pa.array(values, struct), "caption": ["x", "y"]})
    assert both.ids == ("one", "sub/a") and both.pixels[:, 0, 0, 0].tolist() == [20, 40]


def test_images_elsewhere_and_a_second_table(folder, load, tmp_path):
    (tmp_path / "train.csv").write_text("image,caption,split\na.png,x,\nsub/a.png,x,val\n")
    (tmp_path / "test.csv").write_text("image,caption\nb.jpg,x\n")
    pairs = load("table", tmp_path / "train.csv", images=str(folder), test_path=str(tmp_path / "test.csv"))
    assert pairs.ids == ("a", "sub/a", "b") and pairs.splits == ("train", "validation", "test")


def test_an_unreadable_image_is_left_out_unless_the_user_is_strict(jsonl, folder, picture):
    """One of ten is a bad file; the setting reaches the reader."""
    (folder / "b.jpg").write_bytes(b"\xff\xd8 broken")
    others = [picture(folder / f"{number}.png", number).name for number in range(9)]
    lines = [{"image": name, "caption": "x"} for name in ("b.jpg", *others)]
    assert jsonl(*lines).ids == tuple(map(str, range(9)))
    with pytest.raises(UserError, match=r"cannot read 1 of 10 images.*data\.strict = false"):
        jsonl(*lines, strict=True)


# --- mistakes ---

GOOD = {"image": "a.png", "caption": "x"}
BAD_LINES = [
    ("", "no images"),
    ("{", "line 1: damaged JSON"),
    ("[1]", "line 1: must be a JSON object, not list"),
    ({"caption": "x"}, r"line 1: `image` or `file_name` is missing.*\(there is: caption\)"),
    ({"image": None, "caption": "x"}, "line 1: `image` or `file_name` is missing"),
    ({"image": "", "caption": "x"}, "line 1: image: must be the path of an image"),
    ({"image": {"bytes": None, "path": None}, "caption": "x"}, "line 1: image: must be the path of an image"),
    ({"image": "../a.png", "caption": "x"}, "line 1: image: '../a.png' leaves the image folder"),
    ({"image": "/etc/a.png", "caption": "x"}, "leaves the image folder"),
    ({"image": "gone.png", "caption": "x"}, "cannot read 1 of 1 images: .*gone.png"),
    ({"image": "a.png"}, "line 1: needs either"),
    ({"image": "a.png", "captions": ["x", 3]}, r"line 1: captions\[1\]: a caption must be text, not int"),
    ({"image": "a.png", "caption": {"x": 1}}, "a caption must be text, not dict"),
    (GOOD | {"split": "training"}, "line 1: split: unknown split 'training'"),
    (GOOD | {"id": 4.5}, "line 1: id: must be text"),
    (GOOD | {"id": True}, "line 1: id: must be text"),
    (GOOD | {"id": " "}, "line 1: id: must be text"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_errors_name_the_line(jsonl, line, message):
    with pytest.raises(UserError, match=message) as caught:
        jsonl(line)
    assert "data" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "image,caption\na.png,a dog, running\n",
            "line 2: more cells than columns; put captions with commas in quotes",
        ),
        ("image,caption\na.png,x\n,y\n", "line 3: `image` or `file_name` is missing"),
        ("picture,caption\na.png,x\n", r"`image` or `file_name` is missing.*there is: picture, caption"),
        ('image,caption\na.png,"open\n', "not valid CSV"),
        ('image,"caption\na.png,x\n', "not valid CSV"),
        ("image;caption\na.png;x\n", "its columns are parted by ';'; save it with commas"),
        ("image\na.png\n", "line 2: needs either"),
        ("image,caption\n", "no images listed"),
        ("", "no images listed"),
    ],
)
def test_errors_name_the_line_of_csv(csv, text, message):
    with pytest.raises(UserError, match=message) as caught:
        csv(text)
    assert "list.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_that_ends_early_has_no_caption(csv):
    pairs = csv("image,caption\na.png\nb.jpg,x\n")
    assert pairs.ids == ("b",) and pairs.report.without_caption == 1


def test_damaged_parquet_and_missing_columns(folder, load, parquet):
    with pytest.raises(UserError, match=r"list\.parquet: row 0: `image` or `file_name` is missing.*there is: picture"):
        parquet({"picture": ["a.png"], "caption": ["x"]})
    (folder / "list.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"list\.parquet: damaged") as caught:
        load("table", folder / "list.parquet")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"gone\.parquet: no such file"):
        load("table", folder / "gone.parquet")


def test_without_pyarrow_the_extra_is_named(parquet, folder, load, monkeypatch):
    parquet({"image": ["a.png"], "caption": ["x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError, match=r'list\.parquet: needs the tables extra: pip install "ease-unlearning\[tables\]"'
    ):
        load("table", folder / "list.parquet")


def test_folders_and_files_that_do_not_fit(tmp_path, folder, load, csv):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load("folder", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"captions\.jsonl: no such file; write one line"):
        load("folder", folder)
    with pytest.raises(UserError, match=r"a\.png: unknown kind of table; use one of: \.jsonl, \.csv, \.parquet"):
        load("table", folder / "a.png")
    (folder / "captions.jsonl").write_text("")
    (folder / "captions.csv").write_text("")
    with pytest.raises(UserError, match=r"holds captions\.jsonl and captions\.csv; keep one"):
        load("folder", folder)


# --- sites and columns that mean nothing ---


def test_all_kinds_of_table_name_the_same_sites(jsonl, csv, parquet):
    """Numbers are taken as text; in Parquet a column of whole numbers with a gap is one of fractions."""
    lines = [
        {"image": "a.png", "caption": "x", "split": "train", "client": 2, "year": 1999},
        {"image": "b.jpg", "caption": "y", "split": "test", "client": None, "year": None},
    ]
    read = [
        jsonl(*lines),
        csv("Image,Caption,Split,Client,Year\na.png,x,train,2,1999\nb.jpg,y,test,,\n"),
        parquet({key: [line[key] for line in lines] for key in lines[0]}),
        parquet({**{key: [line[key] for line in lines] for key in lines[0]}, "client": [2.0, None]}),
    ]
    assert {pairs.sites for pairs in read} == {("2", None)}
    assert len({pairs.fingerprint for pairs in read}) == 1
    assert {pairs.report.unused_columns for pairs in read} == {("year",)}
    assert {pairs.report.unused_site_columns for pairs in read} == {("client",)}


def test_columns_that_give_way_to_others_are_not_used_either(jsonl):
    """`text` beside `captions` in one row; in the other it is what is read, and `captions` holds nothing."""
    report = jsonl(
        {"image": "a.png", "captions": ["x"], "text": "y", "id": "1", "split": "train"},
        {"image": "b.jpg", "file_name": "b.jpg", "captions": None, "text": "z", "caption_0": "q"},
    ).report
    assert report.unused_columns == ("text", "file_name", "caption_0")


def test_numbered_captions_are_used(jsonl):
    assert jsonl({"image": "a.png", "caption_0": "x", "caption_1": "y", "mood": ""}).report.unused_columns == ("mood",)


def test_sites_as_clients_are_asked_of_a_table(folder, jsonl):
    from ease.config import validate
    from ease.data.config import DataConfig, load_pairs

    config = validate(DataConfig, {"name": "folder", "path": str(folder)}, "test")
    jsonl({"image": "a.png", "caption": "x", "photographer": "me"})
    with pytest.raises(
        UserError, match=r"data: partition.scheme = \"sites\" needs .*is: image, caption, photographer\)"
    ):
        load_pairs(config, 4, by_site=True)
    jsonl(
        {"image": "a.png", "caption": "x", "split": "train", "site": "A"},
        {"image": "b.jpg", "caption": "x", "split": "train"},
    )
    with pytest.raises(UserError, match=r"captions\.jsonl: line 2: `client` or `site` is blank"):
        load_pairs(config, 4, by_site=True)


@pytest.mark.slow
def test_a_parquet_file_that_unpacks_to_very_much_is_refused_before_it_has(tmp_path):
    """One caption of a megabyte, two thousand times: two gigabytes from a file of a few kilobytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ease.data.readers.arrow import parquet_entries

    captions = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), ["x" * (1 << 20)])
    table = pa.table({"image": ["a.png"] * 2000, "caption": captions})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False, compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(UserError, match=r"a\.parquet: unpacks to more than 100 times its size"):
        parquet_entries(tmp_path / "a.parquet")
    assert pa.default_memory_pool().max_memory() - before < 1 << 30
