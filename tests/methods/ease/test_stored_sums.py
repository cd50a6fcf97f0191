"""Sums of the updates that clients keep: by hand, from as few clients as possible, and refusals."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.faults import flip

from ease.errors import UserError
from ease.federation.client_history import ClientHistory, client_history
from ease.federation.codec import decode_job, decode_update, encode_job, encode_state, encode_update, job_length
from ease.federation.container import content_hash
from ease.federation.fedavg import fedavg
from ease.federation.history import History
from ease.federation.protocol import LocalJob, Update
from ease.methods.base import Trained
from ease.methods.ease.contribution import contribution_of
from ease.methods.ease.stored_sums import OWN_UPDATES, RoundWeights, own_sum, start_of, sum_updates
from ease.params import Params
from ease.requests.request import ClientRequest, SampleRequest
from ease.subspace import Basis, ServerLock


class Keepers:
    """Clients without data, each of which keeps its own updates and is sent bytes alone."""

    def __init__(self, disks: Path, clients: Sequence[int]) -> None:
        self.disks, self.clients, self.asked = disks, list(clients), []
        self.members = {client: frozenset(map(str, range(client + 1))) for client in clients}

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        assert job.objective == OWN_UPDATES
        for client in clients:
            own = job.own(client, ())
            received, _ = decode_job(*encode_job(own, params))
            assert received == own
            self.asked.append((client, [each.round for each in received.replays]))
            stand_in = SimpleNamespace(required_history=client_history(self.disks, client))
            values = own_sum(None, params, stand_in, received)  # type: ignore[arg-type]
            yield decode_update(encode_update(Update(client, 1, None, values)))


DRAWN = ((0, 1, 2, 3), (0, 2), (0, 3), (1, 3), (0, 1, 2), (2, 3))


@pytest.fixture
def kept(past, toy_params, tmp_path):
    """Six rounds of four clients, not all of which take part in each; what the server kept of them; and the clients."""

    def make(weighting: str = "pairs", drawn=DRAWN) -> tuple[Trained, Trained, Keepers, list[dict[int, Params]]]:
        rounds = [{c: toy_params(seed=10 * n + c) for c in clients} for n, clients in enumerate(drawn)]
        trained = past(*rounds, weighting=weighting)
        for number, changes in enumerate(rounds, start=1):
            for client, change in changes.items():
                client_history(tmp_path / "disks", client).write(number, trained.history.start(number), change)
        alone = History(shutil.copytree(trained.history.folder, tmp_path / "alone"), updates=False)
        for path in alone.folder.rglob("client-*"):
            path.unlink()
        return trained, replace(trained, history=alone), Keepers(tmp_path / "disks", (0, 1, 2, 3)), rounds

    return make


def mean(changes: dict[int, Params], clients: set[int], weighting: str) -> dict[str, np.ndarray]:
    """Client c counts c + 1 pairs, or one."""
    weights = {client: client + 1 if weighting == "pairs" else 1 for client in changes if client in clients}
    zero = {name: np.zeros(tuple(tensor.shape)) for name, tensor in next(iter(changes.values())).tensors.items()}
    for client, weight in weights.items():
        for name, tensor in changes[client].tensors.items():
            zero[name] = zero[name] + weight / sum(weights.values()) * tensor.double().numpy()
    return zero


# --- the sums ---


@pytest.mark.parametrize("source", ["leaving", "remaining"])
@pytest.mark.parametrize("weighting", ["pairs", "uniform"])
@pytest.mark.parametrize("leaving", [(2,), (0, 3)], ids=["one", "two"])
def test_a_report_is_the_mean_with_the_client_minus_the_mean_without(kept, weighting, leaving, source) -> None:
    """Not everyone takes part in each round, in the third only the two leaving clients; by hand, from all updates."""
    _, trained, keepers, rounds = kept(weighting)
    others = {0, 1, 2, 3} - set(leaving)
    if source == "remaining":  # the leaving clients have deleted everything
        for client in leaving:
            shutil.rmtree(keepers.disks / f"{client:05d}")
    found = contribution_of(trained, ClientRequest(clients=leaving), keepers, source=source)
    for name in trained.final.tensors:
        expected = 0.0
        for changes in rounds:
            did, would = (mean(changes, set(changes) & who, weighting) for who in ({0, 1, 2, 3}, others))
            expected = expected + did[name] - would[name]
        np.testing.assert_allclose(found.total[name], expected, atol=4e-6)
    reporting = {client for client, _ in keepers.asked}
    assert reporting == (set(leaving) if source == "leaving" else others)
    assert len(keepers.asked) == len(reporting), "each is asked once"


def test_rounds_without_the_leaving_client_are_not_asked_about(kept) -> None:
    _, trained, keepers, _ = kept()
    contribution_of(trained, ClientRequest(clients=(2,)), keepers)
    assert keepers.asked == [(2, [1, 2, 5, 6])]


@pytest.mark.parametrize("leaving", [(2,), (0, 1)], ids=["one", "two"])
def test_after_a_client_has_left_the_others_report_the_rounds_it_took_part_in(kept, leaving) -> None:
    """Client 3 is gone and asked nothing. Its part in the mean is in no sum, as from the server's own history."""
    server, trained, keepers, _ = kept()
    gone = {"gone": (ClientRequest(clients=(3,)),), "answered": trained.final * 0.9}
    here = Keepers(keepers.disks, (0, 1, 2))
    request = ClientRequest(clients=leaving)
    one = contribution_of(replace(server, **gone), request, here)
    assert here.asked == []
    two = contribution_of(replace(trained, **gone), request, here)
    for name in one.total.tensors:
        torch.testing.assert_close(one.total[name], two.total[name], rtol=0, atol=4e-6)
        torch.testing.assert_close(one.own_updates[name], two.own_updates[name], rtol=0, atol=4e-6)
    assert {client for client, _ in here.asked} == {0, 1, 2} and one.total.norm() > 0.1
    with_three = {number for number, clients in enumerate(DRAWN, start=1) if 3 in clients}
    others = {number for client, rounds in here.asked for number in rounds if client not in leaving}
    assert others <= with_three  # of all other rounds the global states tell enough


