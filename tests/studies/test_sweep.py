"""Sweeps: the same budget for all, the reported request untouched, nothing random, nothing done twice."""

import math

import numpy as np
import pytest

import ease.studies.sweep
from ease.audit.membership_scores import Gap
from ease.errors import Diverged, UserError
from ease.methods import METHODS, make_method
from ease.methods.base import Unlearner
from ease.requests.request import ClientRequest, forget_mask
from ease.runs.records import read_record
from ease.runs.resolve import request_id
from ease.runs.run import Run
from ease.runs.world import World
from ease.studies.experiment import Chosen, load_tuned
from ease.studies.records import TrialRecord
from ease.studies.scenarios import scenario_request, validation_request
from ease.studies.sweep import (
    FORMULA,
    Judge,
    Search,
    choose,
    chosen_toml,
    proposals,
    searches_for,
    searches_in,
    sweep,
    trials,
    validation_recall,
)

TUNED = sorted(name for name, kind in METHODS.items() if kind.tuned)


@pytest.fixture
def search(small_config, tmp_path) -> Search:
    config = small_config("partition.validation_share=0.3", "training.rounds=4", "training.local_epochs=2")
    methods = ("finetune", "multi_delete")
    (found,) = searches_for(config, ["client", "sample"], methods, 2, tmp_path)
    return found


@pytest.mark.parametrize("name", TUNED)
def test_every_method_gets_the_same_budget_and_begins_with_its_defaults(name) -> None:
    for budget in (1, 4, 8):
        tried = trials(name, budget)
        assert len(tried) == budget and tried[0] == make_method(name)
        assert len({method.model_dump_json() for method in tried}) == budget
    assert trials(name, 8) == trials(name, 8) and trials(name, 4) == trials(name, 8)[:4]


def test_all_but_the_reference_are_tuned() -> None:
    comparable = {name for name, method in METHODS.items() if "fedavg" in method.trainers}
    certified = {"sifu", "noisy_finetune"}  # their settings are the guarantee that is asked of them
    assert set(TUNED) == comparable - {"retrain"} - certified


@pytest.mark.parametrize("name", TUNED)
def test_spaces_are_small_and_hold_the_defaults(name) -> None:
    space, defaults = METHODS[name].tuned, make_method(name)
    assert 1 <= len(space) <= 3 and math.prod(map(len, space.values())) >= 8
    for setting, values in space.items():
        assert getattr(defaults, setting) in values and len(set(values)) == len(values)
    tried = trials(name, math.prod(map(len, space.values())))
    for setting, values in space.items():
        assert {getattr(method, setting) for method in tried} == set(values)  # every value can be reached


def reversed_digits(number: int, base: int) -> float:
    """The digits of a number behind the point in reverse: 6 = 110 in base 2 becomes 0.011 = 3/8."""
    value, step = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        step /= base
        value += digit * step
    return value


@pytest.mark.parametrize("name", TUNED)
def test_trials_walk_the_halton_points_of_the_grid(name) -> None:
    """Written out: one base for each setting, the numbers from 1, points that were there already left out."""
    space = METHODS[name].tuned
    expected = [make_method(name)]
    for number in range(1, 200):
        places = [reversed_digits(number, base) for base in (2, 3, 5)]
        settings = {
            setting: values[int(place * len(values))]
            for (setting, values), place in zip(space.items(), places, strict=False)
        }
        method = make_method(name, table=settings)
        expected += [] if method in expected else [method]
    assert trials(name, 8) == expected[:8]
    every = math.prod(map(len, space.values()))
    assert trials(name, every) == expected[:every] and len(expected) >= every


def test_a_choice_is_a_file_that_says_where_it_came_from_and_reads_back(tmp_path) -> None:
    chosen = {
        "not": {"client": Chosen(score=0.5, error=0.1, budget=8)},
        "ease": {
            "sample": Chosen(score=0.25, default_score=1.0, budget=8, settings={"share": 0.8, "lock": False}),
            "class": Chosen(score=2.0, budget=4, settings={"recovery_share": 0.3}),
        },
    }
    text = chosen_toml(chosen, "some.toml")
    assert text.startswith("# Chosen by `ease sweep some.toml`, ") and f"# {FORMULA}.\n" in text
    headings = [line for line in text.splitlines() if line.startswith("[") and "settings" not in line]
    assert headings == ["[ease.class]", "[ease.sample]", "[not.client]"]
    (tmp_path / "tuned.toml").write_text(text)
    assert load_tuned(tmp_path / "tuned.toml") == chosen


