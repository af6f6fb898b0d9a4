"""Measuring dispatchers on the group that will use them: short, collective, and agreed by all ranks."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.costs.costs import DispatcherCost, Point, hopeless
from moeserve.dispatch.dispatcher import Dispatched, DispatchEntry, Dispatcher, DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY

log = logging.getLogger(__name__)

T = TypeVar("T")

METHOD = "2"
"""How times are taken; those taken another way are not compared with, and are measured anew."""

WARM_ROUNDS = 2
ROUNDS = (3, 25)
"""Fewest and most rounds of a size."""

GRAPH_STEPS = 16
"""Steps in one recorded graph. A replay of a single one ends before the host can launch the next, and what
would be timed is the host."""

DISTINCT_ROWS = 64
"""Different rows of hidden states; a larger batch repeats them."""

GROWTH = 16
"""The factor from one measured size to the next; between them a cost is taken to be straight."""

AGREE_SECONDS = 300.0
"""Within which a rank has done its part, a library that compiles at first use included."""


@dataclass(frozen=True)
class Candidate:
    """A dispatcher that could serve, and what it would be built for: its wire, and its most rows."""

    entry: DispatchEntry
    spec: DispatchSpec
    graph_rows: int = 0  # steps of up to so many rows a lane are replayed from CUDA graphs, and timed so

    def replays(self, rows: int) -> bool:
        """Whether steps of `rows` rows a lane come from a graph; not where a dispatcher reads counts."""
        return rows <= self.graph_rows and self.spec.device != "cpu" and not self.entry.host_sync


@dataclass(frozen=True)
class Measured:
    """The costs that were measured, and the dispatchers that could not be."""

    costs: tuple[DispatcherCost, ...]
    refused: tuple[tuple[str, str, str], ...]  # (dispatcher, wire, why it could not be built)


def measure(candidates: Sequence[Candidate], seconds: float) -> Measured:
    """Times every candidate in about `seconds` altogether; each is built, measured and closed in its turn.

    Collective over torch.distributed's default group: all ranks bring the same candidates and get the same
    answer. What a dispatcher does once, such as compiling or connecting, comes on top. A dispatcher that some
    rank cannot build is left out, and so is a size that some rank has no memory for. One that loses to
    another at every size, by far and ever more, is not timed at larger ones. One that fails while it carries
    raises RuntimeError on every rank, as soon as one knows.
    """
    costs: dict[Candidate, DispatcherCost] = {}
    refused = []
    agreement = Agreement()
    for candidate in candidates:
        name, wire = candidate.entry.name, candidate.spec.wire.name
        began = time.perf_counter()
        dispatcher, reason = _build(candidate, agreement)
        if dispatcher is None:
            refused.append((name, wire, reason))
            continue
        built = time.perf_counter()
        rows = candidate.spec.lane_rows
        rivals = [cost for other, cost in costs.items() if other.spec.lane_rows >= rows]
        share = seconds / len(candidates)
        try:
            points, reason = _points(dispatcher, candidate, _Bounds(share, rivals), agreement)
        except RankFailed as error:
            raise RuntimeError(
                f"measuring dispatcher {name} failed: {error}; "
                f"name a dispatcher (plan.all2all_backend), or set plan.measure = 'never'"
            ) from error
        finally:
            dispatcher.close()
        ended = time.perf_counter()
        log.info("%s: built in %.2f s, measured in %.2f s", name, built - began, ended - built)
        if points:
            costs[candidate] = DispatcherCost(name, wire, points)
        else:
            refused.append((name, wire, reason))
    agreement.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the largest steps took is the experts' again
    return Measured(tuple(costs.values()), tuple(refused))


def sizes(lane_rows: int) -> list[int]:
    """Rows a lane to measure at: 1, 16, 256, ... and `lane_rows` itself."""
    found = [1]
    while found[-1] * GROWTH < lane_rows:
        found.append(found[-1] * GROWTH)
    return found if lane_rows == 1 else [*found, lane_rows]


def gathered(mine: Any) -> list[Any]:
    """`mine` of every rank, by rank. Collective over the default group."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class RankFailed(RuntimeError):
    """What failed on which ranks; all ranks raise it together."""


