"""A federated round on one GPU: clients one after the other against all in one pass, for real CLIP architectures.

    python benchmarks/gpu.py [--model clip-b32 clip-l14 siglip] [--clients 10] [--batch 64] [--out results.json]

Weights are drawn at random: speed does not depend on them. Times are taken with device events.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from ease.data.examples import Examples, Streamed
from ease.federation.microbatching import GroupSize, train_in_groups
from ease.federation.objectives import Draw, embed_states
from ease.federation.protocol import LocalJob, Optimiser
from ease.federation.stacked import LocalTraining, train_stacked
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.model.hub import ClipImageTower, ClipTextTower, HubBackbone, SiglipImageTower, SiglipTextTower
from ease.model.losses import info_nce
from ease.params import Params

LARGE_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}
LARGE_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


def architecture(name: str, device: torch.device) -> HubBackbone:
    """The towers of a published architecture with random weights, frozen, in bf16."""
    if name == "siglip":
        model = SiglipModel(SiglipConfig())
        towers: tuple[Any, ...] = (SiglipImageTower, SiglipTextTower)
    else:
        large = name == "clip-l14"
        settings = {"vision_config": LARGE_VISION, "text_config": LARGE_TEXT, "projection_dim": 768} if large else {}
        model = CLIPModel(CLIPConfig(**settings))
        towers = (ClipImageTower, ClipTextTower)
    text = model.config.text_config
    image_tower = towers[0](model, model.config.vision_config.image_size, (0.5,) * 3, (0.5,) * 3)
    backbone = HubBackbone(name, "random", image_tower, towers[1](model), None, text.max_position_embeddings)
    return backbone.halve().to(device)


def draw_examples(model: DualEncoder, backbone: HubBackbone, pairs: int, device: torch.device) -> Examples:
    """Random pictures and captions of full length, through the frozen prefix."""
    rng = torch.Generator().manual_seed(0)
    size, vocabulary = backbone.image_size, backbone.text.embeddings.token_embedding.num_embeddings
    pixels = torch.randint(0, 256, (pairs, size, size, 3), generator=rng, dtype=torch.uint8)
    tokens = torch.randint(3, vocabulary - 2, (pairs, backbone.context), generator=rng)
    if isinstance(backbone.text, ClipTextTower):
        tokens[:, -1] = backbone.text.end if backbone.text.end != 2 else vocabulary - 1
    states: dict[str, list[torch.Tensor]] = {"image": [], "text": [], "mask": []}
    with torch.no_grad():
        for start in range(0, pairs, 64):
            states["image"].append(
                model.image.tower.prefix(pixels[start : start + 64].to(device), model.image.first)[0]
            )
            text, mask = model.text.tower.prefix(tokens[start : start + 64].to(device), model.text.first)
            states["text"].append(text)
            states["mask"] += [] if mask is None else [mask]
    mask = torch.cat(states["mask"])[:, None] if states["mask"] else None
    return Examples(torch.cat(states["image"]), torch.cat(states["text"])[:, None], mask)


def on_host(examples: Examples) -> Examples:
    """The same examples, kept in the host's memory and streamed to the device."""
    image, text, mask = (
        None if part is None else Streamed(part.cpu().numpy(), np.arange(len(part)), part.device)
        for part in (examples.image, examples.text, examples.text_mask)
    )
    return replace(examples, image=image, text=text, text_mask=mask)


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median over repeats, by device events, after two rounds of warming up."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


