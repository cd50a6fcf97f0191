"""Requests: what is to be forgotten, by client, pseudo-class or pair id."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from ease.config import Config
from ease.data.membership import Holding, Membership
from ease.data.partition import Shard


class ClientRequest(Config):
    """Clients withdraw: all their pairs are forgotten and they take no further part."""

    scope: Literal["client"] = "client"
    clients: tuple[int, ...]


class ClassRequest(Config):
    """All pairs of these pseudo-classes are forgotten, at every client."""

    scope: Literal["class"] = "class"
    classes: tuple[int, ...]
    text: str = ""
    """The descriptor the user gave; kept for the record."""


class SampleRequest(Config):
    """The pairs with these ids are forgotten at every client."""

    scope: Literal["sample"] = "sample"
    ids: tuple[str, ...]
    name: str = ""
    """What people call it; also the name of its folder."""
    words: tuple[str, ...] = ()
    """Concepts that were looked for; the pairs that fit are among the ids."""
    threshold: float | None = None
    """How near to the words a pair had to be, where the user said so."""
    unless: tuple[str, ...] = ()
    """Phrases in which the words do not count, such as "hot dog" for "dog"."""
    clients: tuple[int, ...] = ()
    """Clients that were named beside them; all their pairs are among the ids."""
    classes: tuple[int, ...] = ()
    """Pseudo-classes that were named beside them; all their pairs are among the ids."""
    singles: int = 0
    """How many pairs were named one by one, where other things were named too."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit empty fields, so that plain lists keep their bytes."""
        usual = {name: field.default for name, field in type(self).model_fields.items() if name not in ("scope", "ids")}
        return {key: value for key, value in dump(self).items() if key not in usual or getattr(self, key) != usual[key]}


Request = Annotated[ClientRequest | ClassRequest | SampleRequest, Field(discriminator="scope")]
REQUESTS: TypeAdapter[Request] = TypeAdapter(Request)
"""Reads a request of any kind."""


def in_words(request: Request, names: Mapping[int, str] | None = None) -> str:
    """The request in words, with clients by their `names`."""
    if isinstance(request, ClientRequest):
        return _named("client", request.clients, names)
    if isinstance(request, ClassRequest):
        said = request.text.replace(", ", "")
        return _named("class", request.classes) + (f" (“{request.text}”)" if said and not said.isdecimal() else "")
    pairs = _count(len(request.ids), "pair")
    parts = [_named("client", request.clients, names)] if request.clients else []
    parts += [_named("class", request.classes)] if request.classes else []
    parts += [f"“{words}”{_unless(request)}" for words in request.words]
    parts += [_count(request.singles, "single pair")] if request.singles else []
    return f"{', '.join(parts)} ({pairs})" if parts else _count(len(request.ids), "single pair")


def _unless(request: SampleRequest) -> str:
    return f" except {' and '.join(f'“{phrase}”' for phrase in request.unless)}" if request.unless else ""


def _named(kind: str, numbers: Sequence[int], names: Mapping[int, str] | None = None) -> str:
    plural = {"client": "clients", "class": "classes"}[kind]
    called = [(names or {}).get(number, str(number)) for number in numbers]
    return f"{kind if len(numbers) == 1 else plural} {', '.join(called)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def forget_mask(request: Request, shard: Shard | Holding) -> np.ndarray:
    """Which training pairs of a client a request names: bool [pairs]."""
    if isinstance(request, ClientRequest):
        return np.full(len(shard.train_ids), shard.client in request.clients)
    if isinstance(request, ClassRequest):
        return np.isin(shard.train_classes, request.classes)
    wanted = set(request.ids)  # np.isin on objects compares every pair and would dominate a training step
    return np.fromiter((pair_id in wanted for pair_id in shard.train_ids), dtype=bool, count=len(shard.train_ids))


def leaving_clients(request: Request) -> frozenset[int]:
    """Clients that withdraw by a request."""
    return frozenset() if isinstance(request, ClassRequest) else frozenset(request.clients)


def without(shards: Iterable[Shard], gone: Iterable[Request]) -> tuple[Shard, ...]:
    """The shards after requests are closed, without clients that withdrew."""
    for request in gone:
        leaving = leaving_clients(request)
        shards = [shard.keep(~forget_mask(request, shard)) for shard in shards if shard.client not in leaving]
        if isinstance(request, SampleRequest):
            shards = [shard.without_held_out(set(request.ids)) for shard in shards]
    return tuple(shards)


def redealt(
    shards: Iterable[Shard], dealt: Mapping[int, Shard | Holding], never: Sequence[Request]
) -> tuple[Shard, ...]:
    """The shards as a later training from the start found them; places count its pairs only.

    `dealt` is what each client held at first, and `never` what was closed before that training.
    """
    if not never:
        return tuple(shards)
    found = []
    for shard in shards:
        had = ~np.any([forget_mask(each, dealt[shard.client]) for each in never], axis=0)
        places = np.arange(len(shard.train)) if shard.places is None else shard.places
        found.append(replace(shard, places=(np.cumsum(had) - 1)[places], dealt=int(had.sum())))
    return tuple(found)


