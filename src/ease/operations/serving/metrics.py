"""Measurements of a server in the format of Prometheus: requests, seconds, and what waits in the queue."""

import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ease import __version__
from ease.operations.ledger.deadlines import due
from ease.operations.ledger.policy import load_policy
from ease.operations.ledger.records import now
from ease.operations.ledger.states import STATES
from ease.operations.ledger.store import Ledger

CONTENT_TYPE = CONTENT_TYPE_LATEST
URGENCIES = ("overdue", "soon", "later")


class Metrics:
    """Counts what a server answers. Paths are those of the routes, so nothing that people look for is counted."""

    def __init__(self, run: Path | None, log: Callable[[str, int, float], None] | None = None) -> None:
        self._run = run
        self._log = log
        """Called with path, status and seconds of every answer."""
        self._registry = CollectorRegistry()
        self._answers = Counter("ease_http_requests", "Answered requests.", ("path", "status"), registry=self._registry)
        self._seconds = Histogram(
            "ease_http_request_seconds", "Seconds that an answer took.", ("path",), registry=self._registry
        )
        self._states = Gauge("ease_requests", "Requests to be forgotten.", ("state",), registry=self._registry)
        self._due = Gauge("ease_requests_due", "Open requests.", ("urgency",), registry=self._registry)
        about = Gauge("ease_info", "The version that runs.", ("version",), registry=self._registry)
        about.labels(__version__).set(1)

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Return the application with every answer counted."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            begun, status = time.perf_counter(), 0

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noted)
            finally:
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._answers.labels(path, str(status)).inc()
                seconds = time.perf_counter() - begun
                self._seconds.labels(path).observe(seconds)
                if self._log is not None:
                    self._log(path, status, seconds)

        return measured

    def page(self) -> bytes:
        """Return all measurements as text; those of the queue are read from the ledger."""
        if self._run is not None:
            entries, policy = Ledger(self._run).entries(), load_policy(self._run)
            for state in STATES:
                self._states.labels(state).set(sum(each.state == state for each in entries))
            dues = due(entries, now(), policy.time_zone, policy.remind.within_days)
            for urgency in URGENCIES:
                self._due.labels(urgency).set(sum(each.urgency == urgency for each in dues))
        return generate_latest(self._registry)
