"""What `ease serve` does: open a run or an export, say where it is met, and answer until stopped."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ease.console import labelled, show, status
from ease.errors import UserError
from ease.serving.http import Server, is_loopback, new_key
from ease.serving.served import Facts, open_served


@dataclass(frozen=True)
class ServeSummary:
    """Where a model is met, and which one."""

    address: str
    key: str | None
    facts: Facts

    @property
    def page(self) -> str:
        """What to open in a browser."""
        return f"{self.address}/" if self.key is None else f"{self.address}/?key={self.key}"

    def as_json(self) -> dict[str, Any]:
        return {"address": self.address, "key": self.key, "page": self.page, **asdict(self.facts)}

    def render(self) -> Iterator[RenderableType]:
        yield self.facts.in_words()
        yield labelled("page", self.page)
        header = "" if self.key is None else f' -H "Authorization: Bearer {self.key}"'
        yield labelled("try it", f'curl{header} "{self.address}/search?words=a+dog"')
        yield "Ctrl-C stops it."


def serve_model(
    folder: Path, request: str | None, host: str, port: int, public: bool, keyless: bool, as_json: bool, quiet: bool
) -> None:
    """Serve until Ctrl-C or SIGTERM, both of which are a good end."""
    if not is_loopback(host) and not public:
        raise UserError(
            f"--host {host}: others could reach captions of the run's data there; say --public if that is meant, "
            "and put a proxy with TLS before it"
        )
    if keyless and not is_loopback(host):
        raise UserError(f"--no-key: not at {host}, which others can reach; leave the option out")
    with status("opening the model", quiet):
        served = open_served(folder, request)
        served.encode_text(["a word"])  # some encoders are loaded when first used, and nobody should wait for that
    try:
        server = Server(served, host, port, None if keyless else new_key())
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror or error}); choose another port, "
            "or 0 for any that is free"
        ) from error
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell that starts it in the background has the first one ignored
        signal.signal(each, _stop)
    with server:
        started = ServeSummary(server.address, server.key, served.facts())
        if as_json:
            print(json.dumps(started.as_json()), flush=True)
        else:
            show(started)
            sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            if not quiet:
                print("\nstopped", file=sys.stderr)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt
