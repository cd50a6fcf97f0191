"""The same federated training by other programs and by ours, side by side in one run: seconds, ratios, equal weights.

make bench-peers        or: python benchmarks/peers.py --peers .venv-peers/bin/python [--repeats 8] [--threads 2]

Every contender is a process of its own with pinned threads, gets the same features, start weights and batches, and
must end in the same weights. All stay up; they take turns, so that a busy minute of the machine falls on all of them.
Flower's simulation starts anew each time, as it does for its users. Measurements add up in the file of results;
`--fresh` begins again. The tables of docs/benchmarks.md between the markers `peers` are written from it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from marked import write_section
from synthetic import Setting, write_setting

from ease.seeding import generator

HERE = Path(__file__).parent
SIZES = {
    "small": Setting(),
    "large": Setting(image=1280, text=384, hidden=512),
}
TOLERANCE = 1e-5
"""Largest distance of two contenders' final weights, as a share of how far training went: rounding, and no more."""
CONTENDERS = {
    "bare": ("PyTorch alone", "peers", ("bare.py",)),
    "pfl": ("pfl", "peers", ("pfl_sim.py",)),
    "torch_vmap": ("vmap, torch.func", "peers", ("torch_vmap.py",)),
    "jax_vmap": ("vmap, compiled by JAX", "peers", ("jax_vmap.py",)),
    "flower": ("Flower over Ray", "peers", ("flower_sim.py",)),
    "ours_loop": ("**ours: `sequential`**", "own", ("ours.py", "sequential")),
    "ours_cohort": ("**ours: `vectorized`**", "own", ("ours.py", "vectorized")),
    "ours_auto_history": ("**ours: `auto`, history on disk**", "own", ("ours.py", "auto", "history")),
}
ONE_RUN = ("flower",)
"""Contenders that start anew for every measurement."""


def write_work(folder: Path, setting: Setting) -> None:
    """Features, start weights and batches of everyone, drawn as our engines draw them."""
    world, job = setting.world(), setting.training.job(1, setting.seed, setting.temperature)
    arrays = {f"start/{name}": tensor.numpy() for name, tensor in world.model.initial().tensors.items()}
    about: dict[str, Any] = {
        "names": [name.removeprefix("start/") for name in arrays],
        "plan": {},
        "pairs": [len(shard.train) for shard in world.shards],
        "rounds": setting.rounds,
        "epochs": setting.epochs,
        "rate": setting.rate,
        "temperature": setting.temperature,
    }
    for number in range(1, setting.rounds + 1):
        for shard in world.shards:
            key, rng = f"train/{number}/{shard.client}", generator(setting.seed, "train", number, shard.client)
            places = []
            for _ in range(setting.epochs):
                order = rng.permutation(np.arange(len(shard.train)))
                for batch in np.array_split(order, job.batch_count(len(order))):
                    rng.integers(1, size=len(batch))  # the caption: there is one
                    places.append(batch)
            rows = shard.train[np.concatenate(places)]
            arrays[f"{key}/rows"] = arrays[f"{key}/lines"] = rows
            about["plan"][key] = np.cumsum([len(batch) for batch in places])[:-1].tolist()
    image, text = world.activations.image, world.activations.text[:, 0]
    np.savez(folder / "work.npz", image=image, text=text, about=np.array(json.dumps(about)), **arrays)
    write_setting(folder / "setting.json", setting)


class Contender:
    """A process that does all rounds when it is told to."""

    def __init__(
        self,
        name: str,
        pythons: dict[str, str],
        folder: Path,
        threads: int,
        made: tuple[str, tuple[str, ...]] | None = None,
    ):
        environment, (script, *rest) = made or CONTENDERS[name][1:]
        self.name, self.folder = name, folder
        self.command = [pythons[environment], str(HERE / "contenders" / script), str(folder), str(threads), *rest]
        source = {"PYTHONPATH": str(HERE.parent / "src")} if environment == "own" else {}
        count = str(threads)
        self.environment = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **source}
        self.process: subprocess.Popen[str] | None = None
        if name not in ONE_RUN:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
            )
            self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name}: its process ended; run it by hand: {' '.join(self.command)}")

    def go(self) -> dict[str, Any]:
        """Seconds of each round and of all that the caller waits for."""
        began = time.perf_counter()
        if self.process is None:
            done = subprocess.run(self.command, capture_output=True, text=True, env=self.environment)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                raise SystemExit(f"{self.name}: {done.stderr[-2000:]}")
            return json.loads(lines[-1])
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        found = self._answer()
        return {**found, "whole": time.perf_counter() - began}

    def weights(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"{self.name}.npz") as file:
            return {name: file[name] for name in file.files}

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def distance(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(one[name].astype(np.float64) - two[name]).sum() for name in two)))


