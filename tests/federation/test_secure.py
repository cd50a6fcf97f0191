"""Secure aggregation: the server gets the exact total, whoever drops out, and no client's own sums."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ease.errors import UserError
from ease.federation.check import refusal
from ease.federation.codec import decode_job, encode_job, job_length
from ease.federation.journal import Journal
from ease.federation.masking import PRIME, SECRET, SHARE, Keys, combined, commitment, pairwise, split, stream
from ease.federation.protocol import LocalJob, Update
from ease.federation.secure_aggregation import (
    ADDENDS,
    ADVERTISE,
    COMMITMENTS,
    EXCHANGE,
    KEYS,
    MASKED,
    REVEAL,
    SHARES,
    Letter,
    Total,
    client_secret,
    measure_keys,
    measure_masked,
    measure_revealed,
    measure_shares,
    secure_total,
    threshold,
)
from ease.params import Params

LENGTH = 50
MASK = "masked numbers"
PHASES = (ADVERTISE, EXCHANGE, MASK, REVEAL)
Answer = Callable[[int, LocalJob, dict[str, Tensor]], dict[str, Tensor]]


def numbers(client: int) -> Tensor:
    """Any 64-bit integers."""
    drawn = np.random.default_rng(client).integers(-(2**63), 2**63 - 1, LENGTH, dtype=np.int64)
    return torch.from_numpy(drawn)


@dataclass
class Clients:
    """A federation of clients that each hold numbers. Some drop out, and some lie."""

    folder: Path
    count: int
    absent: Mapping[str, frozenset[int]] = field(default_factory=dict)
    changed: Answer = lambda client, job, values: values
    seen: list[tuple[LocalJob, Update]] = field(default_factory=list)
    addends: Callable[[int], Tensor] = numbers

    @property
    def clients(self) -> list[int]:
        return [3 * place + 1 for place in range(self.count)]

    @property
    def members(self) -> dict[int, Sequence[str]]:
        return dict.fromkeys(self.clients, ("a",))

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in reversed(clients):  # answers come in any order
            if client in self.absent.get(job.objective, ()):
                yield refusal(client, "it did not answer")
                continue
            own = job.own(client, ())
            update = Update(client, 1, None, self.changed(client, own, self.answer(client, own)))
            self.seen.append((own, update))
            yield update

    def data(self, client: int) -> Any:
        place = SimpleNamespace(folder=self.folder / str(client))
        return SimpleNamespace(shard=SimpleNamespace(client=client), required_history=place)

    def answer(self, client: int, job: LocalJob) -> dict[str, Tensor]:
        if job.objective == MASK:
            return measure_masked(self.data(client), job, self.addends(client), client)
        measure = {ADVERTISE: measure_keys, EXCHANGE: measure_shares, REVEAL: measure_revealed}[job.objective]
        return measure(None, None, self.data(client), job)  # type: ignore[arg-type]

    def answered(self, objective: str, client: int) -> tuple[LocalJob, Update]:
        return next(each for each in self.seen if each[0].objective == objective and each[1].client == client)


@pytest.fixture
def job(local_job) -> LocalJob:
    return local_job(objective=MASK)


def added(clients: Clients, job: LocalJob, state: Params, **more: Any) -> Total:
    return secure_total(clients, state, job, clients.clients, **more)


def plain(clients: Sequence[int]) -> Tensor:
    return torch.stack([numbers(client) for client in clients]).sum(0)


@pytest.fixture
def state(toy_params) -> Params:
    return toy_params(0.0)


# --- the total ---


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_masks_cancel(tmp_path: Path, job, state, count: int) -> None:
    clients = Clients(tmp_path, count)
    found = added(clients, job, state)
    assert torch.equal(found.packed, plain(clients.clients))
    assert found.counts == {client: client for client in clients.clients} and not found.refused


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gone", [{1}, {7}, {4, 13}])
def test_clients_that_drop_out_are_recovered_from(tmp_path: Path, job, state, phase: str, gone: set[int]) -> None:
    """Whoever sent masked numbers counts, even if it was not heard of again."""
    clients = Clients(tmp_path, 5, {phase: frozenset(gone)})
    found = added(clients, job, state)
    stay = clients.clients if phase == REVEAL else sorted(set(clients.clients) - gone)
    assert torch.equal(found.packed, plain(stay))
    assert sorted(found.counts) == stay and set(found.refused) == gone


def test_a_client_may_drop_out_in_every_phase(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 9)
    clients.absent = {phase: frozenset({clients.clients[2 * place]}) for place, phase in enumerate(PHASES)}
    found = added(clients, job, state)
    gone = {clients.clients[place] for place in (0, 2, 4)}
    assert torch.equal(found.packed, plain(sorted(set(clients.clients) - gone)))


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_clients_are_refused(tmp_path: Path, job, state, phase: str) -> None:
    clients = Clients(tmp_path, 5, {phase: frozenset({1, 4, 7})})
    with pytest.raises(UserError, match=r"2 of 5 clients .* and 3 are needed .*client 1: it did not answer") as raised:
        added(clients, job, state)
    assert "\n" not in str(raised.value)


def test_refused_clients_of_all_phases_are_added_up(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 5, {ADVERTISE: frozenset({1}), EXCHANGE: frozenset({4}), MASK: frozenset({7})})
    with pytest.raises(UserError, match=r"2 of 5 clients sent masked sums and 3 are needed"):
        added(clients, job, state)


@pytest.mark.parametrize("phase", [ADVERTISE, EXCHANGE, MASK])
def test_if_all_clients_are_needed_none_may_be_missing(tmp_path: Path, job, state, phase: str) -> None:
    clients = Clients(tmp_path, 5, {phase: frozenset({4})})
    with pytest.raises(UserError, match=r"4 of 5 clients .* and 5 are needed \(client 4"):
        added(clients, job, state, everyone=True)


def test_everyone_has_sent_where_the_last_round_lacks_someone(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 5, {REVEAL: frozenset({4})})
    assert torch.equal(added(clients, job, state, everyone=True).packed, plain(clients.clients))


def test_the_total_of_one_client_is_refused(tmp_path: Path, job, state) -> None:
    with pytest.raises(UserError, match="1 client takes part"):
        added(Clients(tmp_path, 1), job, state)


@pytest.mark.parametrize("count", range(2, 30))
def test_two_groups_that_unmask_share_a_client(count: int) -> None:
    assert 2 * threshold(count) > count >= threshold(count)


# --- what the server sees ---


def test_masked_numbers_are_the_numbers_plus_streams_that_do_not_depend_on_them(tmp_path: Path, job, state) -> None:
    """Recomputed from the client's own keys: all of the client's data is in the addend."""
    for addends in (numbers, lambda client: torch.zeros(LENGTH, dtype=torch.int64)):
        clients = Clients(tmp_path, 4, addends=addends)
        added(clients, job, state)
        asked, update = clients.answered(MASK, 4)
        letter = Letter.to(4, asked)
        keys = Keys.of(client_secret(tmp_path / "4"), letter.cards[4].nonce)
        masks = stream(keys.self_mask, LENGTH).copy()
        for other in (1, 7, 10):
            masks += pairwise(keys.masking, letter.cards[other].masking, letter.session, other > 4, LENGTH)
        masked = update.values[MASKED].numpy().view(np.uint64)
        assert np.array_equal(masked - addends(4).numpy().view(np.uint64), masks)
        assert not np.array_equal(masked, addends(4).numpy().view(np.uint64))


def test_masks_are_fresh_each_time_and_look_uniform(tmp_path: Path, job, state) -> None:
    """The same zeros are sent twice: what arrives has nothing in common, and each bit is set half of the time."""
    sent = []
    for _ in range(2):
        clients = Clients(tmp_path, 3, addends=lambda client: torch.zeros(4000, dtype=torch.int64))
        added(clients, job, state)
        sent.append(clients.answered(MASK, 1)[1].values[MASKED].numpy().view(np.uint64))
    assert not np.intersect1d(*sent).size
    for each in (*sent, sent[0] ^ sent[1]):
        bits = np.unpackbits(each.view(np.uint8).reshape(-1, 8), axis=1).mean(0)
        assert np.abs(bits - 0.5).max() < 6 * 0.5 / 4000**0.5


def test_clients_receive_what_is_for_them_only(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 4)
    added(clients, job, state)
    for own, update in clients.seen:
        assert set(own.inbox) == (set() if own.objective == ADVERTISE else {update.client})


def test_the_server_gets_only_the_self_mask_of_a_survivor(tmp_path: Path, job, state) -> None:
    """With the shares of both secrets it could read the client's sums."""
    clients = Clients(tmp_path, 4, {MASK: frozenset({7})})
    added(clients, job, state)
    for client in (1, 4, 10):
        asked, update = clients.answered(REVEAL, client)
        letter = Letter.to(client, asked)
        for place, sender in enumerate(letter.header.senders):
            share = update.values[SHARES][place].numpy().tobytes()
            bound = clients.answered(EXCHANGE, sender)[1].values[COMMITMENTS]
            own = bound[letter.header.clients.index(client)].numpy().tobytes()
            assert commitment(share) == (own[SECRET:] if sender == 7 else own[:SECRET])


