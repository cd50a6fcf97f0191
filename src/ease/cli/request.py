"""`ease request`: submit, list, show and find requests, decide on them, and keep the register."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import (
    By,
    Classes,
    Clients,
    Concepts,
    Except,
    Key,
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

Reason = Annotated[str, typer.Option(help="Why, in a few words.")]
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
    reason: Reason = "",
    priority: Annotated[int, typer.Option(help="Requests with a larger number are worked on first.")] = 0,
    due: Annotated[str | None, typer.Option(metavar="DATE", help="Last day. By default a month from today.")] = None,
    threshold: Threshold = None,
    except_: Except = None,
    name: RequestName = "",
    id: Annotated[str | None, typer.Option(help="Its id in the ledger. By default made from its content.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Approve it at once.")] = False,
    key: Key = None,
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
    from ease.runs.resolve import RequestOptions

    wanted = RequestOptions(
        client or [], class_ or [], concept or [], samples, name=name, threshold=threshold, unless=except_ or []
    )
    return add_request(run, wanted, unlearner, by, ground, reason, priority, due, id, approve, key, quiet)


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
    closed requests that removed it. Sites receive only the hash of a picture and find exact copies.

    Example: `ease request find runs/first smith --image smith.jpg`
    """
    from ease.commands.find import find_pairs

    return find_pairs(run, pattern or [], ids, image, quiet)


@command
def approve(run: Run, id: Id, by: By = None, key: Key = None) -> Result:
    """Approve a request, or the release of its result.

    A request that waits is then worked on. A result that the policy holds back is then released. The policy may ask
    for several people (approval.people) and for signatures (approval.signed).

    Example: `ease request approve runs/first client-3-1f2e3d`
    """
    from ease.commands.requests import approve_request

    return approve_request(run, id, by, key)


@command
def refuse(run: Run, id: Id, by: By = None, key: Key = None, reason: Reason = "") -> Result:
    """Refuse a request, with the reason for the letter.

    Example: `ease request refuse runs/first client-3-1f2e3d --reason "the site did not ask for this"`
    """
    from ease.commands.register import refuse_request

    return refuse_request(run, id, by, key, reason)


@command
def extend(
    run: Run,
    id: Id,
    days: Annotated[int, typer.Option(help="Days to add to the deadline.")],
    by: By = None,
    key: Key = None,
    reason: Reason = "",
) -> Result:
    """Extend a deadline, once and by two months at most.

    Inform the person who asked before the first deadline: `ease request letter` writes the letter.

    Example: `ease request extend runs/first client-3-1f2e3d --days 30 --reason "three sites have to answer"`
    """
    from ease.commands.register import extend_request

    return extend_request(run, id, days, by, key, reason)


@command
def cancel(run: Run, id: Id, by: By = None, key: Key = None, reason: Reason = "") -> Result:
    """Cancel a request that is not being worked on.

    Example: `ease request cancel runs/first client-3-1f2e3d --reason "submitted by mistake"`
    """
    from ease.commands.requests import cancel_request

    return cancel_request(run, id, by, key, reason)


@command
def due(
    run: Run,
    within: Annotated[
        int | None, typer.Option(min=0, metavar="DAYS", help="Days ahead. By default remind.within_days of the policy.")
    ] = None,
    notify: Annotated[
        bool, typer.Option("--notify", help="Post what is due as JSON to remind.url of the policy.")
    ] = False,
) -> Result:
    """List what is overdue or due soon.

    Exit code 0 if nothing is due, 4 if something is due soon, 5 if something is overdue.

    Example: `ease request due runs/first --within 14 --notify`
    """
    from ease.commands.register import due_requests

    summary = due_requests(run, within, notify)
    return summary, summary.exit_code


class Letter(StrEnum):
    received = "received"
    extended = "extended"
    granted = "granted"
    refused = "refused"


@command
def letter(
    run: Run,
    id: Id,
    kind: Annotated[Letter | None, typer.Option(help="Which letter. By default the one its state calls for.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file instead of the screen.")] = None,
) -> Result:
    """Write the letter to the person who asked.

    It says in plain words what was received, extended, granted or refused. Names of the controller and of the
    supervisory authority come from `office` in policy.toml.

    Example: `ease request letter runs/first client-3-1f2e3d --out letter.txt`
    """
    from ease.commands.register import write_letter

    return write_letter(run, id, None if kind is None else kind.value, out)


@command
def notify(
    run: Run,
    id: Id,
    recipient: Annotated[
        str | None, typer.Option(metavar="NAME", help="The notified recipient. Without it, list recipients to notify.")
    ] = None,
    by: By = None,
    key: Key = None,
) -> Result:
    """Record that a recipient of an exported model was notified.

    Recipients are those of `ease export --recipient` whose model still contains what was forgotten.

    Example: `ease request notify runs/first client-3-1f2e3d --recipient "Clinic 5"`
    """
    from ease.commands.register import notify_recipient

    return notify_recipient(run, id, recipient, by, key)


@command
def export(
    run: Run, out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to.")] = Path("register")
) -> Result:
    """Write the register as CSV and as a page to print.

    It holds every request, step and consent. Consents are also written as records with the fields of
    ISO/IEC TS 27560.

    Example: `ease request export runs/first --out register`
    """
    from ease.commands.register import export_register

    return export_register(run, out)
