"""Steps of a whole group are the collectives that they were; an absent lane launches nothing."""

from __future__ import annotations

import pytest
import torch
from exchange_ranks import launched
from parallel import parallel_launch

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.exchange import Exchange
from moeserve.dispatch.members import Member, Members
from moeserve.quant.formats import FORMATS

WHOLE = {
    "allgather_reducescatter": {"all_to_all_single": 2},
    "all2allv": {"all_to_all_single": 3},
    "naive": {"broadcast": 4},
}
"""Collectives of a step of two ranks that both bring rows."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_group_of_ranks_is_carried_by_collectives_alone(name: str) -> None:
    steps = [(1, 2), (0, 3), (0, 0)]
    for built, both, one, nobody in parallel_launch(2, launched, name, Members.of_ranks(2), steps):
        assert built == ({}, [0, 0])
        assert both[0] == WHOLE[name]
        assert one[0] == WHOLE[name] | ({"broadcast": 3} if name == "naive" else {})
        assert nobody == ({}, [0, 0])


LANES = Members((Member(0, lane=1), Member(1, owner=1), Member(2, lane=0), Member(3, owner=0)), 2, 2)
"""Two lanes and two owners, whose numbers run against their positions."""


@pytest.mark.parametrize("name", WHOLE)
def test_an_absent_lane_launches_nothing_and_the_others_messages(name: str) -> None:
    steps = [(1, 2), (0, 2), (3, 0), (0, 0), (2, 1)]
    by_member = parallel_launch(4, launched, name, LANES, steps)
    for member, found in zip(LANES.present, by_member, strict=True):
        assert found[0] == ({"all_reduce": 1}, [0, 0])  # NCCL's first call is one of all
        for lane_rows, (calls, rows) in zip(steps, found[1:], strict=True):
            own = 0 if member.lane is None else lane_rows[member.lane]
            takes_part = sum(lane_rows) and (member.lane is None or own)
            assert rows == [sum(lane_rows) if member.owner is not None else 0, own]
            if not takes_part:
                assert calls == {}
            elif min(lane_rows):
                assert "batch_isend_irecv" not in calls and calls
            else:
                phases = 3 if name == "all2allv" else 2  # one message a pair and phase
                assert calls == {"batch_isend_irecv": phases * (2 if member.owner is None else 1)}


def test_rows_that_a_recording_gives_to_lanes_that_nobody_has_are_none() -> None:
    members = Members.of_ranks(1, max_lanes=3)
    exchange = Exchange.__new__(Exchange)
    exchange._spec = DispatchSpec(members, 0, 2, 32, 2, 8, torch.float32, FORMATS["fp32"])
    exchange._owner_at = (0,)
    assert exchange.begun((4, 4, 4)) == (4, 0, 0)


def test_a_step_that_lanes_may_be_absent_from_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange.__new__(Exchange)
    split = Members.split(1, 1)
    exchange._spec = DispatchSpec(split, 0, 2, 32, 2, 8, torch.float32, FORMATS["fp32"], device="cuda")
    exchange._owner_at = (None, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="that lanes may be absent from is not recorded"):
        exchange.begun((4,))
    exchange._owner_at = (0, 1)  # every member is an owner, and in every step
    assert exchange.begun((4,)) == (4,)
