"""One compiled program for all clients of a round, as FedJAX does it: scan over steps, vmap over clients.

python jax_vmap.py FOLDER THREADS
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

threads = int(sys.argv[2])
os.environ["XLA_FLAGS"] = (
    f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()} intra_op_parallelism_threads={threads}"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from stacked import Stack, stacks  # noqa: E402
from work import Weights, Work, serve  # noqa: E402


def embed(weights: dict[str, jax.Array], side: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    x = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    first, second = f"{side}.projector.0", f"{side}.projector.1"
    hidden = jax.nn.gelu(x @ weights[f"{first}.weight"].T + weights[f"{first}.bias"], approximate=False)
    out = hidden @ weights[f"{second}.weight"].T + weights[f"{second}.bias"]
    return out / jnp.maximum(jnp.linalg.norm(out, axis=-1, keepdims=True), 1e-6)


def rounds(work: Work, plan: list[Stack]) -> Iterator[Weights]:
    shares = jnp.asarray(np.array(work.pairs) / sum(work.pairs), dtype=jnp.float32)
    state = {name: jnp.asarray(tensor.numpy()) for name, tensor in work.start.items()}
    for stack in plan:
        state = one_round(state, IMAGE, TEXT, stack.rows, stack.lines, stack.real, shares, work.rate, work.temperature)
        jax.block_until_ready(state)
        yield {name: torch.from_numpy(np.array(value)) for name, value in state.items()}


@jax.jit
def one_round(state, image, text, rows, lines, real, shares, rate, temperature):  # type: ignore[no-untyped-def]
    def loss(weights, pictures, words, there):  # type: ignore[no-untyped-def]
        logits = embed(weights, "image", pictures) @ embed(weights, "text", words).T / temperature
        outside = jnp.where(there, 0.0, -1e30)
        to_text = jax.nn.logsumexp(logits + outside, axis=1)
        to_image = jax.nn.logsumexp(logits.T + outside, axis=1)
        each = (to_text + to_image) / 2 - jnp.diagonal(logits)
        return jnp.where(there, each, 0.0).sum() / jnp.maximum(there.sum(), 1)

    def client(rows, lines, real):  # type: ignore[no-untyped-def]
        def step(weights, batch):  # type: ignore[no-untyped-def]
            own, said, there = batch
            found = jax.grad(loss)(weights, image[own], text[said], there)
            return jax.tree.map(lambda w, g: w - rate * g, weights, found), None

        return jax.lax.scan(step, state, (rows, lines, real))[0]

    trained = jax.vmap(client)(rows, lines, real)
    return jax.tree.map(lambda tensor: jnp.tensordot(shares, tensor, axes=1), trained)


folder = Path(sys.argv[1])
torch.set_num_threads(threads)
work = Work.load(folder / "work.npz")
plan = stacks(work)
IMAGE, TEXT = jnp.asarray(work.image.numpy()), jnp.asarray(work.text.numpy())
serve(folder, "jax_vmap", lambda: rounds(work, plan))
