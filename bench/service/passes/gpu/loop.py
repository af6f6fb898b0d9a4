"""A decode loop: passes of 58 steps with attention between them, in one, two and three stages.

A layer of s stages takes s times the longer of attention and experts, if all else is hidden behind them; a
case says what a layer took of wall clock, over passes that follow one another, each with other routes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bench.lib.gpu_clocks import GpuClocks
from bench.lib.record import Result
from bench.service.hops.sizes import Sizes
from bench.service.passes.gpu.attention import Attention
from bench.service.passes.gpu.clock import Clock
from bench.service.passes.gpu.steps import TurningRoutes, batches, check, steps_alone
from bench.service.passes.gpu.through_service import OWNER, Opened
from bench.service.passes.gpu.two_streams import TwoStreams
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.rank.runs.runs import PassRuns
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.ways import Rows

LOOP = 58  # steps of a pass
ROWS = (1, 16, 128)  # of a stage
STAGES = (1, 2, 3)
EQUAL = -1.0  # attention takes as long as a stage's experts
ATTENTION = (0.0, 100.0, 300.0, EQUAL)  # microseconds
AIMS = {2: 1.15, 3: 1.05}  # of a layer, over what its stages take
STEADY = 5.0  # seconds
LONG = 1.5  # of the pass in the middle
ESTIMATED, ANNOUNCED = 8, 50  # passes: to see how long one takes; that are announced one by one


class Case(NamedTuple):
    """What is measured."""

    rows: int  # of a stage
    attention: float  # microseconds of a stage, or EQUAL
    stages: int

    def text(self, mode: str) -> str:
        """As the record names it."""
        took = "as long as experts" if self.attention == EQUAL else f"{self.attention:g} us"
        return f"decode, {self.rows} rows a stage, {self.stages} stages, attention {took}, {mode}"


class Wanted(NamedTuple):
    """Which cases are measured, and over how many passes at most."""

    passes: int
    attention: Sequence[float] = ATTENTION
    stages: Sequence[int] = STAGES
    one_stream: bool = False  # for attention and all stages; else several stages have one each
    computes: bool = False  # attention reads no memory

    def __str__(self) -> str:
        """What a record says of it."""
        return ", attention reads nothing" * self.computes + ", one stream" * self.one_stream

    def own(self, stages: int) -> int:
        """How many streams the stages have beside that of attention."""
        return 0 if self.one_stream or stages == 1 else stages

    def streams(self, stages: int, device: str) -> list[torch.cuda.Stream]:
        """These, urgent ones: attention is on all multiprocessors."""
        return [torch.cuda.Stream(device, priority=-1) for _ in range(self.own(stages))]

    def cases(self, rows: Sequence[int]) -> list[Case]:
        """All of them, those of few rows first."""
        return [Case(*one) for one in product(rows, self.attention, self.stages)]


class Batches:
    """Rows of all stages and steps of a pass, whose routes turn from pass to pass in the caller's graph."""

    def __init__(self, sizes: Sizes, rows: int, device: str) -> None:
        made = [one for stage in STAGES for one in batches(sizes, rows, device, LOOP, 1000 * stage)]
        routes = TurningRoutes(torch.stack([one.route for one in made]), sizes.experts)
        self.renew, self.rewind = routes.renew, routes.rewind
        given = [one._replace(route=routes.ids[at]) for at, one in enumerate(made)]
        self.given = [given[at : at + LOOP] for at in range(0, len(given), LOOP)]  # by stage and step


class Caller(Protocol):
    """How a stage's rows go to the experts and home, on the current stream."""

    def submit(self, stage: int, at: int) -> None:
        """Brings the rows of step `at`."""

    def wait(self, stage: int, at: int) -> None:
        """Takes their answer."""

    def exchange(self, stage: int, at: int, other: int, before: int) -> None:
        """Brings the rows of a stage's step `at`, and takes the answer of another one's step `before`."""


def forward(
    caller: Caller, of: Batches, attention: Attention, stages: int, own: Sequence[torch.cuda.Stream] = ()
) -> None:
    """Launches a forward pass: while one stage is with the experts, the others have their attention.

    own: a stream for each stage's rows and answers, beside that of attention, which waits for a stage's
    answer alone. (): all are launched on the current stream, and whose attention is next has its answer taken
    as the rows of the one before are brought.
    """
    of.renew()
    order = [(stage, at) for at in range(LOOP) for stage in range(stages)]
    if own:
        _forward_apart(caller, order, attention, own)
        return
    for place, (stage, at) in enumerate(order):
        attention.run()
        before = place + 1 - stages  # the step whose answer is wanted next
        if before < 0:
            caller.submit(stage, at)
        elif stages == 1:
            caller.submit(stage, at)
            caller.wait(stage, at)
        else:
            caller.exchange(stage, at, *order[before])
    for stage, at in order[len(order) + 1 - stages :]:
        caller.wait(stage, at)


