"""Messages as bytes: there and back to the bit, each part once, and one clear line for whatever is damaged."""

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ease.errors import UserError
from ease.federation.codec import (
    JobHeader,
    decode_job,
    decode_state,
    decode_update,
    encode_job,
    encode_state,
    encode_update,
    job_length,
    part_length,
    state_length,
    update_length,
)
from ease.federation.container import LIMITS, PREFIX, Limits, pack, unpack
from ease.federation.lock import LockMessage, pack_directions
from ease.federation.protocol import LocalJob, Optimiser, Replay, Update
from ease.federation.sparse import Sparse
from ease.params import Block, Params
from ease.requests.request import ClassRequest, ClientRequest, SampleRequest
from ease.subspace import Basis, Factors

quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
ADAPTER = Block("text.adapter", "text", "lora", ("text.adapter.A", "text.adapter.B"))


def factored() -> Params:
    rng = torch.Generator().manual_seed(3)
    shapes = {"text.adapter.A": (2, 5), "text.adapter.B": (4, 2)}
    return Params({name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}, (ADAPTER,))


def lock_of(state: Params) -> LockMessage:
    rng = torch.Generator().manual_seed(1)
    bases: dict[str, Basis] = {}
    for block in state.blocks:
        if block.factored:
            columns = tuple(
                Factors(torch.randn(4, 3, generator=rng), torch.randn(3, 5, generator=rng).double()) for _ in range(2)
            )
            coefficients = torch.randn(2, 1, generator=rng).double()
            bases[block.name] = Basis(columns, coefficients, torch.tensor([0.5]).double())
        else:
            size = sum(state[name].numel() for name in block.tensors)
            directions = torch.randn(size, 1, generator=rng)
            bases[block.name] = Basis(directions, torch.eye(1), torch.tensor([0.3]).double())
    return LockMessage(0.25, state, pack_directions(bases))


@pytest.fixture
def jobs(toy_params, local_job) -> dict[str, tuple[LocalJob, Params]]:
    state = toy_params(seed=1)
    nan = state.replace({"text.projector.0.bias": torch.tensor([torch.nan])})
    sparse = Sparse(state, state.blocks[1:], 0.5, 7)
    sample = SampleRequest(ids=("käse", "b/c:d", ""))
    sophia = Optimiser(kind="sophia", learning_rate=0.1, lora_learning_rate=1 / 3)
    return {
        "plain": (local_job(), state),
        "client": (local_job(request=ClientRequest(clients=(1, 2)), data="retain", clip=0.1, radius=2), state),
        "class": (local_job(request=ClassRequest(classes=(2,), text="a dog")), state.map(torch.Tensor.half)),
        "sample": (local_job(request=sample, settings={"a": 3, "b": 0.1}), nan),
        "lock": (local_job(lock=lock_of(state), optimiser=sophia), state.map(torch.Tensor.double)),
        "factors": (local_job(lock=lock_of(factored())), factored()),
        "reference": (local_job(reference=toy_params(2.0)), state),
        "sparse": (local_job(sparse=sparse), sparse.zeros()),
        "replays": (local_job(replays=(Replay(1, toy_params(2.0), 0.5, 0), Replay(2, "ab" * 32, -3.0, 1))), state),
        "keep": (local_job(keep=True), state),
        "precision": (local_job(precision="bfloat16"), state),
    }