def held_without(holdings: Iterable[Holding], gone: Sequence[Request]) -> dict[int, frozenset[str]]:
    """Client -> ids of its training pairs that no closed request names."""
    leaving = {client for request in gone for client in leaving_clients(request)}
    return {
        holding.client: frozenset(holding.train_ids).difference(*(named_in(request, (holding,)) for request in gone))
        for holding in holdings
        if holding.client not in leaving
    }


def listed_ids(requests: Iterable[Request]) -> frozenset[str]:
    """Ids that requests list."""
    return frozenset(each for request in requests if isinstance(request, SampleRequest) for each in request.ids)


def held_out_without(holdings: Iterable[Holding], gone: Sequence[Request]) -> tuple[Holding, ...]:
    """The holdings without held-out pairs of closed requests."""
    named = listed_ids(gone)

    def left(holding: Holding) -> Holding:
        if named.isdisjoint(holding.validation_ids):
            return holding
        both = zip(holding.validation_ids, holding.validation_classes, strict=True)
        kept = [(pair_id, label) for pair_id, label in both if pair_id not in named]
        ids, classes = zip(*kept, strict=True) if kept else ((), ())
        return holding.model_copy(update={"validation_ids": ids, "validation_classes": classes})

    return tuple(map(left, holdings))


def validation_mask(request: Request, shard: Shard | Holding) -> np.ndarray:
    """Which held-out pairs resemble the forget pairs: the same client's and, for a class request, the class's."""
    if isinstance(request, ClassRequest):
        return np.isin(shard.validation_classes, request.classes)
    return np.ones(len(shard.validation_classes), dtype=bool)


def named_in(request: Request, holdings: Iterable[Holding]) -> list[str]:
    """Ids of the training pairs that a request names, at all clients."""
    masks = [(holding.train_ids, forget_mask(request, holding)) for holding in holdings]
    return [pair_id for held, mask in masks for pair_id, named in zip(held, mask, strict=True) if named]


def untrained_in(request: Request, members: Membership) -> dict[str, tuple[str, ...]]:
    """Split -> ids that a request names outside training: listed ids, and held-out pairs of clients
    that withdraw."""
    leaving = leaving_clients(request)
    named = {each for holding in members.clients if holding.client in leaving for each in holding.validation_ids}
    named |= set(request.ids) if isinstance(request, SampleRequest) else set()
    found = {split: tuple(sorted(named & ids)) for split, ids in members.untrained().items()}
    return {split: ids for split, ids in found.items() if ids}


def every_id(request: Request, members: Membership) -> frozenset[str]:
    """Ids of all pairs that a request names, in all splits."""
    outside = untrained_in(request, members).values()
    return frozenset(named_in(request, members.clients)).union(*outside)


def listed(request: Request, holdings: Iterable[Holding]) -> SampleRequest:
    """The request as a list of ids; how they were named is kept for people."""
    if isinstance(request, SampleRequest):
        return request if request.words or request.clients or request.classes else _with_singles(request)
    ids = tuple(sorted(named_in(request, holdings)))
    if isinstance(request, ClientRequest):
        return SampleRequest(ids=ids, clients=request.clients)
    return SampleRequest(ids=ids, classes=request.classes)


def _with_singles(request: SampleRequest) -> SampleRequest:
    return request.model_copy(update={"singles": len(request.ids)})


def combined(requests: Sequence[Request], holdings: Sequence[Holding]) -> Request:
    """One request for everything that several name; different kinds become a list of pairs."""
    if len({each.scope for each in requests}) > 1:
        requests = [listed(each, holdings) for each in requests]
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
    lists = [each for each in requests if isinstance(each, SampleRequest)]
    return SampleRequest(
        ids=tuple(sorted({pair_id for each in lists for pair_id in each.ids})),
        words=tuple(dict.fromkeys(words for each in lists for words in each.words)),
        unless=tuple(dict.fromkeys(phrase for each in lists for phrase in each.unless)),
        clients=tuple(sorted({client for each in lists for client in each.clients})),
        classes=tuple(sorted({label for each in lists for label in each.classes})),
        singles=sum(each.singles for each in lists),
    )


def remaining(request: Request, holdings: Iterable[Holding], gone: Iterable[Request]) -> Request:
    """The part of a request that is not closed yet: clients, classes and pairs that still have data.

    An id outside training is part of it unless a closed request lists it.
    """
    closed = list(gone)
    clients: set[int] = set()
    classes: set[int] = set()
    taken = set(listed_ids(closed))
    for holding in holdings:
        kept = ~np.any(
            [np.zeros(len(holding.train_ids), bool), *(forget_mask(each, holding) for each in closed)], axis=0
        )
        if kept.any():
            clients.add(holding.client)
        classes |= {label for label, keep in zip(holding.train_classes, kept, strict=True) if keep}
        taken |= {pair_id for pair_id, keep in zip(holding.train_ids, kept, strict=True) if not keep}
        if any(holding.client in leaving_clients(each) for each in closed):
            taken |= set(holding.validation_ids)
    if isinstance(request, ClientRequest):
        return request.model_copy(update={"clients": tuple(each for each in request.clients if each in clients)})
    if isinstance(request, ClassRequest):
        return request.model_copy(update={"classes": tuple(each for each in request.classes if each in classes)})
    left = tuple(each for each in request.ids if each not in taken)
    # Another list is another request, and has no right to the name.
    return request if left == request.ids else request.model_copy(update={"ids": left, "name": ""})
