"""What ranks of a group choose by cost, and how much they measured to know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from parallel import group
from torch.distributed import ProcessGroup

from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.costs import timed_steps
from moeserve.dispatch.costs.measure import Candidate, Measured, measure
from moeserve.dispatch.dispatcher import DispatchEntry, Dispatcher, DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Scheme
from moeserve.quant.formats import BF16
from moeserve.runtime.planning import costing
from moeserve.runtime.planning.costing import CostBook, Costing
from moeserve.runtime.planning.plan import DispatchSpan, NoPlan, Plan, make_plan
from moeserve.runtime.sections import ALWAYS, AUTO, NEVER, Wanted

LANE_ROWS = 20
SHAPE = ExpertShape(64, 64, Activation("silu"))


@dataclass(frozen=True)
class Choice:
    """What one rank chose."""

    dispatchers: tuple[tuple[str, int], ...]  # (name, up to rows)
    measured: tuple[str, ...]  # dispatchers that were measured for it
    points: tuple[tuple[str, int], ...]  # (dispatcher, rows) that costs have
    refused: dict[str, str]


def plan_of(ranks: int, wanted: Wanted, extra: DispatchEntry | None = None) -> Plan:
    problem = Problem(
        Scheme(BF16, BF16), BF16, SHAPE, experts=8, lanes=ranks, owners=ranks, top_k=2, lane_rows=LANE_ROWS
    )
    rows = DISPATCHERS | ({extra.name: extra} if extra else {})
    return make_plan(problem, machine_named("cpu", ()), KERNELS, rows, wanted)


FITTING = {span.dispatcher.name for span in plan_of(2, Wanted()).fitting}
"""Dispatchers that two ranks on CPUs may choose between."""


def chosen(book: CostBook, plan: Plan, rank: int, monitor: Callable[..., Measured] = measure) -> Choice:
    """One choice, with an eye on what it measures."""
    seen: list[str] = []

    def watched(
        candidates: list[Candidate], seconds: float, over: ProcessGroup | None, within: float
    ) -> Measured:
        seen.extend(candidate.entry.name for candidate in candidates)
        return monitor(candidates, seconds, over, within)

    def spec_of(asked: Plan, span: DispatchSpan) -> DispatchSpec:
        problem = asked.problem
        return DispatchSpec(
            Members.of_ranks(problem.owners),
            rank,
            8 // problem.owners,
            64,
            2,
            span.up_to,
            torch.bfloat16,
            span.wire,
        )

    costing.measure = watched
    try:
        made = book.choose({0: plan, 3: plan}, spec_of, group())
    finally:
        costing.measure = measure
    if made[0] is not made[3]:
        raise AssertionError("layers that shared a plan must share the one by cost")
    costs = made[0].costs
    points = (
        [(cost.dispatcher, point.rows) for cost in costs.dispatchers for point in cost.points]
        if costs
        else []
    )
    dispatchers = tuple((span.dispatcher.name, span.up_to) for span in made[0].dispatchers)
    return Choice(dispatchers, tuple(seen), tuple(points), dict(made[0].refused))


def choices(rank: int, world: int, folder: str) -> tuple[dict[str, Choice], dict[str, str]]:
    """Worker: one choice after another, by name, and what was said where there was none."""
    always, table = Costing(ALWAYS, folder), plan_of(world, Wanted())
    book = CostBook(replace(always, seconds=0.2))
    found = {"first": chosen(book, table, rank), "again": chosen(book, table, rank)}
    found["stored"] = chosen(CostBook(always), table, rank)
    found["anew"] = chosen(CostBook(replace(always, anew=True, seconds=0.1)), table, rank)
    found["pinned"] = chosen(CostBook(always), plan_of(world, Wanted(dispatcher="all2allv")), rank)
    for when in (NEVER, AUTO):
        found[when] = chosen(CostBook(replace(always, measure=when)), table, rank)

    all2allv = DISPATCHERS["all2allv"]
    picky = replace(all2allv, name="picky", build=_no_rank_1)
    found["picky"] = chosen(CostBook(replace(always, seconds=0.1)), plan_of(world, Wanted(), picky), rank)
    lonely = replace(all2allv, name="lonely") if rank == 0 else None
    found["lonely"] = chosen(CostBook(always), plan_of(world, Wanted(), lonely), rank)

    roomless = Costing(ALWAYS, f"{folder}/roomless", seconds=60.0)  # so that memory alone ends it
    with _room_on_rank_1_for(rank, LANE_ROWS - 1):
        found["roomless"] = chosen(CostBook(roomless), plan_of(world, Wanted()), rank)

    broken = replace(all2allv, name="broken", build=_broken)
    said = {"broken": _refusal(always, plan_of(world, Wanted(), broken), rank)}
    halves = replace(all2allv, name="halves", build=_broken_on_rank_1)
    with _room_on_rank_1_for(rank, 0):
        said["roomless"] = _refusal(replace(always, anew=True), plan_of(world, Wanted()), rank)
    said["halves"] = _refusal(always, plan_of(world, Wanted(), halves), rank)
    told = plan_of(world, Wanted(dispatcher="all2allv" if rank == 1 else AUTO))
    said["differing"] = _refusal(replace(always, measure=NEVER), told, rank)
    return found, said


def _refusal(how: Costing, plan: Plan, rank: int) -> str:
    try:
        return f"no error: {chosen(CostBook(how), plan, rank)}"
    except (RuntimeError, NoPlan) as error:
        return str(error)


def _no_rank_1(spec: DispatchSpec, group: ProcessGroup | None) -> Dispatcher:
    if spec.rank == 1:
        raise RuntimeError("needs 7 bytes more than rank 1 has")
    return DISPATCHERS["all2allv"].build(spec, group)


@contextmanager
def _room_on_rank_1_for(rank: int, most: int) -> Iterator[None]:
    """While it lasts, rank 1 has no memory for a step of more than `most` rows a lane."""
    true = timed_steps.reserve

    def reserve(spec: DispatchSpec, rows: int) -> None:
        if rank == 1 and rows > most:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 7 bytes\nand more lines")
        true(spec, rows)

    timed_steps.reserve = reserve
    try:
        yield
    finally:
        timed_steps.reserve = true


def _broken_on_rank_1(spec: DispatchSpec, group: ProcessGroup | None) -> Dispatcher:
    """Rank 1 runs out of memory once its rows have arrived, when the others go on."""
    dispatcher = DISPATCHERS["all2allv"].build(spec, group)
    dispatch = dispatcher.dispatch

    def broken(*args: Any) -> Any:
        dispatch(*args)
        raise torch.OutOfMemoryError("out of memory on arrival")

    if spec.rank == 1:
        dispatcher.dispatch = broken  # type: ignore[method-assign]
    return dispatcher


def _broken(spec: DispatchSpec, group: ProcessGroup | None) -> Dispatcher:
    dispatcher = DISPATCHERS["all2allv"].build(spec, group)
    dispatcher.combine = lambda outputs, ticket: (_ for _ in ()).throw(ValueError("a byte is wrong"))  # type: ignore[method-assign]
    return dispatcher
