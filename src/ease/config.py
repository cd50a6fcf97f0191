"""Configuration: frozen, strictly checked values that come from TOML and `--set key=value`."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from ease.errors import UserError, did_you_mean

LARGEST_TOML = 1 << 20
"""Bytes of the largest configuration file that is parsed."""
LARGEST_NUMBER = 1 << 63
"""Integers from here on do not fit into 64 bits."""

HALF = re.compile("[\ud800-\udfff]")


class Config(BaseModel):
    """Base class of configuration values: immutable, without unknown keys, fields documented by their docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


C = TypeVar("C", bound=Config)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # of any kind: a shell may hand over a pipe
            content = file.read(LARGEST_TOML + 1)
        if len(content) > LARGEST_TOML:
            raise UserError(f"{path}: more than {LARGEST_TOML:,} bytes, which no configuration has; name a TOML file")
        return tomllib.loads(content.decode().replace("\r\n", "\n"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; name a TOML file") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder; name a TOML file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a plain ValueError
        raise UserError(f"{path}: not valid TOML ({error})") from error


def override(table: dict[str, Any], assignments: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The table after `section.key=value` assignments. Values are parsed as TOML, bare words as text.

    A mapping from names to values is taken as it is.
    """
    if isinstance(assignments, Mapping):
        return assign(table, assignments)
    changes = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise UserError(f"--set {assignment}: write it as key=value, for example --set training.rounds=5")
        try:
            changes[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            changes[name.strip()] = text
    return assign(table, changes)


def assign(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with values set by names such as `section.key`."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    for name, value in changes.items():
        *sections, key = name.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f"{name}: {section} is a value, not a section; name a key of a section")
        target[key] = str(value) if isinstance(value, Path) else value
    return result


def validate(kind: type[C], table: dict[str, Any], source: str) -> C:
    """Validate a table; the first error becomes one line that names file, field and remedy."""
    try:
        _check_values(table, source)
        return kind.model_validate(table)
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply; write plain sections of plain values") from error
    except ValidationError as error:
        first = error.errors()[0]
        unknown = first["type"] == "extra_forbidden"
        # If a value may be of several kinds, the location ends with the kind that was tried last, such as
        # `constrained-float`, which no user has written.
        parts = [str(part) for part in first["loc"] if unknown or str(part).replace("_", "").isalnum()]
        field = ".".join(parts) or "(whole file)"
        if unknown:
            known = _known_keys(kind, first["loc"][:-1])
            meant = did_you_mean(parts[-1], known) or _elsewhere(kind, parts[-1])
            remedy = f"unknown key{meant}; known keys here: {', '.join(known)}"
        else:
            message = first["msg"].removeprefix("Value error, ")
            remedy = f"{message[0].lower()}{message[1:]} (got {_short(first['input'])})"
        raise UserError(f"{source}: {field}: {remedy}") from error


def _check_values(table: Any, source: str) -> None:
    """Refuse values that would fail later: integers beyond 64 bits and text that no file can contain."""
    waiting: list[tuple[str, Any]] = [("", table)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(name, item) for item in value]
        elif isinstance(value, int) and not -LARGEST_NUMBER <= value < LARGEST_NUMBER:
            raise UserError(f"{source}: {name or '(whole file)'}: a number beyond 2^63; write a smaller one")
        elif isinstance(value, str) and "\0" in value:
            raise UserError(
                f"{source}: {name or '(whole file)'}: holds a NUL character, as no path does; write it again"
            )
        elif isinstance(value, str) and HALF.search(value):
            raise UserError(
                f"{source}: {name or '(whole file)'}: holds half a character (lone surrogate); write it again"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _known_keys(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for part in location:
        field = kind.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            continue
        kind = field.annotation
    return sorted(kind.model_fields)


def _elsewhere(kind: type[BaseModel], key: str) -> str:
    """A hint at the section that has a key, such as `training.rounds` for `rounds`."""
    for name, field in kind.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and key in section.model_fields:
            return f" (did you mean {name}.{key}?)"
    return ""


def to_toml(config: Config) -> str:
    """The complete configuration as TOML; absent optional values are left out."""
    return tomli_w.dumps(_present(config.model_dump(mode="json")), indent=2)


def _present(value: Any) -> Any:
    """The value without None at any depth, because TOML has no null."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value
