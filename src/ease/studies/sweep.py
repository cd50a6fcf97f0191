"""Choosing every method's settings fairly: the same number of trials, on a request that is never reported.

The score needs no retrained model, only what an operator can know: with g the membership gap of the request's forget
pairs (mean log-odds above those of held-out pairs that resemble them) and r the mean of R@1, R@5 and R@10 on the
validation pairs of the clients and classes that stay,

    score = |g after| / |g before| + max(0, 1 - r after / r before).

Less is better. A gap below zero counts as one above: pairs held less strongly than unseen ones are a trace too.
Defaults that are beaten by no more than the standard error of g stay: the luckiest of equal trials is not better.
"""

import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w

from ease.audit.membership_scores import Gap, measure_scores, membership_gap
from ease.errors import Diverged, UserError
from ease.measures.evaluate import recalls
from ease.methods import METHODS, make_method
from ease.methods.base import Trained, Unlearner, forget_clients
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request
from ease.runs.answers import answer_of, open_world, trained_of
from ease.runs.config import RunConfig
from ease.runs.forget import forget
from ease.runs.records import read_record, write_record
from ease.runs.run import Run
from ease.runs.workers import spread
from ease.runs.world import World
from ease.storage import digest
from ease.studies.experiment import Chosen, run_folder
from ease.studies.records import TrialRecord
from ease.studies.scenarios import Scenario, scenario_config, validation_request

REPEATS = 20
"""Proposals in a row that were tried before, after which an untried point is taken."""
FORMULA = "score = |membership gap| / |gap before| + max(0, 1 - validation recall / recall before); less is better"


Sampler = Literal["halton", "optuna"]
"""Who proposes settings: `halton` spreads them evenly, `optuna` learns from the scores so far (extra `tune`)."""
Proposals = Generator[Unlearner, float | None]
"""Settings to try; each is answered by its score, or None if it diverged."""


@dataclass(frozen=True)
class Search:
    """What one run directory has to try: every method's trials on the validation request of some scenarios."""

    sampler: Sampler

    folder: Path
    config: RunConfig
    scenarios: tuple[Scenario, ...]
    methods: tuple[str, ...]
    budget: int

    def score_path(self, scenario: Scenario, method: Unlearner) -> Path:
        return self.folder / "trials" / f"{scenario}-{method.name}-{digest(method.model_dump(mode='json'))}.json"

    @property
    def notes(self) -> int:
        """How many notes `finish_search` yields: one for each trial."""
        return len(self.scenarios) * len(self.methods) * self.budget


def trials(name: str, budget: int) -> list[Unlearner]:
    """A method's first settings to try: its defaults, then a low-discrepancy walk over its space, no point twice."""
    space = METHODS[name].tuned
    points = prod(len(values) for values in space.values())
    if budget > points:
        raise UserError(f"--budget {budget}: {name} has {points} settings to try; choose a budget of at most {points}")
    found = [make_method(name)]
    for settings in _walk(space):
        if len(found) == budget:
            break
        method = make_method(name, table=settings)
        if method not in found:
            found.append(method)
    return found


