"""EASE's own engines on the same work, answers checked and metered as in a run, with a history if asked for.

python ours.py FOLDER THREADS ENGINE [history]
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from work import Weights, serve

from ease.federation.engines import make_engine
from ease.federation.fedavg import fedavg
from ease.federation.history import History
from ease.federation.middleware import Guarded

sys.path.insert(0, str(Path(__file__).parent.parent))
from synthetic import read_setting


def main() -> None:
    folder, threads, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    with_history = "history" in sys.argv[4:]
    setting = read_setting(folder / "setting.json")
    world = setting.world()
    engine = make_engine(kind, world.model, world.shards, world.activations, torch.device("cpu"))  # type: ignore[arg-type]
    start, disk = world.model.initial(), folder / f"history-{kind}"

    def rounds() -> Iterator[Weights]:
        sound = Guarded(engine, setting.training, metered=True)
        history = History(disk)
        if with_history:
            shutil.rmtree(disk, ignore_errors=True)
            start.save(history.initial_path)
        for finished in fedavg(start, sound, setting.training, setting.seed, setting.temperature):
            assert not finished.clipped and not finished.rejected
            if with_history:
                history.append(finished)
            yield dict(finished.state.tensors)

    serve(folder, f"ours_{kind}" + ("_history" if with_history else ""), rounds)


if __name__ == "__main__":
    main()
