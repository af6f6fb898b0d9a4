"""Measuring dispatchers on the group that will use them: short, collective, and agreed by all members."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from moeserve.dispatch.costs.agreement import Agreement, RankFailed, first_line
from moeserve.dispatch.costs.costs import DispatcherCost, Point, hopeless
from moeserve.dispatch.costs.timed_steps import GRAPH_STEPS, StepNumbers, TimedSteps, step_input
from moeserve.dispatch.dispatcher import DispatchEntry, Dispatcher, DispatchSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

METHOD = "2"
"""How times are taken; those taken another way are not compared with, and are measured anew."""

WARM_ROUNDS = 2
ROUNDS = (3, 25)
"""Fewest and most rounds of a size."""


GROWTH = 16
"""The factor from one measured size to the next; between them a cost is taken to be straight."""


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


def measure(
    candidates: Sequence[Candidate], seconds: float, group: ProcessGroup | None, within: float = 300.0
) -> Measured:
    """Times every candidate in about `seconds` altogether; each is built, measured and closed in its turn.
    within: seconds for a rank to do so with one, while the others wait for it.

    Collective over `group`, None for one that is alone: all bring the same candidates and get the same
    answer. What a dispatcher does once, such as compiling or connecting, comes on top. A dispatcher that some
    rank cannot build is left out, and so is a size that some rank has no memory for. One that loses to
    another at every size, by far and ever more, is not timed at larger ones. One that fails while it carries
    raises RuntimeError on every rank, as soon as one knows.
    """
    costs: dict[Candidate, DispatcherCost] = {}
    refused = []
    agreement = Agreement(group, within)
    for candidate in candidates:
        name, wire = candidate.entry.name, candidate.spec.wire.name
        began = time.perf_counter()
        dispatcher, reason = _build(candidate, group, agreement)
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


def _build(
    candidate: Candidate, group: ProcessGroup | None, agreement: Agreement
) -> tuple[Dispatcher | None, str]:
    """The dispatcher, or why some rank has none."""
    dispatcher, mine = None, ""
    try:
        dispatcher = candidate.entry.build(candidate.spec, group)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        mine = first_line(error)
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
    numbers, rooms = StepNumbers(), agreement.from_all(lambda: candidate.spec.slots_here)
    while left:
        rows = left.pop(0)
        try:
            given = agreement.agreed(partial(step_input, candidate.spec, rows, rooms))
        except RankFailed as error:
            log.warning("%s is not timed with %d rows a lane: %s", candidate.entry.name, rows, error)
            return tuple(points), str(error)
        steps = TimedSteps(dispatcher, candidate.spec, given, agreement, numbers)  # done once is done here
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
        raise RuntimeError(f"members of seats {list(late)} were late")
