"""Using a run's model: embeddings, search among the run's pairs, zero-shot classification."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import Field
from torch import Tensor, nn

from ease.config import Config, validate
from ease.data.images import DECODER_ERRORS, decode_image, squared
from ease.errors import UserError
from ease.model.backbones import Backbone, load_backbone
from ease.model.dual_encoder import DualEncoder, check_fits
from ease.params import Params
from ease.requests.request import every_id
from ease.runs.answers import find_answer, open_world, trained_of
from ease.runs.config import RunConfig
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import read_noted

AT_ONCE = 64
Picture = str | Path | Image.Image | np.ndarray | memoryview
"""A file or the bytes of one, a picture of Pillow, or pixels: uint8 [height, width, 3]."""


@dataclass(frozen=True)
class Source:
    """A state with its model and its origin."""

    config: RunConfig
    request: str | None
    """None means the trained model."""
    state: Params
    backbone: Backbone
    model: DualEncoder

    @classmethod
    def of(cls, run: Run, request: str | None) -> "Source":
        state = trained_of(run).start if request is None else find_answer(run, request)[0].model()
        return cls.with_state(run, request, state)

    @classmethod
    def with_state(cls, run: Run, request: str | None, state: Params) -> "Source":
        """A state of a run with its model."""
        # On the CPU, so that the exported numbers do not depend on the device of the run.
        backbone = load_backbone(run.config.model.backbone)
        run.check_frozen(backbone, torch.device("cpu"))
        remedy = f"{run.folder}: its states do not fit the model that config.toml names; restore the run"
        return cls(run.config, request, state, backbone, _loaded(run.config, backbone, state, remedy))

    @classmethod
    def of_export(cls, folder: Path) -> "Source":
        """The model in an export. Its script is not run, because the folder may come from anyone."""
        path = folder / "model.safetensors"
        _, note = read_noted(path)
        settings = {"model": note.get("model"), "seed": note.get("seed")}
        if None in settings.values():
            raise UserError(f"{path}: not of an export as safetensors; write it again with: ease export RUN")
        config = validate(RunConfig, settings, str(path))
        backbone = load_backbone(config.model.backbone)
        check_fits(backbone, config.model)
        if backbone.fingerprint != note.get("backbone"):
            raise UserError(
                f"{path}: was exported on other weights of {config.model.backbone!r} than this machine has; "
                "install the same, or use load.py beside it"
            )
        remedy = f"{path}: its tensors do not fit the model that its header names; export it again"
        state = Params.load(path)
        return cls(config, note.get("request"), state, backbone, _loaded(config, backbone, state, remedy))


def _loaded(config: RunConfig, backbone: Backbone, state: Params, remedy: str) -> DualEncoder:
    model = DualEncoder(backbone, config.model, config.seed)
    if model.blocks != state.blocks:
        raise UserError(remedy)
    try:
        model.load_state_dict(dict(state.tensors), strict=False)  # the rest is frozen
    except RuntimeError as error:  # other shapes
        raise UserError(remedy) from error
    return model.eval()


class Encoder(nn.Module):
    """One modality from raw inputs to unit-norm embeddings."""

    def __init__(self, model: DualEncoder, modality: str) -> None:
        super().__init__()
        self.branch = getattr(model, modality)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.branch(*self.branch.tower.prefix(inputs, self.branch.first))


# --- embeddings ---


@torch.no_grad()
def encode_text(source: Source, texts: str | Sequence[str]) -> Tensor:
    """Unit-norm embeddings of texts [n, width]."""
    given = [texts] if isinstance(texts, str) else list(texts)
    if not given or not all(isinstance(text, str) and text.strip() for text in given):
        raise UserError("encode_text: give at least one text, and no empty one")
    tokens = source.backbone.tokenize(given)
    return torch.cat([Encoder(source.model, "text")(part) for part in tokens.split(AT_ONCE)])


@torch.no_grad()
def encode_image(source: Source, pictures: Picture | Sequence[Picture], most_pixels: int | None = None) -> Tensor:
    """Unit-norm embeddings of pictures [n, width]; files with more than `most_pixels` are refused."""
    alone = isinstance(pictures, str | Path | Image.Image | memoryview) or (
        isinstance(pictures, np.ndarray) and pictures.ndim == 3
    )
    given: list[Picture] = [pictures] if alone else list(pictures)  # type: ignore[list-item, arg-type]
    if not given:
        raise UserError("encode_image: give at least one picture")
    pixels = torch.from_numpy(np.stack([_pixels(each, source.backbone, most_pixels) for each in given]))
    return torch.cat([Encoder(source.model, "image")(part) for part in pixels.split(AT_ONCE)])


def _pixels(picture: Picture, backbone: Backbone, most_pixels: int | None) -> np.ndarray:
    size, crop = backbone.image_size, backbone.crop
    if isinstance(picture, str | Path | memoryview):
        name = "the picture" if isinstance(picture, memoryview) else picture
        try:
            file = picture if isinstance(picture, memoryview) else Path(picture)
            return decode_image(file, size, crop, most_pixels).pixels
        except UnidentifiedImageError as error:  # its own words would show the reader's inner workings
            raise UserError(f"{name}: cannot be read as a picture (not an image, or damaged)") from error
        except DECODER_ERRORS as error:
            raise UserError(f"{name}: cannot be read as a picture ({error})") from error
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise UserError(f"pixels must be uint8 [height, width, 3], not {picture.dtype} {list(picture.shape)}")
        picture = Image.fromarray(picture)
    return squared(picture, size, crop)


def classify(source: Source, pictures: Picture | Sequence[Picture], labels: Sequence[str]) -> Tensor:
    """Zero-shot probability of each label, such as "a photo of a dog", for each picture [n, labels]."""
    if isinstance(labels, str) or len(labels) < 2:
        raise UserError('classify: give at least two labels, such as ["a photo of a dog", "a photo of a cat"]')
    similarity = encode_image(source, pictures) @ encode_text(source, labels).T
    return (similarity / source.config.model.temperature).softmax(-1)


# --- search ---


class Hit(Config):
    """A pair found by a search."""

    id: str
    score: float
    """Cosine of the picture with the words."""
    caption: str
    place: int = Field(-1, exclude=True)
    """Its index in the pair set, which is not written."""
    whose: str
    """`client 3`, or `test` and `validation` for pairs of no client."""
    forgotten: bool
    """Whether the request that is looked at named it."""


def check_sought(words: str) -> None:
    if not words.strip():
        raise UserError('search: there are no words; say what to look for, such as "a dog in the snow"')


@torch.no_grad()
def search(
    world: World, source: Source, words: str, count: int, forgotten: frozenset[str] = frozenset(), among: str = "all"
) -> list[Hit]:
    """The run's pictures nearest to some words under the model of `source`, nearest first."""
    check_sought(words)
    places, whose = gallery(world, among)
    query = encode_text(source, words)[0]
    scores = pictures(world, source.state, places) @ query
    pairs = world.evaluator.pairs
    order = scores.argsort(descending=True, stable=True)[:count].tolist()
    return [
        Hit(
            id=pairs.ids[places[row]],
            score=float(scores[row]),
            caption=pairs.captions[places[row]][0],
            place=int(places[row]),
            whose=whose[row],
            forgotten=pairs.ids[places[row]] in forgotten,
        )
        for row in order
    ]


