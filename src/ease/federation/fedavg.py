"""Federated averaging: the training every model here goes through, one state per round."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, model_validator

from ease.config import Config
from ease.errors import Diverged
from ease.federation.aggregation import Aggregation, aggregated, clipped
from ease.federation.codec import encode_state
from ease.federation.container import content_hash
from ease.federation.protocol import Federation, LocalJob, Optimiser, Update, reject_reason
from ease.federation.strategies import Strategy, StrategyName, strategy_of
from ease.model.closed_form import Ridge
from ease.params import Params
from ease.requests.request import Request
from ease.seeding import generator
from ease.subspace import ServerLock

LARGEST_RATE = 1e6
"""Largest learning rate of a step. More overflows fp32 within a few steps, whatever the gradient."""


class TrainingConfig(Config):
    rounds: int = Field(20, ge=1)
    """Rounds of training; a finished run can be given more."""
    local_epochs: int = Field(2, ge=1)
    """Passes of a client over its pairs in a round."""
    batch_size: int = Field(32, ge=2)
    """Pairs of a step; each is contrasted with the others of its batch."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Local optimiser; Adam's state starts anew every round."""
    learning_rate: float = Field(1.0, gt=0, le=LARGEST_RATE)
    """Step size of clients."""
    lora_learning_rate: float | None = Field(None, gt=0, le=LARGEST_RATE)
    """Step size of LoRA blocks; absent means the same as `learning_rate`."""
    participation: float = Field(1.0, gt=0, le=1)
    """Share of the clients drawn for each round."""
    weighting: Literal["pairs", "uniform"] = "pairs"
    """Weight of a client in the average: its number of pairs, or the same for all."""
    history: Literal["server", "client"] = "server"
    """Who keeps the clients' updates: the server, or each client its own, with the states it was sent."""
    history_precision: Literal["float32", "float16"] = "float32"
    """How the server stores updates: whole, or in half the space, each rounded by up to 1 part in 2,000."""
    history_every: int = Field(1, ge=1)
    """The server stores clients' updates of one round in so many, the first among them, and the states of all."""
    aggregation: Aggregation = "mean"
    """Rule that combines the updates of a round; all except `mean` bound what a few hostile clients can do."""
    hostile: float = Field(0.2, ge=0, lt=0.5)
    """Share of a round's clients that may be hostile; `trimmed` drops this share at either end, `krum` once."""
    clip_to_median: float = Field(3.0, ge=1)
    """Updates longer than so many times the round's median are shortened; other numbers of pairs may go further."""
    quorum: float = Field(0.5, gt=0, le=1)
    """Share of the clients that must give valid answers for a round to continue without the others."""
    deadline: float | None = Field(None, gt=0)
    """Seconds to wait for a client's answer; absent: as long as it takes."""

    shards: int = Field(1, ge=1)
    """Groups of clients that train models of their own; the release is their mean. Forgetting retrains one group."""
    strategy: StrategyName = "fedavg"
    """Training rule: `fedavg`; `fedprox` holds clients near the state they were sent; `fedadam` lets the server make
    Adam's steps, for methods that read no stored updates."""
    proximal: float = Field(0.01, gt=0)
    """FedProx: weight of the squared distance to the start of the round, times one half."""
    server_learning_rate: float = Field(0.01, gt=0, le=LARGEST_RATE)
    """FedAdam: step size of the server."""
    secure: bool = False
    """The server sees the total of the clients' sums only (secure aggregation); for `model.projector = "closed_form"`,
    with `history = "client"`."""

    @model_validator(mode="before")
    @classmethod
    def _secure_sums_stay_with_clients(cls, table: Any) -> Any:
        """With secure aggregation the server has no client's sums that it could store."""
        return {"history": "client", **table} if isinstance(table, dict) and table.get("secure") is True else table

    @model_validator(mode="after")
    def _nothing_of_one_client(self) -> "TrainingConfig":
        if self.secure and self.history != "client":
            raise ValueError(
                "training.secure = true hides each client's sums from the server, so that it cannot store them; leave "
                "out training.history"
            )
        return self

    @model_validator(mode="after")
    def _adam_is_resumed_from_updates(self) -> "TrainingConfig":
        if self.strategy == "fedadam" and (self.history == "client" or self.thinned):
            raise ValueError(
                'training.strategy = "fedadam" resumes from the stored updates of all rounds; leave out '
                "training.history and training.history_every"
            )
        return self

    @model_validator(mode="after")
    def _shards_are_kept(self) -> "TrainingConfig":
        if self.shards == 1:
            return self
        usual = TrainingConfig()
        for name in ("history", "history_every", "history_precision", "participation"):
            if getattr(self, name) != getattr(usual, name):
                raise ValueError(
                    f"training.{name}: with training.shards the models of shards are computed from all stored updates; "
                    f"leave it at {getattr(usual, name)}"
                )
        if not strategy_of(self).averages:
            raise ValueError(f'training.strategy = "{self.strategy}": not with training.shards; leave out one of them')
        return self

    @model_validator(mode="after")
    def _sums_tell_the_mean(self) -> "TrainingConfig":
        if self.history == "client" and self.aggregation != "mean":
            raise ValueError(
                f'training.history = "client" needs training.aggregation = "mean", because sums do not reveal the '
                f"contribution of one client to a {self.aggregation}; choose one of the two"
            )
        if self.thinned and self.history == "client":
            raise ValueError(
                'training.history = "client" stores no update at the server, so that training.history_every has no '
                "effect; leave it at 1"
            )
        if self.thinned and self.aggregation != "mean":
            raise ValueError(
                f'training.history_every needs training.aggregation = "mean", because a {self.aggregation} is known '
                "only if all of its updates are stored; leave it at 1"
            )
        return self

    @property
    def thinned(self) -> bool:
        """Whether the server leaves updates out of what it stores."""
        return self.history_every > 1

    def weight(self, pairs: int) -> float:
        """Weight of a client in the average."""
        return float(pairs) if self.weighting == "pairs" else float(pairs > 0)

    def job(
        self, round: int, seed: int, temperature: float, stream: str = "train", rate: float = 1.0, **changes: Any
    ) -> LocalJob:
        """The local job of one round under this recipe, with step sizes changed by the factor `rate`."""
        optimiser = Optimiser(
            kind=self.optimiser, learning_rate=self.learning_rate, lora_learning_rate=self.lora_learning_rate
        )
        fields: dict[str, Any] = {
            "round": round,
            "seed": seed,
            "stream": stream,
            "optimiser": optimiser.scaled(rate),
            "epochs": self.local_epochs,
            "batch_size": self.batch_size,
            "temperature": temperature,
            "proximal": strategy_of(self).proximal,
        }
        return LocalJob(**{**fields, **changes})


