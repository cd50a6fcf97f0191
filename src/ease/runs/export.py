"""Export of a model: adapters for PEFT, plain safetensors, or both encoders as ONNX."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from ease.config import Config, validate
from ease.errors import UserError
from ease.model.backbones import checkpoint_of
from ease.model.peft import Adapter, stock_name, write_adapter
from ease.runs.run import Run
from ease.runs.standalone import write_beside_graphs, write_standalone
from ease.runs.using import Encoder, Source
from ease.storage import (
    LEFTOVER,
    read_json,
    remove_leftovers_of,
    replace_file,
    sha256,
    write_atomic,
    write_json,
    write_tensors,
)

STAGED = f"{LEFTOVER}export"
MANIFEST = ".ease-export.json"
"""Which files in a folder exports wrote, by their hashes."""


class Manifest(Config):
    files: dict[str, list[str]]


Format = Literal["peft", "safetensors", "onnx"]


def export(run: Run, request: str | None, form: Format, out: Path, card: str = "") -> list[Path]:
    """Write the trained or an unlearned model into a folder and return the files.

    The README begins with `card`, a model card in Markdown.

    All files are made in a folder of their own first, so a failed or killed export leaves none of them behind, and
    none is put in the place of a file that no earlier export wrote.
    """
    writers = {"peft": write_peft, "safetensors": write_safetensors, "onnx": write_onnx}
    _check_place(run, out)
    source, staged = Source.of(run, request), out / STAGED
    shutil.rmtree(staged, ignore_errors=True)  # of a process that was killed
    remove_leftovers_of(out / MANIFEST)
    try:
        files = [path.relative_to(staged) for path in writers[form](source, staged)]
        if card:
            usage = (staged / "README.md").read_text()
            write_atomic(staged / "README.md", f"{card}\n#{usage}".encode())  # its heading becomes a section
        _move(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return [out / path for path in files]


def _check_place(run: Run, out: Path) -> None:
    """Refuse a target folder among the run's own files."""
    own, place = run.folder.resolve(), out.resolve()
    if place.is_relative_to(own) and not place.is_relative_to(own / "exports"):
        raise UserError(f"--out {out}: is in the run among its own files; choose a folder outside of it")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; choose a folder")


def _move(staged: Path, out: Path) -> None:
    """Move staged files into a folder; only files of an earlier export are replaced."""
    manifest, known = out / MANIFEST, dict[str, list[str]]()
    if manifest.is_file():
        known = validate(Manifest, read_json(manifest), str(manifest)).files
    made = {path.relative_to(staged).as_posix(): sha256(path) for path in sorted(staged.rglob("*")) if path.is_file()}
    for name in made:
        there = out / name
        if there.exists() and (not there.is_file() or sha256(there) not in known.get(name, [])):
            raise UserError(f"{there}: is there and no export wrote it; choose another folder with --out")
    # Both versions are known while files are moved, so that a restart after a kill knows all of them.
    both = {name: [*known.get(name, []), *([made[name]] if name in made else [])] for name in {*known, *made}}
    write_json(manifest, Manifest(files=both).model_dump(mode="json"))
    for name in made:
        replace_file(staged / name, out / name)
    now = {name: [made[name]] if name in made else hashes for name, hashes in both.items()}
    write_json(manifest, Manifest(files=now).model_dump(mode="json"))


def write_safetensors(source: Source, out: Path) -> list[Path]:
    """Write a self-contained folder with the state as `Params` reads it and the shared A matrices."""
    about = {
        "model": source.config.model.model_dump(mode="json"),
        "backbone": source.backbone.fingerprint,
        "seed": source.config.seed,
        "request": source.request,
    }
    source.state.save(out / "model.safetensors", about=about)
    files, frozen = [out / "model.safetensors"], source.model.frozen_adapters()
    if frozen:
        files.append(out / "frozen.safetensors")
        write_tensors(files[-1], frozen)
    return [*files, *write_standalone(source, out)]


