"""What a request names in a shard."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from ease.data.partition import Shard
from ease.requests.request import (
    ClassRequest,
    ClientRequest,
    Request,
    SampleRequest,
    forget_mask,
    in_words,
    validation_mask,
)

SHARD = Shard(
    client=2,
    train=np.array([10, 11, 12]),
    validation=np.array([13, 14]),
    train_ids=("a", "b", "c"),
    train_classes=np.array([0, 1, 0]),
    validation_classes=np.array([1, 0]),
)


@pytest.mark.parametrize(
    ("request_", "forget", "validation"),
    [
        (ClientRequest(clients=(2, 5)), [1, 1, 1], [1, 1]),
        (ClientRequest(clients=(1,)), [0, 0, 0], [1, 1]),
        (ClassRequest(classes=(0,)), [1, 0, 1], [0, 1]),
        (ClassRequest(classes=(0, 1)), [1, 1, 1], [1, 1]),
        (ClassRequest(classes=(7,)), [0, 0, 0], [0, 0]),
        (SampleRequest(ids=("c", "elsewhere")), [0, 0, 1], [1, 1]),
        (SampleRequest(ids=()), [0, 0, 0], [1, 1]),
    ],
)
def test_masks(request_: Request, forget: list[int], validation: list[int]) -> None:
    assert forget_mask(request_, SHARD).dtype == bool
    assert forget_mask(request_, SHARD).tolist() == [bool(value) for value in forget]
    assert validation_mask(request_, SHARD).tolist() == [bool(value) for value in validation]


def test_ids_match_whole_and_exactly() -> None:
    longer = Shard(2, np.arange(3), np.arange(0), ("1", "10", "1 "), np.zeros(3, int), np.zeros(0, int))
    assert forget_mask(SampleRequest(ids=("1",)), longer).tolist() == [True, False, False]


def test_the_scope_distinguishes_requests() -> None:
    adapter = TypeAdapter(Request)
    for request in (ClientRequest(clients=(1,)), ClassRequest(classes=(2,), text="boats"), SampleRequest(ids=("x",))):
        assert adapter.validate_json(adapter.dump_json(request)) == request
    with pytest.raises(ValidationError, match="scope"):
        adapter.validate_python({"scope": "all"})


def test_clients_are_called_by_their_names_where_they_have_some() -> None:
    names = {1: "north clinic"}
    assert in_words(ClientRequest(clients=(1,)), names) == "client north clinic"
    assert in_words(ClientRequest(clients=(0, 1)), names) == "clients 0, north clinic"
    mixed = SampleRequest(ids=("a", "b"), clients=(1,), words=("snow",))
    assert in_words(mixed, names) == "client north clinic, “snow” (2 pairs)"
    assert in_words(mixed) == "client 1, “snow” (2 pairs)"
