"""What every method keeps to, whatever it does: the battery of `ease.testing` over all of them and all requests."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, ClassVar, Literal

import pytest

from ease import testing
from ease.federation.fedavg import TrainingConfig
from ease.federation.protocol import Federation
from ease.methods import METHODS
from ease.methods.base import Need, Step, Trained, Unlearner, fine_tuning, retained_clients
from ease.methods.ferrari import Ferrari
from ease.methods.finetune import Finetune
from ease.requests.request import Request
from ease.testing import (
    CHECKS,
    CHECKS_OF_CLASSES,
    FAULTS,
    SCOPES,
    STAGES,
    Fault,
    Stage,
    a_failing_client_is_refused,
    a_faulty_client_is_named,
    check_method,
    make_stage,
    needs_no_more_than_it_says,
    stopping_changes_no_byte,
    withstands,
)


class FewNoises(Ferrari):
    """The average over noises has the same parts, however many there are."""

    noise_draws: int = 2
    """Ten times fewer than by default."""


PLAYED = {**METHODS, "ferrari": FewNoises}
TRAINED = sorted(name for name, kind in METHODS.items() if "fedavg" in kind.trainers)
"""Methods for models that are trained in rounds; exact forgetting has tests of its own."""
every_method = pytest.mark.parametrize("name", TRAINED)
every_request = pytest.mark.parametrize("scope", SCOPES)
SHARED = (a_failing_client_is_refused, a_faulty_client_is_named, stopping_changes_no_byte)
"""Checks that concern averaging and the journal, which all kinds of requests share; slow tests meet all kinds."""
EXHAUSTIVE = os.environ.get("EASE_SWEEP") == "all"


def kinds_in_turn(*others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every method with every choice of the others, and for each one kind of request in turn; EASE_SWEEP=all: all."""
    combined = product(*(list(enumerate(each)) for each in (TRAINED, *others)))
    return [
        (*(value for _, value in each), scope)
        for each in combined
        for place, scope in enumerate(SCOPES)
        if EXHAUSTIVE or (sum(number for number, _ in each) - place) % len(SCOPES) == 0
    ]


def named(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


@pytest.fixture(scope="module")
def stage_of(shared_cache, tmp_path_factory) -> Callable[..., Stage]:
    made: dict[tuple[str, ...], Stage] = {}

    def stage(name: str, *assignments: str) -> Stage:
        if (name, *assignments) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EASE_CACHE", str(shared_cache))
                made[name, *assignments] = make_stage(name, tmp_path_factory.mktemp("contract"), *assignments)
        return made[name, *assignments]

    return stage


@every_method
@pytest.mark.parametrize("check", CHECKS_OF_CLASSES, ids=lambda check: check.__name__)
def test_a_class_says_what_it_is(check, name: str) -> None:
    check(METHODS[name])


@pytest.fixture(scope="module")
def ground_of(stage_of) -> Callable[[str], Stage]:
    """Where a method is played: EASE with adapters, as ever; the others train projectors alone, which takes half the
    time. With adapters they are played elsewhere, below."""
    return lambda name: stage_of("sequential") if name == "ease" else stage_of("sequential", "model.lora=off")


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in SHARED], ids=named)
@every_request
@every_method  # outermost: whoever is given some of the methods plays no other
def test_the_contract(ground_of, check, name: str, scope: str) -> None:
    check(ground_of(name), PLAYED[name], scope)


@pytest.mark.parametrize(("name", "check", "scope"), kinds_in_turn(SHARED), ids=named)
def test_the_contract_of_what_requests_share(ground_of, check, name: str, scope: str) -> None:
    check(ground_of(name), PLAYED[name], scope)


@every_request
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_where_clients_keep_the_history(stage_of, check, scope: str) -> None:
    check(stage_of("vectorized, some clients a round", "training.history=client"), METHODS["ease"], scope)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ground", "check", "scope"),
    kinds_in_turn(STAGES, CHECKS),
    ids=named,
)
def test_the_contract_elsewhere(stage_of, ground: str, check, name: str, scope: str) -> None:
    check(stage_of(ground), PLAYED[name], scope)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "scope"), kinds_in_turn([fault for fault in FAULTS if fault != "silence"]), ids=named
)
def test_every_fault_is_withstood(stage_of, name: str, scope: str, fault: Fault) -> None:
    withstands(stage_of("sequential"), PLAYED[name], scope, fault)


