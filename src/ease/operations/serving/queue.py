"""The queue in a browser: requests by urgency, one request with all there is, and decisions if they are allowed."""

import asyncio
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ease.errors import UserError
from ease.operations.evidence import read_certificate
from ease.operations.evidence.page import certificate_page
from ease.operations.ledger.people import Person
from ease.operations.ledger.policy import load_policy
from ease.operations.ledger.queue_view import certificate_path, detail, detail_page, list_page
from ease.operations.ledger.store import Ledger
from ease.runs.run import Run
from ease.show.page import policy as content_policy
from ease.show.template import source

LARGEST_FORM = 1 << 15
"""Bytes of a decision."""
FORM_SECONDS = 30.0
FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True)
class Queue:
    """The queue of one run. Without a `decider` it is read-only."""

    folder: Path
    decider: Person | None = None
    secret: str = ""
    """Secret of this server; a form without a token made from it is refused."""

    @classmethod
    def of(cls, folder: Path, decider: Person | None) -> "Queue":
        return cls(folder, decider, secrets.token_hex(32))

    def routes(self) -> list[Route]:
        return [
            Route("/queue", self.list),
            Route("/queue/{id}", self.detail),
            Route("/queue/{id}/certificate", self.certificate),
            Route("/queue/{id}/approve", self.approve, methods=["POST"]),
            Route("/queue/{id}/refuse", self.refuse, methods=["POST"]),
        ]

    async def list(self, request: Request) -> Response:
        return await self._page(lambda run: list_page(run))

    async def detail(self, request: Request) -> Response:
        return await self._shown(request.path_params["id"])

    async def certificate(self, request: Request) -> Response:
        def page(run: Run) -> str:
            path = certificate_path(run, Ledger(run.folder).entry(request.path_params["id"]))
            if path is None:
                raise UserError("no certificate was issued for this request; issue one with `ease certificate`")
            return certificate_page(*read_certificate(path))

        answer = await self._page(page)
        # It checks itself by a script, which its own policy names by its hash.
        own = content_policy(source("page.css"), source("certificate.js"))
        answer.headers["Content-Security-Policy"] = f"{own}; frame-ancestors 'none'"
        return answer

    async def approve(self, request: Request) -> Response:
        def decide(ledger: Ledger, id: str, decider: Person, form: dict[str, str]) -> None:
            ledger.approve(id, decider.name, decider.key, load_policy(self.folder).approval.people)

        return await self._decided(request, decide)

    async def refuse(self, request: Request) -> Response:
        def decide(ledger: Ledger, id: str, decider: Person, form: dict[str, str]) -> None:
            ledger.refuse(id, decider.name, form.get("reason", ""), decider.key)

        return await self._decided(request, decide)

    # --- how ---

    async def _page(self, page: Callable[[Run], str], status: int = 200) -> Response:
        text = await asyncio.to_thread(lambda: page(Run.load(self.folder)))
        # With "no-referrer" browsers send forms with the origin "null", which is the same as a stranger's.
        return HTMLResponse(text, status, {"Referrer-Policy": "same-origin"})

    async def _shown(self, id: str, problem: str = "", status: int = 200) -> Response:
        decider = None if self.decider is None else self.decider.name
        return await self._page(
            lambda run: detail_page(run, id, decider, self._token(id, detail(run, id).token), problem), status
        )

    def _token(self, id: str, step: str) -> str:
        """Proof that a form is of this server and of the request's last step."""
        return hmac.digest(self.secret.encode(), f"{id} {step}".encode(), "sha256").hex()

    async def _decided(
        self, request: Request, decide: Callable[[Ledger, str, Person, dict[str, str]], None]
    ) -> Response:
        if self.decider is None:
            raise HTTPException(403, "this page is read-only: start it with `ease serve RUN --allow-decisions`")
        form, id, decider = await _form(request), request.path_params["id"], self.decider

        def run_it() -> None:
            ledger = Ledger(self.folder)
            expected = self._token(id, ledger.events(ledger.entry(id).id)[-1].content)
            if not hmac.compare_digest(expected.encode(), form.get("token", "").encode()):
                raise UserError(f"{id}: has changed since you opened the page; look again, then decide")
            decide(ledger, id, decider, form)

        try:
            await asyncio.to_thread(run_it)
        except UserError as error:
            return await self._shown(id, str(error), 409)
        return RedirectResponse(f"/queue/{id}", 303)


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form; one that is too large or too slow is refused."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise HTTPException(415, f"send {FORM}")
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_FORM:
                    raise HTTPException(413, f"at most {LARGEST_FORM:,} bytes are taken")
    except TimeoutError:
        raise HTTPException(408, f"the form did not come in {FORM_SECONDS:g} seconds") from None
    try:
        fields = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=8, errors="strict")
    except ValueError:
        raise HTTPException(400, "the form cannot be read") from None
    return {name: values[-1] for name, values in fields.items()}
