"""Every value of every objective, replaced by what no honest client sends: refused, or bounded where it is used."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from ease.audit.site_measures import AUDIT, RETAINED
from ease.federation.expected import answer_fault
from ease.federation.local import promoted
from ease.federation.objectives import OBJECTIVES, objective
from ease.federation.protocol import LocalJob, Middleware, Update, own_jobs
from ease.methods import METHODS, import_all
from ease.methods.ease.replay import ROUND
from ease.params import Params
from ease.testing import Stage, make_stage
from ease.trainers.sums import sum_and_solve

pytestmark = pytest.mark.slow
import_all()

METHODS_PLAYED = ("ease", "multi_delete", "neg_grad_plus", "fed_osd", "ferrari", "ffmu", "fukd")
"""Together they use every objective that is not asked for below."""
MEASURED = ("membership scores", AUDIT)
BOUNDED_WHERE_USED = {
    "ranks": "they choose one of 27 strengths of a closed-form head, all of them sound (docs/exact.md)",
    "replay": "its sums are shortened to three times what the client sent (tests/methods/ease/test_contribution.py)",
    "sum of own updates": "compared with what the client sent (tests/runs/test_history_modes.py -k false_sum)",
    "secure: advertise keys": "random bytes (tests/federation/test_secure.py)",
    "secure: share keys": "sealed bytes (tests/federation/test_secure.py)",
    "secure: masked sums": "any integers; the total is checked (tests/federation/test_secure.py)",
    "secure: unmask": "shares, compared with commitments (tests/federation/test_secure.py)",
}
"""Objectives with values of any size, and what bounds them."""
CHECKSUMS = {("sums", f"features with {value}") for value in ("2^62", "-2^62")}
"""Any number can be a checksum. A false one makes exact forgetting refuse its client (tests/runs/test_exact.py)."""


@dataclass
class Collected(Middleware):
    """Notes the first answer to each objective, with all that it is judged by."""

    inner: Middleware
    found: dict[str, tuple[Params, LocalJob, Update, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.inner)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        jobs = own_jobs(self.inner, job, clients)
        for update in self.inner.run(params, job, clients):
            if update.values and not update.refused:
                held = len(self.inner.members[update.client])
                self.found.setdefault(job.objective, (params, jobs[update.client], update, held))
            yield update


@pytest.fixture(scope="module")
def honest(shared_cache, tmp_path_factory) -> dict[str, tuple[Params, LocalJob, Update, int]]:
    """One honest answer to each objective."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        found: dict[str, tuple[Params, LocalJob, Update, int]] = {}
        plain = make_stage("sequential", tmp_path_factory.mktemp("plain"), "model.lora=off")
        kept = make_stage("sequential", tmp_path_factory.mktemp("kept"), "model.lora=off", "training.history=client")
        for stage, names in ((plain, METHODS_PLAYED), (kept, ("ease",))):
            for name in names:
                for scope in stage.requests:
                    played(stage, name, scope, found)
        for name in MEASURED:
            job = plain.trained.training_job(
                0, request=plain.requests["sample"], objective=name, settings={RETAINED: 8}
            )
            list(Collected(plain.world.federation, found).run(plain.trained.final, job, [0]))
        exact = ("model.projector=closed_form", "model.lora=off", "training.rounds=1")
        for more in ((), ("training.secure=true",)):
            folder = tmp_path_factory.mktemp("exact")
            stage = make_stage("sequential", folder, *exact, *more)
            config = stage.trained.training
            engine = Collected(stage.world.federation, found)
            sum_and_solve(stage.trained.start, engine, config, 0, 0.07, engine.clients)
        return found


def played(stage: Stage, name: str, scope: str, found: dict[str, tuple[Params, LocalJob, Update, int]]) -> None:
    for _ in stage.unlearn(METHODS[name], scope, Collected(stage.world.federation, found)):
        if found.keys() >= OBJECTIVES.keys():
            return


def with_value(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Update], Update]:
    return lambda update: replace(update, values={**update.values, name: change(update.values[name])})


def with_entry(value: float) -> Callable[[Tensor], Tensor]:
    """One number of a tensor replaced, in a type that can hold it."""

    def changed(tensor: Tensor) -> Tensor:
        wide = tensor.double().flatten().clone()
        wide[0] = value
        return wide.view(tensor.shape).to(torch.float64 if tensor.is_floating_point() else tensor.dtype)

    return changed


def lies(update: Update) -> Iterator[tuple[str, Callable[[Update], Update], bool]]:
    """What a client may send, and whether only a range can refuse it."""
    for pairs in (-1, 10**12, True, 1.5):
        yield f"{pairs!r} pairs", lambda update, pairs=pairs: replace(update, pairs=pairs), False
    yield "another value", lambda update: replace(update, values={**update.values, "x": torch.zeros(1)}), False
    yield "texts", lambda update: replace(update, values=dict.fromkeys(update.values, "1")), False
    if update.delta is None:
        yield "a change", lambda update: replace(update, delta=Params({}, ())), False
    else:
        for factor in (math.nan, math.inf):
            yield f"a change times {factor}", lambda update, f=factor: replace(update, delta=update.change * f), False
    for name, tensor in update.values.items():
        yield (
            f"no {name}",
            lambda u, name=name: replace(u, values={k: v for k, v in u.values.items() if k != name}),
            False,
        )
        yield f"{name} of another shape", with_value(name, lambda t: t[None]), False
        yield f"{name} of another type", with_value(name, lambda t: t.bool()), False
        if tensor.is_floating_point() and tensor.numel():
            for value in (math.nan, math.inf, -math.inf):
                yield f"{name} with {value}", with_value(name, with_entry(value)), False
            for value in (1.7e308, -1e30):
                yield f"{name} with {value}", with_value(name, with_entry(value)), True
        elif tensor.dtype == torch.int64 and tensor.numel():
            yield f"{name} with 2^62", with_value(name, lambda t: torch.full_like(t, 1 << 62)), True
            yield f"{name} with -2^62", with_value(name, lambda t: torch.full_like(t, -(1 << 62))), True


def test_no_value_of_any_objective_is_taken_unless_an_honest_client_could_send_it(honest) -> None:
    assert OBJECTIVES.keys() - honest.keys() == {ROUND}  # a part of `replay`, whose answer is never sent
    tried, taken = 0, set[tuple[str, str]]()
    for name, (state, job, update, held) in honest.items():
        expected = objective(name).expects(state, job, update.client, held)
        assert expected is not None, f"{name} declares nothing"
        assert answer_fault(update, expected, state.map(promoted), held) is None, name
        for what, lie, by_range in lies(update):
            reason = answer_fault(lie(update), expected, state.map(promoted), held)
            tried += 1
            if reason is None and not (by_range and name in BOUNDED_WHERE_USED):
                taken.add((name, what))
    print(f"{tried} lies about {len(honest)} objectives")
    assert taken == CHECKSUMS, sorted(taken - CHECKSUMS)
    assert tried > 200
