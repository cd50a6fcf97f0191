"""Every unlearning method, by name: those of this package, and those that other packages bring.

A method here is one file, one class and one word in `BUILT_IN`. Another package names its class in the entry point
group `ease.methods`; one that cannot be used is refused by name, with the reason, and stands in no one's way.
"""

import inspect
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ease.config import override, validate
from ease.errors import UserError, did_you_mean
from ease.methods.base import Unlearner
from ease.methods.ease.method import Ease
from ease.methods.ease_paper import EasePaper
from ease.methods.exact import Exact
from ease.methods.fed_eraser import FedEraser
from ease.methods.fed_osd import FedOsd
from ease.methods.fed_recover import FedRecover
from ease.methods.fed_recovery import FedRecovery
from ease.methods.ferrari import Ferrari
from ease.methods.ffmu import Ffmu
from ease.methods.finetune import Finetune
from ease.methods.fukd import Fukd
from ease.methods.fused import Fused
from ease.methods.grad_ascent import GradAscent
from ease.methods.multi_delete import MultiDelete
from ease.methods.neg_grad_plus import NegGradPlus
from ease.methods.not_ import NoT
from ease.methods.pgd import Pgd
from ease.methods.retrain import Retrain
from ease.methods.rollback import Rollback
from ease.methods.soul import Soul

GROUP = "ease.methods"
NAME = re.compile(r"[a-z][a-z0-9_]*")
BUILT_IN: tuple[type[Unlearner], ...] = (
    Ease,
    EasePaper,
    Exact,
    FedEraser,
    FedOsd,
    FedRecover,
    FedRecovery,
    Ferrari,
    Ffmu,
    Finetune,
    Fukd,
    Fused,
    GradAscent,
    MultiDelete,
    NegGradPlus,
    NoT,
    Pgd,
    Retrain,
    Rollback,
    Soul,
)
METHODS: dict[str, type[Unlearner]] = {kind.name: kind for kind in BUILT_IN}
BROKEN: dict[str, str] = {}
"""Plug-ins that cannot be used, by name, and why."""


def make_method(name: str, assignments: tuple[str, ...] = (), table: dict[str, Any] | None = None) -> Unlearner:
    """A method with its settings; unknown names and values are refused with what is known."""
    if name not in METHODS:
        if name in BROKEN:
            raise UserError(f"--method {name}: this plug-in cannot be used: {BROKEN[name]}")
        raise UserError(f"--method {name}: {unknown_method(name)}")
    return validate(METHODS[name], override(dict(table or {}), assignments), f"method {name}")


def unknown_method(name: str) -> str:
    """What to say of a name that no method has."""
    return f"unknown method{did_you_mean(name, METHODS)}; choose one of: {', '.join(sorted(METHODS))}"


def plug_ins(found: Iterable[EntryPoint]) -> tuple[dict[str, type[Unlearner]], dict[str, str]]:
    """The methods that entry points bring, and why others are refused."""
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
        except Exception as error:  # whatever a stranger's module does when it is imported
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
        return "it is no subclass of ease.methods.base.Unlearner"
    if inspect.isabstract(kind):
        return f"it lacks {', '.join(sorted(kind.__abstractmethods__))}"
    if not NAME.fullmatch(name):
        return "a name is made of small letters, digits and underscores, a letter first"
    if name in {each.name for each in BUILT_IN}:
        return "a method of this name belongs to this package; choose another"
    missing = [each for each in ("name", "title", "source") if not isinstance(getattr(kind, each, None), str)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if kind.name != name:
        return f"its name is {kind.name!r}, the entry point's is {name!r}; make them one"
    if "method" not in kind.model_fields or kind.model_fields["method"].default != name:
        return f'it lacks the field `method: Literal["{name}"] = "{name}"`'
    return None


def _load() -> None:
    usable, refused = plug_ins(entry_points(group=GROUP))
    METHODS.update(usable)
    BROKEN.update(refused)


_load()  # last: a plug-in may import from here
