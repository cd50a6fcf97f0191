"""`ease serve`: opens a run or an export, prints its address, and serves it until stopped."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import RenderableType

from ease.commands.requests import someone
from ease.console import labelled, log_event, show, status
from ease.errors import UserError
from ease.operations.ledger.names import answer_name
from ease.operations.ledger.people import person
from ease.operations.ledger.policy import load_policy
from ease.operations.serving.messages import Facts
from ease.operations.serving.served import open_served


class ServeSummary(Facts):
    """`ease serve`: its first line. `/health` answers with the fields from `model` to `version`."""

    address: str
    key: str | None
    """To be sent as `Authorization: Bearer KEY`. Null with `--no-key`."""
    page: str
    """The address to open in a browser."""
    queue: str | None
    """The address of the page of requests. Null for exports, and where others can reach the server."""

    def render(self) -> Iterator[RenderableType]:
        yield self.in_words()
        yield labelled("page", self.page)
        if self.queue is not None:
            yield labelled("queue", self.queue)
        header = "" if self.key is None else f' -H "Authorization: Bearer {self.key}"'
        yield labelled("try it", f'curl{header} "{self.address}/search?words=a+dog"')
        yield "Ctrl-C stops it."


@dataclass(frozen=True)
class Deciding:
    """Who decides on requests from the queue page."""

    by: str | None
    key: Path | None


def serve_model(
    folder: Path,
    request: str | None,
    host: str,
    port: int,
    public: bool,
    keyless: bool,
    deciding: Deciding | None,
    as_json: bool,
    quiet: bool,
    log: bool = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM; `log` prints a JSON line for each answer on the error stream."""
    _check_installed()
    from ease.operations.serving.queue import Queue
    from ease.operations.serving.server import Server, is_loopback, new_key

    if not is_loopback(host) and not public:
        raise UserError(
            f"--host {host}: others could reach captions of the run's data there; add --public if that is meant, "
            "and put a proxy with TLS in front of it"
        )
    if keyless and not is_loopback(host):
        raise UserError(f"--no-key: not at {host}, which others can reach; leave the option out")
    if request is not None and (folder / "run.json").is_file():
        request = answer_name(folder, request)
    with status("opening the model", quiet):
        served = open_served(folder, request)
        served.encode_text(["a word"])  # some encoders are loaded when first used, and nobody should wait for that
    # Names and reasons of people are shown on the machine that holds them, and nowhere else.
    has_queue = (folder / "run.json").is_file() and is_loopback(host)
    if deciding is not None and not has_queue:
        raise UserError("--allow-decisions: the queue is only served from a run on its own machine")
    decider = None
    if deciding is not None:
        decider = person(load_policy(folder).approval, someone(deciding.by), deciding.key)
    queue = Queue.of(folder, decider) if has_queue else None
    try:
        server = Server(served, host, port, None if keyless else new_key(), queue, _log_answer if log else None)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror or error}); choose another port, "
            "or 0 for any that is free"
        ) from error
    # A shell that starts this in the background has SIGINT ignored; uvicorn raises both again once it has stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    key = "" if server.key is None else f"?key={server.key}"
    started = ServeSummary(
        **dict(served.facts()),
        address=server.address,
        key=server.key,
        page=f"{server.address}/{key}",
        queue=None if queue is None else f"{server.address}/queue{key}",
    )
    if as_json:
        print(json.dumps(started.model_dump(mode="json")), flush=True)
    else:
        show(started)
        sys.stdout.flush()
    server.run()


def _log_answer(path: str, status: int, seconds: float) -> None:
    log_event("answered", path=path, status=status, seconds=round(seconds, 4))


def _check_installed() -> None:
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise UserError('ease serve needs the serve extra: pip install "ease-unlearning[serve]"')