def _forward_apart(
    caller: Caller, order: list[tuple[int, int]], attention: Attention, own: Sequence[torch.cuda.Stream]
) -> None:
    """The same, each stage's rows and answers on a stream of its own."""
    main = torch.cuda.current_stream()
    for stage, at in order:
        if at:
            main.wait_stream(own[stage])
        attention.run()
        own[stage].wait_stream(main)
        with torch.cuda.stream(own[stage]):
            caller.submit(stage, at)
            caller.wait(stage, at)
    for stream in own:
        main.wait_stream(stream)


class _OnStreams:
    """A caller beside its owner, as two streams."""

    def __init__(self, both: TwoStreams, of: Batches, layers: int) -> None:
        self._kernels, self._given, self._layers = both.kernels, of.given, layers
        self.answers = [[torch.empty_like(one.hidden) for one in stage] for stage in of.given]

    def submit(self, stage: int, at: int) -> None:
        self._kernels.bring(stage, at % self._layers, self._given[stage][at])

    def wait(self, stage: int, at: int) -> None:
        self._kernels.fetch(stage, self.answers[stage][at])

    def exchange(self, stage: int, at: int, other: int, before: int) -> None:
        given, answer = self._given[stage][at], (other, self.answers[other][before])
        self._kernels.exchange(stage, at % self._layers, given, 0, answer)


class _OnWay:
    """A caller of a service."""

    def __init__(self, way: AttachedDevice, of: Batches, layers: int) -> None:
        self._way, self._layers = way, layers
        self._given = [[Rows(*one) for one in stage] for stage in of.given]
        self._tickets = dict[int, int]()
        self.answers: list[list[Tensor]] = [[one.hidden for one in stage] for stage in of.given]

    def submit(self, stage: int, at: int) -> None:
        self._tickets[stage] = self._way.submit(at % self._layers, self._given[stage][at])

    def wait(self, stage: int, at: int) -> None:
        self.answers[stage][at] = self._way.wait(self._tickets.pop(stage))

    def exchange(self, stage: int, at: int, other: int, before: int) -> None:
        number = self._tickets.pop(other)
        self._tickets[stage], self.answers[other][before] = self._way.exchange(
            at % self._layers, self._given[stage][at], number
        )


class Known(NamedTuple):
    """What is known of a number of rows without a hop."""

    experts: float  # microseconds of a stage's step
    right: list[list[Tensor]]  # answers to the first routes, by stage and step
    clocks: Mapping[str, float] = MappingProxyType({})  # of the owner's GPU meanwhile


class Took(NamedTuple):
    """Microseconds of a layer: over all passes that were launched, by the host's clock; of the pass in the
    middle, and of the longest one, by the device's; which that was, and how many took half as long again as
    the one in the middle.
    """

    layer: float
    middle: float = 0.0
    longest: float = 0.0
    at: int = 0
    long: int = 0

    def told(self) -> dict[str, float]:
        """As the record has it."""
        longest = {"longest pass": self.longest, "which": self.at, "long passes": self.long}
        return {"middle pass": self.middle} | longest


