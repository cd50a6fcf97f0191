"""Strange certificates, signed or not: found to hold or refused in one line, never a crash, never a file elsewhere."""

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ease.errors import UserError
from ease.operations.evidence import read_certificate, verify
from ease.operations.evidence.canonical import Refuted
from ease.operations.evidence.envelope import open_envelope, sealed
from ease.operations.evidence.log import signing_key
from ease.operations.evidence.page import certificate_page
from ease.operations.evidence.statement import PAYLOAD, read_statement
from ease.runs.run import Run

WEIRD = (
    None, True, -1, 0, 2**31, 1e308, 0.5, "", ".", "../..", "/etc/passwd", "\0", "a\n\x1b[31m", "9" * 4400,
    [], {}, [[]], [None], {"": None}, {"a": {"a": []}}, "x" * 5000, "</script>",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(found for key in keys for found in places(value[key], (*path, key)))]


def altered(valid: Any, rng: random.Random) -> Any:
    """The statement with something strange in one or two places, or a key that is gone."""
    value = copy.deepcopy(valid)
    for _ in range(rng.randint(1, 2)):
        *above, last = rng.choice(places(value)[1:])
        parent = value
        for key in above:
            parent = parent[key]
        if isinstance(parent, dict) and rng.random() < 0.2:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(rng.choice(WEIRD))
    return value


def survives(run: Run, path: Path, statement: Any, key: Any) -> bool:
    """Whether a signed statement can be read; all that is done with it ends in an answer."""
    envelope = sealed(PAYLOAD, statement, key)
    path.write_bytes(envelope.file_bytes() + b"\n")
    found = verify(path, run, quick=True)
    assert all("\n" not in reason for reason in found.reasons)
    if found.certificate is not None:
        page = certificate_page(envelope, found.certificate)
        assert page.count("<script") == 2
    return found.certificate is not None


@pytest.mark.parametrize("count", [15, pytest.param(400, marks=pytest.mark.slow)])
def test_strange_statements_signed_with_the_runs_own_key(
    run: Run, certificate: Path, tmp_path: Path, count: int
) -> None:
    statement, rng = json.loads(read_certificate(certificate)[0].content), random.Random(count)
    read = [survives(run, tmp_path / "it.json", altered(statement, rng), signing_key(run)) for _ in range(count)]
    assert any(read) and not all(read)


@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda it: json.dumps(it).encode())
)
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    for read in (lambda: open_envelope(content, PAYLOAD, "it"), lambda: read_statement(content, "it")):
        with pytest.raises(Refuted):
            read()


def test_a_pipe_or_a_folder_is_not_a_certificate(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="cannot read"):
            verify(path)
