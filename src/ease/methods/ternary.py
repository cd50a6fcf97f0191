"""Updates of three values: a smoothed quantiser with a certified radius, and 2 bits on the wire."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ease.federation.expected import ROUNDING, Expected, Value, contrasted
from ease.federation.protocol import LocalJob, Update
from ease.params import Params

CERTAIN = 1e-6
"""Probabilities stay this far from 0 and 1, where the certified radius would be infinite."""
LEAST_SCALE, LARGEST_SCALE = 1e-8, 1e6
MEANING = torch.tensor([-1.0, 0.0, 1.0, torch.nan])
"""The value of each 2-bit code; the fourth is not a number, and the check of updates refuses it."""


def quantise(values: Tensor, threshold: float, noise: float) -> tuple[Tensor, Tensor]:
    """The likeliest of -1, 0 and +1 under Gaussian noise, and how far each value may move before that can change.

    P(+1) = Phi((x - threshold) / noise) and P(-1) = Phi((-x - threshold) / noise); the certified radius is
    noise / 2 · (Phi^-1(p_1) - Phi^-1(p_2)) for the two likeliest classes. In closed form no noise needs to be drawn.
    """
    x = values.double()
    plus, minus = (torch.special.ndtr((sign * x - threshold) / noise) for sign in (1, -1))
    chances = torch.stack([minus, 1 - plus - minus, plus]).clamp(CERTAIN, 1 - CERTAIN)
    first, second = chances.topk(2, dim=0).values
    radius = noise / 2 * (torch.special.ndtri(first) - torch.special.ndtri(second))
    return chances.argmax(0) - 1, radius


def pack(classes: Tensor) -> Tensor:
    """Four values of -1, 0 and +1 in each byte, the first in its lowest bits."""
    codes = (classes.flatten() + 1).to(torch.uint8)
    padded = pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return padded[:, 0] | padded[:, 1] << 2 | padded[:, 2] << 4 | padded[:, 3] << 6


def unpack(packed: Tensor, size: int) -> Tensor:
    """The first `size` values of packed bytes."""
    codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    return MEANING[codes.flatten()[:size].long()]


def encode(update: Update, settings: Mapping[str, float]) -> Update:
    """A client's update as it travels: each tensor's root mean square and, relative to it, three values."""
    if update.delta is None:
        return update
    values, radii = dict(update.values), []
    for name, tensor in update.delta.tensors.items():
        scale = tensor.square().mean().sqrt().clamp_min(LEAST_SCALE)
        classes, radius = quantise(tensor / scale, settings["threshold"], settings["noise"])
        values |= {name: pack(classes), f"{name}:scale": scale}
        radii.append(radius.flatten())
    return replace(update, delta=None, values={**values, "radius": torch.cat(radii).mean().float()})


def encoded(state: Params, job: LocalJob, client: int, pair_count: int) -> Expected:
    """What an encoded update holds."""
    largest = job.settings["noise"] * float(torch.special.ndtri(torch.tensor(1 - CERTAIN, dtype=torch.float64)))
    values = {**contrasted(state, job, client, pair_count).values, "radius": Value(least=0.0, most=ROUNDING * largest)}
    for name, tensor in state.tensors.items():
        scale = Value(least=0.0, most=LARGEST_SCALE)
        values |= {name: Value((-(-tensor.numel() // 4),), torch.uint8), f"{name}:scale": scale}
    return Expected(values=values)


def decode(update: Update, params: Params) -> Update:
    """The update that the server works with.

    What cannot be decoded is left out, so that the check every update goes through refuses it by name.
    """
    if update.pairs == 0:
        return update
    tensors, values = {}, dict(update.values)
    for name, tensor in params.tensors.items():
        packed, scale = values.pop(name, None), values.pop(f"{name}:scale", None)
        if packed is None or scale is None or packed.dtype != torch.uint8 or scale.shape != ():
            continue
        if packed.shape == (-(-tensor.numel() // 4),):
            tensors[name] = (unpack(packed, tensor.numel()) * scale).view_as(tensor).to(tensor.dtype)
    return replace(update, delta=Params(tensors, params.blocks), values=values)
