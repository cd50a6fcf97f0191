"""A small HTTP server for a model: private unless told otherwise, and nothing is parsed before its size is known."""

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET6, SHUT_RDWR
from socketserver import TCPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from ease.config import Config, validate
from ease.errors import UserError
from ease.serving.served import Changing, Found, Served, as_json
from ease.show.found import found_sheet
from ease.show.sheet import data_address
from ease.show.template import render

LONGEST_ADDRESS = 8192
"""Letters of a path with its question."""
LONGEST_TEXT = 2000
LARGEST_JSON = 1 << 18
"""Bytes of a question."""
LARGEST_PICTURE = 20 << 20
"""Bytes of a picture."""
MOST_PIXELS = 50_000_000
MOST_TEXTS = 64
MOST_HITS = 200
AT_ONCE = 16
"""Connections; further ones are turned away."""
SECONDS = 60.0
"""After which a connection is cut, whatever it is doing."""
ON_PAGE = 12
Among = Literal["all", "train", "test"]
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
    "Connection": "close",
}


class SearchAsked(Config):
    """What `/search` is asked."""

    words: str = Field(min_length=1, max_length=LONGEST_TEXT)
    k: int = Field(5, ge=1, le=MOST_HITS)
    """How many pictures each model finds."""
    among: Among = "all"
    pictures: bool = False
    """Whether each hit comes with a small picture, as a data address."""


class TextsAsked(Config):
    """What `/encode` is asked."""

    texts: tuple[str, ...] = Field(min_length=1, max_length=MOST_TEXTS)


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Reply:
    """An answer before it is sent."""

    content: bytes
    kind: str = "application/json"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request whose sizes were checked."""

    method: str
    path: str
    query: Mapping[str, str]
    kind: str
    """Of the body, as its sender calls it."""
    body: Callable[[int], bytes]
    """Reads it, if it has at most so many bytes."""


def told(value: Any, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> Reply:
    return Reply(json.dumps(value, allow_nan=False).encode(), status=status, headers=headers)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


# --- answers ---


@dataclass(frozen=True)
class Desk:
    """Answers what is asked about a model, one question at a time: memory is then bounded by the largest one."""

    served: Served
    pictures: bool
    """Whether pictures of the data may be shown at all."""
    turn: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, asked: Asked) -> Reply:
        routes: dict[str, tuple[Callable[[Asked], Reply], tuple[str, ...]]] = {
            "/": (self._page, ("GET",)),
            "/health": (self._health, ("GET",)),
            "/search": (self._search, ("GET", "POST")),
            "/encode": (self._encode, ("GET", "POST")),
        }
        if asked.path not in routes:
            raise Refused(HTTPStatus.NOT_FOUND, f"nothing here; there are: {', '.join(routes)}")
        route, methods = routes[asked.path]
        if asked.method not in methods:
            allowed = ", ".join(methods)
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{asked.path} takes {allowed}", Allow=allowed)
        with self.turn:
            return route(asked)

    def _health(self, asked: Asked) -> Reply:
        return told({"status": "fine", **asdict(self.served.facts())})

    def _search(self, asked: Asked) -> Reply:
        question = validate(SearchAsked, _values(asked), asked.path)
        if question.pictures and not self.pictures:
            raise Refused(HTTPStatus.FORBIDDEN, "pictures are shown on the machine that holds them alone")
        found = self.served.search(question.words, question.k, question.among)
        hits = {
            name: [as_json(hit) | self._picture(found, hit.place, question.pictures) for hit in each]
            for name, each in found.hits.items()
        }
        return told({"words": question.words, "model": self.served.facts().model, "found": hits})

    def _picture(self, found: Found, place: int, wanted: bool) -> dict[str, str]:
        return {"picture": data_address(found.pixels[place])} if wanted else {}

    def _encode(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            embeddings = self.served.encode_text(_texts(asked.query.get("text", "")))
        elif asked.kind == "application/json":
            question = validate(TextsAsked, _values(asked), asked.path)
            embeddings = self.served.encode_text(_texts(*question.texts))
        elif asked.kind.startswith("image/"):
            embeddings = self.served.encode_image(memoryview(asked.body(LARGEST_PICTURE)), MOST_PIXELS)
        else:
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "send application/json with texts, or a picture as image/jpeg, image/png or alike",
            )
        return told({"model": self.served.facts().model, "embeddings": embeddings.tolist()})

    def _page(self, asked: Asked) -> Reply:
        words, found = asked.query.get("words", ""), None
        problem, status = "", HTTPStatus.OK
        if words:
            try:
                question = validate(SearchAsked, {"k": ON_PAGE, **asked.query}, "search")
                found = self.served.search(question.words, question.k, question.among)
            except Changing:
                raise
            except UserError as error:
                problem, status = str(error), HTTPStatus.BAD_REQUEST
        facts = self.served.facts().in_words()
        choices = {"among": ("all", "train", "test"), "chosen": asked.query.get("among", "all")}
        top = render("ask.html", words=words, longest=LONGEST_TEXT, problem=problem, facts=facts, **choices)
        title, hits = (f"Search: “{words}”", found.hits) if found else ("Search", {})
        pixels = found.pixels if found and self.pictures else None
        page = found_sheet(title, hits, pixels, self.served.compares, top)
        return Reply(page.encode(), "text/html; charset=utf-8", status)


def _values(asked: Asked) -> dict[str, Any]:
    """What was asked, from the address or from the body."""
    if asked.method == "GET":
        return dict(asked.query)
    if asked.kind != "application/json":
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
    try:
        values = json.loads(asked.body(LARGEST_JSON))
    except (ValueError, RecursionError):
        raise Refused(HTTPStatus.BAD_REQUEST, "the body is no JSON") from None
    if not isinstance(values, dict):
        raise Refused(HTTPStatus.BAD_REQUEST, 'the body is no JSON object, such as {"words": "a dog"}')
    return values


def _texts(*texts: str) -> tuple[str, ...]:
    if any(len(text) > LONGEST_TEXT for text in texts):
        raise UserError(f"a text has more than {LONGEST_TEXT} letters; shorten it")
    return texts


# --- the server ---


class Server(ThreadingHTTPServer):
    """Listens; a connection is a thread, of which there are few, each for a minute at most."""

    daemon_threads = True
    allow_reuse_port = False  # a second one at the same port would take its visitors
    request_queue_size = AT_ONCE

    def __init__(self, served: Served, host: str, port: int, key: str | None) -> None:
        self.key, self.open_to_others = key, not is_loopback(host)
        self.desk = Desk(served, pictures=not self.open_to_others)
        self._free = threading.BoundedSemaphore(AT_ONCE)
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name that http.server does, which may ask the network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def address(self) -> str:
        host = self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"

    @property
    def cookie(self) -> str:
        """Browsers keep cookies by host, not by port."""
        return f"ease-{self.server_port}"

    @property
    def hosts(self) -> set[str]:
        """What a browser on this machine may call it; any other name is a page that pretends to be from here."""
        return {f"{host}:{self.server_port}" for host in ("127.0.0.1", "localhost", "[::1]")}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(1)
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        cut = threading.Timer(SECONDS, _cut, (request,))
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no news, and what was asked is private."""


