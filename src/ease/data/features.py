"""Frozen activations of every pair, computed once per backbone and kept memory-mapped on disk."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ease.console import plain, with_progress
from ease.data.cache import cached
from ease.data.pairs import PairSet
from ease.data.report import count_cut
from ease.errors import UserError
from ease.model.backbones import Backbone, Tower
from ease.model.closed_form import one_thread
from ease.storage import cache_folder, digest, map_array, new_array, read_json, write_json

BATCH_PAIRS = 16
"""How many pairs a CPU encodes at once: few enough that the states between two layers stay in a core's cache."""
GPU_BATCHES = 8
"""So many of these at once on a GPU, which would wait for work otherwise."""
MARKER = "complete.json"


@dataclass(frozen=True)
class Activations:
    """fp32, memory-mapped; the first axis is the pair, in the order of the PairSet."""

    image: np.ndarray
    """[pairs, ...] states before block `first_image`."""
    text: np.ndarray
    """[pairs, 5, ...] states before block `first_text`."""
    text_mask: np.ndarray | None
    """bool [pairs, 5, tokens], True where a token is real; None when the states are pooled already."""
    pooled_image: np.ndarray
    """[pairs, image width] output of the complete frozen tower."""
    pooled_text: np.ndarray
    """[pairs, 5, text width] output of the complete frozen tower."""


def cached_activations(
    pairs: PairSet, backbone: Backbone, first_image: int, first_text: int, device: torch.device | str
) -> Activations:
    """Activations of all pairs from the cache, or computed now; the backbone must already be on `device`."""
    # The batch size is in the key because it decides the last bits.
    key = digest("activations", pairs.fingerprint, backbone.fingerprint, first_image, first_text, BATCH_PAIRS)
    folder = cache_folder() / "activations" / key
    make = partial(_compute, folder, pairs, backbone, first_image, first_text, device)
    return cached(partial(_open, folder), make)


def cached_cut(pairs: PairSet, backbone: Backbone) -> int:
    """How many captions the tokenizer cuts; kept, since counting them means to tokenise them all again."""
    path = cache_folder() / "activations" / f"cut-{digest(pairs.fingerprint, backbone.fingerprint)}.json"
    return cached(
        lambda: int(read_json(path)["cut"]), lambda: write_json(path, {"cut": count_cut(pairs.captions, backbone)})
    )


def _open(folder: Path) -> Activations:
    arrays = {name: map_array(folder / f"{name}.npy") for name in read_json(folder / MARKER)["arrays"]}
    return Activations(text_mask=arrays.pop("text_mask", None), **arrays)


def _compute(
    folder: Path, pairs: PairSet, backbone: Backbone, first_image: int, first_text: int, device: torch.device | str
) -> None:
    captions_each = len(pairs.captions[0])
    # One call for all captions gives all batches the same number of tokens.
    tokens = backbone.tokenize([caption for captions in pairs.captions for caption in captions])
    tokens = tokens.unflatten(0, (-1, captions_each))

    def images(rows: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(pairs.pixels[rows])).to(device)

    def captions(rows: np.ndarray) -> Tensor:
        return tokens[torch.from_numpy(rows)].flatten(0, 1).to(device)

    batch = BATCH_PAIRS * (1 if torch.device(device).type == "cpu" else GPU_BATCHES)
    written = _write_tower(folder, "image", backbone.image, first_image, images, len(pairs), (), batch)
    written += _write_tower(folder, "text", backbone.text, first_text, captions, len(pairs), (captions_each,), batch)
    # Last, so that a folder with this file is whole.
    pixels = Path(getattr(pairs.pixels, "filename", None) or "").stem
    write_json(folder / MARKER, {"arrays": written, "backbone": backbone.name, "pairs": len(pairs), "pixels": pixels})