# --- clients and servers that lie ---


def flipped(name: str, of: str, who: set[int], place: int | None = None) -> Answer:
    """Some clients' answers to an objective with one bit changed."""

    def change(client: int, job: LocalJob, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if client in who and job.objective == of:
            values = {**values, name: values[name].clone()}
            rows = values[name] if place is None else values[name][place]
            rows[..., 5] ^= 1
        return values

    return change


def test_sealed_shares_that_were_altered_are_refused_by_their_recipient(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 4, changed=flipped(SHARES, EXCHANGE, {1}, place=2))
    with pytest.raises(UserError, match="client 7: the shares that client 1 sent were altered"):
        added(clients, job, state)


def test_false_shares_are_left_out_where_enough_others_are_there(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 5, {MASK: frozenset({13})}, changed=flipped(SHARES, REVEAL, {4}))
    assert torch.equal(added(clients, job, state).packed, plain([1, 4, 7, 10]))


def test_too_many_false_shares_are_refused_and_their_clients_named(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 5, changed=flipped(SHARES, REVEAL, {4, 7, 10}))
    with pytest.raises(UserError, match=r"2 sound shares .*false shares from client 4, client 7, client 10"):
        added(clients, job, state)


@pytest.mark.parametrize("dropped", [False, True])
def test_shares_of_another_secret_are_refused(tmp_path: Path, job, state, dropped: bool) -> None:
    """Client 1 advertises keys that its shares do not give."""

    def change(client: int, job: LocalJob, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if client == 1 and job.objective == ADVERTISE:
            values[KEYS][2 * SECRET if not dropped else SECRET] ^= 1
        return values

    clients = Clients(tmp_path, 4, changed=change)
    clients.answer = lying_about_its_card(clients.answer)  # type: ignore[method-assign]
    clients.absent = {MASK: frozenset({1})} if dropped else {}
    with pytest.raises(UserError, match="client 1 shared another secret than it masked with"):
        added(clients, job, state)


def lying_about_its_card(answer: Callable[[int, LocalJob], dict[str, Tensor]]):
    """Client 1 goes on although the advertised keys are not its own."""

    def answered(client: int, job: LocalJob) -> dict[str, Tensor]:
        if client != 1 or job.objective == ADVERTISE:
            return answer(client, job)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ease.federation.secure_aggregation.Keys.card", SameAsAny())
            return answer(client, job)

    return answered


class SameAsAny:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def test_keys_that_are_not_the_clients_own_are_refused(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 3, changed=flipped(KEYS, ADVERTISE, {4}))
    with pytest.raises(UserError, match="client 4: the advertised keys are not its own"):
        added(clients, job, state)


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 2},
        {"threshold": 5},
        {"clients": (1, 4, 7, 7)},
        {"clients": (4, 7, 10, 13)},
        {"senders": (1, 4)},
        {"senders": (1, 4, 7, 8)},
        {"survivors": (1, 4, 99)},
    ],
)
def test_letters_that_are_not_sound_are_refused(tmp_path: Path, job, state, change: Mapping[str, Any]) -> None:
    clients = Clients(tmp_path, 4)
    added(clients, job, state)
    asked, _ = clients.answered(MASK, 1)
    letter = Letter.to(1, asked)
    cards = {**letter.cards, 13: letter.cards[10]}
    forged = Letter(letter.header.model_copy(update=change), cards, {**letter.boxes, 8: letter.boxes[7]})
    with pytest.raises(UserError, match="message is not sound"):
        clients.answer(1, replace(asked, inbox={1: forged.to_bytes()}))


