"""Steps of one dispatcher, timed phase by phase: as they are launched, or replayed from a CUDA graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeserve.device.streams import stream_for
from moeserve.dispatch.costs.agreement import Agreement, RankFailed
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY

log = logging.getLogger(__name__)

GRAPH_STEPS = 16
"""Steps in one recorded graph. A replay of a single one ends before the host can launch the next, and what
would be timed is the host."""

DISTINCT_ROWS = 64
"""Different rows of hidden states; a larger batch repeats them."""


def reserve(spec: DispatchSpec, rows: int) -> None:
    """Takes and gives back the memory that a step of `rows` rows a lane may need on a GPU.

    Raises torch.OutOfMemoryError where it is not there: before the step, in which the others would wait. On a
    CPU there is nothing to ask, since memory is granted before it is used.
    """
    if spec.device == "cpu":
        return
    pairs = sum(_lanes(spec, rows)) * min(spec.top_k, spec.slots_here)  # that can come here
    row = spec.wire.nbytes((1, spec.hidden)) + 2 * spec.hidden * spec.dtype.itemsize  # with its output, twice
    torch.empty((pairs + rows) * row, dtype=torch.uint8, device=spec.device)


def _lanes(spec: DispatchSpec, rows: int) -> tuple[int, ...]:
    """`rows` for every lane that a member has."""
    return tuple(0 if seat is None else rows for seat in spec.members.seat_of_lane)


def step_input(spec: DispatchSpec, rows: int, rooms: Sequence[int]) -> tuple[Tensor, Routing]:
    """Hidden states and routing of this member's lane, once there is memory for a step of so many a lane.

    `rooms` are the slots that each member holds, by position; rows choose among all of them. The routing has
    no number yet.
    """
    reserve(spec, rows)
    device, lanes = spec.device, _lanes(spec, rows)
    random = torch.Generator(device).manual_seed(rows * spec.ranks + spec.rank)
    slots = torch.tensor(_numbers(spec, rooms), dtype=torch.int32, device=device)
    rows = spec.own_rows(lanes)
    chosen = torch.full((rows, spec.top_k), EMPTY, dtype=torch.int32, device=device)
    order = torch.rand(rows, len(slots), generator=random, device=device).argsort(dim=1)[:, : spec.top_k]
    chosen[:, : order.shape[1]] = slots[order]
    weights = torch.full((rows, spec.top_k), 1 / spec.top_k, device=device)
    few = torch.randn(min(rows, DISTINCT_ROWS), spec.hidden, generator=random, device=device)
    repeats = -(-rows // DISTINCT_ROWS)
    hidden = few.to(spec.dtype).repeat(repeats, 1)[:rows].contiguous()
    return hidden, Routing(chosen, weights, lanes, 0)


def _numbers(spec: DispatchSpec, rooms: Sequence[int]) -> list[int]:
    """Numbers of all slots that are there: of every owner's place, or once where every owner has a slice."""
    places = [member.owner for member in spec.members.present]
    found = {
        (0 if spec.sliced else place * spec.slots) + slot
        for place, room in zip(places, rooms, strict=True)
        if place is not None
        for slot in range(room)
    }
    return sorted(found)


class StepNumbers:
    """Numbers of the steps that one dispatcher is timed by, alike on all members, also where one fails."""

    def __init__(self) -> None:
        self._last = 0

    def take(self, steps: int = 1) -> int:
        """The first number of the next `steps` steps."""
        first = self._last + 1
        self._last += steps
        return first


