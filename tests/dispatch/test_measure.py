"""Measuring dispatchers: a step costs what its slowest rank takes; who cannot win is not timed further."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from measuring_ranks import LANE_ROWS, PHASE_SECONDS, measured
from parallel import parallel_launch
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.costs import timed_steps
from moeserve.dispatch.costs.agreement import Agreement
from moeserve.dispatch.costs.costs import DispatcherCost, Point, cheapest, hopeless
from moeserve.dispatch.costs.measure import Candidate, expected, measure, point_of, sizes
from moeserve.dispatch.costs.timed_steps import GRAPH_STEPS, StepNumbers, TimedSteps, step_input
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.quant.formats import BF16


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Point, ...]]:
    by_rank = parallel_launch(2, measured)
    assert by_rank[0] == by_rank[1]
    return by_rank[0]


def total(point: Point) -> float:
    return point.dispatch + point.combine


@pytest.mark.timed
def test_ranks_that_wait_in_different_phases_are_not_added_up(found: dict[str, tuple[Point, ...]]) -> None:
    for point in found["apart"]:
        assert PHASE_SECONDS <= total(point) < 1.6 * PHASE_SECONDS
        assert 0.3 < point.dispatch / total(point) < 0.7


@pytest.mark.timed
def test_a_dispatcher_that_cannot_win_is_not_timed_at_larger_sizes(
    found: dict[str, tuple[Point, ...]],
) -> None:
    assert [point.rows for point in found["steady"]] == sizes(LANE_ROWS)
    assert [point.rows for point in found["hopeless"]] == sizes(LANE_ROWS)[:3]
    assert [point.rows for point in found["flat"]] == sizes(LANE_ROWS)


def test_the_slowest_rank_s_step_is_split_as_ranks_split_it_on_average() -> None:
    point = point_of(7, [[(3.0, 1.0)] * 3, [(2.0, 4.0), (9.0, 9.0), (2.0, 4.0)]])
    assert total(point) == pytest.approx(6.0)
    assert point.dispatch / total(point) == pytest.approx((3 / 4 + 1 / 3) / 2)


def points(*seconds: float) -> tuple[Point, ...]:
    return tuple(Point(rows, s * 2 / 3, s / 3) for rows, s in zip((1, 16, 256, 4096), seconds, strict=False))


def test_what_a_larger_size_may_take() -> None:
    assert expected(points(2.0), 16) == pytest.approx(8.0)
    assert expected(points(2.0, 5.0), 31) == pytest.approx(8.0)
    assert expected(points(2.0, 1.0), 256) == pytest.approx(1.0)


def test_hopeless_is_who_loses_everywhere_and_ever_more() -> None:
    rival = points(1.0, 2.0, 5.0, 50.0)
    assert hopeless(points(3.0, 5.0, 12.0), rival)
    assert not hopeless(points(3.0, 5.0), rival)  # too few sizes to tell
    assert not hopeless(points(3.0, 3.9, 12.0), rival)  # close at one of them
    assert not hopeless(points(30.0, 30.0, 31.0), rival)  # dear for few rows, and growing less
    assert not hopeless(points(30.0, 30.0, 33.0), points(1.0, 1.0, 1.1))  # both flat, as far as noise shows
    assert not hopeless(rival, rival)


def test_a_hopeless_dispatcher_does_not_shorten_what_the_others_are_compared_by() -> None:
    slow = DispatcherCost("slow", "bf16", points(9.0, 18.0, 45.0))
    low = DispatcherCost("low", "bf16", points(1.0, 2.0, 5.0, 200.0))
    high = DispatcherCost("high", "bf16", points(4.0, 4.0, 5.5, 50.0))
    ranges = cheapest([(slow, 4096), (low, 4096), (high, 4096)], 4096)
    assert [cost.dispatcher for _, cost in ranges] == ["low", "high"]
    assert ranges[0][0] < 300  # by the time of 4096 rows, which the slow one has not


class Noted(Dispatcher):
    """A dispatcher that notes the numbers of its steps, and of those it is told to expect."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.expected: list[int] = []

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        self.numbers.append(routing.number)
        none = torch.zeros(1, dtype=torch.int32)
        return Dispatched(ExpertBatch(BF16.quantize(hidden), Grouping.RAGGED, none, none), hidden)

    def combine(self, outputs: Tensor, ticket: Tensor) -> Tensor:
        return ticket

    def expect(self, number: int, absent: tuple[int, ...] = ()) -> None:
        self.expected.append(number)

    def close(self) -> None:
        return


