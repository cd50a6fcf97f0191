"""Backbones from transformers checkpoints: CLIP, SigLIP and SigLIP 2, each tower split at any attention block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ease.errors import UserError
from ease.model.attention import TowerAttention
from ease.model.backbones import checkpoint_of
from ease.storage import SMALL_JSON, digest, read_json, sha256

LAYERS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
MLP_LAYERS = {"up": "fc1", "down": "fc2"}
MODEL_FILES = (".safetensors", ".json", ".txt", ".model")
"""What decides a checkpoint's embeddings: weights, configuration and vocabulary."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Weights in a form that can run code when it is read."""
VOCABULARY = ("tokenizer.json", "vocab.json", "added_tokens.json")
"""Large files that contain only words; transformers looks for no code in them."""
INDEX = "model.safetensors.index.json"
CODE = ("auto_map", "custom_pipelines")
"""Keys under which a checkpoint names code of its own."""
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's: it plans anew for every shape, and shapes change from step to step."""
MOST_VARIANTS = 64
"""Compiled forms of a block, for stacked and single adapters, with and without gradient; beyond, torch gives up."""
LEGACY_END = 2
"""CLIP configurations of old name this as the end token; there the end is the largest token of a caption."""


class HubTower(nn.Module):
    """The stock embeddings, blocks and pooling of one tower.

    With frozen weights in bf16, autocast runs the blocks: adapters stay fp32, get fp32 gradients and are rounded only
    where they are multiplied. What enters and leaves a tower is fp32.
    """

    width: int
    causal = False
    checkpointing = False
    """Keep the states between blocks alone and compute the rest again for the gradient."""

    def __init__(self, network: Any, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.blocks = network.embeddings, network.encoder.layers
        self.norm, self.head = norm, head
        self.depth = len(self.blocks)
        for block in self.blocks:
            block.self_attn = TowerAttention(block.self_attn)

    def embed(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """Embeddings and the blocks before `first`; with `first` = depth the pooled output."""
        with self._autocast(inputs.device):
            states, mask = self.embed(inputs)
            states = self._through(self.blocks[:first], states)
            if first == self.depth:
                return self.pool(states, mask).float(), None
        return states.float(), mask

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        if first == self.depth:
            return states
        with self._autocast(states.device):
            return self.pool(self._through(self.blocks[first:], states), mask).float()

    def linears(self, block: int) -> dict[str, tuple[nn.Module, str]]:
        attention, mlp = (self.blocks[block].get_submodule(name) for name in ("self_attn", "mlp"))
        found = {role: (attention, attribute) for role, attribute in LAYERS.items()}
        return found | {role: (mlp, attribute) for role, attribute in MLP_LAYERS.items()}

    def compile_blocks(self, first: int) -> None:
        """Fuse the operations of each block from `first` on; all blocks share the compiled code."""
        torch._dynamo.config.recompile_limit = MOST_VARIANTS
        for block in self.blocks[first:]:
            block.compile()

    def _through(self, blocks: nn.ModuleList, states: Tensor) -> Tensor:
        options = {"is_causal": True} if self.causal else {}
        with sdpa_kernel(ATTENTION):
            for block in blocks:
                if self.checkpointing and torch.is_grad_enabled():
                    states = _recomputed(block, states, options)
                else:
                    states = block(states, None, **options)
        return states

    def _autocast(self, device: torch.device) -> torch.autocast:
        halved = self.embeddings.position_embedding.weight.dtype == torch.bfloat16
        return torch.autocast(device.type, torch.bfloat16, enabled=halved)


def _recomputed(block: nn.Module, states: Tensor, options: dict[str, Any]) -> Tensor:
    """A block whose inner activations are computed again in the backward pass.

    The trained tensors go in by hand: by then the block's own are back in place, and those are the start values.
    """
    trained = {name: tensor for name, tensor in block.named_parameters() if tensor.requires_grad}

    def run(states: Tensor, *tensors: Tensor) -> Tensor:
        with sdpa_kernel(ATTENTION):  # again, for in the backward pass the caller's choice is over
            return functional_call(block, dict(zip(trained, tensors, strict=True)), (states, None), options)

    return checkpoint(run, states, *trained.values(), use_reentrant=False)


class ImageTower(HubTower):
    """uint8 pixels [n, side, side, 3]; another size than the checkpoint's is resized."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: Any, head: nn.Module, size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(network, network.post_layernorm, head)
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def normalised(self, inputs: Tensor) -> Tensor:
        """[n, 3, size, size], as the checkpoint's processor scales them."""
        height, width, channels = inputs.shape[1:]
        if height != width or channels != 3:
            raise UserError(f"the backbone takes square RGB pictures, not {height} x {width} x {channels}")
        pixels = inputs.permute(0, 3, 1, 2).float()
        if height != self.size:
            pixels = F.interpolate(pixels, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 255)
        return (pixels / 255 - self.mean) / self.std


class ClipImageTower(ImageTower):
    def __init__(self, model: Any, *processing: Any) -> None:
        super().__init__(model.vision_model, model.visual_projection, *processing)
        self.first_norm = model.vision_model.pre_layrnorm
        self.width = model.visual_projection.out_features

    def embed(self, inputs: Tensor) -> tuple[Tensor, None]:
        return self.first_norm(self.embeddings(self.normalised(inputs))), None

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """The class token, which comes first."""
        return self.head(self.norm(states[:, 0]))


class SiglipImageTower(ImageTower):
    def __init__(self, model: Any, *processing: Any) -> None:
        super().__init__(model.vision_model, model.vision_model.head, *processing)
        self.width = model.config.vision_config.hidden_size

    def embed(self, inputs: Tensor) -> tuple[Tensor, None]:
        return self.embeddings(self.normalised(inputs)), None

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        return through_head(self.head, self.norm(states))


def through_head(head: Any, states: Tensor) -> Tensor:
    """A stock pooling head, which looks with one query [n, tokens, features] -> [n, features].

    The query is frozen: multiplied with the weights of the keys once, it is applied to the states themselves, and
    values are computed only for their mixtures. A key's bias adds the same to all scores of a head. In fp32, for scores
    are few."""
    layer = head.attention
    with torch.autocast(states.device.type, enabled=False):
        kind = states.dtype
        weights = layer.in_proj_weight.to(kind).unflatten(0, (3, layer.num_heads, -1))
        query, _, value = layer.in_proj_bias.to(kind).unflatten(0, (3, layer.num_heads, -1))
        query = query + torch.einsum("i,hsi->hs", head.probe.to(kind).flatten(), weights[0])
        scores = F.linear(states, torch.einsum("hs,hsi->hi", query * layer.head_dim**-0.5, weights[1]))
        mixtures = torch.bmm(scores.softmax(1).mT, states)
        values = torch.einsum("nhi,hsi->nhs", mixtures, weights[2]) + value
    pooled = layer.out_proj(values.flatten(1))
    return pooled + head.mlp(head.layernorm(pooled))


class Siglip2ImageTower(SiglipImageTower):
    """Cuts pictures into rows of patches; a square that fills the position table needs no other positions, no mask."""

    def embed(self, inputs: Tensor) -> tuple[Tensor, None]:
        patch = self.embeddings.patch_size
        across = self.size // patch
        squares = self.normalised(inputs).unflatten(3, (across, patch)).unflatten(2, (across, patch))
        patches = squares.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return self.embeddings.patch_embedding(patches) + self.embeddings.position_embedding.weight, None


class ClipTextTower(HubTower):
    """Causal: what follows the end token, where a caption is pooled, cannot change it."""

    causal = True

    def __init__(self, model: Any) -> None:
        super().__init__(model.text_model, model.text_model.final_layer_norm, model.text_projection)
        self.width = model.text_projection.out_features
        self.end = model.config.text_config.eos_token_id

    def embed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        ends = inputs if self.end == LEGACY_END else (inputs == self.end).int()
        mask = torch.arange(inputs.shape[1], device=inputs.device) <= ends.argmax(1, keepdim=True)
        return self.embeddings(inputs), mask

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None  # `embed` always gives one
        rows = torch.arange(states.shape[0], device=states.device)
        return self.head(self.norm(states[rows, mask.sum(1) - 1]))


class SiglipTextTower(HubTower):
    """Sees the whole context, padding included, as in its pretraining; pooled at the last position."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.text_model, model.text_model.final_layer_norm, model.text_model.head)
        self.width = model.text_model.head.out_features

    def embed(self, inputs: Tensor) -> tuple[Tensor, None]:
        return self.embeddings(inputs), None

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        return self.head(self.norm(states[:, -1]))


FAMILIES = {
    "clip": (ClipImageTower, ClipTextTower),
    "siglip": (SiglipImageTower, SiglipTextTower),
    "siglip2": (Siglip2ImageTower, SiglipTextTower),
}
"""The towers of each architecture that a config.json may name."""


class HubBackbone(nn.Module):
    def __init__(
        self,
        name: str,
        fingerprint: str,
        image: ImageTower,
        text: HubTower,
        tokenizer: Any,
        context: int,
        crop: bool = False,
    ):
        super().__init__()
        self.name, self.fingerprint = name, fingerprint
        self.image, self.text = image, text
        self.image_size, self.crop = image.size, crop
        self.tokenizer, self.context = tokenizer, context
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "HubBackbone":
        """Stays in evaluation mode: training mode could bring dropout into frozen layers."""
        return super().train(False)

    def halve(self) -> "HubBackbone":
        """Take the frozen weights to bf16, all but the norms: they are small, and what they divide by is delicate."""
        for tower in (self.image, self.text):
            for module in tower.bfloat16().modules():
                if isinstance(module, nn.LayerNorm):
                    module.float()
        self.image.mean, self.image.std = self.image.mean.float(), self.image.std.float()
        return self

    @property
    def padding(self) -> str:
        """Under causal attention padding changes nothing, so the longest caption is length enough."""
        return "longest" if isinstance(self.text, ClipTextTower) else "max_length"

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids [n, tokens]; a caption longer than the context is cut."""
        # All three families were pretrained on lower case, but not every published tokenizer sees to it.
        encoded = self.tokenizer(
            [caption.lower() for caption in captions],
            padding=self.padding,
            truncation=True,
            max_length=self.context,
            return_tensors="pt",
        )
        return encoded["input_ids"]


def load_hub(checkpoint: str, name: str, device: torch.device | str) -> HubBackbone:
    """Load a checkpoint from a folder or the local hub cache, frozen; nothing is ever downloaded."""
    if find_spec("transformers") is None:
        raise UserError(f'model.backbone = "{name}" needs the hf extra: pip install "ease-unlearning[hf]"')
    with quiet_transformers():
        folder = _folder(checkpoint, name)
        check_harmless(folder, name)
        settings = read_json(folder / "config.json", sealed=False, most=SMALL_JSON)
        family = settings.get("model_type") if isinstance(settings, dict) else None
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(
                f'model.backbone = "{name}": its config.json names the architecture {family!r}; '
                f"choose a checkpoint of: {', '.join(FAMILIES)}"
            )
        model, tokenizer, processor = _parts(folder, checkpoint, name)
    vision = model.config.vision_config
    size = int(vision.num_patches**0.5) * vision.patch_size if family == "siglip2" else vision.image_size
    image_tower, text_tower = FAMILIES[family]
    files = sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES)
    on_cuda = torch.device(device).type == "cuda"
    backbone = HubBackbone(
        name,
        digest("hub", on_cuda, [(path.name, sha256(path)) for path in files]),
        image_tower(model, size, processor.image_mean, processor.image_std),
        text_tower(model),
        tokenizer,
        model.config.text_config.max_position_embeddings,
        bool(getattr(processor, "do_center_crop", False)),  # CLIP's does, SigLIP's squashes
    )
    return (backbone.halve() if on_cuda else backbone).to(device)


def checkpoint_folder(name: str) -> Path:
    """The folder from which a backbone of this name is read."""
    checkpoint = checkpoint_of(name)
    assert checkpoint is not None  # it was loaded from there
    return _folder(checkpoint, name)


def _folder(checkpoint: str, name: str) -> Path:
    """The folder of a checkpoint: a folder as given, an id in the local hub cache."""
    if Path(checkpoint).is_dir():
        found = Path(checkpoint) / "config.json"
    else:
        from transformers.utils import cached_file

        try:
            found = Path(str(cached_file(checkpoint, "config.json", local_files_only=True)))
        except (OSError, ValueError) as error:
            raise UserError(_missing(checkpoint, name, "config.json")) from error
    if not found.is_file():
        raise UserError(_missing(checkpoint, name, "config.json"))
    return found.parent


def check_harmless(folder: Path, name: str) -> None:
    """Refuse a folder that would run code of its own, or that leads the reader to files elsewhere."""
    where = f'model.backbone = "{name}"'
    present = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in present:  # transformers would load the base model that it names
        raise UserError(
            f"{where}: {folder} holds an adapter; name its base model here and this folder in model.adapter"
        )
    pickled = [file for file in present if file.endswith(PICKLED)]
    if pickled and not any(file.endswith(".safetensors") for file in present):
        raise UserError(
            f"{where}: {folder / pickled[0]} are pickled weights, which can run code when they are read; "
            "where the model is at hand, save it as safetensors with save_pretrained"
        )
    for file in present:
        if file.endswith(".json") and file not in (*VOCABULARY, INDEX):
            code = _named_code(read_json(folder / file, sealed=False, most=SMALL_JSON))
            if code is not None:
                raise UserError(
                    f"{where}: {folder / file} names code of its own ({code}), and no checkpoint's code is run; "
                    f"choose a plain checkpoint of: {', '.join(FAMILIES)}"
                )
    if INDEX in present:
        index = read_json(folder / INDEX, sealed=False)
        weights = index.get("weight_map") if isinstance(index, dict) else None
        shards = weights.values() if isinstance(weights, dict) else [None]
        if not all(isinstance(shard, str) and shard in present and shard.endswith(".safetensors") for shard in shards):
            raise UserError(
                f"{where}: {folder / INDEX} names other files than safetensors in its folder; save it again"
            )


def _named_code(settings: Any) -> str | None:
    """The key under which settings name code, at any depth: a processor's may hold those of its parts."""
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found = next((key for key in CODE if value.get(key)), None)
            if found is not None:
                return found
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return None


def _parts(folder: Path, checkpoint: str, name: str) -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor; whatever is absent is named."""
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    part = "model.safetensors"
    try:
        model, loading = AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
        part = "tokenizer.json"
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        part = "preprocessor_config.json"
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:  # such as sentencepiece and protobuf, which read SigLIP's vocabulary
        raise UserError(
            f'model.backbone = "{name}": a library that reads its {part} is missing ({_first_sentence(error)}); '
            'pip install "ease-unlearning[hf]"'
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # anything that transformers, tokenizers and torch raise for false settings
        raise UserError(_missing(checkpoint, name, part)) from error
    if loading["missing_keys"]:
        # transformers would draw these at random without an error.
        absent = min(loading["missing_keys"])
        raise UserError(
            f'model.backbone = "{name}": the weights in {folder} lack {absent}; save the complete model there'
        )
    return model, tokenizer, processor


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0]


def _missing(checkpoint: str, name: str, part: str) -> str:
    return (
        f'model.backbone = "{name}": cannot read {part} of {checkpoint} on this machine; where it is at hand, call '
        "save_pretrained(FOLDER) of its AutoModel and its AutoProcessor, "
        'bring FOLDER here and set model.backbone = "hf:FOLDER"'
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No advice and no loading bar on the user's screen while the context lasts."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
