"""Settings of the data and of their partition, and the layouts by name."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ease import plug_ins
from ease.config import Config
from ease.data.canaries import check_count
from ease.data.pairs import PairSet
from ease.data.partition import MINIMUM_PAIRS, check_clients
from ease.data.readers.captions import coco_rows, karpathy_rows, textcaps_rows
from ease.data.readers.hf import hf_rows
from ease.data.readers.table import folder_rows, table_rows
from ease.data.rows import Row, check_links, pairs_from_rows
from ease.data.scenes import load_scenes
from ease.errors import UserError, did_you_mean
from ease.storage import digest


class DataConfig(Config):
    name: str = "scenes"
    """Layout of the data: `scenes` (generated), `karpathy`, `coco`, `textcaps`, `folder`, `table`, `hf`, or that of a
    reader from another package. See docs/data.md."""
    path: Path | None = None
    """The file or the folder; not used by `scenes`."""
    test_path: Path | None = None
    """A second file or folder in the same layout, whose images are all for testing."""
    images: Path | None = None
    """Folder of the images; each layout has a default."""
    held_out_share: float = Field(0.2, ge=0, lt=1)
    """Share of the images held out where the data names no splits; half is for validation, half for testing."""
    seed: int = 0
    """Seed of the generated world."""
    train: int = Field(2000, ge=4)
    """Generated training pairs."""
    validation: int = Field(300, ge=0)
    """Generated pairs of no client, for choosing settings."""
    test: int = Field(1000, ge=4)
    """Generated test pairs."""
    canaries: int = Field(0, ge=0)
    """Validation pairs that are mismatched and planted by a coin each, to measure what training gives away."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of the listed images to use, for a first try. Ids decide, so that adding images changes no other choice."""
    strict: bool = False
    """Stop at unreadable images instead of leaving them out."""
    follow_links: bool = False
    """Read images outside the image folder where links in it lead to them."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        known = ("scenes", *LAYOUTS)
        if name not in known and name not in plug_ins.names(plug_ins.READERS):
            every = (*known, *plug_ins.names(plug_ins.READERS))
            raise ValueError(f"unknown layout {name!r}{did_you_mean(name, every)}; choose one of: {', '.join(every)}")
        return name

    @model_validator(mode="after")
    def _needs_path(self) -> "DataConfig":
        if self.name != "scenes" and self.path is None:
            raise ValueError(f'data.path is needed when data.name = "{self.name}"')
        if self.share < 1 and self.name == "scenes":
            raise ValueError('data.share: data.name = "scenes" lists no images; set data.train and data.test')
        if self.test_path is not None and self.name in ("scenes", "karpathy"):
            raise ValueError(
                f'data.test_path cannot be used when data.name = "{self.name}", which has its own test split'
            )
        return self


class PartitionConfig(Config):
    clients: int = Field(10, ge=1)
    """Simulated clients; with `scheme = "sites"` the data name them."""
    scheme: Literal["iid", "dirichlet", "uniform", "sites", "on_site"] = "dirichlet"
    """`iid`, `dirichlet` (skewed by pseudo-class), `uniform` (no such skew), `sites` (as the data say) or `on_site`
    (each client's pairs stay at its node)."""
    beta: float = Field(0.5, gt=0)
    """Dirichlet concentration; smaller is more skewed."""
    classes: int = Field(10, ge=1)
    """Number of pseudo-classes."""
    clustering: Literal["auto", "pooled", "federated"] = "auto"
    """`pooled` clusters all pairs in one place, `federated` leaves them at their clients; `auto`: so for real sites."""
    validation_share: float = Field(0.1, ge=0, lt=1)
    """Share of each client's pairs that is never trained on."""

    @model_validator(mode="after")
    def _leaves_pairs_where_they_lie(self) -> "PartitionConfig":
        if self.on_site and self.clustering == "pooled":
            raise ValueError(
                'partition.clustering = "pooled" would collect pairs that stay at their sites; leave it out'
            )
        return self

    @property
    def federated_classes(self) -> bool:
        """Whether pseudo-classes are found without bringing pairs together."""
        return self.clustering == "federated" or (self.clustering == "auto" and self.scheme in ("sites", "on_site"))

    @property
    def on_site(self) -> bool:
        """Whether only a client's own node opens its pairs."""
        return self.scheme == "on_site"


LAYOUTS: dict[str, Callable[[Path, Path | None], Iterator[Row]]] = {
    "karpathy": karpathy_rows,
    "coco": coco_rows,
    "textcaps": textcaps_rows,
    "folder": folder_rows,
    "table": table_rows,
    "hf": hf_rows,
}
"""Each reads the rows of a file or folder, with the images in another folder if one is given."""


def reader(name: str) -> Callable[[Path, Path | None], Iterable[Row]]:
    """The reader of a layout, of this package or of another one."""
    if name in LAYOUTS:
        return LAYOUTS[name]
    read: Callable[[Path, Path | None], Iterable[Row]] = plug_ins.load(plug_ins.READERS, name, "data.name")
    return read


def load_pairs(
    config: DataConfig,
    image_size: int,
    crop: bool = False,
    by_site: bool = False,
    forgotten: Container[str] = (),
    barred: Callable[[str], bool] | None = None,
    fits: Callable[[Mapping[str, int]], None] | None = None,
    owner: Literal["server", "client"] | None = None,
) -> PairSet:
    """The pairs of a configuration, with pictures as a backbone takes them; `by_site`: dealt to the sites they name.

    The pictures of `forgotten` ids may be gone; those of `barred` ones are not opened, wherever they are. `fits` gets
    the number of pairs of each split before a picture is opened, and may refuse them. With pairs on site, only those of
    their `owner` are opened: a client's are for training, the server's for measuring."""
    if config.name == "scenes":
        if by_site:
            raise UserError('data.name = "scenes": generated pairs are of no site; choose another partition.scheme')
        if fits is not None:
            fits({"train": config.train, "validation": config.validation, "test": config.test})
        return load_scenes(config.seed, config.train, config.validation, config.test)
    assert config.path is not None  # checked by DataConfig
    rows = _listed(config)
    rows = rows if barred is None else [row for row in rows if not barred(row.id)]
    rows = rows if owner is None else _owned(rows, owner, config.path)
    if not config.follow_links:
        check_links(rows)
    return pairs_from_rows(
        rows, config.path, image_size, crop, config.held_out_share, config.strict, by_site, forgotten, fits
    )


def count_listed(config: DataConfig) -> int:
    """Number of images that a configuration lists, without opening one."""
    if config.name == "scenes":
        return config.train + config.validation + config.test
    return len({row.id for row in _listed(config)})


def _listed(config: DataConfig) -> list[Row]:
    """The rows of all files of a configuration, or a share of them."""
    assert config.path is not None  # checked by DataConfig
    read = reader(config.name)
    rows = list(read(config.path, config.images))
    if config.test_path is not None:
        rows = [replace(row, split=row.split or "train") for row in rows]
        rows += [replace(row, split="test") for row in read(config.test_path, config.images)]
    return rows if config.share == 1 else [row for row in rows if _place(row.id) < config.share]


def _place(pair_id: str) -> float:
    """A fixed number between 0 and 1 for an id."""
    name = digest("share", pair_id)
    return int(name, 16) / float(16 ** len(name))


def _owned(rows: list[Row], owner: Literal["server", "client"], path: Path) -> list[Row]:
    """The rows of a folder that are its owner's to open; without a split they are all for the one purpose."""
    if owner == "client":
        kept, needed = [replace(row, split="train") for row in rows if row.split in (None, "train")], "training"
    else:
        kept, needed = [replace(row, split=row.split or "test") for row in rows if row.split != "train"], "test"
    if not kept:
        raise UserError(f"{path}: no {needed} pair is listed there, and the {owner} needs its own; add some")
    return kept


def check_sizes(data: DataConfig, partition: PartitionConfig, splits: Mapping[str, int]) -> None:
    """Refuse splits that leave nothing to train on or to measure, and more clients, classes or canaries than fit."""
    _check_splits(splits, data)
    train, spare = splits.get("train", 0), splits.get("validation", 0)
    if partition.scheme != "sites":
        check_clients(partition.clients, train)
    if partition.classes > train:
        raise UserError(
            f"partition.classes = {partition.classes}: more pseudo-classes than the {train} training pairs; "
            "lower it or add training data"
        )
    if data.canaries:
        check_count(data.canaries, spare)


def check_splits(pairs: PairSet, config: DataConfig, needed: Sequence[str] = ("train", "test")) -> None:
    """Refuse data without the splits that are needed."""
    _check_splits(Counter(pairs.splits), config, needed)


def _check_splits(splits: Mapping[str, int], config: DataConfig, needed: Sequence[str] = ("train", "test")) -> None:
    for split in needed:
        count = splits.get(split, 0)
        if count < MINIMUM_PAIRS:
            raise UserError(
                f"{config.path}: {count} of the {sum(splits.values())} pairs are in the {split} split, at least "
                f"{MINIMUM_PAIRS} are needed; name a split for each image, or none and set data.held_out_share"
            )