def _write_tower(
    folder: Path,
    modality: str,
    tower: Tower,
    first: int,
    inputs: Callable[[np.ndarray], Tensor],
    pairs: int,
    per_pair: tuple[int, ...],
    batch: int,
) -> list[str]:
    """Run one frozen tower over all pairs and write its arrays; returns their names."""
    arrays: dict[str, np.ndarray] = {}
    starts = range(0, pairs, batch)
    workers = 1 if batch > BATCH_PAIRS else torch.get_num_threads()  # a GPU computes one batch after the other

    def encoded(start: int) -> dict[str, Tensor]:
        # The last batch is padded with the first pairs, because kernels can round otherwise for other batch sizes.
        # A pair's activations must not depend on how many others are encoded with it.
        rows = np.arange(start, start + batch) % pairs
        with torch.no_grad():
            states, mask = tower.prefix(inputs(rows), first)
            pooled = tower(states, mask, first)
        outputs = {modality: states.float(), f"pooled_{modality}": pooled.float()}
        return outputs if mask is None else {**outputs, f"{modality}_mask": mask.bool()}

    with ExitStack() as files:
        found = zip(starts, _each(encoded, starts, workers), strict=True)
        for start, outputs in with_progress(found, len(starts), f"Encoding {modality}s"):
            for name, output in outputs.items():
                values = output.reshape(-1, *per_pair, *output.shape[1:]).cpu().numpy()
                if name not in arrays:
                    shape = (pairs, *values.shape[1:])
                    arrays[name] = files.enter_context(new_array(folder / f"{name}.npy", shape, values.dtype))
                arrays[name][start : start + batch] = values[: pairs - start]
    return sorted(arrays)


def _each(
    encoded: Callable[[int], dict[str, Tensor]], starts: Sequence[int], workers: int
) -> Iterator[dict[str, Tensor]]:
    """Every batch in order, so many at once, each computed on one thread.

    Kernels add in another order on more threads, so that activations would depend on the machine's number of cores.
    """
    if workers == 1:
        yield from map(encoded, starts)
        return
    waiting = deque[Future[dict[str, Tensor]]]()
    with one_thread():
        yield from map(encoded, starts[:1])  # networks are loaded by the first batch
    with ThreadPoolExecutor(workers, "encode", partial(torch.set_num_threads, 1)) as pool:
        try:
            for start in starts[1:]:
                waiting.append(pool.submit(encoded, start))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(workers)  # threads that start later take the number that was set last


def cached_files(pairs: PairSet, activations: Activations, ids: Collection[str] = ()) -> Iterator[tuple[Path, str]]:
    """Files and folders of the cache that may hold some pairs, and what each is.

    The cache may have several versions of the same pictures, because each set of files that was opened has its own.
    Those of `ids` may be in another version than the one that is open, so every version that shares a picture counts.
    """
    pixels = getattr(pairs.pixels, "filename", None)
    gone = set[str]()
    if pixels is not None:
        for stem in _versions(Path(pixels).with_suffix("")):
            gone.add(stem.name)
            for path in sorted(stem.parent.glob(f"{stem.name}*")):
                yield path, "cached pictures, made again from those that are left"
        yield from ((path, "a list of odd pictures by their ids") for path in _lists(Path(pixels).parent, set(ids)))
    states = getattr(activations.image, "filename", None)
    if states is not None:
        own = Path(states).parent
        for folder in sorted({own, *(each for each in own.parent.iterdir() if _pixels_of(each) in gone)}):
            yield folder, "cached activations, made again from those that are left"
    for listing in pairs.report.listings if pairs.report else ():
        yield Path(listing), "ids of pictures that could not be read or are alike"


def _versions(stem: Path) -> list[Path]:
    """Cached sets of pictures that share one with the set at `stem`, itself included."""

    def pictures(record: Path) -> set[str]:
        try:
            return set(read_json(record)["digests"])
        except (FileNotFoundError, UserError, LookupError, TypeError):
            return set()  # another site of this machine may have deleted it; a damaged record is made again

    own = pictures(stem.with_suffix(".json"))
    found = [each for each in stem.parent.glob("*.json") if not own.isdisjoint(pictures(each))]
    return sorted({stem, *(each.with_suffix("") for each in found)})


def _lists(folder: Path, ids: Collection[str]) -> Iterator[Path]:
    """Lists in the cache that name some of the ids."""
    shown = [plain(each) for each in ids]
    for path in sorted(folder.glob("*.txt")) if ids else ():
        with suppress(FileNotFoundError):  # another site of this machine may have deleted it
            text = path.read_text(errors="replace")
            if any(each in text for each in shown):
                yield path


def _pixels_of(folder: Path) -> str:
    """The name of the cached pictures that activations were made of; empty if it is not known."""
    try:
        return str(read_json(folder / MARKER).get("pixels", ""))
    except (FileNotFoundError, UserError):
        return ""