class OnHost:
    """Stands for a graph: it records by calling, and replays by telling what comes."""

    def __init__(
        self, dispatch: Callable[[int], object], combine: Callable[[], object], expected: Callable[[], None]
    ) -> None:
        self._expected = expected
        for at in range(GRAPH_STEPS):
            dispatch(at)
            combine()

    def time(self, rounds: int) -> list[tuple[float, float]]:
        for _ in range(rounds):
            self._expected()
        return [(1.0, 1.0)] * rounds


def test_numbers_of_steps_rise_over_sizes_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_steps, "_Recorded", OnHost)
    spec = DispatchSpec(Members.of_ranks(1), 0, 2, 32, 2, 16, torch.bfloat16, BF16)
    dispatcher, numbers, agreement = Noted(), StepNumbers(), Agreement(None)
    for rows in (1, 16):
        steps = TimedSteps(dispatcher, spec, step_input(spec, rows, [2]), agreement, numbers)
        steps.time(2)
        steps.record(agreement)
        steps.time(3)
    launched, replayed = dispatcher.numbers, dispatcher.expected
    assert launched == [*range(1, 4 + GRAPH_STEPS), *range(launched[3 + GRAPH_STEPS], launched[-1] + 1)]
    first = 4 + GRAPH_STEPS
    assert replayed[:3] == [first, first + GRAPH_STEPS, first + 2 * GRAPH_STEPS]
    assert launched[3 + GRAPH_STEPS] == replayed[2] + GRAPH_STEPS and replayed[3] == launched[-1] + 1


def test_members_count_alike_where_one_cannot_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no graph here")

    monkeypatch.setattr(timed_steps, "_Recorded", broken)
    spec = DispatchSpec(Members.of_ranks(1), 0, 2, 32, 2, 16, torch.bfloat16, BF16)
    dispatcher, agreement = Noted(), Agreement(None)
    steps = TimedSteps(dispatcher, spec, step_input(spec, 1, [2]), agreement, StepNumbers())
    steps.record(agreement)
    assert dispatcher.numbers == [1, 2 + GRAPH_STEPS]


def test_rows_choose_slots_that_are_there() -> None:
    members = Members((Member(0, lane=1), Member(1, 0, 2), Member(2, owner=0)), 3, 3)
    spec = DispatchSpec(members, 0, 4, 32, 2, 16, torch.bfloat16, BF16)
    _, routing = step_input(spec, 16, [0, 3, 1])
    assert routing.lane_rows == (16, 16, 0) and routing.slots.shape == (16, 2)
    assert set(routing.slots.flatten().tolist()) == {0, 8, 9, 10}
    _, none = step_input(replace(spec, seat=2), 16, [0, 3, 1])
    assert none.slots.shape == (0, 2)
    _, sliced = step_input(replace(spec, sliced=True), 16, [0, 4, 4])
    assert set(sliced.slots.flatten().tolist()) == {0, 1, 2, 3}


def graphed(step: Callable[[], object], inner: int = 50) -> float:
    """Seconds of `step` on a GPU, in a graph that holds it `inner` times."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            step()
    seconds = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / inner)
    return statistics.median(seconds)


@pytest.mark.gpu(1)
@pytest.mark.timed
def test_on_a_gpu_replayed_steps_are_timed_without_the_host() -> None:
    spec = DispatchSpec(Members.of_ranks(1), 0, 8, 256, 2, 16, torch.bfloat16, BF16, device="cuda")
    found = measure([Candidate(DISPATCHERS["local"], spec, graph_rows=16)], 1.0, None).costs[0].points[0]
    dispatcher = DISPATCHERS["local"].build(spec, None)
    hidden = torch.ones((1, 256), dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([[3, 5]], dtype=torch.int32, device="cuda")
    routing = Routing(slots, torch.ones((1, 2), device="cuda"), (1,), 1)
    arrived = dispatcher.dispatch(hidden, routing)
    outputs = torch.zeros(arrived.batch.tokens.shape, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        dispatcher.combine(outputs, dispatcher.dispatch(hidden, routing).ticket)

    assert total(found) == pytest.approx(graphed(step), rel=0.3)  # host launches alone take twice as long
    assert found.dispatch > found.combine > 0  # several kernels against one