def test_a_budget_larger_than_a_space_is_refused() -> None:
    with pytest.raises(UserError, match="--budget 9: finetune has 8"):
        trials("finetune", 9)


@pytest.mark.slow
def test_the_reported_request_is_never_touched(search, monkeypatch) -> None:
    """Every question about a request, whoever asks it, is about the validation request."""
    asked = set()
    for module, name in (
        ("ease.studies.sweep", "forget"),
        ("ease.studies.sweep", "measure_scores"),
        ("ease.studies.sweep", "validation_recall"),
    ):
        real = getattr(ease.studies.sweep, name)
        position = {"forget": 2, "measure_scores": 2, "validation_recall": 1}[name]

        def spy(*arguments, real=real, position=position, **named):
            asked.add(request_id(arguments[position]))
            return real(*arguments, **named)

        monkeypatch.setattr(f"{module}.{name}", spy)
    list(sweep([search], 1))
    world = World.open(search.config)
    expected = {request_id(validation_request(world, s, search.config.seed)) for s in search.scenarios}
    reported = {request_id(scenario_request(world, s, search.config.seed)) for s in search.scenarios}
    assert asked == expected and not asked & reported
    answered = {path.name for path in (search.folder / "requests").iterdir()}
    assert answered == expected
    assert not list(search.folder.glob("requests/*/retrain*"))


@pytest.mark.slow
def test_a_sweep_chooses_the_lowest_score_and_resumes(search, tmp_path, monkeypatch) -> None:
    assert len(list(sweep([search], 1))) == search.notes == 2 * 2 * 2
    chosen = choose([search])
    for name in search.methods:
        for scenario in search.scenarios:
            found = chosen[name][scenario]
            assert found.budget == 2 and found.score <= found.default_score
            assert make_method(name, table=found.settings) in trials(name, 2)
    path = tmp_path / "tuned.toml"
    path.write_text(chosen_toml(chosen, "x.toml"))
    assert load_tuned(path) == chosen and "score = |membership gap|" in path.read_text()

    monkeypatch.setattr(ease.studies.sweep, "forget", lambda *_, **__: pytest.fail("a finished trial was done again"))
    assert len(list(sweep([search], 1))) == search.notes and choose([search]) == chosen


def test_the_score_by_hand(learnt, monkeypatch) -> None:
    """Gap 2 before and -1 after, recall 80 before and 60 after: 1/2 + (1 - 60/80) = 0.75. More recall adds nothing."""
    request = ClientRequest(clients=(0,))
    judge = Judge(learnt.run, learnt.world, learnt.trained, request, gap_before=2.0, recall_before=80.0)
    monkeypatch.setattr(ease.studies.sweep, "forget", lambda *_, **__: iter(()))
    outcome = type("StoredAnswer", (), {"model": lambda self: learnt.trained.final})()
    monkeypatch.setattr(ease.studies.sweep, "answer_of", lambda *_: outcome)
    monkeypatch.setattr(ease.studies.sweep, "_gap", lambda *_: Gap(-1.0, 0.3, 9, 9))
    for recall, expected in ((60.0, 0.75), (90.0, 0.5)):
        monkeypatch.setattr(ease.studies.sweep, "validation_recall", lambda *_, recall=recall: recall)
        assert judge.score(make_method("finetune")) == pytest.approx((expected, 0.15))


def test_settings_that_diverge_are_stored_with_the_reason_and_never_chosen(search, tmp_path, monkeypatch) -> None:
    """The defaults of fine-tuning diverge, its second trial scores 3; of MultiDelete nothing is left."""
    second = trials("finetune", 2)[1]

    def score(self: Judge, method: Unlearner) -> tuple[float, float]:
        if method != second:
            raise Diverged("round 1: every update was rejected")
        return 3.0, 0.1

    monkeypatch.setattr(Judge, "of", lambda *_: Judge(*[None] * 4, gap_before=1.0, recall_before=1.0))
    monkeypatch.setattr(Judge, "score", score)
    assert len(list(sweep([search], 1))) == search.notes
    stored = read_record(TrialRecord, search.score_path("client", trials("finetune", 2)[0]))
    assert stored.score is None and stored.diverged == "round 1: every update was rejected"
    chosen = choose([search])
    assert chosen.keys() == {"finetune"} and chosen["finetune"]["client"].default_score is None
    assert chosen["finetune"]["client"].settings == second.model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "tuned.toml").write_text(chosen_toml(chosen, "x.toml"))
    assert load_tuned(tmp_path / "tuned.toml") == chosen


