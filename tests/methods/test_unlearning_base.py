"""What an answer leaves for the next request: no client is asked twice, and recovery does not pile up."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from ease.errors import UserError
from ease.federation.client import ClientData
from ease.federation.sequential import Sequential
from ease.methods.base import Step, Trained
from ease.methods.ease.contribution import ForgetContribution, contribution_of
from ease.methods.ease.method import Ease
from ease.methods.unlearning_base import UnlearningBase
from ease.params import Params
from ease.requests.request import ClientRequest, Request, SampleRequest, forget_mask
from ease.subspace import Basis


class Asked(Sequential):
    """Remembers who was asked to replay."""

    def __init__(self, model, data: Mapping[int, ClientData]) -> None:
        super().__init__(model, data)
        self.replaying: list[int] = []

    def perform(self, state, jobs):
        self.replaying += [client for client, job in jobs.items() if job.objective == "replay"]
        return super().perform(state, jobs)


@dataclass(frozen=True)
class Closed:
    """One sample request that concerned clients 0 and 1, and what came of it."""

    request: SampleRequest
    contribution: ForgetContribution
    trained: Trained
    """As it is afterwards."""
    federation: Asked


def without(federation: Sequential, request: Request) -> Asked:
    def keep(data: ClientData) -> ClientData:
        kept = ~forget_mask(request, data.shard)
        return ClientData(data.shard.keep(kept), data.train.take(np.flatnonzero(kept)), data.validation)

    return Asked(federation.model, {client: keep(data) for client, data in federation.data.items()})


@pytest.fixture(scope="module")
def closed(learnt) -> Closed:
    federation = learnt.world.federation
    ids = [pair_id for client in (0, 1) for pair_id in federation.data[client].shard.train_ids[:15]]
    request = SampleRequest(ids=tuple(ids))
    found = contribution_of(learnt.trained, request, federation)
    left = UnlearningBase(learnt.trained.final - found.total, found.reports)
    trained = replace(learnt.trained, gone=(request,), answered=learnt.trained.final * 0.99, base=left)
    return Closed(request, found, trained, without(federation, request))


def relative(one: Params, two: Params) -> float:
    return (one - two).norm() / two.norm()


def test_clients_report_once_and_a_later_request_asks_only_its_own_holders(closed) -> None:
    federation = closed.federation
    federation.replaying.clear()
    request = SampleRequest(ids=federation.data[2].shard.train_ids[:9])
    known = contribution_of(closed.trained, request, federation)
    assert federation.replaying == [2] and known.replaying_clients == 1 and known.reports.keys() == {0, 1, 2}
    asked = contribution_of(replace(closed.trained, base=None), request, federation)
    assert sorted(federation.replaying[1:]) == [0, 1, 2]
    assert relative(known.total, asked.total) < 0.01  # sums come in half precision


def test_when_a_client_leaves_later_no_one_is_asked_and_nothing_forgotten_returns(learnt, closed) -> None:
    """Weights of those who stay change: what counts more is what they would have sent, not what is stored."""
    federation, request = closed.federation, ClientRequest(clients=(3,))
    federation.replaying.clear()
    found = contribution_of(closed.trained, request, federation)
    assert federation.replaying == [] and found.reports.keys() == {0, 1}
    # Both requests at once, as one that names client 3's pairs one by one.
    every = SampleRequest(ids=(*closed.request.ids, *learnt.world.federation.data[3].shard.train_ids))
    whole = learnt.world.federation
    both = contribution_of(learnt.trained, every, whole)
    assert relative(closed.contribution.total + found.total, both.total) < 0.01
    stored = contribution_of(learnt.trained, request, whole)
    assert relative(closed.contribution.total + stored.total, both.total) > 0.02, "or the test could not fail"


def last(trained: Trained, request: Request, federation: Sequential) -> tuple[Step, Step]:
    method = Ease(share=1.0, replay_precision="float32")  # as it is replayed here
    steps = list(method.unlearn(trained, request, federation))
    return steps[0], steps[-1]


def test_the_next_answer_begins_before_the_recovery_of_the_last(closed) -> None:
    federation = closed.federation
    request = SampleRequest(ids=federation.data[2].shard.train_ids[:9])
    first, end = last(closed.trained, request, federation)
    found = contribution_of(closed.trained, request, federation)
    assert closed.trained.base is not None and end.base is not None
    torch.testing.assert_close(dict(first.state.tensors), dict((closed.trained.base.state - found.total).tensors))
    assert end.base.state == first.state  # all of it was subtracted, and recovery left it alone
    assert end.base.reports.keys() == {0, 1, 2}


def test_it_is_read_as_it_was_written(closed, tmp_path) -> None:
    path, base = tmp_path / "base.safetensors", closed.trained.base
    base.save(path)
    read = UnlearningBase.load(path)
    assert read.state == base.state and read.reports.keys() == base.reports.keys() == {0, 1}
    for client, report in base.reports.items():
        assert (read.reports[client].share, read.reports[client].longest) == (report.share, report.longest)
        assert read.reports[client].values.keys() == report.values.keys()
        assert all(torch.equal(read.reports[client].values[name], tensor) for name, tensor in report.values.items())


def test_a_file_of_something_else_is_refused_by_name(learnt, tmp_path) -> None:
    path = tmp_path / "base.safetensors"
    learnt.trained.final.save(path)
    with pytest.raises(UserError, match=r"base\.safetensors: not the unlearning base of an answer"):
        UnlearningBase.load(path)


def test_along_closed_directions_the_last_recovery_stays_and_no_other_comes_to_it(closed) -> None:
    """A request was measured with what its recovery gave back; a later one leaves it there, and gives no more."""
    federation, request = closed.federation, SampleRequest(ids=closed.federation.data[2].shard.train_ids[:9])
    assert closed.trained.base is not None
    block = next(each for each in closed.trained.base_state.blocks if each.kind == "projector")

    def flat(params: Params) -> torch.Tensor:
        return torch.cat([params[name].double().flatten() for name in block.tensors])

    direction = torch.nn.functional.normalize(flat(closed.trained.start).roll(1), dim=0)
    basis = Basis(direction[:, None], torch.eye(1).double(), torch.ones(1).double())
    locked = replace(closed.trained, locked={block.name: basis})
    free = last(closed.trained, request, federation)[0].state
    first, end = last(locked, request, federation)
    recovered = direction @ (flat(closed.trained.start) - flat(closed.trained.base_state))
    assert abs(recovered) > 1e-3, "or the test could not fail"
    torch.testing.assert_close(flat(first.state) - flat(free), recovered * direction, rtol=0, atol=1e-6)
    assert direction @ (flat(end.state) - flat(first.state)) == pytest.approx(0, abs=1e-5)
