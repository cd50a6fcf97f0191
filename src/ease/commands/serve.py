"""What `ease serve` does: open a run or an export, print its address, and answer until stopped."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ease.console import labelled, show, status
from ease.errors import UserError
from ease.operations.serving.messages import Facts
from ease.operations.serving.served import open_served


@dataclass(frozen=True)
class ServeSummary:
    """The address of a served model, and which model it is."""

    address: str
    key: str | None
    facts: Facts

    @property
    def page(self) -> str:
        """What to open in a browser."""
        return f"{self.address}/" if self.key is None else f"{self.address}/?key={self.key}"

    def as_json(self) -> dict[str, Any]:
        return {"address": self.address, "key": self.key, "page": self.page, **self.facts.model_dump()}

    def render(self) -> Iterator[RenderableType]:
        yield self.facts.in_words()
        yield labelled("page", self.page)
        header = "" if self.key is None else f' -H "Authorization: Bearer {self.key}"'
        yield labelled("try it", f'curl{header} "{self.address}/search?words=a+dog"')
        yield "Ctrl-C stops it."


def serve_model(
    folder: Path, request: str | None, host: str, port: int, public: bool, keyless: bool, as_json: bool, quiet: bool
) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    _check_installed()
    from ease.operations.serving.server import Server, is_loopback, new_key

    if not is_loopback(host) and not public:
        raise UserError(
            f"--host {host}: others could reach captions of the run's data there; add --public if that is meant, "
            "and put a proxy with TLS in front of it"
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
    # A shell that starts this in the background has SIGINT ignored; uvicorn raises both again once it has stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    started = ServeSummary(server.address, server.key, served.facts())
    if as_json:
        print(json.dumps(started.as_json()), flush=True)
    else:
        show(started)
        sys.stdout.flush()
    server.run()


def _check_installed() -> None:
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UserError('ease serve needs the serve extra: pip install "ease-unlearning[serve]"')
