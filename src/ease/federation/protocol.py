"""Jobs, updates and the interface of a federation: what server and clients exchange."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol

from pydantic import Field
from torch import Tensor

from ease.config import Config
from ease.federation.lock import LockMessage
from ease.federation.sparse import Sparse
from ease.params import Params, finite, same_tensors
from ease.requests.request import Request, SampleRequest


class Optimiser(Config):
    kind: Literal["sgd", "adam", "sophia"] = "sgd"
    """Plain SGD, or Adam or Sophia with a state that is reset every round."""
    learning_rate: float = Field(1.0, gt=0, le=1e30)
    lora_learning_rate: float | None = Field(None, gt=0, le=1e30)
    """Step size of the LoRA blocks; absent means the same as for the projectors."""

    def scaled(self, factor: float) -> "Optimiser":
        """The same optimiser with other step sizes."""
        lora = None if self.lora_learning_rate is None else self.lora_learning_rate * factor
        return Optimiser(kind=self.kind, learning_rate=self.learning_rate * factor, lora_learning_rate=lora)


Precision = Literal["auto", "float32", "bfloat16"]
RoundNumber = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]


@dataclass(frozen=True)
class Replay:
    """A round of the training to repeat with its own random numbers."""

    round: int
    state: Params | str
    """The state that the round started from, or its hash if the client stores that state."""
    weight: float
    """Factor of its change in the returned sum."""
    group: int
    """The returned sum that it belongs to."""
    clients: tuple[int, ...] = ()
    """Clients that took part in the round; empty: all clients that are asked."""

    @property
    def start(self) -> Params:
        """The state that the round started from, if it is loaded."""
        assert isinstance(self.state, Params)
        return self.state


@dataclass(frozen=True)
class LocalJob:
    """The task of a client as data: it can be sent, stored and compared.

    A field that is added here travels by itself; only fields with tensors need a line in `codec.py`.
    """

    round: RoundNumber
    seed: int
    stream: str
    """Names the random stream, so training, probes and recovery never share numbers."""
    optimiser: Optimiser
    epochs: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(gt=0)]
    request: Request | None = None
    data: Literal["all", "retain", "forget"] = "all"
    objective: str = "align"
    """Name of the local objective, see `objectives.py`."""
    settings: Mapping[str, int | float] = field(default_factory=dict)
    """Numbers the objective needs, by name."""
    lock: LockMessage | None = None
    reference: Params | None = None
    """A state that the objective compares with. A client is sent it once and keeps it."""
    clip: float | None = None
    """Largest norm of a step's gradient."""
    radius: float | None = None
    """How far local training may go from where it starts; beyond, it is projected back."""
    proximal: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared distance to where local training starts, times one half, in its loss."""
    sparse: Sparse | None = None
    """If set, the state and the returned change are an adapter over this frozen base."""
    replays: tuple[Replay, ...] = ()
    """Rounds of the training to repeat or to report."""
    keep: bool = False
    """Whether the client stores the state and its update on its own disk."""
    precision: Precision = "float32"
    """Precision of products in projectors; `auto` is the faster one. Sums and steps are never rounded."""
    inbox: Mapping[int, bytes] = field(default_factory=dict)
    """Client -> a message for this client only."""

    def __hash__(self) -> int:
        return hash((self.round, self.seed, self.stream, self.objective, self.data, self.request))

    def own(self, client: int, ids: Collection[str]) -> "LocalJob":
        """The job for one client: only its own forget pairs, the rounds that it took part in, and its own message.

        `ids` are the training pairs of the client.
        """
        request = self.request
        if isinstance(request, SampleRequest):
            request = SampleRequest(ids=tuple(pair_id for pair_id in request.ids if pair_id in ids))
        replays = tuple(
            replace(each, clients=()) for each in self.replays if not each.clients or client in each.clients
        )
        inbox = {client: self.inbox[client]} if client in self.inbox else {}
        return replace(self, request=request, replays=replays, inbox=inbox)

    @property
    def common(self) -> "LocalJob":
        """The job with client-specific fields removed: it is the same for all clients that get the job."""
        request = SampleRequest(ids=()) if isinstance(self.request, SampleRequest) else self.request
        return replace(self, request=request, replays=(), inbox={})

    @property
    def plain(self) -> bool:
        """Whether a step is the gradient of its batch, times the step size, and nothing else."""
        changes = (self.lock, self.clip, self.radius, self.sparse)
        return self.optimiser.kind == "sgd" and not self.proximal and all(each is None for each in changes)

    def batch_count(self, pairs: int) -> int:
        """Number of batches in an epoch; none has a single pair, which would have no negatives."""
        return max(1, min(round(pairs / self.batch_size), pairs // 2))


@dataclass(frozen=True, eq=False)
class Update:
    """A client's answer: its change of the parameters, or only values if the job measures."""

    client: int
    pairs: int
    delta: Params | None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    refused: str = ""
    """Why the server rejects this client's answer. Only the server sets it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Update):
            return NotImplemented
        mine, yours = ((each.client, each.pairs, each.delta, each.refused) for each in (self, other))
        plain = mine == yours
        return plain and same_tensors(dict(sorted(self.values.items())), dict(sorted(other.values.items())))

    def __hash__(self) -> int:
        return hash((self.client, self.pairs, self.delta, frozenset(self.values)))

    @property
    def change(self) -> Params:
        """The change of parameters of an update that has one."""
        assert self.delta is not None
        return self.delta


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do by itself, so that middleware adapts to it."""

    concurrent: bool = False
    """Asking all clients at once is faster than asking one after the other."""
    keeps_deadline: bool = False
    """It stops waiting for clients at the deadline and reports who was late."""
    remote: bool = False
    """Clients are processes of their own. A client that disconnects can reconnect, and its data are nowhere else."""


