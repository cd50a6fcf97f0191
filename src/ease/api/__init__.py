"""The whole job from Python, as short as on the command line: train, forget, audit.

Examples:
    >>> import ease
    >>> run = ease.train(out="runs/first", settings=small, quiet=True)
    >>> answer = run.forget(client=1, quiet=True)
    >>> answer.name
    'client-1/ease'
    >>> answer.metrics["cost/bytes_up"] < run.metrics["cost/bytes_up"]
    True

`small` means settings such as `{"training.rounds": 2}`; without any, the defaults take a minute.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

from torch import Tensor

from ease.audit.config import AuditConfig
from ease.audit.membership import Estimate
from ease.audit.records import PairRecord
from ease.audit.verdict import Measure, Reason
from ease.commands.audit import AuditSummary, QuickSummary, audit_run, quick_run
from ease.commands.export import export_run
from ease.commands.forget import ForgetSummary, forget_run, summary_of
from ease.commands.preview import Preview, preview_run
from ease.commands.report import report_run
from ease.commands.train import TrainSummary, train_run
from ease.config import assign, read_toml, validate
from ease.data.membership import Membership
from ease.errors import UserError
from ease.methods import make_method
from ease.methods.base import Unlearner
from ease.params import Params
from ease.runs import using
from ease.runs.answers import StoredAnswer, finished_answers, open_world, trained_of
from ease.runs.config import RunConfig, anchor_paths
from ease.runs.resolve import RequestOptions, find_clients, request_id
from ease.runs.run import Run
from ease.runs.using import Hit, Picture, Source, forgotten_ids
from ease.runs.world import World
from ease.show.notebook import Shows


class _Uses:
    """What any model can be used for. It is loaded once, on the CPU, when it is first asked for."""

    folder: Path

    @property
    def _request(self) -> str | None:
        """As `ease export --request` takes it; None: the run's own model."""
        return None

    @cached_property
    def _source(self) -> Source:
        return Source.of(Run.load(self.folder), self._request)

    @cached_property
    def _world(self) -> World:
        return open_world(Run.load(self.folder))

    def encode_text(self, texts: str | Sequence[str]) -> Tensor:
        """Unit-norm embeddings [n, width], one for each text."""
        return using.encode_text(self._source, texts)

    def encode_image(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """Unit-norm embeddings [n, width] of files, pictures of Pillow or uint8 arrays [height, width, 3]."""
        return using.encode_image(self._source, pictures)

    def classify(self, pictures: Picture | Sequence[Picture], labels: Sequence[str]) -> Tensor:
        """Zero-shot: the probability [n, labels] of each label, such as "a photo of a dog", for each picture."""
        return using.classify(self._source, pictures, labels)

    def search(self, words: str, k: int = 5, among: Literal["all", "train", "test"] = "all") -> list[Hit]:
        """The k pictures of the run's pairs that are nearest to some words: `search("a dog in the snow")[0].id`."""
        return using.search(self._world, self._source, words, k, self._forgotten, among)

    @property
    def _forgotten(self) -> frozenset[str]:
        return frozenset()

    def export(
        self,
        out: str | Path | None = None,
        form: Literal["safetensors", "peft", "onnx"] = "safetensors",
        quiet: bool = True,
    ) -> Path:
        """Write the model as a folder that runs by itself, and return its path. Its README explains its use."""
        folder = None if out is None else Path(out)
        return export_run(self.folder, self._request, form, folder, quiet).folder


@dataclass(frozen=True, repr=False)
class TrainedRun(_Uses, Shows):
    """A finished training in its folder. `print` shows what `ease train` ends with, a notebook its tables."""

    folder: Path
    summary: TrainSummary = field(compare=False)

    @property
    def line(self) -> str:
        """Folder, rounds and recall.

        Examples:
            >>> run
            <TrainedRun runs/first: 2 rounds, test R@1 ...>
        """
        return f"{self.folder}: {self.summary.rounds} rounds, test R@1 {self.metrics['test/recall@1']:.1f}"

    @property
    def config(self) -> RunConfig:
        """What it was trained with.

        Examples:
            >>> run.config.training.rounds
            2
        """
        return Run.load(self.folder).config

    @property
    def model(self) -> Params:
        """The trained state: a mapping from names to tensors.

        Examples:
            >>> run.model.is_finite()
            True
        """
        return trained_of(Run.load(self.folder)).final

    @property
    def metrics(self) -> dict[str, float]:
        """Recall in percent of seen, held-out and test pairs, and bytes that travelled.

        Examples:
            >>> 0 <= run.metrics["test/recall@1"] <= 100
            True
        """
        return self.summary.metrics

    @property
    def clients(self) -> dict[str, int]:
        """Every client as `forget(client=...)` takes it, and how many training pairs it has."""
        return {self._members.named(each.client): len(each.train_ids) for each in self._members.clients}

    def ids(self, client: int | str | None = None) -> list[str]:
        """Ids of the training pairs, of one client or of all, as `forget(samples=...)` takes them."""
        chosen = None if client is None else find_clients(self._members, [client])[0]
        return [
            pair_id
            for holding in self._members.clients
            if chosen is None or holding.client == chosen
            for pair_id in holding.train_ids
        ]

    @property
    def requests(self) -> list[str]:
        """Every finished answer, as `answer(...)` and `ease audit --request` take it."""
        return finished_answers(Run.load(self.folder))

    def answer(self, name: str) -> "Answer":
        """An answer that was given before, such as "client-3" or "client-3/retrain"."""
        return Answer(self.folder, summary_of(self.folder, name))

    @property
    def _members(self) -> Membership:
        known = Run.load(self.folder).known()
        if known is None:
            raise UserError(f"{self.folder}: nothing is trained here yet; finish it with `ease train`")
        return known[0]

    def report(self, out: str | Path | None = None, thumbnails: bool | None = None, quiet: bool = True) -> Path:
        """Write the page of all answers, and say where."""
        return report_run(self.folder, None if out is None else Path(out), thumbnails, quiet).path

    def forget(
        self,
        *,
        client: int | str | Sequence[int | str] = (),
        concept: str | Sequence[str] = (),
        samples: Path | Sequence[str] = (),
        name: str = "",
        threshold: float | None = None,
        unless: str | Sequence[str] = (),
        class_: int | Sequence[int] = (),
        method: str = "",
        settings: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> "Answer":
        """Forget clients, concepts (words for what is in a pair), pseudo-classes, or single pairs by their ids.

        Several of these are one request. `unless` are phrases in which the words of concepts do not count.

        Examples:
            >>> run.forget(client=1, method="finetune", quiet=True).name
            'client-1/finetune'

        A client is its number or the name of its site, or a list of such; `samples` are ids, or a file with one a line.
        Ambiguous arguments are refused by name:

        Examples:
            >>> run.forget(samples="train-000003")
            Traceback (most recent call last):
                ...
            ease.errors.UserError: samples='train-000003': one text is not a list; write samples=['train-000003']
        """
        wanted = self._wanted(client, concept, samples, name, threshold, unless, class_)
        return Answer(self.folder, forget_run(self.folder, wanted, _unlearner(method, settings), quiet))

    def preview(
        self,
        *,
        client: int | str | Sequence[int | str] = (),
        concept: str | Sequence[str] = (),
        samples: Path | Sequence[str] = (),
        name: str = "",
        threshold: float | None = None,
        unless: str | Sequence[str] = (),
        class_: int | Sequence[int] = (),
        method: str = "",
        settings: Mapping[str, Any] | None = None,
        quiet: bool = True,
    ) -> "DryRun":
        """What `forget` would forget: whose pairs, what almost fitted, what it would cost. Nothing is forgotten.

        Examples:
            >>> len(run.preview(client=1).ids)
            14
        """
        wanted = self._wanted(client, concept, samples, name, threshold, unless, class_)
        return DryRun(preview_run(self.folder, wanted, _unlearner(method, settings), quiet))

    def _wanted(
        self,
        client: int | str | Sequence[int | str],
        concept: str | Sequence[str],
        samples: Path | Sequence[str],
        name: str,
        threshold: float | None,
        unless: str | Sequence[str],
        class_: int | Sequence[int],
    ) -> RequestOptions:
        """The request, as the command line would describe it."""
        clients, concepts, ids = _clients(client, self.folder), _words(concept), _ids(samples)
        return RequestOptions(
            clients,
            _classes(class_),
            concepts,
            ids or None,
            name=name,
            threshold=threshold,
            unless=[unless] if isinstance(unless, str) else _texts("unless", unless, 'unless="hot dog"'),
        )


@dataclass(frozen=True, repr=False)
class DryRun(Shows):
    """A request before anything is done for it. `print` shows what `ease forget --dry-run` prints."""

    summary: Preview = field(compare=False)

    @property
    def line(self) -> str:
        """Whose pairs would be forgotten, and the cost."""
        return self.summary.line()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the pairs that would be forgotten, as `forget(samples=...)` takes them."""
        return self.summary.ids

    @property
    def files(self) -> tuple[Path, ...]:
        """The list of ids and the sheet of pictures."""
        return self.summary.files


@dataclass(frozen=True, repr=False)
class Answer(_Uses, Shows):
    """One method's result for one request. `print` shows what `ease forget` ends with, a notebook its tables."""

    run: Path
    summary: ForgetSummary = field(compare=False)

    @property
    def line(self) -> str:
        """Run, name and recall."""
        recalls = [
            f"{part} {self.metrics[f'{part}/recall@1']:.1f}"
            for part in ("forget", "retain", "test")
            if f"{part}/recall@1" in self.metrics
        ]
        return f"{self.name} of {self.run}: R@1 {', '.join(recalls)}"

    @property
    def folder(self) -> Path:  # type: ignore[override]
        """The run."""
        return self.run

    @property
    def _request(self) -> str:
        return self.name

    @property
    def ids(self) -> list[str]:
        """Ids of the pairs that it forgot."""
        return sorted(self._forgotten)

    @cached_property
    def _forgotten(self) -> frozenset[str]:
        return forgotten_ids(Run.load(self.run), self.name)

    @cached_property
    def _world(self) -> World:
        """As it was when the request was answered: what it forgot is looked for, too."""
        return open_world(Run.load(self.run), self.summary.request)

    def report(self, out: str | Path | None = None, thumbnails: bool | None = None, quiet: bool = True) -> Path:
        """Write the page of its request, and say where."""
        return report_run(self.summary.folder.parent, None if out is None else Path(out), thumbnails, quiet).path

    @property
    def name(self) -> str:
        """As `ease audit --request` takes it.

        Examples:
            >>> answer.name
            'client-1/ease'
        """
        return f"{request_id(self.summary.request)}/{self.summary.folder.name}"

    @property
    def model(self) -> Params:
        """The state that has forgotten.

        Examples:
            >>> answer.model.size == run.model.size
            True
        """
        return StoredAnswer(self.summary.folder).model()

    @property
    def metrics(self) -> dict[str, float]:
        """Recall in percent of forget, retained and test pairs, and what the answer cost.

        Examples:
            >>> sorted(name for name in answer.metrics if name.endswith("recall@1"))
            ['forget/recall@1', 'retain/recall@1', 'test/recall@1']
        """
        return self.summary.metrics

    def check(self, *, quiet: bool = False) -> "Check":
        """The quick check: are forget pairs memorised like unseen ones? It takes seconds and is not a verdict.

        Examples:
            >>> check = answer.check(quiet=True)
            >>> check.found == (not check.gap.contains(0))
            True
        """
        return Check(quick_run(self.run, self.name, quiet))

    def audit(self, *, retrain: bool = True, quiet: bool = False, **settings: Any) -> "Verdict":
        """Is it really forgotten? Settings are those of `ease audit`, such as `shadows=16`.

        `answer.audit().passed` is True, False or, if it is inconclusive, None; `.words` says why. It takes minutes,
        for it retrains. A setting that there is none of is refused before that:

        Examples:
            >>> answer.audit(shadow=16)
            Traceback (most recent call last):
                ...
            ease.errors.UserError: audit: shadow: unknown key (did you mean shadows?); known keys here: attack, fpr, ...

        One process by default: more of them would run a script that has no `if __name__ == "__main__"` once each.
        """
        config = validate(AuditConfig, {"workers": 1, **settings}, "audit")
        return Verdict(audit_run(self.run, self.name, config, retrain, quiet))


@dataclass(frozen=True, repr=False)
class Check(Shows):
    """Result of the quick check. This is not a verdict."""

    summary: QuickSummary = field(compare=False)

    @property
    def line(self) -> str:
        """The result in one sentence."""
        return self.words

    @property
    def found(self) -> bool:
        """Whether forget pairs are distinguishable from unseen ones, in either direction."""
        return self.summary.found

    @property
    def words(self) -> str:
        return self.summary.words

    @property
    def gap(self) -> Estimate:
        """Difference of forget pairs and similar held-out pairs, in log-odds."""
        return self.summary.after.gap


@dataclass(frozen=True, repr=False)
class Verdict(Shows):
    """What an audit found."""

    summary: AuditSummary = field(compare=False)

    @property
    def line(self) -> str:
        """Whether it passed, and why."""
        passed = {True: "passed", False: "not passed", None: "inconclusive"}[self.passed]
        return f"{self.summary.id}: {passed} ({self.reason.value})"

    @property
    def passed(self) -> bool | None:
        """Whether the result is indistinguishable from another retraining; None: inconclusive."""
        return self.summary.verdict.passed

    @property
    def reason(self) -> Reason:
        """Why."""
        return self.summary.verdict.reason

    @property
    def p_value(self) -> float | None:
        """How often another retraining would be as far from the others; None with too few of them."""
        joint = self.summary.verdict.joint
        return None if joint is None else joint.p_value

    @property
    def words(self) -> str:
        """The verdict in one sentence, as the command and the page say it."""
        return self.summary.verdict.words

    @property
    def next_steps(self) -> tuple[str, ...]:
        """Next commands if it did not pass, and their expected costs."""
        return self.summary.next_steps

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self.summary.verdict.measures

    @property
    def pairs(self) -> tuple[PairRecord, ...]:
        """For a request of few pairs: the rank of each before, after and under every retraining."""
        return self.summary.pairs


def train(
    config: RunConfig | str | Path | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> TrainedRun:
    """Train from a configuration, a TOML file or the defaults; `settings` such as {"training.rounds": 5} change it.

    Without `out` the run goes to a new temporary folder. An existing run of the same configuration is continued:

    Examples:
        >>> ease.train(out="runs/first", settings=small, quiet=True) == run
        True

    All settings: docs/settings.md. One that cannot be is refused:

    Examples:
        >>> ease.train(settings={"training.round": 5})
        Traceback (most recent call last):
            ...
        ease.errors.UserError: settings: training.round: unknown key (did you mean rounds?); known keys here: ...
    """
    if config is not None and not isinstance(config, RunConfig | str | Path):
        raise UserError(f"config={config!r}: name a TOML file, or give a RunConfig; single values go into settings")
    if isinstance(config, RunConfig):
        table, source = config.model_dump(mode="json"), "settings"
    elif config is None:
        table, source = {}, "settings"
    else:
        table, source = anchor_paths(read_toml(Path(config)), Path(config).parent), str(config)
    table = anchor_paths(assign(table, checked_settings(settings)), Path.cwd())
    config = validate(RunConfig, table, source)
    folder = Path(out) if out is not None else Path(mkdtemp(prefix="ease-")) / "run"
    return TrainedRun(folder, train_run(config, folder, quiet))


def open_run(folder: str | Path, quiet: bool = True) -> TrainedRun:
    """A run that was trained before; one that was interrupted is finished.

    Examples:
        >>> ease.open_run("runs/first") == run
        True
    """
    run = Run.load(Path(folder))
    return TrainedRun(run.folder, train_run(run.config, run.folder, quiet))


# Arguments given by hand, whose type may be wrong


def _clients(given: object, folder: Path) -> list[int | str]:
    """Clients by number, or by the name of their site."""
    named = [given] if isinstance(given, str | Integral) else _listed("client", given, "client=3 or client=[3, 7]")
    found: list[int | str] = []
    for each in named:
        if isinstance(each, bool) or not isinstance(each, str | Integral):
            raise UserError(f"client={each!r}: no client; write its number or the name of its site, such as client=3")
        if isinstance(each, str) and each.isdecimal() and each not in _sites(folder):
            raise UserError(f"client={each!r}: a number in quotes, and no site is called so; write client={each}")
        found.append(each if isinstance(each, str) else int(each))
    return found


def _sites(folder: Path) -> set[str | None]:
    known = Run.load(folder).known()
    return set() if known is None else {holding.name for holding in known[0].clients}


def _words(given: object) -> list[str]:
    example = 'concept="on the beach"'
    return [given] if isinstance(given, str) else _texts("concept", given, example)


def _classes(given: object) -> list[str]:
    """Pseudo-classes by number."""
    found = _listed("class_", [given] if isinstance(given, Integral) else given, "class_=2 or class_=[2, 5]")
    for each in found:
        if isinstance(each, bool) or not isinstance(each, Integral) or int(each) < 0:
            raise UserError(f'class_={each!r}: not the number of a pseudo-class; write class_=2, or concept="words"')
    return [str(int(each)) for each in found]


def _unlearner(method: object, settings: object) -> Unlearner | None:
    """A method by its name and settings; None: the usual one."""
    if not isinstance(method, str):
        raise UserError(f'method={method!r}: name a method, such as method="ease"; `ease methods` lists them')
    return make_method(method or "ease", table=checked_settings(settings)) if method or settings else None


def _ids(given: object) -> Path | list[str]:
    if isinstance(given, Path):
        return given
    if isinstance(given, str):
        raise UserError(f"samples={given!r}: one text is not a list; write samples=[{given!r}]")
    return _texts("samples", given, 'samples=["train-000003"], or a Path of a file with one id a line')


def _texts(name: str, given: object, example: str) -> list[str]:
    found = _listed(name, given, example)
    for each in found:
        if not isinstance(each, str):
            raise UserError(f"{name}={each!r}: not a text; write {example}")
    return found


def _listed(name: str, given: object, example: str) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise UserError(f"{name}={given!r}: cannot be read; write {example}")
    return list(given)


def checked_settings(given: object) -> dict[str, Any]:
    """Settings by name as they were given; None: none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UserError(f"settings={given!r}: write names and values, such as settings={{'training.rounds': 5}}")
    return dict(given)
