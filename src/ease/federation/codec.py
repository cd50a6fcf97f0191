"""Jobs, states and updates as bytes, and back: what a client is sent and what it answers.

A job names its heavy parts by the hash of their bytes, so that each travels once; the receiver checks the hashes.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_type_hints

import torch
from pydantic import Field, StringConstraints, create_model
from torch import Tensor

from ease.config import Config
from ease.errors import UserError
from ease.federation.container import (
    LIMITS,
    Limits,
    content_hash,
    pack,
    packed_length,
    require,
    state_of,
    unpack,
)
from ease.federation.lock import LockMessage
from ease.federation.protocol import LocalJob, Replay, RoundNumber, Update
from ease.federation.sparse import Sparse
from ease.params import Block, Params

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Part = Literal["state", "lock", "reference", "base"]
INBOX = "inbox/"
UNKNOWN = "0" * 64
"""Replaces a hash if only the length counts."""


class StateHeader(Config):
    kind: Literal["state"] = "state"
    blocks: tuple[Block, ...]


class UpdateHeader(Config):
    kind: Literal["update"] = "update"
    client: int = Field(ge=0)
    pairs: int = Field(ge=0)
    blocks: tuple[Block, ...] | None
    """Layout of the change of parameters, if there is one."""
    values: tuple[str, ...]
    """Names of the values, in their order."""


class SparseHeader(Config):
    base: Hash
    blocks: tuple[Block, ...]
    density: float = Field(gt=0, le=1)
    seed: int


class ReplayHeader(Config):
    round: RoundNumber
    state: Hash
    weight: float
    group: int = Field(ge=0)


class TensorsHeader(Config):
    """The tensors of a job in its header; they are separate parts."""

    kind: Literal["job"] = "job"
    state: Hash
    lock: Hash | None
    reference: Hash | None
    sparse: SparseHeader | None
    replays: tuple[ReplayHeader, ...]


TENSOR_FIELDS = frozenset(TensorsHeader.model_fields) | {"inbox"}
PLAIN_FIELDS = {
    name: kind for name, kind in get_type_hints(LocalJob, include_extras=True).items() if name not in TENSOR_FIELDS
}
"""Fields of a job without tensors, and their types. They travel as they are."""
JobHeader = create_model(
    "JobHeader", __base__=TensorsHeader, **{name: (kind, ...) for name, kind in PLAIN_FIELDS.items()}
)  # type: ignore[call-overload]


# --- states ---


def encode_state(state: Params) -> bytes:
    return pack(StateHeader(blocks=state.blocks), state.tensors)


def state_length(state: Params) -> int:
    """`len(encode_state(state))`, without reading a value."""
    return packed_length(StateHeader(blocks=state.blocks), state.tensors)


def decode_state(data: bytes, what: str = "state", limits: Limits = LIMITS) -> Params:
    header, tensors = unpack(data, StateHeader, what, limits)
    return state_of(header.blocks, tensors, what)


# --- updates ---


def encode_update(update: Update) -> bytes:
    return pack(*_update_content(update))


def update_length(update: Update) -> int:
    """`len(encode_update(update))`, without reading a value."""
    return packed_length(*_update_content(update))


def decode_update(data: bytes, what: str = "update", limits: Limits = LIMITS) -> Update:
    header, tensors = unpack(data, UpdateHeader, what, limits)
    change = _section(tensors, "delta/")
    values = _section(tensors, "value/")
    require(len(change) + len(values) == len(tensors), what, "it has tensors that belong to nothing")
    named = sorted(values) == sorted(header.values) and (header.blocks is not None or not change)
    require(named, what, "its tensors are not those it lists")
    delta = None if header.blocks is None else state_of(header.blocks, change, what)
    return Update(header.client, header.pairs, delta, {name: values[name] for name in header.values})


def _update_content(update: Update) -> tuple[UpdateHeader, dict[str, Tensor]]:
    delta = update.delta
    header = UpdateHeader(
        client=update.client,
        pairs=update.pairs,
        blocks=None if delta is None else delta.blocks,
        values=tuple(update.values),
    )
    change = {} if delta is None else {f"delta/{name}": tensor for name, tensor in delta.tensors.items()}
    return header, {**change, **{f"value/{name}": tensor for name, tensor in update.values.items()}}


# --- jobs ---


def parts_of(job: LocalJob, state: Params) -> dict[Part, Params | LockMessage]:
    """The parts sent with a job: its initial state and other large tensors."""
    parts: dict[Part, Params | LockMessage | None] = {
        "state": state,
        "lock": job.lock,
        "reference": job.reference,
        "base": None if job.sparse is None else job.sparse.base,
    }
    return {part: value for part, value in parts.items() if value is not None}


def encode_part(part: Params | LockMessage) -> bytes:
    return part.encode() if isinstance(part, LockMessage) else encode_state(part)


def part_length(part: Params | LockMessage) -> int:
    """`len(encode_part(part))`, without reading a value."""
    return part.encoded_length() if isinstance(part, LockMessage) else state_length(part)


def encode_job(job: LocalJob, state: Params) -> tuple[bytes, dict[str, bytes]]:
    """The job, and its heavy parts by the hash of their bytes."""
    encoded = {part: encode_part(value) for part, value in parts_of(job, state).items()}
    hashes = {part: content_hash(data) for part, data in encoded.items()}
    parts = {hashes[part]: data for part, data in encoded.items()}
    names = []
    for each in job.replays:
        if isinstance(each.state, str):  # the client has it
            names.append(each.state)
        else:
            data = encode_state(each.state)
            names.append(content_hash(data))
            parts[names[-1]] = data
    return pack(_job_header(job, hashes, names), _letters(job)), parts


def job_length(job: LocalJob) -> int:
    """Length of the job's bytes without its parts."""
    present: dict[Part, str] = dict.fromkeys(("state", "lock", "reference", "base"), UNKNOWN)
    return packed_length(_job_header(job, present, [UNKNOWN] * len(job.replays)), _letters(job))


