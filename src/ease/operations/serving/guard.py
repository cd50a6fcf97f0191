"""Who is answered: requests that are small, meant for this server, and from someone who has the key."""

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ease.operations.serving.messages import Problem

LONGEST_ADDRESS = 8192
"""Characters of a path with its query."""
MOST_FIELDS = 10
"""Most fields of a query."""
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # One request per connection, so that a connection's deadline is the request's.
    "Connection": "close",
}
ENTRANCES = ("/", "/queue")
"""Pages that a person opens from a link or by typing."""
KEYLESS = ("/health", "/openapi.json")
"""Paths that hold nothing private."""


class Guard:
    """Passes on requests that are small, meant for this server, and from someone who has the key."""

    def __init__(self, app: ASGIApp, address: str, hosts: frozenset[str] | None, key: str | None, cookie: str) -> None:
        self._app, self._address, self._hosts, self._key, self._cookie = app, address, hosts, key, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)  # a page with scripts names them in a policy of its own
            await send(message)

        request = Request(scope)
        try:
            answer = self._checked(request) or self._app
        except HTTPException as error:
            answer = refused(request, error)
        await answer(scope, receive, send_with_headers)

    def _checked(self, request: Request) -> Response | None:
        """Answer a request with the key in the address; raise an exception for a refused one."""
        query = request.scope["query_string"]
        if len(request.scope["raw_path"]) + len(query) > LONGEST_ADDRESS:
            raise HTTPException(414, f"the address has more than {LONGEST_ADDRESS} characters")
        self._check_origin(request)
        request.state.query = fields = _fields(query)
        path = request.scope["path"]
        if path in ENTRANCES and self._key is not None and "key" in fields:
            self._check_key(fields["key"])
            # The redirect removes the key from the address, so that no history keeps it.
            answer = Response(status_code=303, headers={"Location": path})
            answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict")
            return answer
        if path not in KEYLESS:
            self._check_key(self._given_key(request))
        return None

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "").lower()
        if self._hosts is not None and host not in self._hosts:
            raise HTTPException(403, f"open it as {self._address}")
        foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        origin = request.headers.get("origin")
        if (foreign and not (request.method == "GET" and request.scope["path"] in ENTRANCES)) or (
            origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}")
        ):
            raise HTTPException(403, "pages of other sites are not answered")

    def _given_key(self, request: Request) -> str:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else request.cookies.get(self._cookie, "")

    def _check_key(self, given: str) -> None:
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise HTTPException(
                401,
                "the key is missing or wrong: open the address that `ease serve` printed, or send it as a bearer token",
                {"WWW-Authenticate": "Bearer"},
            )


def _fields(query: bytes) -> dict[str, str]:
    """The last value of each field of a query."""
    try:
        fields = parse_qs(query.decode("ascii"), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError:
        raise HTTPException(400, "the query in the address cannot be read") from None
    return {name: values[-1] for name, values in fields.items()}


def refused(request: Request, error: HTTPException) -> Response:
    """The answer that says in one sentence why there is no other."""
    return JSONResponse(Problem(error=error.detail).model_dump(), error.status_code, error.headers)
