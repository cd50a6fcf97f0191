"""What every unlearning method is: a value with hyperparameters, and one generator that yields a state per round."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from ease.config import Config
from ease.errors import UserError
from ease.federation.fedavg import Round, TrainingConfig, average, fedavg
from ease.federation.history import THINNED, History
from ease.federation.protocol import Federation, LocalJob
from ease.federation.strategies import strategy_of
from ease.methods.unlearning_base import ClientReport, UnlearningBase
from ease.params import Params
from ease.requests.request import ClientRequest, Request, leaving_clients
from ease.subspace import Basis
from ease.trainers import TrainerName


@dataclass(frozen=True)
class Order:
    """The random numbers of a training: which seed and which stream its data order came from."""

    seed: int
    stream: str = "train"


@dataclass(frozen=True)
class Trained:
    """A finished training, its recipe and the history it left on disk, and what has been forgotten of it since."""

    history: History
    training: TrainingConfig
    temperature: float
    seed: int
    """Seed of the method's own random numbers."""
    trained_with: Order | None = None
    """The random numbers of the training; absent: the stream `train` of the same seed."""
    answered: Params | None = None
    """The state that the last closed request left; absent: none was closed."""
    gone: tuple[Request, ...] = ()
    """Requests that are closed already."""
    locked: Mapping[str, Basis] = field(default_factory=dict)
    """Directions that they keep locked."""
    base: UnlearningBase | None = None
    """Base stored by the last released result for the next request, if any."""

    @cached_property
    def initial(self) -> Params:
        """w_0."""
        return self.history.state(0)

    @cached_property
    def final(self) -> Params:
        """w_n."""
        return self.history.state(self.training.rounds)

    @cached_property
    def start(self) -> Params:
        """The model to unlearn: the trained one, or what earlier requests have left of it."""
        return self.final if self.answered is None else self.answered

    @property
    def base_state(self) -> Params:
        """The state to subtract from: the model before the recovery of the last closed request."""
        return self.start if self.base is None else self.base.state

    @property
    def reports(self) -> Mapping[int, ClientReport]:
        """Client -> the sum that it reported of its rounds without forgotten pairs."""
        return {} if self.base is None else self.base.reports

    @property
    def order(self) -> Order:
        return self.trained_with or Order(self.seed)

    def job(self, round: int, stream: str, rate: float = 1.0, **changes: Any) -> LocalJob:
        """A job of a method, with random numbers of its own, and with some fields changed."""
        return self.training.job(round, self.seed, self.temperature, stream, rate, **changes)

    def training_job(self, round: int, **changes: Any) -> LocalJob:
        """The job that a round of the training gave to its clients, with some fields changed."""
        return self.training.job(round, self.order.seed, self.temperature, self.order.stream, **changes)


@dataclass(frozen=True)
class Step:
    """One round of unlearning: the state after it, which phase it belongs to and what was noted."""

    state: Params
    phase: str
    loss: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    bases: dict[str, Basis] | None = None
    """On the last step: directions to keep locked in later training, at this step's state."""
    base: UnlearningBase | None = None
    """On the last step: what the next answer starts from."""
    round: Round | None = None
    """The complete round, if the result is a training on which later requests build."""


Need = Literal["history", "forget data", "leaving client"]
"""Needs of a method beyond retained data: stored updates, the forget pairs, the client that withdraws online."""


Space = Mapping[str, tuple[Any, ...]]
"""Settings and the values that `ease sweep` may choose, the default among them."""