class TimedSteps:
    """Steps of one dispatcher, every lane bringing the same rows to the same random slots each time."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        spec: DispatchSpec,
        given: tuple[Tensor, Routing],
        agreement: Agreement,
        numbers: StepNumbers,
    ) -> None:
        self._dispatcher, self._spec, self._numbers = dispatcher, spec, numbers
        self._hidden, self._routing = given
        self._recorded: _Recorded | None = None
        self._arrived: Dispatched | None = None
        self._outputs = agreement.agreed(self._first_outputs)
        agreement.agreed(self._combine)

    def record(self, agreement: Agreement) -> None:
        """Replays steps from a CUDA graph from now on, unless some rank cannot record them."""
        try:
            first = self._numbers.take(GRAPH_STEPS)  # also where it fails: all count alike
            self._recorded = agreement.agreed(
                lambda: _Recorded(lambda at: self._dispatch(first + at), self._combine, self._expected)
            )
        except RankFailed as error:
            log.warning("%d rows a lane are timed without a CUDA graph: %s", self._hidden.shape[0], error)
            agreement.agreed(self._dispatch)  # anew: what was half recorded has no values
            agreement.agreed(self._combine)

    def _first_outputs(self) -> Tensor:
        """Dispatches once, and makes outputs of experts for what arrived, as large as they are."""
        size = (*self._dispatch().batch.tokens.shape[:-1], self._spec.hidden)
        return torch.zeros(size, dtype=self._spec.dtype, device=self._spec.device)

    def _dispatch(self, number: int | None = None) -> Dispatched:
        """Dispatches the step `number`, or the next one."""
        number = self._numbers.take() if number is None else number
        self._arrived = None  # before the next one is there: a batch may take a gigabyte
        self._arrived = self._dispatcher.dispatch(self._hidden, replace(self._routing, number=number))
        return self._arrived

    def _expected(self) -> None:
        """Tells the dispatcher which steps the recorded ones are in the next replay."""
        self._dispatcher.expect(self._numbers.take(GRAPH_STEPS))

    def _combine(self) -> Tensor:
        if self._arrived is None:
            raise RuntimeError("nothing was dispatched that could be combined")
        return self._dispatcher.combine(self._outputs, self._arrived.ticket)

    def time(self, rounds: int) -> list[tuple[float, float]]:
        """Seconds of dispatch and combine of a step in each round, one round right after the other."""
        if self._recorded is not None:
            return self._recorded.time(rounds)
        marks = [self._round() for _ in range(rounds)]
        if self._spec.device != "cpu":
            torch.cuda.synchronize(self._spec.device)
        return [(dispatch(), combine()) for dispatch, combine in marks]

    def wall(self, rounds: int) -> float:
        """Seconds of so many rounds by the host's clock."""
        began = time.perf_counter()
        self.time(rounds)
        return time.perf_counter() - began

    def _round(self) -> tuple[Callable[[], float], Callable[[], float]]:
        """One step; how long its phases took is known when the device is done."""
        clock = _Clock(self._spec.device)
        self._dispatch()
        dispatched = clock.lap()
        self._combine()
        return dispatched, clock.lap()


class _Recorded:
    """A CUDA graph of GRAPH_STEPS steps, one after the other, as a rank's step graphs run them.

    Two events around a replay time all of them; three within the last step say how it is split.
    """

    def __init__(
        self, dispatch: Callable[[int], object], combine: Callable[[], object], expected: Callable[[], None]
    ) -> None:
        """`dispatch` takes which of the graph's steps it is; `expected` is called before every replay."""
        self._expected = expected
        self._graph, stream = torch.cuda.CUDAGraph(), stream_for("measuring", "cuda")
        marks = [_timed_event(external=True) for _ in range(3)] if torch.version.hip is None else []
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for at in range(GRAPH_STEPS):
                    here = iter(marks if at == GRAPH_STEPS - 1 else ())
                    _mark(here)
                    dispatch(at)
                    _mark(here)
                    combine()
                    _mark(here)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._marks = marks

    def time(self, rounds: int) -> list[tuple[float, float]]:
        """Seconds of dispatch and combine of a step, by replays that follow each other without a gap.

        Where graphs hold no events (ROCm), a step counts as dispatch alone.
        """
        pairs = []
        for _ in range(rounds):
            self._expected()
            begin, end = _timed_event(), _timed_event()
            begin.record()
            self._graph.replay()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        steps = [begin.elapsed_time(end) / 1e3 / GRAPH_STEPS for begin, end in pairs]  # from milliseconds
        share = 1.0
        if self._marks:
            begin, middle, end = self._marks
            whole = max(float(begin.elapsed_time(end)), 1e-6)
            share = min(1.0, float(begin.elapsed_time(middle)) / whole)
        return [(step * share, step * (1 - share)) for step in steps]


def _mark(events: Iterator[Any]) -> None:
    """Records the next of `events`, if there is one."""
    event = next(events, None)
    if event is not None:
        event.record()


def _timed_event(*, external: bool = False) -> Any:
    """An event that keeps its time; an `external` one becomes a part of the graph that is being recorded."""
    return torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]


class _Clock:
    """Laps on the device's stream, or on the host for the CPU."""

    def __init__(self, device: str) -> None:
        self._on_host = device == "cpu"
        self._last = self._mark()

    def lap(self) -> Callable[[], float]:
        """Seconds since the last lap, to be asked once the device is done."""
        before, self._last = self._last, self._mark()
        now = self._last
        if self._on_host:
            return lambda: float(now - before)
        return lambda: float(before.elapsed_time(now)) / 1e3  # milliseconds

    def _mark(self) -> Any:
        if self._on_host:
            return time.perf_counter()
        event = _timed_event()
        event.record()
        return event
