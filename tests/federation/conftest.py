"""What tests of engines and of sites share."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.federation.on_site import Sites, draw_sites

from ease.runs.config import RunConfig
from ease.runs.run import Run
from ease.runs.world import World


@pytest.fixture(scope="session")
def world(shared_cache: Path, small_config: Callable[..., RunConfig]) -> World:
    """The world of the small configuration, with adapters: engines have to move and train those too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return World.open(small_config("model.lora=ffa"))


@pytest.fixture(scope="session", autouse=True)
def small_jobs() -> Iterator[None]:
    """Sites of these tests have fewer pairs than the policy's default asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ease.federation.node.FEWEST_PAIRS", 2)
        yield


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of three sites and of the server. Copy them before writing into them."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_sites(folder)
    return folder


@pytest.fixture
def apart(sites: Sites, tmp_path: Path) -> Run:
    """A run of its own over nodes that the tests of a module share."""
    return sites.trained(tmp_path.name)


@pytest.fixture
def pooled(sites: Sites, tmp_path: Path) -> Run:
    """The same with all pairs in one place."""
    return Run.load(Path(shutil.copytree(sites.folder / "pooled", tmp_path / "pooled")))
