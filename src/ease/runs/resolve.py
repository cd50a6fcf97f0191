"""From what people name (clients, words, ids) to a request that this run can answer, or a refusal that says why."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ease.errors import UserError
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.world import World
from ease.storage import digest

MATCH = 0.15
"""Least cosine of a class descriptor with a pseudo-class."""


def request_id(request: Request) -> str:
    """A stable name: the same request always has the same one."""
    if isinstance(request, ClientRequest):
        return "client-" + "-".join(map(str, request.clients))
    if isinstance(request, ClassRequest):
        return "class-" + "-".join(map(str, request.classes))
    return "sample-" + digest(sorted(request.ids))[:10]


def check_request(world: World, request: Request) -> None:
    """Refuse a request that names nothing, something unknown, or everything."""
    clients = [shard.client for shard in world.shards]
    if isinstance(request, ClientRequest):
        unknown = sorted(set(request.clients) - set(clients))
        if unknown:
            raise UserError(
                f"--client {unknown[0]}: no such client; this run has clients {clients[0]} to {clients[-1]}"
            )
    if isinstance(request, ClassRequest):
        unknown = sorted(set(request.classes) - set(range(len(world.centroids))))
        if unknown:
            raise UserError(f"--class {unknown[0]}: no such pseudo-class; this run has 0 to {len(world.centroids) - 1}")
    if isinstance(request, SampleRequest):
        known = {pair_id for shard in world.shards for pair_id in shard.train_ids}
        strange = sorted(set(request.ids) - known)
        if strange:
            raise UserError(
                f"--samples: {len(strange)} of {len(request.ids)} ids are no training pairs here, e.g. {strange[0]!r}"
            )
    masks = [forget_mask(request, shard) for shard in world.shards]
    named, total = sum(int(mask.sum()) for mask in masks), sum(len(mask) for mask in masks)
    if named == 0:
        raise UserError("the request matches no training pair of this run: there is nothing to forget")
    if named == total:
        raise UserError("the request names all training data: nothing would be retained; delete the run instead")


def class_cosines(world: World, text: str) -> np.ndarray:
    """Cosine of a descriptor with each pseudo-class, by the text half of its centroid [classes]."""
    tower, first = world.backbone.text, world.model.text.first
    with torch.no_grad():
        states, mask = tower.prefix(world.backbone.tokenize([text]).to(world.device), first)
        query = tower(states, mask, first)[0].cpu().double().numpy()
    halves = world.centroids[:, -len(query) :]
    centre = halves.mean(axis=0)  # what all classes have in common tells none of them apart
    halves, query = halves - centre, query / max(np.linalg.norm(query), 1e-12) - centre
    return halves @ query / (np.linalg.norm(halves, axis=1) * np.linalg.norm(query) + 1e-12)


def match_class(world: World, text: str) -> int:
    """The pseudo-class a descriptor names; one that fits none well is refused with the nearest."""
    cosines = class_cosines(world, text)
    best = int(cosines.argmax())
    if cosines[best] < MATCH:
        raise UserError(
            f"--class {text!r}: fits no pseudo-class well; the nearest is {best} (cosine {cosines[best]:.2f}, "
            f"at least {MATCH} is needed); use other words or --class {best}"
        )
    return best


def parse_request(
    world: World, clients: Sequence[int], classes: Sequence[str], samples: Path | Sequence[str] | None
) -> Request:
    """The request the options name: exactly one kind of thing is forgotten at a time."""
    if sum(map(bool, (clients, classes, samples))) != 1:
        raise UserError("name what to forget with one of --client, --class or --samples")
    if clients:
        return ClientRequest(clients=tuple(sorted(set(clients))))
    if classes:
        found = {int(text) if text.isdecimal() else match_class(world, text) for text in classes}
        return ClassRequest(classes=tuple(sorted(found)), text=", ".join(classes))
    assert samples is not None  # counted above
    ids = read_ids(samples) if isinstance(samples, Path) else set(samples)
    return SampleRequest(ids=tuple(sorted(ids)))


def read_ids(path: Path) -> set[str]:
    """The ids of a file, one a line."""
    try:
        ids = {line.strip() for line in path.read_text().splitlines()} - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--samples {path}: cannot be read as a list of ids, one a line ({error})") from error
    if not ids:
        raise UserError(f"--samples {path}: holds no id; write one id a line")
    return ids
