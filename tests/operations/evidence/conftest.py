"""A small run whose client 1 was forgotten and audited, and what is certified of it."""

import shutil
from pathlib import Path

import pytest
from benchmarks.bitflips import TINY

from ease.audit.config import AuditConfig
from ease.audit.runner import Audit
from ease.methods.ease.method import Ease
from ease.methods.finetune import Finetune
from ease.methods.retrain import Retrain
from ease.operations.evidence import issue
from ease.requests.request import ClientRequest, SampleRequest
from ease.runs.answers import answer_of
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World

CLIENT = ClientRequest(clients=(1,))


def made(folder: Path, *settings: str) -> Run:
    """A trained run of two clients."""
    config = load_config(None, (*TINY, "model.lora=off", *settings))
    run = Run.create(folder, config)
    list(run.train(World.open(config)))
    return run


@pytest.fixture(scope="session")
def home(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Client 1 forgotten by EASE, which is audited, and one pair by fine-tuning. Copy it before writing into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        run = made(tmp_path_factory.mktemp("evidence") / "run")
        world = World.open(run.config)
        for method in (Retrain(), Ease()):
            list(forget(run, world, CLIENT, method, observe=False))
        pair = world.server.membership.clients[0].train_ids[0]
        list(forget(run, world, SampleRequest(ids=(pair,)), Finetune(), observe=False))
        settings = AuditConfig(shadows=4, retrains=2, pool=16, workers=1)
        audit = Audit(run, world, answer_of(run, CLIENT, Ease()), CLIENT, Ease(), settings)
        list(audit.shadows())
        audit.judge()
    return run.folder


@pytest.fixture(scope="session")
def certified(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with a certificate of client 1, and the certificate's file. Copy them before writing into them."""
    folder = Path(shutil.copytree(home, tmp_path_factory.mktemp("certified") / "run"))
    path = folder / "requests" / "client-1" / "ease" / "certificate.json"
    path.write_bytes(issue(Run.load(folder), "client-1").file_bytes() + b"\n")
    return folder, path


@pytest.fixture
def run(certified: tuple[Path, Path], tmp_path: Path) -> Run:
    """A certified run that may be written into."""
    return Run.load(Path(shutil.copytree(certified[0], tmp_path / "run")))


@pytest.fixture
def certificate(run: Run) -> Path:
    return run.folder / "requests" / "client-1" / "ease" / "certificate.json"


@pytest.fixture
def bare(home: Path, tmp_path: Path) -> Run:
    """The same run before there was any evidence."""
    return Run.load(Path(shutil.copytree(home, tmp_path / "bare")))
