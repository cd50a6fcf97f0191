"""A model over HTTP: uvicorn with a deadline for every part of a request, and room for the next connection."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ease.operations.serving.app import SearchService
from ease.operations.serving.guard import Guard
from ease.operations.serving.queue import Queue
from ease.operations.serving.served import Served

MOST_CONNECTIONS = 512
HEAD_SECONDS = 10.0
"""After which a connection is closed whose request line and headers are not complete."""
SECONDS = 60.0
"""After which a connection is cut, whatever it is doing."""
CLOSING_SECONDS = 2
"""For answers that are on their way when the server is stopped."""
LARGEST_HEAD = 1 << 16
"""Bytes of the request line and headers."""
TURNED_AWAY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
ANSWERED = 2
"""The rank of a connection whose question is being answered."""


def most_connections() -> int:
    """How many connections are held: at most half of the files that this process may have open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, files // 2)


class BoundedProtocol(H11Protocol):
    """A connection with deadlines, which uvicorn has only for the pause between two requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened = self.loop.time()
        self._is_cut = False
        self._deadlines = (
            self.loop.call_later(HEAD_SECONDS, self._close_without_request),
            self.loop.call_later(SECONDS, self._cut),
        )
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for each in self._deadlines:
            each.cancel()
        super().connection_lost(exc)

    def _close_without_request(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def _cut(self) -> None:
        self._is_cut = True
        self.transport.abort()

    def _make_room(self) -> None:
        """Cut the oldest connection that keeps the server waiting; if there is none, turn this one away."""
        others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        others = [each for each in others if not each._is_cut]
        if len(others) < most_connections():
            return
        oldest = min(others, key=lambda each: (each._rank(), each._opened))
        if oldest._rank() < ANSWERED:
            oldest._cut()
        else:
            self.transport.write(TURNED_AWAY)
            self.transport.close()

    def _rank(self) -> int:
        """The higher, the later a connection is cut: 0 before its head is whole, 1 while it sends a body or reads."""
        if self.cycle is None:
            return 0
        return 1 if self.cycle.more_body or self.cycle.response_complete else ANSWERED


class Server:
    """A model behind a listening socket; it answers from `run` until `stop`, Ctrl-C or SIGTERM."""

    def __init__(
        self,
        served: Served,
        host: str,
        port: int,
        key: str | None,
        queue: Queue | None = None,
        log: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self.key = key
        # No second server may listen at the same port: it would take this one's visitors.
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        address, self.port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{address}]' if ':' in address else address}:{self.port}"
        # A browser on this machine may call it by these names; any other is a page that pretends to be from here.
        here = frozenset(f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]"))
        app = Guard(
            SearchService(served, is_loopback(host), queue, log).application(),
            self.address,
            hosts=here if is_loopback(host) else None,
            key=key,
            cookie=f"ease-{self.port}",  # browsers keep cookies by host, not by port
        )
        self._uvicorn = uvicorn.Server(_config(app))

    def run(self) -> None:
        self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, which is in another thread."""
        self._uvicorn.should_exit = True


def _config(app: Any) -> uvicorn.Config:
    """Nothing is logged, because what people look for is theirs."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def new_key() -> str:
    return secrets.token_urlsafe(24)
