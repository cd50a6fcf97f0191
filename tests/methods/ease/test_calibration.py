"""Levels, gaps and targets by hand: what forget pairs should fall to, without a retrained model."""

import pytest
import torch

from ease.errors import UserError
from ease.methods.ease.calibration import (
    Gap,
    choose_depth,
    density_targets,
    level_targets,
    measure_levels,
    membership_gap,
    shrink_noise,
)
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest


def measured(forget: list[float], held_out: list[float], kin: list[float] | None = None) -> dict[str, torch.Tensor]:
    """What a client would have measured, the same in both draws."""
    twice = {
        name: torch.tensor(values).reshape(-1, 1).expand(-1, 2)
        for name, values in {"forget": forget, "held_out": held_out, "kin": held_out if kin is None else kin}.items()
    }
    return twice | {
        "forget_density": torch.tensor(forget).reshape(-1, 1).repeat(1, 12),
        "held_out_density": torch.tensor(held_out).reshape(-1, 1).repeat(1, 12),
    }


def test_the_gap_is_the_difference_of_means_over_all_clients() -> None:
    gap = membership_gap({0: measured([4.0, 6.0], [1.0]), 1: measured([5.0], [2.0, 3.0])})
    assert gap is not None
    assert gap.gap == pytest.approx(5 - 2)
    assert gap.standard_error == pytest.approx((1 / 3 + 1 / 3) ** 0.5)
    assert (gap.forget_pairs, gap.held_out_pairs) == (3, 3)


def test_the_gap_compares_with_kin_not_with_other_classes() -> None:
    gap = membership_gap({0: measured([4.0, 6.0], held_out=[50.0, 60.0], kin=[1.0, 3.0])})
    assert gap is not None and gap.gap == pytest.approx(3)


@pytest.mark.parametrize(("forget", "held_out"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0]), ([1.0, 2.0], [])])
def test_with_too_few_pairs_there_is_no_gap(forget, held_out) -> None:
    assert membership_gap({0: measured(forget, held_out)}) is None


def test_levels_of_held_out_pairs_are_one_target_for_all() -> None:
    targets = level_targets({0: measured([9.0, 9.0], [1.0, 2.0]), 3: measured([9.0], [6.0]), 4: measured([], [])})
    assert {client: values.tolist() for client, values in targets.items()} == {0: [3.0, 3.0], 3: [3.0], 4: []}


def test_density_targets_follow_the_neighbourhood() -> None:
    """Held-out levels equal their density here, so a forget pair's target is near its own density."""
    held_out = torch.linspace(0, 4, 60).tolist()
    levels = {0: measured([1.0, 3.0], held_out[::2]), 1: measured([2.0], held_out[1::2]), 2: measured([], [])}
    targets = density_targets(levels, seed=0)
    assert {client: len(values) for client, values in targets.items()} == {0: 2, 1: 1, 2: 0}
    torch.testing.assert_close(torch.cat([targets[0], targets[1]]), torch.tensor([1.0, 3.0, 2.0]), atol=0.1, rtol=0)
    again, other = density_targets(levels, seed=0), density_targets(levels, seed=1)
    assert torch.equal(again[0], targets[0]) and other[0].shape == targets[0].shape


def test_density_targets_scatter_as_held_out_pairs_do() -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(500, generator=rng)
    client = measured([0.0] * 400, noise.tolist())
    client["forget_density"], client["held_out_density"] = torch.zeros(400, 12), torch.zeros(500, 12)
    targets = density_targets({0: client}, seed=0)[0]
    assert float(targets.std()) == pytest.approx(float(noise.std()), rel=0.15)
    assert float(targets.mean()) == pytest.approx(float(noise.mean()), abs=0.15)


