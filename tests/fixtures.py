"""What many tests share: one cache for the session, small worlds, the command line, a browser and a full disk."""

import copy
import os
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cache_results
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Union

import pytest
import torch
from hypothesis import settings
from pydantic import TypeAdapter
from tests.photographs import FOLDER, draw_photographs

import ease as package
from ease.audit.config import AuditConfig
from ease.audit.membership_scores import measure_scores
from ease.audit.records import AuditRecord
from ease.audit.runner import Audit
from ease.cli import main
from ease.commands.outputs import OUTPUTS
from ease.commands.train import train_run
from ease.config import to_toml
from ease.federation.client import ClientData
from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation, LocalJob, Middleware, Optimiser, Update
from ease.federation.sequential import Sequential
from ease.methods import make_method
from ease.methods.base import Step, Trained, Unlearner, forget_clients
from ease.methods.retrain import Retrain
from ease.model import hub
from ease.model.hub import quiet_transformers
from ease.operations.evidence import certificates, checks
from ease.params import Block, Params
from ease.requests.request import ClientRequest, Request, forget_mask
from ease.runs.answers import answer_of, trained_of
from ease.runs.config import RunConfig, load_config
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World

settings.register_profile("unhurried", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("unhurried")
torch.set_num_threads(1)  # so that results do not depend on how many tests run at once

# Both leave the towers as they are shipped: a step costs a half to a fifth of one with adapters. What concerns those
# says so: the fixture `adapted`, or `model.lora` among its assignments. With `-m slow` or another choice, all have.
ADAPTERS = ("model.lora=ffa", "engine=auto")
SMALL = (
    "data.train=60",
    "data.validation=0",
    "data.test=20",
    "partition.clients=3",
    "partition.classes=3",
    "partition.scheme=iid",
    "training.rounds=2",
    "training.local_epochs=1",
    "training.batch_size=8",
    "engine=sequential",
    "model.lora=off",
    "model.hidden=16",
    "model.embedding=8",
    "gallery=20",
)

LEARNT = (
    "data.train=240",
    "data.validation=0",
    "data.test=40",
    "partition.clients=4",
    "partition.classes=4",
    "partition.scheme=uniform",
    "partition.validation_share=0.2",
    "training.rounds=6",
    "training.local_epochs=3",
    "training.batch_size=16",
    "engine=sequential",
    "model.lora=off",
    "model.hidden=64",
    "model.embedding=32",
    "gallery=40",
)


EXPERIMENT = """
title = "Small"
shadows = 0
seeds = [3, 1]
band_retrains = 1
scenarios = ["client", "class"]
methods = ["finetune", { method = "ease_paper", label = "hard", vary = { delta = [0.3, 0.6] } }]

[run]
gallery = 20
data = { train = 60, validation = 0, test = 20 }
partition = { clients = 3, classes = 3, scheme = "iid" }
model = { lora = "off", hidden = 16, embedding = 8 }
training = { rounds = 2, local_epochs = 1, batch_size = 8 }
"""


@dataclass(frozen=True)
class Asked:
    client: int
    job: LocalJob
    state: Params
    steps: int
    """Steps the method had yielded by then."""


class Play(Middleware):
    """A method's answer to a request, made once and as far as someone looks: its steps, and each job of each client."""

    def __init__(self, inner: Federation, trained: Trained, request: Request, method: Unlearner) -> None:
        super().__init__(inner)
        self.asked, self.made = list[Asked](), list[Step]()
        self.left = method.unlearn(trained, request, self)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        self.asked += [Asked(client, job, params, len(self.made)) for client in clients]
        return super().run(params, job, clients)

    def __iter__(self) -> Iterator[Step]:
        for number in count():
            if number == len(self.made):
                step = next(self.left, None)
                if step is None:
                    return
                self.made.append(step)
            yield self.made[number]


@dataclass(frozen=True)
class Learnt:
    """A run that has learnt its training pairs: they are held more strongly than unseen ones."""

    run: Run
    world: World
    trained: Trained
    plays: dict[tuple[Request, str], Play] = field(default_factory=dict)

    def play(self, request: Request, method: Unlearner) -> Play:
        """A method on this run; who asks for the same again is given the same, which a test of its own allows."""
        key = request, to_toml(method)
        if key not in self.plays:
            self.plays[key] = Play(self.world.federation, self.trained, request, method)
        return self.plays[key]

    def level(self, state: Params, request: Request) -> float:
        """Mean log-odds of the pairs a request names."""
        clients = forget_clients(request, self.world.federation)
        scores = measure_scores(self.trained, state, request, self.world.federation, clients)
        return float(torch.cat([values["forget"] for values in scores.values()]).mean())


class Nothing(Unlearner):
    """A method that forgets nothing and says that it has."""

    name: ClassVar[str] = "nothing"
    title: ClassVar[str] = "Nothing"
    source: ClassVar[str] = "a test"
    method: Literal["nothing"] = "nothing"

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        yield Step(trained.final, "nothing")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1


class Perfect(Retrain):
    """Retraining in an order that neither the reference nor the band uses: no method can do better."""

    name: ClassVar[str] = "perfect"
    method: Literal["perfect"] = "perfect"  # type: ignore[assignment]
    order: int = 77


@dataclass(frozen=True)
class Audited:
    """A run whose client 1 was forgotten in three ways, with a finished audit of each."""

    run: Run
    world: World
    audits: dict[str, Audit]
    records: dict[str, AuditRecord]


@lru_cache
def output_of(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(Union[OUTPUTS[name]])  # noqa: UP007


def check_output(arguments: list[str], out: str) -> None:
    """Hold what a command printed for machines against what the reference says of it."""
    name = next(name for name in (" ".join(arguments[:2]), arguments[0], f"{arguments[0]} issue") if name in OUTPUTS)
    output_of(name).validate_json(out)


class Result(NamedTuple):
    """What a command left: exit code and both streams."""

    code: int | str | None
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C is heard by whoever is tested for it, also where tests run in the background, which a shell deafens."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def patient_disk() -> Iterator[None]:
    """Nobody waits for the disk: what a test writes need not outlast a power cut. Whether it would, tests count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def unchanged_sources() -> Iterator[None]:
    """Certificates hold a hash of the sources, which stay: it is taken once. Whether it follows them, one test asks."""
    once = cache_results(certificates.installed_code)
    with pytest.MonkeyPatch.context() as patch:
        for module in (certificates, checks):
            patch.setattr(module, "installed_code", once)
        yield


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers, which have their folders side by side."""
    mine = tmp_path_factory.getbasetemp()
    return (mine.parent if os.environ.get("PYTEST_XDIST_WORKER") else mine) / "shared-cache"


@pytest.fixture(autouse=True)
def cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's cache; what one test computed, the next may use."""
    monkeypatch.setenv("EASE_CACHE", str(shared_cache))
    return shared_cache


@pytest.fixture(scope="session")
def adapters(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What shared worlds have beside their own assignments: nothing by default, adapters with `-m slow` and others."""
    chosen = request.config.getoption("markexpr")
    return ADAPTERS if chosen and "not slow" not in chosen else ()


@pytest.fixture(scope="session")
def small(adapters: tuple[str, ...]) -> tuple[str, ...]:
    """Assignments that make a run small: 60 training pairs, 3 clients, 2 rounds."""
    return (*SMALL, *adapters)


@pytest.fixture(scope="session")
def small_config(small: tuple[str, ...]) -> Callable[..., RunConfig]:
    """A small configuration; further assignments change it."""
    return lambda *assignments: load_config(None, (*small, *assignments))


@pytest.fixture(scope="session")
def world(shared_cache: Path, small_config: Callable[..., RunConfig]) -> World:
    """The world of the small configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return World.open(small_config())


@pytest.fixture(scope="session")
def one_forgotten(small, shared_cache, tmp_path_factory) -> Path:
    """A run in which client 1 was forgotten, and not released. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("forgotten") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        train_run(load_config(None, (*small, "partition.validation_share=0.3")), folder, quiet=True)
        package.open_run(folder).forget(client=1, method="finetune", quiet=True)
    return folder


def learn(shared_cache: Path, folder: Path, *assignments: str) -> Learnt:
    """A world and a run that was trained in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        config = load_config(None, assignments)
        world = World.open(config)
    run = Run.create(folder / "run", config)
    list(run.train(world))
    return Learnt(run, world, trained_of(run))


@pytest.fixture(scope="session")
def learnt(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory, adapters: tuple[str, ...]) -> Learnt:
    """240 pairs at 4 clients, 6 rounds, projectors alone. Read it; write nothing into its folder."""
    return learn(shared_cache, tmp_path_factory.mktemp("learnt"), *LEARNT, *adapters)


@pytest.fixture(scope="session")
def adapted(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """60 pairs at 3 unequal clients, 3 rounds, adapters too. It learns little; write nothing into its folder."""
    more = ("model.lora=ffa", "training.rounds=3", "partition.validation_share=0.3", "partition.scheme=uniform")
    return learn(shared_cache, tmp_path_factory.mktemp("adapted"), *SMALL, *more)


@pytest.fixture(scope="session")
def poison() -> Callable[[World, Request], Sequential]:
    """A federation in which everything a request names is NaN: code that reads it cannot hide it."""

    def spoil(client: ClientData, request: Request) -> ClientData:
        named = torch.from_numpy(forget_mask(request, client.shard))
        spoilt = {}
        for name in ("image", "text"):
            spoilt[name] = getattr(client.train, name).clone()
            spoilt[name][named] = torch.nan
        return replace(client, train=replace(client.train, **spoilt))

    return lambda world, request: Sequential(
        world.server.model, {client: spoil(data, request) for client, data in world.federation.data.items()}
    )


@pytest.fixture(scope="session")
def audited(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Audits of a method that leaks, one that cannot be better and fine-tuning. Takes most of a minute: mark `slow`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        config = load_config(None, (*LEARNT, *ADAPTERS, "data.test=160"))
        world = World.open(config)
    run = Run.create(tmp_path_factory.mktemp("audited") / "run", config)
    list(run.train(world))
    request = ClientRequest(clients=(1,))
    settings = AuditConfig(shadows=4, retrains=5, pool=32, fpr=0.1, workers=1)
    list(forget(run, world, request, Retrain(), observe=False))
    audits, records = {}, {}
    for method in (make_method("finetune"), Nothing(), Perfect()):
        list(forget(run, world, request, method, observe=False))
        audit = Audit(run, world, answer_of(run, request, method), request, method, settings)
        list(audit.shadows())
        audits[method.name], records[method.name] = audit, audit.judge()
    return Audited(run, world, audits, records)


@pytest.fixture
def small_experiment(tmp_path: Path) -> Path:
    """An experiment that takes seconds: two seeds, two scenarios, fine-tuning and EASE at two thresholds."""
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def ease(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process, which spares the imports."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["ease", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        result = Result(ended.value.code, *capsys.readouterr())
        if "--json" in arguments and result.out:
            check_output(list(map(str, arguments)), result.out)
        return result

    return run


@pytest.fixture(scope="session")
def local_job() -> Callable[..., LocalJob]:
    """A job of one epoch; keyword arguments change it."""
    fields = {
        "round": 1,
        "seed": 0,
        "stream": "train",
        "optimiser": Optimiser(learning_rate=0.5),
        "epochs": 1,
        "batch_size": 8,
        "temperature": 0.07,
    }
    return lambda **changes: LocalJob(**{**fields, **changes})


@pytest.fixture(scope="session")
def toy_params() -> Callable[..., Params]:
    """A state of two blocks and six values, filled with one number or drawn from a seed."""
    blocks = (
        Block("image.layer", "image", "lora", ("image.layer.B",)),
        Block("text.projector.0", "text", "projector", ("text.projector.0.bias", "text.projector.0.weight")),
    )
    shapes = {"image.layer.B": (2, 1), "text.projector.0.bias": (1,), "text.projector.0.weight": (1, 3)}

    def make(value: float | None = None, seed: int = 0) -> Params:
        rng = torch.Generator().manual_seed(seed)
        return Params(
            {
                name: torch.randn(shape, generator=rng) if value is None else torch.full(shape, float(value))
                for name, shape in shapes.items()
            },
            blocks,
        )

    return make


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A randomly drawn checkpoint of a family in a folder of its own, saved as real ones are. Read it only.

    Three blocks, pictures of 32 px in 16 patches, 12 tokens; the towers have different widths.
    """
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters, folder = string.ascii_lowercase, request.getfixturevalue("parts_of_checkpoints")
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    vision = {**layers, "hidden_size": 40, "patch_size": 8}

    def text(size: int, **more: int) -> dict[str, int]:
        return {**layers, "hidden_size": 32, "max_position_embeddings": 12, "vocab_size": size, **more}

    def clip() -> tuple[object, ...]:
        pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
        tokenizer = transformers.CLIPTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[])
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = transformers.CLIPConfig(
            text_config=text(len(pieces), **ends), vision_config={**vision, "image_size": 32}, projection_dim=24
        )
        return transformers.CLIPModel(config), tokenizer, transformers.CLIPImageProcessorPil()

    def siglip() -> tuple[object, ...]:
        words = ["<pad>", "<unk>", "a", "dog", "on", "the", "beach"]
        backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
        config = transformers.SiglipConfig(
            text_config=text(len(words), projection_size=40, bos_token_id=None, eos_token_id=None),
            vision_config={**vision, "image_size": 32},
        )
        return transformers.SiglipModel(config), tokenizer, transformers.SiglipImageProcessorPil()

    def siglip2() -> tuple[object, ...]:
        pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *letters]
        tokenizer = transformers.Siglip2Tokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[])
        config = transformers.Siglip2Config(
            text_config=text(len(pieces), projection_size=40, bos_token_id=None, eos_token_id=None),
            vision_config={**vision, "num_patches": 16},
        )
        processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
        return transformers.Siglip2Model(config), tokenizer, processor

    def make(family: str) -> Path:
        if not (folder / family).exists():
            torch.manual_seed(0)
            with quiet_transformers():
                for part in {"clip": clip, "siglip": siglip, "siglip2": siglip2}[family]():
                    part.save_pretrained(folder / family)
        return folder / family

    return make


@pytest.fixture(scope="session")
def parts_of_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where checkpoints are made, which are read once: loading takes transformers ten times as long as copying.

    All others, and all while a test has its hands in transformers, are read as ever.
    """
    import transformers

    folder, kept = tmp_path_factory.mktemp("checkpoints"), dict[Path, tuple[Any, ...]]()
    kinds = [transformers.AutoModel, transformers.AutoTokenizer, transformers.AutoImageProcessor]
    readers, read = [kind.from_pretrained for kind in kinds], hub._parts

    def parts(place: Path, *names: str) -> tuple[Any, ...]:
        if place.parent != folder or [kind.from_pretrained for kind in kinds] != readers:
            return read(place, *names)
        if place not in kept:
            kept[place] = read(place, *names)
        model, *others = kept[place]
        return copy.deepcopy(model), *others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "_parts", parts)
        yield folder


@pytest.fixture(scope="session")
def processed() -> Callable[[Path, torch.Tensor], dict[str, torch.Tensor]]:
    """What a checkpoint's own processor makes of uint8 pictures that have the right size already."""

    def process(folder: Path, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers import AutoImageProcessor

        with quiet_transformers():
            processor = AutoImageProcessor.from_pretrained(folder)
        given = [picture.numpy() for picture in pixels]
        if folder.name == "siglip2":  # its resizing finds nothing to do
            return dict(processor(images=given, return_tensors="pt"))
        return dict(processor(images=given, return_tensors="pt", do_resize=False, do_center_crop=False))

    return process


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that asks nobody for anything; skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield running
        running.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a real file system of so many kilobytes; skipped where the user may not mount one."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a small disk needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def barriers() -> Callable[[Any], list[str]]:
    """What axe finds on an open page that keeps someone from using it: serious problems, each with its first place."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def find(opened: Any) -> list[str]:
        found = axe.run(opened).response
        assert len(found["passes"]) > 10, "axe looked at the page"
        return [
            f"{each['id']}: {each['help']} at {each['nodes'][0]['html'][:120]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]

    return find


@pytest.fixture(scope="session")
def kept_place(small, tmp_path_factory) -> tuple[Path, Path]:
    """A place with photographs, a run over them and its cache, and a copy of it all."""
    here = tmp_path_factory.mktemp("home") / "here"
    here.mkdir()
    draw_photographs(here / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(here / "cache"))
        train_run(load_config(None, (*small, *FOLDER, f'data.path="{here / "photos"}"')), here / "run", quiet=True)
    return here, shutil.copytree(here, here.parent / "kept")


@pytest.fixture
def place(kept_place, monkeypatch) -> Path:
    """The place as it was when the run was trained: tests take photographs away."""
    here, copy = kept_place
    shutil.rmtree(here)
    shutil.copytree(copy, here)
    monkeypatch.setenv("EASE_CACHE", str(here / "cache"))
    return here
