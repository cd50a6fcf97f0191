"""The architecture holds: imports go one way, so that every layer can be read without those above it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from benchmarks.entered import Entered

import ease
from ease.methods import BUILT_IN

ROOT = Path(ease.__file__).parent
ORDER = (
    "errors",
    "plug_ins",
    "seeding",
    "storage",
    "events",
    "config",
    "params",
    "subspace",
    "console",
    "model",
    "data",
    "requests",
    "federation",
    "trainers",
    "methods",
    "measures",
    "runs",
    "audit",
    "studies",
    "show",
    "operations",
    "commands",
    "testing",
    "api",
    "cli",
    "__main__",
)
"""Each part may import those before it, and no other."""
SHOWS = {"api", "cli", "commands", "data", "show"}
"""Who may talk to the user's screen; `data` shows the progress of long preparations."""
MODULES = sorted(
    path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts != ("__init__.py",)
)


def part_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


@cache
def parsed(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


@cache
def imports(module: Path) -> tuple[str, ...]:
    """Every module that one imports, inside functions too; what only type checkers see is left out."""
    found: list[str] = []
    for node in _running(parsed(module)):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            found += (node.module or "", *(f"{node.module}.{name.name}" for name in node.names))
    return tuple(found)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def ours(module: Path) -> set[str]:
    """The parts of this package that a module imports."""
    return {name.split(".")[1] for name in imports(module) if name.startswith("ease.")}


def test_every_part_has_its_place() -> None:
    assert sorted({part_of(module) for module in MODULES}) == sorted(ORDER)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_down(module: Path) -> None:
    own = part_of(module)
    above = {part for part in ours(module) if part in ORDER and ORDER.index(part) > ORDER.index(own)}
    assert not above, f"{module} imports what lies above it: {', '.join(sorted(above))}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_those_who_show_something_know_the_screen(module: Path) -> None:
    if part_of(module) not in {*SHOWS, "console"}:
        known = [
            name
            for name in imports(module)
            if name.split(".")[0] in ("rich", "typer", "click") or name == "ease.console"
        ]
        assert not known


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_opens_with_its_purpose(module: Path) -> None:
    if module.name != "__init__.py":
        text = ast.get_docstring(parsed(module))
        assert text and text.split("\n\n")[0].endswith("."), module


def test_only_the_command_that_serves_loads_a_web_server() -> None:
    """Others must start without the extra, and without waiting for it."""
    web = {module for module in MODULES if {name.split(".")[0] for name in imports(module)} & {"starlette", "uvicorn"}}
    names = {"ease." + ".".join(module.with_suffix("").parts) for module in web}
    assert names == {f"ease.operations.serving.{name}" for name in ("app", "guard", "metrics", "queue", "server")}
    for module in set(MODULES) - web:
        loaded = {
            f"{node.module}.{name.name}" if node.module == "ease.operations.serving" else node.module
            for node in parsed(module).body
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        assert not names & loaded, module


def loaded_with(name: str) -> set[str]:
    """Every module of ours that is loaded with one: what modules import outside functions, and what those import."""
    names = {"ease." + ".".join(module.with_suffix("").parts).removesuffix(".__init__"): module for module in MODULES}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each in names and each not in found:
            found.add(each)
            parts = each.split(".")
            waiting += (".".join(parts[:cut]) for cut in range(2, len(parts)))
            for node in parsed(names[each]).body:
                if isinstance(node, ast.ImportFrom):
                    waiting += (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
                elif isinstance(node, ast.Import):
                    waiting += (alias.name for alias in node.names)
    return found


def test_forgetting_loads_no_attack_and_only_the_methods_it_may_need() -> None:
    loaded = loaded_with("ease.commands.forget")
    assert {"ease.runs.forget", "ease.methods.retrain", "ease.federation.fedavg"} <= loaded
    assert not {f"ease.audit.{name}" for name in ("attacks", "attack_suite", "bavaria", "shadows", "runner")} & loaded
    methods = {f"ease.methods.{place.partition(':')[0]}" for place in BUILT_IN.values()}
    assert methods & loaded == {"ease.methods.ease.method", "ease.methods.retrain"}


def test_nothing_is_called_by_a_name_that_says_nothing() -> None:
    assert not {"utils", "common", "helpers", "misc"} & {path.stem for path in MODULES}


def test_processes_are_started_in_one_place() -> None:
    """Where Ctrl-C, a dead parent and memory are thought of."""
    assert [module.stem for module in MODULES if "multiprocessing" in imports(module)] == ["workers"]


def test_no_pickle_is_read_or_written() -> None:
    for module in MODULES:
        assert not {"pickle", "joblib", "dill"} & {name.split(".")[0] for name in imports(module)}, module


# --- the pictures of docs/architecture.md ---

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()


def block(heading: str) -> list[str]:
    """The first words of the lines in the picture under a heading."""
    picture = PAGE.split(f"## {heading}\n", 1)[1].split("```\n")[1]
    return [line.split()[0] for line in picture.splitlines() if line.strip()]


def test_the_tree_on_the_page_is_the_order_of_imports() -> None:
    drawn = [name.removesuffix("/") for name in block("Packages")[1:]]
    assert drawn == list(ORDER)
    assert {part_of(module) for module in MODULES if len(module.parts) > 1} == {
        name.removesuffix("/") for name in block("Packages") if name.endswith("/") and name != "src/ease/"
    }


def test_a_request_enters_the_modules_in_the_order_that_is_drawn(ease, small, tmp_path: Path) -> None:
    settings = [part for change in (*small, "model.lora=ffa") for part in ("--set", change)]
    assert ease("train", "--out", tmp_path / "run", *settings, "--quiet").code == 0
    drawn = block("The path of a request")
    seen = Entered()
    with seen.watching():
        result = ease("forget", tmp_path / "run", "--client", 1, "--quiet")
    assert result.code == 0, result.err
    assert [name for name in seen.functions if name in drawn] == drawn
    assert len(seen.modules) <= 80 and seen.between <= 9, "a request takes a longer way through the code than it did"
