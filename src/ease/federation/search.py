"""Asking sites which of their pairs some words fit: each looks at its own captions, and tells two numbers a pair."""

import numpy as np

from ease.data.words import LONGEST
from ease.errors import UserError
from ease.federation.check import each_reason
from ease.federation.remote import Remote, collected
from ease.federation.wire import NEAR, QUERY, SAYS, Search, decode_matched, numbers_in, numbers_of


def searched(remote: Remote, words: str, query: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Client -> whether each of its pairs says the words, and how near it is to them [pairs]; all must answer.

    `query` has the words in the frozen space, what captions have in common there and, where the two towers agree, what
    pictures do [2 or 3, width].
    """
    if len(words) > LONGEST:
        raise UserError(f"--concept: {len(words)} letters, and nodes are asked for {LONGEST} at most; use fewer words")
    clients, search = remote.clients, Search(words=words, rows=len(query))
    asks = {client: remote.ask("search", client, len(clients), search=search) for client in clients}
    found, reasons = collected(remote, asks, {QUERY: numbers_of(query)}, decode_matched)
    told = {}
    for client, (_, blobs) in found.items():
        says = numbers_in(blobs[SAYS], "<i8", 1, f"client {client}")[0]
        near = numbers_in(blobs[NEAR], "<f8", 1, f"client {client}")[0]
        sound = len(says) == len(near) == len(remote.held[client]) and np.isin(says, (0, 1)).all()
        if not sound or not (np.abs(near) <= 1 + 1e-9).all():
            reasons[client] = f"what it tells of its {len(remote.held[client])} pairs does not add up; look at its node"
        told[client] = says.astype(bool), near
    if reasons:
        raise UserError(
            f"--concept {words!r}: every site must be asked, and some have no answer ({each_reason(reasons)})"
        )
    return told
