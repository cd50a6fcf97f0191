"""The served model: a run at its last release, or an exported model. Questions and answers are values."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ease.errors import UserError
from ease.operations.serving.messages import Facts
from ease.requests.tombstones import NAME as TOMBSTONES
from ease.runs.answers import find_answer, start_hash
from ease.runs.run import Run
from ease.runs.using import Hit, SearchModels, Source, encode_image, encode_text, gallery
from ease.storage import SMALL_JSON, read_bytes, sha256

FOLLOWED = ("head.json", TOMBSTONES)
"""Files of a run that say what it has forgotten."""


class Changing(UserError):
    """The served files have changed and cannot be opened at present: no question is answered until they can."""


@dataclass(frozen=True)
class Found:
    """What some words found, and the pixels that the hits' places count in."""

    hits: dict[str, list[Hit]]
    pixels: np.ndarray


class Served(Protocol):
    """Something that can be asked by one thread at a time, except for `facts`, which any thread may ask for."""

    def facts(self) -> Facts: ...

    def encode_text(self, texts: Sequence[str]) -> Tensor: ...

    def encode_image(self, content: memoryview, most_pixels: int) -> Tensor: ...

    def search(self, words: str, count: int, among: str) -> Found: ...

    @property
    def compares(self) -> bool:
        """Whether two models are asked, with forgotten pairs marked."""
        ...


class ServedExport:
    """A folder that `ease export` wrote: both encoders, and no pairs."""

    compares = False

    def __init__(self, folder: Path) -> None:
        self._source, self._hash = Source.of_export(folder), sha256(folder / "model.safetensors")

    def facts(self) -> Facts:
        source = self._source
        return Facts(
            model=self._hash,
            release=None,
            request=source.request,
            releases=0,
            pairs=0,
            backbone=source.config.model.backbone,
        )

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        return encode_text(self._source, texts)

    def encode_image(self, content: memoryview, most_pixels: int) -> Tensor:
        return encode_image(self._source, content, most_pixels)

    def search(self, words: str, count: int, among: str) -> Found:
        raise UserError("an export holds no pairs to search among: serve the run, or compare embeddings from /encode")


class ServedRun:
    """A run's model, or those before and after a request that is still open.

    Whenever a request was released or purged since the last question, the run is opened again first: what is forgotten
    is not found from that moment on. If it cannot be opened, nothing is answered.
    """

    def __init__(self, folder: Path, request: str | None) -> None:
        self._folder, self._request = folder, request
        self._opening = threading.Lock()
        self._stamp = self._read_stamp()
        self._opened = self._open()

    @property
    def compares(self) -> bool:
        return self._request is not None

    def _read_stamp(self) -> tuple[bytes | None, ...]:
        paths = [self._folder / name for name in FOLLOWED]
        return tuple(read_bytes(path, most=SMALL_JSON) if path.is_file() else None for path in paths)

    def _open(self) -> tuple[SearchModels, Facts]:
        run = Run.load(self._folder)
        head, releases = run.head.follows(run.history.rounds()), len(run.head.releases)
        if self._request is None:
            model = start_hash(run)
        else:
            stored, asked, _ = find_answer(run, self._request)
            if asked in run.head.gone:
                raise UserError(
                    f"{self._request} is released and its pairs are gone: serve {self._folder} without --request"
                )
            model = sha256(stored.model_path)
        compared = SearchModels.of(run, self._request)
        facts = Facts(
            model=model,
            release=head.answer if head is not None and self._request is None else None,
            request=self._request,
            releases=releases,
            pairs=len(gallery(compared.world)[0]),
            backbone=run.config.model.backbone,
        )
        return compared, facts

    def _now(self) -> tuple[SearchModels, Facts]:
        """The served model, opened again if the run has forgotten something since."""
        with self._opening:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                try:
                    self._opened = self._open()
                except UserError as error:
                    raise Changing(f"{error}; nothing is served until then") from error
                self._stamp = stamp
            return self._opened

    @property
    def _source(self) -> Source:
        """The later of the models."""
        compared, _ = self._now()
        return list(compared.sources.values())[-1]

    def facts(self) -> Facts:
        _, facts = self._now()
        return facts

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        return encode_text(self._source, texts)

    def encode_image(self, content: memoryview, most_pixels: int) -> Tensor:
        return encode_image(self._source, content, most_pixels)

    def search(self, words: str, count: int, among: str) -> Found:
        compared, _ = self._now()
        return Found(compared.search(words, count, among), compared.world.evaluator.pairs.pixels)


def open_served(folder: Path, request: str | None) -> Served:
    """A run, or an export where there is none."""
    if (folder / "run.json").is_file():
        return ServedRun(folder, request)
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"{folder}: neither a run nor an export as safetensors; make one with `ease train --out {folder}` "
            "or `ease export RUN`"
        )
    if request is not None:
        raise UserError(f"--request: {folder} is an export, which holds one model; leave the option out")
    return ServedExport(folder)


def as_json(hit: Hit) -> dict[str, Any]:
    """A hit for machines; its place means nothing to them."""
    return {name: value for name, value in vars(hit).items() if name != "place"}
