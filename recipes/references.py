"""Write the references: every setting, every command, every JSON output and stored file, every exit code and method.

    PYTHONPATH=src python recipes/references.py

They are made from the models and commands themselves; tests/test_references.py says when they are stale.
"""

import argparse
import inspect
import json
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ease.audit.config import AuditConfig
from ease.cli import EXIT_CODES, commands
from ease.commands.methods import methods_page
from ease.commands.outputs import ELSEWHERE, FILES, OUTPUTS, UNSEALED
from ease.methods import METHODS
from ease.operations.ledger.policy import Policy
from ease.runs.config import RunConfig
from ease.storage import write_atomic
from ease.studies.experiment import Experiment

DOCS = Path(__file__).parents[1] / "docs"
MADE = "Made by `recipes/references.py` from the code; do not edit."
SIGNS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "min_length": "at least",
    "max_length": "at most",
}
WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true` or `false`",
    Path: "path",
    dict: "table",
    Any: "any",
}
SETTINGS = f"""# Settings

{MADE}

Write a setting in a TOML file under its section, on the command line as `--set section.key=value`, or in Python as
`settings={{"section.key": value}}`. Values are written as in TOML; bare words are text. Unknown names are refused,
and the error suggests a similar name."""
PLACES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "Runs",
        "`ease train FILE --set ...`, `ease demo --set ...`, `ease.train(settings=...)`. Paths in a file are "
        "relative to its folder, those of `--set` to the current folder.",
        RunConfig,
    ),
    (
        "Audits",
        "Options of `ease audit` and arguments of `answer.audit()`; `level` and `relearn_pairs` are for Python.",
        AuditConfig,
    ),
    ("Queue", "`policy.toml` in a run, and `ease work --set ...`: [requests.md](requests.md).", Policy),
    (
        "Experiments",
        "`ease bench FILE --set ...` and `ease sweep FILE --set ...`: [experiments.md](experiments.md). Settings of "
        "training are under `run`, such as `run.training.rounds`.",
        Experiment,
    ),
)


# Settings


def settings_page() -> str:
    parts = [SETTINGS]
    for title, about, kind in PLACES:
        rows = "\n".join(_row(name, field) for name, field in _settings(kind, kind is Experiment))
        parts.append(f"## {title}\n\n{about}\n\n| setting | default | may be | meaning |\n|---|---|---|---|\n{rows}")
    listed = ", ".join(f"[`{name}`](methods.md#{_anchor(name)})" for name in sorted(METHODS))
    parts.append(f"## Methods\n\n`ease forget RUN --method NAME --set key=value`; settings: {listed}.")
    return "\n\n".join(parts) + "\n"


def _anchor(name: str) -> str:
    title = f"{METHODS[name].title} (`{name}`)".lower()
    return "".join(letter for letter in title if letter.isalnum() or letter in "-_ ").replace(" ", "-")


def _settings(kind: type[BaseModel], shallow: bool = False, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in kind.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and not shallow:
            yield from _settings(section, above=f"{above}{name}.")
        else:
            yield above + name, field


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    return f"| `{name}` | {_default(field)} | {_range(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel):
        return "unset" if value is None else "see above"
    return f"`{json.dumps(value, default=str)}`"


def _range(field: FieldInfo) -> str:
    bounds = [f"{SIGNS[name]} {value}" for each in field.metadata for name, value in _bounds(each)]
    return ", ".join([_kind(field.annotation), *bounds]).replace("|", "\\|")


def _bounds(each: object) -> Iterator[tuple[str, Any]]:
    for name in SIGNS:
        value = getattr(each, name, None)
        if isinstance(each, annotated_types.BaseMetadata) and value is not None:
            yield name, value


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(each) for each in inner if each is not type(None))
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if hasattr(annotation, "__metadata__"):
        found = [
            f"{SIGNS[n]} {v}"
            for m in annotation.__metadata__
            for e in getattr(m, "metadata", [m])
            for n, v in _bounds(e)
        ]
        return " ".join([_kind(inner[0]), *found])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table ({', '.join(annotation.model_fields)})"
    return WORDS[origin or annotation]


# Commands


def commands_page() -> str:
    parts = [f"# Commands\n\n{MADE} `ease COMMAND --help` prints the same."]
    for name, command in sorted(commands().items()):
        parts.append(f"## ease {name}\n\n{_prose(command.help or '')}")
        rows = [
            f"| {_written(each)} | {_given(each)} | {_cell(getattr(each, 'help', ''))} |" for each in command.params
        ]
        parts.append("\n".join(["| | default | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _written(each: click.Parameter) -> str:
    if isinstance(each, click.Argument):
        return f"`{each.metavar or (each.name or '').upper()}`"
    return ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))


def _given(each: click.Parameter) -> str:
    value = each.default
    if each.required:
        return "needed"
    if value is None or value is False or value == [] or callable(value):
        return ""
    return f"`{value.value if isinstance(value, Enum) else json.dumps(value, default=str)}`"


# Outputs


def kinds() -> list[type[BaseModel]]:
    """Every model that is printed or stored, each once."""
    printed = [kind for several in OUTPUTS.values() for kind in several]
    return list(dict.fromkeys([*printed, *FILES.values(), *ELSEWHERE]))


def schema(kind: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of what is written; files have a seal besides, where they are sealed."""
    made = kind.model_json_schema(mode="serialization", by_alias=True)
    places = {path for path, each in FILES.items() if each is kind} - UNSEALED
    if places:
        made["properties"]["seal"] = {
            "type": "string",
            "description": "In files: sha256 of the file with zeros in its place.",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def outputs_page() -> str:
    printed = "\n".join(
        f"| `ease {name} --json` | {' or '.join(_linked(kind) for kind in several)} |"
        for name, several in sorted(OUTPUTS.items())
    )
    stored = "\n".join(f"| `{path}` | {_linked(kind)} | {_first(kind)} |" for path, kind in FILES.items())
    parts = [
        f"# Outputs\n\n{MADE} JSON Schemas (2020-12) are in `docs/schemas/`.",
        "With `--json` a command prints one object on one line to standard output, and nothing else there. Keys may be "
        "added in later versions; none changes its meaning while `format` stays. Recalls are in percent.",
        f"## Printed\n\n| command | schema |\n|---|---|\n{printed}",
        "## Stored in a run\n\nSealed files have a key `seal`: [reliability.md](reliability.md). `results.json` of an "
        f"experiment is {_linked(ELSEWHERE[0])}; a certificate's payload is {_linked(ELSEWHERE[1])}. Tensors are in "
        f"safetensors files, the queue is in `ledger.sqlite`.\n\n| file | schema | |\n|---|---|---|\n{stored}",
        "## Fields",
        *(_fields(kind) for kind in kinds()),
    ]
    return "\n\n".join(parts) + "\n"


def _linked(kind: type[BaseModel]) -> str:
    return f"[{kind.__name__}](schemas/{kind.__name__}.json)"


def _first(kind: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _fields(kind: type[BaseModel]) -> str:
    made = schema(kind)
    rows = [
        f"| `{name}` | {_cell(_shape(each))} | {_cell(each.get('description', ''))} |"
        for name, each in made["properties"].items()
        if name != "seal"
    ]
    return f"### {kind.__name__}\n\n{_first(kind)}\n\n| key | is | |\n|---|---|---|\n" + "\n".join(rows)


def _shape(each: dict[str, Any]) -> str:
    """What a schema allows, in a few words."""
    if "$ref" in each:
        return each["$ref"].rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in each:
            return " or ".join(_shape(one) for one in each[several])
    if "const" in each or "enum" in each:
        return " or ".join(json.dumps(one) for one in each.get("enum", [each.get("const")]))
    if each.get("type") == "array":
        return f"list of {_shape(each['items'])}" if "items" in each else "list"
    inner = each.get("additionalProperties")
    return f"object of {_shape(inner)}" if isinstance(inner, dict) else each.get("type", "any")


# Exit codes


def exit_codes_page() -> str:
    rows = "\n".join(f"| {code} | {_cell(words)} |" for code, words in EXIT_CODES.items())
    return (
        f"# Exit codes\n\n{MADE}\n\n| code | when |\n|---|---|\n{rows}\n\n"
        "A user error is one line on the error stream that begins with `error: ` and names what to do. Add `--debug` "
        "to see its origin. If the system kills a process (128 and the signal's number, such as 137), run the same "
        "command again to resume.\n"
    )


def pages() -> dict[str, str]:
    """Every generated file, by its place under docs/."""
    made = {
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "outputs.md": outputs_page(),
        "exit-codes.md": exit_codes_page(),
        "methods.md": methods_page(),
    }
    return made | {f"schemas/{kind.__name__}.json": json.dumps(schema(kind), indent=1) + "\n" for kind in kinds()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the references under docs/.")
    parser.add_argument("--out", type=Path, default=DOCS)
    out = parser.parse_args().out
    made = pages()
    for path in (out / "schemas").glob("*.json"):
        if f"schemas/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        write_atomic(out / name, text.encode())
    print(f"{len(made)} files written to {out}")


if __name__ == "__main__":
    main()
