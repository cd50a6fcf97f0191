"""The largest harm that one client can do in one round, and what each way of averaging costs honest ones.

python benchmarks/hostile.py [CONFIG.toml] [--set training.rounds=12]

A model is trained honestly under each aggregation; then the client of middle size attacks one round, and three honest
rounds follow. Recall is R@1 of training pairs in percent. `mean, no clipping` is plain federated averaging. The gap is
forget R@1 of EASE minus that of retraining, after the same client withdraws.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ease.commands.train import recall_sets
from ease.federation.fedavg import TrainingConfig, fedavg
from ease.federation.history import History
from ease.federation.middleware import Guarded
from ease.federation.protocol import Federation, LocalJob, Middleware, Update
from ease.methods import make_method
from ease.methods.base import Trained
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.world import World

SMALL = (
    "data.train=400",
    "data.validation=0",
    "data.test=100",
    "model.hidden=64",
    "model.embedding=32",
    "training.rounds=10",
    "gallery=100",
)
AGAIN = 3
"""Honest rounds after the attack."""
RULES = {
    "mean, no clipping": {"aggregation": "mean", "clip_to_median": 1e12},
    "mean": {"aggregation": "mean"},
    "median": {"aggregation": "median"},
    "trimmed": {"aggregation": "trimmed"},
    "krum": {"aggregation": "krum"},
}
ATTACKS: dict[str, Callable[[Update], Update]] = {
    "reversed": lambda update: replace(update, delta=-update.change),
    "reversed, norm 999": lambda update: replace(update, delta=update.change * (-999 / update.change.norm())),
    "no numbers": lambda update: replace(update, delta=update.change * math.nan),
    "10^12 pairs, reversed": lambda update: replace(update, delta=-update.change, pairs=10**12),
}


class Attacking(Middleware):
    """One client answers with what an attack makes of its update."""

    def __init__(self, inner: Federation, client: int, attack: Callable[[Update], Update]) -> None:
        super().__init__(inner)
        self.client, self.attack = client, attack

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in self.inner.run(params, job, clients):
            yield self.attack(update) if update.client == self.client else update


def rounds(world: World, state: Params, federation: Federation, training: TrainingConfig, first: int) -> Params:
    """A state after further rounds."""
    config, sound = world.config, Guarded(federation, training)
    for finished in fedavg(state, sound, training, config.seed, config.model.temperature, first_round=first):
        state = finished.state
    return state


def row(world: World, name: str, hostile: int, folder: Path) -> dict[str, str]:
    """Everything about one way of averaging."""
    config = world.config
    training = config.training.model_copy(update=RULES[name])
    history = History(folder / name, durable=False)
    world.server.initial().save(history.initial_path, durable=False)
    for finished in fedavg(
        history.initial(), Guarded(world.federation, training), training, config.seed, config.model.temperature
    ):
        history.append(finished)
    state = history.state(training.rounds)

    def recall(params: Params, part: str = "seen") -> str:
        return f"{recall_sets(world, params)[part]['recall@1'].mean:.1f}"

    reported = {"aggregation": name, "honest": recall(state), "test": recall(state, "test")}
    for attack, change in ATTACKS.items():
        once = training.model_copy(update={"rounds": training.rounds + 1})
        after = once.model_copy(update={"rounds": once.rounds + AGAIN})
        hit = rounds(world, state, Attacking(world.federation, hostile, change), once, once.rounds)
        reported[attack] = f"{recall(hit)} → {recall(rounds(world, hit, world.federation, after, once.rounds + 1))}"
    request = ClientRequest(clients=(hostile,))
    trained = Trained(history, training, config.model.temperature, config.seed)
    sets = evaluation_sets(world, request)
    forget = []
    for method in (make_method("ease"), make_method("retrain")):
        *_, last = method.unlearn(trained, request, Guarded(world.federation, training))
        forget.append(measure(world, last.state, sets)["forget/recall@1"])
    reported["EASE's gap"] = f"{forget[0] - forget[1]:+.1f}"
    return reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    options = parser.parse_args()
    config = load_config(options.config, (*(SMALL if options.config is None else ()), *options.changes))
    world = World.open(config)
    by_size = sorted(world.shards, key=lambda shard: len(shard.train))
    hostile = by_size[len(by_size) // 2]
    pairs = sum(len(shard.train) for shard in world.shards)
    print(f"Client {hostile.client} of {len(by_size)} attacks; it holds {len(hostile.train)} of {pairs} pairs.\n")
    with tempfile.TemporaryDirectory(prefix="ease-hostile-") as folder:
        for number, name in enumerate(RULES):
            found = row(world, name, hostile.client, Path(folder))
            if number == 0:
                print("| " + " | ".join(found) + " |\n|" + "---|" * len(found), flush=True)
            print("| " + " | ".join(found.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
