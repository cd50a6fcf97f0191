"""Start of a run with pairs on site: clients agree on classes, then each lists the ids of the pairs it contributes.

The server learns sums and counts of groups of pairs, then the id and the class of every pair. No picture, caption or
activation leaves a client.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ease.data.classes import Groups, agreed_centres
from ease.data.membership import Holding
from ease.data.partition import MINIMUM_PAIRS
from ease.errors import UserError
from ease.federation.check import each_reason
from ease.federation.remote import Remote, collected
from ease.federation.wire import CENTRES, COUNTS, SUMS, Deal, DealReply, decode_deal_reply, numbers_in, numbers_of

LONGEST = 2.0**0.5 + 1e-6
"""Width of the embedding of one pair: two concatenated unit vectors."""


def enrolled(remote: Remote, deal: Deal, width: int) -> tuple[tuple[Holding, ...], np.ndarray]:
    """What every client takes part with, and the centres of the classes [classes, width]; all of them must answer."""
    _check_backbones(remote)

    def groups(centres: np.ndarray | None = None) -> list[Groups]:
        found = _asked(remote, "groups", deal, centres)
        return [_groups(client, blobs, width, centres) for client, (_, blobs) in sorted(found.items())]

    centres = agreed_centres(groups(), groups, deal.classes, deal.class_seed)
    holdings = _joined(remote, deal, centres)
    check_distinct(holdings)
    return holdings, centres


def enrolled_later(remote: Remote, deal: Deal, centres: np.ndarray) -> Holding:
    """Holding of the one client of `remote`, which joins an existing run, in the run's classes."""
    _check_backbones(remote)
    (holding,) = _joined(remote, deal, centres)
    return holding


def _joined(remote: Remote, deal: Deal, centres: np.ndarray) -> tuple[Holding, ...]:
    joined = _asked(remote, "join", deal, centres)
    return tuple(_holding(client, reported, deal) for client, (reported, _) in sorted(joined.items()))


def _check_backbones(remote: Remote) -> None:
    reported = remote.present()
    reasons = {
        client: each
        if isinstance(each, str)
        else "its backbone has other weights than the server's; give both the same"
        for client, each in reported.items()
        if isinstance(each, str) or each.backbone != remote.backbone
    }
    _refuse(reasons)


def _refuse(reasons: Mapping[int, str]) -> None:
    if reasons:
        told = each_reason(reasons)
        raise UserError(f"every site must be there when a run begins or a site joins, and some are not ready ({told})")


def _asked(
    remote: Remote, kind: Literal["groups", "join"], deal: Deal, centres: np.ndarray | None
) -> dict[int, tuple[DealReply, dict[str, bytes]]]:
    """Every client's answer; one that has none ends it."""
    clients = remote.clients
    asks = {client: remote.ask(kind, client, len(clients), deal=deal) for client in clients}
    found, reasons = collected(
        remote, asks, {} if centres is None else {CENTRES: numbers_of(centres)}, decode_deal_reply
    )
    _refuse(reasons)
    return found


def _groups(client: int, blobs: Mapping[str, bytes], width: int, centres: np.ndarray | None) -> Groups:
    """Group sums reported by a client; implausible ones are refused."""
    counts = numbers_in(blobs.get(COUNTS, b""), "<i8", 1, f"client {client}")[0]
    sums = numbers_in(blobs.get(SUMS, b""), "<f8", len(counts), f"client {client}")
    sums = sums if len(counts) else np.zeros((0, width))
    sound = (
        sums.shape == (len(counts), width)
        and (centres is None or len(counts) == len(centres))
        and bool((counts >= (1 if centres is None else 0)).all())
        and bool(np.isfinite(sums).all())
        and bool((np.linalg.norm(sums, axis=1) <= LONGEST * counts).all())
    )
    if not sound:
        raise UserError(f"client {client}: its groups are none of this backbone's pairs; look at its node")
    return Groups(sums, counts)


def _holding(client: int, reported: DealReply, deal: Deal) -> Holding:
    """The client's holding in these classes; an invalid one is refused."""
    found = reported.holding
    ids: Sequence[str] = () if found is None else (*found.train_ids, *found.validation_ids)
    if (
        found is None
        or found.client != client
        or found.joined is not None
        or len(found.train_ids) != len(found.train_classes)
        or len(found.validation_ids) != len(found.validation_classes)
        or len(set(ids)) != len(ids)
        or not all(0 <= each < deal.classes for each in (*found.train_classes, *found.validation_classes))
        or set(deal.closed) & {*found.train_classes, *found.validation_classes}
    ):
        raise UserError(f"client {client}: what it takes part with does not add up; look at its node")
    if len(found.train_ids) < MINIMUM_PAIRS:
        raise UserError(
            f"client {client}: has {len(found.train_ids)} training pairs, and {MINIMUM_PAIRS} are needed; add some at "
            "its site, or begin without it"
        )
    return found


def check_distinct(holdings: Sequence[Holding]) -> None:
    """Refuse an id, or a name, that two clients use: a request must say whose pair it means."""
    owner: dict[str, int] = {}
    for holding in holdings:
        names = () if holding.name is None else (f"site {holding.name!r}",)
        for each in (*names, *(f"id {pair_id!r}" for pair_id in (*holding.train_ids, *holding.validation_ids))):
            if each in owner:
                raise UserError(
                    f"{each}: clients {owner[each]} and {holding.client} both use it; give the pairs of one of them "
                    "other ids (a column `id`), or another site"
                )
            owner[each] = holding.client
