"""What tests of sites share."""

import shutil
from pathlib import Path

import pytest
from tests.federation.apart_sites import Sites, draw_sites

from ease.runs.run import Run


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