NAMES = (
    "plain",
    "client",
    "class",
    "sample",
    "lock",
    "factors",
    "reference",
    "sparse",
    "replays",
    "keep",
    "precision",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_returns_as_it_was_sent(jobs, name: str) -> None:
    job, state = jobs[name]
    data, parts = encode_job(job, state)
    received, received_state = decode_job(data, parts)
    assert (received, received_state) == (job, state) and hash(received) == hash(job)
    assert encode_job(received, received_state) == (data, parts)
    assert list(received.settings.items()) == sorted(job.settings.items())
    assert [type(value) for value in received.settings.values()] == [type(v) for _, v in sorted(job.settings.items())]
    if job.lock is not None and received.lock is not None:
        assert received.lock.key == job.lock.key in parts
        for hold, other in [(job.lock.on("cpu"), received.lock.on("cpu"))]:
            assert hold.bases.keys() == other.bases.keys() and hold.reference == other.reference


@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_known_without_encoding(jobs, name: str) -> None:
    job, state = jobs[name]
    data, parts = encode_job(job, state)
    known = [state, *(part for part in (job.lock, job.reference) if part is not None)]
    known += [] if job.sparse is None else [job.sparse.base]
    known += [each.state for each in job.replays if isinstance(each.state, Params)]  # names have no part
    assert job_length(job) == len(data)
    assert sorted(map(part_length, known)) == sorted(map(len, parts.values()))


def test_a_part_that_serves_twice_is_there_once(toy_params, local_job) -> None:
    state = toy_params(seed=1)
    _, parts = encode_job(local_job(reference=toy_params(seed=1)), state)
    assert list(parts.values()) == [encode_state(state)]


def test_a_lock_is_named_by_all_of_its_content(toy_params) -> None:
    lock = lock_of(toy_params(seed=1))
    name = next(name for name in lock.packed if name.endswith(":directions"))
    other = replace(lock, packed={**lock.packed, name: lock.packed[name] + 1})
    changed = [other, replace(lock, strength=0.26), replace(lock, reference=toy_params(seed=2))]
    assert len({lock.key, *(each.key for each in changed)}) == 4
    again = replace(lock, packed=dict(reversed(lock.packed.items())))
    assert again == lock and again.key == lock.key and hash(again) == hash(lock)
    assert all(each != lock for each in changed)


def test_a_client_lock_is_what_was_sent() -> None:
    """Each direction or factor is its 8-bit values times its scale, by hand."""
    state = factored()
    lock = lock_of(state)
    (basis,) = lock.on("cpu").bases.values()
    for i, factors in enumerate(basis.directions):
        for side in ("left", "right"):
            values = lock.packed[f"text.adapter:{side}"][i].float() * lock.packed[f"text.adapter:{side}_scales"][i]
            assert torch.equal(getattr(factors, side), values.double())


def updates(toy_params) -> list[Update]:
    return [
        Update(3, 4, toy_params(seed=1), {"loss": torch.tensor(0.5)}),
        Update(0, 9, None, {"b": torch.zeros(2, 3), "a": torch.tensor([torch.nan]), "none": torch.zeros(0, 4)}),
        Update(1, 2, None, {"w": torch.arange(-3, 3, dtype=torch.int8), "w:scale": torch.tensor(0.1)}),
        Update(2, 0, None),
        Update(2, 1, toy_params(seed=3).map(torch.Tensor.double)),
    ]


def test_updates_return_as_they_were_sent(toy_params) -> None:
    for update in updates(toy_params):
        data = encode_update(update)
        received = decode_update(data)
        assert received == update and list(received.values) == list(update.values)
        assert update_length(update) == len(data) and encode_update(received) == data


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_states_return_as_they_were_sent(toy_params, dtype: torch.dtype) -> None:
    state = toy_params(seed=1).map(lambda tensor: tensor.to(dtype))
    data = encode_state(state)
    assert decode_state(data) == state and state_length(state) == len(data)
    assert list(decode_state(data).tensors) == list(state.tensors)


# --- what is refused ---


def header_of(data: bytes, old: bytes, new: bytes) -> bytes:
    """The message with something else in its header, of lengths that add up."""
    magic, version, header, payload = PREFIX.unpack_from(data)
    text = data[PREFIX.size : PREFIX.size + header]
    assert old in text
    text = text.replace(old, new)
    return PREFIX.pack(magic, version, len(text), payload) + text + data[PREFIX.size + header :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d[:10], "update: cut off after 10 bytes"),
        (lambda d: d[:-1], "lengths do not add up"),
        (lambda d: d + b"!", "lengths do not add up"),
        (lambda d: b"NOTEASE!" + d[8:], "not a message of this tool"),
        (lambda d: d[:8] + struct.pack(">H", 9) + d[10:], "format 9, and this version reads format 1"),
        (lambda d: header_of(d, b'"kind":"update"', b'"kind":"job"'), "kind: Input should be 'update'"),
        (lambda d: header_of(d, b'"pairs":4', b'"pairs":-4'), "pairs: "),
        (lambda d: header_of(d, b'"pairs":4', b'"pairs":"4"'), "pairs: "),
        (lambda d: header_of(d, b'"pairs":4', b'"pears":4,"pairs":4'), "pears: "),
        (lambda d: header_of(d, b'"modality":"image"', b'"modality":"smell"'), "modality"),
        (lambda d: header_of(d, b'"modality":"image"', b'"modality":"image","more":1'), "more"),
        (lambda d: header_of(d, b'["loss"]', b'["gain"]'), "tensors are not those it lists"),
        (lambda d: header_of(d, b'"pairs":4', b'"pairs":4]'), "update: header: "),
    ],
)
def test_damage_is_one_line_that_says_what(toy_params, damage, message: str) -> None:
    data = encode_update(updates(toy_params)[0])
    with pytest.raises(UserError) as caught:
        decode_update(damage(data))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_are_refused_before_anything_is_parsed(toy_params) -> None:
    """The contents are nonsense; what is said is the size."""
    nonsense = PREFIX.pack(b"EASEWIRE", 1, 500, 400) + bytes(900)
    with pytest.raises(UserError, match="a header of 500 bytes, and at most 100"):
        decode_update(nonsense, limits=Limits(total=5000, header=100))
    with pytest.raises(UserError, match="922 bytes, and at most 800"):
        decode_update(nonsense, limits=Limits(total=800, header=1000))


