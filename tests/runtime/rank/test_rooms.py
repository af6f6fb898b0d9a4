"""Rooms of runs: views of one memory, which grows with the largest lane and not with the number of lanes."""

from __future__ import annotations

import pytest
import torch

from moeserve.dispatch.mail.kernels import CHOICE, LOGITS
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.runtime.rank.runs.rooms import Rooms
from moeserve.runtime.step import LaneInput, LaneLogits

ROW = 64 * 2 + 2 * 8 + 8 * 4 + 1  # bytes


def layout(rows: int, stages: int = 1) -> MailLayout:
    return MailLayout(rows, stages, 64, 8, 2, torch.bfloat16)


@pytest.fixture
def rooms() -> Rooms:
    return Rooms(torch.device("cpu"))


def test_rooms_of_all_sizes_and_kinds_share_the_memory_of_the_largest(rooms: Rooms) -> None:
    rooms.grow(layout(40), 40)
    assert rooms.nbytes == 64 * ROW
    for rows in (1, 2, 16, 64):
        with_choices, with_logits = (rooms.of(layout(40), rows, kind) for kind in (CHOICE, LOGITS))
        assert isinstance(with_choices, LaneInput) and isinstance(with_logits, LaneLogits)
        assert with_choices.hidden.data_ptr() == with_logits.hidden.data_ptr()
        assert {len(column) for column in (*with_choices.columns(), with_logits.logits)} == {rows}
        assert with_choices.experts.is_contiguous() and with_logits.logits.is_contiguous()
        assert rooms.of(layout(40), rows, CHOICE) is with_choices
    for _ in range(100):
        rooms.grow(layout(33), 33)
    assert rooms.nbytes == 64 * ROW


def test_a_larger_lane_leaves_the_rooms_that_graphs_know_and_all_take_twice_the_largest(rooms: Rooms) -> None:
    known = []
    for rows in (1, 3, 5, 16, 17, 100, 1000):
        rooms.grow(layout(rows), rows)
        known.append(rooms.of(layout(rows), 1, CHOICE))
    assert all(one is known[0] for one in known)
    assert rooms.nbytes <= 2 * 1024 * ROW
    assert rooms.of(layout(1000), 1024, CHOICE).hidden.shape == (1024, 64)
    rooms.clear()
    assert rooms.nbytes == 0 and not len(rooms)
    assert rooms.of(layout(1000), 4, LOGITS).hidden.shape == (4, 64), "rows that nobody has made room for"


def test_a_lane_of_several_stages_has_two_rooms_that_share_no_row(rooms: Rooms) -> None:
    before = rooms.of(layout(64), 64, CHOICE)  # which a graph of another lane knows
    for rows in (1, 16, 64, 100):
        lane = layout(rows, stages=2)
        rooms.grow(lane, rows)
        for kind in (CHOICE, LOGITS):
            pair = [rooms.of(lane, rows, kind, other=other) for other in (False, True)]
            for room, value in zip(pair, (1.0, 2.0), strict=True):
                room.hidden.fill_(value)
                room.valid.fill_(value == 1.0)
            assert pair[0].hidden.eq(1).all() and pair[1].hidden.eq(2).all()
            assert pair[0].valid.all() and not pair[1].valid.any()
            assert pair[1] is rooms.of(lane, rows, kind, other=True)
    assert rooms.of(layout(64), 64, CHOICE) is before
    assert rooms.nbytes <= 2 * 2 * 128 * ROW


@pytest.mark.gpu(1)
def test_rooms_that_come_and_go_leave_no_more_memory_behind_than_one() -> None:
    """A room of a lane is cleared with the last lane: callers come and go for as long as a service runs."""
    device = torch.device("cuda", torch.cuda.current_device())
    rooms, held = Rooms(device), []
    for _ in range(40):
        rooms.grow(layout(1024), 1024)
        rooms.clear()
        held.append(torch.cuda.memory_reserved(device))
    assert held[-1] == held[0]
