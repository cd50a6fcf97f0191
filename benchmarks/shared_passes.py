"""When clients of a round should share their passes on a CPU, and what replays of a client cost beside its training.

    python benchmarks/shared_passes.py --threads 1

Random features and projectors of several sizes, no adapters. Each cell is the least of several repetitions, the ways
taken in turn, in processor seconds, which other programs on the machine change less than wall-clock seconds. Ratios
above 1 mean that `vectorized` is faster than `sequential`. The last two columns are the cost of replaying a round,
relative to training it by `sequential`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ease.data.features import Activations
from ease.data.partition import Shard
from ease.federation.client import ClientData
from ease.federation.protocol import LocalJob, Optimiser, Replay
from ease.federation.sequential import Sequential
from ease.federation.vectorized import Vectorized
from ease.methods.ease.replay import REPLAY
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.requests.request import SampleRequest

SIZES = (
    # image width, text width, hidden, embedding, batch, pairs of a client
    (512, 512, 128, 256, 64, 200),
    (640, 384, 256, 256, 32, 160),
    (768, 512, 256, 256, 64, 400),
    (1280, 384, 512, 256, 64, 440),
)
ROUNDS = 10


class Features(nn.Module):
    depth = 0

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        return states


class Backbone(nn.Module):
    name = "features"

    def __init__(self, image: int, text: int):
        super().__init__()
        self.image, self.text = Features(image), Features(text)


def least(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of the processor for each way, the least of some; they take turns, so that all see the same machine."""
    found: dict[str, float] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.process_time()
            way()
            found[name] = min(found.get(name, float("inf")), time.process_time() - began)
    return found


def measured(size: tuple[int, ...], clients: int, repeats: int) -> dict[str, float]:
    image, text, hidden, embedding, batch, pairs = size
    config = ModelConfig(lora="off", hidden=hidden, embedding=embedding)
    model = DualEncoder(Backbone(image, text), config, 0)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    pictures = rng.standard_normal((clients * pairs, image), dtype=np.float32)
    captions = rng.standard_normal((clients * pairs, 5, text), dtype=np.float32)
    activations = Activations(pictures, captions, None, pictures, captions)
    shards = []
    for client in range(clients):
        own = np.arange(client * pairs, (client + 1) * pairs)
        classes, ids = np.zeros(pairs, dtype=int), tuple(map(str, own))
        shards.append(Shard(client, own, own[:0], ids, classes, classes[:0]))
    device = torch.device("cpu")
    loop = Sequential(model, {shard.client: ClientData.of(shard, activations, device) for shard in shards})
    cohort = Vectorized.of(model, shards, activations, device)
    state = model.initial()
    job = LocalJob(1, 0, "train", Optimiser(learning_rate=0.1), 2, batch, 0.07)
    forgotten = SampleRequest(ids=shards[0].train_ids[::10])
    replays = tuple(Replay(number, state, 1.0, 0) for number in range(1, ROUNDS + 1))
    again = replace(job, objective=REPLAY, request=forgotten, replays=replays)
    ways: dict[str, Callable[[], object]] = {
        "sequential": lambda: list(loop.run(state, job, loop.clients)),
        "vectorized": lambda: list(cohort.run(state, job, loop.clients)),
        "replay float32": lambda: list(loop.run(state, again, [0])),
        "replay auto": lambda: list(loop.run(state, replace(again, precision="auto"), [0])),
    }
    return least(ways, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 10])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print("| projectors | batch | clients | loop s | cohort s | ratio | replay, float32 | replay, auto |")
    print("|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        for clients in asked.clients:
            found = measured(size, clients, asked.repeats)
            training = found["sequential"] / clients * ROUNDS
            image, text, hidden, embedding, batch, _ = size
            print(
                f"| {image} and {text}, {hidden}, {embedding} | {batch} | {clients} | {found['loop']:.3f} | "
                f"{found['cohort']:.3f} | {found['loop'] / found['cohort']:.2f} | "
                f"{found['replay float32'] / training:.0%} | {found['replay auto'] / training:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
