"""Flattening parallel sizes, and which rows each rank brings when input is sequence-parallel."""

from __future__ import annotations

import pytest

from moeserve.runtime.mesh import Mesh


@pytest.mark.parametrize(
    ("dp", "tp", "experts", "ep", "slices"),
    [
        (1, 1, False, 1, 1),
        (1, 1, True, 1, 1),
        (1, 2, False, 1, 2),
        (2, 1, False, 1, 2),
        (2, 2, False, 1, 4),
        (1, 2, True, 2, 1),
        (2, 1, True, 2, 1),
        (2, 2, True, 4, 1),
    ],
)
def test_flattening(dp: int, tp: int, experts: bool, ep: int, slices: int) -> None:
    mesh = Mesh.flatten(dp, tp, expert_parallel=experts)
    assert (mesh.ranks, mesh.ep, mesh.slices) == (dp * tp, ep, slices)


@pytest.mark.parametrize(("rows", "tp"), [(0, 4), (1, 4), (7, 4), (8, 4), (9, 2), (100, 3)])
def test_sequence_rows_cover_every_row_once(rows: int, tp: int) -> None:
    mesh = Mesh.flatten(1, tp, expert_parallel=True)
    parts = [mesh.sequence_rows(rows, rank) for rank in range(tp)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert max(part.stop - part.start for part in parts) == -(-rows // tp)


def test_what_a_mesh_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"ep=3 must be 1 or dp \* tp = 4"):
        Mesh(2, 2, 3)
    with pytest.raises(ValueError, match="at least 1"):
        Mesh(0, 1, 1)


def test_owners_and_slices() -> None:
    assert (Mesh(2, 2, 4).owners, Mesh(2, 2, 4).slices, Mesh(2, 2, 4).sliced) == (4, 1, False)
    assert (Mesh(2, 2, 1).owners, Mesh(2, 2, 1).slices, Mesh(2, 2, 1).sliced) == (1, 4, True)
    assert (Mesh().owners, Mesh().slices, Mesh().sliced) == (1, 1, False)
