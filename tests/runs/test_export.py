"""Models taken out of a run: other tools must compute from the files what the run computes."""

import json
import re
import shutil
import textwrap
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from ease.commands.train import train_run
from ease.config import to_toml
from ease.errors import UserError
from ease.methods import make_method
from ease.model.backbones import load_backbone
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.runs import export
from ease.runs.answers import answer_of
from ease.runs.config import load_config
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import read_json, read_noted, read_tensors, write_json

ADAPTED = ("model.lora=ffa", "model.lora_rank=2", "model.lora_blocks=2", "model.lora_scale=1.5")


@pytest.fixture(scope="module")
def trained(small, shared_cache, tmp_path_factory):
    """Makes a run over a backbone, once for equal settings. Export to elsewhere."""
    made: dict[str, Run] = {}

    def make(*settings: str) -> Run:
        config = load_config(None, (*small, "model.lora=ffa", *settings))
        if (key := to_toml(config)) not in made:
            folder = tmp_path_factory.mktemp("trained") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EASE_CACHE", str(shared_cache))
                train_run(config, folder, quiet=True)
            made[key] = Run.load(folder)
        return made[key]

    return make


@pytest.fixture(scope="module")
def finished(trained, shared_cache):
    """The same, and client 1 is forgotten in it."""

    def make(*settings: str) -> Run:
        run = trained(*settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EASE_CACHE", str(shared_cache))
            list(forget(run, World.open(run.config), ClientRequest(clients=(1,)), make_method("ease"), False))
        return run

    return make


@pytest.fixture(scope="module")
def tiny(finished) -> Run:
    return finished()


def unlearned(run: Run) -> Params:
    return answer_of(run, ClientRequest(clients=(1,)), make_method("ease")).model()


def pictures(size: int, count: int = 2) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=rng)


@cache
def encoder(folder: Path) -> DualEncoder:
    config = Run.load(folder).config
    return DualEncoder(load_backbone(config.model.backbone), config.model, config.seed)


def embed(run: Run, state: Params, modality: str, inputs: torch.Tensor) -> torch.Tensor:
    """What the run's own model makes of inputs under a state."""
    model = encoder(run.folder)
    branch = getattr(model, modality)
    with torch.no_grad():
        return model.embed(state.tensors, modality, *branch.tower.prefix(inputs, branch.first))


# --- PEFT ---


@pytest.mark.parametrize(
    ("family", "lora", "projector"), [("clip", "ffa", "mlp"), ("siglip", "full", "none"), ("siglip2", "ffa", "none")]
)
def test_peft_and_its_page_give_the_embeddings_of_the_run(
    ease, checkpoint, processed, finished, tmp_path: Path, monkeypatch, family: str, lora: str, projector: str
) -> None:
    """The code of the exported page runs as it is, on the stock model."""
    pytest.importorskip("peft")
    folder = checkpoint(family)
    run = finished(f"model.backbone=hf:{folder}", *ADAPTED, f"model.lora={lora}", f"model.projector={projector}")
    result = ease(
        "export", run.folder, "--request", "client-1", "--format", "peft", "--out", tmp_path / "out", "--json"
    )
    assert result.code == 0, result.err
    names = {Path(file).name for file in json.loads(result.out)["files"]}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"} | (
        {"projectors.safetensors"} if projector == "mlp" else set()
    )
    tokens = load_backbone(f"hf:{folder}").tokenize(["a dog", "the beach"])
    code = "\n".join(re.findall(r"(?m)^(?:    .*|)$", (tmp_path / "out" / "README.md").read_text()))
    given = {"pictures": processed(folder, pictures(32)), "tokens": tokens}
    monkeypatch.chdir(tmp_path / "out")
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        exec(textwrap.dedent(code), given)
    for modality, inputs in (("image", pictures(32)), ("text", tokens)):
        expected = embed(run, unlearned(run), modality, inputs)
        trained = embed(run, run.history.state(2), modality, inputs)
        assert (expected - trained).abs().max() > 1e-3  # or the trained model would do as well
        torch.testing.assert_close(given[modality], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "lora"), [("siglip2", "ffa"), ("siglip", "full")])
def test_an_exported_adapter_can_be_imported_again(
    ease, checkpoint, trained, tmp_path: Path, family: str, lora: str
) -> None:
    """Another seed draws another A; the imported products must win over it."""
    run = trained(f"model.backbone=hf:{checkpoint(family)}", *ADAPTED, f"model.lora={lora}", "model.projector=none")
    assert ease("export", run.folder, "--format", "peft", "--out", tmp_path / "out").code == 0
    again = run.config.model.model_copy(update={"adapter": tmp_path / "out"})
    model = DualEncoder(load_backbone(again.backbone), again, seed=9)
    inputs = pictures(32)
    restored = model.embed(model.initial().tensors, "image", *model.image.tower.prefix(inputs, model.image.first))
    torch.testing.assert_close(restored, embed(run, run.history.state(2), "image", inputs), rtol=1e-4, atol=1e-5)
    for name, tensor in run.history.state(2).tensors.items():
        torch.testing.assert_close(model.initial()[name], tensor, rtol=1e-4, atol=1e-6)


