"""Data sets that the `datasets` library saved: its files are written here with pyarrow, in the same layout."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ease.data.rows import split_by_id
from ease.errors import UserError

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture
def shades(tmp_path, picture):
    """A table of pictures by shade, with the image column as the library keeps it."""

    def table(*values: int, **columns) -> pa.Table:
        images = [{"bytes": picture(tmp_path / "one.png", value).read_bytes(), "path": None} for value in values]
        return pa.table({"image": pa.array(images, IMAGE), **columns})

    return table


def save_to_disk(folder, *tables: pa.Table) -> None:
    """One data set of several files, as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1670f1a8", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_data_set_with_splits(load, tmp_path, shades):
    saved = tmp_path / "saved"
    save_to_disk(saved / "train", shades(10, 20, caption=[["a", "b"], ["c"]]))
    save_to_disk(saved / "validation", shades(30, caption=[["d"]]))
    save_to_disk(saved / "test", shades(40, 50, caption=[["e"], []]))
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    pairs = load("hf", saved)
    found = dict(zip(pairs.ids, pairs.pixels[:, 0, 0, 0].tolist(), strict=True))
    assert found == {"test/000000": 40, "train/000000": 10, "train/000001": 20, "validation/000000": 30}
    assert all(split == pair_id.split("/")[0] for pair_id, split in zip(pairs.ids, pairs.splits, strict=True))
    assert pairs.captions[pairs.ids.index("train/000000")] == ("a", "b", "a", "b", "a")
    assert pairs.report.without_caption == 1


def test_one_data_set_in_several_files_in_their_order(load, tmp_path, shades):
    save_to_disk(tmp_path / "saved", shades(10, id=["x"], text=["one"]), shades(20, id=["y"], text=["two"]))
    pairs = load("hf", tmp_path / "saved")
    assert pairs.ids == ("x", "y") and pairs.splits == tuple(split_by_id(pair_id, 0.2) for pair_id in "xy")
    assert [captions[0] for captions in pairs.captions] == ["one", "two"]
    assert pairs.pixels[:, 0, 0, 0].tolist() == [10, 20]


def test_a_split_column_counts_where_the_files_name_none(load, tmp_path, shades):
    save_to_disk(tmp_path / "saved", shades(10, 20, text=["one", "two"], split=["test", "train"]))
    assert load("hf", tmp_path / "saved").splits == ("test", "train")


def test_a_split_column_counts_more_than_the_name_of_the_only_file(load, tmp_path, shades):
    """As Flickr30K is passed on: all splits in one file called TEST. A row that names none is of the file's split."""
    (tmp_path / "set").mkdir()
    table = shades(10, 20, 30, caption=["one", "two", "three"], split=["train", "val", None])
    pq.write_table(table, tmp_path / "set" / "TEST-00000-of-00001.parquet")
    pairs = load("hf", tmp_path / "set")
    assert pairs.ids == ("000000", "000001", "000002") and pairs.splits == ("train", "validation", "test")


@pytest.mark.parametrize("inside", [".", "data"])
def test_parquet_files_named_by_split(load, tmp_path, shades, inside):
    folder = tmp_path / "set" / inside
    folder.mkdir(parents=True)
    pq.write_table(shades(10, text=["one"]), folder / "train-00000-of-00002.parquet")
    pq.write_table(shades(20, text=["two"]), folder / "train-00001-of-00002.parquet")
    pq.write_table(shades(30, text=["three"]), folder / "test-00000-of-00001.parquet")
    pairs = load("hf", tmp_path / "set")
    assert pairs.ids == ("test/000000", "train/000000", "train/000001")
    assert pairs.pixels[:, 0, 0, 0].tolist() == [30, 10, 20] and pairs.splits == ("test", "train", "train")


def test_images_are_not_copied_into_memory(tmp_path, shades):
    from ease.data.readers.hf import hf_rows

    save_to_disk(tmp_path / "saved", shades(10, text=["one"]))
    before = pa.total_allocated_bytes()
    rows = list(hf_rows(tmp_path / "saved"))
    assert isinstance(rows[0].image, memoryview) and pa.total_allocated_bytes() == before


def test_invalid_saved_data_sets_are_refused(load, tmp_path, shades):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: no saved data set here"):
        load("hf", tmp_path / "empty")
    with pytest.raises(UserError, match="gone: no such folder"):
        load("hf", tmp_path / "gone")
    save_to_disk(tmp_path / "odd" / "unlabelled", shades(10, text=["one"]))
    with pytest.raises(UserError, match="odd: unknown split 'unlabelled'"):
        load("hf", tmp_path / "odd")


def test_damaged_files(load, tmp_path, shades):
    save_to_disk(tmp_path / "saved", shades(10, text=["one"]))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow: damaged"):
        load("hf", tmp_path / "saved")
    file.unlink()
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow: no such file"):
        load("hf", tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json: key `_data_files`"):
        load("hf", tmp_path / "saved")


def test_sites_in_a_column(load, tmp_path, shades):
    save_to_disk(tmp_path / "saved" / "train", shades(10, 20, text=["one", "two"], site=["north", "south"]))
    save_to_disk(tmp_path / "saved" / "test", shades(30, text=["three"], mood=["calm"]))
    pairs = load("hf", tmp_path / "saved")
    found = dict(zip(pairs.ids, pairs.sites, strict=True))
    assert found == {"test/000000": None, "train/000000": "north", "train/000001": "south"}
    assert pairs.report.unused_columns == ("mood",)


@pytest.mark.parametrize("how", ["up", "absolute", "link", "number", "nothing"])
def test_a_saved_data_set_names_only_files_of_its_own_folder(load, tmp_path, shades, how):
    save_to_disk(tmp_path / "secret", shades(10, text=["one"]))
    save_to_disk(tmp_path / "saved", shades(20, text=["two"]))
    (outside,) = (tmp_path / "secret").glob("*.arrow")
    (tmp_path / "saved" / "link.arrow").symlink_to(outside)
    named = {
        "up": f"../secret/{outside.name}",
        "absolute": str(outside),
        "link": "link.arrow",
        "number": 3,
        "nothing": "",
    }
    (tmp_path / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": named[how]}]}))
    with pytest.raises(UserError, match=r"state\.json: .* is not a file of this folder"):
        load("hf", tmp_path / "saved")


def test_a_pipe_is_not_a_table(load, tmp_path):
    (tmp_path / "set").mkdir()
    os.mkfifo(tmp_path / "set" / "train-0.parquet")
    with pytest.raises(UserError, match=r"train-0\.parquet: .*Not a regular file"):
        load("hf", tmp_path / "set")
