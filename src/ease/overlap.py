"""How far the subspaces of the clients' updates overlap, from the stored history."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ease.federation.history import History
from ease.methods.base import Trained
from ease.methods.evidence import StoredUpdate
from ease.subspace import gram, orthonormal_coefficients

DIRECTIONS = 10
"""Leading directions of each client that are compared."""


@dataclass(frozen=True)
class Overlap:
    """Principal cosines between every two clients' leading update directions, in one modality."""

    modality: str
    clients: list[int]
    cosines: list[list[list[float]]]
    """[client][client][direction], descending; the mean over directions is the similarity of two clients."""


def client_overlap(trained: Trained) -> list[Overlap]:
    """The overlap in each modality, with all of its blocks as one vector."""
    history, rounds = trained.history, trained.training.rounds
    clients = sorted({client for _, client in history.columns(rounds)})
    return [
        Overlap(modality, clients, principal_cosines(_gram(history, trained, modality), _owners(history, rounds)))
        for modality in ("image", "text")
    ]


def _owners(history: History, rounds: int) -> list[int]:
    return [client for _, client in history.columns(rounds)]


def _gram(history: History, trained: Trained, modality: str) -> Tensor:
    """Inner products of all stored updates over a modality's blocks [columns, columns]."""
    columns = history.columns(trained.training.rounds)
    total = torch.zeros(len(columns), len(columns), dtype=torch.float64)
    for block in trained.final.blocks:
        if block.modality == modality:
            updates = [StoredUpdate(history, number, client).column(block) for number, client in columns]
            total += gram(updates, updates)
    return total


def principal_cosines(square: Tensor, owners: list[int]) -> list[list[list[float]]]:
    """Cosines of the principal angles between every two owners' leading directions, from the Gram matrix of columns."""
    indices = [torch.tensor([i for i, owner in enumerate(owners) if owner == client]) for client in sorted(set(owners))]
    bases = [orthonormal_coefficients(square[own][:, own], 1.0)[:, :DIRECTIONS] for own in indices]
    return [
        [
            torch.linalg.svdvals(left.T @ square[i][:, j] @ right).clamp(0, 1).tolist()
            for j, right in zip(indices, bases, strict=True)
        ]
        for i, left in zip(indices, bases, strict=True)
    ]
