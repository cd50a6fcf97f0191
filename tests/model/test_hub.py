"""Towers of transformers checkpoints against the stock models they are cut from."""

import json
import shutil
import string
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch
from PIL import Image

from ease.data.images import decode_image
from ease.errors import UserError
from ease.methods import make_method
from ease.model import hub
from ease.model.backbones import anchor_checkpoint, checkpoint_of, load_backbone
from ease.model.dual_encoder import DualEncoder, ModelConfig
from ease.model.losses import info_nce
from ease.requests.request import ClientRequest
from ease.runs.answers import answer_of
from ease.runs.config import load_config
from ease.runs.evaluation import evaluation_sets, measure
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World

transformers = pytest.importorskip("transformers")

FAMILIES = ("clip", "siglip", "siglip2")
CAPTIONS = ["a dog", "A dog on the beach", "the dog " * 20]


def pictures(count: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def stock_model(folder: Path) -> torch.nn.Module:
    with hub.quiet_transformers():
        return transformers.AutoModel.from_pretrained(folder).eval()


def stock_image(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.get_image_features(**inputs).pooler_output


def stock_text(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.get_text_features(input_ids=tokens).pooler_output


def adapted(folder: Path, **settings) -> DualEncoder:
    settings = {"lora_rank": 2, "lora_blocks": 2, "hidden": 8, "embedding": 4, **settings}
    return DualEncoder(load_backbone(f"hf:{folder}"), ModelConfig(backbone=f"hf:{folder}", **settings), seed=0)


# --- the same embeddings ---


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_towers_give_the_stock_embeddings_at_every_split(checkpoint, processed, family: str, first: int) -> None:
    folder = checkpoint(family)
    backbone, stock = load_backbone(f"hf:{folder}"), stock_model(folder)
    tokens = backbone.tokenize(CAPTIONS)
    expected = {"image": stock_image(stock, processed(folder, pictures())), "text": stock_text(stock, tokens)}
    for modality, inputs in (("image", pictures()), ("text", tokens)):
        tower = getattr(backbone, modality)
        with torch.no_grad():
            states, mask = tower.prefix(inputs, first)
            pooled = tower(states, mask, first)
        assert pooled.shape == (3, tower.width) and tower.depth == 3
        assert expected[modality].std(dim=0).max() > 1e-3  # or any tower would do
        torch.testing.assert_close(pooled, expected[modality], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_and_no_projector_leave_the_checkpoint_as_it_was(checkpoint, processed, family: str) -> None:
    """w_0 of `projector = "none"` is the stock model: its unit-norm embeddings, in its aligned space."""
    folder = checkpoint(family)
    width = 24 if family == "clip" else 40
    model, stock = adapted(folder, projector="none"), stock_model(folder)
    tokens = load_backbone(f"hf:{folder}").tokenize(CAPTIONS)
    expected = stock_image(stock, processed(folder, pictures())), stock_text(stock, tokens)
    for modality, inputs, features in zip(("image", "text"), (pictures(), tokens), expected, strict=True):
        tower = getattr(model, modality).tower
        embedded = model.embed(model.initial().tensors, modality, *tower.prefix(inputs, 1))
        assert embedded.shape == (3, width)
        torch.testing.assert_close(embedded, features / features.norm(dim=-1, keepdim=True), rtol=1e-5, atol=1e-5)
    assert all(block.kind == "lora" for block in model.blocks)


@pytest.mark.parametrize("legacy", [False, True])
def test_clip_is_pooled_at_the_first_end_token(checkpoint, tmp_path: Path, legacy: bool) -> None:
    """The end token also pads, and old configurations name a wrong one: there the largest token is the end."""
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "clip")
    config = json.loads((folder / "config.json").read_text())
    if legacy:
        config["text_config"]["eos_token_id"] = hub.LEGACY_END
        (folder / "config.json").write_text(json.dumps(config))
    backbone, stock = load_backbone(f"hf:{folder}"), stock_model(folder)
    tokens = backbone.tokenize(["cab", "a longer one"])
    assert stock.config.text_config.eos_token_id == (2 if legacy else 53)
    _, mask = backbone.text.prefix(tokens, 1)
    assert mask.sum(1).tolist() == [5, 12]  # start, c, a, b, end; the other is cut at the context
    states = backbone.text(*backbone.text.prefix(tokens, 1), 1)
    torch.testing.assert_close(states, stock_text(stock, tokens), rtol=1e-5, atol=1e-5)


# --- captions and pictures ---


def test_captions_fill_the_context_as_each_family_was_trained(checkpoint) -> None:
    clip, siglip, siglip2 = (load_backbone(f"hf:{checkpoint(family)}") for family in FAMILIES)
    assert clip.tokenize(["ab", "a"]).tolist() == [[52, 0, 27, 53], [52, 26, 53, 53]]
    assert siglip.tokenize(["A dog"]).tolist() == [[2, 3] + [0] * 10]
    assert siglip2.tokenize(["Ab"]).tolist()[0].count(0) == 10
    for backbone in (clip, siglip, siglip2):
        assert backbone.tokenize(["dog " * 50]).shape == (1, 12)
    assert clip.tokenize(["dog " * 50])[0, -1] == 53


ODD_CAPTIONS = ["A dog, on the BEACH!", "two\nlines\tand  spaces", "the dog's ball (red)", "dog " * 30, "x"]


def sentencepiece_tokenizer(folder: Path):
    """As SigLIP's: pieces of a trained model, one token for both the end and the padding."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    pytest.importorskip("google.protobuf")
    lines = ["a dog on the beach", "two lines and spaces", "the dogs ball red x"] * 20
    special = {"unk_id": 0, "eos_id": 1, "bos_id": -1, "pad_id": -1}
    prefix, silent = str(folder / "pieces"), 2
    trainer.train(
        sentence_iterator=iter(lines),
        model_prefix=prefix,
        vocab_size=40,
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        minloglevel=silent,
        **special,
    )
    return transformers.SiglipTokenizer(f"{prefix}.model", model_max_length=12)


def gemma_tokenizer(folder: Path):
    """As in the SigLIP 2 checkpoints of fixed size: pieces with bytes for all else, an end token and right padding."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.ascii_lowercase]
    vocabulary = {piece: n for n, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    return transformers.GemmaTokenizer(
        vocab=vocabulary, merges=[], add_bos_token=False, add_eos_token=True, padding_side="right"
    )


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, gemma_tokenizer])
def test_siglip_captions_are_what_the_stock_processor_makes_of_small_letters(checkpoint, tmp_path, make) -> None:
    folder = shutil.copytree(checkpoint("siglip"), tmp_path / "siglip")
    (folder / "tokenizer.json").unlink()
    with hub.quiet_transformers():
        make(tmp_path).save_pretrained(folder)
        processor = transformers.AutoProcessor.from_pretrained(folder)
    ours = load_backbone(f"hf:{folder}")
    stock = processor(
        text=[text.lower() for text in ODD_CAPTIONS], padding="max_length", truncation=True, max_length=12
    )
    assert ours.tokenize(ODD_CAPTIONS).tolist() == stock["input_ids"]
    end, pad = ours.tokenizer.eos_token_id, ours.tokenizer.pad_token_id
    assert ours.tokenize(["x"])[0, 1:].tolist()[-9:] == [pad] * 9 and end in ours.tokenize(["x"])
    assert ours.tokenize(["dog " * 30])[0, -1] == end
    plain = torch.equal(*ours.tokenize(["A dog, on the BEACH!", "a dog on the beach"]))
    assert plain == (make is sentencepiece_tokenizer), "SigLIP's own tokenizer drops punctuation, Gemma's keeps it"


@pytest.mark.parametrize("pad", ["<|endoftext|>", "z"])
def test_clip_captions_end_where_they_end_whatever_pads_them(checkpoint, tmp_path: Path, pad: str) -> None:
    """Most checkpoints pad with the end token, some with another: the stock model gives the same embeddings."""
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "clip")
    with hub.quiet_transformers():
        vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
        transformers.CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=pad).save_pretrained(folder)
        processor = transformers.AutoProcessor.from_pretrained(folder)
    captions = ["cab", "A BAD cab", "a " * 30]
    backbone, stock = load_backbone(f"hf:{folder}"), stock_model(folder)
    full = processor(text=captions, padding="max_length", truncation=True, max_length=12, return_tensors="pt")
    assert (full["input_ids"][0, 5:] == vocabulary[pad]).all()
    assert torch.equal(backbone.tokenize(captions), full["input_ids"])
    assert torch.equal(backbone.tokenize(captions[:2]), full["input_ids"][:2, :9]), "no longer than the longest"
    states, mask = backbone.text.prefix(backbone.tokenize(captions), 1)
    assert mask.sum(1).tolist() == [5, 9, 12]
    with torch.no_grad():
        expected = stock.get_text_features(**full).pooler_output
    torch.testing.assert_close(backbone.text(states, mask, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_pictures_of_any_shape_arrive_as_the_stock_processor_makes_them(checkpoint, tmp_path, family: str) -> None:
    """CLIP's cuts out the middle, SigLIP's squashes: a picture twice as wide as high tells them apart."""
    folder = shutil.copytree(checkpoint(family), tmp_path / family)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    square = {"height": 32, "width": 32}
    sizes = {"size": {"shortest_edge": 32}, "crop_size": square} if family == "clip" else {"size": square}
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, **sizes}))
    rows, columns = np.mgrid[0:64, 0:128]
    picture = np.stack([rows * 4, columns * 2, (rows + columns) % 256], axis=-1).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")

    backbone = load_backbone(f"hf:{folder}")
    assert backbone.crop == (family == "clip")
    made = decode_image(tmp_path / "a.png", backbone.image_size, backbone.crop).pixels
    ours = backbone.image.normalised(torch.tensor(made)[None])[0, :2]
    with hub.quiet_transformers():
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
    stock = processor(images=picture, return_tensors="pt")["pixel_values"][0, :2]
    assert (ours - stock).abs().max() < 0.03  # one step of 255 is 0.015 at most
    squashed = decode_image(tmp_path / "a.png", 32, not backbone.crop).pixels
    other = backbone.image.normalised(torch.tensor(squashed)[None])[0, :2]
    assert (other - stock).abs().max() > 0.3, "the wrong way is seen"


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_run_reads_its_pictures_as_its_checkpoint_does(checkpoint, small, tmp_path: Path, family: str) -> None:
    lines = []
    for number in range(8):
        wide = np.random.default_rng(number).integers(0, 256, (16, 48, 3), dtype=np.uint8)
        Image.fromarray(wide).save(tmp_path / f"{number}.png")
        lines.append({"image": f"{number}.png", "caption": "a dog", "split": "test" if number > 5 else "train"})
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    own = (f"model.backbone=hf:{checkpoint(family)}", "data.name=folder", f"data.path={tmp_path}", "model.lora_rank=2")
    world = World.open(load_config(None, (*small, *own)))
    expected = decode_image(tmp_path / "0.png", 32, crop=family == "clip").pixels
    assert np.array_equal(world.evaluator.pairs.pixels[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_sizes_are_resized_and_other_shapes_refused(checkpoint, family: str) -> None:
    tower = load_backbone(f"hf:{checkpoint(family)}").image
    grey = torch.full((1, 64, 64, 3), 90, dtype=torch.uint8)
    torch.testing.assert_close(tower.prefix(grey, 3)[0], tower.prefix(grey[:, :32, :32], 3)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="square RGB pictures, not 64 x 32 x 3"):
        tower.prefix(grey[:, :, :32], 0)
    with pytest.raises(UserError, match="square RGB pictures, not 64 x 64 x 1"):
        tower.prefix(grey[..., :1], 0)


# --- training ---


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_towers_train_full_precision_adapters(checkpoint, family: str) -> None:
    """As on CUDA: gradients arrive in fp32 and point where those of the fp32 towers point."""
    folder = checkpoint(family)
    gradients = []
    for backbone in (load_backbone(f"hf:{folder}"), load_backbone(f"hf:{folder}").halve()):
        model = DualEncoder(backbone, ModelConfig(lora_rank=2, lora_blocks=2, hidden=8, embedding=4), seed=0)
        tensors = {name: tensor.requires_grad_() for name, tensor in model.initial().tensors.items()}
        inputs = {"image": pictures(), "text": backbone.tokenize(CAPTIONS)}
        embedded = {}
        for modality in ("image", "text"):
            states, mask = getattr(model, modality).tower.prefix(inputs[modality], 1)
            assert states.dtype == torch.float32
            embedded[modality] = model.embed(tensors, modality, states, mask)
            assert embedded[modality].dtype == torch.float32
        info_nce(embedded["image"], embedded["text"], 0.07).backward()
        assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in tensors.values())
        assert all(tensor.grad.any() for tensor in tensors.values())
        gradients.append(torch.cat([tensor.grad.flatten() for tensor in tensors.values()]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_gradient(checkpoint, family: str) -> None:
    """At a state far from the start: recomputing with the start's adapters would give other gradients."""
    gradients = []
    for checkpointing in (False, True):
        model = adapted(checkpoint(family), checkpointing=checkpointing)
        rng = torch.Generator().manual_seed(0)
        moved = model.initial().map(lambda t, rng=rng: t + 0.3 * torch.randn(t.shape, generator=rng))
        tensors = {name: tensor.requires_grad_() for name, tensor in moved.tensors.items()}
        model.embed(tensors, "image", *model.image.tower.prefix(pictures(), 1)).square()[:, 0].sum().backward()
        found = [tensor.grad for name, tensor in tensors.items() if name.startswith("image.")]
        assert all(gradient is not None and gradient.any() for gradient in found)
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_memory_can_be_saved_once(checkpoint) -> None:
    model = adapted(checkpoint("clip"))
    assert model.save_memory() and model.image.tower.checkpointing and model.text.tower.checkpointing
    assert not model.save_memory()
    assert not DualEncoder(load_backbone("tiny"), ModelConfig(), seed=0).save_memory()


@pytest.mark.parametrize("option", ["checkpointing", "compile"])
def test_features_of_large_towers_are_refused_elsewhere(option: str) -> None:
    with pytest.raises(UserError, match=rf"model\.{option}"):
        DualEncoder(load_backbone("tiny"), ModelConfig(**{option: True}), seed=0)


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiling_changes_no_gradient(checkpoint, family: str) -> None:
    """For one model, and for two in one batch, whose adapters come stacked."""
    gradients = []
    for compiled in (False, True):
        backbone = load_backbone(f"hf:{checkpoint(family)}")
        settings = ModelConfig(lora_rank=2, lora_blocks=2, projector="none", compile=compiled)
        model = DualEncoder(backbone, settings, seed=0)
        rng = torch.Generator().manual_seed(0)
        start = model.initial().map(lambda t, rng=rng: t + 0.3 * torch.randn(t.shape, generator=rng))
        states, mask = backbone.text.prefix(backbone.tokenize(CAPTIONS), 1)
        for copies in (1, 2):
            stacked = {n: torch.stack([t * (1 + k) for k in range(copies)]) for n, t in start.tensors.items()}
            tensors = {n: (t[0] if copies == 1 else t).clone().requires_grad_() for n, t in stacked.items()}
            masks = None if mask is None else mask.repeat(copies, 1)
            model.embed(tensors, "text", states.repeat(copies, 1, 1), masks)[:, 0].sum().backward()
            found = [tensor.grad for name, tensor in tensors.items() if name.startswith("text.")]
            assert all(gradient is not None and gradient.any() for gradient in found)
            gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    for plain, fused in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_adapters_equal_single_ones(checkpoint, family: str, halved: bool) -> None:
    """Two models in one batch, as clients that train together."""
    backbone = load_backbone(f"hf:{checkpoint(family)}")
    backbone = backbone.halve() if halved else backbone
    model = DualEncoder(backbone, ModelConfig(lora_rank=2, lora_blocks=2, projector="none", lora="full"), seed=0)
    rng = torch.Generator().manual_seed(0)
    one, two = (model.initial().map(lambda t: t + 0.3 * torch.randn(t.shape, generator=rng)) for _ in range(2))
    states, mask = backbone.text.prefix(backbone.tokenize(CAPTIONS), 1)
    twice = states.repeat(2, 1, 1), None if mask is None else mask.repeat(2, 1)
    alone = [model.embed(each.tensors, "text", states, mask) for each in (one, two)]
    together = model.embed({name: torch.stack([one[name], two[name]]) for name in one.tensors}, "text", *twice)
    tolerance = 2e-2 if halved else 1e-5
    torch.testing.assert_close(together, torch.cat(alone), rtol=tolerance, atol=tolerance)
    assert (alone[0] - alone[1]).abs().max() > 5 * tolerance


def test_a_pooling_head_gives_what_the_stock_one_gives() -> None:
    """Values and gradients of the states, with every weight and bias drawn at random."""
    config = transformers.SiglipVisionConfig(hidden_size=16, intermediate_size=24, num_attention_heads=4)
    head = transformers.models.siglip.modeling_siglip.SiglipMultiheadAttentionPoolingHead(config).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=rng)
    states = torch.randn(3, 5, 16, generator=rng).requires_grad_()
    found, expected = hub.through_head(head, states), head(states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradients = (torch.autograd.grad(each.square().sum(), states)[0] for each in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda_the_towers_are_half_precision_and_near_the_stock_embeddings(checkpoint, family: str) -> None:
    """bf16 keeps 8 bits of each number, so about 1 % of an embedding's length may be lost."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    exact, half = (load_backbone(f"hf:{checkpoint(family)}", device) for device in ("cpu", "cuda"))
    assert exact.fingerprint != half.fingerprint  # or cached activations of one would be used by the other
    assert half.image.embeddings.position_embedding.weight.dtype == torch.bfloat16
    for modality, inputs in (("image", pictures()), ("text", exact.tokenize(CAPTIONS))):
        with torch.no_grad():
            expected = getattr(exact, modality)(*getattr(exact, modality).prefix(inputs, 1), 1)
            result = getattr(half, modality)(*getattr(half, modality).prefix(inputs.cuda(), 1), 1)
        assert result.dtype == torch.float32
        assert (result.cpu() - expected).norm() < 0.03 * expected.norm()


def test_all_blocks_may_carry_adapters_in_towers_of_different_depth(checkpoint, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint("clip"))
    config.text_config.num_hidden_layers = 2
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "uneven")
    with hub.quiet_transformers():
        transformers.CLIPModel(config).save_pretrained(folder)
    roles = ("query", "key", "value", "out")
    model = adapted(folder, lora_blocks="all", lora_targets=roles, projector="none")
    assert len(model.blocks) == (3 + 2) * 4 and model.image.first == model.text.first == 0
    assert model.blocks[0].name == "image.tower.blocks.0.self_attn.k_proj"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_run(checkpoint, small, tmp_path: Path, family: str) -> None:
    """Train, forget a client, measure, over a checkpoint and scenes."""
    projector = "none" if family == "siglip" else "mlp"
    own = (f"model.backbone=hf:{checkpoint(family)}", f"model.projector={projector}", "model.lora_rank=2")
    config = load_config(None, (*small, "model.lora=ffa", *own))
    world, request, method = World.open(config), ClientRequest(clients=(1,)), make_method("ease")
    run = Run.create(tmp_path / "run", config)
    losses = [finished.loss for finished in run.train(world)]
    assert len(losses) == 2 and losses[1] < losses[0]
    steps = list(forget(run, world, request, method))
    state = answer_of(run, request, method).model()
    assert steps and state.is_finite()
    assert (state - run.history.state(2)).norm() > 0
    assert measure(world, state, evaluation_sets(world, request))["gallery"] > 1


# --- names, and what is refused ---


def test_names_and_their_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert checkpoint_of("tiny") is checkpoint_of("photos") is None
    assert checkpoint_of("clip-b32") and checkpoint_of("hf:some/id") == "some/id"
    assert anchor_checkpoint("hf:model", tmp_path) == f"hf:{tmp_path / 'model'}"
    assert anchor_checkpoint("hf:some/id", tmp_path) == "hf:some/id"
    assert anchor_checkpoint("model", tmp_path) == "model"
    for wrong in ("clip", "hf:"):
        names = "tiny, photos, photos-vit, clip-b32, clip-l14, siglip, hf:FOLDER"
        with pytest.raises(UserError, match=f"unknown backbone .*{names}"):
            load_backbone(wrong)


@pytest.mark.parametrize("name", ["clip-b32", "hf:nobody/has-this", "hf:/no/such/folder"])
def test_a_checkpoint_that_is_not_here_is_one_clear_line(monkeypatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="save_pretrained") as caught:
        load_backbone(name)
    message = str(caught.value)
    assert f'model.backbone = "{name}"' in message and str(checkpoint_of(name)) in message
    assert 'model.backbone = "hf:FOLDER"' in message and "\n" not in message


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_made_as_the_message_says_can_be_loaded(checkpoint, tmp_path: Path, family: str) -> None:
    source = shutil.copytree(checkpoint(family), tmp_path / "source")  # read anew: where weights lie shows in last bits
    with hub.quiet_transformers():
        for part in (transformers.AutoModel, transformers.AutoProcessor):
            part.from_pretrained(source).save_pretrained(tmp_path / "saved")
    saved, original = load_backbone(f"hf:{tmp_path / 'saved'}"), load_backbone(f"hf:{source}")
    assert torch.equal(saved.image.prefix(pictures(), 3)[0], original.image.prefix(pictures(), 3)[0])
    assert torch.equal(saved.tokenize(CAPTIONS), original.tokenize(CAPTIONS))


def test_an_id_is_found_in_the_local_hub_cache(checkpoint, monkeypatch, tmp_path: Path) -> None:
    """The cache keeps snapshots by commit and a file that says which commit is `main`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--some--id"
    shutil.copytree(checkpoint("siglip"), stored / "snapshots" / "abc")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    backbone = load_backbone("hf:some/id")
    assert backbone.name == "hf:some/id"
    assert backbone.fingerprint == load_backbone(f"hf:{checkpoint('siglip')}").fingerprint


@pytest.mark.parametrize("part", ["model.safetensors", "tokenizer.json", "preprocessor_config.json", "config.json"])
def test_a_missing_file_is_named(checkpoint, tmp_path: Path, part: str) -> None:
    folder = shutil.copytree(checkpoint("siglip"), tmp_path / "copy")
    (folder / part).unlink()
    with pytest.raises(UserError, match=rf"cannot read {part} of {folder}") as caught:
        load_backbone(f"hf:{folder}")
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_not_a_missing_file(checkpoint, monkeypatch) -> None:
    def refuse(*_, **__):
        raise ImportError(
            "\nSiglipTokenizer requires the protobuf library but it was not found. Check out the\ninstructions"
        )

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(UserError, match=r"requires the protobuf library.*not found\); pip install .*\[hf\]") as caught:
        load_backbone(f"hf:{checkpoint('siglip')}")
    assert "\n" not in str(caught.value) and "cannot read" not in str(caught.value)


def test_damaged_weights_are_one_line(checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"cannot read model\.safetensors"):
        load_backbone(f"hf:{folder}")


def test_weights_that_are_not_complete_are_refused(checkpoint, tmp_path: Path) -> None:
    """transformers would draw what is absent at random."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack text_projection\.weight"):
        load_backbone(f"hf:{folder}")


def test_another_architecture_is_refused(checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match=r"architecture 'bert'; choose a checkpoint of: clip, siglip, siglip2"):
        load_backbone(f"hf:{folder}")


def test_without_transformers_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "ease-unlearning\[hf\]"'):
        load_backbone("siglip")


def test_the_fingerprint_follows_the_files(checkpoint, tmp_path: Path) -> None:
    """Activations are cached under it: other weights, other normalisation or other tokens must change it."""
    original = load_backbone(f"hf:{checkpoint('clip')}").fingerprint
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    assert load_backbone(f"hf:{folder}").fingerprint == original
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    assert load_backbone(f"hf:{folder}").fingerprint != original


def test_towers_that_end_in_different_spaces_need_a_projector() -> None:
    with pytest.raises(UserError, match=r'model.projector = "none".*set it to "mlp"'):
        DualEncoder(load_backbone("tiny"), ModelConfig(projector="none"), seed=0)


def test_frozen_and_always_in_evaluation_mode(checkpoint) -> None:
    backbone = load_backbone(f"hf:{checkpoint('clip')}")
    assert not any(weight.requires_grad for weight in backbone.parameters())
    assert not any(module.training for module in torch.nn.Sequential(backbone).train()[0].modules())


# --- checkpoints of strangers ---


def evil(folder: Path) -> Path:
    """Code in a checkpoint's folder that leaves a file behind when it runs."""
    trace = folder.parent / "it-ran"
    (folder / "evil.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from transformers import BaseImageProcessor, PretrainedConfig\n"
        "class Evil(BaseImageProcessor):\n    image_mean = image_std = (0.5, 0.5, 0.5)\n"
    )
    return trace


def alter(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (
            "preprocessor_config.json",
            {"auto_map": {"AutoImageProcessor": "evil.Evil"}, "image_processor_type": "Evil"},
        ),
        ("processor_config.json", {"image_processor": {"auto_map": {"AutoImageProcessor": "evil.Evil"}}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
        ("config.json", {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}}),
        ("config.json", {"vision_config": {"auto_map": {"AutoConfig": "evil.Evil"}}}),
    ],
)
def test_no_code_of_a_checkpoint_runs_even_if_the_user_says_yes(
    checkpoint, tmp_path: Path, monkeypatch, file: str, changes: dict
) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    trace = evil(folder)
    alter(folder / file, **changes)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(UserError, match=rf"{file} names code of its own \(auto_map\)") as caught:
        load_backbone(f"hf:{folder}")
    assert "\n" not in str(caught.value) and not trace.exists()


def test_transformers_runs_without_trust_in_code(checkpoint, monkeypatch) -> None:
    """The second bolt, should a file with code ever pass the first."""
    reported = []
    for kind in (transformers.AutoModel, transformers.AutoTokenizer, transformers.AutoImageProcessor):

        def load(*places, stock=kind.from_pretrained, **options):
            reported.append(options.get("trust_remote_code"))
            return stock(*places, **options)

        monkeypatch.setattr(kind, "from_pretrained", load)
    load_backbone(f"hf:{checkpoint('clip')}")
    assert len(reported) == 3 and all(value is False for value in reported)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_refused_by_name(checkpoint, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UserError, match=rf"{name} are pickled weights, which can run code .* safetensors"):
        load_backbone(f"hf:{folder}")


def test_an_adapter_in_the_folder_leads_to_no_other_model(checkpoint, tmp_path: Path) -> None:
    """transformers would load the base model that it names, wherever that lies."""
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    alter(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(checkpoint("siglip")))
    with pytest.raises(
        UserError, match=r"holds an adapter; name its base model here and this folder in model\.adapter"
    ):
        load_backbone(f"hf:{folder}")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "model.bin", "/etc/passwd", 3])
def test_an_index_names_only_weights_in_its_own_folder(checkpoint, tmp_path: Path, shard: object) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    shutil.copy(tmp_path / "outside.safetensors", folder / "model-1.safetensors")
    names = transformers.CLIPModel.from_pretrained(checkpoint("clip")).state_dict()
    alter(folder / "model.safetensors.index.json", metadata={}, weight_map=dict.fromkeys(names, shard))
    with pytest.raises(UserError, match="names other files than safetensors in its folder"):
        load_backbone(f"hf:{folder}")
    alter(folder / "model.safetensors.index.json", weight_map=dict.fromkeys(names, "model-1.safetensors"))
    assert load_backbone(f"hf:{folder}").text.depth == 3


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[1]"),
        ("config.json", '{"model_type": ["clip"]}'),
        ("config.json", '{"model_type": "clip", "vision_config": 3}'),
        ("config.json", '{"model_type": "clip", "text_config": {"hidden_size": -4}}'),
        ("config.json", "[" * 100_000),
        ("preprocessor_config.json", '{"image_processor_type": 7}'),
        ("tokenizer.json", '{"version": "1.0", "model": 3}'),
    ],
)
def test_false_settings_are_one_line(checkpoint, tmp_path: Path, file: str, content: str) -> None:
    folder = shutil.copytree(checkpoint("clip"), tmp_path / "copy")
    (folder / file).write_text(content)
    with pytest.raises(UserError) as caught:
        load_backbone(f"hf:{folder}")
    assert "\n" not in str(caught.value)