class Agreement:
    """Work that went well on all ranks or on none, past the collectives that a failed rank leaves unanswered.

    Making one is collective. On a GPU ranks tell each other over the CPU: a dispatcher only launches its
    collectives, so the ranks that wait in them on the device can still listen.
    """

    def __init__(self) -> None:
        self._own = dist.get_backend() != "gloo"
        self._group = dist.group.WORLD
        if self._own:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_SECONDS))

    def agreed(self, work: Callable[[], T]) -> T:
        """What `work` gives here, once it went well on all ranks; all raise RankFailed otherwise."""
        kept: list[T] = []

        def keep() -> None:
            kept.append(work())

        self.from_all(keep)
        return kept[0]

    def from_all(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every rank, by rank, pickled. All raise RankFailed where it failed on any."""
        mine: tuple[T | None, str] = (None, "")
        try:
            mine = (work(), "")
        except (RuntimeError, ValueError) as error:
            mine = (None, _first_line(error))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._group)
        if wrong := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]:
            raise RankFailed("; ".join(wrong))
        return [value for value, _ in found]

    def close(self) -> None:
        """Frees the group that it made for itself. Collective."""
        if self._own:
            dist.destroy_process_group(self._group)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _build(candidate: Candidate, agreement: Agreement) -> tuple[Dispatcher | None, str]:
    """The dispatcher, or why some rank has none."""
    dispatcher, mine = None, ""
    try:
        dispatcher = candidate.entry.build(candidate.spec)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        mine = _first_line(error)
    reasons = [f"rank {r}: {why}" for r, why in enumerate(agreement.from_all(lambda: mine)) if why]
    if dispatcher is not None and reasons:
        dispatcher.close()
    return (None, reasons[0]) if reasons else (dispatcher, "")


@dataclass(frozen=True)
class _Bounds:
    """When to stop with larger sizes."""

    seconds: float
    rivals: list[DispatcherCost]  # of dispatchers that serve as many rows


def _points(
    dispatcher: Dispatcher, candidate: Candidate, bounds: _Bounds, agreement: Agreement
) -> tuple[tuple[Point, ...], str]:
    """Measures as many sizes as time and memory allow; the text says where memory ended them.

    Ranks decide by the slowest one's time. At least the smallest size, unless some rank has no room for it.
    """
    points: list[Point] = []
    spent, left = 0.0, sizes(candidate.spec.lane_rows)
    while left:
        rows = left.pop(0)
        try:
            given = agreement.agreed(partial(_input, candidate.spec, rows))
        except RankFailed as error:
            log.warning("%s is not timed with %d rows a lane: %s", candidate.entry.name, rows, error)
            return tuple(points), str(error)
        steps = _Steps(dispatcher, candidate.spec, given, agreement)  # what is done once is done here
        if candidate.replays(rows):
            steps.record(agreement)
        one = max(1e-6, *agreement.from_all(partial(steps.wall, WARM_ROUNDS))) / WARM_ROUNDS
        spent += one * WARM_ROUNDS
        share = max(0.0, bounds.seconds - spent) / (1 + len(left))
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(share / one)))
        points.append(point_of(rows, agreement.from_all(partial(steps.time, rounds))))
        spent += one * rounds
        if not left or any(hopeless(points, rival.points) for rival in bounds.rivals):
            break
        steps_a_round = GRAPH_STEPS if candidate.replays(left[0]) else 1
        fewest = (WARM_ROUNDS + ROUNDS[0]) * steps_a_round
        if spent + expected(points, left[0]) * fewest > bounds.seconds:
            break
    agreement.agreed(partial(_in_time, dispatcher))
    return tuple(points), ""


def point_of(rows: int, by_rank: Sequence[Sequence[tuple[float, float]]]) -> Point:
    """The cost of a size from the rounds of every rank, each (seconds of dispatch, seconds of combine).

    A step takes what its slowest rank needs for both phases together. Ranks that are a little apart wait in
    different phases, so the slowest phases of different ranks do not add up to a step: the step is split as
    the ranks split it on average.
    """
    steps = [statistics.median(sum(phases) for phases in rounds) for rounds in by_rank]
    shares = [statistics.median(d / max(d + c, 1e-12) for d, c in rounds) for rounds in by_rank]
    slowest, share = max(steps), statistics.mean(shares)
    return Point(rows, slowest * share, slowest * (1 - share))


def expected(points: Sequence[Point], rows: int) -> float:
    """Seconds that a step of `rows` rows a lane may take: straight on from the last two sizes measured.

    After the first size, which may be all waiting or all carrying, half the way between the two.
    """
    last = points[-1]
    seconds = last.dispatch + last.combine
    if len(points) == 1:
        return seconds * math.sqrt(rows / last.rows)
    before = points[-2]
    grown = max(0.0, seconds - before.dispatch - before.combine)
    return seconds + grown * (rows - last.rows) / (last.rows - before.rows)


def _in_time(dispatcher: Dispatcher) -> None:
    if late := dispatcher.late():
        raise RuntimeError(f"ranks {list(late)} were late")


def reserve(spec: DispatchSpec, rows: int) -> None:
    """Takes and gives back the memory that a step of `rows` rows a lane may need on a GPU.

    Raises torch.OutOfMemoryError where it is not there: before the step, in which the others would wait. On a
    CPU there is nothing to ask, since memory is granted before it is used.
    """
    if spec.device == "cpu":
        return
    pairs = spec.ranks * rows * min(spec.top_k, spec.slots)  # that can come here
    row = spec.wire.nbytes((1, spec.hidden)) + 2 * spec.hidden * spec.dtype.itemsize  # with its output, twice
    torch.empty((pairs + rows) * row, dtype=torch.uint8, device=spec.device)


class _Steps:
    """Steps of one dispatcher, every lane bringing the same rows to the same random slots each time."""

    def __init__(
        self, dispatcher: Dispatcher, spec: DispatchSpec, given: tuple[Tensor, Routing], agreement: Agreement
    ) -> None:
        self._dispatcher, self._spec = dispatcher, spec
        self._hidden, self._routing = given
        self._recorded: _Recorded | None = None
        self._arrived: Dispatched | None = None
        self._outputs = agreement.agreed(self._first_outputs)
        agreement.agreed(self._combine)

    def record(self, agreement: Agreement) -> None:
        """Replays steps from a CUDA graph from now on, unless some rank cannot record them."""
        try:
            self._recorded = agreement.agreed(lambda: _Recorded(self._dispatch, self._combine))
        except RankFailed as error:
            log.warning("%d rows a lane are timed without a CUDA graph: %s", self._hidden.shape[0], error)
            agreement.agreed(self._dispatch)  # anew: what was half recorded has no values
            agreement.agreed(self._combine)

    def _first_outputs(self) -> Tensor:
        """Dispatches once, and makes outputs of experts for what arrived, as large as they are."""
        size = (*self._dispatch().batch.tokens.shape[:-1], self._spec.hidden)
        return torch.zeros(size, dtype=self._spec.dtype, device=self._spec.device)

    def _dispatch(self) -> Dispatched:
        self._arrived = None  # before the next one is there: a batch may take a gigabyte
        self._arrived = self._dispatcher.dispatch(self._hidden, self._routing)
        return self._arrived

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


def _input(spec: DispatchSpec, rows: int) -> tuple[Tensor, Routing]:
    """Hidden states and routing of this rank's lane, once there is memory for a step of so many rows."""
    reserve(spec, rows)
    device = spec.device
    random = torch.Generator(device).manual_seed(rows * spec.ranks + spec.rank)
    slots = spec.slots * (1 if spec.sliced else spec.ranks)
    chosen = torch.full((rows, spec.top_k), EMPTY, dtype=torch.int32, device=device)
    order = torch.rand(rows, slots, generator=random, device=device).argsort(dim=1)[:, : spec.top_k]
    chosen[:, : order.shape[1]] = order.int()
    weights = torch.full((rows, spec.top_k), 1 / spec.top_k, device=device)
    few = torch.randn(min(rows, DISTINCT_ROWS), spec.hidden, generator=random, device=device)
    repeats = -(-rows // DISTINCT_ROWS)
    hidden = few.to(spec.dtype).repeat(repeats, 1)[:rows].contiguous()
    return hidden, Routing(chosen, weights, (rows,) * spec.ranks)


class _Recorded:
    """A CUDA graph of GRAPH_STEPS steps, one after the other, as a rank's step graphs run them.

    Two events around a replay time all of them; three within the last step say how it is split.
    """

    def __init__(self, dispatch: Callable[[], object], combine: Callable[[], object]) -> None:
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        marks = [_timed_event(external=True) for _ in range(3)] if torch.version.hip is None else []
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for at in range(GRAPH_STEPS):
                    here = iter(marks if at == GRAPH_STEPS - 1 else ())
                    _mark(here)
                    dispatch()
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
