"""`ease cache`: list and clear."""

from typing import Annotated

import typer

from ease.cli.options import Result, command


@command
def list_() -> Result:
    """List the cached files by kind.

    The list shows their size, their age, and whether other users can read them.

    Example: `ease cache list`
    """
    from ease.commands.cache import list_cache

    return list_cache()


@command
def clear(
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PART]...", help="Kinds as `ease cache list` names them. By default all."),
    ] = None,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only files written at least this many days ago.")
    ] = 0.0,
) -> Result:
    """Delete cached files.

    Copies of pictures and captions are deleted too. Files that are needed again are made again.

    Examples: `ease cache clear`, `ease cache clear pixels activations --older-than 30`
    """
    from ease.commands.cache import clear_cache

    return clear_cache(parts or [], older_than)
