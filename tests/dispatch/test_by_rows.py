"""`ByRows` keeps the law whichever part carries; bytes and late ranks are its parts', and it closes all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_rows_ranks import run_parted
from dispatcher_cases import RANKS, law_cases
from parallel import parallel_launch
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.by_rows import ByRows
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, Traffic
from moeserve.dispatch.routing import Routing

PARTS = {
    "gather_then_send": ("allgather_reducescatter", "all2allv"),
    "send_then_gather": ("all2allv", "allgather_reducescatter"),
}
INPUTS = {
    ("even", "fp8_group128", torch.bfloat16),
    ("replicas", "fp32", torch.float32),
    ("sliced", "fp32", torch.float32),
}
if "nvlink_ll" in DISPATCHERS:  # PADDED below, RAGGED above
    PARTS["padded_then_ragged"] = ("nvlink_ll", "all2allv")


def test_parts_keep_the_law_together() -> None:
    alike = [
        case
        for case in law_cases()
        if case.dispatcher == "all2allv" and (case.placement, case.wire, case.dtype) in INPUTS
    ]
    cases = [
        replace(case, dispatcher=name)
        for name, parts in PARTS.items()
        for case in alike
        if case.placement != "sliced" or all(DISPATCHERS[part].sliced for part in parts)
    ]
    by_rank = parallel_launch(RANKS, run_parted, PARTS, cases + alike, timeout=120)
    digests: dict[Any, set[Any]] = {}
    for case, outcomes in zip(cases + alike, zip(*by_rank, strict=True), strict=True):
        assert max(outcome.worst for outcome in outcomes) <= 1.0, str(case)
        assert all(outcome.repeats and outcome.exact for outcome in outcomes), str(case)
        received = sum(outcome.received for outcome in outcomes)
        assert received == outcomes[0].pairs * (RANKS if case.placement == "sliced" else 1), str(case)
        digests.setdefault((case.inputs, case.row_align), set()).add(tuple(o.digest for o in outcomes))
    assert all(len(seen) == 1 for seen in digests.values())


class Part(Dispatcher):
    """A dispatcher that notes what is asked of it; its tickets are its own."""

    def __init__(self, late: tuple[int, ...] = (), closing: Callable[[], None] = lambda: None) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.expected: list[tuple[int, tuple[int, ...]]] = []
        self.closed = 0
        self._late, self._closing = late, closing

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        self.steps.append(routing.lane_rows)
        return Dispatched(None, (self, routing.lane_rows))  # type: ignore[arg-type]

    def combine(self, outputs: Tensor, ticket: Any) -> Tensor:
        owner, lane_rows = ticket
        if owner is not self:
            raise AssertionError("a ticket came home to another dispatcher")
        return torch.tensor(lane_rows)

    @property
    def traffic(self) -> Traffic:
        return Traffic(len(self.steps), 10 * len(self.steps))

    def expect(self, number: int, absent: tuple[int, ...] = ()) -> None:
        self.expected.append((number, absent))

    def late(self) -> tuple[int, ...]:
        late, self._late = self._late, ()
        return late

    def close(self) -> None:
        self.closed += 1
        self._closing()


def step(dispatcher: Dispatcher, *lane_rows: int) -> list[int]:
    arrived = dispatcher.dispatch(torch.empty(0), Routing(torch.empty(0), torch.empty(0), lane_rows, 1))
    found: list[int] = dispatcher.combine(torch.empty(0), arrived.ticket).tolist()
    return found


def test_the_fullest_lane_decides_and_the_ticket_remembers() -> None:
    low, high = Part(), Part()
    dispatcher = ByRows([(4, low), (64, high), (256, low)])
    first = dispatcher.dispatch(torch.empty(0), Routing(torch.empty(0), torch.empty(0), (5, 0), 1))
    assert (
        step(dispatcher, 0, 4) == [0, 4]
        and step(dispatcher, 0, 0) == [0, 0]
        and step(dispatcher, 65, 1) == [65, 1]
    )
    assert dispatcher.combine(torch.empty(0), first.ticket).tolist() == [5, 0]  # of two in flight
    assert (low.steps, high.steps) == ([(0, 4), (0, 0), (65, 1)], [(5, 0)])
    assert dispatcher.traffic == Traffic(4, 40)  # one that serves two ranges counts once
    with pytest.raises(ValueError, match="a lane brings 257 rows, and the dispatchers serve up to 256"):
        step(dispatcher, 3, 257)


def test_which_part_is_replayed_next_is_not_known_here() -> None:
    parts = [Part(), Part()]
    with pytest.raises(RuntimeError, match="step 7 is to be replayed by one of several dispatchers"):
        ByRows([(4, parts[0]), (64, parts[1])]).expect(7, (2,))
    assert [part.expected for part in parts] == [[], []]


def test_late_ranks_are_those_of_any_part_once() -> None:
    dispatcher = ByRows([(4, Part((3, 1))), (64, Part((1,)))])
    assert dispatcher.late() == (1, 3)
    assert dispatcher.late() == ()


def test_all_are_closed_when_one_fails_to() -> None:
    def broken() -> None:
        raise RuntimeError("stuck")

    parts = [Part(), Part(closing=broken), Part()]
    with pytest.raises(RuntimeError, match="stuck"):
        ByRows([(at, part) for at, part in enumerate(parts, start=1)]).close()
    assert [part.closed for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("ends", [[], [4, 4], [8, 4]])
def test_ends_must_rise(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="ends that rise"):
        ByRows([(end, Part()) for end in ends])