def wall(
    launch: Callable[[], None], passes: int, device: str, stream: torch.cuda.Stream | None = None
) -> Took:
    """What so many passes take, one right after another. stream: on which they are launched, marked there."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(passes + 1 if stream else 0)]
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for at in range(passes):
        if stream is not None:
            marks[at].record(stream)
        launch()
    if stream is not None:
        marks[passes].record(stream)
    torch.cuda.synchronize(device)
    layer = (time.perf_counter() - started) * 1e6 / passes / LOOP
    each = [first.elapsed_time(then) * 1e3 / LOOP for first, then in pairwise(marks)] or [layer]
    middle = float(np.median(each))
    return Took(layer, middle, max(each), each.index(max(each)), sum(one > LONG * middle for one in each))


class Loop:
    """The cases of one run. mode: how the record names where caller and owner are."""

    def __init__(self, sizes: Sizes, home: str, mode: str, wanted: Wanted, clock: Clock) -> None:
        self._sizes, self._home, self._wanted, self._clock = sizes, home, wanted, clock
        self._mode = f"{mode}{wanted}"
        self.attention = Attention(home, computes=wanted.computes)

    def on_streams(
        self, case: Case, of: Batches, known: Known, owner: tuple[HostedRank, PassRuns], left: int
    ) -> Result | None:
        """A case in this process, where each pass is announced. left: cases with this one."""
        rank, runs = owner
        both = TwoStreams(runs, rank, self._sizes, self._home, (case.rows, case.stages, LOOP))
        caller, took = _OnStreams(both, of, self._sizes.layers), self._attention(case, known)
        own = self._wanted.streams(case.stages, self._home)
        launch = both.launcher(lambda: forward(caller, of, self.attention, case.stages, own), announced=True)
        passes = self._passes(launch, left)
        layer = wall(launch, passes, self._home).layer if passes else 0.0
        host = sorted(both.host)[len(both.host) // 2] * 1e6
        of.rewind()
        launch()
        ended = both.ended()
        self._compare(case, caller.answers, known, ended)
        both.close()
        return self._told(case, took, known, layer, passes, {"host us a pass": host})

    def through(self, case: Case, of: Batches, known: Known, opened: Opened, left: int) -> Result | None:
        """A case through a service: passes of one standing pass, and some that are announced each. left:
        cases with this one.
        """
        layers = self._sizes.layers
        way = opened("decode", case.rows, case.stages, tuple(at % layers for at in range(LOOP)))
        caller, attention = _OnWay(way, of, layers), self._attention(case, known)
        stream, graph = torch.cuda.Stream(self._home), torch.cuda.CUDAGraph()
        own = self._wanted.streams(case.stages, self._home)
        with torch.cuda.device(self._home):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward(caller, of, self.attention, case.stages, own)
            way.check()
            version = way.version()
            with torch.cuda.graph(graph, stream=stream):
                forward(caller, of, self.attention, case.stages, own)

            def launch() -> None:
                with torch.cuda.stream(stream):
                    graph.replay()

            at = 0

            def announced() -> None:
                nonlocal at
                at += 1
                way.demand(version * (at % 2))  # which begins another pass
                way.renew()
                launch()

            passes = self._passes(launch, left)
            with GpuClocks.of(OWNER) as clocks:
                took = wall(launch, passes, self._home, stream) if passes else Took(0.0)
            each = wall(announced, min(ANNOUNCED, passes), self._home).layer if passes else 0.0
            of.rewind()
            launch()
            way.check()
        self._compare(case, caller.answers, known, (0, 0))
        way.close()
        more = took.told() | {"announced each": each, "attention TB/s": self.attention.rate}
        more |= clocks.told | {f"{name}, experts alone": value for name, value in known.clocks.items()}
        return self._told(case, attention, known, took.layer, passes, more)

    def _attention(self, case: Case, known: Known) -> float:
        return self.attention.set(known.experts if case.attention == EQUAL else case.attention)

    def _passes(self, launch: Callable[[], None], left: int) -> int:
        """How many the case may make, of which so many are left; the first are not counted."""
        wall(launch, ESTIMATED, self._home)
        seconds = wall(launch, ESTIMATED, self._home).layer * LOOP / 1e6
        return self._clock.passes(self._wanted.passes, seconds, left)

    def _compare(self, case: Case, found: list[list[Tensor]], known: Known, ended: tuple[int, int]) -> None:
        flat = [one for stage in found[: case.stages] for one in stage]
        right = [one.to(self._home) for stage in known.right[: case.stages] for one in stage]
        check(case.text(self._mode), ended, flat, right)

    def _told(
        self,
        case: Case,
        attention: float,
        known: Known,
        layer: float,
        passes: int,
        more: dict[str, float],
    ) -> Result | None:
        if not passes:
            print(json.dumps({"left out, its time is over": case.text(self._mode)}), flush=True)
            return None
        bound = case.stages * max(attention, known.experts)
        aim = AIMS.get(case.stages) if "two GPUs" in self._mode else None
        streams = 1 + self._wanted.own(case.stages)
        peers = {"attention": attention, "experts": known.experts, "bound": bound, "passes": passes} | more
        peers |= {"streams of the caller": streams}
        made = Result(
            "gpu_pass",
            case.text(self._mode),
            round(layer, 2),
            "us a layer",
            "lower",
            None if aim is None else round(aim * bound, 2),
            {name: round(value, 2) for name, value in peers.items()},
        )
        ratio = round(layer / bound, 3)
        said = {"case": made.case, "layer": made.ours, "ratio": ratio, "aim": aim} | dict(made.peers)
        print(json.dumps(said), flush=True)
        return made


def known_of(rank: HostedRank, sizes: Sizes, rows: int, seconds: float = STEADY) -> Known:
    """Steps of so many rows in process, on the owner's GPU, which is at work for so long before they count:
    it is as warm then, and its clocks are as low, as in a decode loop. It is their mean, as a loop's.
    """
    of = Batches(sizes, rows, rank.device)
    took, first = steps_alone(rank, of.given[0], sizes.layers, ESTIMATED)
    passes = 2 * int(seconds * 1e6 / (float(np.median(took)) * LOOP)) + 1
    with GpuClocks.of(rank.device) as clocks:
        took, _ = steps_alone(rank, of.given[0], sizes.layers, passes)
    others = [steps_alone(rank, stage, sizes.layers, 2)[1] for stage in of.given[1:]]
    return Known(float(np.mean(took[len(took) // 2 :])), [first, *others], clocks.told)
