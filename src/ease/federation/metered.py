"""Counts what really crosses between server and clients: bytes both ways, messages and client steps."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from safetensors.torch import save as serialise_tensors
from torch import Tensor

from ease.federation.objectives import passes
from ease.federation.protocol import Federation, LocalJob, Update
from ease.params import Params
from ease.storage import digest


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


class Metered:
    """A federation that adds up the serialised size of every message of the one it wraps."""

    def __init__(self, inner: Federation):
        self.inner = inner
        self.cost = Cost()
        self._sizes: dict[tuple, int] = {}
        self._locks_sent: set[tuple[int, str]] = set()
        self._references_sent: dict[int, Params] = {}
        self._whole_states: dict[int, Params] = {}
        """The last whole state that each client was sent."""

    @property
    def clients(self) -> Sequence[int]:
        return self.inner.clients

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        scalars = len(digest(job.round, job.stream)) + len(repr((job.settings, job.optimiser, job.request)).encode())
        for client in clients:
            self.cost.messages += 1
            self.cost.bytes_down += self._size(params.tensors) + scalars + self._lock_size(client, job)
            self.cost.bytes_down += self._reference_size(client, job) + self._base_size(client, params, job)
            if client in job.targets:
                self.cost.bytes_down += self._size({"targets": job.targets[client]})
        started = time.perf_counter()
        for update in self.inner.run(params, job, clients):  # all at once, so that an engine may run them together
            self.cost.client_seconds += time.perf_counter() - started
            self.cost.bytes_up += self._size(update.message())
            self.cost.pairs_passed += passes(job) * update.pairs * job.epochs
            if trained(update, job):
                self.cost.pairs_trained += update.pairs * job.epochs
                self.cost.client_steps += job.batch_count(update.pairs) * job.epochs
            yield update
            started = time.perf_counter()

    def _lock_size(self, client: int, job: LocalJob) -> int:
        """Bases go out once for each client and request, as they are packed, not as they are expanded."""
        if job.lock is None or (client, job.lock.key) in self._locks_sent:
            return 0
        self._locks_sent.add((client, job.lock.key))
        return self._size(job.lock.packed) + self._size(job.lock.reference.tensors)

    def _reference_size(self, client: int, job: LocalJob) -> int:
        """A client keeps the reference it was sent last."""
        if job.reference is None or self._references_sent.get(client) is job.reference:
            return 0
        self._references_sent[client] = job.reference
        return self._size(job.reference.tensors)

    def _base_size(self, client: int, params: Params, job: LocalJob) -> int:
        """A sparse adapter's base goes out with the seed of its mask, but not to a client that holds it already."""
        whole = params if job.sparse is None else job.sparse.base
        held, self._whole_states[client] = self._whole_states.get(client), whole
        if job.sparse is None:
            return 0
        recipe = len(repr((job.sparse.blocks, job.sparse.seed, job.sparse.density)).encode())
        return recipe + (0 if held is whole else self._size(whole.tensors))

    def _size(self, tensors: Mapping[str, Tensor]) -> int:
        """Serialised bytes. They depend on names, shapes and types alone, so each structure is serialised once."""
        key = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        if key not in self._sizes:
            self._sizes[key] = len(
                serialise_tensors({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
            )
        return self._sizes[key]


def trained(update: Update, job: LocalJob) -> bool:
    """Whether an answer comes from training: a change of the parameters, as it is or encoded, or a probe."""
    return update.pairs > 0 and (update.delta is not None or job.encoding != "dense" or job.objective == "probe")
