"""EASE on a small real run: forget pairs end where retraining leaves them, and every setting does what it says."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from ease.data.partition import Shard
from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.sequential import Sequential
from ease.methods import make_method
from ease.methods.base import Step
from ease.methods.ease import method
from ease.methods.ease.contribution import contribution_of
from ease.methods.ease.method import Ease, final_loss, share_prior
from ease.methods.finetune import Finetune
from ease.methods.retrain import Retrain
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import trained_of
from ease.runs.records import ContributionNotes
from ease.runs.run import Run
from ease.runs.world import World
from ease.testing import Spy

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


def same(one: Params, two: Params) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one.tensors)


# --- what it reaches ---


def test_training_pairs_score_higher_than_unseen_ones(learnt) -> None:
    """Without this the other tests would show nothing."""
    score, start = (learnt.level(state, CLIENT) for state in (learnt.trained.final, learnt.trained.initial))
    assert score > start + 3


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
    """The others lose less than one round of training: retraining without its last round scores them lower."""
    request = {"client": CLIENT, "class": CLASS, "samples": samples}[scope]
    steps = list(unlearn(learnt, request, recovery_share=0.5))
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
def test_every_kind_of_request_runs_and_notes_what_it_did(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    ease = Ease(recovery_share=0.34)
    steps = list(learnt.play(request, ease))
    assert len(steps) == 3 == ease.rounds(learnt.trained.training, request)
    assert [step.phase for step in steps] == ["subtraction", "recovery", "recovery"]
    assert all(step.state.is_finite() for step in steps)
    assert not any(same(one, two) for one, two in pairwise(step.state for step in steps))
    notes = ContributionNotes.model_validate(steps[0].notes)
    assert notes.share == share_prior(request, "sgd", final_loss(learnt.trained))
    replayed = (6, 3) if request_ == "samples" else (0, 0) if isinstance(request, ClientRequest) else (6, 4)
    assert (notes.replayed_rounds, notes.replaying_clients) == replayed
    assert steps[1].notes == {} == steps[2].notes
    assert [step.base is None for step in steps] == [True, True, False]


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes(learnt, samples) -> None:
    one, two = (list(Ease().unlearn(learnt.trained, samples, learnt.world.federation)) for _ in range(2))
    assert same(one[-1].state, two[-1].state)


def test_a_single_pair_can_be_forgotten(learnt) -> None:
    request = SampleRequest(ids=learnt.world.shards[0].train_ids[:1])
    steps = list(unlearn(learnt, request))
    assert steps[0].notes["replaying_clients"] == 1
    assert learnt.level(steps[-1].state, request) < learnt.level(learnt.trained.final, request) - 1


# --- subtraction ---


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 1.2])
def test_the_first_step_subtracts_a_share_of_the_contribution(learnt, share: float) -> None:
    contribution = contribution_of(learnt.trained, CLIENT, learnt.world.federation).total
    first = next(unlearn(learnt, CLIENT, share=share))
    assert first.notes["share"] == share
    for name, tensor in learnt.trained.final.tensors.items():
        torch.testing.assert_close(first.state[name], tensor - share * contribution[name], atol=1e-6, rtol=0)


KINDS = pytest.mark.parametrize(
    "request_", [CLIENT, CLASS, SampleRequest(ids=("a",))], ids=["client", "class", "sample"]
)


@KINDS
def test_the_share_grows_with_the_final_loss_up_to_a_bound(request_) -> None:
    """A model that has converged made up for more of what is missing."""
    shares = [share_prior(request_, "sgd", loss) for loss in (0.0, 0.3, 1.0, 100.0)]
    assert shares == sorted(shares) and 0.5 < shares[0] < shares[1] < 1 < shares[-1] < 1.2
    assert share_prior(request_, "adam", 0.3) > shares[1]


def test_by_default_the_share_of_the_prior_is_subtracted(learnt, samples) -> None:
    loss = final_loss(learnt.trained)
    for request in (CLIENT, samples):
        prior = share_prior(request, "sgd", loss)
        auto, named = (next(unlearn(learnt, request, share=share)) for share in ("auto", prior))
        assert auto.notes == named.notes and same(auto.state, named.state)


def test_a_request_leaves_the_state_before_recovery_and_the_reports(learnt, samples) -> None:
    steps = list(unlearn(learnt, samples, share=0.7))
    base = steps[-1].base
    assert base is not None and same(base.state, steps[0].state)
    assert base.reports.keys() == {0, 1, 2}  # the holders


# --- recovery ---


def recovered(learnt, request: Request, states: list[Params]) -> None:
    """Every recovery round, from the state before: local training from it in half precision, and its mean change added.

    Each begins from the method's own state: a last bit that differed would round to another half, and so give another
    training. At most 4 float32 operations lie between a state and the next, each with an error of half an eps of what
    it yields, which is no more than all magnitudes together; the reference is in float64.
    """
    trained, federation = learnt.trained, learnt.world.federation
    leaving = request.clients if isinstance(request, ClientRequest) else ()
    for number in range(1, len(states)):
        job = trained.training.job(number, trained.seed, trained.temperature, "ease", request=request, data="retain")
        start = states[number - 1]
        sent = start.map(lambda tensor: tensor.half().float())
        answers = list(federation.run(sent, job, [c for c in federation.clients if c not in leaving]))
        pairs = sum(answer.pairs for answer in answers)
        for name, tensor in states[number].tensors.items():
            change = sum(answer.pairs / pairs * answer.change[name].double() for answer in answers)
            expected = start[name].double() + change
            scale = start[name].abs() + tensor.abs() + change.abs()
            assert bool(((tensor - expected).abs() <= 2 * EPS * scale).all()), (number, name)


@pytest.mark.parametrize("request_", [CLIENT, "samples"], ids=["client", "samples"])
def test_recovery_is_plain_training_on_what_stays(learnt, samples, request_) -> None:
    request = samples if request_ == "samples" else request_
    steps = list(unlearn(learnt, request, share=0.7, recovery_share=0.5))
    assert len(steps) == 4
    recovered(learnt, request, [step.state for step in steps])


def test_with_nothing_subtracted_it_is_fine_tuning(learnt) -> None:
    steps = list(unlearn(learnt, CLIENT, share=0.0, recovery_share=0.34))
    assert same(steps[0].state, learnt.trained.final)
    recovered(learnt, CLIENT, [step.state for step in steps])


class Longer(Ease):
    """With two rounds of recovery where this small run would have one."""

    usual: int = 2

    def rounds(self, training: TrainingConfig, request: Request) -> int:
        return 1 + self.usual


@pytest.fixture
def recovery(learnt, monkeypatch):
    """The rounds of recovery with so many usual ones, after a training that ended at some loss."""

    def rounds(goal: float | None, usual: int = 2, **settings: object) -> list[Step]:
        monkeypatch.setattr(method, "final_loss", lambda trained: goal)
        _, *steps = Longer(usual=usual, **settings).unlearn(learnt.trained, FIRST, learnt.world.federation)
        *before, last = steps
        assert all(step.bases is None and step.base is None for step in before)
        assert last.bases is not None and last.base is not None  # locked once, at the end
        return steps

    return rounds


def test_recovery_continues_while_the_loss_is_above_that_of_training(learnt, recovery) -> None:
    longest = [step.loss for step in recovery(0.0)]
    assert len(longest) == 3 and longest[0] > longest[1] > longest[2]
    assert len(recovery(None)) == len(recovery(longest[0])) == 2
    assert len(recovery((longest[1] + longest[2]) / 2)) == 3
    assert len(recovery(0.0, recovery_share=0.4)) == 2  # a share that is named is kept to


def test_robust_aggregation_never_extends_recovery(learnt) -> None:
    training = learnt.trained.training
    robust = training.model_copy(update={"aggregation": "median"})
    assert Longer().most_rounds(training, FIRST) == 4 and Longer().most_rounds(robust, FIRST) == 3


def test_the_loss_to_reach_is_the_mean_of_the_last_two_rounds(learnt) -> None:
    history, rounds = learnt.trained.history, learnt.trained.training.rounds
    recorded = [history.record(number).loss for number in (rounds - 1, rounds)]
    assert final_loss(learnt.trained) == pytest.approx(sum(recorded) / 2)


@pytest.mark.parametrize(
    ("share", "client", "other"), [("auto", 1 + 3, 1 + 4), (0.1, 1 + 2, 1 + 2), (0.001, 1 + 1, 1 + 1)]
)
def test_recovery_lasts_a_share_of_the_training(learnt, share, client: int, other: int) -> None:
    training = learnt.trained.training.model_copy(update={"rounds": 20})
    assert Ease(recovery_share=share).rounds(training, CLIENT) == client
    assert Ease(recovery_share=share).rounds(training, CLASS) == other


# --- estimates ---


def test_estimated_work_counts_recovery_and_rounds_that_are_trained_again(learnt, samples) -> None:
    training = learnt.trained.training.model_copy(update={"rounds": 20})
    assert Ease().estimated_work(training, CLIENT, 0.25) == 3
    assert Ease(replay=0.5).estimated_work(training, samples, 0.25) == 4 + 0.25 * 0.5 * 20
    assert Ease().estimated_work(training, samples, 1.0, replay_cost=1.2) == 4 + 1.2 * 20
    thinned = training.model_copy(update={"history_every": 4})
    assert Ease().estimated_work(thinned, CLIENT, 0.25) == 3 + 0.25 * 20 * 3 / 4
    assert Ease(contribution_source="remaining").estimated_work(thinned, CLIENT, 0.25) == 3


def test_large_requests_are_advised_to_retrain() -> None:
    assert Ease().advice(0.25, 0.7) == "" == Retrain().advice(0.9, 1.0)
    assert "40% of all pairs: --method retrain" in Ease().advice(0.4, 0.7)
    assert "about 140% of retraining's work: --method retrain" in Ease().advice(0.1, 1.4)


def test_client_requests_read_the_leaving_clients_updates_only(learnt) -> None:
    training = learnt.trained.training
    assert Ease().reads_updates_of(CLIENT, training, 4) == {1}
    assert Ease().reads_updates_of(ClientRequest(clients=(0, 1)), training, 4) is None  # the others are as few
    assert Ease().reads_updates_of(CLASS, training, 4) is None
    for change in ({"aggregation": "median"}, {"participation": 0.5}):
        assert Ease().reads_updates_of(CLIENT, training.model_copy(update=change), 4) is None


# --- branches and the lock ---


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_branch_leaves_the_other_as_it_was(learnt, side: str) -> None:
    steps = list(unlearn(learnt, CLIENT, modalities=side))
    for block in learnt.trained.final.blocks:
        untouched = torch.equal(steps[0].state.vector(block), learnt.trained.final.vector(block))
        assert untouched == (block.modality != side), block.name
    bases = steps[-1].bases
    assert bases and all(name.startswith(side) for name in bases)


def test_adapters_and_projectors_of_both_branches_take_part(adapted) -> None:
    first = next(unlearn(adapted, CLIENT))
    kinds = {(block.modality, block.kind) for block in adapted.trained.final.blocks}
    assert kinds == {(side, kind) for side in ("image", "text") for kind in ("lora", "projector")}
    for block in adapted.trained.final.blocks:
        assert not torch.equal(first.state.vector(block), adapted.trained.final.vector(block)), block.name


@pytest.mark.parametrize("lock", [True, False])
def test_directions_to_lock_come_with_the_last_step(learnt, lock: bool) -> None:
    """One for each block: that of the forget data's own updates."""
    steps = list(unlearn(learnt, CLIENT, lock=lock, recovery_share=0.34))
    assert all(step.bases is None for step in steps[:-1])
    if not lock:
        assert steps[-1].bases is None
        return
    bases, own = steps[-1].bases, contribution_of(learnt.trained, CLIENT, learnt.world.federation).own_updates
    assert bases is not None and bases.keys() == {block.name for block in learnt.trained.final.blocks}
    for block in own.blocks:
        vector = own.vector(block).double()
        torch.testing.assert_close(
            bases[block.name].directions.double(), (vector / vector.norm())[:, None], atol=1e-4, rtol=0
        )


