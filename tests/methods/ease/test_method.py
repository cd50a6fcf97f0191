"""EASE on a small real run: `initial` erases and `trained` does not, every closure has its switch, all kinds run."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from ease.data.partition import Shard
from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.fedavg import fedavg
from ease.federation.loop import Loop
from ease.federation.protocol import LocalJob, Update
from ease.methods import make_method
from ease.methods.base import Step
from ease.methods.ease.calibration import measure_levels
from ease.methods.ease.method import Ease
from ease.methods.finetune import Finetune
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import trained_of
from ease.runs.run import Run
from ease.runs.world import World
from ease.subspace import Basis, displacement

CLIENT = ClientRequest(clients=(1,))


@pytest.fixture(scope="module")
def samples(learnt) -> SampleRequest:
    """Six pairs each of three of the four clients."""
    return SampleRequest(ids=tuple(pair_id for shard in learnt.world.shards[:3] for pair_id in shard.train_ids[:6]))


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
    return Ease(**settings).unlearn(learnt.trained, request, learnt.world.federation)


def left(state: Params, reference: Params, bases: dict[str, Basis]) -> dict[str, float]:
    """||Pi_u (w - w_ref)|| of each block."""
    return {
        block.name: float(bases[block.name].components(displacement(block, state, reference)).norm())
        for block in state.blocks
    }


def same(one: Params, two: Params) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one.tensors)


# --- the reference point ---


def test_training_pairs_are_held_more_strongly_than_unseen_ones(learnt) -> None:
    """Without this the other tests would show nothing."""
    level, start = (learnt.level(state, CLIENT) for state in (learnt.trained.final, learnt.trained.initial))
    assert level > start + 3


def test_the_initial_reference_erases(learnt) -> None:
    first = next(unlearn(learnt, CLIENT, delta=1.0))
    assert learnt.level(first.state, CLIENT) < learnt.level(learnt.trained.final, CLIENT) - 1.5


def test_after_excision_nothing_is_left_along_the_unique_directions(learnt) -> None:
    for delta in (0.3, 1.0):
        first = next(unlearn(learnt, CLIENT, delta=delta))
        assert first.bases is not None
        before = left(learnt.trained.final, learnt.trained.initial, first.bases)
        after = left(first.state, learnt.trained.initial, first.bases)
        assert all(after[name] <= 1e-5 * max(1.0, before[name]) for name in before)
        assert all(before[name] > 100 * after[name] for name in before if first.bases[name].count)
        if delta == 1.0:
            assert all(basis.count > 0 for basis in first.bases.values())


def test_the_trained_reference_erases_nothing(learnt) -> None:
    """The literal reading: w_n is its own reference, so the first projection is the identity."""
    first = next(unlearn(learnt, CLIENT, delta=1.0, reference="trained"))
    for name, tensor in learnt.trained.final.tensors.items():
        torch.testing.assert_close(first.state[name], tensor, rtol=0, atol=1e-6)
    last = list(unlearn(learnt, CLIENT, delta=1.0, reference="trained"))[-1]
    erased = list(unlearn(learnt, CLIENT, delta=1.0))[-1]
    assert learnt.level(last.state, CLIENT) > learnt.level(erased.state, CLIENT) + 1


# --- requests ---


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(CLIENT, id="client"),
        pytest.param(ClientRequest(clients=(0, 3)), id="clients", marks=pytest.mark.slow),
        pytest.param(ClassRequest(classes=(2,)), id="class", marks=pytest.mark.slow),
        pytest.param(ClassRequest(classes=(0, 2)), id="classes"),
        pytest.param("samples", id="samples"),
    ],
)
def test_every_kind_of_request_lowers_the_forget_pairs(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    method = Ease()
    steps = list(method.unlearn(learnt.trained, request, learnt.world.federation))
    assert len(steps) == method.rounds(learnt.trained.training, request)
    phases = [step.phase for step in steps]
    assert phases[0] == "decomposition" and phases[-1] == "stabilisation" and "excision" in phases
    assert phases == sorted(phases, key=["decomposition", "excision", "stabilisation"].index)
    assert all(step.state.is_finite() for step in steps)
    assert learnt.level(steps[-1].state, request) < learnt.level(learnt.trained.final, request) - 0.7
    rows = steps[0].notes["blocks"]
    assert [row["block"] for row in rows] == [block.name for block in learnt.trained.final.blocks]
    for row in rows:
        assert 0 <= row["excised"] <= row["forget_directions"] == len(row["cosines"]) and row["retain_directions"] > 0
        assert 0 <= row["forget_energy"] <= 1 + 1e-6 and 0 <= row["retain_damage"] <= 1


def test_adapters_and_projectors_of_both_sides_take_part(learnt) -> None:
    first = next(unlearn(learnt, CLIENT, delta=1.0))
    kinds = {(block.modality, block.kind) for block in learnt.trained.final.blocks}
    assert kinds == {(side, kind) for side in ("image", "text") for kind in ("lora", "projector")}
    for block in learnt.trained.final.blocks:
        assert not torch.equal(first.state.vector(block), learnt.trained.final.vector(block)), block.name
    assert first.notes["residuals"] == {}  # with a shared A, projection stays inside the rank


def test_a_state_in_a_later_round_is_not_the_first_one(learnt) -> None:
    states = [step.state for step in unlearn(learnt, CLIENT, excision_rounds=2, stabilisation_rounds=1)]
    assert len(states) == 4
    assert not any(same(one, two) for one, two in pairwise(states))


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes(learnt, samples) -> None:
    one, two = (list(unlearn(learnt, samples))[-1].state for _ in range(2))
    assert same(one, two)


# --- switches ---


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_side_alone_leaves_the_other_as_it_was(learnt, side: str) -> None:
    first = next(unlearn(learnt, CLIENT, delta=1.0, modalities=side))
    for block in learnt.trained.final.blocks:
        untouched = torch.equal(first.state.vector(block), learnt.trained.final.vector(block))
        assert untouched == (block.modality != side), block.name
    assert first.bases is not None and all(name.startswith(side) for name in first.bases)


def test_without_entanglement_more_is_removed(learnt) -> None:
    final = learnt.trained.final
    careful = next(unlearn(learnt, CLIENT, delta=0.3)).state
    soft = next(unlearn(learnt, CLIENT, delta="soft")).state
    whole = next(unlearn(learnt, CLIENT, delta=0.3, entanglement=False)).state
    everything = next(unlearn(learnt, CLIENT, delta=1.0)).state
    assert all(torch.allclose(whole[name], everything[name]) for name in whole.tensors)
    for block in final.blocks:
        removed = [float((final.vector(block) - state.vector(block)).norm()) for state in (careful, soft, whole)]
        assert max(removed[:2]) <= removed[2] * (1 + 1e-5), block.name
    assert (final - careful).norm() < (final - whole).norm()


def test_a_small_delta_removes_what_a_larger_one_removes_and_no_more(learnt) -> None:
    removed = [(learnt.trained.final - next(unlearn(learnt, CLIENT, delta=d)).state).norm() for d in (0.0, 0.4, 1.0)]
    assert removed == sorted(removed)


LOCKS = {
    "off": {"lock": "off"},
    "projection": {"lock": "projection"},
    "importance": {"lock": "importance", "lock_strength": 0.2},
    "client": {"lock_side": "client", "lock_strength": 0.2},
    "server": {},
}


@pytest.mark.parametrize("request_", [CLIENT, pytest.param("samples", marks=pytest.mark.slow)], ids=str)
def test_every_lock_runs_and_holds_the_directions_down(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    drift = {}
    for name, settings in LOCKS.items():
        steps = list(unlearn(learnt, request, delta=1.0, excision_rounds=1, stabilisation_rounds=2, **settings))
        assert steps[-1].state.is_finite()
        assert steps[0].bases is not None
        drift[name] = sum(left(steps[-1].state, learnt.trained.initial, steps[0].bases).values())
    assert drift["server"] < 1e-3 * drift["off"]
    assert drift["client"] < 0.9 * drift["off"] and drift["importance"] < drift["off"]


def test_a_weaker_server_lock_removes_a_share_of_the_drift(learnt) -> None:
    """One round from the same state: half the strength leaves half of what came back."""
    drifts = []
    for strength in (0.5, 1.0):
        steps = list(
            unlearn(learnt, CLIENT, delta=1.0, excision_rounds=1, stabilisation_rounds=0, lock_strength=strength)
        )
        assert steps[0].bases is not None
        drifts.append(sum(left(steps[-1].state, learnt.trained.initial, steps[0].bases).values()))
    free = list(unlearn(learnt, CLIENT, delta=1.0, excision_rounds=1, stabilisation_rounds=0, lock="projection"))
    assert free[0].bases is not None
    whole = sum(left(free[-1].state, learnt.trained.initial, free[0].bases).values())
    assert drifts[0] == pytest.approx(whole / 2, rel=1e-3) and drifts[1] < 1e-3 * whole


class Nobody:
    """A federation in which no one may be asked anything."""

    clients: Sequence[int] = (0, 1, 2, 3)

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        raise AssertionError("no client may be asked")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lock_strength": 1.01}, r"lock_strength = 1.01: on the server it is a share, choose 0 < strength <= 1"),
        ({"lock_side": "client", "lock_strength": 0.34}, r"lock_strength = 0.34: at learning rate 1.5 .*than 0.33"),
        ({"lock_side": "client", "lock_strength": 9}, r"the lock cannot contract"),
        ({"lock": "importance", "lock_strength": 0.5, "excision_rate": 1}, r"at learning rate 1 .*less than 0.5"),
    ],
)
def test_a_lock_that_cannot_contract_is_refused_at_once(learnt, settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(Ease(**settings).unlearn(learnt.trained, CLIENT, Nobody()))


def test_a_lock_just_below_the_bound_is_accepted(learnt) -> None:
    assert next(unlearn(learnt, CLIENT, delta=0.5, lock_side="client", lock_strength=0.33)).state.is_finite()
    assert next(unlearn(learnt, CLIENT, delta=0.5, lock="off", lock_strength=9)).state.is_finite()


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "often"])
def test_delta_outside_its_range_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"^method ease: delta: input should be"):
        make_method("ease", (f"delta={value}",))


@pytest.mark.parametrize("assignment", ["energy=0", "energy=1.1", "displacement=-1", "excision_rounds=0", "lock=maybe"])
def test_other_settings_outside_their_range_are_refused(assignment: str) -> None:
    with pytest.raises(UserError, match=f"^method ease: {assignment.partition('=')[0]}: input should be"):
        make_method("ease", (assignment,))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"displacement": 0}, {"targets": "level"}, {"probe_rounds": (1, 3)}])
def test_the_options_of_sample_requests_run(learnt, samples, settings) -> None:
    steps = list(unlearn(learnt, samples, **settings))
    pushed = learnt.level(steps[-1].state, samples)
    assert steps[-1].state.is_finite() and pushed < learnt.level(learnt.trained.final, samples)


def test_the_push_is_what_reaches_the_level_of_unseen_pairs(learnt, samples) -> None:
    plain = list(unlearn(learnt, samples, displacement=0))[-1].state
    pushed = list(unlearn(learnt, samples))
    assert learnt.level(pushed[-1].state, samples) < learnt.level(plain, samples) - 0.5
    notes = pushed[0].notes
    assert notes["gap_before"]["gap"] > 1 and notes["gap_before"]["forget_pairs"] == 18
    assert "target_mean" in notes


# --- both LoRA factors trained ---


@pytest.mark.parametrize("lock_side", ["server", "client"])
def test_both_factors_can_be_trained(full, lock_side: str) -> None:
    world, run = full
    trained = trained_of(run)
    steps = list(Ease(delta=1.0, lock_side=lock_side).unlearn(trained, ClientRequest(clients=(1,)), world.federation))
    adapters = {block.name for block in trained.final.blocks if block.factored}
    assert adapters and steps[0].notes["residuals"].keys() == adapters
    assert all(0 <= residual < 1 for residual in steps[0].notes["residuals"].values())
    assert all(step.state.is_finite() for step in steps)
    assert steps[0].bases is not None
    before, after = (left(state, trained.initial, steps[0].bases) for state in (trained.final, steps[0].state))
    for block in trained.final.blocks:
        if block.factored:
            assert after[block.name] < 0.9 * before[block.name], block.name
        else:
            assert after[block.name] < 1e-4 * before[block.name], block.name
    for name, tensor in trained.final.tensors.items():
        assert steps[-1].state[name].shape == tensor.shape and steps[-1].state[name].dtype == tensor.dtype


def test_sample_requests_work_with_both_factors_trained(full) -> None:
    world, run = full
    request = SampleRequest(ids=tuple(pair_id for shard in world.shards for pair_id in shard.train_ids[:4]))
    steps = list(Ease().unlearn(trained_of(run), request, world.federation))
    assert steps[-1].state.is_finite() and steps[0].notes["residuals"]


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
    steps = list(Retrain(share=1 / 3).unlearn(trained, request, world.federation))
    assert len(steps) == 2
    for step, finished in zip(steps, plain, strict=True):
        assert same(step.state, finished.state)


def test_another_order_gives_another_retrained_model(learnt) -> None:
    one, two = (
        next(Retrain(order=order).unlearn(learnt.trained, CLIENT, learnt.world.federation)).state for order in (0, 1)
    )
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


def test_a_single_photo_is_displaced_though_nothing_can_be_excised(learnt) -> None:
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[:1])
    first, *later = Ease().unlearn(learnt.trained, request, learnt.world.federation)
    assert first.notes["blocks"] == [] and "displaced alone" in first.notes["why"]
    assert later and later[-1].state.is_finite()
    before = measure_levels(learnt.trained, learnt.trained.final, request, learnt.world.federation, "test")
    after = measure_levels(learnt.trained, later[-1].state, request, learnt.world.federation, "test")
    assert float(after[0]["forget"].mean()) < float(before[0]["forget"].mean())
