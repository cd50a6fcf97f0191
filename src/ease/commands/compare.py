"""`ease compare` and `ease demo`: compare models and methods on one request."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType

from ease.commands.forget import answer, contribution_line
from ease.commands.report import report_run
from ease.commands.train import TrainSummary, train_run
from ease.config import Config, override, validate
from ease.console import duration, errors, labelled, megabytes, print_left_out, rounds_bar, status, table
from ease.data.config import count_listed
from ease.measures.alignment import alignment_residual
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.requests.request import Request
from ease.runs.answers import answer_of, default_method, open_world, trained_of
from ease.runs.config import RunConfig
from ease.runs.evaluation import evaluation_sets, measure, similarities
from ease.runs.records import ContributionNotes, Metrics
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import sha256
from ease.studies.scenarios import Scenario, scenario_config, scenario_request
from ease.trainers import trainer_of

TRAFFIC = ("cost/bytes_down", "cost/bytes_up")
CLOSED_FORM = "closed form"
"""A model whose head is solved from sums, in tables."""
SAME = 1.0
"""Points of test R@1 below which the closed form counts as good enough: galleries and seeds differ by as much."""
SHARED_TRAINING = ("history", "secure", "quorum", "deadline")
"""Settings of training that a closed-form head has as well."""


def closed_form(config: RunConfig) -> RunConfig:
    """The same run with a closed-form head on frozen towers."""
    values = config.model_dump(mode="json")
    values["model"] |= {"projector": "closed_form", "lora": "off", "adapter": None}
    values["training"] = {name: values["training"][name] for name in SHARED_TRAINING if name in values["training"]}
    return validate(RunConfig, values, "the same run with a closed-form head")


def trained_by_fedavg(config: RunConfig) -> RunConfig:
    """The same run with a model that is trained in rounds; one with projectors if it has a closed-form head."""
    if trainer_of(config.model) == "fedavg":
        return config
    values = config.model_dump(mode="json")
    values["model"]["projector"] = "mlp"
    values["training"] = {name: values["training"][name] for name in SHARED_TRAINING if name in values["training"]}
    values["training"].pop("secure", None)
    return validate(RunConfig, values, "the same run with projectors")


def smaller(config: RunConfig, pairs: int) -> RunConfig:
    """The same run on about so many images, if it has more."""
    if config.data.name == "scenes":
        size: list[str] = [f"data.train={pairs}"] if config.data.train > pairs else []
    else:
        listed = count_listed(config.data)
        size = [f"data.share={config.data.share * pairs / listed:.4g}"] if listed > pairs else []
    return validate(RunConfig, override(config.model_dump(mode="json"), size), "--pairs") if size else config


def model_words(config: RunConfig) -> str:
    """A model in few words."""
    if trainer_of(config.model) == "sums":
        return CLOSED_FORM
    parts = ["projectors"] if config.model.projector == "mlp" else []
    return " and ".join(parts + (["adapters"] if config.model.lora != "off" else []))


class Trial(Config):
    """One model of `ease compare`: its training and one request."""

    model: str
    method: str
    """The method that forgot."""
    trained: Metrics
    """Recall before the request, and the cost of training."""
    forgotten: Metrics
    """Recall after the request, and the cost of forgetting."""
    identical: bool | None = None
    """Whether the result is the file that retraining gives. Null if the model was not retrained."""

    def column(self) -> list[str]:
        recalls = " / ".join(f"{self.trained[f'test/recall@{k}']:.1f}" for k in (1, 5, 10))
        forget = " → ".join(f"{each['forget/recall@1']:.1f}" for each in (self.trained, self.forgotten))
        return [recalls, forget, self.method, *map(_price, (self.trained, self.forgotten))]


def _price(metrics: Mapping[str, float]) -> str:
    return f"{duration(metrics['cost/seconds'])}, {megabytes(int(sum(metrics[key] for key in TRAFFIC)))}"


class CompareSummary(Config):
    """`ease compare`: a closed-form head and a model that is trained in rounds."""

    request: str
    """Kind of request."""
    exact: Trial
    """The closed-form head."""
    trained: Trial
    """The configured model."""
    gap: float
    """Test R@1 of the closed form minus that of the other model, in points."""
    advice: str
    """Which of them to train."""

    @classmethod
    def of(cls, request: str, exact: Trial, trained: Trial) -> "CompareSummary":
        key = "test/recall@1"
        gap = exact.trained[key] - trained.trained[key]
        found = f"The closed form has {abs(gap):.1f} points of test R@1 {'more' if gap >= 0 else 'less'} than "
        if gap >= -SAME:
            advice = (
                f"{found}{trained.model}. Train it, with --set model.projector=closed_form --set model.lora=off: its "
                "results are identical to retraining"
            )
        else:
            advice = (
                f"{found}{trained.model}. If these points matter, train {trained.model} and audit each result with "
                "`ease audit`"
            )
        return cls(request=request, exact=exact, trained=trained, gap=round(gap, 4), advice=advice)

    def render(self) -> Iterator[RenderableType]:
        names = ["test R@1 / 5 / 10", "forget R@1, before → after", "forgotten by", "training", "forgetting"]
        yield table(
            f"{self.request} request: recall in percent, galleries of {self.exact.trained['gallery']:.0f} pairs",
            ["", self.exact.model, self.trained.model],
            [list(row) for row in zip(names, self.exact.column(), self.trained.column(), strict=True)],
            caption="Time, and bytes in both directions. One seed: a point or two of recall is chance.",
        )
        if self.exact.identical:
            yield "The result of the closed form is the file that retraining gives: both were made and compared"
        yield self.advice


def try_model(config: RunConfig, folder: Path, scenario: Scenario, quiet: bool) -> Trial:
    """Train a model and answer one request by the usual method of its kind."""
    run, world, cost = train_only(config, folder, quiet)
    request, method = scenario_request(world, scenario, config.seed), default_method(run)
    answer(run, world, request, method, quiet)
    before = measure(world, trained_of(run).final, evaluation_sets(world, request))
    after = answer_of(run, request, method).record().metrics
    identical = same_as_retrained(run, world, request, method, quiet) if trainer_of(config.model) == "sums" else None
    return Trial(
        model=model_words(config), method=method.name, trained={**before, **cost}, forgotten=after, identical=identical
    )


def train_only(config: RunConfig, folder: Path, quiet: bool) -> tuple[Run, World, dict[str, float]]:
    """Train and measure nothing but what it costs; preparing the features is not part of that."""
    run = Run.create(folder, config)
    with status("preparing data and backbone", quiet):
        world = open_world(run)
    started = time.perf_counter()
    with rounds_bar("training", config.training.rounds, run.history.rounds(), quiet) as bar:
        for finished in run.train(world):
            bar.step()
            print_left_out(f"round {finished.number}", finished.rejected, quiet)
    return run, world, {**traffic(run), "cost/seconds": time.perf_counter() - started}


def same_as_retrained(run: Run, world: World, request: Request, method: Unlearner, quiet: bool) -> bool:
    """Whether a result is the file that retraining gives."""
    retrain = make_method("retrain")
    answer(run, world, request, retrain, quiet)
    return sha256(answer_of(run, request, method).model_path) == sha256(answer_of(run, request, retrain).model_path)


def compare_run(config: RunConfig, scenario: Scenario, folder: Path, pairs: int, quiet: bool) -> CompareSummary:
    """Train both models on about so many images, forget the same kind of request, and set them side by side."""
    config = scenario_config(smaller(config, pairs), scenario)
    exact = try_model(closed_form(config), folder / "exact", scenario, quiet)
    other = try_model(trained_by_fedavg(config), folder / "trained", scenario, quiet)
    return CompareSummary.of(scenario, exact, other)


# --- the demonstration ---


class DemoRow(Config):
    """One model of a demonstration."""

    scenario: str
    """Kind of request."""
    seed: int
    model: str
    """The trained model: `projectors and adapters`, `projectors`, `adapters` or `closed form`."""
    method: str
    """`trained` is the model before the request."""
    metrics: Metrics


class DemoSummary(Config):
    """`ease demo`: several methods on one request, for each model with retraining as the reference."""

    training: TrainSummary
    rows: tuple[DemoRow, ...]
    contribution: ContributionNotes | None
    """What `ease` subtracted."""
    page: Path
    """The page of the run."""

    def render(self) -> Iterator[RenderableType]:
        yield from self.training.render()
        if self.contribution is not None:
            yield contribution_line(self.contribution)
        retrained = {row.model: row.metrics for row in self.rows if row.method == "retrain"}
        first = self.rows[0]
        yield table(
            f"{first.scenario} request, seed {first.seed}: recall in percent, galleries of "
            f"{first.metrics['gallery']:.0f} pairs",
            ["", "forget R@1", "R@10", "retain R@1", "test R@1", "gap", "rho", "bytes", "time"],
            [_comparison_row(row, retrained[row.model], retrained[first.model]) for row in self.rows],
            caption="The aim is retrain's row, not zero: a model partly guesses pairs that it never saw.\n"
            "gap: forget R@1 minus retrain's. rho: 0 equals retrain, 1 the trained model.\n"
            "bytes, time: share of the first retrain's.\n"
            "*: a head solved from sums, for which forgetting is retraining (docs/exact.md).",
        )
        yield labelled("audit", f"ease audit {self.training.run} --request REQUEST/ease")
        yield labelled("page", str(self.page))


def _comparison_row(row: DemoRow, retrain: Metrics, most: Metrics) -> list[str]:
    """A model's figures beside retraining of its kind; what it cost is a share of `most`."""
    metrics, method = row.metrics, row.method
    keys = ("forget/recall@1", "forget/recall@10", "retain/recall@1", "test/recall@1")
    recalls = [f"{metrics[key]:.1f}" for key in keys]
    gap = "" if method == "retrain" else f"{metrics['forget/recall@1'] - retrain['forget/recall@1']:+.1f}"
    name = f"{method}*" if row.model == CLOSED_FORM else method
    if method == "trained":
        return [name, *recalls, gap, f"{metrics['rho']:.2f}", "", ""]
    bytes_share = sum(metrics[key] for key in TRAFFIC) / sum(most[key] for key in TRAFFIC)
    time_share = metrics["cost/seconds"] / most["cost/seconds"]
    return [name, *recalls, gap, f"{metrics['rho']:.2f}", f"{bytes_share:.0%}", f"{time_share:.0%}"]


