"""Two callers of one rank: how long a small one's step takes while a big one has its own.

Both are on one GPU, so that their attention is time alone: a kernel of one thread that spins.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.lib.gpu_clocks import GpuClocks
from bench.lib.record import Result
from bench.service.hops.sizes import Sizes
from bench.service.passes.gpu.clock import Clock
from bench.service.passes.gpu.steps import batches, check
from bench.service.passes.gpu.through_service import OWNER, Opened, home
from moeserve.dispatch.mail.kernels import Given
from moeserve.runtime.doors.passes.looking import COMPANY_SECONDS
from moeserve.torch.ways import Rows

DEPTH = 58
SMALL, BIG = 4, 512  # rows
ATTENTION = (0.0, 300.0)  # microseconds of both
BIG_PASSES = 4  # of the big caller alone
AHEAD = 3  # passes of the big caller that are queued when the small one begins one
LEAD = 10_000.0  # microseconds, in which a host launches a pass, also one whose other threads are busy
SPUN = 1_000_000  # cycles that are timed


class Alone(NamedTuple):
    """Steps of so many rows in process."""

    microseconds: float
    right: list[Tensor]  # answers, by step


class Kind(NamedTuple):
    """What callers ask for, and how they are served."""

    alike: bool  # as of `given_of`
    short_rows: int = 0  # of steps that overtake larger ones; 0: callers take turns
    halves: bool = False  # of one GPU: callers and owner have one each

    def __str__(self) -> str:
        apart = f", steps of up to {self.short_rows} rows on a track of their own" if self.short_rows else ""
        return ", steps alike" * self.alike + apart + ", half of a GPU for all callers" * self.halves


def given_of(sizes: Sizes, rows: int, device: str, *, alike: bool) -> list[Given]:
    """What the steps of a forward pass get. alike: each expert is chosen by one row of the small caller, so
    that its steps read as many experts; else rows choose by chance.
    """
    made = batches(sizes, rows, device, DEPTH, seed=rows)
    if not alike or rows * sizes.top_k > sizes.experts:
        return made
    chosen = torch.arange(rows * sizes.top_k, dtype=torch.int32, device=device).view(rows, sizes.top_k)
    return [one._replace(route=(chosen + at) % sizes.experts) for at, one in enumerate(made)]


class Side:
    """One caller: a graph for each step of a forward pass, so that each can be timed."""

    def __init__(self, opened: Opened, sizes: Sizes, rows: int, *, alike: bool) -> None:
        order = tuple(at % sizes.layers for at in range(DEPTH))
        self.way = opened(f"rows-{rows}", rows, 1, order)
        self.stream = torch.cuda.Stream(home())
        given = self._given = [Rows(*one) for one in given_of(sizes, rows, home(), alike=alike)]
        self._graphs = [torch.cuda.CUDAGraph() for _ in given]
        self.answers = list[Tensor]()  # graphs write them, and read what was given
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                for at, one in enumerate(given):
                    self.way.mixed(order[at], one)
        self.way.check()
        for at, (graph, one) in enumerate(zip(self._graphs, given, strict=True)):
            with torch.cuda.graph(graph, stream=self.stream):
                self.answers.append(self.way.mixed(order[at], one))

    def launch(self, spin: int, lead: int = 0) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """A forward pass with attention of `spin` cycles; the moments around each step. lead: cycles
        before it, in which the host launches all of it.
        """
        marks = []
        with torch.cuda.stream(self.stream):
            if lead:
                torch.cuda._sleep(lead)
            for graph in self._graphs:
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if spin:
                    torch.cuda._sleep(spin)
                pair[0].record()
                graph.replay()
                pair[1].record()
                marks.append(pair)
        return marks


class Big:
    """The other caller, whose passes are kept coming."""

    def __init__(self, side: Side, spin: int) -> None:
        self._side, self._spin = side, spin
        self._queued = deque[torch.cuda.Event]()
        self._marks = list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def feed(self) -> None:
        """Queues passes until there are `AHEAD`."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        while len(self._queued) < AHEAD:
            self._marks += self._side.launch(self._spin)
            self._queued.append(self._marks[-1][1])

    def microseconds(self) -> list[float]:
        """Of each of its steps, once all are over: the last ones had no company."""
        self._marks[-1][1].synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in self._marks]


