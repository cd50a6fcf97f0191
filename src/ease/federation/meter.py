"""Counts the traffic between server and clients (bytes both ways, messages) and the steps of clients."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ease.federation.codec import Part, encode_part, job_length, part_length, parts_of, update_length
from ease.federation.lock import LockMessage
from ease.federation.objectives import objective
from ease.federation.protocol import Federation, LocalJob, Middleware, Update, own_jobs
from ease.params import Params


@dataclass
class Cost:
    """Running totals. Seconds are those spent waiting for clients."""

    bytes_down: int = 0
    bytes_up: int = 0
    messages: int = 0
    pairs_trained: int = 0
    pairs_passed: float = 0.0
    """Pairs through the model, forward and backward, probes and measurements included."""
    client_steps: int = 0
    client_seconds: float = 0.0


class Metered(Middleware):
    """A federation that adds up the encoded length of every message of the one it wraps."""

    def __init__(self, inner: Federation, known: Sequence[Params] = (), cost: Cost | None = None):
        super().__init__(inner)
        self.cost = Cost() if cost is None else cost
        self._known = {_fingerprint(each) for each in known}
        """Hashes of states that clients have from the training."""
        self._kept: dict[int, dict[Part, bytes]] = {}
        """Client -> hashes of the parts that it stores: lock, reference, base, and the last whole state it was sent.

        Hashes only, because ten thousand clients may each have another state.
        """

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        asked, parts = objective(job.objective), parts_of(job, params)  # heavy ones are the same for all
        marks = {part: _fingerprint(value) for part, value in parts.items()}
        lengths = {marks[part]: part_length(value) for part, value in parts.items()}
        for client, own in own_jobs(self.inner, job, clients).items():
            self.cost.messages += 1
            self.cost.bytes_down += job_length(own) + self._parts_length(client, own, marks, lengths)
        started = time.perf_counter()
        for update in self.inner.run(params, job, clients):  # all at once, so that an engine may run them together
            self.cost.client_seconds += time.perf_counter() - started
            self.cost.bytes_up += update_length(update)
            self.cost.pairs_passed += asked.passes_of(job) * update.pairs * job.epochs
            if asked.trains and update.pairs > 0:
                epochs = job.epochs * max(1, len(job.replays))
                self.cost.pairs_trained += update.pairs * epochs
                self.cost.client_steps += job.batch_count(update.pairs) * epochs
            yield update
            started = time.perf_counter()

    def _parts_length(
        self, client: int, job: LocalJob, marks: Mapping[Part, bytes], lengths: Mapping[bytes, int]
    ) -> int:
        """Bytes of the job's parts that the client does not have; a part that serves twice is sent once."""
        kept = self._kept.setdefault(client, {})
        missing = set(marks.values()) - self._known - set(kept.values())
        kept.update({part: mark for part, mark in marks.items() if part != "state" or job.sparse is None})
        return sum(lengths[mark] for mark in missing)


def _fingerprint(part: Params | LockMessage) -> bytes:
    """The hash of an encoded part."""
    return hashlib.sha256(encode_part(part)).digest()
