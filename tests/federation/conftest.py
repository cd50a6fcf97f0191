"""What tests of sites share."""

from pathlib import Path

import pytest
from tests.federation.apart_sites import draw_sites


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of three sites and of the server. Copy them before writing into them."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_sites(folder)
    return folder
