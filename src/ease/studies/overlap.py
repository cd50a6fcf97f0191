"""How far the subspaces of the clients' updates overlap, from the stored history."""

import torch
from torch import Tensor

from ease.methods.base import Trained
from ease.methods.columns import StoredUpdate
from ease.studies.records import Overlap
from ease.subspace import gram, orthonormal_coefficients

DIRECTIONS = 10
"""Leading directions of each client that are compared."""


def client_overlap(trained: Trained) -> list[Overlap]:
    """The overlap in every block, by the updates that are stored."""
    trained.history.require_updates()
    columns = [each for each in trained.history.columns(trained.training.rounds) if trained.history.stores(*each)]
    owners = [client for _, client in columns]
    found = []
    for block in trained.final.blocks:
        updates = [StoredUpdate(trained.history, number, client).column(block) for number, client in columns]
        cosines = principal_cosines(gram(updates, updates), owners)
        clients = tuple(sorted(set(owners)))
        found.append(Overlap(block=block.name, modality=block.modality, clients=clients, cosines=cosines))
    return found


def principal_cosines(square: Tensor, owners: list[int]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Cosines of the principal angles between every two owners' leading directions, from the Gram matrix of columns."""
    indices = [torch.tensor([i for i, owner in enumerate(owners) if owner == client]) for client in sorted(set(owners))]
    bases = [orthonormal_coefficients(square[own][:, own], 1.0)[:, :DIRECTIONS] for own in indices]
    return tuple(
        tuple(
            tuple(torch.linalg.svdvals(left.T @ square[i][:, j] @ right).clamp(0, 1).tolist())
            for j, right in zip(indices, bases, strict=True)
        )
        for i, left in zip(indices, bases, strict=True)
    )
