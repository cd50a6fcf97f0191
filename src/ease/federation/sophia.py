"""Sophia-G: descent whose steps are divided by a diagonal curvature estimate and clipped, value by value."""

from collections.abc import Iterable
from typing import Any

import torch


class SophiaG(torch.optim.Optimizer):
    """theta <- theta - lr · sign(m) · min(1, |m| / (rho · pairs · h)), h the running mean of squared gradients.

    Squared gradients of a batch mean, times the pairs of the batch, estimate the diagonal of the Fisher matrix.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        pairs: int,
        betas: tuple[float, float] = (0.9, 0.95),
        rho: float = 0.04,
    ) -> None:
        super().__init__(groups, {"pairs": pairs, "betas": betas, "rho": rho})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                state = self.state[tensor]
                if not state:
                    state["m"], state["h"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
                state["m"].lerp_(tensor.grad, 1 - first)
                state["h"].lerp_(tensor.grad.square(), 1 - second)
                ratio = state["m"].abs() / (group["rho"] * group["pairs"] * state["h"] + 1e-15)
                tensor.add_(state["m"].sign() * ratio.clamp(max=1), alpha=-group["lr"])
