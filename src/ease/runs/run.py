"""A run directory: configuration, training with history, resuming, and releases."""

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ease.config import Config, to_toml, validate
from ease.data.membership import Membership
from ease.errors import UserError
from ease.federation.fedavg import Round, TrainingConfig
from ease.federation.history import History
from ease.federation.middleware import Guarded
from ease.federation.strategies import strategy_of
from ease.model.backbones import Backbone
from ease.model.peft import adapter_fingerprint
from ease.params import Params
from ease.runs.config import RunConfig
from ease.runs.head import Release, ReleaseChain, check_head, read_head
from ease.runs.records import AnswerRecord, read_record
from ease.runs.world import World
from ease.storage import (
    SMALL_JSON,
    check_writable,
    exclusive,
    identity,
    read_json,
    read_tensors,
    remove_leftovers,
    sha256,
    write_atomic,
    write_json,
    write_tensors,
)
from ease.subspace import Basis, ServerLock, load_bases
from ease.trainers import means_of, train

PURGING = ".purge"
"""Folder of a purge's new files. If it contains a plan, the purge was interrupted."""
FORMAT: Literal[2] = 2
"""Format of the run directory; raise it when older runs can no longer be read."""


class RunFile(Config):
    """The file `run.json`: the configuration that is also readable as `config.toml`."""

    format: Literal[2] = FORMAT
    config: RunConfig


class FrozenParts(Config):
    """The file `world.json`: hashes of the frozen parts and the number of threads, which changes rounding."""

    backbone: str
    adapter: str | None
    device: str
    threads: int

    @classmethod
    def of(cls, world: World) -> "FrozenParts":
        adapter, server = world.config.model.adapter, world.server
        return cls(
            backbone=server.backbone.fingerprint,
            adapter=adapter_fingerprint(adapter) if adapter else None,
            device=server.device.type,
            threads=torch.get_num_threads(),
        )


