"""Federated averaging as one would write it in PyTorch alone: one model, one client after the other.

python bare.py FOLDER THREADS
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from work import Weights, Work, serve, train_client


def rounds(work: Work) -> Iterator[Weights]:
    model, state, total = work.model(), dict(work.start), sum(work.pairs)
    for number in range(1, work.rounds + 1):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client in work.clients:
            model.load_state_dict(state)
            train_client(model, work, work.rate, work.batches(number, client))
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    mean[name].add_(tensor, alpha=work.pairs[client] / total)
        state = mean
        yield state


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    work = Work.load(folder / "work.npz")
    serve(folder, "bare", lambda: rounds(work))


if __name__ == "__main__":
    main()
