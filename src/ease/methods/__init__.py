"""The unlearning methods by name: those of this package, and those that other packages bring.

A method here is one file, one class and one line in `BUILT_IN`. Another package names its class in the entry point
group `ease.methods`. A plug-in that cannot be used is refused by name, with the reason, and affects no other method.
A method is imported when it is first used, so that a command loads only what it runs.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, MutableMapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ease.config import override, validate
from ease.errors import UserError, did_you_mean
from ease.methods.base import Unlearner

GROUP = "ease.methods"
NAME = re.compile(r"[a-z][a-z0-9_]*")
BUILT_IN = {
    "ease": "ease.method:Ease",
    "ease_paper": "ease_paper:EasePaper",
    "exact": "exact:Exact",
    "fed_eraser": "fed_eraser:FedEraser",
    "fed_osd": "fed_osd:FedOsd",
    "fed_recover": "fed_recover:FedRecover",
    "fed_recovery": "fed_recovery:FedRecovery",
    "ferrari": "ferrari:Ferrari",
    "ffmu": "ffmu:Ffmu",
    "finetune": "finetune:Finetune",
    "fukd": "fukd:Fukd",
    "fused": "fused:Fused",
    "grad_ascent": "grad_ascent:GradAscent",
    "multi_delete": "multi_delete:MultiDelete",
    "neg_grad_plus": "neg_grad_plus:NegGradPlus",
    "noisy_finetune": "noisy_finetune:NoisyFinetune",
    "not": "not_:NoT",
    "pgd": "pgd:Pgd",
    "retrain": "retrain:Retrain",
    "rollback": "rollback:Rollback",
    "sharded": "sharded:Sharded",
    "sifu": "sifu:Sifu",
    "soul": "soul:Soul",
}
"""Name -> module in this package and class."""
BROKEN: dict[str, str] = {}
"""Plug-ins that cannot be used, by name, and why. Filled when plug-ins are first looked for."""


class Methods(MutableMapping[str, type[Unlearner]]):
    """Name -> method. A built-in method is imported when it is first looked up, plug-ins with the first other name."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[Unlearner]] = {}
        self._plug_ins_loaded = False

    def __getitem__(self, name: str) -> type[Unlearner]:
        if name not in self._loaded and name in BUILT_IN:
            module, _, kind = BUILT_IN[name].partition(":")
            self._loaded[name] = getattr(import_module(f"ease.methods.{module}"), kind)
        elif name not in self._loaded:
            self._load_plug_ins()
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        if name in BUILT_IN:
            return True
        self._load_plug_ins()
        return name in self._loaded

    def __iter__(self) -> Iterator[str]:
        self._load_plug_ins()
        return iter([*BUILT_IN, *(name for name in self._loaded if name not in BUILT_IN)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, kind: type[Unlearner]) -> None:
        self._loaded[name] = kind

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def _load_plug_ins(self) -> None:
        if not self._plug_ins_loaded:
            self._plug_ins_loaded = True  # first, because a plug-in may import from here
            usable, refused = plug_ins(entry_points(group=GROUP))
            self._loaded |= usable
            BROKEN.update(refused)


METHODS = Methods()


def import_all() -> None:
    """Import every method, so that a node knows the objectives of all of them."""
    for name in METHODS:
        METHODS[name]


def make_method(name: str, assignments: tuple[str, ...] = (), table: dict[str, Any] | None = None) -> Unlearner:
    """A method with its settings; unknown names and values are refused with what is known."""
    if name not in METHODS:
        if name in BROKEN:
            raise UserError(f"--method {name}: this plug-in cannot be used: {BROKEN[name]}")
        raise UserError(f"--method {name}: {unknown_method(name)}")
    return validate(METHODS[name], override(dict(table or {}), assignments), f"method {name}")


def unknown_method(name: str) -> str:
    """The message for a name that no method has."""
    return f"unknown method{did_you_mean(name, METHODS)}; choose one of: {', '.join(sorted(METHODS))}"


def plug_ins(found: Iterable[EntryPoint]) -> tuple[dict[str, type[Unlearner]], dict[str, str]]:
    """The methods of these entry points, and why the others are refused."""
    usable: dict[str, type[Unlearner]] = {}
    refused: dict[str, str] = {}
    values: dict[str, dict[str, EntryPoint]] = {}
    for point in found:
        values.setdefault(point.name, {})[point.value] = point
    for name, points in values.items():
        if len(points) > 1:
            several = ", ".join(sorted(points))
            refused[name] = f"several packages bring a method of this name ({several}); uninstall all but one"
            continue
        ((value, point),) = points.items()
        try:
            kind = point.load()
        except Exception as error:  # a foreign module may fail in any way when it is imported
            refused[name] = f"{value} cannot be imported ({type(error).__name__}: {error})"
            continue
        reason = reason_against(name, kind)
        if reason is None:
            usable[name] = kind
        else:
            refused[name] = f"{value}: {reason}"
    return usable, refused


def reason_against(name: str, kind: object) -> str | None:
    """Why something cannot be a method under this name, or None."""
    if not (inspect.isclass(kind) and issubclass(kind, Unlearner)):
        return "it is not a subclass of ease.methods.base.Unlearner"
    if inspect.isabstract(kind):
        return f"it lacks {', '.join(sorted(kind.__abstractmethods__))}"
    if not NAME.fullmatch(name):
        return "a name consists of small letters, digits and underscores, and starts with a letter"
    if name in BUILT_IN:
        return "a method of this name belongs to this package; choose another"
    missing = [each for each in ("name", "title", "source") if not isinstance(getattr(kind, each, None), str)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if kind.name != name:
        return f"its name is {kind.name!r}, the entry point's is {name!r}; they must be the same"
    if "method" not in kind.model_fields or kind.model_fields["method"].default != name:
        return f'it lacks the field `method: Literal["{name}"] = "{name}"`'
    return None