class Federation(Protocol):
    """Runs a job on clients. In-process, metered, journaled or over a network: the caller sees no difference."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def clients(self) -> Sequence[int]: ...

    @property
    def members(self) -> Mapping[int, Collection[str]]:
        """Client -> ids of its training pairs: the stored membership, by which jobs are narrowed."""
        ...

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        """Give each client its own part of a job and yield the answers in any order."""
        ...


class Engine(Federation, Protocol):
    """A federation that does the work itself."""

    def perform(self, state: Params, jobs: Mapping[int, LocalJob]) -> Iterator[Update]:
        """Do jobs that were narrowed to each client's own part before."""
        ...


class Middleware:
    """A federation that passes calls on to another one; subclasses change what they need."""

    capabilities = Capabilities()
    """Middleware promises nothing about what it wraps."""

    def __init__(self, inner: Federation):
        self.inner = inner

    @property
    def clients(self) -> Sequence[int]:
        return self.inner.clients

    @property
    def members(self) -> Mapping[int, Collection[str]]:
        return self.inner.members

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        return self.inner.run(params, job, clients)


def own_jobs(federation: Federation, job: LocalJob, clients: Sequence[int]) -> dict[int, LocalJob]:
    """Client -> its own part of a job."""
    held = federation.members
    return {client: job.own(client, held.get(client, ())) for client in clients}


NOT_FINITE = "has non-finite values"


def reject_reason(update: Update, params: Params) -> str | None:
    """Why an update must not be averaged, or None when it is sound."""
    if update.refused:
        return update.refused
    if update.pairs <= 0:
        return f"it reports {update.pairs} pairs"
    if update.delta is None:
        return "it carries no parameters"
    if update.delta.tensors.keys() != params.tensors.keys() or update.delta.blocks != params.blocks:
        return "its tensor names differ from the model's"
    for name, tensor in update.delta.tensors.items():
        if tensor.shape != params[name].shape:
            return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(params[name].shape)}"
        if tensor.dtype != params[name].dtype:
            return f"{name} has dtype {tensor.dtype}, expected {params[name].dtype}"
        if not finite(tensor):
            return f"{name} {NOT_FINITE}"
    return None
