"""`ease serve` as a process, with visitors who keep it waiting: others hardly notice."""

import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytestmark = pytest.mark.slow

USERS = 4
IDLE, DRIPPING = 200, 20
QUIET_SECONDS, CROWDED_SECONDS = 4.0, 12.0
"""The crowd stays longer than the deadline for a request's head, so that its connections are closed and come again."""
THINKING = 0.02
"""Seconds between an answer and the same user's next question."""
TIMES = 3.0
FLOOR = 0.1
"""Seconds. A p95 below this always passes: people take it for immediate, and on a shared machine a neighbour's time
slices alone move a p95 of a few milliseconds by tens. What is guarded against took 59 seconds or was a refusal."""


@pytest.fixture
def served(one_forgotten: Path, shared_cache: Path) -> Iterator[dict[str, Any]]:
    """The first line of a server's process, which SIGTERM ends, whoever is still connected."""
    command = [sys.executable, "-m", "ease", "serve", str(one_forgotten), "--port", "0", "--json"]
    environment = os.environ | {"EASE_CACHE": str(shared_cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


class Crowd:
    """Idle connections, half with a part of a head, and bodies that drip; each that is closed is opened again."""

    def __init__(self, served: dict[str, Any]) -> None:
        self._port = int(served["address"].rpartition(":")[2])
        self._dripping = (
            f"POST /encode HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAuthorization: Bearer {served['key']}\r\n"
            "Content-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
        ).encode()
        self._lines: dict[socket.socket, bytes] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._persist)
        self.opened = 0

    def __enter__(self) -> "Crowd":
        for begun, count in ((b"", IDLE // 2), (b"GET /health HTTP/1.1\r\nHo", IDLE // 2), (self._dripping, DRIPPING)):
            for _ in range(count):
                self._open(begun)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for line in self._lines:
            line.close()

    def _open(self, begun: bytes) -> None:
        line = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        line.sendall(begun)
        line.setblocking(False)
        self._lines[line] = begun
        self.opened += 1

    def _persist(self) -> None:
        while not self._ended.wait(0.2):
            for line, begun in list(self._lines.items()):
                if self._is_open(line, begun):
                    continue
                line.close()
                del self._lines[line]
                self._open(begun)

    def _is_open(self, line: socket.socket, begun: bytes) -> bool:
        try:
            if begun == self._dripping:
                line.send(b" ")
            line.recv(1000)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # either its end, or an answer, after which it ends

    def connected(self) -> int:
        """Connections that the server holds at this moment."""
        with selectors.DefaultSelector() as selector:
            for line in list(self._lines):
                selector.register(line, selectors.EVENT_READ)
            return len(self._lines) - len(selector.select(timeout=0))


def answer_times(served: dict[str, Any], seconds: float) -> list[float]:
    """Seconds that honest users wait for each answer; every answer is a success."""
    headers = {"Authorization": f"Bearer {served['key']}", "Content-Type": "application/json"}
    questions = (
        Request(served["address"] + "/health"),
        Request(served["address"] + "/search?words=a+boat", headers=headers),
        Request(served["address"] + "/encode", json.dumps({"texts": ["a boat"]}).encode(), headers),
        Request(served["address"] + "/?words=a+boat", headers=headers),
    )
    ends = time.monotonic() + seconds

    def user(number: int) -> list[float]:
        took: list[float] = []
        while time.monotonic() < ends:
            question = questions[(number + len(took)) % len(questions)]
            begun = time.perf_counter()
            with urlopen(question, timeout=30) as answer:  # an answer other than success is an HTTPError
                answer.read()
            took.append(time.perf_counter() - begun)
            time.sleep(THINKING)
        return took

    with ThreadPoolExecutor(USERS) as pool:
        return [each for took in pool.map(user, range(USERS)) for each in took]


def p95(times: list[float]) -> float:
    assert len(times) >= 40, "too few for a p95"
    return statistics.quantiles(times, n=20)[-1]


def test_honest_users_hardly_notice_idle_and_dripping_connections(
    served: dict[str, Any],
) -> None:
    answer_times(served, 0.5)  # some parts are loaded when they are first needed
    quiet = p95(answer_times(served, QUIET_SECONDS))
    with Crowd(served) as crowd:
        crowded = p95(answer_times(served, CROWDED_SECONDS))
        assert crowd.connected() > 0.8 * (IDLE + DRIPPING), "the crowd was not there"
        assert crowd.opened >= 2 * IDLE, "the idle ones were not closed and did not come again"
    print(f"p95 {quiet * 1000:.1f} ms without and {crowded * 1000:.1f} ms with {IDLE} idle and {DRIPPING} dripping")
    assert crowded < max(TIMES * quiet, FLOOR)
