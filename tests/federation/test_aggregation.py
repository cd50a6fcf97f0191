"""Aggregation rules: value by value against plain sorting, Krum against loops, and clipping by hand."""

import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from ease.federation import aggregation, fedavg
from ease.federation.aggregation import RULES, aggregated, clipped, krum
from ease.federation.fedavg import TrainingConfig, average
from ease.federation.protocol import Update

HOWTO = Path(__file__).parents[2] / "docs" / "howto.md"
ROBUST = sorted(RULES.keys() - {"mean"})


def values(params) -> np.ndarray:
    return torch.cat([tensor.flatten() for tensor in params.tensors.values()]).double().numpy()


@pytest.mark.parametrize("count", [3, 4, 5, 10])
def test_median_and_trimmed_mean_are_those_of_each_value(toy_params, count: int) -> None:
    changes = [(float(client + 1), toy_params(seed=client)) for client in range(count)]
    table = np.stack([values(change) for _, change in changes])
    np.testing.assert_allclose(values(aggregated(changes, "median")), np.median(table, axis=0), atol=1e-6)
    cut = {3: 1, 4: 1, 5: 1, 10: 2}[count]
    expected = np.sort(table, axis=0)[cut : count - cut].mean(0)
    np.testing.assert_allclose(values(aggregated(changes, "trimmed", 0.2)), expected, atol=1e-6)


def naive_krum(table: np.ndarray, hostile: int) -> list[int]:
    scores = []
    for one in table:
        distances = sorted(((one - other) ** 2).sum() for other in table)[1:]
        scores.append(sum(distances[: max(1, len(table) - hostile - 2)]))
    return sorted(np.argsort(scores, kind="stable")[: len(table) - hostile].tolist())


@pytest.mark.parametrize(("count", "hostile"), [(5, 1), (7, 2), (10, 2), (10, 3)])
def test_krum_keeps_those_whose_neighbours_are_near(toy_params, count: int, hostile: int) -> None:
    changes = [toy_params(seed=client) for client in range(count)]
    changes[2] = changes[2] * 50.0
    kept = krum(changes, hostile)
    assert kept == naive_krum(np.stack([values(change) for change in changes]), hostile)
    assert 2 not in kept and len(kept) == count - hostile


def test_krum_weighs_those_it_keeps_by_their_pairs(toy_params) -> None:
    changes = [(1.0, toy_params(1.0)), (3.0, toy_params(2.0)), (1.0, toy_params(1.5)), (9.0, toy_params(-80.0))]
    found = values(aggregated(changes, "krum", 0.25))
    np.testing.assert_allclose(found, (1 * 1.0 + 3 * 2.0 + 1 * 1.5) / 5, atol=1e-6)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_two_updates_are_averaged_by_every_rule(toy_params, rule) -> None:
    changes = [(1.0, toy_params(1.0)), (3.0, toy_params(5.0))]
    assert aggregated(changes, rule) == aggregated(changes, "mean")


@pytest.mark.parametrize("rule", ROBUST)
def test_one_of_ten_moves_robust_means_no_further_than_honest_ones(toy_params, rule) -> None:
    honest = [(1.0, toy_params(seed=client)) for client in range(9)]
    found = values(aggregated([*honest, (1.0, toy_params(1e6))], rule))
    table = np.stack([values(change) for _, change in honest])
    assert (found <= table.max(0)).all() and (found >= table.min(0)).all()


def norms(updates: list[Update]) -> list[float]:
    return [update.change.norm() for update in updates]


def test_a_long_update_is_cut_to_a_multiple_of_the_median(toy_params) -> None:
    """Norms 1, 1, 1 and 100 times sqrt(6); the last has twice the median's pairs and may go twice as far."""
    updates = [Update(client, 5, toy_params(1.0)) for client in range(3)] + [Update(3, 10, toy_params(100.0))]
    kept, factors = clipped(updates, norms(updates), 3.0, [1.0] * 4)
    assert [one is two for one, two in zip(kept, updates, strict=True)] == [True, True, True, False]
    assert factors == {3: pytest.approx(3 * 2 / 100)}
    assert kept[3].change["image.layer.B"].unique().tolist() == pytest.approx([6.0])
    two = updates[2:]  # of two, no one can say which is too long
    assert clipped(two, norms(two), 3.0, [5.0, 10.0]) == (two, {})


def test_a_long_update_of_little_weight_does_not_move_the_mean_further(toy_params) -> None:
    """One pair of five: five times as long, with a fifth of the weight."""
    updates = [Update(client, 5, toy_params(1.0)) for client in range(3)] + [Update(3, 1, toy_params(100.0))]
    assert clipped(updates, norms(updates), 3.0, [5.0, 5.0, 5.0, 1.0])[1] == {3: pytest.approx(3 * 5 / 100)}
    assert clipped(updates, norms(updates), 3.0, [1.0] * 4)[1] == {3: pytest.approx(3 / 100)}


def test_a_round_says_who_was_cut_and_one_client_moves_it_a_little(toy_params) -> None:
    honest = [Update(client, 5, toy_params(1.0)) for client in range(9)]
    finished = average(toy_params(0.0), [*honest, Update(9, 5, toy_params(-1e30))], TrainingConfig(), 1)
    assert list(finished.clipped) == [9] and not finished.rejected
    assert finished.state["image.layer.B"].unique().tolist() == pytest.approx([(9 - 3) / 10])
    plain = average(toy_params(0.0), [*honest, Update(9, 5, toy_params(-1e30))], TrainingConfig(), 1, clip=False)
    assert not plain.clipped and plain.state["image.layer.B"].min() < -1e28


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_order_of_arrival_does_not_matter_to_any_rule(toy_params, rule) -> None:
    updates = [Update(client, client + 1, toy_params(seed=client)) for client in range(4)]
    config = TrainingConfig(aggregation=rule)
    states = [average(toy_params(0.0), order, config, 1).state for order in itertools.permutations(updates)]
    assert all(state == states[0] for state in states)


def module_from(source: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module from other source text, in the place of the one that is imported."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def test_a_rule_is_added_as_the_manual_says(toy_params, monkeypatch) -> None:
    """With the function and one line of a table, the setting knows the rule and a round is combined by it."""
    (code,) = re.findall(r"^```python\n(def geometric_median.*?)^```", HOWTO.read_text(), re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"`(\"geometric_median\": .*?)`", HOWTO.read_text())
    source, table = Path(aggregation.__file__).read_text(), "RULES: dict[str, Rule] = {\n"
    assert source.count(table) == 1
    module_from(source.replace(table, f"{code}\n\n{table}    {line}\n"), aggregation.__name__, monkeypatch)
    extended = module_from(Path(fedavg.__file__).read_text(), fedavg.__name__, monkeypatch)
    with pytest.raises(ValueError, match="geometric_median"):
        TrainingConfig(aggregation="geometric_median")
    config = extended.TrainingConfig(aggregation="geometric_median", clip_to_median=1e12)
    places = [0.0, 1.0, 2.0, 2.5, -1e6]  # on a line the geometric median is the middle one
    updates = [Update(client, 5, toy_params(place)) for client, place in enumerate(places)]
    found = extended.average(toy_params(0.0), updates, config, 1)
    np.testing.assert_allclose(values(found.state), 1.0, atol=1e-3)