@pytest.mark.parametrize("weights", [{0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, {0: 1.0, 3: 4.0}, {1: 5.0}, {}], ids=str)
def test_any_weights_add_up_to_the_same_from_both_histories(kept, weights) -> None:
    server, trained, keepers, _ = kept()
    rounds = [RoundWeights(1, 0.5, weights), RoundWeights(1, -2.0, weights)]
    request = SampleRequest(ids=())
    one, two = (sum_updates(each, request, keepers, rounds, "leaving").total for each in (server, trained))
    for name in trained.start.tensors:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-5)
    wrong = {client for client in range(4) if weights.get(client, 0.0) != client + 1}
    expected = wrong if len(wrong) < 4 else set(weights)
    assert {client for client, _ in keepers.asked} == expected


def test_locked_directions_are_not_counted_as_updates_of_clients(toy_params, scripted, tmp_path, past) -> None:
    trained = past({0: toy_params(1.0)})
    direction = torch.tensor([[1.0], [0.0]])
    held = ServerLock({"image.layer": Basis(direction, torch.eye(1), torch.ones(1).double())}, toy_params(0.0))
    federation = scripted({0: toy_params(1.0), 1: toy_params(4.0)}, {0: 1, 1: 2})
    (finished,) = fedavg(toy_params(0.0), federation, trained.training, 0, 0.07, locks=(held,))
    assert finished.state["image.layer.B"].flatten().tolist() == [0.0, 3.0]
    history = History(tmp_path / "held", updates=False)
    toy_params(0.0).save(history.initial_path)
    history.append(finished)
    history.verify()
    assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for tensor in history.moved(1).tensors.values())


def test_rounds_without_the_leaving_client_are_not_read(kept) -> None:
    """Client 2 was in rounds 1, 2, 5 and 6: of round 3 and 4 only the states at both ends are needed."""
    server, _, keepers, _ = kept()
    request = ClientRequest(clients=(2,))
    before = contribution_of(server, request, keepers)
    for number in (3, 4):
        server.history.update_path(number, 0).unlink()
    server.history.state_path(3).unlink()
    after = contribution_of(server, request, keepers)
    assert (before.total, before.own_updates) == (after.total, after.own_updates)
    with pytest.raises(UserError, match="missing"):
        contribution_of(server, ClientRequest(clients=(0,)), keepers)


# --- refusals ---


def test_a_client_that_never_took_part_is_refused(kept) -> None:
    _, trained, keepers, _ = kept(drawn=((0, 1), (1, 3)))
    with pytest.raises(UserError, match="client 2: it never took part in a training round"):
        contribution_of(trained, ClientRequest(clients=(2,)), keepers)


