"""The references say what is: made from the code, nothing missing, and real files fit the schemas."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from pydantic import BaseModel

from ease import cli
from ease.cli import commands
from ease.commands.audit import EXIT_CODES as VERDICT_CODES
from ease.commands.audit import AuditSummary
from ease.commands.outputs import FILES, OUTPUTS, UNSEALED
from ease.commands.register import OVERDUE, PENDING
from ease.runs.records import Record

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("references", ROOT / "recipes" / "references.py")
assert _spec is not None and _spec.loader is not None
references = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(references)
MADE = references.pages()
HOW = "run: PYTHONPATH=src python recipes/references.py"


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_as_the_code_is(name: str) -> None:
    path = ROOT / "docs" / name
    assert path.is_file() and path.read_text() == MADE[name], f"docs/{name} is stale; {HOW}"


def test_no_schema_is_left_over() -> None:
    assert {path.name for path in (ROOT / "docs" / "schemas").iterdir()} == {
        name.removeprefix("schemas/") for name in MADE if name.startswith("schemas/")
    }, HOW


def test_every_command_has_an_output_and_no_other() -> None:
    lasting = {"server", "up"}  # they end when someone ends them
    assert set(OUTPUTS) == set(commands()) - lasting


def records(kind: type[Record] = Record) -> set[type[Record]]:
    """All kinds of records that this package stores."""
    below = {each for sub in kind.__subclasses__() for each in records(sub)}
    return {each for each in {kind, *below} if each.__module__.startswith("ease.") and "format" in each.__annotations__}


def test_every_stored_record_has_a_schema() -> None:
    assert records() - {Record} <= set(references.kinds())


def settings_of(kind: type[BaseModel], above: str = "") -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= settings_of(field.annotation, f"{above}{name}.")
        else:
            found[above + name] = field.description
    return found


@pytest.mark.parametrize("place", references.PLACES, ids=lambda place: place[0])
def test_every_setting_is_listed_and_explained(place) -> None:
    title, _, kind = place
    section = MADE["settings.md"].split(f"## {title}\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    if title == "Experiments":  # those of training stand above
        assert listed == set(kind.model_fields)
    else:
        assert listed == set(settings_of(kind))
        assert all(settings_of(kind).values()), [name for name, words in settings_of(kind).items() if not words]


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("training.rounds", ("`20`", "whole number, at least 1")),
        ("training.quorum", ("`0.5`", "number, above 0, at most 1")),
        ("training.deadline", ("unset", "number, above 0")),
        ("model.lora_blocks", ("`1`", 'whole number at least 1 or `"all"`')),
        ("partition.scheme", ('`"dirichlet"`', '`"iid"` or `"dirichlet"` or `"uniform"` or `"sites"`')),
        ("data.path", ("unset", "path")),
        ("hold.retain_points", ("`2.0`", "at least 0, at most 100")),
        ("shadows", ("`16`", "whole number, at least 4")),
    ],
)
def test_defaults_and_ranges_are_reported(setting: str, parts: tuple[str, ...]) -> None:
    rows = [row for row in MADE["settings.md"].splitlines() if row.startswith(f"| `{setting}` |")]
    assert any(all(part in row for part in parts) for row in rows), rows


def test_every_exit_code_is_listed() -> None:
    """Exit codes of verdicts, refused certificates, user errors and Ctrl-C; the page lists each."""
    known = {0, cli.REFUTED, cli.USER_ERROR, cli.INTERRUPTED, *VERDICT_CODES.values(), PENDING, OVERDUE}
    assert set(cli.EXIT_CODES) == known
    source = "".join(path.read_text() for path in Path(cli.__file__).parent.glob("*.py"))
    ends = re.findall(r"(?:SystemExit|typer\.Exit)\(([^)]*)\)", source)
    assert set(ends + re.findall(r" code = ([A-Z0-9]\w*)$", source, re.MULTILINE)) == {
        "INTERRUPTED",
        "USER_ERROR",
        "code",
        "code if isinstance(code, int",
        "first.exit_code",
    }
    returned = set(re.findall(r"return (?:summary|audits), (.*)$", source, re.MULTILINE))
    assert returned == {
        "summary.exit_code if exit_code else 0",
        "audits.exit_code if exit_code else 0",
        "summary.exit_code",
        *(
            f"REFUTED if {refuted} else 0"
            for refuted in ("not summary.healthy", "not summary.holds", "isinstance(summary, VerifySummary)")
        ),
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", MADE["exit-codes.md"], re.MULTILINE)} == known


def fits(folder: Path) -> set[str]:
    """Hold every JSON file of a run against its schema; returns the patterns that were met."""
    met = set()
    # The most exact pattern that fits a file speaks of it.
    by_exactness = sorted(FILES, key=lambda pattern: pattern.count("*"))
    seen: set[Path] = set()
    for pattern in by_exactness:
        for path in set(folder.glob(pattern)) - seen:
            seen.add(path)
            met.add(pattern)
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            for text in lines:
                table = json.loads(text)
                assert ("seal" in table) == (pattern not in UNSEALED), path
                reported = {key: value for key, value in table.items() if key != "seal"}
                FILES[pattern].model_validate(reported)
                known = references.schema(FILES[pattern])["properties"]
                assert table.keys() <= known.keys(), f"{path}: {table.keys() - known.keys()}"
    strange = {path for path in folder.rglob("*.json*") if path not in seen and "journal" not in path.parts}
    assert not strange, strange
    return met


def test_the_files_of_a_run_fit(ease, small, tmp_path: Path) -> None:
    run, sets = tmp_path / "run", [word for change in small for word in ("--set", change)]
    held = ("--set", "partition.validation_share=0.3")
    assert ease("train", "--out", run, "--json", *sets, *held).code == 0
    assert ease("forget", run, "--client", 1, "--method", "finetune", "--json").code == 0
    assert ease("audit", run, "--request", "client-1/finetune", "--quick", "--json").code == 0
    assert ease("certificate", run, "--request", "client-1/finetune", "--json").code == 0
    added = json.loads(ease("request", "add", run, "--client", 2, "--method", "finetune", "--approve", "--json").out)
    for word in ("show", "approve", "cancel"):
        ease("request", word, run, added["id"], "--json")
    assert ease("request", "add", run, "--client", 1, "--method", "finetune", "--approve", "--json").code == 0
    assert ease("request", "list", run, "--json").code == 0
    assert ease("work", run, "--json").code == 0
    assert ease("report", run, "--json").code == 0
    assert ease("export", run, "--request", "client-1/finetune", "--json").code == 0
    assert ease("keys", "new", tmp_path / "client.key", "--json").code == 0
    certificate = run / "requests" / "client-1" / "finetune" / "certificate.json"
    signed = ease("certificate", "sign", certificate, "--key", tmp_path / "client.key", "--json")
    assert signed.code == 0, signed
    assert ease("verify", certificate, "--json").code == 0
    assert ease("methods", "--json").code == 0
    shutil.rmtree(run / "exports")  # in the formats of others
    met = fits(run)
    assert {"run.json", "membership.json", "head.json", "evidence/log.jsonl", "requests/*/*/record.json"} <= met
    assert ease("purge", run, "--json").code == 0
    assert {"purge.json", "tombstones.json"} <= fits(run)


def test_a_key_that_the_reference_does_not_know_is_noticed(learnt, tmp_path: Path) -> None:
    shutil.copytree(learnt.run.folder, tmp_path / "run")
    path = tmp_path / "run" / "rounds" / "00001" / "round.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": 1}))
    with pytest.raises((ValueError, AssertionError), match="colour"):
        fits(tmp_path / "run")


@pytest.mark.slow
def test_an_audit_fits(audited) -> None:
    summary = AuditSummary.of(audited.records["finetune"], "client-1/finetune", audited.run.folder)
    printed = json.loads(summary.model_dump_json())
    assert AuditSummary.model_validate(printed) == summary
    assert printed.keys() <= references.schema(AuditSummary)["properties"].keys()
