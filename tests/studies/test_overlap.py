"""Principal cosines of the clients' updates, by hand and against the definition."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from ease.studies.overlap import client_overlap, principal_cosines


def test_two_lines_in_the_plane() -> None:
    """Client 0 moves along x, client 1 along the diagonal: the angle is 45 degrees, its cosine 1/sqrt(2)."""
    columns = torch.tensor([[1.0, 0.0], [3.0, 3.0]], dtype=torch.float64)
    cosines = principal_cosines(columns @ columns.T, [0, 1])
    assert cosines[0][1] == pytest.approx([2**-0.5]) and cosines[0][0] == pytest.approx([1.0])


def test_only_leading_directions_count(monkeypatch) -> None:
    """Client 0 moves far along x and a little along y, client 1 along y: of one direction each they share nothing."""
    columns = torch.tensor([[10.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert principal_cosines(columns @ columns.T, [0, 0, 1])[0][1] == pytest.approx([1.0])
    monkeypatch.setattr("ease.studies.overlap.DIRECTIONS", 1)
    assert principal_cosines(columns @ columns.T, [0, 0, 1])[0][1] == pytest.approx([0.0])


def test_the_same_as_scipy_on_dense_columns() -> None:
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(9, 6))
    owners = [0, 1, 0, 1, 0, 1, 2, 2, 2]
    found = principal_cosines(torch.from_numpy(columns @ columns.T), owners)
    for i in range(3):
        for j in range(3):
            left, right = (columns[[n for n, owner in enumerate(owners) if owner == k]].T for k in (i, j))
            expected = np.sort(np.cos(subspace_angles(left, right)))[::-1]
            assert found[i][j] == pytest.approx(expected, abs=1e-7)


def test_every_block_of_a_run_is_compared(learnt) -> None:
    found = client_overlap(learnt.trained)
    assert [overlap.block for overlap in found] == [block.name for block in learnt.trained.final.blocks]
    for overlap in found:
        assert overlap.clients == (0, 1, 2, 3)
        for i in range(4):
            assert overlap.cosines[i][i] == pytest.approx([1.0] * len(overlap.cosines[i][i]), abs=1e-6)
            for j in range(4):
                assert overlap.cosines[i][j] == pytest.approx(overlap.cosines[j][i], abs=1e-6)
