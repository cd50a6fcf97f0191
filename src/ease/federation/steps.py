"""The rule of a local step: how gradients move the parameters of trainings that are stacked along their first axis.

A single client is a stack of one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ease.federation.lock import ClientLock, lock_pulls
from ease.federation.projectors import Factors
from ease.federation.protocol import LocalJob, Optimiser
from ease.params import Params

ADAM = (0.9, 0.999)
"""Decay of Adam's means of gradients and of squared gradients."""
EPSILON = 1e-8
SOPHIA = (0.9, 0.95)
"""Decay of Sophia's means of gradients and of squared gradients."""
RHO = 0.04
"""Share of the curvature by which Sophia divides."""


def learning_rates(optimiser: Optimiser, params: Params) -> dict[str, float]:
    """The step size of each tensor."""
    rates = {"projector": optimiser.learning_rate, "lora": optimiser.lora_learning_rate or optimiser.learning_rate}
    return {name: rates[block.kind] for block in params.blocks for name in block.tensors}


class StepRule:
    """Distance to the start, lock, clipping, optimiser and ball of a job, with the optimiser's state of every training.

    `start` holds what all trainings start from [trainings, ...]. Trainings that are done leave the stack at its end, so
    the tensors of a step are leading slices of those before it.
    """

    def __init__(self, job: LocalJob, params: Params, start: Mapping[str, Tensor]):
        self.job = job
        self.rates = learning_rates(job.optimiser, params)
        self.start = start
        self.lock = None if job.lock is None else job.lock.on(next(iter(start.values())).device)
        tracked = {} if job.optimiser.kind == "sgd" else start
        self.moments = {name: (torch.zeros_like(tensor), torch.zeros_like(tensor)) for name, tensor in tracked.items()}

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor | Factors], number: int) -> None:
        """Make step `number`, counted from 1, in place."""
        if self.job.plain:
            for name, gradient in gradients.items():
                if isinstance(gradient, Factors):
                    gradient.descend(tensors[name], self.rates[name])
                else:
                    tensors[name].sub_(gradient, alpha=self.rates[name])
            return
        whole = {
            name: (each.product() if isinstance(each, Factors) else each).to(tensors[name].dtype)
            for name, each in gradients.items()
        }
        if self.job.proximal:
            for name, gradient in whole.items():
                away = tensors[name] - self.start[name][: len(gradient)]
                whole[name] = gradient.add(away, alpha=self.job.proximal)
        if self.lock is not None:
            whole |= add_lock_gradient(tensors, whole, self.lock)
        if self.job.clip is not None:
            whole = clip(whole, self.job.clip)
        for name, gradient in whole.items():
            self._descend(name, tensors[name], gradient, number)
        if self.job.radius is not None:
            project_to_balls(tensors, self.start, self.job.radius)

    def _descend(self, name: str, tensor: Tensor, gradient: Tensor, number: int) -> None:
        rate, kind = self.rates[name], self.job.optimiser.kind
        if kind == "sgd":
            tensor.sub_(gradient, alpha=rate)
            return
        first, second = (moment[: len(gradient)] for moment in self.moments[name])
        if kind == "adam":
            adam(tensor, first, second, gradient, rate, number)
        else:
            sophia(tensor, first, second, gradient, rate, self.job.batch_size)


def adam(tensor: Tensor, first: Tensor, second: Tensor, gradient: Tensor, rate: float, number: int) -> None:
    """Make Adam's step `number` in place, on a tensor and its two moments.

    The operations are those of torch.optim.Adam, which keeps one step count for all trainings of a stack and whose
    import starts a compiler.
    """
    first.lerp_(gradient, 1 - ADAM[0])
    second.mul_(ADAM[1]).addcmul_(gradient, gradient, value=1 - ADAM[1])
    denominator = (second.sqrt() / (1 - ADAM[1] ** number) ** 0.5).add_(EPSILON)
    tensor.addcdiv_(first, denominator, value=-rate / (1 - ADAM[0] ** number))


def sophia(tensor: Tensor, first: Tensor, second: Tensor, gradient: Tensor, rate: float, pairs: int) -> None:
    """Make a step of Sophia-G in place: w <- w - rate · sign(m) · min(1, |m| / (rho · pairs · h)).

    h is the running mean of squared gradients. Squared gradients of a batch mean, times the pairs of the batch,
    estimate the diagonal of the Fisher matrix.
    """
    first.lerp_(gradient, 1 - SOPHIA[0])
    second.lerp_(gradient.square(), 1 - SOPHIA[1])
    ratio = first.abs() / (RHO * pairs * second + 1e-15)
    tensor.sub_(first.sign() * ratio.clamp(max=1), alpha=rate)


def add_lock_gradient(
    tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lock: ClientLock
) -> dict[str, Tensor]:
    """The gradients of locked tensors with the gradient of the lock's penalty added."""
    parameters = dict(tensors)
    if lock.dense and len(next(iter(parameters.values()))) > 1:
        pulls = torch.func.vmap(lambda values: lock_pulls(values, lock))(parameters)
    else:  # products of factors are combined one training at a time
        each = [
            lock_pulls(dict(zip(parameters, values, strict=True)), lock)
            for values in zip(*parameters.values(), strict=True)
        ]
        pulls = {name: torch.stack([pull[name] for pull in each]) for name in each[0]}
    return {name: gradients[name].add(pull, alpha=2 * lock.strength) for name, pull in pulls.items()}


def clip(gradients: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Each training's gradient, scaled down to a norm of at most `most`."""
    factors = (most / (_norms(gradients) + 1e-6)).clamp(max=1.0)
    return {name: _each(factors, gradient) * gradient for name, gradient in gradients.items()}


def project_to_balls(tensors: Mapping[str, Tensor], centres: Mapping[str, Tensor], radius: float) -> None:
    """Move each training, in place, to the nearest point of the ball around its own centre."""
    moved = {name: tensor - centres[name][: len(tensor)] for name, tensor in tensors.items()}
    factors = (radius / _norms(moved).clamp_min(1e-30)).clamp(max=1.0)
    outside = factors < 1
    for name, change in moved.items():
        nearest = centres[name][: len(change)] + _each(factors, change) * change
        tensors[name].copy_(torch.where(_each(outside, change), nearest, tensors[name]))


def _norms(tensors: Mapping[str, Tensor]) -> Tensor:
    """Norm over all tensors, for each training."""
    norms = [torch.linalg.vector_norm(tensor.flatten(1), dim=1) for tensor in tensors.values()]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _each(values: Tensor, like: Tensor) -> Tensor:
    """One value for each training, shaped to multiply a stack."""
    return values.view(-1, *[1] * (like.dim() - 1))