def measure(name: str, clients: int, batch: int, steps: int, repeats: int, device: torch.device) -> dict[str, float]:
    backbone = architecture(name, device)
    config = ModelConfig(backbone=name, lora_blocks="all", projector="none" if name != "siglip" else "mlp")
    model = DualEncoder(backbone, config, 0).to(device)
    start = model.initial()
    examples = draw_examples(model, backbone, clients * batch, device)
    job = LocalJob(
        round=1, seed=0, stream="bench", optimiser=Optimiser(learning_rate=0.01), epochs=1, batch_size=batch,
        temperature=0.07,
    )  # fmt: skip
    positions = np.arange(clients * batch).reshape(clients, batch)
    trainings = [LocalTraining(start, (Draw(own, np.zeros(batch, dtype=np.int64)),) * steps) for own in positions]

    room = GroupSize.on(device)

    def together() -> None:
        list(train_in_groups(model, examples, trainings, job, room))

    def loop() -> None:
        for one in trainings:
            train_stacked(model, examples, [replace(one, draws=one.draws[:1])], job)

    streamed_examples = on_host(examples)

    def streamed() -> None:
        list(train_in_groups(model, streamed_examples, trainings, job, room))

    def forward() -> None:
        with torch.no_grad():
            model.embed(start.tensors, "image", examples.image)
            mask = None if examples.text_mask is None else examples.text_mask[:, 0]
            model.embed(start.tensors, "text", examples.text[:, 0], mask)

    torch.cuda.reset_peak_memory_stats()
    round_seconds = seconds(together, repeats)
    peak = torch.cuda.max_memory_allocated()
    pairs = clients * batch
    operations = count_flops(model, start, examples, batch) * pairs
    streamed_seconds, loop_seconds, forward_seconds = (seconds(each, repeats) for each in (streamed, loop, forward))
    for tower in (model.image.tower, model.text.tower):
        tower.compile_blocks(0)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    together()
    torch.cuda.synchronize()
    compiling = time.perf_counter() - began
    compiled_seconds = seconds(together, repeats)
    return {
        "pairs_per_second_together": pairs * steps / round_seconds,
        "pairs_per_second_streamed": pairs * steps / streamed_seconds,
        "pairs_per_second_compiled": pairs * steps / compiled_seconds,
        "teraflops_compiled": operations * steps / compiled_seconds / 1e12,
        "peak_gib_compiled": torch.cuda.max_memory_allocated() / 2**30,
        "seconds_to_compile": compiling,
        "pairs_per_second_loop": pairs / loop_seconds,
        "pairs_per_second_forward": pairs / forward_seconds,
        "teraflops_together": operations * steps / round_seconds / 1e12,
        "peak_gib": peak / 2**30,
        "clients_in_one_pass": min(clients, room.models),
        "megabytes_per_client": start.bytes / 1e6,
    }


def layers_flops(x: Any, weight: Any, bias: Any, low: Any, ups: Any, *_: Any, **__: Any) -> int:
    adapted, _, out, rank = ups
    return 2 * x[0] * (x[1] * weight[0] + adapted * out * rank)


def attention_flops(products: int) -> Callable[..., int]:
    """Products of tokens by tokens by width; the first tensor of a rank of 5 holds queries, keys and values."""

    def count(*shapes: Any, **_: Any) -> int:
        batch, tokens, _, heads, width = next(shape for shape in shapes if len(shape) == 5)
        return products * 2 * batch * heads * tokens * tokens * width

    return count


OWN_FLOPS = {
    torch.ops.ease.adapted_layers: layers_flops,
    torch.ops.ease.few_tokens: attention_flops(2),
    torch.ops.ease.few_tokens_backward: attention_flops(5),
}
"""torch does not look into operations that are not its own; it counts five products for a backward pass, too."""


def count_flops(model: DualEncoder, start: Params, examples: Examples, batch: int) -> float:
    """Operations for each pair of one training step, forward and backward, as torch counts them."""
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in start.tensors.items()}
    states = examples.batch(np.arange(batch), np.zeros(batch, dtype=np.int64))
    with FlopCounterMode(display=False, custom_mapping=OWN_FLOPS) as counter:
        info_nce(*embed_states(model, tensors, states), 0.07).backward()
    return counter.get_total_flops() / batch


def matmul_teraflops(repeats: int, device: torch.device, size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, repeats) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["clip-b32", "clip-l14", "siglip"])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matmul_teraflops": matmul_teraflops(20, device),
    }
    print(results, flush=True)
    for name in args.model:
        found = measure(name, args.clients, args.batch, args.steps, args.repeats, device)
        found["share_of_matmul"] = found["teraflops_together"] / results["matmul_teraflops"]
        found["ratio"] = found["pairs_per_second_together"] / found["pairs_per_second_loop"]
        results[name] = found
        print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
