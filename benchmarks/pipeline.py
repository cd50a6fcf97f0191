"""The whole path through the command line: train, forget a client and a class, retrain, audit.

    python benchmarks/pipeline.py [--device cuda] [--shadows 8] [--keep FOLDER] [--out results.json]

Generated scenes on CLIP ViT-B/32 with random weights and adapters in all blocks: it learns little, but every step costs
what it costs with real weights. The seconds of an answer are those of its own record.
"""

import argparse
import json
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from ease.runs.answers import StoredAnswer

SETTINGS = """
device = "{device}"
[model]
backbone = "hf:{checkpoint}"
projector = "none"
lora_blocks = "all"
[training]
batch_size = 64
learning_rate = 0.01
"""


def save_checkpoint(folder: Path) -> None:
    """CLIP ViT-B/32 with random weights and a tokenizer of letters."""
    pieces = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[])
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = CLIPModel(CLIPConfig(text_config={"vocab_size": len(pieces), **ends}))
    for part in (model, tokenizer, CLIPImageProcessorPil()):
        part.save_pretrained(folder)


def ease(*arguments: str) -> float:
    """Run a command as a user would; returns its seconds, start included."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "from ease.cli import main; main()", *arguments], check=True)
    return time.perf_counter() - began


def measure(folder: Path, device: str, shadows: int) -> dict[str, Any]:
    save_checkpoint(folder / "clip-b32")
    config, run = folder / "clip.toml", folder / "run"
    config.write_text(SETTINGS.format(device=device, checkpoint=folder / "clip-b32"))
    found: dict[str, Any] = {"commands": {}, "answers": {}}
    found["commands"]["train, features included"] = ease("train", str(config), "--out", str(run))
    for request, named in {"client-3": ("--client", "3"), "class-2": ("--class", "2")}.items():
        for method in ("ease", "retrain"):
            took = ease("forget", str(run), *named, "--method", method, "--quiet")
            metrics = StoredAnswer(run / "requests" / request / method).record().metrics
            costs = {name: value for name, value in metrics.items() if name.startswith("cost/")}
            found["answers"][f"{request} {method}"] = {"command_seconds": took, **costs}
    if shadows:
        audit = ("audit", str(run), "--request", "client-3", "--shadows", str(shadows), "--quiet")
        found["commands"][f"audit client-3, {shadows} shadows"] = ease(*audit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shadows", type=int, default=8, help="of the audit; 0: none")
    parser.add_argument("--keep", type=Path, help="folder for the checkpoint and the run; else they are deleted")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, args.device, args.shadows)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
