"""Every reader against arbitrary bytes and altered files: a value or one line for the user, and nothing else."""

import copy
import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ease.audit.records import AuditRecord
from ease.config import validate
from ease.data.config import DataConfig, load_pairs
from ease.data.images import decode_image
from ease.data.membership import Membership
from ease.errors import UserError
from ease.federation.codec import decode_job, decode_state, decode_update, encode_job, encode_state, encode_update
from ease.federation.fedavg import Round
from ease.federation.history import History
from ease.federation.lock import LockMessage
from ease.federation.protocol import LocalJob, Optimiser, Replay, Update
from ease.model.peft import Adapter, read_adapter, write_adapter
from ease.params import Block, Params
from ease.requests.request import SampleRequest
from ease.runs.config import load_config
from ease.runs.head import read_head
from ease.runs.records import AnswerRecord, read_record
from ease.runs.resolve import read_ids
from ease.runs.run import Run
from ease.storage import BLANK, SEAL, read_json, read_noted, read_tensors, write_json, write_tensors
from ease.studies.records import BenchResults
from ease.subspace import Basis, load_bases, save_bases

WEIRD = (
    None, True, -1, 0, 2**31, 2**63, -(2**70), 1e308, 0.5, "", ".", "..", "/", "\0", "\ud800", "a\n\x1b[31m",
    "9" * 4400, [], {}, [[]], [None], {"": None}, {"a": {"a": []}}, "x" * 5000, float("nan"), float("inf"),
)  # fmt: skip
quick = settings(
    derandomize=True,  # the same files each time, more of them among slow tests
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
long = settings(quick, max_examples=500)


# --- how a file is altered ---


def alter_bytes(valid: bytes, rng: random.Random) -> bytes:
    """One to three of: a bit flipped, a part cut out, doubled, overwritten, or the end cut off."""
    content = bytearray(valid)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.choice((1, 2, 8, 100)))
        what = rng.randrange(5)
        if what == 0 and start < len(content):
            content[start] ^= 1 << rng.randrange(8)
        elif what == 1:
            del content[start:stop]
        elif what == 2:
            content[start:start] = content[start:stop]
        elif what == 3:
            content[start:stop] = rng.randbytes(stop - start)
        else:
            del content[start:]
    return bytes(content)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a nested value something could stand instead."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(found for key in keys for found in places(value[key], (*path, key)))]


def alter_value(valid: Any, rng: random.Random) -> Any:
    """A nested value with something strange in one or two places, or a key that is gone."""
    value = copy.deepcopy(valid)
    for _ in range(rng.randint(1, 2)):
        *path, last = rng.choice(places(value)[1:]) if len(places(value)) > 1 else [None]
        if last is None:
            return rng.choice(WEIRD)
        holder = value
        for key in path:
            holder = holder[key]
        if rng.random() < 0.25:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(rng.choice(WEIRD))
    return value


@dataclass(frozen=True)
class Reader:
    """A reader of files, a valid folder for it, and the file in it that is altered."""

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    file: str
    dump: Callable[[Any], str] | None = None
    """How a nested value is written, where the file is one; then single values are altered too."""

    def altered(self, valid: bytes, number: int) -> bytes:
        rng = random.Random(number)
        if self.dump is None or rng.random() < 0.4:
            return alter_bytes(valid, rng) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200))
        if self.file.endswith(".toml"):
            import tomllib

            loaded = tomllib.loads(valid.decode())
        else:
            loaded = (
                [json.loads(line) for line in valid.decode().splitlines()]
                if self.file.endswith("l")
                else json.loads(valid)
            )
        try:
            return self.dump(alter_value(loaded, rng)).encode(errors="surrogatepass")
        except (TypeError, ValueError):  # what the format has no word for
            return alter_bytes(valid, rng)


def sealed_again(content: bytes) -> bytes:
    """The same with a seal that fits, where it has one: strangers can compute hashes too."""
    blank = SEAL.sub(BLANK, content, count=1)
    return blank.replace(BLANK, b"sha256:" + hashlib.sha256(blank).hexdigest().encode(), 1)


def lines(value: Any) -> str:
    return "\n".join(map(json.dumps, value)) if isinstance(value, list) else json.dumps(value)


# --- valid files ---

BLOCKS = (
    Block("image.p", "image", "projector", ("image.p.weight",)),
    Block("text.p", "text", "projector", ("text.p.w",)),
)


def state() -> Params:
    return Params({"image.p.weight": torch.arange(6.0).view(2, 3), "text.p.w": torch.ones(4)}, BLOCKS)


def pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (number * 50, 0, 0)).save(folder / f"{number}.png")


def karpathy(folder: Path) -> None:
    pictures(folder / "images")
    entries = [
        {"filename": f"{n}.png", "split": "train", "filepath": "", "client": "a", "sentences": [{"raw": "a dog"}]}
        for n in range(4)
    ]
    (folder / "set.json").write_text(json.dumps({"images": entries}))


def coco(folder: Path) -> None:
    pictures(folder / "part")
    named = [{"id": n, "file_name": f"{n}.png"} for n in range(4)]
    reported = [{"image_id": n, "caption": "a dog"} for n in range(4)]
    (folder / "captions_part.json").write_text(json.dumps({"images": named, "annotations": reported}))


def textcaps(folder: Path) -> None:
    pictures(folder)
    entries = [
        {"image_path": f"{n}.png", "image_id": str(n), "caption_str": "a dog", "set_name": "x"} for n in range(4)
    ]
    (folder / "set.json").write_text(json.dumps({"data": entries}))


def rows() -> list[dict[str, Any]]:
    return [{"image": f"{n}.png", "captions": ["a dog", "b"], "split": "train", "site": "s", "id": n} for n in range(4)]


def jsonl(folder: Path) -> None:
    pictures(folder)
    (folder / "captions.jsonl").write_text(lines(rows()))


def comma(folder: Path) -> None:
    pictures(folder)
    reported = [f'{n}.png,"[""a dog"", ""b""]",train,{n}' for n in range(4)]
    (folder / "captions.csv").write_text("\n".join(["image,captions,split,id", *reported]))


def parquet(folder: Path) -> None:
    pictures(folder)
    pq.write_table(pa.Table.from_pylist(rows()), folder / "captions.parquet")


def saved(folder: Path) -> None:
    folder.mkdir()
    table = pa.Table.from_pylist([{"image": {"bytes": b"x", "path": None}, "text": "a dog"}])
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def pairs(name: str, file: str = "") -> Callable[[Path], object]:
    return lambda folder: load_pairs(
        validate(DataConfig, {"name": name, "path": str(folder / file) if file else str(folder)}, "test"), 4
    )


def toml(folder: Path) -> None:
    folder.mkdir()
    config = load_config(None).model_dump(mode="json", exclude_none=True)
    (folder / "c.toml").write_text(tomli_w.dumps(config))


def run(folder: Path) -> None:
    folder.mkdir()
    Run.create(folder / "run", load_config(None))