@dataclass(frozen=True)
class Run:
    """A run directory with its configuration and history."""

    folder: Path
    config: RunConfig

    @classmethod
    def create(cls, folder: Path, config: RunConfig) -> "Run":
        """Create a run, or continue it; another configuration in the same folder is refused."""
        run = cls.plan(folder, config)
        run.check_released()
        if not (folder / "run.json").is_file():
            with run.locked():
                run = cls.plan(folder, config)  # another process may have begun one here since
                if not (folder / "run.json").is_file():
                    run._write_config()
        return run

    @classmethod
    def plan(cls, folder: Path, config: RunConfig) -> "Run":
        """The run that `create` would return, without writing; refuses early what cannot work."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; choose a folder for --out")
        check_writable(folder, "choose another --out")
        if not (folder / "run.json").is_file():
            # A process killed at its very start leaves only hidden files, which contain no work.
            if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"{folder}: is not empty and holds no run; choose another --out")
            return cls(folder, config)
        run = cls.load(folder)
        if run.config.identity() != config.identity():
            difference = _difference(run.config, config)
            raise UserError(f"{folder}: holds a run of another configuration ({difference}); choose another --out")
        rounds = max(run.config.training.rounds, config.training.rounds)
        return cls(
            folder, config.model_copy(update={"training": config.training.model_copy(update={"rounds": rounds})})
        )

    @classmethod
    def load(cls, folder: Path, purging: bool = False) -> "Run":
        """Open an existing run. One with an interrupted purge is opened with `purging` only."""
        marker = folder / "run.json"
        if not purging and (folder / PURGING / "plan.json").is_file():
            raise UserError(f"{folder}: a purge was interrupted here; finish it first with: ease purge {folder}")
        if not marker.is_file():
            if not folder.is_dir():
                parent = next(each for each in folder.absolute().parents if each.is_dir())
                raise UserError(
                    f"{folder}: no run here, and no such folder; in {parent} there are: {_neighbours(parent)}; check "
                    f"the path, or make a run with: ease train --out {folder}"
                )
            raise UserError(f"{folder}: no run here (run.json is missing); make one with: ease train --out {folder}")
        stored = read_json(marker, most=SMALL_JSON)
        if stored.get("format") != FORMAT or "config" not in stored:
            raise UserError(f"{marker}: not a run that this version knows; restore the file or train again elsewhere")
        check_head(folder)
        return cls(folder, validate(RunConfig, stored["config"], str(marker)))

    def _write_config(self) -> None:
        """Write the configuration; the caller holds the run's lock."""
        write_json(self.folder / "run.json", RunFile(config=self.config).model_dump(mode="json"))
        write_atomic(self._config_path, to_toml(self.config).encode())

    def _config_is_current(self) -> bool:
        """Whether config.toml is up to date; a process may have died before writing it."""
        return self._config_path.is_file() and self._config_path.read_bytes() == to_toml(self.config).encode()

    @property
    def history(self) -> History:
        return self.history_of(self.head)

    def history_of(self, head: ReleaseChain) -> History:
        """The history of the training from the start that a head continues."""
        training = self.config.training
        return History(
            self.folder,
            updates=training.history == "server",
            half=training.history_precision == "float16",
            place=head.places[-1],
            every=training.history_every,
        )

    @property
    def training(self) -> TrainingConfig:
        """The configuration of the training, with the number of finished rounds."""
        training = self.config.training
        return training.model_copy(update={"rounds": min(training.rounds, self.history.rounds())})

    def unfinished_note(self) -> str:
        """A note if training stopped early and the last finished round is used; else empty."""
        done, wanted = self.training.rounds, self.config.training.rounds
        if not 0 < done < wanted:
            return ""
        return (
            f"{self.folder}: training stopped after round {done} of {wanted}; using round {done} "
            f"(to continue it: ease train --resume {self.folder} --until {wanted})"
        )

    def hosted(self, world: World) -> World:
        """The world with folders of this run as the clients' disks, if clients keep their history.

        Nodes have their own disks and know the run by its name.
        """
        if self.config.remote:
            return world if world.run_name else replace(world, run_name=self.name)
        return world.with_disks(self.folder / "clients" if self.config.training.history == "client" else None)

    @property
    def name(self) -> str:
        """The random name by which nodes know the run. Two trainings of one configuration have different names."""
        path = self._name_path
        if not path.is_file():
            write_json(path, {"name": uuid.uuid4().hex})
        return str(read_json(path, most=SMALL_JSON).get("name"))

    @property
    def _name_path(self) -> Path:
        return self.folder / "name.json"

    def train(self, world: World) -> Iterator[Round]:
        """Train, or resume after the last finished round; yields every new round once it is stored."""
        with self.locked():
            remove_leftovers(self.folder)
            yield from self._train(world)

    def known(self, releases: int | None = None) -> tuple[Membership, np.ndarray] | None:
        """Who holds which pair and the centres of the pseudo-classes, now or after this number of releases.

        None before the run was trained. The files are read again only after they were replaced.
        """
        if not self._membership_path.is_file():
            return None
        membership = _membership(self._membership_path, *identity(self._membership_path))
        centroids = _centroids(self._classes_path, *identity(self._classes_path))
        return membership if releases is None else membership.before(releases), centroids

    def _store_world(self, world: World) -> None:
        """Store who holds which pair and what is frozen, because data may change or vanish later."""
        write_tensors(self._classes_path, {"centroids": torch.from_numpy(world.server.centroids)})
        write_json(self.folder / "world.json", FrozenParts.of(world).model_dump(mode="json"))
        if world.run_name:  # by which nodes know it already
            write_json(self._name_path, {"name": world.run_name})
        write_json(self._membership_path, world.server.membership.model_dump(mode="json"))  # last: it makes them count

    def check_released(self) -> None:
        """Refuse more rounds while a result is not released, because they would train on forgotten pairs."""
        open_requests = self.unreleased() if self.history.rounds() < self.config.training.rounds else []
        if open_requests:
            raise UserError(
                f"{self.folder}: {', '.join(open_requests)} was answered here, and more rounds would train on what was "
                f"forgotten; first choose the model to continue from: ease release {self.folder} "
                f"--request {open_requests[0]}"
            )

    @property
    def _membership_path(self) -> Path:
        return self.folder / "membership.json"

    @property
    def _config_path(self) -> Path:
        return self.folder / "config.toml"

    @property
    def _classes_path(self) -> Path:
        return self.folder / "classes.safetensors"

    @property
    def head(self) -> ReleaseChain:
        return read_head(self.folder / "head.json")

    def model_path(self, release: Release) -> Path:
        return self.folder / "requests" / release.answer / "model.safetensors"

    def unreleased(self) -> list[str]:
        """Names of answered requests without a release."""
        answered = {path.parent.parent.name for path in self.folder.glob("requests/*/*/record.json")}
        return sorted(answered - {release.answer.partition("/")[0] for release in self.head.releases})

    def check_frozen(self, backbone: Backbone, device: torch.device) -> None:
        """Refuse frozen weights that differ from those of the training."""
        path = self.folder / "world.json"
        if not path.is_file():
            return
        frozen, adapter = _frozen(path, *identity(path)), self.config.model.adapter
        # A backbone's weights may be rounded for a device; then nothing can be said.
        if frozen.device == device.type and frozen.backbone != backbone.fingerprint:
            raise UserError(
                f"{self.folder}: the weights of {backbone.name} are not those this run was trained on; restore them"
            )
        if adapter is not None and frozen.adapter != adapter_fingerprint(adapter):
            raise UserError(f"{self.folder}: the adapter in {adapter} is not the one this run began from; restore it")

    def threads_note(self) -> str:
        """A note if the number of threads differs from that of the training; else empty."""
        path, now = self.folder / "world.json", torch.get_num_threads()
        begun = _frozen(path, *identity(path)).threads if path.is_file() else now
        if begun == now:
            return ""
        return (
            f"{self.folder} was begun with {begun} threads and there are {now} now: what follows is as good, but not "
            f"equal to the byte; for equal bytes set OMP_NUM_THREADS={begun}"
        )

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run for this process."""
        busy = f"{self.folder}: another process is working on this run; wait for it or choose another --out"
        return exclusive(self.folder / ".lock", busy)

    def _train(self, world: World) -> Iterator[Round]:
        history, config, head = self.history, self.config, self.head
        done = history.rounds()
        if done == 0:
            world.server.initial().save(history.initial_path)
            self._store_world(world)
        self.check_frozen(world.server.backbone, world.server.device)
        history.verify()
        self.check_released()
        release, held = head.follows(done), self.held(head)
        start = history.state_path(done) if release is None else self.model_path(release)
        if release is None:
            state = history.state(done)
        else:
            state = released_model(self, release) if held is None else held.state
        if _layout(state) != _layout(world.server.initial()):
            raise UserError(
                f"{start}: made by another model than config.toml names; restore it or train again elsewhere"
            )
        if Run.plan(self.folder, self.config).config != self.config:
            raise UserError(f"{self.folder}: another process trains more rounds here; run the same command again")
        if Run.load(self.folder).config != self.config or not self._config_is_current():
            self._write_config()
        here = self.hosted(world.without(*(each for each in head.gone if each not in world.gone)))
        federation = Guarded(here.federation, config.training, metered=True)
        down = up = 0
        for finished in train(
            state,
            federation,
            config.training,
            config.seed,
            config.model.temperature,
            first_round=done + 1,
            locks=() if held is None else (held,),
            keep=config.training.history == "client",
            again=history if done else None,
            past=() if strategy_of(config.training).averages else means_of(history, config.training),
        ):
            cost = federation.cost
            finished = replace(finished, rejected=federation.left_out() | finished.rejected)
            history.append(finished, cost.bytes_down - down, cost.bytes_up - up, start)
            down, up = cost.bytes_down, cost.bytes_up
            yield finished
            start = history.state_path(finished.number)

    def held(self, head: ReleaseChain) -> ServerLock | None:
        """The directions that releases lock, at the model that the run continues from, or None.

        Each release's directions include those of all releases before it. A release without directions leaves the
        earlier ones locked. A training from the start never saw what they were of.
        """
        locking = [release for release in head.releases[head.renewed :] if self.locks_directions(release)]
        if not locking:
            return None
        bases = load_directions(self.model_path(locking[-1]).parent)
        return ServerLock(bases, released_model(self, head.releases[-1]))

    def locks_directions(self, release: Release) -> bool:
        """Whether a release has directions to lock."""
        record = read_record(AnswerRecord, self.model_path(release).parent / "record.json")
        return "bases.safetensors" in record.files


def _neighbours(folder: Path) -> str:
    """Names of up to five other folders, for an error message."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "no folders"