def decode_job(
    data: bytes, parts: Mapping[str, bytes], what: str = "job", limits: Limits = LIMITS
) -> tuple[LocalJob, Params]:
    """The job and the state it starts from. `parts` may hold more than the job names, as a client that keeps them.

    Replayed rounds whose states were not sent keep their hashes.
    """
    header, tensors = unpack(data, JobHeader, what, limits)
    state = decode_state(_part(header.state, parts, "state", what), f"{what}: state", limits)
    lock = reference = sparse = None
    if header.lock is not None:
        lock = LockMessage.decode(_part(header.lock, parts, "lock", what), f"{what}: lock", limits)
    if header.reference is not None:
        reference = decode_state(_part(header.reference, parts, "reference", what), f"{what}: reference", limits)
    if header.sparse is not None:
        base = decode_state(_part(header.sparse.base, parts, "base", what), f"{what}: base", limits)
        require(set(header.sparse.blocks) <= set(base.blocks), what, "its adapter has layers that its base has not")
        sparse = Sparse(base, header.sparse.blocks, header.sparse.density, header.sparse.seed)
    replays = tuple(
        Replay(each.round, _replayed_state(each.state, parts, what, limits), each.weight, each.group)
        for each in header.replays
    )
    plain = {name: getattr(header, name) for name in PLAIN_FIELDS}
    inbox = _inbox(tensors, what)
    return LocalJob(lock=lock, reference=reference, sparse=sparse, replays=replays, inbox=inbox, **plain), state


def _replayed_state(name: str, parts: Mapping[str, bytes], what: str, limits: Limits) -> Params | str:
    """The state of this hash if it was sent, else the hash, by which a client finds what it keeps."""
    if name not in parts:
        return name
    role = "replayed state"
    return decode_state(_part(name, parts, role, what), f"{what}: {role}", limits)


def _letters(job: LocalJob) -> dict[str, Tensor]:
    """Messages for single clients, as they travel with the job."""
    return {
        f"{INBOX}{client}": torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for client, message in job.inbox.items()
    }


def _inbox(tensors: Mapping[str, Tensor], what: str) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for name, tensor in tensors.items():
        client = name.removeprefix(INBOX)
        named = name.startswith(INBOX) and client.isascii() and client.isdigit() and len(client) < 10
        require(named, what, "it has tensors that belong to nothing")
        require(tensor.dtype == torch.uint8 and tensor.dim() == 1, what, "a message to a client is made of bytes")
        found[int(client)] = tensor.numpy().tobytes()
    return found


def _job_header(job: LocalJob, hashes: Mapping[Part, str], replayed: Sequence[str]) -> TensorsHeader:
    sparse = None
    if job.sparse is not None:
        sparse = SparseHeader(
            base=hashes["base"], blocks=job.sparse.blocks, density=job.sparse.density, seed=job.sparse.seed
        )
    return JobHeader(
        state=hashes["state"],
        lock=None if job.lock is None else hashes["lock"],
        reference=None if job.reference is None else hashes["reference"],
        sparse=sparse,
        replays=tuple(
            ReplayHeader(round=each.round, state=name, weight=each.weight, group=each.group)
            for each, name in zip(job.replays, replayed, strict=True)
        ),
        **{name: getattr(job, name) for name in PLAIN_FIELDS},
    )


def _part(name: str, parts: Mapping[str, bytes], role: str, what: str) -> bytes:
    if name not in parts:
        raise UserError(f"{what}: its {role} {name[:12]} did not come with it; send it once more")
    if content_hash(parts[name]) != name:
        raise UserError(f"{what}: its {role} {name[:12]} was altered on the way; send it once more")
    return parts[name]


def _section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
