"""Search for words at the sites: each node compares its own captions and returns two numbers for each pair."""

from collections.abc import Collection

import numpy as np

from ease.data.words import LONGEST
from ease.errors import UserError
from ease.federation.check import each_reason
from ease.federation.remote import Remote, collected
from ease.federation.wire import (
    NEAR,
    QUERY,
    SAYS,
    Search,
    decode_found,
    decode_search_reply,
    numbers_in,
    numbers_of,
)


def searched(remote: Remote, words: str, query: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Client -> whether a caption of each pair contains the words, and its cosine to them [pairs]; all must answer.

    `query` holds the words in the frozen space, the mean of captions and, if both towers share the space, the mean of
    pictures [2 or 3, width].
    """
    if len(words) > LONGEST:
        raise UserError(f"--concept: {len(words)} letters; nodes accept at most {LONGEST}; use fewer words")
    clients, search = remote.clients, Search(words=words, rows=len(query))
    asks = {client: remote.ask("search", client, len(clients), search=search) for client in clients}
    found, reasons = collected(remote, asks, {QUERY: numbers_of(query)}, decode_search_reply)
    reported = {}
    for client, (_, blobs) in found.items():
        says = numbers_in(blobs[SAYS], "<i8", 1, f"client {client}")[0]
        near = numbers_in(blobs[NEAR], "<f8", 1, f"client {client}")[0]
        sound = len(says) == len(near) == len(remote.members[client]) and np.isin(says, (0, 1)).all()
        if not sound or not (np.abs(near) <= 1 + 1e-9).all():
            reasons[client] = f"its answer does not fit its {len(remote.members[client])} pairs; check its node"
        reported[client] = says.astype(bool), near
    if reasons:
        raise UserError(
            f"--concept {words!r}: every site must be asked, and some have no answer ({each_reason(reasons)})"
        )
    return reported


def holders_of(remote: Remote, picture: str, clients: Collection[int]) -> set[str]:
    """Return ids of the pairs at sites that show a picture, which is named by the hash of its pixels; all must answer.

    Sites do not get the picture. A node that holds none learns a hash that fits no picture of its own.
    """
    asks = {client: remote.ask("find", client, len(clients), picture=picture) for client in sorted(clients)}
    found, reasons = collected(remote, asks, {}, lambda data: (decode_found(data), {}))
    reported = set[str]()
    for client, (answer, _) in found.items():
        own = {*remote.holdings[client], *remote.held_out.get(client, ())}
        if not own.issuperset(answer.ids):
            reasons[client] = "it names pairs that this run does not know of; look at its node"
        reported |= own.intersection(answer.ids)
    if reasons:
        raise UserError(
            f"--image: every site must be asked, and some have no answer ({each_reason(reasons)}); record one that is "
            "gone for good with `ease purge --lost-site`"
        )
    return reported
