"""`ease demo`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import Quiet, Result, Settings, command


class Scenario(StrEnum):
    client = "client"
    class_ = "class"
    sample = "sample"


@command
def demo(
    scenario: Annotated[Scenario, typer.Option(help="What to forget.")] = Scenario.client,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. By default a new temporary folder.")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Train, forget and compare with retraining in one go.

    It uses generated scenes and the tiny model that comes with this package. Next to the approximate methods it shows
    a closed-form head, for which forgetting is exact.

    Example: `ease demo --scenario class`
    """
    import tempfile

    from ease.commands.compare import demo_run
    from ease.runs.config import load_config

    config = load_config(None, tuple(settings or ()))
    folder = out or Path(tempfile.mkdtemp(prefix="ease-demo-")) / "run"
    return demo_run(config, scenario.value, folder, quiet)