def lose(folder: Path, how: str) -> None:
    path = folder / "rounds" / "00005"
    if how == "everything":
        shutil.rmtree(folder)
    elif how == "a round":
        shutil.rmtree(path)
    elif how == "its end":  # a copy that was broken off
        (path / "round.json").unlink()
    elif how == "a file":
        (path / "change.state").unlink()
    elif how == "a bit":
        flip(path / "change.state")
    elif how == "JSON":
        (path / "round.json").write_text("{")
    elif how == "another training":
        shutil.rmtree(path)
        shutil.copytree(path.with_name("00001"), path)


@pytest.mark.parametrize("how", ["everything", "a round", "its end", "a file", "a bit", "JSON", "another training"])
def test_a_client_that_lost_its_updates_is_refused_with_what_else_can_be_done(kept, how: str) -> None:
    _, trained, keepers, _ = kept()
    lose(keepers.disks / "00002", how)
    with pytest.raises(UserError) as refusal:
        contribution_of(trained, ClientRequest(clients=(2,)), keepers)
    said = str(refusal.value)
    assert "client 2 cannot report its updates" in said and "\n" not in said
    assert (
        "--method retrain" in said and 'training.history = "server"' in said and "contribution_source=remaining" in said
    )


def test_a_client_that_is_not_here_is_refused_by_name(kept) -> None:
    """All others tell of a leaving client that is not here; if one of them is missing too, nothing can be told."""
    server, trained, keepers, _ = kept()
    request = ClientRequest(clients=(2,))
    without = Keepers(keepers.disks, (0, 1, 3))
    one, two = (contribution_of(each, request, without) for each in (server, trained))
    assert (one.total - two.total).norm() < 1e-5 < one.total.norm()
    assert {client for client, _ in without.asked} == {0, 1, 3}
    with pytest.raises(
        UserError, match=r"client 3 keeps updates that are needed, and it is not here.*--method retrain"
    ):
        contribution_of(trained, request, Keepers(keepers.disks, (0, 1)))


@pytest.mark.parametrize("spoil", [lambda t: t * torch.nan, lambda t: t.flatten()[:1], lambda t: None], ids="nsm")
def test_a_report_that_is_none_is_refused(kept, spoil) -> None:
    class Spoilt(Keepers):
        def run(self, params, job, clients):
            for update in super().run(params, job, clients):
                values = {name: spoil(tensor) for name, tensor in update.values.items()}
                yield replace(update, values={name: value for name, value in values.items() if value is not None})

    _, trained, keepers, _ = kept()
    with pytest.raises(
        UserError, match="client 2: its sum of updates lacks tensors of the model, or values are not finite"
    ):
        contribution_of(trained, ClientRequest(clients=(2,)), Spoilt(keepers.disks, (0, 1, 2, 3)))


@pytest.mark.parametrize("name", ["state.safetensors", "initial"])
def test_a_damaged_global_state_is_refused(kept, toy_params, name: str) -> None:
    _, trained, keepers, _ = kept()
    history = trained.history
    toy_params(seed=99).save(history.initial_path if name == "initial" else history.state_path(3))
    with pytest.raises(UserError, match=r"damaged \(its hash is not the recorded one\)"):
        contribution_of(trained, ClientRequest(clients=(2,)), keepers)


# --- what travels ---


def test_a_stored_state_is_sent_as_its_name(kept) -> None:
    """And a client that was not sent it looks for it under this name, and for no other."""
    _, trained, keepers, _ = kept()
    name = start_of(trained, 2)
    assert name == content_hash(encode_state(trained.history.state(1)))
    seen = []

    class Spy(Keepers):
        def run(self, params, job, clients):
            seen.extend(encode_job(job.own(client, ()), params) for client in clients)
            assert [job_length(job.own(client, ())) for client in clients] == [len(data) for data, _ in seen]
            yield from super().run(params, job, clients)

    contribution_of(trained, ClientRequest(clients=(2,)), Spy(keepers.disks, (0, 1, 2, 3)))
    ((data, parts),) = seen
    assert list(parts) == [content_hash(encode_state(trained.start))]
    job, _ = decode_job(data, parts)
    assert job.replays[1].state == name and job.replays[1].weight == pytest.approx(-3 / 1)
    memory: ClientHistory = client_history(keepers.disks, 2)
    assert memory.start(2, name) == trained.history.state(1)
    with pytest.raises(UserError, match="of another training than the server's"):
        memory.start(2, content_hash(encode_state(trained.history.state(2))))
