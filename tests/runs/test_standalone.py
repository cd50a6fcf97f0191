"""An exported folder runs by itself: in an environment without this package it gives the embeddings of the run."""

import json
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ease.commands.train import train_run
from ease.model.lora import LoraLinear
from ease.model.tiny import load_tiny
from ease.runs.config import load_config
from ease.runs.export import export
from ease.runs.run import Run
from ease.runs.standalone import merged
from ease.runs.using import Source, encode_image, encode_text

TORCH_ALONE = (
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("fsspec", "filelock", "PIL", "pillow.libs"),
)
TEXTS = ["a red car at night", "Two dogs on the BEACH"]
SCRIPT = """
import importlib.util, json, sys
assert importlib.util.find_spec("ease") is None, "this environment is not clean"
from load import Model, check
model = Model()
found = {
    "difference": check(model),
    "text": model.encode_text(TEXTS).tolist(),
    "image": model.encode_image(FILES).tolist(),
    "classes": model.classify(FILES, TEXTS).sum(-1).tolist(),
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A new environment with some of the packages that are installed here, and never this one."""

    def make(packages: tuple[str, ...] | None) -> Path:
        folder = tmp_path_factory.mktemp("clean")
        venv.create(folder, with_pip=False)
        target = next(folder.glob("lib/python*/site-packages"))
        for path in Path(site.getsitepackages()[0]).iterdir():
            ours = path.name.lower().startswith(("ease", "__editable__", "_editable")) or path.suffix == ".pth"
            if not ours and (packages is None or path.name in packages):
                (target / path.name).symlink_to(path)
        return folder / "bin" / "python"

    return make


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    """A photograph, a turned one and a transparent one, of different shapes."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    smooth = Image.fromarray(pixels).resize((700, 500))
    smooth.save(tmp_path / "wide.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth.save(tmp_path / "turned.jpg", exif=exif)
    layers = smooth.convert("RGBA")
    layers.putalpha(120)
    layers.save(tmp_path / "clear.png")
    return [str(tmp_path / name) for name in ("wide.jpg", "turned.jpg", "clear.png")]


def runs_alone(run: Run, folder: Path, python: Path, pictures: list[str]) -> None:
    export(run, None, "safetensors", folder)
    code = SCRIPT.replace("TEXTS", repr(TEXTS)).replace("FILES", repr(pictures))
    clean = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    ended = subprocess.run([python, "-c", code], cwd=folder, env=clean, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    source = Source.of(run, None)
    assert found["difference"] < 1e-4
    torch.testing.assert_close(torch.tensor(found["text"]), encode_text(source, TEXTS), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found["image"]), encode_image(source, pictures), rtol=1e-4, atol=1e-4)
    assert found["classes"] == pytest.approx([1.0] * len(pictures), abs=1e-4)
    named = {line.split("`")[1] for line in (folder / "README.md").read_text().splitlines() if line.startswith("| `")}
    assert all((folder / name).is_file() for name in named)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny", "clip"])
def test_graphs_run_without_torch(clean, checkpoint, pictures, small, tmp_path: Path, family: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    settings = () if family == "tiny" else (f"model.backbone=hf:{checkpoint(family)}", "model.lora_rank=2")
    train_run(load_config(None, (*small, *settings)), tmp_path / "run", quiet=True)
    run, folder = Run.load(tmp_path / "run"), tmp_path / "out"
    assert {"load.py", "README.md"} <= {path.name for path in export(run, None, "onnx", folder)}
    code = SCRIPT.split("found = {")[0].replace("Model, check", "Model")
    code += f"print(json.dumps([model.encode_text({TEXTS}).tolist(), model.encode_image({pictures}).tolist()]))"
    if family == "tiny":
        code = "import sys; sys.modules['torch'] = None\n" + code
    given = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    ended = subprocess.run([clean(None), "-c", code], cwd=folder, env=given, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    text, image = map(torch.tensor, json.loads(ended.stdout.splitlines()[-1]))
    source = Source.of(run, None)
    torch.testing.assert_close(text, encode_text(source, TEXTS), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(image, encode_image(source, pictures), rtol=1e-3, atol=1e-4)


def test_merged_layers_compute_what_adapters_did() -> None:
    tower = load_tiny().image
    layer = tower.blocks[3].attention.query
    adapted = LoraLinear(layer, 4, 1.5, False, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(adapted.B)
    tower.blocks[3].attention.query = adapted
    pixels = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = tower.prefix(pixels, 4)[0]
    plain = load_tiny().image
    before = plain.prefix(pixels, 4)[0]
    plain.load_state_dict(merged(tower), strict=True)
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(plain.prefix(pixels, 4)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tiny_runs_with_only_torch(clean, pictures, small, tmp_path: Path) -> None:
    train_run(load_config(None, small), tmp_path / "run", quiet=True)
    python = clean(TORCH_ALONE)
    assert subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode != 0
    runs_alone(Run.load(tmp_path / "run"), tmp_path / "out", python, pictures)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "projector"), [("clip", "mlp"), ("siglip", "none"), ("siglip2", "none")])
def test_a_checkpoint_runs_with_transformers(
    clean, checkpoint, pictures, small, tmp_path: Path, family: str, projector: str
) -> None:
    settings = (f"model.backbone=hf:{checkpoint(family)}", f"model.projector={projector}", "model.lora_rank=2")
    train_run(load_config(None, (*small, *settings)), tmp_path / "run", quiet=True)
    runs_alone(Run.load(tmp_path / "run"), tmp_path / "out", clean(None), pictures)
    # The merged checkpoint is one like any other, and can be trained on.
    again = (f"model.backbone=hf:{tmp_path / 'out' / 'checkpoint'}", *settings[1:])
    train_run(load_config(None, (*small, *again)), tmp_path / "again", quiet=True)


@pytest.mark.photos
@pytest.mark.parametrize("backbone", ["photos", "photos-vit"])
def test_photograph_encoders_run_by_themselves(clean, pictures, small, tmp_path: Path, backbone: str) -> None:
    lora = "off" if backbone == "photos" else "ffa"
    sizes = ("data.train=24", "data.test=12")
    settings = (*small, *sizes, f"model.backbone={backbone}", f"model.lora={lora}")
    train_run(load_config(None, settings), tmp_path / "run", quiet=True)
    runs_alone(Run.load(tmp_path / "run"), tmp_path / "out", clean(None), pictures)


def test_a_photo_is_prepared_as_in_training(pictures, small, tmp_path: Path) -> None:
    """The script's own preparation gives the very pixels that the encoders were trained on."""
    from ease.data.images import decode_image
    from ease.runs.standalone import _script

    (tmp_path / "load.py").write_text(_script("", "", "load_hub.txt"))
    sys.path.insert(0, str(tmp_path))
    try:
        import load

        for crop in (False, True):
            for file in pictures:
                found = load.square(file, {"image_size": 64, "crop": crop})
                np.testing.assert_array_equal(found.numpy(), decode_image(Path(file), 64, crop).pixels)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("load", None)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
