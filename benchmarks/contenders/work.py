"""What every contender is given: features, start weights and the batches of every client and round, from one file.

Nothing of EASE is imported here, for contenders run in environments of their own. A contender waits for the word `go`
on its standard input, does all rounds from the start weights, writes the final weights and answers with the seconds
of each round as one line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A federation and its training, as arrays."""

    image: Tensor
    """[pairs, width]"""
    text: Tensor
    """[captions, width]"""
    start: Weights
    plan: dict[str, list[tuple[np.ndarray, np.ndarray]]]
    """`stream/round/client` -> rows of images and of captions, batch by batch."""
    pairs: list[int]
    """Of each client."""
    rounds: int
    epochs: int
    rate: float
    temperature: float

    @classmethod
    def load(cls, path: Path) -> "Work":
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        about = json.loads(str(found["about"]))
        plan = {
            key: list(zip(*(np.split(found[f"{key}/{kind}"], sizes) for kind in ("rows", "lines")), strict=True))
            for key, sizes in about.pop("plan").items()
        }
        start = {name: torch.from_numpy(found[f"start/{name}"]) for name in about.pop("names")}
        return cls(torch.from_numpy(found["image"]), torch.from_numpy(found["text"]), start, plan, **about)

    @property
    def clients(self) -> range:
        return range(len(self.pairs))

    def batches(self, number: int, client: int, stream: str = "train") -> list[tuple[np.ndarray, np.ndarray]]:
        return self.plan[f"{stream}/{number}/{client}"]

    def model(self) -> "Projectors":
        model = Projectors({name: tuple(tensor.shape) for name, tensor in self.start.items()}, self.temperature)
        model.load_state_dict(self.start)
        return model


class Branch(nn.Module):
    def __init__(self, hidden: tuple[int, ...], out: tuple[int, ...]):
        super().__init__()
        self.projector = nn.ModuleList([nn.Linear(hidden[1], hidden[0]), nn.Linear(out[1], out[0])])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.projector[0](F.layer_norm(x, x.shape[-1:])))
        return F.normalize(self.projector[1](x), dim=-1, eps=1e-6)


class Projectors(nn.Module):
    """Two projectors into one space and the symmetric contrastive loss between them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], temperature: float):
        super().__init__()
        self.image, self.text = (
            Branch(shapes[f"{side}.projector.0.weight"], shapes[f"{side}.projector.1.weight"])
            for side in ("image", "text")
        )
        self.temperature = temperature

    def loss(self, image: Tensor, text: Tensor) -> Tensor:
        logits = self.image(image) @ self.text(text).T / self.temperature
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    def metrics(self, image: Tensor, text: Tensor) -> dict[str, float]:
        """pfl asks for it; what is compared is training alone."""
        return {}

    forward = loss


def train_client(model: Projectors, work: Work, rate: float, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Plain local training, in place."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    for rows, lines in batches:
        loss = model.loss(work.image[torch.from_numpy(rows)], work.text[torch.from_numpy(lines)])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()


@dataclass
class Done:
    """Seconds of each round, and the weights after the last."""

    seconds: list[float]
    weights: Weights


def timed(rounds: Iterator[Weights]) -> Done:
    seconds, weights, began = [], {}, time.perf_counter()
    for state in rounds:
        weights = state
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return Done(seconds, weights)


def serve(folder: Path, name: str, run: Callable[[], Iterator[Weights]]) -> None:
    """Do all rounds each time the word comes."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        done = timed(run())
        write_weights(folder / f"{name}.npz", done.weights)
        print(json.dumps({"seconds": done.seconds}), flush=True)


def write_weights(path: Path, weights: Weights) -> None:
    np.savez(path, **{name: np.asarray(tensor.detach()) for name, tensor in weights.items()})
