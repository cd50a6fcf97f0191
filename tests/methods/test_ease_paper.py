"""The paper's Algorithm 1 against dense matrices, hand-written steps and its own theorems."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.fixtures import SMALL, Learnt, learn

from ease.errors import UserError
from ease.federation.local import train
from ease.federation.lock import LockMessage, pack_directions
from ease.federation.meter import Metered
from ease.federation.objectives import embed_states
from ease.federation.protocol import LocalJob
from ease.methods import make_method
from ease.methods.base import Step
from ease.methods.columns import stored_columns
from ease.methods.ease_paper import EasePaper, unique_bases
from ease.model.losses import info_nce
from ease.params import Block, Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, forget_mask
from ease.runs.records import SpectrumNotes
from ease.seeding import generator
from ease.subspace import Basis, displacement, excise
from ease.testing import Spy, check_method

CLIENT = ClientRequest(clients=(1,))
CLASS = ClassRequest(classes=(2,))
ENERGY, DELTA = 0.95, 0.5


@pytest.fixture(scope="module")
def full(shared_cache, tmp_path_factory) -> Learnt:
    """Both LoRA factors trained at rank 4, at four clients over four rounds."""
    more = (
        "model.lora=full", "model.lora_rank=4", "training.rounds=4", "training.learning_rate=0.3",
        "partition.clients=4", "partition.scheme=uniform",
    )  # fmt: skip
    return learn(shared_cache, tmp_path_factory.mktemp("full"), *SMALL, *more)


@pytest.fixture(params=["projectors", "both factors"])
def world(request) -> Learnt:
    return request.getfixturevalue("learnt" if request.param == "projectors" else "full")


def samples(learnt: Learnt) -> SampleRequest:
    """Pairs of clients 0, 2 and 3, of which client 3 holds one only."""
    shards = learnt.world.shards
    return SampleRequest(ids=(*shards[0].train_ids[:7], *shards[2].train_ids[2:6], *shards[3].train_ids[:1]))


# --- dense matrices ---


def dense(block: Block, state: Params) -> np.ndarray:
    """The matrix that a block is, written out: the product of trained factors, or all values in a row."""
    if block.factored:
        a, b = (state[name].double().numpy() for name in block.tensors)
        return (b @ a).ravel()
    return np.concatenate([state[name].double().numpy().ravel() for name in block.tensors])


def directions_of(basis: Basis) -> np.ndarray:
    """Directions of a block as columns [values, directions]."""
    if isinstance(basis.directions, torch.Tensor):
        return basis.directions.double().numpy()
    columns = [(f.left.double() @ f.right.double()).numpy().ravel() for f in basis.directions]
    return np.stack(columns, axis=1) @ basis.coefficients.numpy()


def principal(columns: Sequence[np.ndarray], energy: float) -> np.ndarray:
    """Left singular vectors of the stacked columns, the fewest that hold this share of the squared values, Eq. (6)."""
    left, values, _ = np.linalg.svd(np.stack(columns, axis=1), full_matrices=False)
    held = np.cumsum(values**2) / np.sum(values**2)
    return left[:, : int((held < energy - 1e-12).sum()) + 1]


def canonical(forget: np.ndarray, retain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Canonical directions of the forget subspace and their cosines, Eq. (7)."""
    rotation, cosines, _ = np.linalg.svd(forget.T @ retain, full_matrices=True)
    padded = np.zeros(forget.shape[1])
    padded[: len(cosines)] = cosines[: len(padded)]
    return forget @ rotation, padded