@pytest.mark.parametrize(("error", "second_wins"), [(0.1, True), (0.25, False)])
def test_defaults_as_good_within_the_error_stay(search, monkeypatch, error: float, second_wins: bool) -> None:
    """Defaults 0.7, the second trial 0.5 of either method: better by 0.2."""
    monkeypatch.setattr(Judge, "of", lambda *_: Judge(*[None] * 4, gap_before=1.0, recall_before=1.0))
    firsts = [trials(name, 2)[0] for name in search.methods]
    monkeypatch.setattr(Judge, "score", lambda self, method: (0.7 if method in firsts else 0.5, error))
    list(sweep([search], 1))
    for scenarios in choose([search]).values():
        for found in scenarios.values():
            assert (found.score, found.error, found.default_score) == (0.5 if second_wins else 0.7, error, 0.7)
            assert bool(found.settings) is second_wins


def test_a_gap_of_nan_is_not_a_score(learnt, monkeypatch) -> None:
    judge = Judge(learnt.run, learnt.world, learnt.trained, ClientRequest(clients=(0,)), 2.0, 80.0)
    monkeypatch.setattr(ease.studies.sweep, "forget", lambda *_, **__: iter(()))
    outcome = type("StoredAnswer", (), {"model": lambda self: learnt.trained.final})()
    monkeypatch.setattr(ease.studies.sweep, "answer_of", lambda *_: outcome)
    monkeypatch.setattr(ease.studies.sweep, "_gap", lambda *_: Gap(math.nan, math.nan, 9, 9))
    monkeypatch.setattr(ease.studies.sweep, "validation_recall", lambda *_: 60.0)
    assert judge.trial(make_method("finetune")).score is None


@pytest.mark.parametrize("scenario", ["client", "class", "sample"])
def test_recall_is_measured_on_held_out_pairs_of_what_stays(learnt, scenario, monkeypatch) -> None:
    world, request = learnt.world, validation_request(learnt.world, scenario, 0)
    seen = {}
    real = ease.studies.sweep.recalls
    monkeypatch.setattr(ease.studies.sweep, "recalls", lambda *a, **k: seen.update(a[3]) or real(*a, **k))
    validation_recall(world, request, learnt.trained.final)
    trained_on = np.concatenate([shard.train for shard in world.shards])
    held_out = np.concatenate([shard.validation for shard in world.shards])
    positions = seen["validation"]
    assert not np.isin(positions, trained_on).any() and np.isin(positions, held_out).all()
    expected = {
        "client": sum(len(s.validation) for s in world.shards if not forget_mask(request, s).all()),
        "class": sum((~np.isin(s.validation_classes, getattr(request, "classes", ()))).sum() for s in world.shards),
        "sample": len(held_out),
    }
    assert len(positions) == expected[scenario] > 0


def test_a_run_is_searched_for_the_scenarios_that_suit_it(small_config, tmp_path) -> None:
    for scheme, scenarios in (("iid", ("client", "sample")), ("uniform", ("client", "class", "sample"))):
        run = Run.create(tmp_path / scheme, small_config(f"partition.scheme={scheme}"))
        (found,) = searches_in(run.folder, TUNED, 3)
        assert found.scenarios == scenarios and found.config == run.config


def answered(name: str, budget: int, score) -> list[Unlearner]:
    """What Optuna proposes if every trial gets the score of a function."""
    proposed, tried = proposals("optuna", name, budget), list[Unlearner]()
    method = next(proposed, None)
    while method is not None:
        tried.append(method)
        try:
            method = proposed.send(score(method))
        except StopIteration:
            break
    return tried


def test_optuna_begins_with_the_defaults_and_repeats_nothing() -> None:
    pytest.importorskip("optuna")
    budget = math.prod(map(len, METHODS["finetune"].tuned.values()))
    tried = answered("finetune", budget, lambda method: method.share)
    assert tried[0] == make_method("finetune")
    assert len({method.model_dump_json() for method in tried}) == len(tried) == budget
    assert tried == answered("finetune", budget, lambda method: method.share)  # so that a search can be resumed


def test_optuna_learns_from_scores_and_takes_settings_that_diverged() -> None:
    pytest.importorskip("optuna")
    low = answered("ferrari", 16, lambda method: float(METHODS["ferrari"].tuned["rate"].index(method.rate)))
    high = answered("ferrari", 16, lambda method: -float(METHODS["ferrari"].tuned["rate"].index(method.rate)))
    assert low[:3] == high[:3] and low != high
    assert len(answered("ferrari", 8, lambda method: None)) == 8