def load_directions(folder: Path) -> dict[str, Basis]:
    """The directions that later training keeps locked; none if the result's record lists none."""
    record = read_record(AnswerRecord, folder / "record.json")
    path = folder / "bases.safetensors"
    if path.name not in record.files:
        return {}
    check_answer_file(record, path)
    return load_bases(path)


def check_answer_file(record: AnswerRecord, path: Path) -> None:
    """Refuse a file of a result that is not the one in its record."""
    if not path.is_file():
        raise UserError(f"{path}: missing, and the record next to it names it; restore it, or {record.remedy}")
    if sha256(path) != record.files.get(path.name):
        raise UserError(f"{path}: damaged (its hash is not the recorded one); restore it, or {record.remedy}")


def released_model(run: Run, release: Release) -> Params:
    """The released model; any other file in its place is refused."""
    path = run.model_path(release)
    try:
        return Params.load(path, release.model_sha256)
    except UserError as error:
        raise UserError(f"{path}: not the model that was released; restore it") from error


@lru_cache(maxsize=4)
def _membership(path: Path, *identity: int) -> Membership:
    return validate(Membership, read_json(path), str(path))


@lru_cache(maxsize=4)
def _centroids(path: Path, *identity: int) -> np.ndarray:
    tensors = read_tensors(path)
    if "centroids" not in tensors:
        raise UserError(f"{path}: holds no centroids; restore it or train again")
    return tensors["centroids"].numpy()


@lru_cache(maxsize=4)
def _frozen(path: Path, *identity: int) -> FrozenParts:
    return validate(FrozenParts, read_json(path, most=SMALL_JSON), str(path))


def _layout(state: Params) -> tuple[Any, ...]:
    return state.blocks, {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors.items()}


def _difference(old: RunConfig, new: RunConfig) -> str:
    """The first field in which two configurations differ, for an error message."""
    for section, value in old.model_dump(mode="json").items():
        other = new.model_dump(mode="json")[section]
        if not isinstance(value, dict):
            if value != other:
                return f"{section} is {value!r} there and {other!r} here"
            continue
        for key in value:
            if value[key] != other[key] and key != "rounds":
                return f"{section}.{key} is {value[key]!r} there and {other[key]!r} here"
    return "same settings, other version"
