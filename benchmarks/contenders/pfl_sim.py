"""pfl's simulated backend with its own federated averaging and PyTorch model.

python pfl_sim.py FOLDER THREADS
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from work import Weights, Work, serve


class Planned(Dataset):
    """A user's pairs, in the batches that everyone uses."""

    def __init__(self, work: Work, number: int, client: int):
        self.work, self.pairs = work, work.pairs[client]
        batches = work.batches(number, client)
        size = len(batches) // work.epochs
        self.epochs = iter([batches[place : place + size] for place in range(0, len(batches), size)])
        super().__init__((work.image[:0], work.text[:0]), user_id=str(client))

    def __len__(self) -> int:
        return self.pairs

    def iter(self, batch_size: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows, lines in next(self.epochs, ()):
            yield self.work.image[torch.from_numpy(rows)], self.work.text[torch.from_numpy(lines)]


def rounds(work: Work) -> Iterator[Weights]:
    """Step by step, so that every round is timed as those of the others are; pfl itself drives them."""
    model = work.model()
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    clients = list(work.clients)
    asked = iter(range(work.rounds * len(clients)))

    def dataset(place: int) -> Planned:
        return Planned(work, 1 + place // len(clients), place % len(clients))

    data = FederatedDataset(dataset, lambda: next(asked))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    algorithm, settings = FederatedAveraging(), NNEvalHyperParams(local_batch_size=None)
    train = NNTrainHyperParams(
        local_batch_size=64, local_num_epochs=work.epochs, local_learning_rate=work.rate, local_max_grad_norm=None
    )
    for number in range(1, work.rounds + 1):
        # The first iteration that pfl counts would also evaluate every user, twice.
        algorithm._current_central_iteration = number
        recipe = NNAlgorithmParams(
            central_num_iterations=number + 1,
            evaluation_frequency=10**9,
            train_cohort_size=len(clients),
            val_cohort_size=0,
        )
        algorithm.run(recipe, backend, wrapped, train, settings, send_metrics_to_platform=False)
        yield {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def main() -> None:
    logging.disable(logging.WARNING)
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    np.random.seed(0)
    work = Work.load(folder / "work.npz")
    serve(folder, "pfl", lambda: rounds(work))


if __name__ == "__main__":
    main()