def _walk(space: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Halton points on the grid of a space, without end."""
    from scipy.stats import qmc

    sequence = qmc.Halton(len(space), scramble=False)
    sequence.fast_forward(1)  # the first point is the corner, whatever the space
    while True:
        (point,) = sequence.random(1)
        yield {
            name: values[int(place * len(values))] for (name, values), place in zip(space.items(), point, strict=True)
        }


def proposals(sampler: Sampler, name: str, budget: int) -> Proposals:
    """A method's settings to try, its defaults first. The same scores lead to the same proposals."""
    return _by_optuna(name, budget) if sampler == "optuna" else _in_turn(trials(name, budget))


def _in_turn(methods: Sequence[Unlearner]) -> Proposals:
    for method in methods:  # noqa: UP028 (scores are sent, which a list cannot take)
        yield method


def _by_optuna(name: str, budget: int) -> Proposals:
    """Proposals of a tree-structured Parzen estimator over the places of the values, no point twice."""
    try:
        import optuna
    except ImportError as error:
        raise UserError("--sampler optuna: not installed; run: pip install 'ease-unlearning[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, scores = METHODS[name].tuned, dict[str, float | None]()
    spare = iter(trials(name, prod(map(len, space.values()))))  # in case that the estimator repeats itself
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=max(3, budget // 3)))
    study.enqueue_trial({setting: _place(make_method(name), setting) for setting in space})
    repeated = 0
    while len(scores) < budget:
        trial = study.ask()
        places = {setting: trial.suggest_int(setting, 0, len(values) - 1) for setting, values in space.items()}
        method = make_method(name, table={setting: space[setting][place] for setting, place in places.items()})
        key = method.model_dump_json()
        repeated = repeated + 1 if key in scores else 0
        if key not in scores:
            scores[key] = yield method
        if scores[key] is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, scores[key])
        if repeated >= REPEATS:
            other = next(each for each in spare if each.model_dump_json() not in scores)
            study.enqueue_trial({setting: _place(other, setting) for setting in space})


def _place(method: Unlearner, setting: str) -> int:
    """Index of the value of a setting in its space."""
    return list(method.tuned[setting]).index(getattr(method, setting))


def searches_in(folder: Path, methods: Sequence[str], budget: int, sampler: Sampler = "halton") -> list[Search]:
    """Search on a run that exists, for the scenarios that its clients' data suit."""
    run = Run.load(folder)
    suited: list[Scenario] = [s for s in ("client", "class", "sample") if scenario_config(run.config, s) == run.config]
    return [Search(sampler, folder, run.config, tuple(suited), tuple(methods), budget)]


def searches_for(
    config: RunConfig,
    scenarios: Sequence[Scenario],
    methods: Sequence[str],
    budget: int,
    work: Path,
    sampler: Sampler = "halton",
) -> list[Search]:
    """Search on the runs of an experiment, which `ease bench` then uses too."""
    grouped: dict[RunConfig, list[Scenario]] = {}
    for scenario in scenarios:
        grouped.setdefault(scenario_config(config, scenario), []).append(scenario)
    return [
        Search(sampler, run_folder(work, each), each, tuple(found), tuple(methods), budget)
        for each, found in sorted(grouped.items(), key=lambda item: -len(item[1]))
    ]


def finish_search(search: Search) -> Iterator[str]:
    """Try everything that has no score yet; a note after each trial."""
    run = Run.create(search.folder, search.config)
    world = open_world(run)
    for _ in run.train(world):
        pass
    for scenario in search.scenarios:
        judge: Judge | None = None
        for name in search.methods:
            for number, (method, path) in enumerate(_tried(search, scenario, name)):
                if not path.is_file():
                    judge = judge or Judge.of(run, world, validation_request(world, scenario, run.config.seed))
                    write_record(path, judge.trial(method))
                yield f"{scenario} request: {method.title}, trial {number + 1}"


def _tried(search: Search, scenario: Scenario, name: str) -> Iterator[tuple[Unlearner, Path]]:
    """A method's trials and the files of their scores; each score must exist before the next trial is chosen."""
    proposed = proposals(search.sampler, name, search.budget)
    method = next(proposed, None)
    while method is not None:
        path = search.score_path(scenario, method)
        yield method, path
        score = read_record(TrialRecord, path).score
        try:
            method = proposed.send(score)
        except StopIteration:
            return


@dataclass(frozen=True)
class Judge:
    """Scores methods on one request, with the trained model as the yardstick."""

    run: Run
    world: World
    trained: Trained
    request: Request
    gap_before: float
    recall_before: float

    @classmethod
    def of(cls, run: Run, world: World, request: Request) -> "Judge":
        trained = trained_of(run)
        gap = abs(_gap(world, trained, request, trained.final).gap)
        recall = validation_recall(world, request, trained.final)
        if gap == 0 or recall == 0:
            raise UserError(f"{run.folder}: the trained model has learnt nothing to forget; train longer")
        return cls(run, world, trained, request, gap, recall)

    def trial(self, method: Unlearner) -> TrialRecord:
        """The score as it is stored; settings without a usable model have none, and the reason instead."""
        settings = method.model_dump(mode="json")
        try:
            score, error = self.score(method)
        except Diverged as diverged:
            return TrialRecord(method=settings, score=None, diverged=str(diverged))
        return TrialRecord(method=settings, score=score, error=error)

    def score(self, method: Unlearner) -> tuple[float, float]:
        """The score and the standard error that the membership gap brings into it."""
        for _ in forget(self.run, self.world, self.request, method, observe=False):
            pass
        state = answer_of(self.run, self.request, method).model()
        found = _gap(self.world, self.trained, self.request, state)
        recall = validation_recall(self.world, self.request, state)
        if not isfinite(found.gap):
            raise Diverged("the log-odds are not finite: the model diverged, no membership gap")
        score = abs(found.gap) / self.gap_before + max(0.0, 1 - recall / self.recall_before)
        return score, found.standard_error / self.gap_before


def _gap(world: World, trained: Trained, request: Request, state: Params) -> Gap:
    found = membership_gap(
        measure_scores(trained, state, request, world.federation, forget_clients(request, world.federation))
    )
    if found is None:
        raise UserError("partition.validation_share: too few held-out pairs to measure a membership gap; raise it")
    return found


def validation_recall(world: World, request: Request, state: Params) -> float:
    """Mean of R@1, R@5 and R@10 over the held-out pairs of clients and classes that stay."""
    leaving = request.clients if isinstance(request, ClientRequest) else ()
    gone = request.classes if isinstance(request, ClassRequest) else ()
    kept = [s.validation[~np.isin(s.validation_classes, gone)] for s in world.shards if s.client not in leaving]
    positions = {"validation": np.concatenate(kept)}
    found = recalls(
        world.server.model, state, world.evaluator.activations, positions, world.config.gallery, world.server.device
    )
    return statistics.mean(found["validation"][f"recall@{k}"].mean for k in (1, 5, 10))


def sweep(searches: Sequence[Search], processes: int) -> Iterator[str]:
    """Do all trials, in several processes; a note after each."""
    for search in searches:
        for name in search.methods:
            trials(name, search.budget)  # refuses a budget that is too large before any work
    yield from spread(finish_search, searches, processes)


def choose(searches: Sequence[Search]) -> dict[str, dict[str, Chosen]]:
    """Method -> scenario -> the settings of the lowest score, or the defaults where they are as good within its error.

    Settings that diverged are never chosen; where all did, there is no choice.
    """
    chosen: dict[str, dict[str, Chosen]] = {}
    for search in searches:
        for scenario in search.scenarios:
            for name in search.methods:
                found = [(method, read_record(TrialRecord, path)) for method, path in _tried(search, scenario, name)]
                tried, stored = [method for method, _ in found], [record for _, record in found]
                scores = [inf if trial.score is None else trial.score for trial in stored]
                best = scores.index(min(scores))
                if scores[best] == inf:
                    continue
                if scores[0] - scores[best] <= stored[best].error:
                    best = 0
                settings = tried[best].model_dump(mode="json", exclude_defaults=True)
                chosen.setdefault(name, {})[scenario] = Chosen(
                    score=round(scores[best], 4),
                    error=round(stored[best].error, 4),
                    default_score=None if scores[0] == inf else round(scores[0], 4),
                    budget=len(tried),
                    settings=settings,
                )
    return chosen


def chosen_toml(chosen: Mapping[str, Mapping[str, Chosen]], source: str) -> str:
    """The choice as a file to keep beside an experiment, and to name in it as `tuned`."""
    header = (
        f"# Chosen by `ease sweep {source}`, on requests that are not reported and without retraining.\n# {FORMULA}.\n"
    )
    tables = {
        name: {
            scenario: found.model_dump(mode="json", exclude_none=True) for scenario, found in sorted(scenarios.items())
        }
        for name, scenarios in sorted(chosen.items())
    }
    return f"{header}\n{tomli_w.dumps(tables)}"