class Unlearner(Config, ABC):
    """A method: hyperparameters only. Data goes to the call."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Its name in tables."""
    source: ClassVar[str]
    """Authors, venue and year."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """A method touches nothing that it does not list here; the contract tests watch it."""
    trainers: ClassVar[frozenset[TrainerName]] = frozenset({"fedavg"})
    """Which trainings it can answer requests of."""
    tuned: ClassVar[Space] = {}
    """Settings that a fair comparison may tune: at most three."""

    @abstractmethod
    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        """Forget what the request names. Each step is one round; the last state is the result."""

    def check(self, training: TrainingConfig) -> None:
        """Refuse settings that cannot work on such a training, before anything is read or computed."""
        self.check_strategy(training)
        if "history" in self.needs and training.thinned:
            raise UserError(f"{self.name}: {THINNED}")

    def check_strategy(self, training: TrainingConfig) -> None:
        """Refuse to read stored updates as steps of a model that a server's optimiser moved."""
        if "history" in self.needs and not strategy_of(training).averages:
            raise UserError(
                f'{self.name}: training.strategy = "{training.strategy}" does not move the model by the mean of the '
                "stored updates, which this method subtracts or repeats; use a method that needs no history, such as "
                "finetune or retrain"
            )

    def reads_updates_of(self, request: Request, training: TrainingConfig, clients: int) -> frozenset[int] | None:
        """Whose stored updates it reads, where so many clients took part in every round; None: anyone's."""
        return None if "history" in self.needs else frozenset()

    @abstractmethod
    def rounds(self, training: TrainingConfig, request: Request) -> int:
        """Number of steps that `unlearn` yields, or the least number for methods that may take more."""

    def most_rounds(self, training: TrainingConfig, request: Request) -> int:
        """Upper bound on the number of steps."""
        return self.rounds(training, request)

    def estimated_work(
        self, training: TrainingConfig, request: Request, holders: float, replay_cost: float = 1.0
    ) -> float:
        """Estimated cost in rounds of training.

        `holders` is the share of the clients that hold forget pairs, `replay_cost` the cost of repeating a round.
        """
        return float(self.rounds(training, request))

    def advice(self, forget_share: float, cost: float) -> str:
        """What to do instead, or nothing if the method suits a request that removes this share of all pairs and costs
        this share of retraining."""
        return ""


def retained_clients(request: Request, federation: Federation) -> Sequence[int]:
    """All clients except those that withdraw."""
    leaving = leaving_clients(request)
    return [client for client in federation.clients if client not in leaving]


def forget_clients(request: Request, federation: Federation) -> Sequence[int]:
    """Clients to ask about forget pairs: those that withdraw, else all. Clients without forget pairs abstain."""
    return sorted(request.clients) if isinstance(request, ClientRequest) else federation.clients


def share_of(training: TrainingConfig, share: float) -> int:
    """A share of the training rounds: at least one round, or none for a share of 0."""
    return max(1, round(share * training.rounds)) if share > 0 else 0


def fine_tuning(
    trained: Trained,
    state: Params,
    request: Request,
    federation: Federation,
    rounds: int,
    stream: str,
    first: int = 1,
    phase: str = "finetune",
) -> Iterator[Step]:
    """Plain training on retained data from round `first` up to `rounds`, with which most methods end."""
    recipe = trained.training.model_copy(update={"rounds": rounds})
    clients = retained_clients(request, federation)
    numbers = trained.seed, trained.temperature
    for finished in fedavg(state, federation, recipe, *numbers, clients, first, request=request, stream=stream):
        yield step_of(finished, phase)


def forget_then_finetune(
    trained: Trained,
    state: Params,
    request: Request,
    federation: Federation,
    job: LocalJob,
    forget_rounds: int,
    phase: str,
    finetune_rounds: int,
    stream: str,
) -> Iterator[Step]:
    """Rounds of a job at clients with forget pairs, whose mean update makes the new state; then fine-tuning."""
    for number in range(1, forget_rounds + 1):
        answers = federation.run(state, replace(job, round=number), forget_clients(request, federation))
        finished = average(state, answers, trained.training, number, clip=False)
        state = finished.state
        yield step_of(finished, phase)
    yield from fine_tuning(trained, state, request, federation, finetune_rounds, stream)


def step_of(finished: Round, phase: str) -> Step:
    """A federated round as a step."""
    return Step(finished.state, phase, finished.loss, exclusions(finished))


def exclusions(finished: Round) -> dict[str, Any]:
    """Clients whose updates were rejected or clipped in a round, as notes of its step."""
    found = {"rejected": finished.rejected, "clipped": finished.clipped}
    return {name: clients for name, clients in found.items() if clients}