def whole(name: str, value: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        write_json(folder / name, value)

    return make


def adapter(folder: Path) -> None:
    folder.mkdir()
    write_adapter(folder, Adapter(2.0, {"vision_model.x": (torch.ones(2, 3), torch.ones(4, 2))}), "some/model")


def params(folder: Path) -> None:
    folder.mkdir()
    state().save(folder / "a.safetensors")


def bases(folder: Path) -> None:
    folder.mkdir()
    save_bases(folder / "a.safetensors", {"image.p": Basis(torch.ones(6, 1), torch.eye(1), torch.ones(1))})


def tensors(folder: Path) -> None:
    folder.mkdir()
    write_tensors(folder / "a.safetensors", {"a": torch.ones(3, 2), "b": torch.zeros(0, 4, dtype=torch.int8)}, {"x": 1})


def history(folder: Path) -> None:
    written = History(folder, durable=False)
    state().save(written.initial_path)
    written.append(Round(1, state(), (Update(3, 5, state()),)))


def read_history(folder: Path) -> object:
    read = History(folder)
    read.verify()
    return read.columns(read.rounds()), [(read.start(1), read.update(1, client)) for client in read.clients(1)]


def ids(folder: Path) -> None:
    folder.mkdir()
    (folder / "ids.txt").write_text("a\nb\n")


ANSWER = {
    "format": 2,
    "request": {"scope": "client", "clients": [8]},
    "method": {"method": "ease"},
    "trained_sha256": "0",
    "seed": 0,
    "resumed": False,
    "rounds": [{"round": 0, "phase": "excision", "loss": None, "metrics": {"forget/recall@1": 18.0}}],
    "metrics": {"forget/recall@1": 23.0},
}
HEAD = {
    "format": 1,
    "releases": [
        {"request": {"scope": "sample", "ids": ["a"]}, "answer": "x/y", "model_sha256": "0", "after_round": 2}
    ],
}
HOLDING = {
    "client": 0,
    "name": "n",
    "train_ids": ["a"],
    "train_classes": [0],
    "validation_ids": [],
    "validation_classes": [],
}
MEMBERS = {"format": 1, "clients": [HOLDING], "test": ["b"], "validation": [], "digests": {"a": "0", "b": "1"}}
READERS = {
    "karpathy": Reader(karpathy, pairs("karpathy", "set.json"), "set.json", json.dumps),
    "coco": Reader(coco, pairs("coco", "captions_part.json"), "captions_part.json", json.dumps),
    "textcaps": Reader(textcaps, pairs("textcaps", "set.json"), "set.json", json.dumps),
    "jsonl": Reader(jsonl, pairs("folder"), "captions.jsonl", lines),
    "csv": Reader(comma, pairs("folder"), "captions.csv"),
    "parquet": Reader(parquet, pairs("folder"), "captions.parquet"),
    "saved state": Reader(saved, pairs("hf"), "state.json", json.dumps),
    "saved table": Reader(saved, pairs("hf"), "data.arrow"),
    "picture": Reader(jsonl, pairs("folder"), "2.png"),
    "toml": Reader(toml, lambda folder: load_config(folder / "c.toml"), "c.toml", tomli_w.dumps),
    "run": Reader(run, lambda folder: Run.load(folder / "run"), "run/run.json", json.dumps),
    "answer": Reader(
        whole("record.json", ANSWER), lambda f: read_record(AnswerRecord, f / "record.json"), "record.json", json.dumps
    ),
    "audit": Reader(
        whole("audit.json", {"format": 2}),
        lambda f: read_record(AuditRecord, f / "audit.json"),
        "audit.json",
        json.dumps,
    ),
    "results": Reader(
        whole("r.json", {"format": 2, "rows": []}),
        lambda f: read_record(BenchResults, f / "r.json"),
        "r.json",
        json.dumps,
    ),
    "head": Reader(whole("head.json", HEAD), lambda folder: read_head(folder / "head.json"), "head.json", json.dumps),
    "membership": Reader(
        whole("m.json", MEMBERS),
        lambda f: validate(Membership, read_json(f / "m.json"), "m.json"),
        "m.json",
        json.dumps,
    ),
    "adapter settings": Reader(adapter, read_adapter, "adapter_config.json", json.dumps),
    "adapter weights": Reader(adapter, read_adapter, "adapter_model.safetensors"),
    "params": Reader(params, lambda folder: Params.load(folder / "a.safetensors"), "a.safetensors"),
    "bases": Reader(bases, lambda folder: load_bases(folder / "a.safetensors"), "a.safetensors"),
    "tensors": Reader(tensors, lambda folder: read_tensors(folder / "a.safetensors"), "a.safetensors"),
    "note": Reader(tensors, lambda folder: read_noted(folder / "a.safetensors"), "a.safetensors"),
    "history": Reader(history, read_history, "rounds/00001/round.json", json.dumps),
    "ids": Reader(ids, lambda folder: read_ids(folder / "ids.txt"), "ids.txt"),
}
"""All that reads a file a stranger may have written."""


def check_reader(reader: Reader, folder: Path, number: int) -> None:
    """The altered file is read to a value, or refused in one line that names it."""
    if not folder.exists():
        reader.make(folder)
        (folder / "valid").write_bytes((folder / reader.file).read_bytes())
        reader.read(folder) if reader.file not in ("data.arrow", "state.json", "audit.json", "r.json") else None
    altered = reader.altered((folder / "valid").read_bytes(), number)
    (folder / reader.file).write_bytes(altered if number % 4 == 0 else sealed_again(altered))
    try:
        reader.read(folder)
    except UserError as error:
        assert str(error)


every_reader = pytest.mark.parametrize("name", READERS)
numbers = st.integers(0, 2**32)


@every_reader
@given(number=numbers)
@quick
def test_a_file_of_a_stranger_is_read_or_refused(tmp_path: Path, name: str, number: int) -> None:
    check_reader(READERS[name], tmp_path / "made", number)


@pytest.mark.slow
@every_reader
@given(number=numbers)
@long
def test_many_files_of_strangers_are_read_or_refused(tmp_path: Path, name: str, number: int) -> None:
    check_reader(READERS[name], tmp_path / "made", number)


# --- messages ---


def messages() -> dict[str, tuple[Callable[[bytes], object], bytes]]:
    """A decoder of each kind of message and a valid one; what a job refers to comes with it unaltered."""
    optimiser = Optimiser(learning_rate=0.1)
    lock = LockMessage(0.25, state())
    job = LocalJob(
        round=1, seed=0, stream="x", optimiser=optimiser, epochs=1, batch_size=2, temperature=0.1,
        request=SampleRequest(ids=("a",)), lock=lock, replays=(Replay(1, state(), 0.5, 0, (3,)),), inbox={3: b"letter"},
    )  # fmt: skip
    sent, parts = encode_job(job, state())
    update = Update(3, 5, state(), {"loss": torch.tensor(1.0)})
    return {
        "state": (decode_state, encode_state(state())),
        "update": (decode_update, encode_update(update)),
        "lock": (LockMessage.decode, lock.encode()),
        "job": (lambda data: decode_job(data, parts), sent),
    }


def check_message(name: str, number: int) -> None:
    decode, valid = messages()[name]
    rng = random.Random(number)
    try:
        decode(alter_bytes(valid, rng) if rng.random() < 0.9 else rng.randbytes(rng.randrange(300)))
    except UserError as error:
        assert "\n" not in str(error)


every_message = pytest.mark.parametrize("name", ["state", "update", "lock", "job"])


@every_message
@given(number=numbers)
@settings(quick, max_examples=100)
def test_a_message_of_a_stranger_is_read_or_refused(name: str, number: int) -> None:
    check_message(name, number)


@pytest.mark.slow
@every_message
@given(number=numbers)
@settings(quick, max_examples=2000)
def test_many_messages_of_strangers_are_read_or_refused(name: str, number: int) -> None:
    check_message(name, number)


# --- headers that lie ---


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}},
        {"a": 3},
        [],
    ],
)
@pytest.mark.parametrize("length", [None, 2**63, 2**31, 3])
def test_a_false_safetensors_header_is_one_line(tmp_path: Path, header: object, length: int | None) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(8))
    for read in (read_tensors, Params.load):
        try:
            found = read(tmp_path / "a")
        except UserError as error:
            assert str(tmp_path / "a") in str(error)
        else:
            assert read is read_tensors and sum(t.numel() * t.element_size() for t in found.values()) <= 8