def measure(setting: Setting, names: list[str], pythons: dict[str, str], threads: int, repeats: int) -> dict[str, Any]:
    """Rounds after the first, of every contender in turn; and how far its weights lie from those of PyTorch alone."""
    found: dict[str, Any] = {name: {"round": [], "whole": []} for name in names}
    with tempfile.TemporaryDirectory(prefix="ease-peers-") as name:
        folder = Path(name)
        write_work(folder, setting)
        contenders = [Contender(name, pythons, folder, threads) for name in names]
        try:
            for each in contenders:
                if each.name not in ONE_RUN:
                    each.go()  # compiled, warm
            for repeat in range(repeats):
                for each in contenders if repeat % 2 == 0 else reversed(contenders):
                    done = each.go()
                    found[each.name]["round"].append(statistics.mean(done["seconds"][1:]))
                    found[each.name]["whole"].append(done["whole"])
            start = {n: t.numpy() for n, t in setting.world().model.initial().tensors.items()}
            reference = next(each for each in contenders if each.name == "bare").weights()
            way = distance(reference, start)
            for each in contenders:
                found[each.name]["distance"] = distance(each.weights(), reference) / way
        finally:
            for each in contenders:
                each.close()
    return found


def added(stored: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Measurements of another call beside those that are there."""
    for name, values in new.items():
        known = stored.setdefault(name, {"round": [], "whole": [], "distance": 0.0})
        for kind in ("round", "whole"):
            known[kind] += values[kind]
        known["distance"] = max(known["distance"], values["distance"])
    return stored


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A line for each contender; ratios say how many times as long a round takes as ours."""
    ours = min((name for name in ("ours_loop", "ours_cohort") if name in found), key=lambda n: median(found[n]))
    cells = []
    for name, (title, _, _) in CONTENDERS.items():
        if name in found:
            each = found[name]
            ratios = [median(each) / median(found[other]) for other in ("bare", ours)]
            ratio = [f"{value:.2f}" for value in ratios]
            whole = statistics.median(each["whole"])
            times = [f"{1000 * min(each['round']):.0f}", f"{1000 * median(each):.0f}"]
            cells.append([title, *times, *ratio, f"{whole:.2f}", f"{each['distance']:.0e}", str(len(each["round"]))])
    return cells


def median(each: dict[str, Any]) -> float:
    return statistics.median(each["round"])


def section(results: dict[str, Any]) -> str:
    """The part of docs/benchmarks.md."""
    machine, lines = results["machine"], []
    lines.append(
        f"{machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}; {machine['peers']}. "
        "10 clients of 220 to 661 pairs, 4,408 in all, batch 64, 2 local epochs, SGD, fixed features of a "
        f"drawn federation. Every contender gets the same batches and must end within {TOLERANCE:g} of the way that "
        "training goes of the same weights; `apart` is what was measured. Contenders take turns. Milliseconds"
        " of a round after the first, best and median; how many times as long as PyTorch alone and as the "
        "faster of our two engines; seconds from the call to the result of 4 rounds. Ours check, meter and "
        "average in double precision; the last row also writes, seals and hashes every update on disk. `make "
        "bench-peers`."
    )
    head = ["", "best ms", "median ms", "x bare", "x ours", "whole, s", "apart", "measurements"]
    for key, found in sorted(results["sizes"].items(), reverse=True):
        name, threads = key.split("/")
        setting = SIZES[name]
        widths = f"{setting.image}-{setting.hidden}-{setting.embedding}"
        other = f"{setting.text}-{setting.hidden}-{setting.embedding}"
        both = widths if widths == other else f"{widths} and {other}"
        lines += ["", f"**{both}, {threads} thread{'s' if threads != '1' else ''}**", ""]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(cells) + " |" for cells in rows(found)]
    return "\n".join(lines)


def machine(peers: str) -> dict[str, Any]:
    import torch

    asked = (
        "import importlib.metadata as m; print(', '.join(f'{p} {m.version(p)}' for p in ('pfl', 'flwr', 'ray', 'jax')))"
    )
    versions = subprocess.run([peers, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": versions,
    }


def check(found: dict[str, Any]) -> None:
    """Refuse to compare work that is not the same."""
    for name, each in found.items():
        if each["distance"] > TOLERANCE:
            raise SystemExit(f"{name}: its weights lie {each['distance']:.1e} of the way apart: not the same work")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(HERE.parent / ".venv-peers/bin/python"), help="python of the peers")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--results", type=Path, default=HERE.parent / "build/peers.json")
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    options = parser.parse_args()
    pythons = {"peers": options.peers, "own": sys.executable}
    known = options.results.is_file() and not options.fresh
    results = json.loads(options.results.read_text()) if known else {"sizes": {}}
    names = list(dict.fromkeys(["bare", *options.only]))
    for size in options.sizes:
        for threads in options.threads:
            found = measure(SIZES[size], names, pythons, threads, options.repeats) if options.repeats else {}
            check(found)
            key = f"{size}/{threads}"
            results["sizes"][key] = added(results["sizes"].get(key, {}), found)
            results["machine"] = machine(options.peers)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(results))
            for cells in rows(results["sizes"][key]):
                print(key, *cells, sep="  ", flush=True)
    if options.write:
        write_section(HERE.parent / "docs/benchmarks.md", "peers", section(results))


if __name__ == "__main__":
    main()