class SentUpdate(Config):
    """The server's record of an update that only its client stores.

    It is enough to bound sums of such updates, and to recognise the update if the client sends it again.
    """

    norm: float
    sha256: str


@dataclass(frozen=True)
class Round:
    """One finished round: the new state, the updates that were averaged and those that were rejected."""

    number: int
    state: Params
    updates: tuple[Update, ...]
    rejected: dict[int, str] = field(default_factory=dict)
    averaged: Params | None = None
    """The state before what is locks was taken back to its place; absent: the same."""
    clipped: dict[int, float] = field(default_factory=dict)
    """Client -> the factor by which its update was shortened."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Client -> norm of its update as it was averaged, where someone looked."""
    sent: dict[int, SentUpdate] = field(default_factory=dict)
    """Client -> norm and hash of its update as it was sent, if the server does not store it."""
    moved: float | None = None
    """Norm of what the updates became; absent: nobody looked."""
    sums: Params | None = None
    """Sums from which the state was solved, for a closed-form head."""
    ridge: Ridge | None = None
    """Strengths of the regularisation, for a closed-form head."""
    features: dict[int, int] = field(default_factory=dict)
    """For a closed-form head: client -> checksum of the features that its sums are of."""

    @property
    def loss(self) -> float | None:
        """Median of the training losses that clients reported, weighted by pairs.

        Goals and early stopping rest on it. A client that reports a false loss can move it no further than to the loss
        of an honest client next to the middle, where it could move a mean anywhere in the range of a loss."""
        losses = [(float(update.values["loss"]), update.pairs) for update in self.updates if "loss" in update.values]
        return weighted_median([(loss, pairs) for loss, pairs in losses if math.isfinite(loss)])


