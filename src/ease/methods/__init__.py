"""Every unlearning method, by name. A new method is one file, one class and one word in this union."""

from typing import Annotated, Any, get_args

from pydantic import Field

from ease.config import override, validate
from ease.errors import UserError
from ease.methods.base import Unlearner
from ease.methods.ease.method import Ease
from ease.methods.fed_eraser import FedEraser
from ease.methods.fed_osd import FedOsd
from ease.methods.fed_recover import FedRecover
from ease.methods.ferrari import Ferrari
from ease.methods.ffmu import Ffmu
from ease.methods.finetune import Finetune
from ease.methods.fused import Fused
from ease.methods.grad_ascent import GradAscent
from ease.methods.multi_delete import MultiDelete
from ease.methods.neg_grad_plus import NegGradPlus
from ease.methods.not_ import NoT
from ease.methods.pgd import Pgd
from ease.methods.retrain import Retrain
from ease.methods.soul import Soul

Method = Annotated[
    Ease
    | FedEraser
    | FedOsd
    | FedRecover
    | Ferrari
    | Ffmu
    | Finetune
    | Fused
    | GradAscent
    | MultiDelete
    | NegGradPlus
    | NoT
    | Pgd
    | Retrain
    | Soul,
    Field(discriminator="method"),
]

METHODS: dict[str, type[Unlearner]] = {kind.name: kind for kind in get_args(get_args(Method)[0])}


def make_method(name: str, assignments: tuple[str, ...] = (), table: dict[str, Any] | None = None) -> Unlearner:
    """A method with its settings; unknown names and values are refused with what is known."""
    if name not in METHODS:
        raise UserError(f"--method {name}: unknown method; choose one of: {', '.join(sorted(METHODS))}")
    return validate(METHODS[name], override(dict(table or {}), assignments), f"method {name}")
