"""All clients as one stack, as FedJAX's vmapped backend trains them: the batches of a round, padded to equal shapes."""

from dataclasses import dataclass

import numpy as np
from work import Work


@dataclass(frozen=True)
class Stack:
    """A round of every client [clients, steps, pairs]; a step that a client does not make has no real pair."""

    rows: np.ndarray
    lines: np.ndarray
    real: np.ndarray


def stacks(work: Work) -> list[Stack]:
    """Every round, padded to the most steps and the widest batch of all, so that one compiled step fits them."""
    plans = [[work.batches(number, client) for client in work.clients] for number in range(1, work.rounds + 1)]
    steps = max(len(batches) for clients in plans for batches in clients)
    width = max(len(rows) for clients in plans for batches in clients for rows, _ in batches)
    found = []
    for clients in plans:
        rows, lines = (np.zeros((len(clients), steps, width), dtype=np.int64) for _ in range(2))
        real = np.zeros(rows.shape, dtype=bool)
        for client, batches in enumerate(clients):
            for step, (own, words) in enumerate(batches):
                place = client, step, slice(len(own))
                rows[place], lines[place], real[place] = own, words, True
        found.append(Stack(rows, lines, real))
    return found