def test_the_lock_changes_no_state_and_sends_no_directions(learnt) -> None:
    """Directions are made of the leaving client's updates; later training is held at the server."""
    answers = []
    for lock in (True, False):
        spy = Spy(learnt.world.federation)
        answers.append(list(Ease(lock=lock, recovery_share=0.34).unlearn(learnt.trained, CLIENT, spy)))
        assert spy.asked and all(job.lock is None for _, job in spy.asked)
    assert all(same(one.state, two.state) for one, two in zip(*answers, strict=True))


@pytest.mark.parametrize(
    "assignment",
    [
        "share=-0.1", "share=1.3", "share=most", "replay=0", "replay=1.1", "replay=auto", "recovery_share=0",
        "recovery_share=long", "lock=maybe", "contribution_source=nobody", "modalities=audio", "replay_precision=half",
    ],
)  # fmt: skip
def test_settings_outside_their_range_are_refused(assignment: str) -> None:
    with pytest.raises(UserError, match=f"^method ease: {assignment.partition('=')[0]}: input should be"):
        make_method("ease", (assignment,))


@pytest.mark.parametrize("gone", ["delta", "momentum", "decompose", "reference", "lock_strength"])
def test_settings_of_the_papers_algorithm_are_not_those_of_ease(gone: str) -> None:
    with pytest.raises(UserError, match=f"method ease: {gone}"):
        make_method("ease", (f"{gone}=1",))


