"""Measuring dispatchers on the group that will use them: short, collective, and agreed by all ranks."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.costs.costs import DispatcherCost, Point
from moeserve.dispatch.dispatcher import Dispatched, DispatchEntry, Dispatcher, DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY

log = logging.getLogger(__name__)

T = TypeVar("T")

WARM_ROUNDS = 2
ROUNDS = (3, 25)
"""Fewest and most rounds of a size."""

DISTINCT_ROWS = 64
"""Of hidden states, repeated."""

GROWTH = 4
"""From one size to the next."""

HEARD_SECONDS = 300.0
"""Within which a rank has done a part of it, a library that compiles at first use included."""


@dataclass(frozen=True)
class Candidate:
    """A dispatcher that could serve, and what it would be built for: its wire, and its most rows."""

    row: DispatchEntry
    spec: DispatchSpec
    graph_rows: int = 0  # steps of up to so many rows a lane are replayed from CUDA graphs, and timed so

    def replays(self, rows: int) -> bool:
        """Whether steps of `rows` rows a lane come from a graph; not where a dispatcher reads counts."""
        return rows <= self.graph_rows and self.spec.device != "cpu" and not self.row.host_sync


@dataclass(frozen=True)
class Measured:
    """What came of measuring."""

    costs: tuple[DispatcherCost, ...]
    refused: tuple[tuple[str, str, str], ...]  # (dispatcher, wire, why it could not be built)


def measure(candidates: Sequence[Candidate], seconds: float) -> Measured:
    """Times every candidate in about `seconds` altogether; each is built, measured and closed in its turn.

    Collective over torch.distributed's default group: all ranks bring the same candidates and get the same
    answer. What a dispatcher does once, such as compiling or connecting, comes on top. A dispatcher that some
    rank cannot build is left out, and so is a size that some rank has no memory for. One that fails while it
    carries raises RuntimeError on every rank, as soon as one knows.
    """
    costs, refused = [], []
    words = Words()
    for candidate in candidates:
        name, wire = candidate.row.name, candidate.spec.wire.name
        dispatcher, reason = _build(candidate)
        if dispatcher is None:
            refused.append((name, wire, reason))
            continue
        try:
            points, reason = _points(dispatcher, candidate, seconds / len(candidates), words)
        except Unwell as error:
            raise RuntimeError(
                f"measuring dispatcher {name} failed: {error}; "
                f"name a dispatcher (plan.all2all_backend), or set plan.measure = 'never'"
            ) from error
        finally:
            dispatcher.close()
        if points:
            costs.append(DispatcherCost(name, wire, points))
        else:
            refused.append((name, wire, reason))
    words.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the largest steps took is the experts' again
    return Measured(tuple(costs), tuple(refused))


def sizes(lane_rows: int) -> list[int]:
    """Rows a lane to measure at: 1, 4, 16, ... and `lane_rows` itself."""
    found = [1]
    while found[-1] * GROWTH < lane_rows:
        found.append(found[-1] * GROWTH)
    return found if lane_rows == 1 else [*found, lane_rows]


def gathered(mine: Any) -> list[Any]:
    """`mine` of every rank, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Unwell(RuntimeError):
    """What failed on which ranks; all ranks raise it together."""


class Words:
    """How ranks tell each other what went wrong, past the collectives that a failed rank leaves unanswered.

    Making one is collective. On a GPU the words go over the CPU: a dispatcher only launches its collectives,
    so the ranks that wait in them on the device can still listen.
    """

    def __init__(self) -> None:
        self._own = dist.get_backend() != "gloo"
        self._group = dist.group.WORLD
        if self._own:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=HEARD_SECONDS))

    def agreed(self, work: Callable[[], T]) -> T:
        """What `work` gives here, once it went well on all ranks. Raises Unwell on all of them otherwise."""
        done: list[T] = []
        mine = ""
        try:
            done.append(work())
        except (RuntimeError, ValueError) as error:
            mine = (str(error).splitlines() or [type(error).__name__])[0]
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine, group=self._group)
        if wrong := [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]:
            raise Unwell("; ".join(wrong))
        return done[0]

    def close(self) -> None:
        """Frees what it speaks over. Collective."""
        if self._own:
            dist.destroy_process_group(self._group)