def assert_unique_bases(
    bases: Mapping[str, Basis],
    notes: SpectrumNotes,
    blocks: Sequence[Block],
    forget: Callable[[Block], list[np.ndarray]],
    retain: Callable[[Block], list[np.ndarray]],
) -> None:
    """Every block's basis spans the unique directions of the dense decomposition, and the notes describe it."""
    described = {each.block: each for each in notes.blocks}
    chosen = 0
    for block in blocks:
        own, other = principal(forget(block), ENERGY), principal(retain(block), ENERGY)
        directions, cosines = canonical(own, other)
        assert np.abs(cosines - DELTA).min() > 1e-3, "the threshold must not cut through rounding"
        unique = directions[:, cosines <= DELTA]
        found = directions_of(bases[block.name]) if block.name in bases else np.zeros((len(unique), 0))
        assert found.shape[1] == unique.shape[1]
        np.testing.assert_allclose(found.T @ found, np.eye(found.shape[1]), atol=1e-5)
        np.testing.assert_allclose(found - unique @ (unique.T @ found), 0, atol=1e-3)
        np.testing.assert_allclose(described[block.name].cosines, cosines, atol=1e-4)
        assert described[block.name].retain_directions == other.shape[1]
        assert described[block.name].excised == unique.shape[1]
        chosen += unique.shape[1]
    assert chosen > 0


def run(learnt: Learnt, request: Request, **settings: object) -> tuple[list[Step], Spy]:
    spy = Spy(learnt.world.federation)
    return list(EasePaper(**settings).unlearn(learnt.trained, request, spy)), spy


@pytest.mark.parametrize("leaving", [(1,), (0, 3)], ids=["one", "two"])
def test_client_requests_decompose_the_stored_updates(world: Learnt, leaving) -> None:
    """One column for each round and leaving client, and one for each round and remaining client."""
    history, blocks = world.trained.history, world.trained.final.blocks
    steps, _ = run(world, ClientRequest(clients=leaving), energy=ENERGY, delta=DELTA)

    def columns(clients: Sequence[int]) -> Callable[[Block], list[np.ndarray]]:
        def of(block: Block) -> list[np.ndarray]:
            found = []
            for number in range(1, world.trained.training.rounds + 1):
                start = history.start(number)
                for client in clients:
                    found.append(dense(block, start + history.update(number, client).change) - dense(block, start))
            return found

        return of

    notes = SpectrumNotes.model_validate(spectrum_of(steps[0]))
    others = [client for client in range(4) if client not in leaving]
    assert steps[-1].bases is not None and notes.delta == DELTA and notes.reference == "trained"
    assert_unique_bases(steps[-1].bases, notes, blocks, columns(leaving), columns(others))


def spectrum_of(step: Step) -> dict[str, object]:
    return {name: value for name, value in step.notes.items() if name in SpectrumNotes.model_fields}


