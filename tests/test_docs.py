"""What the documents name exists, where they point is something, and what they show runs."""

import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from pydantic import BaseModel

from ease import api
from ease.cli import commands
from ease.cli.registry import DEFAULTS
from ease.config import validate
from ease.data.rows import Row
from ease.errors import UserError
from ease.operations.ledger.policy import Policy
from ease.requests.request import ClientRequest
from ease.runs.answers import answer_of, trained_of
from ease.runs.config import RunConfig, load_config
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.studies.experiment import Experiment, load_experiment, plan

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
NAMES = re.findall(r"`(ease\.[\w.]+)`", (ROOT / "docs" / "notation.md").read_text())
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)(?: \"\w+\")?\)")

every_page = pytest.mark.parametrize("page", [pytest.param(path, id=path.name) for path in PAGES])


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [text for kind, text in BLOCK.findall((ROOT / page).read_text()) if kind == language]


def anchors(text: str) -> set[str]:
    """The names under which a page's headings can be linked to: small letters, hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def module_of(code: str, path: Path) -> ModuleType:
    """A block imported from a file, as a reader would save it: field descriptions are read from the source."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block_that_says(words: str) -> str:
    return next(code for code in blocks("docs/howto.md", "python") if words in code)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_notation_table_can_be_imported(name: str) -> None:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[cut:]:
        fields = found.model_fields if isinstance(found, type) and issubclass(found, BaseModel) else {}
        known = {**getattr(found, "__annotations__", {}), **fields}
        assert hasattr(found, part) or part in known, f"{name}: {part} is not there"
        found = getattr(found, part, None)


def test_the_page_of_the_interface_names_every_public_method() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for kind in (api.TrainedRun, api.Answer, api.DryRun, api.Check, api.Verdict):
        public = {name for name in dir(kind) if not name.startswith("_")} - {"line"}
        assert {name for name in public if not re.search(rf"`{name}\b", page)} == set(), kind


def test_readme_starts_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().splitlines()[:8]
    assert any(line.startswith("make demo") for line in head) and any(line.startswith("make test") for line in head)


def test_shipped_configurations_are_valid() -> None:
    assert load_config(ROOT / "configs" / "scenes.toml") == RunConfig()
    assert load_config(ROOT / "configs" / "flickr8k.toml").model.backbone == "photos"
    for name in ("flickr8k-vit", "flickr8k-adapters"):
        assert load_config(ROOT / "configs" / f"{name}.toml").model.backbone == "photos-vit"


@every_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    """The file exists, and so does the heading after a `#`."""
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page.name}: {link}"


def test_the_tests_that_are_said_to_try_a_fault_are_there() -> None:
    rows = re.findall(r"^\| \d+ \|.*", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 20
    for row in rows:
        named = re.findall(r"`([a-z/_]+\.py) -k (\w+)`", row)
        assert named, row
        for file, word in named:
            tests = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE)
            assert any(word in name for name in tests), (file, word)


def test_the_index_names_every_page() -> None:
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} <= listed


@every_page
def test_shown_commands_have_the_options_they_are_shown_with(page: Path) -> None:
    """`ease COMMAND ... --option` in a block without a language, up to a comment or a pipe."""
    known_commands = commands()
    lines = [line for kind, text in BLOCK.findall(page.read_text()) if not kind for line in text.splitlines()]
    for line in (line for line in lines if re.match(r"ease [a-z]", line)):
        words = shlex.split(re.split(r" > | \| ", line)[0], comments=True)
        called = (" ".join(words[1:3]), words[1], f"{words[1]} {DEFAULTS.get(words[1])}")
        command = next((known_commands[name] for name in called if name in known_commands), None)
        assert command is not None, line
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line


REPRODUCE = (ROOT / "docs" / "reproduce.md").read_text()
SHOWN = [line for text in blocks("docs/reproduce.md", "") for line in text.splitlines()]