def test_types_and_shapes_are_checked(toy_params, local_job) -> None:
    whole = toy_params(seed=1).map(lambda tensor: tensor.to(torch.int8))
    with pytest.raises(UserError, match="a state is made of floats"):
        decode_state(encode_state(whole))
    with pytest.raises(UserError, match=r"'value/x' is of type torch\.bool"):
        decode_update(encode_update(Update(0, 1, None, {"x": torch.zeros(2, dtype=torch.bool)})))
    with pytest.raises(UserError, match="job: it has tensors that belong to nothing"):
        data, parts = encode_job(local_job(), toy_params(0.0))
        decode_job(pack(unpack(data, JobHeader, "job", LIMITS)[0], {"more": torch.zeros(2)}), parts)
    lock = lock_of(toy_params(seed=1))
    name = next(name for name in lock.packed if name.endswith(":directions"))
    for wrong in (lock.packed[name][:-1], lock.packed[name].float(), lock.packed[name][:, 0]):
        with pytest.raises(UserError, match=r"what it says of .* does not fit"):
            LockMessage.decode(replace(lock, packed={**lock.packed, name: wrong}).encode())


def test_parts_are_verified(toy_params, local_job) -> None:
    data, parts = encode_job(local_job(reference=toy_params(2.0)), toy_params(1.0))
    ((name, part), *_) = parts.items()
    with pytest.raises(UserError, match=r"job: its state .* did not come with it; send it once more"):
        decode_job(data, {key: value for key, value in parts.items() if key != name})
    with pytest.raises(UserError, match=r"job: its state .* was altered on the way; send it once more"):
        decode_job(data, {**parts, name: part[:-1] + bytes([part[-1] ^ 1])})


def one_line_or_nothing(decode, data: bytes) -> None:
    try:
        decode(data)
    except UserError as error:
        assert str(error) and "\n" not in str(error)


@quick
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_no_damage_of_a_job_gives_a_traceback(jobs, data, name: str) -> None:
    message, parts = encode_job(*jobs[name])
    one_line_or_nothing(lambda d: decode_job(d, parts), damaged(data, message))


