"""The flattening table, and sequence-parallel rows."""

import pytest

from moeserve.runtime.mesh import Axis, Mesh, Seat

ONE = Axis(1, 0)

# (tp, dp, pcp, expert parallel), rank, MoE tp, dp, ep
TABLE = [
    ((1, 1, 1, True), 0, ONE, ONE, ONE),
    ((1, 1, 1, False), 0, ONE, ONE, ONE),
    ((2, 1, 1, False), 0, Axis(2, 0), ONE, ONE),
    ((2, 1, 1, False), 1, Axis(2, 1), ONE, ONE),
    ((1, 2, 1, False), 0, Axis(2, 0), Axis(2, 0), ONE),
    ((1, 2, 1, False), 1, Axis(2, 1), Axis(2, 1), ONE),
    ((2, 2, 1, False), 0, Axis(4, 0), Axis(2, 0), ONE),
    ((2, 2, 1, False), 1, Axis(4, 1), Axis(2, 0), ONE),
    ((2, 2, 1, False), 2, Axis(4, 2), Axis(2, 1), ONE),
    ((2, 2, 1, False), 3, Axis(4, 3), Axis(2, 1), ONE),
    ((2, 1, 1, True), 0, ONE, ONE, Axis(2, 0)),
    ((2, 1, 1, True), 1, ONE, ONE, Axis(2, 1)),
    ((1, 2, 1, True), 0, ONE, Axis(2, 0), Axis(2, 0)),
    ((1, 2, 1, True), 1, ONE, Axis(2, 1), Axis(2, 1)),
    ((2, 2, 1, True), 0, ONE, Axis(2, 0), Axis(4, 0)),
    ((2, 2, 1, True), 1, ONE, Axis(2, 0), Axis(4, 1)),
    ((2, 2, 1, True), 2, ONE, Axis(2, 1), Axis(4, 2)),
    ((2, 2, 1, True), 3, ONE, Axis(2, 1), Axis(4, 3)),
    ((2, 2, 2, True), 5, ONE, Axis(2, 1), Axis(8, 5)),
]


@pytest.mark.parametrize(("sizes", "rank", "tp", "dp", "ep"), TABLE)
def test_flattening(sizes: tuple[int, int, int, bool], rank: int, tp: Axis, dp: Axis, ep: Axis) -> None:
    tensor, data, context, experts = sizes
    mesh = Mesh.flatten(data, tensor, expert_parallel=experts, pcp=context)
    assert mesh.seat(rank) == Seat(tp, dp, ep)


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
    with pytest.raises(ValueError, match="rank 4 is outside a mesh of 4 ranks"):
        Mesh(2, 2, 4).seat(4)


def test_owners_and_slices() -> None:
    assert (Mesh(2, 2, 4).owners, Mesh(2, 2, 4).slices, Mesh(2, 2, 4).sliced) == (4, 1, False)
    assert (Mesh(2, 2, 1).owners, Mesh(2, 2, 1).slices, Mesh(2, 2, 1).sliced) == (1, 4, True)
    assert (Mesh().owners, Mesh().slices, Mesh().sliced) == (1, 1, False)