def test_every_experiment_is_on_the_page_that_reproduces_the_paper() -> None:
    """By name in a table of exhibits, and as a command, `stream` with its benchmark; every file named there exists."""
    files = {path.stem for path in ROOT.glob("experiments/*.toml")}
    cells = [cell for line in REPRODUCE.splitlines() if line.startswith("|") for cell in line.split("|")[3:6]]
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell)} & files
    run = set(re.findall(r"experiments/([\w-]+)\.toml", REPRODUCE))
    streams = {name for name in files if name.startswith("stream")}
    assert run == files - streams and named == files - streams
    assert all(f"`{name}`" in REPRODUCE for name in streams)


def test_every_exhibit_of_the_paper_is_on_its_page() -> None:
    """Twelve tables, the third its notation; ten figures, the first and fourth drawings."""
    rows = [line.split("|")[1] for line in REPRODUCE.splitlines() if re.match(r"\| (Table|Figure)s? ", line)]
    tables = {int(n) for row in rows if "Table" in row for n in re.findall(r"\d+", row)}
    figures = {int(n) for row in rows if "Figure" in row for n in re.findall(r"\d+", row)}
    assert tables == set(range(1, 13)) - {3} and figures == set(range(2, 11)) - {4}


@pytest.mark.parametrize("line", SHOWN)
def test_commands_that_reproduce_the_paper_can_be_parsed(line: str, tmp_path: Path) -> None:
    """With their settings, in full and with `--quick`; the data may be absent."""
    program, command, *words = shlex.split(line)
    if program == "python":
        assert (ROOT / command).is_file()
        return
    assert (program, command) == ("ease", "bench")
    parsed = commands()["bench"].make_context("bench", words).params
    for quick in (False, True):
        path = ROOT / parsed["experiment"]
        settings = () if quick else tuple(parsed["settings"])
        assert plan(load_experiment(path, settings, quick=quick), tmp_path)


@every_page
def test_shown_settings_are_valid(page: Path) -> None:
    """A block with a title is an experiment, one of a policy is that, any other a run; its data may be absent."""
    for text in blocks(str(page.relative_to(ROOT)), "toml"):
        table = tomllib.loads(text)
        if "title" in table:
            for name in ("tuned", "base"):  # paths from the folder of experiments
                table.pop(name, None)
            validate(Experiment, table, page.name)
        elif table.keys() <= Policy.model_fields.keys():
            validate(Policy, table, page.name)
        else:
            validate(RunConfig, table, page.name)


def test_the_worked_method_runs(tmp_path: Path, world, poison) -> None:
    """The first state lies where its setting says; the forget pairs are never read, as its empty `needs` promises."""
    kind = module_of(block_that_says("class Shrink"), tmp_path / "shrink.py").Shrink
    assert all(field.description for key, field in kind.model_fields.items() if key != "method")
    run = Run.create(tmp_path / "run", world.config)
    list(run.train(world))
    request, method, trained = ClientRequest(clients=(1,)), kind(keep=0.25), trained_of(run)
    steps = [step for step, _ in forget(run, world, request, method, observe=False)]
    assert len(steps) == method.rounds(trained.training, request)
    for name, first in steps[0].state.tensors.items():
        start, end = trained.initial[name], trained.final[name]
        torch.testing.assert_close(first, 0.75 * start + 0.25 * end)
    assert answer_of(run, request, method).done
    blind = list(method.unlearn(trained, request, poison(world, request)))
    for name, tensor in steps[-1].state.tensors.items():
        assert torch.equal(blind[-1].state[name], tensor)


def test_the_worked_layout_reads_a_file(tmp_path: Path) -> None:
    """Two captions of one picture are two rows with one id; a line without a tab is refused by its number."""
    read = module_of(block_that_says("def tabs_rows"), tmp_path / "tabs.py").tabs_rows
    Image.new("RGB", (20, 20)).save(tmp_path / "lake.png")
    table = tmp_path / "captions.tsv"
    table.write_text("lake.png\ta lake\nlake.png\twater and hills\n")
    expected = [
        Row("lake", tmp_path / "lake.png", (caption,), None, f"{table}:{number}")
        for number, caption in ((1, "a lake"), (2, "water and hills"))
    ]
    assert list(read(table)) == expected
    table.write_text("lake.png a lake\n")
    with pytest.raises(UserError, match=r"captions\.tsv:1: no tab"):
        list(read(table))
