"""EASE on a small real run: forget pairs end where retraining leaves them, and every part has its switch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from ease.data.partition import Shard
from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.fedavg import TrainingConfig, average, fedavg
from ease.federation.loop import Loop
from ease.federation.protocol import LocalJob, Optimiser, Update
from ease.methods import make_method
from ease.methods.base import Step
from ease.methods.ease import calibration, method
from ease.methods.ease.calibration import Usual
from ease.methods.ease.counterfactual import written_by
from ease.methods.ease.method import Ease
from ease.methods.finetune import Finetune
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import trained_of
from ease.runs.records import SpectrumNotes
from ease.runs.run import Run
from ease.runs.world import World
from ease.subspace import NULL, Basis, displacement

CLIENT = ClientRequest(clients=(1,))
FIRST = ClientRequest(clients=(0,))
CLASS = ClassRequest(classes=(2,))
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def samples(learnt) -> SampleRequest:
    """Six pairs each of three of the four clients."""
    return SampleRequest(ids=tuple(pair_id for shard in learnt.world.shards[:3] for pair_id in shard.train_ids[:6]))


@pytest.fixture(scope="module")
def retrained(learnt, samples) -> dict[str, list[Params]]:
    """What each request would have left, had its pairs never been there, after every round."""
    requests = {"client": CLIENT, "class": CLASS, "samples": samples}
    return {name: [step.state for step in learnt.play(request, Retrain())] for name, request in requests.items()}


@pytest.fixture(scope="module")
def full(small_config, shared_cache, tmp_path_factory) -> tuple[World, Run]:
    """A run that trains both LoRA factors."""
    config = small_config(
        "model.lora=full", "model.lora_rank=4", "training.rounds=3", "partition.validation_share=0.3",
        "training.lora_learning_rate=0.3",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        world = World.open(config)
    run = Run.create(tmp_path_factory.mktemp("full") / "run", config)
    list(run.train(world))
    return world, run


def unlearn(learnt, request: Request, **settings: object) -> Iterator[Step]:
    return iter(learnt.play(request, Ease(**settings)))


def left(state: Params, reference: Params, bases: dict[str, Basis]) -> dict[str, float]:
    """||Pi_u (w - w_ref)|| of each block."""
    return {
        block.name: float(bases[block.name].components(displacement(block, state, reference)).norm())
        for block in state.blocks
        if block.name in bases
    }


def same(one: Params, two: Params) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one.tensors)


# --- what it reaches ---


def test_training_pairs_are_held_more_strongly_than_unseen_ones(learnt) -> None:
    """Without this the other tests would show nothing."""
    level, start = (learnt.level(state, CLIENT) for state in (learnt.trained.final, learnt.trained.initial))
    assert level > start + 3


def others_than(learnt, request: Request) -> SampleRequest:
    """All training pairs that stay."""
    shards = [(shard, ~forget_mask(request, shard)) for shard in learnt.world.shards]
    return SampleRequest(
        ids=tuple(i for shard, kept in shards for i, k in zip(shard.train_ids, kept, strict=True) if k)
    )


@pytest.mark.parametrize("scope", ["client", "class", "samples"])
def test_forget_pairs_fall_to_where_retraining_leaves_them_and_the_others_stay(
    learnt, samples, retrained, scope: str
) -> None:
    """The others lose less than one round of training: retraining without its last round holds them less."""
    request = {"client": CLIENT, "class": CLASS, "samples": samples}[scope]
    steps = list(unlearn(learnt, request, recovery_share=0.5, replay=1.0))
    before, after, goal = (
        learnt.level(state, request) for state in (learnt.trained.final, steps[-1].state, retrained[scope][-1])
    )
    assert before > goal + 2
    assert abs(after - goal) < 0.25 * (before - goal)
    kept = others_than(learnt, request)
    assert learnt.level(steps[-1].state, kept) > learnt.level(retrained[scope][-2], kept)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(CLIENT, id="client"),
        pytest.param(ClientRequest(clients=(0, 3)), id="clients", marks=pytest.mark.slow),
        pytest.param(ClassRequest(classes=(0, 2)), id="classes", marks=pytest.mark.slow),
        pytest.param("samples", id="samples"),
    ],
)
def test_every_kind_of_request_runs_and_tells_what_it_did(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    method = Ease(recovery_share=0.34)
    steps = list(learnt.play(request, method))
    assert len(steps) == 3 == method.rounds(learnt.trained.training, request)
    assert [step.phase for step in steps] == ["decomposition", "recovery", "recovery"]
    assert all(step.state.is_finite() for step in steps)
    assert not any(same(one, two) for one, two in pairwise(step.state for step in steps))
    notes = SpectrumNotes.model_validate(steps[0].notes)
    assert notes.reference == "counterfactual" and notes.share == 1.0 and notes.gap_before is not None
    assert notes.gap_before.gap > 3 * notes.gap_before.standard_error and not notes.why
    replayed = (6, 3) if request_ == "samples" else (0, 0) if isinstance(request, ClientRequest) else (6, 4)
    assert (notes.replayed_rounds, notes.replaying_clients) == replayed
    assert [row.block for row in notes.blocks] == [block.name for block in learnt.trained.final.blocks]
    for row in steps[0].notes["blocks"]:
        assert 0 <= row["excised"] <= row["forget_directions"] == len(row["cosines"]) <= 2
        assert 1 <= row["retain_directions"] <= 2
        assert 0 <= row["forget_energy"] <= 1 + 1e-6 and 0 <= row["retain_damage"] <= 1
    assert steps[1].notes == {}
    corrected = steps[2].notes
    assert 0 <= corrected["share"] <= 1.2 and 0 < corrected["measured_weight"] < 1
    assert corrected["gap"]["forget_pairs"] == notes.gap_before.forget_pairs


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes(learnt, samples) -> None:
    one, two = (list(Ease().unlearn(learnt.trained, samples, learnt.world.federation)) for _ in range(2))
    assert same(one[-1].state, two[-1].state)


def test_a_single_pair_can_be_forgotten(learnt, monkeypatch) -> None:
    """One forget pair is too few to measure a gap, so the usual share it is; what it wrote is known all the same."""
    monkeypatch.setattr(calibration, "MANY", 1.0)  # that one of few clients holds it must show here, too
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[:1])
    steps = list(unlearn(learnt, request))
    assert "too few held-out pairs" in steps[0].notes["why"] and steps[0].notes["gap_before"] is None
    holds = 1 / len(learnt.world.federation.clients)
    usual = learnt.usual(False, steps, holds)
    assert steps[-1].notes["share"] == usual.share and steps[-1].notes["gap"] is None
    assert learnt.level(steps[-1].state, request) < learnt.level(learnt.trained.final, request) - 1


# --- the steps ---


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 1.2])
def test_the_first_step_subtracts_a_share_of_what_was_written(learnt, share: float) -> None:
    written = written_by(learnt.trained, CLIENT, learnt.world.federation, {1: 47}, "auto").total
    first = next(unlearn(learnt, CLIENT, share=share))
    assert first.notes["share"] == share
    for name, tensor in learnt.trained.final.tensors.items():
        torch.testing.assert_close(first.state[name], tensor - share * written[name], atol=1e-6, rtol=0)


def recovered(learnt, request: Request, states: list[Params], momentum: float = 0.0) -> None:
    """Every recovery round, from the state before: local training from it in halves, and its mean change added.

    Each begins from the method's own state: a last bit that differed would be another half, and so another training.
    The velocity is the last move. At most 7 float32 operations lie between a state and the next, each with an error of
    half an eps of what it yields, which is no more than all magnitudes together; the reference is in float64.
    """
    trained, federation = learnt.trained, learnt.world.federation
    leaving = request.clients if isinstance(request, ClientRequest) else ()
    for number in range(1, len(states)):
        job = trained.training.job(number, trained.seed, trained.temperature, "ease", request=request, data="retain")
        start = states[number - 1]
        sent = start.map(lambda tensor: tensor.half().float())
        answers = list(federation.run(sent, job, [c for c in federation.clients if c not in leaving]))
        pairs = sum(answer.pairs for answer in answers)
        carried = momentum if 1 < number < len(states) - 1 else 0.0
        for name, tensor in states[number].tensors.items():
            before = states[max(number - 2, 0)][name].double()
            change = sum(answer.pairs / pairs * answer.change[name].double() for answer in answers)
            expected = start[name].double() + carried * (start[name].double() - before) + change
            scale = before.abs() + start[name].abs() + tensor.abs() + change.abs()
            assert bool(((tensor - expected).abs() <= 7 / 2 * EPS * scale).all()), (number, name)


def test_with_nothing_subtracted_it_is_fine_tuning(learnt) -> None:
    steps = list(unlearn(learnt, CLIENT, share=0.0, momentum=0.0, recovery_share=0.5))
    assert same(steps[0].state, learnt.trained.final)
    assert len(steps) == 4
    recovered(learnt, CLIENT, [step.state for step in steps])


def test_momentum_carries_on_until_the_last_round(learnt, samples) -> None:
    steps = list(unlearn(learnt, samples, share=0.7, momentum=0.5, recovery_share=0.5))
    assert len(steps) == 4
    recovered(learnt, samples, [step.state for step in steps], 0.5)


def test_before_the_last_round_the_share_is_corrected_along_what_was_written(learnt) -> None:
    """All of it went at first, so as much as the share falls short of 1 comes back before the last round."""
    written = written_by(learnt.trained, CLIENT, learnt.world.federation, {1: 47}, "auto").total
    steps = list(unlearn(learnt, CLIENT, momentum=0.0, recovery_share=0.34))
    share = steps[-1].notes["share"]
    assert share != 1.0 and "share" not in steps[1].notes
    recovered(learnt, CLIENT, [step.state for step in steps[:2]])
    corrected = steps[1].state + (1 - share) * written
    job = learnt.trained.training.job(
        2, learnt.trained.seed, learnt.trained.temperature, "ease", request=CLIENT, data="retain"
    )
    answers = learnt.world.federation.run(corrected.map(lambda tensor: tensor.half().float()), job, [0, 2, 3])
    last = average(corrected, answers, learnt.trained.training, 2).state
    for name, tensor in steps[2].state.tensors.items():  # the move is taken from the mean and added again: 2 operations
        assert bool(((tensor - last[name]).abs() <= EPS * (corrected[name].abs() + last[name].abs())).all()), name


@pytest.mark.parametrize("settings", [{"share": 1.0}, {"reference": "initial"}, {"reference": "trained"}], ids=str)
def test_what_is_fixed_is_not_corrected(learnt, settings) -> None:
    assert all("share" not in step.notes for step in list(unlearn(learnt, CLIENT, **settings))[1:])


def test_without_held_out_pairs_the_usual_share_goes(learnt) -> None:
    def bare(client: ClientData) -> ClientData:
        none = client.shard.validation[:0]
        shard = replace(client.shard, validation=none, validation_classes=client.shard.validation_classes[:0])
        return replace(client, shard=shard, validation=client.validation.take(np.arange(0)))

    federation = Loop(learnt.world.server.model, {c: bare(d) for c, d in learnt.world.federation.data.items()})
    steps = list(Ease().unlearn(learnt.trained, CLIENT, federation))
    assert steps[0].notes["gap_before"] is None and "too few held-out pairs" in steps[0].notes["why"]
    usual = learnt.usual(True, steps)
    assert steps[-1].notes["share"] == usual.share and steps[-1].notes["measured_weight"] == 0


class Longer(Ease):
    """With two rounds of recovery where this small run would have one."""

    usual: int = 2

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + self.usual


@pytest.fixture
def recovery(learnt, monkeypatch):
    """The rounds of recovery with so many usual ones, after a training that settled at some loss."""

    def rounds(settled: float | None, usual: int) -> list[Step]:
        monkeypatch.setattr(method, "_settled_loss", lambda trained: settled)
        _, *steps = Longer(usual=usual).unlearn(learnt.trained, FIRST, learnt.world.federation)
        *before, last = steps
        assert not any("share" in step.notes or step.bases is not None for step in before)
        assert "share" in last.notes and last.bases is not None  # corrected and locked once, at the end
        return steps

    return rounds


def test_recovery_goes_on_while_the_loss_is_above_that_of_training(learnt, recovery) -> None:
    longest = [step.loss for step in recovery(0.0, usual=2)]
    assert len(longest) == 4 and longest[0] > longest[1] > longest[2]
    assert len(recovery(None, usual=2)) == len(recovery(longest[0], usual=2)) == 2
    assert len(recovery((longest[0] + longest[1]) / 2, usual=2)) == 3
    assert Longer(recovery_share=0.4).most_rounds(learnt.trained.training, FIRST) == 3  # who names it gets just that


def test_recovery_ends_with_the_round_after_one_whose_loss_is_that_of_training(learnt, recovery, monkeypatch) -> None:
    """And the share to remove is the one that is usual after so many."""
    lengths, rounds = [], learnt.trained.training.rounds

    def usual_share(leaving: bool, optimiser: Optimiser, moved: float, recovery: float, concerned: float) -> Usual:
        lengths.append(round(recovery * rounds))
        return calibration.usual_share(leaving, optimiser, moved, recovery, concerned)

    monkeypatch.setattr(method, "usual_share", usual_share)
    whole = recovery(None, usual=4)
    assert len(whole) == 4 and whole[0].loss > whole[1].loss
    assert len(recovery(whole[0].loss, usual=4)) == 2  # the first has no loss to go by
    assert len(recovery((whole[0].loss + whole[1].loss) / 2, usual=4)) == 3
    assert len(recovery(0.0, usual=2)) == 4
    assert lengths == [4, 2, 3, 2]  # rounds beyond the usual ones only make up for how much was taken
    wary = learnt.trained.training.model_copy(update={"aggregation": "median"})
    assert Longer(usual=4).fewest_rounds(wary, FIRST) == 5  # where clients may lie, their losses end nothing
    named = Longer(recovery_share=0.4, usual=4)  # who names it gets just that
    assert named.fewest_rounds(learnt.trained.training, FIRST) == named.rounds(learnt.trained.training, FIRST) == 5


def test_training_settled_at_the_loss_of_its_last_two_rounds(learnt) -> None:
    history, rounds = learnt.trained.history, learnt.trained.training.rounds
    told = [history.record(number)["loss"] for number in (rounds - 1, rounds)]
    assert method._settled_loss(learnt.trained) == pytest.approx(sum(told) / 2)


# --- references and directions ---


def test_the_trained_reference_erases_nothing(learnt) -> None:
    """The literal reading: w_n is its own reference, so the first projection is the identity."""
    first = next(unlearn(learnt, CLIENT, delta=1.0, reference="trained"))
    assert same(first.state, learnt.trained.final)


@pytest.mark.parametrize("delta", [0.9, 1.0])
def test_with_the_initial_reference_nothing_is_left_along_the_chosen_directions(learnt, delta: float) -> None:
    steps = list(unlearn(learnt, CLIENT, delta=delta, reference="initial"))
    bases = steps[-1].bases
    assert bases is not None
    before = left(learnt.trained.final, learnt.trained.initial, bases)
    after = left(steps[0].state, learnt.trained.initial, bases)
    assert any(basis.count for basis in bases.values())
    assert all(after[name] <= 1e-4 * max(1.0, before[name]) for name in before)
    if delta == 1.0:
        assert all(before[name] > 100 * after[name] for name in before)


def test_decomposed_all_directions_give_all_that_was_written(learnt) -> None:
    """Both groups lie in the subspace that holds all the energy, so with whole weights the sum is the same.

    Of each group what `NULL` drops may be missing, a share of the largest singular value, which is no more than both
    norms together; and the state is rounded to float32.
    """
    whole = next(unlearn(learnt, CLIENT)).state
    parts = next(unlearn(learnt, CLIENT, decompose=True, delta=1.0, energy=1.0)).state
    written = written_by(learnt.trained, CLIENT, learnt.world.federation, {1: 47}, "auto")
    for block in whole.blocks:
        norms = sum(float(group.vector(block).norm()) for group in (written.early, written.late))
        off = (parts.vector(block) - whole.vector(block)).abs()
        assert bool((off <= 2 * NULL * norms + 2 * EPS * whole.vector(block).abs()).all()), block.name


def test_by_entanglement_less_is_removed(learnt) -> None:
    final = learnt.trained.final
    soft, hard, whole = (
        (final - next(unlearn(learnt, CLIENT, decompose=True, energy=1.0, **settings)).state)
        for settings in ({"delta": "soft"}, {"delta": 0.5}, {"delta": 0.5, "entanglement": False})
    )
    for block in final.blocks:
        removed = [float(each.vector(block).norm()) for each in (soft, hard, whole)]
        assert max(removed[:2]) <= removed[2] * (1 + 1e-5), block.name
    assert 0 < soft.norm() < whole.norm()


def test_a_larger_delta_removes_more(learnt) -> None:
    removed = [
        (learnt.trained.final - next(unlearn(learnt, CLIENT, decompose=True, delta=delta)).state).norm()
        for delta in (0.0, 0.6, 1.0)
    ]
    assert removed == sorted(removed) and removed[-1] > 0


# --- switches ---


@pytest.mark.parametrize("settings", [{}, {"decompose": True, "delta": 1.0}], ids=str)
@pytest.mark.parametrize("side", ["image", "text"])
def test_one_side_alone_leaves_the_other_as_it_was(learnt, side: str, settings) -> None:
    steps = list(unlearn(learnt, CLIENT, modalities=side, **settings))
    for block in learnt.trained.final.blocks:
        untouched = torch.equal(steps[0].state.vector(block), learnt.trained.final.vector(block))
        assert untouched == (block.modality != side), block.name
    bases = steps[-1].bases
    assert bases and all(name.startswith(side) for name in bases)


def test_adapters_and_projectors_of_both_sides_take_part(adapted) -> None:
    first = next(unlearn(adapted, CLIENT))
    kinds = {(block.modality, block.kind) for block in adapted.trained.final.blocks}
    assert kinds == {(side, kind) for side in ("image", "text") for kind in ("lora", "projector")}
    for block in adapted.trained.final.blocks:
        assert not torch.equal(first.state.vector(block), adapted.trained.final.vector(block)), block.name
    assert first.notes["residuals"] == {}


@pytest.mark.parametrize("lock", ["off", "after", "subspace", "importance"])
def test_directions_to_lock_come_with_the_last_step(learnt, lock: str) -> None:
    steps = list(unlearn(learnt, CLIENT, lock=lock, recovery_share=0.34))
    assert all(step.bases is None for step in steps[:-1])
    if lock == "off":
        assert steps[-1].bases is None
    else:
        assert steps[-1].bases is not None
        assert set(steps[-1].bases) == {block.name for block in learnt.trained.final.blocks}
        assert all(basis.count for basis in steps[-1].bases.values())


def test_locked_after_is_locked_in_later_training_alone(learnt) -> None:
    """Recovery goes on as without a lock."""
    free, after = (list(unlearn(learnt, CLIENT, lock=lock, recovery_share=0.34)) for lock in ("off", "after"))
    assert all(same(one.state, two.state) for one, two in zip(free, after, strict=True))


LOCKS = {
    "off": {"lock": "after"},
    "importance": {"lock": "importance", "lock_strength": 0.2},
    "client": {"lock": "subspace", "lock_side": "client", "lock_strength": 0.2},
    "server": {"lock": "subspace"},
}


@pytest.mark.parametrize("request_", [CLIENT, pytest.param("samples", marks=pytest.mark.slow)], ids=str)
def test_every_lock_runs_and_holds_the_directions_down(learnt, samples, request_) -> None:
    """Drift from the first step along the directions, in two rounds of recovery."""
    request, drift = samples if request_ == "samples" else request_, {}
    for name, settings in LOCKS.items():
        steps = list(unlearn(learnt, request, share=1.0, delta=1.0, momentum=0.0, recovery_share=0.34, **settings))
        assert steps[-1].state.is_finite() and steps[-1].bases is not None
        drift[name] = sum(left(steps[-1].state, steps[0].state, steps[-1].bases).values())
    assert drift["server"] < 1e-3 * drift["off"]
    assert drift["client"] < 0.9 * drift["off"] and drift["importance"] < drift["off"]


def test_a_weaker_server_lock_removes_a_share_of_the_drift(learnt) -> None:
    """One round from the same state: half the strength leaves half of what came back."""
    drift = {}
    for name, settings in {
        "free": {},
        "half": {"lock": "subspace", "lock_strength": 0.5},
        "whole": {"lock": "subspace"},
    }.items():
        steps = list(unlearn(learnt, CLIENT, share=1.0, delta=1.0, **settings))
        assert len(steps) == 2 and steps[-1].bases is not None
        drift[name] = sum(left(steps[-1].state, steps[0].state, steps[-1].bases).values())
    assert drift["half"] == pytest.approx(drift["free"] / 2, rel=1e-3) and drift["whole"] < 1e-3 * drift["free"]


class Nobody:
    """A federation in which no one may be asked anything."""

    clients: Sequence[int] = (0, 1, 2, 3)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        raise AssertionError("no client may be asked")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lock": "subspace", "lock_strength": 1.01},
            r"lock_strength = 1.01: on the server it is a share, choose 0 < strength <= 1",
        ),
        (
            {"lock": "subspace", "lock_side": "client", "lock_strength": 0.5},
            r"lock_strength = 0.5: at learning rate 1 the lock cannot contract; choose less than 0.5",
        ),
        ({"lock": "importance", "lock_strength": 9}, r"the lock cannot contract"),
    ],
)
def test_a_lock_that_cannot_contract_is_refused_at_once(learnt, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(Ease(**settings).unlearn(learnt.trained, CLIENT, Nobody()))


def test_a_lock_just_below_the_bound_is_accepted(learnt) -> None:
    strong = {"lock": "subspace", "lock_side": "client", "lock_strength": 0.49}
    assert next(unlearn(learnt, CLIENT, **strong)).state.is_finite()
    assert next(unlearn(learnt, CLIENT, lock="off", lock_strength=9)).state.is_finite()


@pytest.mark.parametrize(
    "assignment",
    [
        "delta=1.5", "delta=-0.1", "delta=nan", "delta=often", "energy=0", "energy=1.1", "share=-0.1", "share=1.3",
        "share=most", "replay=0", "replay=1.1", "recovery_share=0", "momentum=1", "momentum=-0.1", "lock=maybe",
        "lock_strength=0",
    ],
)  # fmt: skip
def test_settings_outside_their_range_are_refused(assignment: str) -> None:
    with pytest.raises(UserError, match=f"^method ease: {assignment.partition('=')[0]}: input should be"):
        make_method("ease", (assignment,))


@pytest.mark.slow
def test_half_of_the_rounds_stand_for_the_others(learnt, samples) -> None:
    first = next(unlearn(learnt, samples, replay=0.5))
    assert first.notes["replayed_rounds"] == 3
    assert learnt.level(first.state, samples) < learnt.level(learnt.trained.final, samples) - 1


# --- both LoRA factors trained ---


@pytest.mark.parametrize("lock_side", ["server", "client"])
def test_both_factors_can_be_trained(full, lock_side: str) -> None:
    world, run = full
    trained = trained_of(run)
    method = Ease(delta=1.0, decompose=True, lock="subspace", lock_side=lock_side)
    steps = list(method.unlearn(trained, ClientRequest(clients=(1,)), world.federation))
    adapters = {block.name for block in trained.final.blocks if block.factored}
    assert adapters and steps[0].notes["residuals"].keys() == adapters
    assert all(0 <= residual < 1 for residual in steps[0].notes["residuals"].values())
    assert all(step.state.is_finite() for step in steps)
    for name, tensor in trained.final.tensors.items():
        assert steps[-1].state[name].shape == tensor.shape and steps[-1].state[name].dtype == tensor.dtype


def test_sample_requests_work_with_both_factors_trained(full) -> None:
    world, run = full
    request = SampleRequest(ids=tuple(pair_id for shard in world.shards for pair_id in shard.train_ids[:4]))
    steps = list(Ease().unlearn(trained_of(run), request, world.federation))
    assert steps[-1].state.is_finite() and steps[0].notes["replaying_clients"] == 3
    assert not same(steps[0].state, trained_of(run).final)


# --- the references ---


def without(client: ClientData, ids: set[str]) -> ClientData:
    """A client that never had these pairs."""
    kept = np.array([index for index, pair_id in enumerate(client.shard.train_ids) if pair_id not in ids])
    shard = Shard(
        client.shard.client,
        client.shard.train[kept],
        client.shard.validation,
        tuple(client.shard.train_ids[index] for index in kept),
        client.shard.train_classes[kept],
        client.shard.validation_classes,
    )
    return ClientData(shard, client.train.take(kept), client.validation)


@pytest.mark.parametrize("request_", [CLIENT, "samples"], ids=["client", "samples"])
def test_retraining_is_training_where_the_forget_data_never_was(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    world, trained = learnt.world, learnt.trained
    ids = set(request.ids) if isinstance(request, SampleRequest) else set()
    leaving = request.clients if isinstance(request, ClientRequest) else ()
    others = {c: without(data, ids) for c, data in world.federation.data.items() if c not in leaving}
    plain = fedavg(
        trained.initial,
        Loop(world.server.model, others),
        trained.training.model_copy(update={"rounds": 2}),
        trained.seed,
        trained.temperature,
        stream="retrain-0",
    )
    steps = list(learnt.play(request, Retrain(share=1 / 3)))
    assert len(steps) == 2
    for step, finished in zip(steps, plain, strict=True):
        assert same(step.state, finished.state)


def test_another_order_gives_another_retrained_model(learnt) -> None:
    one, two = (next(iter(learnt.play(CLIENT, Retrain(order=order)))).state for order in (0, 1))
    assert not same(one, two)
    assert Retrain().rounds(learnt.trained.training, CLIENT) == learnt.trained.training.rounds == 6


def test_fine_tuning_starts_at_the_trained_model(learnt) -> None:
    world, trained = learnt.world, learnt.trained
    method = Finetune(share=0.4)
    steps = list(method.unlearn(trained, CLIENT, world.federation))
    recipe = trained.training.model_copy(update={"rounds": 2})
    others = Loop(world.server.model, {c: data for c, data in world.federation.data.items() if c != 1})
    plain = fedavg(trained.final, others, recipe, trained.seed, trained.temperature, stream="finetune")
    assert len(steps) == 2 == method.rounds(trained.training, CLIENT)
    assert all(same(step.state, finished.state) for step, finished in zip(steps, plain, strict=True))
