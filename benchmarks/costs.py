"""What decomposition, retrieval, rounds and requests cost beside the plain way, and how that grows with their sizes.

python benchmarks/costs.py [--only gsd clip retrieval growth] [--write]

Each measurement runs in a process of its own, so that its peak memory is its own. `--write` writes the section `costs`
of docs/benchmarks.md.
"""

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gsd
from gsd import peak_bytes
from marked import write_section

WIDTHS = {"image": 768, "text": 512}
"""Of CLIP ViT-B/32's towers; each has 12 blocks with adapters on query and value."""


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def best(work: Callable[[], Any], repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def columns_of(width: int, rank: int, count: int, full: bool, seed: int) -> tuple[Any, list[Any]]:
    """A block and updates of it: both factors, or B alone over a shared A."""
    import torch

    from ease.params import Block, Params
    from ease.subspace import displacement

    rng = torch.Generator().manual_seed(seed)
    names = ("A", "B") if full else ("B",)
    shapes = {"A": (rank, width), "B": (width, rank)}
    block = Block("layer", "image", "lora", names)

    def drawn(scale: float) -> Params:
        return Params({name: scale * torch.randn(shapes[name], generator=rng) for name in names}, (block,))

    start = drawn(1.0)
    return block, [displacement(block, start + drawn(0.1), start) for _ in range(count)]


def clip(clients: int, rounds: int, rank: int, full: bool, threads: int) -> dict[str, float]:
    """All blocks of CLIP ViT-B/32, one after the other: Gram, spectrum and basis of one client against the others."""
    import torch

    from ease.subspace import decompose, gram, make_basis

    torch.set_num_threads(threads)
    columns_of(8, 2, 3, full, 0)
    before, seconds, seed = peak_bytes(), 0.0, 0
    for width in WIDTHS.values():
        for _ in range(12 * 2):
            _, columns = columns_of(width, rank, clients * rounds, full, seed)
            seed += 1
            began = time.perf_counter()
            square, forget = gram(columns, columns), rounds
            spectrum = decompose(square[:forget, :forget], square[:forget, forget:], square[forget:, forget:], 0.95)
            make_basis(columns[:forget], spectrum.coefficients, torch.ones_like(spectrum.cosines))
            seconds += time.perf_counter() - began
    return {"seconds": seconds, "bytes": float(peak_bytes() - before), "whole": float(peak_bytes())}


def retrieve(way: str, pairs: int, threads: int) -> dict[str, float]:
    """Recall@1, 5 and 10 both ways with five captions an image: as the audit does, or by sorting the whole matrix."""
    import torch
    from torch.nn import functional as F

    from ease.measures.retrieval import recall

    torch.set_num_threads(threads)
    rng = torch.Generator().manual_seed(0)
    image = F.normalize(torch.randn(pairs, 256, generator=rng), dim=-1)
    noise = torch.randn(pairs, 5, 256, generator=rng) / 8
    text = F.normalize(image[:, None] + noise, dim=-1)
    found: dict[str, float] = {}

    def ours() -> None:
        found["recall"] = recall(image, text).mean[1]

    def plain() -> None:
        scores = image @ text.flatten(0, 1).T
        owner = torch.arange(pairs * 5) // 5
        to_text = (owner[scores.argsort(dim=1, descending=True)] == torch.arange(pairs)[:, None])[:, :1].any(1)
        to_image = scores.argsort(dim=0, descending=True)[0] == owner
        found["recall"] = 50.0 * float(to_text.float().mean() + to_image.float().mean())

    before = peak_bytes()
    seconds = best(ours if way == "ours" else plain, 2)
    return {"seconds": seconds, "bytes": float(peak_bytes() - before), **found}


def round_seconds(clients: int, pairs: int, threads: int) -> float:
    """A round of the loop engine with checked, metered answers."""
    import torch
    from synthetic import Setting

    from ease.federation.engines import make_engine
    from ease.federation.fedavg import fedavg
    from ease.federation.middleware import Guarded

    torch.set_num_threads(threads)
    setting = Setting(clients=clients, pairs=pairs, rounds=4)
    world = setting.world()
    engine = make_engine("sequential", world.model, world.shards, world.activations, torch.device("cpu"))
    sound = Guarded(engine, setting.training, metered=True)
    rounds = fedavg(world.model.initial(), sound, setting.training, 0, setting.temperature)
    next(rounds)
    return best(lambda: next(rounds))


def request_seconds(clients: int, rounds: int, threads: int) -> float:
    """The contribution of a client, summed from a history in which it took part in every round."""
    import torch
    from synthetic import Setting

    from ease.federation.engines import make_engine
    from ease.federation.fedavg import Round
    from ease.federation.history import History
    from ease.federation.protocol import Update
    from ease.methods.base import Trained
    from ease.methods.ease.contribution import contribution_of
    from ease.requests.request import ClientRequest

    torch.set_num_threads(threads)
    setting = Setting(clients=clients, pairs=4 * clients, rounds=rounds)
    world = setting.world()
    engine = make_engine("sequential", world.model, world.shards, world.activations, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        history, state = History(Path(folder), durable=False), world.model.initial()
        state.save(history.initial_path, durable=False)
        for number in range(1, rounds + 1):
            state = state * 0.99
            history.append(Round(number, state, tuple(Update(client, 4, state) for client in range(clients))))
        trained = Trained(history, setting.training, setting.temperature, 0)
        return best(lambda: contribution_of(trained, ClientRequest(clients=(1,)), engine))


def gram_seconds(count: int, rank: int, threads: int) -> float:
    import torch

    from ease.subspace import gram

    torch.set_num_threads(threads)
    _, columns = columns_of(768, rank, count, True, 0)
    return best(lambda: gram(columns, columns))


def recall_seconds(pairs: int, threads: int) -> float:
    return retrieve("ours", pairs, threads)["seconds"]


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size: 1 means that twice the size takes twice the time."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - centre_x) ** 2 for a in x)


def growth(threads: int) -> list[str]:
    """Lines of a table: what grows, over which sizes, from how much to how much, with which exponent."""
    sweeps: list[tuple[str, str, Callable[..., float], list[tuple[int, ...]], int]] = [
        ("a round", "clients, 4,408 pairs", round_seconds, [(n, 4408) for n in (5, 10, 20, 40)], 0),
        ("a round", "pairs, 10 clients", round_seconds, [(10, n) for n in (1000, 2000, 4000, 8000)], 1),
        (
            "a client request's sum",
            "rounds it took part in, 10 clients",
            request_seconds,
            [(10, n) for n in (10, 20, 40, 80)],
            1,
        ),
        ("a client request's sum", "clients, 20 rounds", request_seconds, [(n, 20) for n in (5, 10, 20, 40)], 0),
        ("Gram of a 768 x 768 block", "columns, rank 8", gram_seconds, [(n, 8) for n in (30, 60, 120, 240)], 0),
        ("Gram of a 768 x 768 block", "rank, 60 columns", gram_seconds, [(60, n) for n in (4, 8, 16, 32)], 1),
        ("Recall@k", "images, five captions each", recall_seconds, [(n,) for n in (500, 1000, 2000, 4000)], 0),
    ]
    lines = ["| what | grows with | sizes | seconds | exponent |", "|---|---|---|---|---|"]
    for what, over, function, points, place in sweeps:
        sizes = [point[place] for point in points]
        seconds = [alone(function, *point, threads) for point in points]
        reported = (
            f"{sizes[0]:,} to {sizes[-1]:,} | {seconds[0]:.3f} to {seconds[-1]:.3f} | {exponent(sizes, seconds):.2f}"
        )
        lines.append(f"| {what} | {over} | {reported} |")
        print(lines[-1], flush=True)
    return lines


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def beside(threads: int, only: Sequence[str]) -> list[str]:
    """Lines of a table: ours beside the plain way."""
    lines = ["| what | s, ours | s, plain | times as fast | MiB, ours | MiB, plain |", "|---|---|---|---|---|---|"]
    if "gsd" in only:
        factored, dense = (gsd.in_own_process(way, 768, 30, 8, 8, threads) for way in ("factored", "dense"))
        ratio = dense["seconds"] / factored["seconds"]
        held = [max(each["peak_bytes"], each["stored_bytes"]) for each in (factored, dense)]
        seconds = f"{factored['seconds']:.4f} | {dense['seconds']:.3f} | {ratio:.0f}"
        title = "one 768 x 768 block, 30 columns of rank 8, against the SVD of dense columns"
        lines.append(f"| {title} | {seconds} | {mebibytes(held[0])} | {mebibytes(held[1])} |")
    if "retrieval" in only:
        for pairs in (1000, 5000):
            ours, plain = (alone(retrieve, way, pairs, threads) for way in ("ours", "plain"))
            assert abs(ours["recall"] - plain["recall"]) < 1e-3, "not the same recall"
            ratio = plain["seconds"] / ours["seconds"]
            seconds = f"{ours['seconds']:.2f} | {plain['seconds']:.2f} | {ratio:.1f}"
            title = f"Recall@k of {pairs:,} images and five captions each, against sorting the whole matrix"
            lines.append(f"| {title} | {seconds} | {mebibytes(ours['bytes'])} | {mebibytes(plain['bytes'])} |")
    if "clip" in only:
        for full, title in ((False, "B alone trained"), (True, "both factors trained")):
            found = alone(clip, 10, 30, 8, full, threads)
            what = f"CLIP ViT-B/32, all 48 adapted layers, 10 clients x 30 rounds of rank 8, {title}"
            lines.append(f"| {what} | {found['seconds']:.1f} | | | {mebibytes(found['bytes'])} | |")
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["gsd", "clip", "retrieval", "growth"]
    parser.add_argument("--only", nargs="+", default=parts, choices=parts)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    options = parser.parse_args()
    reported = beside(options.threads, options.only)
    grown = growth(options.threads) if "growth" in options.only else []
    if options.write:
        head = (
            f"{options.threads} thread{'s' if options.threads > 1 else ''}, best of three or median of eight, each in "
            "a process of its own; MiB beyond what it held before. `python benchmarks/costs.py --write`."
        )
        slopes = "How seconds grow, as the slope of their logarithm over that of the size: 1 is in proportion."
        text = "\n".join([head, "", *reported, "", slopes, "", *grown])
        write_section(Path(__file__).parent.parent / "docs/benchmarks.md", "costs", text)


if __name__ == "__main__":
    main()
