"""What the decomposition of one block costs: Gram of factors against SVD of the dense stack, time and memory.

Run it with `python benchmarks/gsd.py`. A block is a square attention layer with a LoRA adapter; its columns are
differences of products, kept as factors. Each way runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from typing import Any


def measure(way: str, width: int, columns: int, rank: int, repeats: int, threads: int) -> dict[str, Any]:
    """Decompose the same columns, a third of them forget updates, as factors or as dense vectors."""
    import torch

    from ease.params import Block, Params
    from ease.subspace import Factors, decompose, displacement, gram

    torch.set_num_threads(threads)
    rng = torch.Generator().manual_seed(0)
    block = Block("layer", "image", "lora", ("A", "B"))

    def state(scale: float) -> dict[str, torch.Tensor]:
        shapes = {"A": (rank, width), "B": (width, rank)}
        return {name: scale * torch.randn(shape, generator=rng) for name, shape in shapes.items()}

    start = Params(state(1.0), (block,))
    updates = [displacement(block, start + Params(state(0.1), (block,)), start) for _ in range(columns)]
    split = columns // 3

    def factored() -> torch.Tensor:
        f, r = updates[:split], updates[split:]
        return decompose(gram(f, f), gram(f, r), gram(r, r), 0.95).cosines

    def basis(part: list[Any]) -> torch.Tensor:
        stack = torch.stack([(c.left @ c.right).flatten() for c in part if isinstance(c, Factors)], dim=1)
        u, s, _ = torch.linalg.svd(stack, full_matrices=False)
        kept = int((s.square().cumsum(0) / s.square().sum() < 0.95 - 1e-12).sum()) + 1
        return u[:, :kept]

    def dense() -> torch.Tensor:
        own, other = basis(updates[:split]), basis(updates[split:])
        values = torch.linalg.svdvals(own.T @ other)
        return torch.cat([values, values.new_zeros(max(0, own.shape[1] - len(values)))])

    before = peak_bytes()
    run = factored if way == "factored" else dense
    cosines = run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return {
        "way": way,
        "seconds": statistics.median(seconds),
        "peak_bytes": peak_bytes() - before,
        "stored_bytes": sum(
            c.left.nbytes + c.right.nbytes if way == "factored" else c.left.shape[0] * c.right.shape[1] * 8
            for c in updates
            if isinstance(c, Factors)
        ),
        "cosines": cosines.tolist(),
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_own_process(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a block of 256 x 256 and 3 repeats")
    parser.add_argument("--columns", type=int, default=30)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    width, repeats = (256, 3) if options.quick else (768, 8)
    rows = [
        in_own_process(way, width, options.columns, options.rank, repeats, options.threads)
        for way in ("factored", "dense")
    ]
    factored, dense = rows
    error = max(abs(a - b) for a, b in zip(factored["cosines"], dense["cosines"], strict=True))
    ratios = {key: dense[key] / max(factored[key], 1e-9) for key in ("seconds", "stored_bytes")}
    # Below a page or so the peak is the interpreter's own; the factored way usually stays there.
    ratios["peak_bytes"] = dense["peak_bytes"] / max(factored["peak_bytes"], factored["stored_bytes"])
    if options.json:
        print(json.dumps({"width": width, "rows": rows, "ratios": ratios, "error": error}, allow_nan=False))
        return
    from ease.console import megabytes, screen, table

    cells = [
        [
            row["way"],
            f"{1000 * row['seconds']:.1f}",
            megabytes(row["stored_bytes"]),
            megabytes(row["peak_bytes"]),
        ]
        for row in rows
    ]
    cells.append(["ratio", *(f"{ratios[key]:.0f}" for key in ("seconds", "stored_bytes", "peak_bytes"))])
    title = f"One block of {width} x {width}, {options.columns} columns of rank-{options.rank} adapters"
    caption = f"{options.threads} threads; the cosines differ by at most {error:.1e}"
    screen.print(table(title, ["", "ms", "columns", "peak memory beyond them"], cells, caption))


if __name__ == "__main__":
    main()