def _cut(connection: Any) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One connection, one question."""

    protocol_version = "HTTP/1.1"
    timeout = 20
    server: Server

    def version_string(self) -> str:
        return "ease"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what people look for is theirs."""

    def do_GET(self) -> None:
        self.close_connection = True
        try:
            reply = self._checked()
        except Refused as error:
            reply = told({"error": str(error)}, error.status, **error.headers)
        except Changing as error:
            reply = told({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)
        except UserError as error:
            reply = told({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except MemoryError:
            reply = told({"error": "not enough memory"}, HTTPStatus.SERVICE_UNAVAILABLE)
        except (ConnectionError, TimeoutError):
            return
        except Exception:
            # Its words may hold paths or captions.
            reply = told({"error": "a fault of this program"}, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(reply)

    do_POST = do_HEAD = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, in our form."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or "GET"
        self.request_version = self.protocol_version
        status = HTTPStatus(code)
        self._send(told({"error": (message or status.phrase)[:200]}, status))

    def _send(self, reply: Reply) -> None:
        with suppress(ConnectionError, TimeoutError):
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.content)))
            for name, value in {**HEADERS, **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.content)

    def _checked(self) -> Reply:
        """The answer, once the request is known to be small, meant for us, and from someone who has the key."""
        if len(self.path) > LONGEST_ADDRESS:
            raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address of more than {LONGEST_ADDRESS} letters")
        self._check_origin()
        parts = urlsplit(self.path)
        try:
            fields = parse_qs(parts.query, keep_blank_values=True, max_num_fields=10, errors="strict")
        except (ValueError, UnicodeError):
            raise Refused(HTTPStatus.BAD_REQUEST, "the question in the address cannot be read") from None
        query = {name: values[-1] for name, values in fields.items()}
        if parts.path == "/" and self.server.key is not None and "key" in query:
            self._check_key(query["key"])
            cookie = f"{self.server.cookie}={self.server.key}; HttpOnly; SameSite=Strict; Path=/"
            # Out of the address, so that it stays in no history.
            return told({}, HTTPStatus.SEE_OTHER, **{"Location": "/", "Set-Cookie": cookie})
        if parts.path != "/health":
            self._check_key(self._given_key())
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        method = "GET" if self.command == "HEAD" else self.command
        return self.server.desk.answer(Asked(method, parts.path, query, kind, self._body))

    def _check_origin(self) -> None:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not self.server.open_to_others and host.lower() not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN, f"open it as {self.server.address}")
        from_elsewhere = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if (from_elsewhere and urlsplit(self.path).path != "/") or (
            origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        ):
            raise Refused(HTTPStatus.FORBIDDEN, "pages of other sites are not answered")

    def _given_key(self) -> str:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return "" if cookie is None else cookie.value

    def _check_key(self, given: str) -> None:
        key = self.server.key
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "the key is missing or wrong: open the address that `ease serve` told, or send it as a bearer token",
                **{"WWW-Authenticate": "Bearer"},
            )

    def _body(self, most: int) -> bytes:
        if self.headers.get("Transfer-Encoding") is not None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "send the body in one piece, with its Content-Length")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or len(length) > 12:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long the body is (Content-Length)")
        if int(length) > most:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{int(length):,} bytes; at most {most:,} are taken")
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, "the body is shorter than it was said to be")
        return content


def new_key() -> str:
    return secrets.token_urlsafe(24)
