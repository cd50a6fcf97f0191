"""`ease request`: submit, list, show, find, approve and cancel."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import (
    By,
    Classes,
    Clients,
    Concepts,
    Method,
    Quiet,
    RequestName,
    Result,
    Run,
    Samples,
    Settings,
    Threshold,
    chosen_method,
    command,
)

Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the request, see `ease request list`.")]


@command
def add(
    run: Run,
    client: Clients = None,
    concept: Concepts = None,
    class_: Classes = None,
    samples: Samples = None,
    by: By = None,
    ground: Annotated[str, typer.Option(help='Legal ground, e.g. "GDPR art. 17(1)(b)".')] = "",
    reason: Annotated[str, typer.Option(help="Why, in a few words.")] = "",
    priority: Annotated[int, typer.Option(help="Requests with a larger number are worked on first.")] = 0,
    due: Annotated[str | None, typer.Option(metavar="DATE", help="Deadline. By default one month from today.")] = None,
    threshold: Threshold = None,
    name: RequestName = "",
    id: Annotated[str | None, typer.Option(help="Its id in the ledger. By default made from its content.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Approve it at once.")] = False,
    method: Method = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> Result:
    """Submit a request.

    Submitting the same request again has no effect.

    Example: `ease request add runs/first --client 3 --by "site 3" --ground "GDPR art. 17" --approve`
    """
    unlearner = chosen_method(method, settings)
    from ease.commands.requests import add_request
    from ease.runs.resolve import Wanted

    wanted = Wanted(client or [], class_ or [], concept or [], samples, name=name, threshold=threshold)
    return add_request(run, wanted, unlearner, by, ground, reason, priority, due, id, approve, quiet)


@command
def list_(run: Run) -> Result:
    """List all requests in the order of work.

    Overdue requests are marked.

    Example: `ease request list runs/first`
    """
    from ease.commands.requests import list_requests

    return list_requests(run)


@command
def show(run: Run, id: Id) -> Result:
    """Show what a request touches, its cost and its steps.

    Nothing is computed or changed.

    Example: `ease request show runs/first client-3-1f2e3d`
    """
    from ease.commands.requests import show_request

    return show_request(run, id)


@command
def find(
    run: Run,
    pattern: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN]...", help="Part of an id, or a pattern such as 'smith-*'."),
    ] = None,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="A list of ids, one per line.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture that pairs may show.")] = None,
    quiet: Quiet = False,
) -> Result:
    """Find what a run holds on a person.

    Pairs are looked for in every split and at every site. Each is listed with the client that holds it and with the
    closed requests that removed it. Sites are asked for a picture by its hash and find exact copies only.

    Example: `ease request find runs/first smith --image smith.jpg`
    """
    from ease.commands.find import find_pairs

    return find_pairs(run, pattern or [], ids, image, quiet)


@command
def approve(run: Run, id: Id, by: By = None) -> Result:
    """Approve a request, or the release of its result.

    A request that waits is then worked on. A result that the policy holds back is then released.

    Example: `ease request approve runs/first client-3-1f2e3d`
    """
    from ease.commands.requests import approve_request

    return approve_request(run, id, by)


@command
def cancel(
    run: Run, id: Id, by: By = None, reason: Annotated[str, typer.Option(help="Why, in a few words.")] = ""
) -> Result:
    """Cancel a request that is not being worked on.

    Example: `ease request cancel runs/first client-3-1f2e3d --reason "submitted by mistake"`
    """
    from ease.commands.requests import cancel_request

    return cancel_request(run, id, by, reason)
