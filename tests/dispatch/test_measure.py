"""Measuring dispatchers: a step costs what its slowest rank takes; who cannot win is not timed further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from measuring_ranks import LANE_ROWS, PHASE_SECONDS, measured
from parallel import parallel_launch
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.backends.local import Local
from moeserve.dispatch.costs.costs import DispatcherCost, Point, cheapest, hopeless
from moeserve.dispatch.costs.measure import Candidate, expected, measure, point_of, sizes
from moeserve.dispatch.dispatcher import Dispatched, DispatchSpec
from moeserve.dispatch.routing import Routing
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
    assert not hopeless(rival, rival)


def test_a_hopeless_dispatcher_does_not_shorten_what_the_others_are_compared_by() -> None:
    slow = DispatcherCost("slow", "bf16", points(9.0, 18.0, 45.0))
    low = DispatcherCost("low", "bf16", points(1.0, 2.0, 5.0, 200.0))
    high = DispatcherCost("high", "bf16", points(4.0, 4.0, 5.5, 50.0))
    ranges = cheapest([(slow, 4096), (low, 4096), (high, 4096)], 4096)
    assert [cost.dispatcher for _, cost in ranges] == ["low", "high"]
    assert ranges[0][0] < 300  # by the time of 4096 rows, which the slow one has not


class Sleeping(Local):
    """The dispatcher of one rank, made slower by a known time on the device."""

    cycles = 20_000  # about 10 us of a GPU at 2 GHz

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        torch.cuda._sleep(self.cycles)
        return super().dispatch(hidden, routing)

    def combine(self, outputs: Tensor, ticket: object) -> Tensor:
        torch.cuda._sleep(self.cycles)
        return super().combine(outputs, ticket)  # type: ignore[arg-type]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu(1)
@pytest.mark.timed
@pytest.mark.usefixtures("alone")
def test_on_a_gpu_replayed_steps_are_timed_without_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = DispatchSpec(0, 1, 8, 256, 2, 16, torch.bfloat16, BF16, device="cuda")
    entry = replace(DISPATCHERS["local"], name="sleeping", build=Sleeping)
    cost = measure([Candidate(entry, spec, graph_rows=16)], 1.0).costs[0]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(Sleeping.cycles)
    begin.record()
    torch.cuda._sleep(100 * Sleeping.cycles)  # one launch: no host in between
    end.record()
    torch.cuda.synchronize()
    asleep = begin.elapsed_time(end) / 1e3 / 100
    few = cost.points[0]
    assert 2 * asleep < total(few) < 2 * asleep + 20e-6  # with four small kernels beside it
    assert few.dispatch > asleep and few.combine > asleep
