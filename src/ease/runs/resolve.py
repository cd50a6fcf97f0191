"""From what people name (clients, words, ids) to a request that this run can answer, or a refusal that says why."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ease.data.membership import Membership
from ease.errors import UserError
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.world import Server, World
from ease.storage import digest, read_bytes

LARGEST_LIST = 1 << 28
"""Bytes of the largest list of ids that is read."""
MATCH = 0.15
"""Least cosine of a class descriptor with a pseudo-class."""


def request_id(request: Request) -> str:
    """A stable name: the same request always has the same one."""
    if isinstance(request, ClientRequest):
        return "client-" + "-".join(map(str, request.clients))
    if isinstance(request, ClassRequest):
        return "class-" + "-".join(map(str, request.classes))
    return "sample-" + digest(sorted(request.ids))[:10]


def request_flags(request: Request) -> str:
    """The request as `ease forget` takes it; the list of ids is a file that only its writer knows."""
    if isinstance(request, ClientRequest):
        return " ".join(f"--client {number}" for number in request.clients)
    if isinstance(request, ClassRequest):
        return " ".join(f"--class {number}" for number in request.classes)
    return "--samples ids.txt"


def named_ids(membership: Membership, request: Request) -> list[str]:
    """Ids of the training pairs that a request names, whoever holds them."""
    return [
        pair_id
        for holding in membership.clients
        for pair_id, named in zip(holding.train_ids, forget_mask(request, holding), strict=True)
        if named
    ]


def check_request(world: World, request: Request) -> None:
    """Refuse a request that names nothing, something unknown, what is gone already, or everything."""
    members, classes = world.server.membership, len(world.server.centroids)
    if isinstance(request, ClientRequest):
        clients = [holding.client for holding in members.clients]
        unknown = sorted(set(request.clients) - set(clients))
        if unknown:
            raise UserError(f"--client {unknown[0]}: no such client; this run has {_those(members)}")
    if isinstance(request, ClassRequest):
        unknown = sorted(set(request.classes) - set(range(classes)))
        if unknown:
            raise UserError(f"--class {unknown[0]}: no such pseudo-class; this run has 0 to {classes - 1}")
    if isinstance(request, SampleRequest):
        known = {pair_id for holding in members.clients for pair_id in holding.train_ids}
        strange = sorted(set(request.ids) - known)
        if strange:
            raise UserError(
                f"--samples: {len(strange)} of {len(request.ids)} ids are no training pairs here, e.g. {strange[0]!r}"
            )
    gone = {pair_id for closed in world.gone for pair_id in named_ids(members, closed)}
    named = set(named_ids(members, request))
    left = sum(len(holding.train_ids) for holding in members.clients) - len(gone)
    if not named:
        raise UserError("the request matches no training pair of this run: there is nothing to forget")
    if named <= gone:
        raise UserError("everything that the request names is gone already: this run has forgotten it before")
    if len(named - gone) == left:
        raise UserError("the request names all training data: nothing would be retained; delete the run instead")


def _those(members: Membership) -> str:
    """The clients of a run, for a message."""
    names = [members.named(holding.client) for holding in members.clients]
    if all(holding.name is None for holding in members.clients):
        return f"clients {names[0]} to {names[-1]}"
    return ", ".join(names)


def find_clients(members: Membership, named: Sequence[str | int]) -> tuple[int, ...]:
    """Clients by the names of their sites or by their numbers, each once and with all that it added later."""
    by_name = {holding.name: holding.client for holding in members.clients if holding.name is not None}
    found = set[int]()
    for name in named:
        if name in by_name:
            found.add(by_name[str(name)])
        elif isinstance(name, int) or _is_number(name):
            found.add(int(name))
        else:
            raise UserError(f"--client {name}: no such client; this run has {_those(members)}")
    return tuple(sorted(members.owned(found)))


def _is_number(text: str) -> bool:
    """Whether it may be the number of a client or a class; Python converts no text of thousands of digits."""
    return text.isdecimal() and len(text) < 19


def class_cosines(server: Server, text: str) -> np.ndarray:
    """Cosine of a descriptor with each pseudo-class, by the text half of its centroid [classes]."""
    tower, first = server.backbone.text, server.model.text.first
    with torch.no_grad():
        states, mask = tower.prefix(server.backbone.tokenize([text]).to(server.device), first)
        query = tower(states, mask, first)[0].cpu().double().numpy()
    halves = server.centroids[:, -len(query) :]
    centre = halves.mean(axis=0)  # what all classes have in common tells none of them apart
    halves, query = halves - centre, query / max(np.linalg.norm(query), 1e-12) - centre
    return halves @ query / (np.linalg.norm(halves, axis=1) * np.linalg.norm(query) + 1e-12)


def match_class(server: Server, text: str) -> int:
    """The pseudo-class a descriptor names; one that fits none well is refused with the nearest."""
    cosines = class_cosines(server, text)
    best = int(cosines.argmax())
    if cosines[best] < MATCH:
        raise UserError(
            f"--class {text!r}: fits no pseudo-class well; the nearest is {best} (cosine {cosines[best]:.2f}, "
            f"at least {MATCH} is needed); use other words or --class {best}"
        )
    return best


def parse_request(
    server: Server, clients: Sequence[str | int], classes: Sequence[str], samples: Path | Sequence[str] | None
) -> Request:
    """The request the options name: exactly one kind of thing is forgotten at a time."""
    if sum(map(bool, (clients, classes, samples))) != 1:
        raise UserError("name what to forget with one of --client, --class, --samples or --canaries")
    if clients:
        return ClientRequest(clients=find_clients(server.membership, clients))
    if classes:
        found = {int(text) if _is_number(text) else match_class(server, text) for text in classes}
        return ClassRequest(classes=tuple(sorted(found)), text=", ".join(classes))
    assert samples is not None  # counted above
    ids = read_ids(samples) if isinstance(samples, Path) else set(samples)
    return SampleRequest(ids=tuple(sorted(ids)))


def planted_ids(world: World) -> list[str]:
    """The ids of all canaries that some client trained on."""
    canaries = {world.evaluator.pairs.ids[position] for position in world.evaluator.canaries}
    found = [each for holding in world.server.membership.clients for each in holding.train_ids if each in canaries]
    if not found:
        raise UserError("--canaries: none was planted in this run; train one with --set data.canaries=200")
    return found


def read_ids(path: Path) -> set[str]:
    """The ids of a file, one a line."""
    try:
        ids = {line.strip() for line in read_bytes(path, LARGEST_LIST).decode().splitlines()} - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--samples {path}: cannot be read as a list of ids, one a line ({error})") from error
    if not ids:
        raise UserError(f"--samples {path}: holds no id; write one id a line")
    return ids