def demo_run(config: RunConfig, scenario: Scenario, out: Path, quiet: bool) -> DemoSummary:
    """Train, forget in several ways, and set them beside a closed-form head, whose answer is exact."""
    config = scenario_config(config, scenario)
    if not quiet:  # at once, also in a pipe, where no bar is drawn while the data are prepared
        errors.print(f"training in {out}, then forgetting in four ways", soft_wrap=True, markup=False)
    trained = train_run(config, out, quiet)
    run = Run.load(out)
    with status("preparing the request", quiet):
        world = open_world(run)
    methods = [make_method(name) for name in ("retrain", "finetune", "ease")]
    rows = compared(run, world, scenario, methods, quiet)
    if trainer_of(config.model) == "fedavg":
        exact = train_only(closed_form(config), out.with_name(f"{out.name}-exact"), quiet)
        rows += compared(exact[0], exact[1], scenario, [make_method(name) for name in ("retrain", "exact")], quiet)
    ease = answer_of(run, scenario_request(world, scenario, config.seed), make_method("ease"))
    page = report_run(out, None, None, quiet).path
    return DemoSummary(training=trained, rows=tuple(rows), contribution=ease.record().contribution, page=page)


def compared(run: Run, world: World, scenario: Scenario, methods: Sequence[Unlearner], quiet: bool) -> list[DemoRow]:
    """One request answered by several methods, retraining among them: a row for each, and one for the trained model."""
    request = scenario_request(world, scenario, run.config.seed)
    trained = trained_of(run)
    sets = evaluation_sets(world, request)
    for method in methods:
        answer(run, world, request, method, quiet)
    answers = {method: answer_of(run, request, method) for method in methods}
    reference = next(stored for method, stored in answers.items() if method.name == "retrain")
    before = similarities(world, trained.final, sets["forget"])
    goal = similarities(world, reference.model(), sets["forget"])

    def row(method: str, metrics: Metrics) -> DemoRow:
        kind = model_words(run.config)
        return DemoRow(scenario=scenario, seed=run.config.seed, model=kind, method=method, metrics=metrics)

    rows = [row("trained", {**measure(world, trained.final, sets), **traffic(run), "cost/seconds": 0.0, "rho": 1.0})]
    for method, stored in answers.items():
        rho = alignment_residual(similarities(world, stored.model(), sets["forget"]), before, goal)
        rows.append(row(method.name, {**stored.record().metrics, "rho": rho}))
    return rows


def traffic(run: Run) -> dict[str, float]:
    """Bytes of a whole training, each way."""
    records = [run.history.record(number) for number in range(1, run.config.training.rounds + 1)]
    return {f"cost/{key}": sum(getattr(record, key) for record in records) for key in ("bytes_down", "bytes_up")}
