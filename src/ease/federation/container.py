"""The one container of everything that travels or is journaled: fixed lengths, a JSON header, a safetensors payload.

    8 bytes magic | 2 bytes version | 4 bytes header length | 8 bytes payload length | header | payload

Lengths are checked against limits before a byte of header or payload is looked at.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from ease.config import Config
from ease.errors import UserError
from ease.params import Block, Layout, Params, fits, layout_of

MAGIC = b"EASEWIRE"
VERSION = 1
PREFIX = struct.Struct(">8sHIQ")
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
TYPES = FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64}
"""What tensors may be made of."""

H = TypeVar("H", bound=Config)


@dataclass(frozen=True)
class Limits:
    """The largest message that is looked at, in bytes."""

    total: int = 1 << 32
    header: int = 1 << 24


LIMITS = Limits()


def pack(header: Config, tensors: Mapping[str, Tensor]) -> bytes:
    """A message. Equal contents give equal bytes."""
    text = _text(header)
    payload = serialise_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return PREFIX.pack(MAGIC, VERSION, len(text), len(payload)) + text + payload


def packed_length(header: Config, tensors: Mapping[str, Tensor]) -> int:
    """`len(pack(header, tensors))` without looking at a value: names, shapes and types decide it."""
    return PREFIX.size + len(_text(header)) + _payload_length(layout_of(tensors))


def unpack(data: bytes, kind: type[H], what: str, limits: Limits = LIMITS) -> tuple[H, dict[str, Tensor]]:
    """The header, checked, and the tensors of a message; `what` names it where it is refused."""
    if len(data) > limits.total:
        raise UserError(f"{what}: {len(data)} bytes, and at most {limits.total} are accepted")
    if len(data) < PREFIX.size:
        raise UserError(f"{what}: cut off after {len(data)} bytes; send or restore the whole of it")
    magic, version, header, payload = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise UserError(f"{what}: not a message of this tool")
    if version != VERSION:
        raise UserError(f"{what}: format {version}, and this version reads format {VERSION}; use the same version")
    if header > limits.header:
        raise UserError(f"{what}: a header of {header} bytes, and at most {limits.header} are accepted")
    if PREFIX.size + header + payload != len(data):
        raise UserError(f"{what}: its lengths do not add up to its {len(data)} bytes; send or restore the whole of it")
    return _header(data[PREFIX.size : PREFIX.size + header], kind, what), _tensors(data[PREFIX.size + header :], what)


def content_hash(data: bytes) -> str:
    """Names a part of a message by what it holds."""
    return hashlib.sha256(data).hexdigest()


def _text(header: Config) -> bytes:
    values = header.model_dump(mode="json")
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _header(text: bytes, kind: type[H], what: str) -> H:
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "header"
        raise UserError(f"{what}: {field}: {first['msg'][:200]}; the message was altered") from error


def _tensors(payload: bytes, what: str) -> dict[str, Tensor]:
    try:
        tensors = parse_tensors(payload)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, OverflowError) as error:
        raise UserError(
            f"{what}: its tensors are damaged ({type(error).__name__}); send or restore it again"
        ) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise UserError(f"{what}: {name!r} is of type {tensor.dtype}, which no message holds")
    return tensors


def require(condition: bool, what: str, problem: str) -> None:
    """Refuse a message whose parts do not go together."""
    if not condition:
        raise UserError(f"{what}: {problem}; the message was altered")


def state_of(blocks: tuple[Block, ...], tensors: Mapping[str, Tensor], what: str) -> Params:
    """A state in the order of its blocks, since sums over its tensors must always go the same way."""
    require(fits(blocks, tensors), what, "its tensors do not match its block list")
    require(all(tensor.dtype in FLOATS for tensor in tensors.values()), what, "a state is made of floats")
    return Params({name: tensors[name] for block in blocks for name in block.tensors}, blocks)


@lru_cache(maxsize=4096)
def _payload_length(layout: Layout) -> int:
    return len(serialise_tensors({name: torch.empty(shape, dtype=dtype) for name, shape, dtype in layout}))
