"""Make the weights of the embedded backbone: contrastive pretraining on generated scenes.

    PYTHONPATH=src python recipes/pretrain_tiny.py

The arguments of the weights in use stand in assets/tiny.json.
Federated scenes always hold an object whose (noun, colour, texture) never occurs here, so nothing that a client
owns can have been seen in pretraining.
"""

import argparse
import hashlib
import math
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ease.data.render import SIDE, draw
from ease.data.scenes import GENERATOR_VERSION, MENTION, caption_scene, lexicon, pretraining_scenes, scene_at
from ease.model.tiny import ASSETS, CONTEXT, TinyBackbone
from ease.seeding import torch_generator
from ease.storage import write_json, write_tensors

CHUNK = 500
GALLERY = 500


def main() -> None:
    args = arguments()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    backbone = TinyBackbone(lexicon())
    pixels, tokens = training_scenes(backbone, args)
    print(f"{len(pixels)} scenes rendered in {time.monotonic() - started:.0f} s", flush=True)
    gallery = federated_gallery(args.seed)

    backbone.to(device).train()
    pixels, tokens = pixels.to(device), tokens.to(device)
    log_scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07), device=device))
    decayed = [weight for weight in backbone.parameters() if weight.ndim > 1]
    others = [weight for weight in backbone.parameters() if weight.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [*others, log_scale], "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    steps_per_epoch = len(pixels) // args.batch
    total = args.epochs * steps_per_epoch
    shuffles = torch_generator(args.seed, "pretraining order")
    step, figures = 0, {}
    training_started = time.monotonic()
    for epoch in range(args.epochs):
        order = torch.randperm(len(pixels), generator=shuffles)
        wordings = torch.randint(tokens.shape[1], (len(pixels),), generator=shuffles)
        for batch in order[: steps_per_epoch * args.batch].view(-1, args.batch):
            # The schedule follows whichever budget runs out first, so a run cut by time still ends annealed.
            elapsed = (time.monotonic() - training_started) / max(args.max_seconds - (training_started - started), 1)
            progress = min(1.0, max(step / total, elapsed))
            rate = args.learning_rate * min(1, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimiser.param_groups:
                group["lr"] = rate
            rows, wording = batch.to(device), wordings[batch].to(device)
            loss = contrastive_loss(backbone, pixels[rows], tokens[rows, wording], log_scale, args.bf16)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
            optimiser.step()
            step += 1
            if progress >= 1.0:
                break
        figures = zero_shot(backbone, *gallery)
        seconds = time.monotonic() - started
        print(f"epoch {epoch + 1} step {step} {seconds:.0f} s loss {loss.item():.3f} {figures}", flush=True)
        if progress >= 1.0:
            break
    backbone.cpu().eval()
    give_unseen_words_a_voice(backbone, tokens.cpu(), args.seed)
    whiten(backbone, args)
    save(backbone, figures, step, time.monotonic() - started, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--whitening-scenes", type=int, default=4000)
    parser.add_argument("--whitening-ridge", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--max-seconds", type=float, default=280, help="rendering included; the run ends annealed")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--out", type=Path, default=ASSETS)
    return parser.parse_args()


def training_scenes(backbone: TinyBackbone, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Pixels uint8 [scenes, 64, 64, 3] and tokens [scenes, 5, context], rendered by all workers."""
    starts = range(0, args.scenes, CHUNK)
    counts = [min(CHUNK, args.scenes - start) for start in starts]
    pixels = np.empty((args.scenes, SIDE, SIDE, 3), dtype=np.uint8)
    captions: list[tuple[str, ...]] = []
    # Forking after torch has started its threads can hang, so workers start fresh.
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = pool.map(pretraining_scenes, [args.seed] * len(starts), counts, starts)
        for start, (some_captions, some_pixels) in zip(starts, jobs, strict=True):
            pixels[start : start + len(some_pixels)] = some_pixels
            captions += some_captions
    tokens = backbone.tokenize(list(chain.from_iterable(captions))).view(args.scenes, -1, CONTEXT)
    return torch.from_numpy(pixels), tokens


def federated_gallery(seed: int) -> tuple[Tensor, list[str]]:
    """New scenes as clients have them, one caption each; their stream is not that of any data set a user loads."""
    drawn = [scene_at(seed, "pretraining gallery", index) for index in range(GALLERY)]
    captions = [caption_scene(scene, rng)[0] for scene, rng in drawn]
    return torch.from_numpy(np.stack([draw(scene, rng) for scene, rng in drawn])), captions


def contrastive_loss(backbone: TinyBackbone, pixels: Tensor, tokens: Tensor, log_scale: Tensor, bf16: bool) -> Tensor:
    """Symmetric InfoNCE over the batch."""
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=bf16):
        images, texts = backbone.image.aligned(pixels), backbone.text.aligned(tokens)
    similarity = F.normalize(images.float(), dim=-1) @ F.normalize(texts.float(), dim=-1).T
    logits = similarity * log_scale.exp().clamp(max=100)
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@torch.no_grad()
def zero_shot(backbone: TinyBackbone, pixels: Tensor, captions: list[str]) -> dict[str, float]:
    """Recall@1 in both directions by the cosine of the aligned class tokens."""
    device = next(backbone.parameters()).device
    images = backbone.image.aligned(pixels.to(device))
    texts = backbone.text.aligned(backbone.tokenize(captions).to(device))
    similarity = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
    target = torch.arange(len(similarity), device=device)
    return {
        "image_to_text/recall@1": round((similarity.argmax(1) == target).double().mean().item(), 4),
        "text_to_image/recall@1": round((similarity.argmax(0) == target).double().mean().item(), 4),
    }


@torch.no_grad()
def give_unseen_words_a_voice(backbone: TinyBackbone, tokens: Tensor, seed: int) -> None:
    """Names never occur in pretraining. Set them to random directions as long as other words, so they can be learnt."""
    weight = backbone.text.tokens.weight
    seen = torch.zeros(len(weight), dtype=torch.bool)
    seen[tokens.unique()] = True
    fresh = torch.randn(int((~seen).sum()), weight.shape[1], generator=torch_generator(seed, "unseen words"))
    weight[~seen] = F.normalize(fresh, dim=-1) * 1.5 * weight[seen].norm(dim=1).median()


@torch.no_grad()
def whiten(backbone: TinyBackbone, args: argparse.Namespace) -> None:
    """Fit the pooled outputs' whitening on further pretraining scenes, captioned as federated scenes are."""
    captions, pixels = pretraining_scenes(args.seed, args.whitening_scenes, args.scenes, MENTION)
    tokens = backbone.tokenize(list(chain.from_iterable(captions)))
    for tower, inputs in ((backbone.image, torch.from_numpy(pixels)), (backbone.text, tokens)):
        pooled = torch.cat([tower(*tower.prefix(part, 0), 0) for part in inputs.split(500)])
        tower.fit_whitening(pooled, args.whitening_ridge)


def save(
    backbone: TinyBackbone, figures: dict[str, float], steps: int, seconds: float, args: argparse.Namespace
) -> None:
    weights = args.out / "tiny.safetensors"
    tensors = dict(backbone.state_dict())
    if sum(tensor.nbytes for tensor in tensors.values()) > 10_000_000:
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    write_tensors(weights, tensors, sealed=False)
    recipe = {
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "generator_version": GENERATOR_VERSION,
        "parameters": sum(weight.numel() for weight in backbone.parameters()),
        "script": "recipes/pretrain_tiny.py",
        "seconds": round(seconds),
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "steps": steps,
        "versions": {"numpy": np.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "vocabulary": list(backbone.vocabulary),
        "zero_shot": {"gallery": GALLERY, **figures},
    }
    write_json(args.out / "tiny.json", recipe, sealed=False)
    print(f"{weights}: {weights.stat().st_size} bytes, {recipe['parameters']} parameters", flush=True)


if __name__ == "__main__":
    main()
