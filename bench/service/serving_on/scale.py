"""Ranks come and go under load, 3 to 4 to 3: does any call fail, and how long does a step take meanwhile?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from bench.lib.record import Result
from bench.service.faults.callers import Callers
from bench.service.faults.points import STEPS, every_process
from bench.service.faults.service import Service
from bench.service.serving_on.events import Setup, gaps
from bench.service.serving_on.members import leftover
from bench.service.serving_on.raw import RawCalls
from bench.service.serving_on.run import Run, median_call, quantile, right_times, whole
from moeserve.proto.client import MoeClient

CALM_SECONDS = 5.0  # of load before, between and after changes
CALLERS = 2
RATIO = 1.25  # p99 of a step, while ranks come or go over while they do not
SCALE_SECONDS = 120.0


@dataclass
class Change:
    """One change of the ranks."""

    ranks: int
    seconds: float = 0.0
    gap: float = 0.0  # the longest between right answers of a caller, less its median call
    moved: int = 0
    faults: list[str] = field(default_factory=list)


def scales(run: Run, setup: Setup) -> tuple[list[Result], list[str]]:
    """`--rounds` times one rank more and one fewer; the numbers, and what is not as it should be."""
    ranks, changes = run.args.ranks - 1, list[Change]()
    more = {"members__max_lanes": ranks + 1, "members__max_owners": ranks + 1}
    slots = redundant(ranks, max(setup.redundant, math.ceil(64 / (ranks - 1))))  # any one may be lost
    more |= {"parallel__data_parallel_size": ranks, "balance__redundant_experts": slots}
    windows = {True: list[tuple[float, float]](), False: list[tuple[float, float]]()}
    service = run.service(setup, **more)
    (service.folder / STEPS).touch()
    with (
        service,
        run.callers(service, CALLERS) as callers,
        RawCalls(service.address, run.calls, run.args.raw_pause, ranks) as raw,
    ):
        processes = every_process(service.folder)
        calm(callers, windows)
        for _ in range(run.args.rounds):
            for wanted in (ranks + 1, ranks):
                began = time.time()
                changes.append(change(service, callers, wanted))
                windows[True].append((began, time.time()))
                if not changes[-1].faults and (missing := whole(service, wanted)):
                    changes[-1].faults.append(missing)
                print(f"{setup}, to {wanted} ranks: {changes[-1]}", flush=True)
                calm(callers, windows)
        failed = [one.fault for one in raw.answers(1.0) if one.fault or one.twice]
        left = leftover(service, setup, processes)
    counted = callers.wrong + failed + left
    steps = steps_of(service)
    took = {moving: [s for at, s in steps if within(at, windows[moving])] for moving in (True, False)}
    return results(setup, changes, took, (callers, raw.count, len(callers.wrong), len(failed))), [
        *(fault for one in changes for fault in one.faults),
        *counted,
    ]


def redundant(ranks: int, wanted: int) -> int:
    """The fewest redundant slots from `wanted` on with which 64 experts divide over the ranks."""
    return next(count for count in range(wanted, wanted + ranks) if (64 + count) % ranks == 0)


def calm(callers: Callers, windows: dict[bool, list[tuple[float, float]]]) -> None:
    """Load, and nothing else."""
    began = time.time()
    callers.answers(CALM_SECONDS)
    windows[False].append((began, time.time()))


def change(service: Service, callers: Callers, ranks: int) -> Change:
    """Has the service go on with so many ranks."""
    before, at = callers.answers(1.0), time.time()
    with MoeClient(service.address) as client:
        reply = client.scale(ranks, timeout=SCALE_SECONDS)
    until = time.time()
    after = callers.answers(1.0)
    longest = max(
        max(gaps(right_times([one for one in before + after if one.caller == caller]), at, time.time()))
        for caller in {one.caller for one in before}
    )
    faults = [] if reply.outcome == "scaled" else [f"to {ranks} ranks: {reply.outcome}, {reply.reason}"]
    return Change(ranks, until - at, longest - median_call(before), reply.moves, faults)


def steps_of(service: Service) -> list[tuple[float, float]]:
    """When each step ended, and its seconds."""
    lines = (service.folder / STEPS).read_text().splitlines()
    return [(float(at), float(seconds)) for at, seconds in (line.split() for line in lines)]


def within(at: float, windows: list[tuple[float, float]]) -> bool:
    """Whether it was in one of the windows."""
    return any(since <= at <= until for since, until in windows)


def results(
    setup: Setup,
    changes: list[Change],
    took: dict[bool, list[float]],
    counts: tuple[Callers, int, int, int],
) -> list[Result]:
    """The numbers, as results."""
    callers, raw, wrong, failed = counts
    case = f"{setup}, {len(changes)} changes of the ranks"
    moving, still = (quantile(took[key], 0.99) for key in (True, False))
    medians = {f"p50 {name}, ms": quantile(took[key], 0.5) * 1e3 for key, name in NAMES.items()}
    peers = {"p99 while they change, ms": moving * 1e3, "p99 else, ms": still * 1e3} | medians
    peers |= {f"steps {name}": float(len(took[key])) for key, name in NAMES.items()}
    seconds = {"to more, s": 1, "to fewer, s": 0}
    taken = {
        name: max((one.seconds for at, one in enumerate(changes) if at % 2 != more), default=0.0)
        for name, more in seconds.items()
    }
    gap = max(one.gap for one in changes)
    return [
        Result(
            "serve_on", f"{case}: p99 of a step over that without", moving / still, "x", "lower", RATIO, peers
        ),
        Result(
            "serve_on", f"{case}: calls failed or wrong", wrong, "calls", "lower", 0, {"right": callers.right}
        ),
        Result("serve_on", f"{case}: bare calls failed", failed, "calls", "lower", 0, {"all": float(raw)}),
        Result("serve_on", f"{case}: longest interruption", gap, "s", "lower", None, taken),
    ]


NAMES = {True: "while they change", False: "else"}
