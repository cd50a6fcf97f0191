"""`ease methods`."""

from typing import Annotated

import typer

from ease.cli.options import Json, Result, command
from ease.errors import UserError


@command
def methods(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the manual's page, with all settings.")] = False,
    as_json: Json = False,
) -> Result:
    """List the unlearning methods.

    The list says what each method needs, how many rounds it takes and where it comes from.

    Example: `ease methods --markdown > docs/methods.md`
    """
    if markdown and as_json:
        raise UserError("--markdown and --json: choose one of them")
    from ease.commands.methods import list_methods, methods_page

    if markdown:
        print(methods_page(), end="")
        return None
    return list_methods()