def test_noise_that_a_second_draw_does_not_repeat_is_taken_out() -> None:
    rng = torch.Generator().manual_seed(0)
    real = torch.randn(5000, 1, generator=rng)
    noise = torch.randn(5000, 2, generator=rng)
    assert float(shrink_noise(real + noise).std()) == pytest.approx(1.0, rel=0.1)
    assert float(shrink_noise(noise).std()) < 0.3
    torch.testing.assert_close(shrink_noise(real.expand(-1, 2)), real[:, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("before", "after", "depth"),
    [
        ((3.0, 0.5), (1.0, 0.5), 1.0),  # still above held-out pairs: all of it
        ((3.0, 0.5), (0.0, 0.5), 1.0),
        ((3.0, 0.5), (-0.5, 0.5), 1.0),  # below, but within the error
        ((1.0, 0.0), (-3.0, 0.0), 0.25),  # linear: depth x leaves 1 - 4 x, which is 0 here
        ((-1.0, 0.0), (-2.0, 0.0), 0.0),  # already below: nothing to take
        ((-2.0, 0.2), (-1.0, 0.1), 1.0),  # excision raised it: no proportion to follow
    ],
)
def test_the_depth_keeps_forget_pairs_from_falling_below_held_out_ones(before, after, depth: float) -> None:
    gaps = [Gap(gap, error, 10, 10) for gap, error in (before, after)]
    assert choose_depth(*gaps) == pytest.approx(depth)


@pytest.mark.parametrize("after", [-1.5, -3.0, -9.0])
def test_a_wider_error_allows_a_greater_depth(after: float) -> None:
    depths = [choose_depth(Gap(3.0, error, 10, 10), Gap(after, error, 10, 10)) for error in (0.0, 0.2, 0.5)]
    assert depths == sorted(depths) and depths[0] == pytest.approx(3 / (3 - after))
    for error, depth in zip((0.0, 0.2, 0.5), depths, strict=True):
        assert depth == 1 or -2 * error - 1e-9 <= 3 - depth * (3 - after) <= 1e-9


# --- asking for levels ---


class Asked:
    """A federation that notes whom it asks for what."""

    def __init__(self, inner) -> None:
        self.inner, self.calls = inner, []

    @property
    def clients(self):
        return self.inner.clients

    def run(self, params, job, clients):
        self.calls.append((params, job, list(clients)))
        yield from self.inner.run(params, job, clients)


def test_only_holders_are_asked_and_the_state_travels_in_half_precision(learnt) -> None:
    for request, expected in ((ClientRequest(clients=(2,)), [2]), (ClassRequest(classes=(0,)), [0, 1, 2, 3])):
        asked = Asked(learnt.world.federation)
        levels = measure_levels(learnt.trained, learnt.trained.final, request, asked, "x")
        ((state, job, clients),) = asked.calls
        assert clients == expected == list(levels) and job.objective == "levels"
        assert all(tensor.dtype == torch.float16 for tensor in state.tensors.values())


def test_a_client_without_forget_pairs_still_tells_its_held_out_level(learnt) -> None:
    shard = learnt.world.shards[0]
    request = SampleRequest(ids=shard.train_ids[:3])
    levels = measure_levels(learnt.trained, learnt.trained.final, request, learnt.world.federation, "x")
    assert [len(values["forget"]) for values in levels.values()] == [3, 0, 0, 0]
    assert all(len(values["held_out"]) == len(values["kin"]) > 2 for values in levels.values())
    targets = density_targets(levels, 0)
    assert [len(targets[client]) for client in sorted(targets)] == [3, 0, 0, 0] and torch.isfinite(targets[0]).all()


def test_unseen_pairs_have_no_gap_and_training_pairs_do(learnt) -> None:
    """Before training no one is a member; after it the training pairs stand out."""
    request = ClientRequest(clients=(0, 1, 2, 3))
    federation = learnt.world.federation
    gaps = [
        membership_gap(measure_levels(learnt.trained, state, request, federation, "x"))
        for state in (learnt.trained.initial, learnt.trained.final)
    ]
    assert gaps[0] is not None and gaps[1] is not None
    assert abs(gaps[0].gap) < 4 * gaps[0].standard_error
    assert gaps[1].gap > 4 * gaps[1].standard_error


@pytest.mark.parametrize("targets", [level_targets, lambda levels: density_targets(levels, 0)])
def test_without_held_out_pairs_no_target_is_invented(targets) -> None:
    with pytest.raises(UserError, match=r"1 held-out pairs .* partition.validation_share .* displacement=0"):
        targets({0: measured([3.0, 4.0], [1.0]), 1: measured([2.0], [])})


def test_a_client_that_keeps_one_pair_measures_like_the_others(world, local_job) -> None:
    """Its levels have as many draws as theirs, and one row for each forget pair, so that all can be joined."""
    shard = world.shards[0]
    request = SampleRequest(ids=(*shard.train_ids[1:], world.shards[1].train_ids[0]))
    job = local_job(request=request, objective="levels")
    found = {update.client: update.values for update in world.federation.run(world.server.initial(), job, [0, 1])}
    assert found[0]["forget"].shape == (len(shard.train) - 1, 2) and found[1]["forget"].shape == (1, 2)
    assert len(found[0]["forget_density"]) == len(shard.train) - 1
    assert membership_gap(found) is not None