def write_peft(source: Source, out: Path) -> list[Path]:
    """Write adapters that PEFT puts on the stock model, the projectors, and a page on how to apply both."""
    settings = source.config.model
    checkpoint = checkpoint_of(settings.backbone)
    if checkpoint is None:
        raise UserError(
            f"--format peft: {settings.backbone!r} is not a transformers model that PEFT could adapt; "
            "use --format safetensors or onnx"
        )
    if settings.lora == "off":
        raise UserError('--format peft: the run has no adapters (model.lora = "off"); use --format safetensors or onnx')
    tensors = {**source.model.frozen_adapters(), **source.state.tensors}
    factors = {
        stock_name(block.name): (tensors[f"{block.name}.A"], tensors[f"{block.name}.B"])
        for block in source.state.blocks
        if block.kind == "lora"
    }
    files = write_adapter(out, Adapter(settings.lora_scale, factors), checkpoint)
    projectors = {
        name.replace(".projector.", "."): source.state[name]
        for block in source.state.blocks
        if block.kind == "projector"
        for name in block.tensors
    }
    if projectors:
        files.append(out / "projectors.safetensors")
        write_tensors(files[-1], projectors, sealed=False)
    files.append(out / "README.md")
    write_atomic(files[-1], _readme(checkpoint, source.request, bool(projectors)).encode())
    return files


def write_onnx(source: Source, out: Path) -> list[Path]:
    """Write `image.onnx` for uint8 pixels [n, side, side, 3] and `text.onnx` for token ids [n, tokens]."""
    if find_spec("onnxscript") is None:
        raise UserError('--format onnx needs the onnx extra: pip install "ease-unlearning[onnx]"')
    side = source.backbone.image_size
    any_size = torch.export.Dim.DYNAMIC
    examples = {
        "image": ("pixels", torch.zeros(2, side, side, 3, dtype=torch.uint8), {0: any_size}),
        "text": ("tokens", source.backbone.tokenize(["a picture", "a longer caption"]), {0: any_size, 1: any_size}),
    }
    graphs = {}
    for modality, (name, example, shape) in examples.items():
        try:
            with _quiet_exporter():
                program = torch.onnx.export(
                    Encoder(source.model, modality),
                    (example,),
                    dynamo=True,
                    dynamic_shapes=(shape,),
                    input_names=[name],
                    output_names=["embeddings"],
                    verbose=False,
                )
        except torch.onnx.OnnxExporterError as error:
            raise UserError(
                f"--format onnx: the {modality} encoder of {source.backbone.name!r} depends on its inputs in ways "
                "that a graph cannot hold; use --format safetensors"
            ) from error
        assert program is not None  # it is, with dynamo
        graphs[out / f"{modality}.onnx"] = program.model_proto.SerializeToString()
    for path, graph in graphs.items():
        write_atomic(path, graph)
    return [*graphs, *write_beside_graphs(source, out)]


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter's own log messages."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _readme(checkpoint: str, request: str | None, projectors: bool) -> str:
    what = f"after the request `{request}`" if request else "as trained"
    project = """    layers = load_file("projectors.safetensors")

    def project(features, modality):
        (w0, b0), (w1, b1) = [(layers[f"{modality}.{n}.weight"], layers[f"{modality}.{n}.bias"]) for n in (0, 1)]
        hidden = F.gelu(F.linear(F.layer_norm(features, features.shape[-1:]), w0, b0))
        return F.normalize(F.linear(hidden, w1, b1), dim=-1)
"""
    plain = """    def project(features, modality):
        return F.normalize(features, dim=-1)
"""
    return f"""# LoRA adapter of an image-text model, {what}

The adapter belongs on `{checkpoint}`. Embeddings of pictures and captions are compared by their dot product.

    import torch.nn.functional as F
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModel

    model = PeftModel.from_pretrained(AutoModel.from_pretrained("{checkpoint}"), ".").eval()
{project if projectors else plain}
    image = project(model.get_image_features(**pictures).pooler_output, "image")
    text = project(model.get_text_features(input_ids=tokens).pooler_output, "text")

`pictures` is what the checkpoint's AutoImageProcessor gives; for SigLIP 2 models of any shape (naflex) make the picture
square first. `tokens` are the ids of captions in lower case; for SigLIP they are padded to the full context.
"""
