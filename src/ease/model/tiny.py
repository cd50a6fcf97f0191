"""The embedded backbone: a small image-text transformer pair, pretrained on generated scenes by our own recipe."""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ease.errors import UserError
from ease.model.lora import apply_by_head, fold_query
from ease.storage import digest, identity, read_json, read_tensors

ASSETS = Path(__file__).parent.parent / "assets"
WIDTH, HEADS, DEPTH = 128, 4, 4
IMAGE_SIZE, PATCH = 64, 8
CONTEXT = 32
PADDING, CLASS, UNKNOWN = 0, 1, 2
SPECIAL_TOKENS = 3
LAYOUT = 2
"""Version of the cached states; raise it when `prefix` gives something else."""


class Attention(nn.Module):
    """Multi-head attention of queries over states, with the four linear layers that adapters wrap."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, queries: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        """queries [n, q, width], states [n, tokens, width], mask [n, tokens] -> [n, q, width]"""
        if queries.shape[1] == 1:
            return self.out(self._pool(self.query(queries), states, mask))
        query, key, value = (
            layer.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query(queries), self.key(states), self.value(states))
        )
        visible = None if mask is None else mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _pool(self, query: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        """The same for a single query [n, 1, width], without a key or a value for each token.

        q · (W x + b) = (W'q) · x + const, and softmax ignores the constant: W' moves to the query. The mean of values
        is the value of the mean. Both save a matrix product over all tokens, which is most of a training step.
        """
        own = query[:, 0].unflatten(-1, (self.heads, -1))
        scores = fold_query(own, self.key) @ states.mT * own.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return apply_by_head(scores.softmax(-1) @ states, self.value).flatten(1)[:, None]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """[n, tokens, width] -> the same."""
        normed = self.attention_norm(states)
        return self.with_mlp(states + self.attention(normed, normed, mask))

    def class_token(self, states: Tensor, normed: Tensor, mask: Tensor | None) -> Tensor:
        """Only the class token, first of the normed tokens: states [n, 1, width], normed [n, tokens, width]."""
        return self.with_mlp(states + self.attention(normed[:, :1], normed, mask))

    def with_mlp(self, states: Tensor) -> Tensor:
        return states + self.mlp(self.mlp_norm(states))


class TinyTower(nn.Module):
    """Blocks, final norm and pooling; the image and the text tower add their embeddings.

    The pooled output joins the projected class token, which pretraining aligned across the towers, with statistics of
    the tokens that enter the last block, and whitens them by the statistics of pretraining scenes. Contrastive features
    span few dimensions; without this a small projector could hardly separate pairs."""

    statistics = 2
    """How many token statistics follow the class token."""
    centre: Tensor
    whitening: Tensor

    def __init__(self, width: int = WIDTH, heads: int = HEADS, depth: int = DEPTH) -> None:
        super().__init__()
        self.token_width, self.depth = width, depth
        self.width = width * (1 + self.statistics)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, width, bias=False)
        self.register_buffer("centre", torch.zeros(self.width))
        self.register_buffer("whitening", torch.eye(self.width))

    @property
    def last(self) -> Block:
        block = self.blocks[-1]
        assert isinstance(block, Block)
        return block

    def embed(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """Embeddings and the blocks before `first`: states [n, rows, width] and the token mask, if any.

        Before the last block everything is prepared that no adapter changes; with `first` = depth nothing is left to
        run and the states are the pooled output.
        """
        states, mask = self.embed(inputs)
        if first == self.depth:
            return self(states, mask, 0), None
        for block in self.blocks[:first]:
            states = block(states, mask)
        return (self._prepare(states, mask) if first == self.depth - 1 else states), mask

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """The blocks from `first` on, and pooling: [n, width]."""
        if first == self.depth:
            return states
        if first < self.depth - 1:
            for block in self.blocks[first:-1]:
                states = block(states, mask)
            states = self._prepare(states, mask)
        return self._pool(states, mask)

    def aligned(self, inputs: Tensor) -> Tensor:
        """The projected class token alone [n, token width]; its cosine across towers is the zero-shot similarity."""
        return self._class_token(*self.prefix(inputs, self.depth - 1))

    def _prepare(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Inputs of the last block: the normed tokens, the class token, and the whitened statistics as rows."""
        statistics = torch.cat([F.layer_norm(part, (self.token_width,)) for part in self.summarise(states, mask)], -1)
        frozen = (statistics - self.centre[self.token_width :]) @ self.whitening[self.token_width :]
        rows = frozen.unflatten(-1, (-1, self.token_width))
        return torch.cat([self.last.attention_norm(states), states[:, :1], rows], dim=1)

    def _pool(self, prepared: Tensor, mask: Tensor | None) -> Tensor:
        """The class token through the last block, whitened together with the statistics."""
        part = F.layer_norm(self._class_token(prepared, mask), (self.token_width,))
        frozen = prepared[:, -1 - self.statistics :].flatten(1)
        return frozen + (part - self.centre[: self.token_width]) @ self.whitening[: self.token_width]

    def _class_token(self, prepared: Tensor, mask: Tensor | None) -> Tensor:
        """Only the class token of the last block is pooled, so no other is updated there: same result, less work."""
        tokens = prepared.shape[1] - 2 - self.statistics
        class_token = self.last.class_token(prepared[:, tokens : tokens + 1], prepared[:, :tokens], mask)
        return self.projection(self.norm(class_token[:, 0]))

    def fit_whitening(self, pooled: Tensor, ridge: float) -> None:
        """Set the whitening from unwhitened pooled outputs; `ridge`, a share of the top variance, spares the noise."""
        centre = pooled.double().mean(0)
        variances, axes = torch.linalg.eigh(torch.cov(pooled.double().T))
        self.centre.copy_(centre)
        self.whitening.copy_(axes / (variances.clamp_min(0) + ridge * variances[-1]).sqrt())

    def summarise(self, states: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Statistics over the tokens behind the class token, each [n, token width]."""
        raise NotImplementedError

    def linears(self, block: int) -> dict[str, tuple[nn.Module, str]]:
        """The linear layers of a block that adapters may replace: role -> (parent module, attribute)."""
        attention, mlp = (self.blocks[block].get_submodule(name) for name in ("attention", "mlp"))
        return {role: (attention, role) for role in ("query", "key", "value", "out")} | {
            "up": (mlp, "0"),
            "down": (mlp, "2"),
        }


class ImageTower(TinyTower):
    """A vision transformer over 8 x 8 patches of uint8 pictures [n, 64, 64, 3]."""

    statistics = 4

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH * 3, self.token_width)
        self.class_token = nn.Parameter(torch.randn(self.token_width) * 0.02)
        self.positions = nn.Parameter(torch.randn((IMAGE_SIZE // PATCH) ** 2 + 1, self.token_width) * 0.02)

    def summarise(self, states: Tensor, mask: Tensor | None) -> list[Tensor]:
        """The mean of each quarter of the picture."""
        half = IMAGE_SIZE // PATCH // 2
        quarters = states[:, 1:].unflatten(1, (2, half, 2, half)).mean(dim=(2, 4))
        return list(quarters.flatten(1, 2).unbind(1))

    def embed(self, inputs: Tensor) -> tuple[Tensor, None]:
        if inputs.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE, 3):
            raise UserError(f"the tiny backbone takes pictures of 64 x 64 x 3, not {tuple(inputs.shape[1:])}")
        across = IMAGE_SIZE // PATCH
        scaled = inputs.to(self.positions.dtype) / 127.5 - 1
        squares = (
            scaled.reshape(-1, across, PATCH, across, PATCH, 3).transpose(2, 3).reshape(-1, across**2, PATCH**2 * 3)
        )
        states = self.patches(squares)
        first = self.class_token.to(states.dtype).expand(states.shape[0], 1, -1)
        return torch.cat([first, states], dim=1) + self.positions, None


class TextTower(TinyTower):
    """A bidirectional transformer over words; token 0 is padding and the class token comes first."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size + SPECIAL_TOKENS, self.token_width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, self.token_width) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def embed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(inputs) + self.positions[: inputs.shape[1]], inputs != PADDING

    def summarise(self, states: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Mean and largest value over the words."""
        assert mask is not None  # the text tower always has one
        real = mask[..., None]
        mean = (states * real).sum(1) / real.sum(1)
        return [mean, states.masked_fill(~real, -torch.inf).amax(1)]


class TinyBackbone(nn.Module):
    """Both towers and the word list."""

    name = "tiny"
    image_size = IMAGE_SIZE
    crop = False
    context = CONTEXT

    def __init__(self, vocabulary: Sequence[str], fingerprint: str = "untrained") -> None:
        super().__init__()
        self.vocabulary = tuple(vocabulary)
        self.fingerprint = fingerprint
        self.image = ImageTower()
        self.text = TextTower(len(self.vocabulary))
        self._token = {word: number for number, word in enumerate(self.vocabulary, start=SPECIAL_TOKENS)}

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Word numbers [n, 32], padded; a caption longer than the context is cut."""
        tokens = torch.full((len(captions), CONTEXT), PADDING)
        for row, caption in zip(tokens, captions, strict=True):
            words = re.findall(r"\w+", caption.lower())[: CONTEXT - 1]
            row[: len(words) + 1] = torch.tensor([CLASS, *(self._token.get(word, UNKNOWN) for word in words)])
        return tokens


def load_tiny(folder: Path = ASSETS) -> TinyBackbone:
    """The pretrained backbone, frozen and in evaluation mode; its weights are checked against their recorded hash."""
    # Adapters are put into it, so everyone gets a copy, which is made in a tenth of the time that reading takes.
    return _copied(_pretrained(folder, *identity(folder / "tiny.safetensors"), *identity(folder / "tiny.json")))


def _copied(module: Any) -> Any:
    """What `copy.deepcopy` gives, without its long walk through the tables of hooks that every layer has, all empty."""
    twin = module.__new__(type(module))
    vars(twin).update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    )
    for name, parameter in module._parameters.items():
        if parameter is not None:  # a layer without a bias
            twin._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        twin._buffers[name] = buffer.clone()
    for name, part in module._modules.items():
        twin._modules[name] = _copied(part)
    return twin


@lru_cache(maxsize=1)
def _pretrained(folder: Path, *_: int) -> TinyBackbone:
    weights, recipe = folder / "tiny.safetensors", read_json(folder / "tiny.json", sealed=False)
    tensors = read_tensors(weights, sealed=False)
    measured = hashlib.sha256(weights.read_bytes()).hexdigest()
    if measured != recipe["sha256"]:
        raise UserError(f"{weights}: not the weights that tiny.json records (sha256 {measured[:12]}); reinstall ease")
    backbone = TinyBackbone(recipe["vocabulary"], fingerprint=digest(measured, LAYOUT))
    backbone.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return backbone.requires_grad_(False).eval()