def test_half_of_the_rounds_represent_the_others(learnt, samples) -> None:
    first = next(unlearn(learnt, samples, replay=0.5))
    assert first.notes["replayed_rounds"] == 3
    assert learnt.level(first.state, samples) < learnt.level(learnt.trained.final, samples) - 1


# --- both LoRA factors trained ---


def test_both_factors_can_be_trained(full) -> None:
    """The direction of an adapter is that of the change of its product."""
    world, run = full
    trained = trained_of(run)
    steps = list(Ease().unlearn(trained, CLIENT, world.federation))
    own, start = contribution_of(trained, CLIENT, world.federation).own_updates, trained.start
    adapters = [block for block in start.blocks if block.factored]
    assert adapters and all(step.state.is_finite() for step in steps) and steps[-1].bases is not None
    for block in adapters:
        a, b = block.tensors
        before = (start[b] - own[b]).double() @ (start[a] - own[a]).double()
        change = start[b].double() @ start[a].double() - before
        basis = steps[-1].bases[block.name]
        (column,), ((coefficient,),) = basis.directions, basis.coefficients.tolist()
        direction = coefficient * column.left.double() @ column.right.double()
        torch.testing.assert_close(direction, change / change.norm(), atol=1e-5, rtol=0)
    for name, tensor in start.tensors.items():
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
        Sequential(world.server.model, others),
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
    others = Sequential(world.server.model, {c: data for c, data in world.federation.data.items() if c != 1})
    plain = fedavg(trained.final, others, recipe, trained.seed, trained.temperature, stream="finetune")
    assert len(steps) == 2 == method.rounds(trained.training, CLIENT)
    assert all(same(step.state, finished.state) for step, finished in zip(steps, plain, strict=True))