# --- repeated rounds ---


def test_the_same_round_again_gives_the_same_bytes(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 4)
    added(clients, job, state)
    for phase in (EXCHANGE, MASK, REVEAL):
        asked, update = clients.answered(phase, 4)
        assert Update(4, 1, None, clients.answer(4, asked)) == update
    asked, update = clients.answered(ADVERTISE, 4)
    assert Update(4, 1, None, clients.answer(4, asked)) != update, "keys are new each time"


def test_no_mask_hides_two_inputs(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 4)
    added(clients, job, state)
    asked, _ = clients.answered(MASK, 4)
    clients.addends = lambda client: numbers(client) + 1
    with pytest.raises(UserError, match=r"client 4: its pairs or the other clients changed .* journal folder"):
        clients.answer(4, asked)


def test_no_mask_is_used_with_fewer_others(tmp_path: Path, job, state) -> None:
    """A server that leaves a client out of a second try would learn the mask that the two share."""
    clients = Clients(tmp_path, 4)
    added(clients, job, state)
    asked, _ = clients.answered(MASK, 4)
    letter = Letter.to(4, asked)
    fewer = replace(letter, header=letter.header.model_copy(update={"senders": (1, 4, 7)}))
    with pytest.raises(UserError, match="client 4: its pairs or the other clients changed"):
        clients.answer(4, replace(asked, inbox={4: fewer.to_bytes()}))