def one_epoch(learnt: Learnt, state: Params, client: int, rows: np.ndarray, stream: str) -> Params:
    """Plain SGD over these pairs, one batch at a time: shuffle, split, draw captions and step."""
    training, data = learnt.trained.training, learnt.world.federation.data[client]
    rng = generator(learnt.trained.seed, stream, 0, client)
    count = max(1, min(round(len(rows) / training.batch_size), len(rows) // 2))
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    for batch in np.array_split(rng.permutation(rows), count):
        captions = rng.integers(data.train.captions, size=len(batch))
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        image, text = embed_states(learnt.world.server.model, leaves, data.train.batch(batch, captions))
        info_nce(image, text, learnt.trained.temperature).backward()
        tensors = {name: (t - training.learning_rate * t.grad).detach() for name, t in leaves.items()}
    return Params(tensors, state.blocks)


@pytest.mark.parametrize("scope", ["class", "sample"])
@pytest.mark.parametrize("probe", [None, 1])
def test_class_and_sample_requests_decompose_one_epoch_of_every_client(world: Learnt, scope: str, probe) -> None:
    """On its forget pairs, where it holds two at least, and on its retained pairs, from the probe state."""
    request = CLASS if scope == "class" else samples(world)
    steps, spy = run(world, request, energy=ENERGY, delta=DELTA, probe_round=probe)
    assert steps[0].phase == "decomposition" and steps[0].state == world.trained.start
    state = world.trained.start if probe is None else world.trained.history.state(probe)
    ends: dict[str, list[Params]] = {"forget": [], "retain": []}
    for client, data in sorted(world.world.federation.data.items()):
        named = forget_mask(request, data.shard)
        for kind, rows in (("forget", np.flatnonzero(named)), ("retain", np.flatnonzero(~named))):
            if len(rows) >= 2:
                ends[kind].append(one_epoch(world, state, client, rows, f"ease_paper-{kind}"))
    assert len(ends["retain"]) == 4 and len(ends["forget"]) == (2 if scope == "sample" else 4)

    def columns(kind: str) -> Callable[[Block], list[np.ndarray]]:
        return lambda block: [dense(block, end) - dense(block, state) for end in ends[kind]]

    notes = SpectrumNotes.model_validate(spectrum_of(steps[0]))
    assert steps[-1].bases is not None
    assert_unique_bases(steps[-1].bases, notes, state.blocks, columns("forget"), columns("retain"))
    probes = [(client, job) for client, job in spy.asked if job.epochs == 1 and job.stream.startswith("ease_paper-")]
    assert [client for client, _ in probes] == [0, 1, 2, 3] * 2


def test_a_request_whose_clients_hold_one_pair_each_has_no_gradient(learnt) -> None:
    request = SampleRequest(ids=tuple(shard.train_ids[0] for shard in learnt.world.shards))
    with pytest.raises(UserError, match=r"no client holds two of the forget pairs.*--method ease"):
        run(learnt, request)


def test_delta_one_takes_the_whole_forget_subspace(world: Learnt) -> None:
    steps, _ = run(world, CLIENT, energy=ENERGY, delta=1.0)
    for block in SpectrumNotes.model_validate(spectrum_of(steps[0])).blocks:
        assert block.excised == block.forget_directions > 0
        assert block.forget_energy >= ENERGY - 1e-6


# --- the rounds ---


def bases_of(learnt: Learnt, energy: float = ENERGY, delta: float = DELTA) -> dict[str, Basis]:
    keys = learnt.trained.history.columns(learnt.trained.training.rounds)
    forget, retain = (
        stored_columns(learnt.trained.history, [key for key in keys if (key[1] == 1) is leaves])
        for leaves in (True, False)
    )
    return unique_bases(learnt.trained.final.blocks, forget, retain, energy, delta)[1]


def along(bases: Mapping[str, Basis], state: Params, reference: Params) -> dict[str, float]:
    """||Pi_u (w - w_ref)|| of each block that has unique directions, from dense matrices."""
    return {
        block.name: float(
            np.linalg.norm(directions_of(bases[block.name]).T @ (dense(block, state) - dense(block, reference)))
        )
        for block in state.blocks
        if block.name in bases and bases[block.name].count
    }


def test_rounds_are_those_of_excision_and_stabilisation(learnt) -> None:
    """R2 + R3 = 20 % of R1; class and sample requests have the probe before them."""
    training = learnt.trained.training.model_copy(update={"rounds": 100})
    assert EasePaper().rounds(training, CLIENT) == 20 == EasePaper().most_rounds(training, CLIENT)
    assert EasePaper().rounds(training, CLASS) == 21
    short = training.model_copy(update={"rounds": 20})
    assert EasePaper(excision_share=0.5, stabilisation_share=0.1).rounds(short, CLIENT) == 12
    steps, _ = run(learnt, CLASS, excision_share=0.34, stabilisation_share=0.17)
    assert [step.phase for step in steps] == ["decomposition", "excision", "excision", "stabilisation"]
    assert [step.bases is None for step in steps] == [True, True, True, False]


def test_the_leaving_client_takes_no_part(learnt) -> None:
    _, spy = run(learnt, CLIENT, excision_share=0.34)
    assert [client for client, _ in spy.asked] == [0, 2, 3] * 3
    assert {(job.objective, job.data) for _, job in spy.asked} == {("align", "retain")}


class Broadcasts(Spy):
    """Notes the state that every round begins with."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.sent: list[Params] = []

    def run(self, params, job, clients):
        self.sent.append(params)
        return super().run(params, job, clients)


def broadcast(learnt: Learnt, **settings: object) -> tuple[list[Params], list[Step]]:
    """The states that a client request sends out, and its steps."""
    spy = Broadcasts(learnt.world.federation)
    steps = list(EasePaper(energy=ENERGY, delta=DELTA, **settings).unlearn(learnt.trained, CLIENT, spy))
    return spy.sent, steps


def test_with_the_trained_model_as_reference_the_first_projection_is_the_identity(world: Learnt) -> None:
    """As printed, w_n is its own reference: w_n - w_n has no component, and nothing is erased."""
    sent, _ = broadcast(world, reference="trained")
    assert sent[0] == world.trained.final


def test_nothing_is_left_along_unique_directions_when_a_round_begins(world: Learnt) -> None:
    """Completeness: Pi_u (w - w_0) = 0 after excision. Truncation of trained factors to their rank leaves the rest.

    The third round is stabilisation, which trains on without a projection.
    """
    sent, steps = broadcast(world, reference="initial", excision_share=2 / world.trained.training.rounds)
    bases, initial = steps[-1].bases, world.trained.initial
    assert bases is not None and len(sent) == 3
    before = along(bases, world.trained.final, initial)
    blocks = {block.name: block for block in initial.blocks}
    for number in (0, 1):
        residuals = steps[number].notes.get("residuals", {})
        for name, left in along(bases, sent[number], initial).items():
            if not blocks[name].factored:
                assert left <= 1e-4 * max(1.0, before[name]) and before[name] > 100 * left
            else:
                corrected = np.linalg.norm(dense(blocks[name], sent[number])) / (1 - residuals[name])
                assert left <= residuals[name] * corrected + 1e-5
    last = along(bases, sent[2], initial)
    assert all(last[name] > 1e-3 for name in last if not blocks[name].factored)


def test_excision_is_complete_and_changes_nothing_else(learnt) -> None:
    """Pi_u (w - w_ref) = 0, and (1 - Pi_u) (w' - w) = 0."""
    bases, final, initial = bases_of(learnt), learnt.trained.final, learnt.trained.initial
    state, residuals = excise(final, initial, bases)
    assert residuals == {}
    for block in final.blocks:
        unique = directions_of(bases[block.name])
        drift, moved = dense(block, state) - dense(block, initial), dense(block, state) - dense(block, final)
        assert unique.shape[1] and np.linalg.norm(unique.T @ drift) < 1e-5 * np.linalg.norm(drift)
        np.testing.assert_allclose(moved, unique @ (unique.T @ moved), atol=1e-6)


@pytest.mark.parametrize("delta", [0.1, 0.5, 0.9])
def test_retained_directions_lose_at_most_delta_squared(world: Learnt, delta: float) -> None:
    """||Pi_u x||² <= delta² ||x||² for every x in S_r, the retained subspace; the worst x comes close to the bound of
    the largest cosine that was chosen."""
    history, bases = world.trained.history, bases_of(world, delta=delta)
    rng, chosen = np.random.default_rng(0), 0
    for block in world.trained.final.blocks:
        retain = []
        for number in range(1, world.trained.training.rounds + 1):
            start = history.start(number)
            retain += [
                dense(block, start + history.update(number, client).change) - dense(block, start)
                for client in (0, 2, 3)
            ]
        span, unique = principal(retain, ENERGY), directions_of(bases[block.name])
        worst = np.linalg.svd(unique.T @ span, compute_uv=False) if unique.shape[1] else np.zeros(1)
        for amounts in (*rng.normal(size=(20, span.shape[1])), np.linalg.svd(unique.T @ span)[2][0]):
            x = span @ amounts
            assert np.linalg.norm(unique.T @ x) ** 2 <= delta**2 * np.linalg.norm(x) ** 2 * (1 + 1e-6)
        assert worst[0] <= delta + 1e-6
        chosen += unique.shape[1]
    assert chosen or delta == 0.1


# --- the lock in local training ---


def locked_job(learnt: Learnt, strength: float, **changes: object) -> tuple[LocalJob, LockMessage]:
    lock = LockMessage(strength, learnt.trained.initial, pack_directions(bases_of(learnt)))
    job = learnt.trained.training.job(1, 0, 0.07, "x", request=CLIENT, data="retain", lock=lock, **changes)
    return job, lock


def test_a_locked_client_minimises_alignment_plus_the_penalty(world: Learnt) -> None:
    """Eq. (12), L_a + alpha ||B_u^T (w - w_ref)||², left to autograd with every matrix written out."""
    alpha, client = 0.2, 2
    job, lock = locked_job(world, alpha, epochs=2)
    model, data, start = world.world.server.model, world.world.federation.data[client], world.trained.final
    found = train(model, start, data, job.own(client, data.shard.train_ids))
    bases = {name: torch.from_numpy(directions_of(basis)) for name, basis in lock.on("cpu").bases.items()}
    for name, exact in bases_of(world).items():  # 8 bits lose little of a direction
        assert exact.count == 0 or np.linalg.norm(bases[name].numpy() - directions_of(exact)) < 0.05 * exact.count
    reference = {block.name: torch.from_numpy(dense(block, world.trained.initial)) for block in start.blocks}
    rates = {
        name: job.optimiser.learning_rate if block.kind == "projector" else
        job.optimiser.lora_learning_rate or job.optimiser.learning_rate
        for block in start.blocks for name in block.tensors
    }  # fmt: skip

    def penalty(leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.double)
        for block in start.blocks:
            if block.factored:
                a, b = (leaves[name].double() for name in block.tensors)
                flat = (b @ a).flatten()
            else:
                flat = torch.cat([leaves[name].double().flatten() for name in block.tensors])
            if block.name in bases:
                total = total + (bases[block.name].T @ (flat - reference[block.name])).square().sum()
        return total

    rng, pairs = generator(0, "x", 1, client), len(data.train)
    tensors = {name: tensor.clone() for name, tensor in start.tensors.items()}
    for _ in range(2):
        for batch in np.array_split(rng.permutation(np.arange(pairs)), job.batch_count(pairs)):
            captions = rng.integers(data.train.captions, size=len(batch))
            leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
            image, text = embed_states(model, leaves, data.train.batch(batch, captions))
            (info_nce(image, text, job.temperature) + alpha * penalty(leaves)).backward()
            tensors = {name: (t - rates[name] * t.grad).detach() for name, t in leaves.items()}
    free = train(model, start, data, replace(job, lock=None).own(client, data.shard.train_ids))
    expected = Params(tensors, start.blocks) - start
    assert (free.change - expected).norm() > 0.05 * expected.norm(), "the lock must matter"
    assert (found.change - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_drift_contracts_with_every_locked_step(learnt, alpha: float) -> None:
    """Durability: d(t+1) = (1 - 2 lr alpha) d(t) - lr g_u(t), for one step of a client on all of its pairs."""
    job, lock = locked_job(learnt, alpha, epochs=1, batch_size=10**6)
    model, data, start = learnt.world.server.model, learnt.world.federation.data[2], learnt.trained.final
    locked = train(model, start, data, job.own(2, data.shard.train_ids)).change
    free_job = learnt.trained.training.job(1, 0, 0.07, "x", request=CLIENT, data="retain", epochs=1, batch_size=10**6)
    free = train(model, start, data, free_job.own(2, data.shard.train_ids)).change  # -lr g
    rate = learnt.trained.training.learning_rate
    for block in start.blocks:
        basis = lock.on("cpu").bases[block.name]
        d = basis.components(displacement(block, start, learnt.trained.initial))
        after = basis.components(displacement(block, start + locked, learnt.trained.initial))
        minus_rate_g = basis.components(displacement(block, start + free, start))
        expected = (1 - 2 * rate * alpha) * d + minus_rate_g
        assert float(d.norm()) > 0.1
        assert float((after - expected).norm()) < 0.02 * float(2 * rate * alpha * d.norm())  # 8-bit directions


def test_drift_stays_below_its_bound(learnt) -> None:
    """sup ||d|| <= sup ||g_u|| / (2 alpha): locked rounds from the reference drift less than free ones."""
    drift = {}
    for alpha in (0.0, 0.2):
        _, steps = broadcast(learnt, reference="initial", alpha=alpha, excision_share=0.1, stabilisation_share=0.5)
        assert steps[-1].bases is not None and len(steps) == 4
        drift[alpha] = sum(along(steps[-1].bases, steps[-1].state, learnt.trained.initial).values())
    assert 0 < drift[0.2] < 0.8 * drift[0.0]


# --- what travels, and what is refused ---


def test_the_broadcast_state_bases_and_reference_are_metered(learnt) -> None:
    """With the lock every client is sent directions and reference once, and their name each time."""
    spent, lengths = {}, set()
    for alpha in (0.0, 0.1):
        spy = Spy(learnt.world.federation)
        metered = Metered(spy)
        list(EasePaper(alpha=alpha, excision_share=0.34).unlearn(learnt.trained, CLIENT, metered))
        spent[alpha] = metered.cost.bytes_down
        lengths |= {len(job.lock.encode()) for _, job in spy.asked if job.lock is not None}
        assert all((job.lock is None) == (alpha == 0.0) for _, job in spy.asked)
    (length,) = lengths
    reference = sum(tensor.numel() * tensor.element_size() for tensor in learnt.trained.final.tensors.values())
    assert length > reference
    jobs, named = 3 * 3, 64 + 2 - len("null")
    assert spent[0.1] - spent[0.0] == 3 * length + jobs * named


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("alpha=0.5",), r"alpha = 0.5: at learning rate 1 the lock cannot contract; choose less than 0.5"),
        (("alpha=9",), "choose less than 0.5"),
        (("probe_round=7",), "probe_round = 7: the training has 6 rounds"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anyone_is_asked(learnt, settings, said: str) -> None:
    spy = Spy(learnt.world.federation)
    with pytest.raises(UserError, match=said):
        next(make_method("ease_paper", settings).unlearn(learnt.trained, CLASS, spy))
    assert not spy.asked


def test_the_faster_of_two_learning_rates_decides(learnt) -> None:
    training = learnt.trained.training.model_copy(update={"learning_rate": 0.1, "lora_learning_rate": 4.0})
    with pytest.raises(UserError, match=r"at learning rate 4 the lock cannot contract; choose less than 0.125"):
        EasePaper(alpha=0.2).check(training)
    EasePaper(alpha=0.12).check(training)
    EasePaper(alpha=0.0).check(training)


@pytest.mark.parametrize(
    "assignment",
    [
        "delta=1.5", "delta=-0.1", "delta=nan", "delta=soft", "energy=0", "energy=1.1", "alpha=-1", "reference=final",
        "excision_share=0", "stabilisation_share=-1", "modalities=audio", "probe_round=-1",
    ],
)  # fmt: skip
def test_settings_outside_their_range_are_refused(assignment: str) -> None:
    with pytest.raises(UserError, match=f"^method ease_paper: {assignment.partition('=')[0]}: input should be"):
        make_method("ease_paper", (assignment,))


@pytest.mark.parametrize("side", ["image", "text"])
def test_only_one_branch_is_projected_and_locked(learnt, side: str) -> None:
    sent, steps = broadcast(learnt, reference="initial", modalities=side)
    for block in learnt.trained.final.blocks:
        untouched = torch.equal(sent[0].vector(block), learnt.trained.final.vector(block))
        assert untouched == (block.modality != side), block.name
    assert steps[-1].bases and all(name.startswith(side) for name in steps[-1].bases)


def test_the_initial_reference_erases_and_the_trained_one_does_not(learnt) -> None:
    """Scores of the forget pairs after the first projection, against those before it."""
    scores = {}
    for reference in ("trained", "initial"):
        sent, _ = broadcast(learnt, reference=reference)
        scores[reference] = learnt.level(sent[0], CLIENT)
    before = learnt.level(learnt.trained.final, CLIENT)
    assert scores["trained"] == pytest.approx(before) and scores["initial"] < before - 1


@pytest.mark.slow
def test_it_keeps_to_the_contract_on_both_engines() -> None:
    check_method(EasePaper)
