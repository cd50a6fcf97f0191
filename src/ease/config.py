"""Configuration: frozen, strictly checked values that come from TOML and `--set key=value`."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from ease.errors import UserError


class Config(BaseModel):
    """Base of every configuration value: immutable, no unknown keys, every field described under its name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


C = TypeVar("C", bound=Config)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; name a TOML file") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder; name a TOML file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); check the path and its permissions") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML ({error})") from error


def override(table: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` assignments; values are read as TOML, bare words as text."""
    changes = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise UserError(f"--set {assignment}: write it as key=value, for example --set training.rounds=5")
        try:
            changes[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            changes[name.strip()] = text
    return assign(table, changes)


def assign(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set values by their names, such as `section.key`."""
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
    """Build a config value; the first mistake becomes one line that names file, field and remedy."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        unknown = first["type"] == "extra_forbidden"
        # Where a value may be of several kinds, the location ends with the kind that was tried last, such as
        # `constrained-float`, which no user has written.
        parts = [str(part) for part in first["loc"] if unknown or str(part).replace("_", "").isalnum()]
        field = ".".join(parts) or "(whole file)"
        if unknown:
            remedy = f"unknown key; known keys here: {', '.join(_known_keys(kind, first['loc'][:-1]))}"
        else:
            message = first["msg"].removeprefix("Value error, ")
            remedy = f"{message[0].lower()}{message[1:]} (got {_short(first['input'])})"
        raise UserError(f"{source}: {field}: {remedy}") from error


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


def to_toml(config: Config) -> str:
    """The complete configuration as TOML a person can read and diff; absent optional values are left out."""
    return tomli_w.dumps(_present(config.model_dump(mode="json")), indent=2)


def _present(value: Any) -> Any:
    """The same without what is None, at any depth: TOML has no word for it."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value