def weighted_median(weighted: Sequence[tuple[float, float]]) -> float | None:
    """The value with half of the weight on each side; between two such values, their mean."""
    ordered, half = sorted(weighted), sum(weight for _, weight in weighted) / 2
    below = 0.0
    for place, (value, weight) in enumerate(ordered):
        below += weight
        if below == half and place + 1 < len(ordered):
            return (value + ordered[place + 1][0]) / 2
        if below >= half:
            return value
    return None


def average(params: Params, updates: Iterable[Update], config: TrainingConfig, number: int, clip: bool = True) -> Round:
    """Validate updates and apply their mean, summed by ascending client id so that arrival order cannot matter.

    What clients do to forget pairs is as unequal as the pairs are spread: such rounds do not `clip`.
    """
    kept, rejected = list[Update](), dict[int, str]()
    answers = sorted(updates, key=lambda update: update.client)
    counts = Counter(update.client for update in answers)
    for update in answers:
        if update.delta is None and update.pairs == 0 and not update.refused:
            continue  # an abstention: nothing of this client's takes part in the job
        reason = reject_reason(update, params)
        if counts[update.client] > 1:
            reason = "it answered more than once"  # which answer counts would depend on the order of arrival
        if reason is None:
            kept.append(update)
        else:
            rejected[update.client] = reason
    if not kept:
        if rejected:
            client, reason = next(iter(rejected.items()))
            raise Diverged(
                f"round {number}: every update was rejected (client {client}: {reason}); lower training.learning_rate"
            )
        return Round(number, params, ())  # all abstained, so there is nothing to learn from
    weights = [config.weight(each.pairs) for each in kept]
    norms, apart = [each.change.norm() for each in kept], config.history == "client"
    sent = {each.client: _sent(each, norm) for each, norm in zip(kept, norms, strict=True)} if apart else {}
    kept, factors = clipped(kept, norms, config.clip_to_median, weights) if clip else (kept, {})
    lengths = {each.client: norm * factors.get(each.client, 1.0) for each, norm in zip(kept, norms, strict=True)}
    changes = [(weight, each.change) for weight, each in zip(weights, kept, strict=True)]
    mean = aggregated(changes, config.aggregation, config.hostile)
    return Round(
        number,
        params + mean,
        tuple(kept),
        rejected,
        clipped=factors,
        lengths=lengths,
        sent=sent,
        moved=mean.norm(),
    )


def _sent(update: Update, norm: float) -> SentUpdate:
    return SentUpdate(norm=norm, sha256=content_hash(encode_state(update.change)))


def moved_by(rule: Strategy, params: Params, finished: Round) -> Round:
    """The round with the state to which a strategy moves the model."""
    if rule.averages:
        return finished
    change = rule.step(finished.state - params)
    return replace(finished, state=params + change, moved=change.norm())


def participants(clients: Sequence[int], config: TrainingConfig, seed: int, number: int) -> list[int]:
    """The clients drawn for a round, ascending."""
    count = max(1, round(config.participation * len(clients)))
    if count == len(clients):
        return sorted(clients)
    drawn = generator(seed, "participation", number).choice(sorted(clients), count, replace=False)
    return sorted(int(client) for client in drawn)


def fedavg(
    params: Params,
    federation: Federation,
    config: TrainingConfig,
    seed: int,
    temperature: float,
    clients: Sequence[int] | None = None,
    first_round: int = 1,
    request: Request | None = None,
    stream: str = "train",
    locks: Sequence[ServerLock] = (),
    keep: bool = False,
    past: Iterable[Params] = (),
) -> Iterator[Round]:
    """Train from `params`; with a request, only on retained pairs. Yields every finished round.

    `past` are the mean updates of earlier rounds, from which a strategy with a state resumes. Directions in `locks` are
    restored after every round. With `keep` clients keep what they are sent and send.
    """
    everyone = sorted(federation.clients if clients is None else clients)
    rule = strategy_of(config)
    for mean in past:
        rule.step(mean)
    for number in range(first_round, config.rounds + 1):
        data = "all" if request is None else "retain"
        job = config.job(number, seed, temperature, stream, request=request, data=data, keep=keep)
        drawn = participants(everyone, config, seed, number)
        finished = average(params, federation.run(params, job, drawn), config, number)
        finished = moved_by(rule, params, finished)
        for each in locks:
            finished = replace(finished, state=each.apply(finished.state), averaged=finished.averaged or finished.state)
        params = finished.state
        yield finished