def _build(candidate: Candidate) -> tuple[Dispatcher | None, str]:
    """The dispatcher, or why some rank has none."""
    dispatcher, mine = None, ""
    try:
        dispatcher = candidate.row.build(candidate.spec)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        mine = (str(error).splitlines() or [type(error).__name__])[0]
    reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(gathered(mine)) if reason]
    if dispatcher is not None and reasons:
        dispatcher.close()
    return (None, reasons[0]) if reasons else (dispatcher, "")


def _points(
    dispatcher: Dispatcher, candidate: Candidate, seconds: float, words: Words
) -> tuple[tuple[Point, ...], str]:
    """As many sizes as `seconds` and memory allow, and why there are no more where memory ended them.

    Ranks decide by the slowest one's time. At least the smallest size, unless some rank has no room for it.
    """
    points: list[Point] = []
    spent, left = 0.0, sizes(candidate.spec.lane_rows)
    while left:
        rows = left.pop(0)
        try:
            words.agreed(partial(reserve, candidate.spec, rows))
        except Unwell as error:
            log.warning("%s is not timed with %d rows a lane: %s", candidate.row.name, rows, error)
            return tuple(points), str(error)
        run = _Rounds(dispatcher, candidate.spec, rows, words)  # what is done once is done here
        if candidate.replays(rows):
            run.record(words)
        one = _slowest(words.agreed(partial(run.wall, WARM_ROUNDS))) / WARM_ROUNDS
        spent += one * WARM_ROUNDS
        share = max(0.0, seconds - spent) / (1 + len(left))
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(share / one)))
        times = words.agreed(partial(run.time, rounds))
        spent += one * rounds
        mine = [statistics.median(phase) for phase in zip(*times, strict=True)]
        dispatch, combine = (max(phase) for phase in zip(*gathered(mine), strict=True))
        points.append(Point(rows, dispatch, combine))
        if left and spent + one * (left[0] / rows) * (WARM_ROUNDS + ROUNDS[0]) > seconds:
            break
    words.agreed(partial(_in_time, dispatcher))
    return tuple(points), ""


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


class _Rounds:
    """Steps of one dispatcher, every lane bringing `rows` rows that go to the same random slots each time."""

    def __init__(self, dispatcher: Dispatcher, spec: DispatchSpec, rows: int, words: Words) -> None:
        self._dispatcher, self._spec = dispatcher, spec
        self._hidden, self._routing = words.agreed(partial(_lane, spec, rows))
        self._arrived = words.agreed(self._dispatch)
        self._outputs = words.agreed(self._made)
        words.agreed(self._combine)
        self._replays: tuple[Callable[[], None], Callable[[], None]] | None = None

    def record(self, words: Words) -> None:
        """From now on both phases are replayed from CUDA graphs, unless some rank cannot record them."""
        try:
            self._replays = words.agreed(lambda: (_recorded(self._dispatch), _recorded(self._combine)))
        except Unwell as error:
            log.warning("%d rows a lane are timed without a CUDA graph: %s", self._hidden.shape[0], error)
            words.agreed(self._dispatch)  # anew: what was half recorded has no values
            words.agreed(self._combine)

    def _dispatch(self) -> Dispatched:
        self._arrived = self._dispatcher.dispatch(self._hidden, self._routing)
        return self._arrived

    def _made(self) -> Tensor:
        """Outputs of experts for what arrived, as large as they are."""
        size = (*self._arrived.batch.tokens.shape[:-1], self._spec.hidden)
        return torch.zeros(size, dtype=self._spec.dtype, device=self._spec.device)

    def _combine(self) -> Tensor:
        return self._dispatcher.combine(self._outputs, self._arrived.ticket)

    def time(self, rounds: int) -> list[tuple[float, float]]:
        """Seconds of dispatch and combine of each round, one right after the other."""
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
        dispatch, combine = self._replays or (self._dispatch, self._combine)
        clock = _Clock(self._spec.device)
        dispatch()
        dispatched = clock.lap()
        combine()
        return dispatched, clock.lap()


def _lane(spec: DispatchSpec, rows: int) -> tuple[Tensor, Routing]:
    """Hidden states and routing of this rank's lane."""
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


def _recorded(work: Callable[[], object]) -> Callable[[], None]:
    """What replays `work` from a CUDA graph; it is recorded, not run."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    replay: Callable[[], None] = graph.replay
    return replay


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
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _slowest(seconds: float) -> float:
    """The largest over ranks, never 0. Collective."""
    return float(max(1e-6, *gathered(seconds)))
