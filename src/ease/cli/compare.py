"""`ease compare`."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.demo import Scenario
from ease.cli.options import Quiet, Result, Settings, command


@command
def compare(
    config: Annotated[Path | None, typer.Argument(help="TOML file. Without one, the defaults.")] = None,
    scenario: Annotated[Scenario, typer.Option(help="What to forget.")] = Scenario.client,
    pairs: Annotated[int, typer.Option(min=20, help="Use about so many images at most.")] = 2000,
    out: Annotated[Path | None, typer.Option(help="Keep the runs here. By default they are deleted.")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Find out which kind of model suits your data.

    It trains that head and the configured model on the same images, forgets with both, and says which one to train.
    The answers of a closed-form head are identical to retraining.

    Example: `ease compare configs/flickr8k.toml --scenario class`
    """
    import tempfile

    from ease.commands.compare import compare_run
    from ease.runs.config import load_config

    loaded = load_config(config, tuple(settings or ()))
    with tempfile.TemporaryDirectory(prefix="ease-compare-") as temporary:
        return compare_run(loaded, scenario.value, out or Path(temporary), pairs, quiet)