@every_request
@pytest.mark.parametrize("fault", FAULTS)
def test_ease_withstands_every_fault(stage_of, scope: str, fault: Fault) -> None:
    withstands(stage_of("sequential", "model.lora=off"), METHODS["ease"], scope, fault)


# --- the battery bites ---


class Still(Finetune):
    """Announces more than it does, and goes nowhere."""

    name: ClassVar[str] = "still"
    method: Literal["still"] = "still"  # type: ignore[assignment]

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        yield Step(trained.final, "nothing")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 2


class Secret(Finetune):
    """Trains on everything and says that it needs retained data alone."""

    name: ClassVar[str] = "secret"
    method: Literal["secret"] = "secret"  # type: ignore[assignment]

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.training.job(1, 0, 0.07, "secret", request=request)
        (update, *_) = federation.run(trained.start, job, retained_clients(request, federation))
        yield Step(trained.start + update.change, "secret")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1


class Greedy(Finetune):
    """Goes on from what it kept of the last call."""

    name: ClassVar[str] = "greedy"
    method: Literal["greedy"] = "greedy"  # type: ignore[assignment]
    calls: ClassVar[list[int]] = []

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        self.calls.append(1)
        state = trained.start * (1 + 0.01 * len(self.calls))
        yield from fine_tuning(trained, state, request, federation, self.rounds(trained.training, request), "greedy")


class Heavy(Finetune):
    """Uses whatever a client sends."""

    name: ClassVar[str] = "heavy"
    method: Literal["heavy"] = "heavy"  # type: ignore[assignment]
    needs: ClassVar[frozenset[Need]] = frozenset()

    def unlearn(self, trained: Trained, request: Request, federation: Federation) -> Iterator[Step]:
        job = trained.training.job(1, 0, 0.07, "heavy", request=request, data="retain")
        (update, *_) = federation.run(trained.start, job, retained_clients(request, federation))
        yield Step(trained.start + update.change, "heavy")

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Still, r"still, client request \(sequential\), check \w+: it announces 2 rounds and yields 1 steps"),
        (Secret, r"secret, client request \(sequential\), check \w+: it needs no forget data, and asks for all pairs"),
        (Greedy, r"greedy, client request \(sequential\), check \w+: its states change"),
        (Heavy, r"heavy, client request \(sequential\), check \w+: a client that fails makes its states not finite"),
    ],
)
def test_a_violation_is_reported_in_a_sentence(stage_of, monkeypatch, kind: type[Unlearner], sentence: str) -> None:
    monkeypatch.setattr(testing, "make_stage", lambda name, folder: stage_of(name))
    with pytest.raises(AssertionError, match=sentence):
        check_method(kind, ["sequential"])


def test_forget_data_that_are_read_in_secret_show(stage_of) -> None:
    with pytest.raises(AssertionError, match=r"its states change when .* taken away; it lists nothing"):
        needs_no_more_than_it_says(stage_of("sequential"), Secret, "class")


def test_a_class_without_docstring_is_reported(monkeypatch) -> None:
    class Mute(Finetune):
        name: ClassVar[str] = "mute"
        method: Literal["mute"] = "mute"  # type: ignore[assignment]
        secret: int = 3

    Mute.__doc__ = "Says nothing of its setting."
    with pytest.raises(AssertionError, match=r"Mute, check \w+: its setting secret has no description below it"):
        check_method(Mute, [])


def test_a_sound_class_passes(stage_of, monkeypatch) -> None:
    monkeypatch.setattr(testing, "make_stage", lambda name, folder: stage_of(name))
    check_method(Finetune, ["sequential"])


@pytest.mark.slow
def test_the_whole_battery_builds_its_own_runs() -> None:
    check_method(METHODS["not"])