def test_training_can_start_from_an_adapter_named_in_a_file(ease, checkpoint, trained, small, tmp_path: Path) -> None:
    """Paths in the file are meant from the file; w_0 of the run is the adapter."""
    backbone = f"model.backbone=hf:{checkpoint('clip')}"
    source = trained(backbone, *ADAPTED)
    assert ease("export", source.folder, "--format", "peft", "--out", tmp_path / "conf" / "adapter").code == 0
    shutil.copytree(checkpoint("clip"), tmp_path / "conf" / "clip")
    (tmp_path / "conf" / "c.toml").write_text('[model]\nbackbone = "hf:clip"\nadapter = "adapter"\n')
    settings = [word for setting in (*small, *ADAPTED) for word in ("--set", setting)]
    result = ease("train", tmp_path / "conf" / "c.toml", "--out", tmp_path / "run", "--quiet", *settings)
    assert result.code == 0, result.err
    start, trained = Run.load(tmp_path / "run").history.initial(), source.history.state(2)
    lora = [name for name in start.tensors if name.endswith(".B")]
    assert lora
    for name in lora:
        torch.testing.assert_close(start[name], trained[name], rtol=1e-4, atol=1e-6)

    weights = tmp_path / "conf" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    for command in ("forget", tmp_path / "run", "--client", 1), ("export", tmp_path / "run"):
        refused = ease(*command)
        assert refused.code == 2 and "conf/adapter is not the one this run began from; restore it" in refused.err


def test_weights_that_were_changed_after_the_training_are_not_exported(ease, checkpoint, trained, tmp_path) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "clip")
    run = trained(f"model.backbone=hf:{folder}", *ADAPTED)
    assert ease("export", run.folder, "--out", tmp_path / "out").code == 0
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    refused = ease("export", run.folder, "--out", tmp_path / "other")
    assert refused.code == 2 and "are not those this run was trained on; restore them" in refused.err
    assert not (tmp_path / "other").exists()


# --- safetensors ---


def test_safetensors_hold_the_state_its_frozen_part_and_where_it_comes_from(ease, tiny: Run, tmp_path: Path) -> None:
    assert ease("export", tiny.folder, "--request", "client-1", "--out", tmp_path).code == 0
    exported, state = Params.load(tmp_path / "model.safetensors"), unlearned(tiny)
    assert exported.blocks == state.blocks
    assert all(torch.equal(exported[name], tensor) for name, tensor in state.tensors.items())
    note = read_noted(tmp_path / "model.safetensors")[1]
    assert note["request"] == "client-1" and ModelConfig(**note["model"]) == tiny.config.model
    frozen = DualEncoder(load_backbone("tiny"), tiny.config.model, note["seed"]).frozen_adapters()
    written = read_tensors(tmp_path / "frozen.safetensors")
    assert frozen.keys() == written.keys() and all(torch.equal(written[name], frozen[name]) for name in frozen)


def test_without_a_request_the_trained_model_goes_into_the_run(ease, tiny: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.folder, tmp_path / "run")
    result = ease("export", folder)
    assert result.code == 0 and str(folder / "exports" / "trained" / "safetensors" / "model.safetensors") in result.out
    exported = Params.load(folder / "exports" / "trained" / "safetensors" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in tiny.history.state(2).tensors.items())


# --- ONNX ---


