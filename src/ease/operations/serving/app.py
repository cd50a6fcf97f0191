"""The application that answers questions about a model: sizes are checked before anything is parsed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ease.config import Config, validate
from ease.errors import UserError
from ease.operations.serving.guard import refused
from ease.operations.serving.messages import (
    LONGEST_TEXT,
    EncodeRequest,
    EncodeResponse,
    Health,
    SearchHit,
    SearchRequest,
    SearchResponse,
    openapi,
)
from ease.operations.serving.metrics import CONTENT_TYPE, Metrics
from ease.operations.serving.queue import Queue
from ease.operations.serving.served import Changing, Found, Served, as_json
from ease.runs.using import Hit
from ease.show.found import found_sheet
from ease.show.sheet import data_address
from ease.show.template import render

LARGEST_JSON = 1 << 18
"""Bytes of a JSON body."""
LARGEST_PICTURE = 20 << 20
"""Bytes of a picture."""
LARGEST_HELD = 128 << 20
"""Bytes of all bodies in memory."""
MOST_PIXELS = 50_000_000
MOST_WAITING = 64
"""Questions that wait for the model."""
BODY_SECONDS = 30.0
"""After which a body that is not complete is refused."""
ON_PAGE = 12


class SearchService:
    """Answers questions about a model. The model works on one at a time, so the largest one bounds the memory."""

    def __init__(
        self,
        served: Served,
        pictures: bool,
        queue: Queue | None = None,
        log: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self._served = served
        self._pictures = pictures
        """Whether pictures of the data may be shown."""
        self._queue = queue
        """The queue of a run that is served on its own machine."""
        self._metrics = Metrics(None if queue is None else queue.folder, log)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._held = 0

    def application(self) -> ASGIApp:
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.description),
            Route("/search", self.search, methods=["GET", "POST"]),
            Route("/encode", self.encode, methods=["GET", "POST"]),
            *(self._queue.routes() if self._queue else []),
        ]

        def nowhere(request: Request, error: HTTPException) -> Response:
            there = ", ".join(route.path for route in routes)
            return refused(request, HTTPException(404, f"nothing here; there are: {there}"))

        handlers: dict[Any, Any] = {404: nowhere, 405: _wrong_method, HTTPException: refused, **FAILURES}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return self._metrics.counted(app)

    async def health(self, request: Request) -> Response:
        # Without a turn: a long question must not make the server look dead.
        facts = await asyncio.to_thread(self._served.facts)
        return _json(Health(**facts.model_dump()))

    async def metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.page), media_type=CONTENT_TYPE)

    async def description(self, request: Request) -> Response:
        return JSONResponse(openapi())

    async def page(self, request: Request) -> Response:
        return await self._answered(request, lambda: self._page(request.state.query))

    async def search(self, request: Request) -> Response:
        async with self._body(request, "send application/json", {"application/json": LARGEST_JSON}) as body:
            return await self._answered(request, lambda: self._search(_values(request, body)))

    async def encode(self, request: Request) -> Response:
        remedy = "send application/json with texts, or a picture as image/jpeg, image/png or alike"
        async with self._body(request, remedy, {"application/json": LARGEST_JSON, "image/": LARGEST_PICTURE}) as body:
            is_text = request.method != "POST" or _kind(request) == "application/json"
            answer = self._encode_text if is_text else self._encode_image
            return await self._answered(request, lambda: answer(request, body))

    # --- when ---

    @asynccontextmanager
    async def _body(self, request: Request, remedy: str, most: Mapping[str, int]) -> AsyncIterator[bytearray]:
        """The body of a POST, read in time; `most` has the bytes that are taken of each kind of content."""
        body = bytearray()
        try:
            if request.method == "POST":
                length = _announced(request, remedy, most)
                await self._read(request, length, body)
            yield body
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, length: int, body: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    # Counted as it arrives: announced bytes that never come take nothing from others.
                    body += piece
                    self._held += len(piece)
                    if self._held > LARGEST_HELD:
                        raise _busy()
        except TimeoutError:
            raise HTTPException(408, f"{len(body):,} of {length:,} bytes came in {BODY_SECONDS:g} seconds") from None

    async def _answered(self, request: Request, answer: Callable[[], Response]) -> Response:
        """An answer that needs the model, made in a thread after those that were asked before."""
        if self._waiting >= MOST_WAITING:
            raise _busy()
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise ClientDisconnect
                return await asyncio.to_thread(answer)
        finally:
            self._waiting -= 1

    # --- what ---

    def _search(self, values: Mapping[str, Any]) -> Response:
        question = validate(SearchRequest, dict(values), "/search")
        if question.pictures and not self._pictures:
            raise HTTPException(403, "pictures are only shown on the machine that holds them")
        found = self._served.search(question.words, question.k, question.among)
        hits = {name: tuple(_hit(each, found, question.pictures) for each in hits) for name, hits in found.hits.items()}
        answer = SearchResponse(words=question.words, model=self._served.facts().model, found=hits)
        return _json(answer, exclude_none=True)

    def _encode_text(self, request: Request, body: bytearray) -> Response:
        if request.method == "POST":
            texts = validate(EncodeRequest, dict(_values(request, body)), "/encode").texts
        else:
            texts = (request.state.query.get("text", ""),)
        if any(len(text) > LONGEST_TEXT for text in texts):
            raise UserError(f"a text has more than {LONGEST_TEXT} characters; shorten it")
        embeddings = self._served.encode_text(texts)
        return _json(EncodeResponse(model=self._served.facts().model, embeddings=embeddings.tolist()))

    def _encode_image(self, request: Request, body: bytearray) -> Response:
        embeddings = self._served.encode_image(memoryview(body), MOST_PIXELS)
        return _json(EncodeResponse(model=self._served.facts().model, embeddings=embeddings.tolist()))

    def _page(self, query: Mapping[str, str]) -> Response:
        words, found = query.get("words", ""), None
        problem, status = "", 200
        if words:
            try:
                question = validate(SearchRequest, {"k": ON_PAGE, **query}, "search")
                found = self._served.search(question.words, question.k, question.among)
            except Changing:
                raise
            except UserError as error:
                problem, status = str(error), 400
        facts = self._served.facts().in_words()
        choices = {"among": ("all", "train", "test"), "chosen": query.get("among", "all")}
        top = render(
            "ask.html",
            queue=self._queue is not None,
            words=words,
            longest=LONGEST_TEXT,
            problem=problem,
            facts=facts,
            **choices,
        )
        title, hits = (f"Search: “{words}”", found.hits) if found else ("Search", {})
        pixels = found.pixels if found and self._pictures else None
        return HTMLResponse(found_sheet(title, hits, pixels, self._served.compares, top), status)


def _hit(hit: Hit, found: Found, with_picture: bool) -> SearchHit:
    return SearchHit(**as_json(hit), picture=data_address(found.pixels[hit.place]) if with_picture else None)


def _json(answer: Config, exclude_none: bool = False) -> Response:
    return Response(answer.model_dump_json(exclude_none=exclude_none), media_type="application/json")


# --- bodies ---


def _kind(request: Request) -> str:
    """The type of a body, as its sender calls it."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _announced(request: Request, remedy: str, most: Mapping[str, int]) -> int:
    """The bytes that a body will have, if it is of a known kind and not too large."""
    taken = next((size for kind, size in most.items() if _kind(request).startswith(kind)), None)
    if taken is None:
        raise HTTPException(415, remedy)
    if "transfer-encoding" in request.headers:
        raise HTTPException(411, "send the body in one piece, with its Content-Length")
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal()) or len(length) > 12:
        raise HTTPException(411, "say how long the body is (Content-Length)")
    if int(length) > taken:
        raise HTTPException(413, f"{int(length):,} bytes; at most {taken:,} are taken")
    return int(length)