def spun(wanted: float) -> int:
    """Cycles of a kernel that spins for so many microseconds."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPUN)
    first.record()
    torch.cuda._sleep(SPUN)
    last.record()
    last.synchronize()
    return int(SPUN * wanted / (first.elapsed_time(last) * 1e3))


def microseconds(small: Side, spin: int, passes: int, big: Big | None = None) -> list[float]:
    """Of each step of the small caller, alone or beside the big one."""
    marks, lead = list[tuple[torch.cuda.Event, torch.cuda.Event]](), spun(LEAD)
    for _ in range(passes):
        if big is not None:
            big.feed()
        marks += small.launch(spin, lead)
        marks[-1][1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks][DEPTH:]


def compared(
    opened: Opened, sizes: Sizes, steps: dict[int, Alone], clock: Clock, wanted: int, kind: Kind
) -> list[Result]:
    """The small caller alone and beside the big one. steps: by rows."""
    results = []
    with torch.cuda.device(home()):
        small, big = (Side(opened, sizes, rows, alike=kind.alike) for rows in (SMALL, BIG))
        for at, attention in enumerate(ATTENTION):
            spin = spun(attention) if attention else 0
            time.sleep(2 * COMPANY_SECONDS)  # the other one's steps count as company until then
            first = microseconds(small, spin, 4)
            seconds = (float(np.mean(first)) + attention) * DEPTH / 1e6
            passes = clock.passes(wanted, 10 * seconds, len(ATTENTION) - at)
            if not passes:
                print(json.dumps({"left out, its time is over": f"callers, attention {attention:g} us"}))
                continue
            alone = microseconds(small, spin, passes)
            time.sleep(2 * COMPANY_SECONDS)  # until then each of its steps would be launched by itself
            other = microseconds(big, spin, BIG_PASSES)
            with GpuClocks.of(OWNER) as clocks:
                beside = microseconds(small, spin, passes, Big(big, spin))
            with opened.quiet():
                company = Big(big, spin)
                quiet = microseconds(small, spin, passes, company)
            bigs = other, company.microseconds()
            for side, rows in ((small, SMALL), (big, BIG)):
                side.way.check()
                right = [one.to(home()) for one in steps[rows].right]
                check(f"callers, {rows} rows", (0, 0), side.answers, right)
            results.append(_told((attention, kind), alone, (beside, quiet), bigs, steps, clocks))
        for side in (small, big):
            side.way.close()
    return results


def _told(
    case: tuple[float, Kind],
    alone: list[float],
    others: tuple[list[float], list[float]],
    bigs: tuple[list[float], list[float]],
    steps: dict[int, Alone],
    clocks: GpuClocks,
) -> Result:
    """case: attention, and of what kind they are. others: steps beside the big caller, and those with no
    rebalances. bigs: the big caller's alone, and beside the small one. clocks: the owner's, meanwhile.
    """
    attention, kind = case
    (beside, quiet), (big_alone, big_beside) = others, bigs
    p50, p99 = float(np.median(alone)), float(np.percentile(beside, 99))
    peers = {
        "alone p50": p50,
        "alone p99": float(np.percentile(alone, 99)),
        "alone p99 of others": float(np.percentile([t for at, t in enumerate(alone) if at % DEPTH], 99)),
        "beside p50": float(np.median(beside)),
        "p99, no rebalances": float(np.percentile(quiet, 99)),
        "p50 of first steps": float(np.median(beside[::DEPTH])),  # of a pass
        "p99 of others": float(np.percentile([t for at, t in enumerate(beside) if at % DEPTH], 99)),
        "p90": float(np.percentile(beside, 90)),
        "longest": max(beside),
        "big alone p50": float(np.median(big_alone)),
        "big alone p99": float(np.percentile(big_alone, 99)),
        "big beside p50": float(np.median(big_beside)),
        "big beside p99": float(np.percentile(big_beside, 99)),
        "passes": len(beside) / DEPTH,
        "big step": steps[BIG].microseconds,
        "small step": steps[SMALL].microseconds,
    } | clocks.told
    made = Result(
        "gpu_pass",
        f"a caller of {SMALL} rows beside one of {BIG}{kind}, attention {attention:g} us, p99 of a step",
        round(p99, 2),
        "us",
        "lower",
        round(p50 + steps[BIG].microseconds, 2),
        {name: round(value, 2) for name, value in peers.items()},
    )
    print(json.dumps({"case": made.case, "p99": made.ours, "aim": made.aim} | dict(made.peers)), flush=True)
    return made
