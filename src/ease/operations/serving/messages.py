"""Requests to a served model and its responses, as models, and the description of both for programs."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field
from pydantic.json_schema import models_json_schema

from ease import __version__
from ease.config import Config

LONGEST_TEXT = 2000
"""Characters."""
MOST_TEXTS = 64
MOST_HITS = 200


class SearchRequest(Config):
    """A search for pictures by words."""

    words: str = Field(min_length=1, max_length=LONGEST_TEXT)
    k: int = Field(5, ge=1, le=MOST_HITS)
    """How many pictures each model finds."""
    among: Literal["all", "train", "test"] = "all"
    """The pairs to search among."""
    pictures: bool = False
    """Whether each hit has a small picture, as a data address."""


class EncodeRequest(Config):
    """Texts to encode."""

    texts: tuple[str, ...] = Field(min_length=1, max_length=MOST_TEXTS)
    """Each has at most 2000 characters."""


class Facts(Config):
    """Which model is served."""

    model: str
    """SHA-256 of the file of the served model; with --request, of the model after it."""
    release: str | None
    """The release that is served, such as `client-3/ease`; none: the trained model, an open request or an export."""
    request: str | None
    """The request that produced the model, if the model is not the run's own."""
    releases: int
    """Closed requests."""
    pairs: int
    """Pairs that are searched; an export has none."""
    backbone: str
    version: str = __version__

    def in_words(self) -> str:
        what = f"after {self.request or self.release}" if self.request or self.release else "as trained"
        return f"Model {what}, SHA-256 {self.model[:16]}; {self.pairs} pairs; ease {self.version}"


class Health(Facts):
    """The server works, and serves this model."""

    status: Literal["ok"] = "ok"


class FoundPair(Config):
    """A pair whose picture some words found."""

    id: str
    score: float
    """Cosine of the picture with the words."""
    caption: str
    whose: str
    """`client 3`, or `test` and `validation` for pairs of no client."""
    forgotten: bool
    """Whether the request that is looked at named it."""


class SearchHit(FoundPair):
    """A found pair, with its picture if pictures were requested."""

    picture: str | None = None
    """A data address (`data:image/jpeg;base64,...`); absent unless asked for."""


class SearchResponse(Config):
    """What some words found."""

    words: str
    model: str
    """SHA-256 of the file of the served model."""
    found: dict[str, tuple[SearchHit, ...]]
    """Model -> the nearest pairs, nearest first."""


class EncodeResponse(Config):
    """Embeddings of unit length, one for each text or for the picture."""

    model: str
    """SHA-256 of the file of the served model."""
    embeddings: tuple[tuple[float, ...], ...]


class Problem(Config):
    """Why there is no other answer, in one sentence."""

    error: str


# --- the description ---

REFERENCE = "#/components/schemas/{model}"
DESCRIBED = (SearchRequest, EncodeRequest, Health, SearchResponse, EncodeResponse, Problem)


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route."""
    _, schemas = models_json_schema([(each, "validation") for each in DESCRIBED], ref_template=REFERENCE)
    search, encode = SearchRequest.model_json_schema(), {"type": "string", "maxLength": LONGEST_TEXT}
    page = [each for each in _parameters(search) if each["name"] in ("words", "among")]
    asked = {"application/json": _content(SearchRequest)}
    encoded = {"application/json": _content(EncodeRequest), "image/*": {}}
    text = {"name": "text", "in": "query", "required": True, "schema": encode}
    paths = {
        "/": {"get": _operation("The page to search by words.", {"text/html": {}}, parameters=page)},
        "/health": {"get": _operation("Which model is served.", _json(Health), security=[])},
        "/metrics": {"get": _operation("Measurements for Prometheus.", {"text/plain": {}})},
        "/openapi.json": {"get": _operation("This description.", {"application/json": {}}, security=[])},
        "/search": {
            "get": _operation("Find pictures by words.", _json(SearchResponse), parameters=list(_parameters(search))),
            "post": _operation("Find pictures by words.", _json(SearchResponse), body=asked),
        },
        "/encode": {
            "get": _operation("Encode a text.", _json(EncodeResponse), parameters=[text]),
            "post": _operation("Encode texts or a picture.", _json(EncodeResponse), body=encoded),
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "A model served by EASE", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _content(model: type[Config]) -> dict[str, Any]:
    return {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}


def _json(model: type[Config]) -> dict[str, Any]:
    return {"application/json": _content(model)}


def _parameters(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, field in schema["properties"].items():
        yield {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}


def _operation(summary: str, answer: dict[str, Any], body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    taken = {} if body is None else {"requestBody": {"required": True, "content": body}}
    responses = {
        "200": {"description": summary, "content": answer},
        "default": {"description": Problem.__doc__, "content": _json(Problem)},
    }
    return {"summary": summary, **more, **taken, "responses": responses}