def run_onnx(path: Path, inputs: torch.Tensor) -> torch.Tensor:
    session = pytest.importorskip("onnxruntime").InferenceSession(path.read_bytes())
    (given,) = session.get_inputs()
    return torch.from_numpy(session.run(None, {given.name: inputs.numpy()})[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny", "clip", "siglip", "siglip2"])
def test_onnx_graphs_give_the_embeddings_of_the_run(ease, checkpoint, finished, tmp_path: Path, family: str) -> None:
    """For other numbers of pictures and tokens than the graph was made with."""
    pytest.importorskip("onnxscript")
    run = finished() if family == "tiny" else finished(f"model.backbone=hf:{checkpoint(family)}", *ADAPTED)
    result = ease("export", run.folder, "--request", "client-1", "--format", "onnx", "--out", tmp_path, "--quiet")
    assert result.code == 0 and result.err == "", result.err
    backbone = load_backbone(run.config.model.backbone)
    inputs = {
        "image": pictures(backbone.image_size, count=5),
        "text": backbone.tokenize(["a dog", "on", "the beach", "a dog on a beach"]),
    }
    for modality, given in inputs.items():
        expected = embed(run, unlearned(run), modality, given)
        torch.testing.assert_close(run_onnx(tmp_path / f"{modality}.onnx", given), expected, rtol=1e-4, atol=1e-5)


def test_onnx_without_its_packages_is_one_line(ease, tiny: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    result = ease("export", tiny.folder, "--format", "onnx", "--out", tmp_path / "out")
    assert result.code == 2 and 'pip install "ease-unlearning[onnx]"' in result.err and result.err.count("\n") == 1


@pytest.mark.slow
def test_an_encoder_that_no_graph_can_hold_is_one_line_and_leaves_nothing(tiny: Run, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    source = export.Source.of(tiny, None)

    class Branching(torch.nn.Module):
        first = 0

        def prefix(self, inputs: torch.Tensor, first: int) -> tuple[torch.Tensor, None]:
            return inputs[: int(inputs.max())], None

    source.model.image.tower = Branching()
    with pytest.raises(UserError, match=r"the image encoder of 'tiny'.*use --format safetensors"):
        export.write_onnx(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--format", "peft"), ("'tiny' is not a transformers model", "--format safetensors or onnx")),
        (("--request", "client-9"), ("client-9", "finished: client-1/ease")),
        (("--format", "pickle"), ("pickle",)),
    ],
)
def test_user_errors_are_one_line(ease, tiny: Run, tmp_path: Path, arguments: tuple, parts: tuple) -> None:
    result = ease("export", tiny.folder, "--out", tmp_path / "out", *arguments)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    assert all(part in result.err for part in parts), result.err
    assert not (tmp_path / "out").exists()


def test_peft_needs_adapters(ease, checkpoint, trained, tmp_path: Path) -> None:
    run = trained(f"model.backbone=hf:{checkpoint('clip')}", "model.lora=off")
    result = ease("export", run.folder, "--format", "peft", "--out", tmp_path / "out")
    assert result.code == 2 and 'model.lora = "off"' in result.err


def test_states_of_another_model_are_refused(ease, tiny: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.folder, tmp_path / "run")
    marker = read_json(folder / "run.json")
    marker["config"]["model"]["lora_blocks"] = 2
    write_json(folder / "run.json", marker)
    result = ease("export", folder)
    assert result.code == 2 and "do not fit the model" in result.err


# --- where an export may write ---


def test_an_export_overwrites_no_file_that_it_did_not_write(ease, trained, tmp_path: Path) -> None:
    run, out = trained(), tmp_path / "mine"
    out.mkdir()
    (out / "README.md").write_text("my notes")
    refused = ease("export", run.folder, "--format", "safetensors", "--out", out)
    assert refused.code == 2 and "README.md: is there and no export wrote it" in refused.err
    assert (out / "README.md").read_text() == "my notes" and [path.name for path in out.iterdir()] == ["README.md"]
    (out / "README.md").unlink()
    for _ in range(2):  # an earlier export may be written over, unless someone changed it
        assert ease("export", run.folder, "--format", "safetensors", "--out", out).code == 0
    (out / "load.py").write_text("my own")
    assert ease("export", run.folder, "--format", "safetensors", "--out", out).code == 2
    assert (out / "load.py").read_text() == "my own"


def test_an_export_writes_nothing_among_the_runs_own_files(ease, trained, tmp_path: Path) -> None:
    run = trained()
    before = sorted(run.folder.rglob("*"))
    (tmp_path / "link").symlink_to(run.folder)
    for out in (run.folder / "evidence", run.folder, run.folder / "exports" / ".." / "rounds", tmp_path / "link" / "x"):
        refused = ease("export", run.folder, "--format", "safetensors", "--out", out)
        assert refused.code == 2 and "is in the run" in refused.err
    assert sorted(run.folder.rglob("*")) == before


def test_an_export_that_fails_or_is_killed_leaves_nothing_unfinished(trained, tmp_path: Path, monkeypatch) -> None:
    run, out = trained(), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("ease.runs.standalone.write_atomic", lambda *_: (_ for _ in ()).throw(UserError("disk full")))
        with pytest.raises(UserError, match="disk full"):
            export.export(run, None, "safetensors", out)
    assert not list(out.rglob("*"))
    left = out / export.STAGED
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_bytes(b"half")  # of a killed one
    export.export(run, None, "safetensors", out)
    assert not left.exists() and (out / "weights.safetensors").stat().st_size > 4