def test_no_client_reveals_shares_for_two_lists_of_survivors(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 4)
    added(clients, job, state)
    asked, _ = clients.answered(REVEAL, 4)
    letter = Letter.to(4, asked)
    other = replace(letter, header=letter.header.model_copy(update={"survivors": (1, 4, 7)}))
    with pytest.raises(UserError, match="client 4: it already revealed shares for another list"):
        clients.answer(4, replace(asked, inbox={4: other.to_bytes()}))


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupted_aggregation_is_resumed_with_the_same_masks(tmp_path: Path, job, state, phase: str) -> None:
    """The process dies after half of the answers to a round were kept."""

    class Killed(Exception):
        pass

    def kill(client: int, job: LocalJob, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if job.objective == phase and client == 4:
            raise Killed
        return values

    clients = Clients(tmp_path / "clients", 4, changed=kill)
    with pytest.raises(Killed):
        secure_total(Journal(clients, tmp_path / "journal"), state, job, clients.clients)
    first, clients.seen, clients.changed = clients.seen, [], lambda client, job, values: values
    found = secure_total(Journal(clients, tmp_path / "journal"), state, job, clients.clients)
    assert torch.equal(found.packed, plain(clients.clients))
    asked = [(job.objective, update.client) for job, update in clients.seen]
    assert first and not {(job.objective, update.client) for job, update in first} & set(asked)
    assert {client for objective, client in asked if objective == phase} == {1, 4}


def test_a_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    secret = client_secret(tmp_path)
    assert len(secret) == SECRET and client_secret(tmp_path) == secret
    assert client_secret(tmp_path / "other") != secret
    assert (tmp_path / "secure.key").stat().st_mode & 0o077 == 0
    (tmp_path / "secure.key").write_bytes(b"short")
    with pytest.raises(UserError, match=r"secure\.key: damaged"):
        client_secret(tmp_path)


# --- secret shares ---


def test_enough_shares_give_the_secret_and_fewer_do_not() -> None:
    secret = bytes(range(SECRET))
    shares = split(secret, range(1, 7), 4, b"seed" * 8)
    assert all(len(share) == SHARE for share in shares.values())
    for some in combinations(shares, 4):
        assert combined({point: shares[point] for point in some}) == secret
    assert combined(shares) == secret
    for some in combinations(shares, 3):
        assert combined({point: shares[point] for point in some}) != secret
    assert combined({**shares, 2: bytes(SHARE)}) != secret


@given(st.binary(min_size=SECRET, max_size=SECRET), st.integers(2, 9))
def test_shares_of_any_secret_give_it_back(secret: bytes, needed: int) -> None:
    shares = split(secret, range(1, 10), needed, secret)
    assert combined(dict(list(shares.items())[-needed:])) == secret


@pytest.mark.parametrize("guess", [bytes(SECRET), b"\xff" * SECRET, bytes(range(SECRET))])
def test_fewer_shares_fit_every_secret(guess: bytes) -> None:
    """For each secret there is a third share with which two given ones are shares of it."""
    shares = split(b"secret" + bytes(SECRET - 6), [1, 2], 3, b"seed" * 8)
    first, second = (int.from_bytes(share) for share in shares.values())
    third = (int.from_bytes(guess) - 3 * first + 3 * second) % PRIME  # f(0) = 3 f(1) - 3 f(2) + f(3)
    assert combined({**shares, 3: third.to_bytes(SHARE)}) == guess


# --- on the wire ---


def test_letters_travel_with_the_job_of_their_client(local_job, toy_params) -> None:
    state = toy_params(0.0)
    job = local_job(inbox={3: b"for three", 5: b"for five"})
    own = job.own(3, ())
    data, parts = encode_job(own, state)
    assert decode_job(data, parts)[0].inbox == {3: b"for three"}
    assert job_length(own) == len(data)
    assert b"for five" not in data and job.own(4, ()).inbox == {} and job.common.inbox == {}


def test_counts_travel_in_the_clear(tmp_path: Path, job, state) -> None:
    clients = Clients(tmp_path, 3)
    added(clients, job, state)
    assert int(clients.answered(MASK, 4)[1].values[ADDENDS]) == 4