def _values(request: Request, body: bytearray) -> Mapping[str, Any]:
    """The values of a question, from the address or from the body."""
    if request.method != "POST":
        query: Mapping[str, Any] = request.state.query
        return query
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(values, dict):
        raise HTTPException(400, 'the body is not a JSON object, such as {"words": "a dog"}')
    return values


# --- failures ---


def _busy() -> HTTPException:
    return HTTPException(503, "too much is being asked at once; try again in a second", {"Retry-After": "1"})


def _wrong_method(request: Request, error: HTTPException) -> Response:
    methods = sorted({each.strip() for each in (error.headers or {})["Allow"].split(",")} - {"HEAD"})
    return refused(
        request, HTTPException(405, f"{request.url.path} takes {', '.join(methods)}", {"Allow": ", ".join(methods)})
    )


def _failure(status: int, why: str | None = None) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        return refused(request, HTTPException(status, why or str(error)))

    return answer


FAILURES: dict[type[Exception], Callable[[Request, Exception], Response]] = {
    Changing: _failure(503),
    UserError: _failure(400),
    MemoryError: _failure(503, "not enough memory"),
    ClientDisconnect: _failure(400, "the connection was closed"),
    # The words of other errors may hold paths or captions.
    Exception: _failure(500, "this program has failed at the request"),
}
