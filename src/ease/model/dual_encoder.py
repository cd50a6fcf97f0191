"""The model: two frozen towers with adapters and a projector each, into one shared space."""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ease.config import Config
from ease.errors import UserError
from ease.model.backbones import Backbone, Tower
from ease.model.hub import HubTower
from ease.model.lora import LoraLinear, check_rank, linear
from ease.model.peft import load_adapter, read_adapter
from ease.params import Block, Kind, Modality, Params
from ease.seeding import torch_generator

Role = Literal["query", "key", "value", "out", "up", "down"]
"""A linear layer of a transformer block."""


class ModelConfig(Config):
    backbone: str = "tiny"
    """Encoders: `tiny` (shipped), `photos`, `photos-vit`, `clip-b32`, `clip-l14`, `siglip`, `hf:FOLDER` or `hf:ID`."""
    adapter: Path | None = None
    """Folder of a PEFT LoRA adapter to start from; its layers and rank must be those of `lora_*`."""
    lora: Literal["ffa", "full", "off"] = "ffa"
    """`ffa` trains B alone over a shared frozen A; `full` trains both factors; `off` trains only the projectors."""
    lora_rank: int = Field(8, ge=1)
    """Rank of the adapters, at most the width of the layers that carry them."""
    lora_scale: float = Field(2.0, gt=0)
    """Factor before the product B·A."""
    lora_targets: tuple[Role, ...] = ("query", "value")
    """Layers of a block that carry adapters: of its attention, and `up` and `down` of its MLP."""
    lora_ranks: dict[Role, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Ranks of single layers, such as `{ up = 4 }`; the others have `lora_rank`."""
    lora_blocks: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """How many of the last blocks of each tower carry adapters; earlier ones are computed once and cached."""
    projector: Literal["mlp", "none", "closed_form"] = "mlp"
    """`mlp` learns a shared space; `none` keeps the one in which a checkpoint such as CLIP is aligned already;
    `closed_form` solves it from sums over pairs, so that forgetting is exact (frozen towers only)."""
    checkpointing: bool = False
    """Checkpoints of transformers: less memory for more time, the inner activations of a block are computed twice."""
    compile: bool = False
    """Checkpoints of transformers: fuse the operations of each block; slow to start, then faster."""
    hidden: int = Field(256, ge=1)
    """Width of the projectors' hidden layer."""
    embedding: int = Field(256, ge=2)
    """Dimensions of the projectors' shared space."""
    temperature: float = Field(0.07, gt=0)
    """Temperature of the contrastive loss; smaller separates near pairs more sharply."""

    @field_validator("lora_targets")
    @classmethod
    def _each_layer_once(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        if not roles or len(set(roles)) < len(roles):
            raise ValueError('name at least one layer, and each once; or set model.lora = "off"')
        return roles

    @model_validator(mode="after")
    def _ranks_of_targets(self) -> "ModelConfig":
        others = set(self.lora_ranks) - set(self.lora_targets)
        if others:
            raise ValueError(f"lora_ranks: {min(others)} carries no adapter; add it to lora_targets or leave it out")
        return self

    def __hash__(self) -> int:
        """Equal configurations have equal hashes, although ranks are a mapping."""
        return hash(tuple((dict(self) | {"lora_ranks": frozenset(self.lora_ranks.items())}).items()))

    def rank(self, role: Role) -> int:
        """Rank of the adapter of a layer."""
        return self.lora_ranks.get(role, self.lora_rank)

    @model_validator(mode="after")
    def _trains_something(self) -> "ModelConfig":
        if self.lora == "off" and (self.projector == "none" or self.adapter is not None):
            raise ValueError('model.lora = "off": model.projector = "none" and model.adapter need adapters')
        if self.lora != "off" and self.projector == "closed_form":
            raise ValueError('model.projector = "closed_form": needs frozen towers; set model.lora = "off"')
        return self


LEAST_NORM = 1e-6
"""Shorter vectors are not normalised."""
ONE_PASS = Lock()
"""Layers hold the tensors of a pass while it runs, so that threads pass one after the other; backward they do not."""


class Branch(nn.Module):
    """One modality: the tower from its first adapted block on, then the projector, then unit norm."""

    def __init__(self, tower: Tower, first: int, config: ModelConfig, rng: torch.Generator):
        super().__init__()
        self.tower = tower
        self.first = first
        # Fixed normalisation instead of training-set statistics: those would carry the forget data.
        self.norm = nn.LayerNorm(tower.width, elementwise_affine=False)
        self.projector = nn.ModuleList(
            [_linear(tower.width, config.hidden, rng), _linear(config.hidden, config.embedding, rng)]
        )

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        last = self.projector[1]
        assert isinstance(last, nn.Linear)
        return embedding_of(self.projector[0](self.features(states, mask)), last.weight, last.bias)

    def features(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Input of the projector."""
        return self.norm(self.tower(states, mask, self.first))


def embedding_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """From what the first layer of a projector gives, through its second one, to unit norm."""
    return F.normalize(linear(F.gelu(hidden), weight, bias), dim=-1, eps=LEAST_NORM)


class LinearBranch(nn.Module):
    """One modality: the frozen tower, then one linear map, then unit norm."""

    def __init__(self, tower: Tower, outputs: int, rng: torch.Generator):
        super().__init__()
        self.tower = tower
        self.first = tower.depth
        self.norm = nn.LayerNorm(tower.width, elementwise_affine=False)
        self.projector = nn.ModuleList([_linear(tower.width, outputs, rng)])

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        features = self.norm(self.tower(states, mask, self.first))
        return F.normalize(self.projector[0](features), dim=-1, eps=LEAST_NORM)


class AlignedBranch(nn.Module):
    """One modality: the tower's own embedding, from its first adapted block on, with unit norm."""

    def __init__(self, tower: Tower, first: int):
        super().__init__()
        self.tower = tower
        self.first = first

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        return F.normalize(self.tower(states, mask, self.first), dim=-1, eps=LEAST_NORM)


def _branch(
    tower: Tower, first: int, config: ModelConfig, rng: torch.Generator, narrowest: int
) -> Branch | LinearBranch | AlignedBranch:
    """One side of a model; canonical correlations are no more than the narrower tower has features."""
    if config.projector == "none":
        return AlignedBranch(tower, first)
    if config.projector == "closed_form":
        return LinearBranch(tower, min(config.embedding, narrowest), rng)
    return Branch(tower, first, config, rng)


class DualEncoder(nn.Module):
    """A stateless function of `Params`: the module itself holds only what is frozen and the start values."""

    image: Branch | LinearBranch | AlignedBranch
    text: Branch | LinearBranch | AlignedBranch

    def __init__(self, backbone: Backbone, config: ModelConfig, seed: int):
        super().__init__()
        self.config = config
        check_fits(backbone, config)
        for modality, tower in (("image", backbone.image), ("text", backbone.text)):
            first = first_adapted(tower, config)
            tower.requires_grad_(False)
            if config.lora != "off":
                _add_adapters(tower, first, config, modality, seed)
            _set_up(tower, first, config)
            rng = torch_generator(seed, "projector", modality)
            setattr(self, modality, _branch(tower, first, config, rng, min(backbone.image.width, backbone.text.width)))
        if config.adapter is not None:
            load_adapter(self, config.adapter)
        self.blocks = _blocks(self)
        self._found: dict[Modality, dict[str, tuple[dict[str, Any], str]]] = {}

    def initial(self) -> Params:
        """w_0: adapters that change nothing, or the imported ones, and freshly drawn projectors."""
        own = dict(self.named_parameters())
        return Params(
            {name: own[name].detach().clone() for block in self.blocks for name in block.tensors}, self.blocks
        )

    def frozen_adapters(self) -> dict[str, Tensor]:
        """The shared A matrices, which belong to the model but are never trained or sent."""
        return {name: tensor for name, tensor in self.named_buffers() if name.endswith(".A")}

    def save_memory(self) -> bool:
        """Turn checkpointing on, which changes no number; False where it is on already, or there is none."""
        towers = [branch.tower for branch in (self.image, self.text) if isinstance(branch.tower, HubTower)]
        saved = [tower for tower in towers if not tower.checkpointing]
        for tower in saved:
            tower.checkpointing = True
        return bool(saved)

    @property
    def passes_are_short(self) -> bool:
        """Whether pairs go through one block of each tower at most: a GPU waits for the host then."""
        return all(branch.tower.depth - branch.first <= 1 for branch in (self.image, self.text))

    def forward(self, modality: Modality, states: Tensor, mask: Tensor | None = None) -> Tensor:
        return getattr(self, modality)(states, mask)

    def embed(
        self, tensors: Mapping[str, Tensor], modality: Modality, states: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Unit-norm embeddings [n, embedding] under the given trainable tensors."""
        # As torch.func.functional_call does, which looks for every layer by its name each time: half of a small pass.
        given = [(*place, tensors[name]) for name, place in self._places(modality).items() if name in tensors]
        with ONE_PASS:
            frozen = [layer[own] for layer, own, _ in given]
            try:
                for layer, own, tensor in given:
                    layer[own] = tensor
                return self(modality, states, mask)
            finally:
                for (layer, own, _), tensor in zip(given, frozen, strict=True):
                    layer[own] = tensor

    def _places(self, modality: Modality) -> dict[str, tuple[dict[str, Any], str]]:
        """Places of the trained tensors of one side: the table of their layer, and their name in it."""
        if modality not in self._found:
            names = [name for block in self.blocks if block.modality == modality for name in block.tensors]
            parts = {name: name.rpartition(".") for name in names}
            self._found[modality] = {
                name: (self.get_submodule(layer)._parameters, own) for name, (layer, _, own) in parts.items()
            }
        return self._found[modality]


def check_fits(backbone: Backbone, config: ModelConfig) -> None:
    """Refuse settings that cannot work with a backbone, before a picture is decoded for it."""
    if config.projector == "none" and backbone.image.width != backbone.text.width:
        raise UserError(
            f'model.projector = "none": the towers of {backbone.name} end in different spaces; set it to "mlp"'
        )
    for tower in (backbone.image, backbone.text):
        first_adapted(tower, config)
        if not isinstance(tower, HubTower) and (config.checkpointing or config.compile):
            option = "checkpointing" if config.checkpointing else "compile"
            raise UserError(f"model.{option}: {backbone.name} is small and has none; leave it off")
    if config.adapter is not None:
        read_adapter(config.adapter)


def first_adapted(tower: Tower, config: ModelConfig) -> int:
    """Index of the first block that carries adapters, if they fit; everything before it is frozen prefix."""
    if config.lora == "off":
        return tower.depth
    if tower.depth == 0:
        raise UserError(
            f'model.lora = "{config.lora}": backbone {config.backbone!r} has fixed features; set model.lora = "off"'
        )
    blocks = tower.depth if config.lora_blocks == "all" else config.lora_blocks
    if blocks > tower.depth:
        raise UserError(f'model.lora_blocks = {blocks}: the tower has {tower.depth} blocks; give fewer, or "all"')
    first = tower.depth - blocks
    for index in range(first, tower.depth):
        layers = tower.linears(index)
        for role in config.lora_targets:
            if role not in layers:
                raise UserError(
                    f"model.lora_targets: block {index} of {config.backbone} has no {role}; choose from "
                    f"{', '.join(layers)}"
                )
            parent, attribute = layers[role]
            check_rank(config.rank(role), getattr(parent, attribute), f"{role} of block {index}")
    return first


def _set_up(tower: Tower, first: int, config: ModelConfig) -> None:
    """Turn on what a tower offers to save memory or time."""
    if isinstance(tower, HubTower):
        tower.checkpointing = config.checkpointing
        if config.compile:
            tower.compile_blocks(first)


def _add_adapters(tower: Tower, first: int, config: ModelConfig, modality: str, seed: int) -> None:
    for index in range(first, tower.depth):
        layers = tower.linears(index)
        for role in config.lora_targets:
            parent, attribute = layers[role]
            layer = getattr(parent, attribute)
            rng = torch_generator(seed, "lora", modality, index, role)
            setattr(
                parent, attribute, LoraLinear(layer, config.rank(role), config.lora_scale, config.lora == "full", rng)
            )


class StackableLinear(nn.Linear):
    """A linear layer whose weights may come stacked, one for each of several models."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _linear(inputs: int, outputs: int, rng: torch.Generator) -> nn.Linear:
    layer = StackableLinear(inputs, outputs)
    with torch.no_grad():
        layer.weight.normal_(0, inputs**-0.5, generator=rng)
        layer.bias.zero_()
    return layer


def _blocks(model: DualEncoder) -> tuple[Block, ...]:
    """Every trained layer as a block, adapters in depth order, then projector layers."""
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(
        Block(
            name=layer,
            modality="image" if layer.startswith("image.") else "text",
            kind=_kind(layer, model.config),
            tensors=tuple(sorted(names)),
        )
        for layer, names in sorted(
            found.items(), key=lambda item: (item[0].startswith("text."), ".projector." in item[0])
        )
    )


def _kind(layer: str, config: ModelConfig) -> Kind:
    if ".projector." not in layer:
        return "lora"
    return "closed_form" if config.projector == "closed_form" else "projector"