def gallery(world: World, among: str = "all") -> tuple[np.ndarray, list[str]]:
    """Positions and owners of the pairs to search (`all`, `train` or `test`), without canaries.

    Pairs of closed requests and held-out pairs of withdrawn clients are left out.
    """
    members, seen = world.server.membership, world.evaluator
    found = (
        []
        if among == "test"
        else [
            (place, f"client {members.named(shard.client)}")
            for shard in world.shards
            for place in seen.data(shard.train)
        ]
    )
    found += [] if among == "train" else [(place, "test") for place in seen.test]
    if among == "all":
        found += [(place, "validation") for place in seen.data(seen.spare)]
        found += [(place, "held out") for shard in world.shards for place in seen.data(shard.validation)]
    return np.array([place for place, _ in found], dtype=np.int64), [each for _, each in found]


def pictures(world: World, state: Params, places: np.ndarray) -> Tensor:
    """Embeddings of pictures from their cached activations, on the CPU."""
    seen, tensors = world.evaluator, dict(state.to(world.evaluator.device).tensors)
    parts = [places[start : start + 4 * AT_ONCE] for start in range(0, len(places), 4 * AT_ONCE)]
    images = (torch.from_numpy(np.array(seen.activations.image[part])).to(seen.device) for part in parts)
    return torch.cat([seen.model.embed(tensors, "image", image).cpu() for image in images])


@dataclass(frozen=True)
class SearchModels:
    """Models that answer the same searches, and the pairs that are searched."""

    world: World
    sources: Mapping[str, Source]
    """Model, in words -> the model."""
    forgotten: frozenset[str]
    """Pairs that the request named, if there is one."""

    @classmethod
    def of(cls, run: Run, request: str | None) -> "SearchModels":
        """The run's model, or the models before and after a request in the world of that time."""
        if request is None:
            return cls(open_world(run), {"the run's model": Source.of(run, None)}, frozenset())
        _, asked, _ = find_answer(run, request)
        before = Source.with_state(run, None, trained_of(run, asked).start)
        sources = {"before": before, f"after {request}": Source.of(run, request)}
        return cls(open_world(run, asked), sources, forgotten_ids(run, request))

    def search(self, words: str, count: int, among: str = "all") -> dict[str, list[Hit]]:
        """Model -> its hits, nearest first."""
        return {
            name: search(self.world, source, words, count, self.forgotten, among)
            for name, source in self.sources.items()
        }


def forgotten_ids(run: Run, request: str) -> frozenset[str]:
    """Ids of the pairs that an answered request named."""
    known = run.known()
    assert known is not None  # it has an answer
    return every_id(find_answer(run, request)[1], known[0])