@quick
@given(data=st.data(), which=st.integers(0, 4))
def test_no_damage_of_an_update_gives_a_traceback(toy_params, data, which: int) -> None:
    one_line_or_nothing(decode_update, damaged(data, encode_update(updates(toy_params)[which])))


@quick
@given(data=st.data(), state=st.sampled_from(["dense", "factors"]))
def test_no_damage_of_a_lock_gives_a_traceback(toy_params, data, state: str) -> None:
    lock = lock_of(factored() if state == "factors" else toy_params(seed=1))

    def use(message: bytes) -> None:
        LockMessage.decode(message).on("cpu")

    one_line_or_nothing(use, damaged(data, lock.encode()))


@quick
@given(st.binary(max_size=200))
def test_random_bytes_give_no_traceback(noise: bytes) -> None:
    for decode in (decode_update, decode_state, LockMessage.decode, lambda data: decode_job(data, {})):
        one_line_or_nothing(decode, noise)
        one_line_or_nothing(decode, PREFIX.pack(b"EASEWIRE", 1, len(noise) // 2, -(-len(noise) // 2)) + noise)


def damaged(data: st.DataObject, message: bytes) -> bytes:
    """Cut, with some bytes flipped, or with a piece of it replaced by noise."""
    kind = data.draw(st.sampled_from(["cut", "flip", "noise"]))
    place = data.draw(st.integers(0, len(message) - 1))
    if kind == "cut":
        return message[:place]
    if kind == "flip":
        return message[:place] + bytes([message[place] ^ data.draw(st.integers(1, 255))]) + message[place + 1 :]
    piece = data.draw(st.binary(max_size=20))
    return message[:place] + piece + message[place + len(piece) :]


# --- values compare by content ---


def test_states_jobs_and_updates_compare_and_hash_by_content(jobs, toy_params) -> None:
    assert toy_params(seed=1) == toy_params(seed=1) != toy_params(seed=2)
    nan = toy_params(1.0) * torch.nan
    assert nan == toy_params(1.0) * torch.nan and len({nan, toy_params(1.0) * torch.nan}) == 1
    assert toy_params(1.0) != toy_params(1.0).map(torch.Tensor.double) and toy_params(1.0) != "state"
    reordered = Params(dict(reversed(toy_params(1.0).tensors.items())), toy_params(1.0).blocks)
    assert reordered != toy_params(1.0)  # sums over it would go another way
    everything = [job for job, _ in jobs.values()]
    assert len(set(everything)) == len(everything)
    for job in everything:
        assert job == replace(job) and job != replace(job, seed=9) and job != 3
    reported = everything[NAMES.index("reference")]
    assert reported != replace(reported, reference=toy_params(3.0))
    first, second = updates(toy_params)[:2]
    assert first == replace(first) != second and first != replace(first, pairs=5) and len({first, second}) == 2


# --- each client's own ---


def test_a_client_gets_its_own_pairs(local_job) -> None:
    request = SampleRequest(ids=("a", "b", "c"))
    job = local_job(request=request)
    own = job.own(0, frozenset({"b", "z"}))
    assert own.request == SampleRequest(ids=("b",)) and job.own(2, {"x"}).request == SampleRequest(ids=())
    assert own.common == job.common == job.own(1, ("a", "c")).common
    for whole in (ClientRequest(clients=(1,)), ClassRequest(classes=(0,))):
        assert local_job(request=whole).own(0, ()).request == whole
    assert job.own(0, ("b",)).common != replace(job, round=2).common


def test_narrowed_tensors_change_no_byte_of_an_answer(world, local_job) -> None:
    """Each client does the whole job and its own part of it: the numbers it draws are the same."""
    ids = tuple(pair_id for shard in world.shards for pair_id in shard.train_ids[:4])
    for objective, data in (("align", "retain"), ("align", "forget"), ("membership scores", "all")):
        job = local_job(request=SampleRequest(ids=ids), objective=objective, data=data)
        whole = list(world.federation.perform(world.server.initial(), dict.fromkeys((0, 1), job)))
        assert list(world.federation.run(world.server.initial(), job, [0, 1])) == whole