@pytest.mark.parametrize("read", [read_json, read_tensors, read_noted, read_ids, Params.load])
def test_pipes_and_devices_are_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="Not a regular file"):
            read(path)


def test_files_that_should_be_small_are_not_read_when_they_are_large(tmp_path: Path) -> None:
    """Sparse files: a terabyte by its size, nothing on the disk, and no memory for it either."""
    for name in ("run.json", "head.json", "adapter_config.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    for read in (Run.load, read_adapter, lambda folder: read_head(folder / "head.json")):
        with pytest.raises(UserError, match=r"1,099,511,627,776 bytes, and at most 16,777,216 are read"):
            read(tmp_path)


@pytest.mark.parametrize("start", ["../secret.safetensors", "/etc/passwd"])
def test_a_round_begins_from_a_file_of_its_own_run(tmp_path: Path, start: str) -> None:
    history(tmp_path / "run")
    path = tmp_path / "run" / "rounds" / "00001" / "round.json"
    write_json(path, {**read_json(path), "start": start})
    with pytest.raises(UserError, match=r"round\.json: not the record of a round"):
        History(tmp_path / "run").start(1)


def test_the_alterations_reach_every_kind_of_end() -> None:
    """A fuzzer that breaks every file at its first byte would test nothing else."""
    rng = random.Random(0)
    found = [alter_value(HEAD, rng) for _ in range(200)]
    assert sum(value == HEAD for value in found) < 5
    refused = 0
    for value in found:
        try:
            validate(Membership, {**MEMBERS, "digests": value}, "x")
        except UserError:
            refused += 1
    assert 0 < refused <= 200
    assert np.mean([alter_bytes(b"x" * 100, random.Random(n))[:10] == b"x" * 10 for n in range(200)]) > 0.5


def test_pictures_of_arbitrary_bytes_raise_what_decoding_expects(tmp_path: Path) -> None:
    from ease.data.images import DECODER_ERRORS

    pictures(tmp_path)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "PPM"):
        Image.effect_noise((24, 24), 60).convert("RGB").save(tmp_path / "a", kind)
        valid = (tmp_path / "a").read_bytes()
        for number in range(25):
            with suppress(*DECODER_ERRORS), warnings.catch_warnings(action="ignore"):
                decode_image(memoryview(alter_bytes(valid, random.Random(number))), 8)
