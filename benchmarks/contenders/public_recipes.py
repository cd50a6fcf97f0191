"""Retraining, FedEraser and FedRecover as their authors publish them, in PyTorch alone, on a stored training.

python public_recipes.py FOLDER THREADS RECIPE

FedEraser (Liu et al., IWQoS 2021, and its published code): the mean change of the clients that stay gets, layer by
layer, the length of the mean of their stored changes. FedRecover (Cao et al., S&P 2023): exact rounds to warm up, then
stored updates corrected by L-BFGS, an exact round now and then, exact where an estimate is abnormal, and at the end.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from work import Projectors, Weights, Work, serve, train_client

WARM_UP, CORRECTION, FINAL, SECANTS, TOLERANCE = 3, 12, 1, 2, 1e-6
"""FedRecover's settings: those that ours has by default."""


class Past:
    """States and updates of the training, flat, in memory: recipes are not charged for reading them."""

    def __init__(self, path: Path, names: list[str]):
        with np.load(path) as file:
            self.leaving = int(file["leaving"])
            self.states = torch.from_numpy(file["states"])
            self.updates = {
                (int(number), int(client)): torch.from_numpy(file[f"{number}/{client}"])
                for number, client in file["columns"]
            }
        self.names = names


def flat(weights: Weights) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in weights.values()])


def shaped(vector: Tensor, like: Weights) -> Weights:
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def asked(model: Projectors, work: Work, state: Tensor, number: int, client: int, stream: str) -> Tensor:
    """What a client sends from a state."""
    model.load_state_dict(shaped(state, work.start))
    train_client(model, work, work.rate, work.batches(number, client, stream))
    found = model.state_dict()
    return flat({name: found[name] for name in work.start}) - state  # in the order of the stored ones


def mean(work: Work, changes: dict[int, Tensor], by_pairs: bool = True) -> Tensor:
    shares = {client: float(work.pairs[client]) if by_pairs else 1.0 for client in changes}
    return sum(shares[client] * change for client, change in changes.items()) / sum(shares.values())  # type: ignore[return-value]


def retrain(work: Work, past: Past, staying: list[int]) -> Iterator[Weights]:
    model, state = work.model(), flat(work.start)
    for number in range(1, work.rounds + 1):
        state = state + mean(work, {c: asked(model, work, state, number, c, "retrain-0") for c in staying})
    yield shaped(state, work.start)


def fed_eraser(work: Work, past: Past, staying: list[int]) -> Iterator[Weights]:
    model = work.model()
    state = past.states[0] + mean(work, {c: past.updates[1, c] for c in staying}, by_pairs=False)
    for number in range(2, work.rounds + 1):
        old = mean(work, {c: past.updates[number, c] for c in staying}, by_pairs=False)
        new = mean(work, {c: asked(model, work, state, number, c, "fed_eraser") for c in staying}, by_pairs=False)
        steps = {
            name: layer * (torch.linalg.vector_norm(stored) / torch.linalg.vector_norm(layer).clamp_min(1e-12))
            for (name, layer), stored in zip(
                shaped(new, work.start).items(), shaped(old, work.start).values(), strict=True
            )
        }
        state = state + flat(steps)
    yield shaped(state, work.start)


def hessian_product(secants: list[tuple[Tensor, Tensor]], vector: Tensor) -> Tensor:
    """L-BFGS in compact form, as in the paper's Algorithm 2."""
    if not secants:
        return torch.zeros_like(vector)
    moves, turns = (torch.stack(each, dim=1).double() for each in zip(*secants, strict=True))
    inner = moves.T @ turns
    sigma = float(inner[-1, -1] / moves[:, -1].dot(moves[:, -1]))
    lower, diagonal = inner.tril(-1), inner.diagonal().diag()
    system = torch.cat([torch.cat([-diagonal, lower.T], dim=1), torch.cat([lower, sigma * moves.T @ moves], dim=1)])
    right = torch.cat([turns.T @ vector.double(), sigma * moves.T @ vector.double()])
    weights = torch.linalg.lstsq(system, right[:, None]).solution[:, 0]
    return (sigma * vector - torch.cat([turns, sigma * moves], dim=1) @ weights).to(vector.dtype)


def fed_recover(work: Work, past: Past, staying: list[int]) -> Iterator[Weights]:
    model, state = work.model(), past.states[0]
    known: dict[int, list[tuple[Tensor, Tensor]]] = {client: [] for client in staying}
    largest = 0.0
    for number in range(1, work.rounds + 1):
        values = torch.cat([past.updates[number, client].abs() for client in staying])
        rank = max(1, math.ceil((1 - TOLERANCE) * len(values)))
        largest = max(largest, float(values.kthvalue(rank).values))
    for number in range(1, work.rounds + 1):
        drift = state - past.states[number - 1]
        late = number > work.rounds - FINAL
        exact = number <= WARM_UP or late or (number - WARM_UP) % CORRECTION == 0
        changes = {}
        for client in staying:
            stored, change = past.updates[number, client], None
            if not exact:
                change = stored - hessian_product(known[client], drift)
                if not bool(torch.isfinite(change).all()) or float(change.abs().max()) > largest:
                    change = None
            if change is None:
                change = asked(model, work, state, number, client, "train")
                if exact and number > 1:
                    known[client] = [*known[client], (drift, stored - change)][-SECANTS:]
            changes[client] = change
        state = state + mean(work, changes)
    yield shaped(state, work.start)


def main() -> None:
    folder, threads, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    work = Work.load(folder / "work.npz")
    past = Past(folder / "past.npz", list(work.start))
    staying = [client for client in work.clients if client != past.leaving]
    recipe = {"retrain": retrain, "fed_eraser": fed_eraser, "fed_recover": fed_recover}[name]
    serve(folder, f"public_{name}", lambda: recipe(work, past, staying))


if __name__ == "__main__":
    main()
