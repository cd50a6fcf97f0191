"""What is to be forgotten: whole clients, pseudo-classes or single pairs."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ease.config import Config
from ease.data.membership import Holding
from ease.data.partition import Shard


class ClientRequest(Config):
    """The named clients withdraw: all their pairs are forgotten and they take no further part."""

    scope: Literal["client"] = "client"
    clients: tuple[int, ...]


class ClassRequest(Config):
    """Every pair of these pseudo-classes is forgotten, at every client."""

    scope: Literal["class"] = "class"
    classes: tuple[int, ...]
    text: str = ""
    """The descriptor the user gave; kept for the record."""


class SampleRequest(Config):
    """The pairs with these ids are forgotten, wherever they are."""

    scope: Literal["sample"] = "sample"
    ids: tuple[str, ...]


Request = Annotated[ClientRequest | ClassRequest | SampleRequest, Field(discriminator="scope")]


def forget_mask(request: Request, shard: Shard | Holding) -> np.ndarray:
    """Which training pairs of a client the request names: bool [pairs]."""
    if isinstance(request, ClientRequest):
        return np.full(len(shard.train_ids), shard.client in request.clients)
    if isinstance(request, ClassRequest):
        return np.isin(shard.train_classes, request.classes)
    wanted = set(request.ids)  # np.isin on objects compares every pair and would dominate a training step
    return np.fromiter((pair_id in wanted for pair_id in shard.train_ids), dtype=bool, count=len(shard.train_ids))


def without(shards: Iterable[Shard], gone: Iterable[Request]) -> tuple[Shard, ...]:
    """What the clients hold once requests are closed; a client that withdrew is not there any more."""
    for request in gone:
        leaving = set(request.clients) if isinstance(request, ClientRequest) else set()
        shards = [shard.keep(~forget_mask(request, shard)) for shard in shards if shard.client not in leaving]
    return tuple(shards)


def validation_mask(request: Request, shard: Shard) -> np.ndarray:
    """Held-out pairs that resemble the forget pairs: those of the same client and, for a class request, class."""
    if isinstance(request, ClassRequest):
        return np.isin(shard.validation_classes, request.classes)
    return np.ones(len(shard.validation_classes), dtype=bool)


def combined(requests: Sequence[Request]) -> Request:
    """One request that names what several of one kind name together."""
    first = requests[0]
    if len(requests) == 1:
        return first
    if isinstance(first, ClientRequest):
        clients = {client for each in requests if isinstance(each, ClientRequest) for client in each.clients}
        return ClientRequest(clients=tuple(sorted(clients)))
    if isinstance(first, ClassRequest):
        asked = [each for each in requests if isinstance(each, ClassRequest)]
        classes = {label for each in asked for label in each.classes}
        return ClassRequest(classes=tuple(sorted(classes)), text=", ".join(each.text for each in asked if each.text))
    ids = {pair_id for each in requests if isinstance(each, SampleRequest) for pair_id in each.ids}
    return SampleRequest(ids=tuple(sorted(ids)))


def remaining(request: Request, holdings: Iterable[Holding], gone: Iterable[Request]) -> Request:
    """What is left of a request once others are closed: only clients, classes and pairs that still hold something."""
    closed = list(gone)
    clients: set[int] = set()
    classes: set[int] = set()
    ids: set[str] = set()
    for holding in holdings:
        kept = ~np.any(
            [np.zeros(len(holding.train_ids), bool), *(forget_mask(each, holding) for each in closed)], axis=0
        )
        if kept.any():
            clients.add(holding.client)
        classes |= {label for label, keep in zip(holding.train_classes, kept, strict=True) if keep}
        ids |= {pair_id for pair_id, keep in zip(holding.train_ids, kept, strict=True) if keep}
    if isinstance(request, ClientRequest):
        return request.model_copy(update={"clients": tuple(each for each in request.clients if each in clients)})
    if isinstance(request, ClassRequest):
        return request.model_copy(update={"classes": tuple(each for each in request.classes if each in classes)})
    return request.model_copy(update={"ids": tuple(each for each in request.ids if each in ids)})
