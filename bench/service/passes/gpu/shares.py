"""A process's share of the rows of a decode loop, and its forward passes over them: recorded, and timed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bench.service.hops.sizes import Sizes
from bench.service.passes.gpu.attention import Attention
from bench.service.passes.gpu.loop import LOOP
from bench.service.passes.gpu.steps import TurningRoutes
from moeserve.torch import Rows, Way
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.in_process import InProcess

DISTINCT = 8  # batches, of which a forward pass has one after another
EAGER = 2  # passes before one is recorded
WARM, ESTIMATED = 2, 3  # passes: that are not timed, and that say how long others will take
LONGEST_LAUNCH = 400.0  # microseconds of attention of one kernel, which reads each byte of its memory once


class Share(NamedTuple):
    """What one process brings: of `rows` rows of each step those of each stage."""

    rows: int
    stages: tuple[range, ...]


def divided(rows: int, parts: int) -> tuple[range, ...]:
    """`rows` rows in so many parts, as even as they can be."""
    ends = [rows * at // parts for at in range(parts + 1)]
    return tuple(range(first, end) for first, end in pairwise(ends))


def period(layers: int) -> int:
    """Steps of a forward pass after which layers and batches come again."""
    return min(LOOP, math.lcm(DISTINCT, layers))


class LongAttention:
    """Attention of any length, of several kernels where one would have too little memory to read."""

    def __init__(self, device: str) -> None:
        self._each, self._launches = Attention(device), 1

    def set(self, wanted: float) -> float:
        """Has `run` take so many microseconds; how many they are, measured."""
        self._launches = max(1, math.ceil(wanted / LONGEST_LAUNCH))
        return self._each.set(wanted / self._launches) * self._launches

    def run(self) -> None:
        """Launches it on the current stream."""
        for _ in range(self._launches):
            self._each.run()


class Batches:
    """The rows of a share. Every share of so many rows is of the same rows, with the same routes."""

    def __init__(self, sizes: Sizes, share: Share, device: str) -> None:
        made = [sizes.batch(share.rows, 1000 + at) for at in range(DISTINCT)]
        self._layers, self.device = sizes.layers, device
        self.stages, self.most = len(share.stages), max(map(len, share.stages))  # rows of a stage
        routes = TurningRoutes(torch.stack([ids for _, ids, _ in made]).to(device), sizes.experts)
        self.renew, self.rewind = routes.renew, routes.rewind
        self._given: list[list[Rows]] = []
        for part in share.stages:
            own = slice(part.start, part.stop)
            self._given.append(
                [
                    Rows(hidden[own].to(device), routes.ids[at, own], weights[own].to(device))
                    for at, (hidden, _, weights) in enumerate(made)
                ]
            )

    def at(self, stage: int, step: int) -> tuple[int, Rows]:
        """The layer of a step, and its rows of a stage."""
        return step % self._layers, self._given[stage][step % DISTINCT]


class Passes:
    """Forward passes of a share over one way, with attention before each step of a stage: while one stage is
    with the experts, the others have theirs. In process a step is over before the next attention begins.
    """

    def __init__(self, way: Way, of: Batches, attention: LongAttention | None) -> None:
        """attention: None where there is none."""
        self._way, self._of, self._attention = way, of, attention
        self._device = of.device
        self._launch: Callable[[], None] = self._forward
        self._answers: list[list[Tensor]] = []

    def record(self, lane_rows: int = 0) -> None:
        """Has a graph replayed from now on, where there is a GPU: with the attention that is set now.
        lane_rows: in process, the most rows of any rank.
        """
        if self._device == "cpu":
            return
        self._launch, self._answers = self._forward, []
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # of the graph before: other processes use this GPU, too
        stream, graph, way = _stream(self._device), torch.cuda.CUDAGraph(), self._way
        with torch.cuda.device(self._device):
            with torch.cuda.stream(stream):
                for _ in range(EAGER):
                    self._forward()
            _check(way)
            with ExitStack() as stack:
                recorded = None
                if isinstance(way, InProcess):
                    recorded = stack.enter_context(way.recording(lane_rows))
                stack.enter_context(torch.cuda.graph(graph, stream=stream))
                self._forward()

        def launch() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                if recorded is not None:
                    recorded.expect()
                graph.replay()

        self._launch = launch

    def seconds(self, passes: int) -> float:
        """Of wall clock, each of so many passes one after another."""
        _synchronize(self._device)
        started = time.perf_counter()
        for _ in range(passes):
            self._launch()
        _synchronize(self._device)
        return (time.perf_counter() - started) / passes

    def estimated(self) -> float:
        """Seconds of a pass, by a few."""
        self.seconds(WARM)
        return self.seconds(ESTIMATED)

    def answers(self) -> list[list[Tensor]]:
        """Those of a last pass, with the first routes, by stage and step. Raises what passes ended with."""
        self._of.rewind()
        self._launch()
        _check(self._way)
        return self._answers

    def _forward(self) -> None:
        self._of.renew()
        under_way, stages = dict[int, int](), self._of.stages
        self._answers = [[] for _ in range(stages)]
        for step in range(LOOP):
            for stage in range(stages):
                if step:
                    self._take(stage, under_way)
                if self._attention is not None:
                    self._attention.run()
                layer, rows = self._of.at(stage, step)
                if isinstance(self._way, InProcess):
                    self._answers[stage].append(self._way.mixed(layer, rows))
                else:
                    under_way[stage] = self._way.submit(layer, rows)
        for stage in range(stages):
            self._take(stage, under_way)

    def _take(self, stage: int, under_way: dict[int, int]) -> None:
        if stage in under_way:
            self._answers[stage].append(self._way.wait(under_way.pop(stage)))


def joined(answers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Answers of all rows, by step, of those by stage and step."""
    return [torch.cat(stages) for stages in zip(*answers, strict=True)]


@cache
def _stream(device: str) -> torch.cuda.Stream:
    """Of all passes on a device: each stream would keep memory of its own."""
    return torch.cuda.Stream(device)


def _check(way: Way) -> None:
    """Waits for the device, and raises what a pass has ended with."""
    if isinstance(way, (AttachedDevice, InProcess)):
        way.check()


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
