"""Batches of a pass, its steps in process without a hop, and how answers are compared with theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bench.service.hops.sizes import Sizes
from moeserve.dispatch.mail.kernels import Given
from moeserve.runtime.launch.torchrun import HostedRank
from moeserve.runtime.step import LaneInput

WARM_UP = 20
BOUND = 1e-2  # of the largest value: sums of bf16 in another order


class TurningRoutes:
    """Chosen experts `ids`, int32 of any shape, which `renew` turns: each becomes the one behind it, so that
    those of a row stay distinct. It may be a part of a graph.
    """

    def __init__(self, first: Tensor, experts: int) -> None:
        self._first, self._experts, self.ids = first, experts, first.clone()
        self._offset = torch.zeros((), dtype=torch.int32, device=first.device)

    def renew(self) -> None:
        """Other routes than in the pass before."""
        self._offset.add_(1)
        torch.add(self._first, self._offset, out=self.ids)
        self.ids.remainder_(self._experts)

    def rewind(self) -> None:
        """The next pass has the first routes; nothing is under way."""
        self._offset.fill_(self._experts - 1)
        if self._offset.is_cuda:
            torch.cuda.synchronize(self._offset.device)


def batches(sizes: Sizes, rows: int, device: str, depth: int, seed: int = 1000) -> list[Given]:
    """What each of the layers of a pass gets: other rows and other routes."""
    made = [sizes.batch(rows, seed + at) for at in range(depth)]
    return [Given(*(column.to(device) for column in one)) for one in made]


def microseconds(
    launch: Callable[[], None], times: int, stream: torch.cuda.Stream, depth: int
) -> list[float]:
    """A layer's time of each of so many passes, by the device's clock, one pass right after another."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    with torch.cuda.stream(stream):
        marks[0].record()
        for mark in marks[1:]:
            launch()
            mark.record()
    marks[-1].synchronize()
    found = [first.elapsed_time(then) * 1e3 / depth for first, then in pairwise(marks)]
    return found[min(WARM_UP, times // 2) :]


def steps_alone(
    rank: HostedRank, given: Sequence[Given], layers: int, passes: int
) -> tuple[list[float], list[Tensor]]:
    """The same steps as one graph in process: a layer's time, and the answers."""
    rows = len(given[0].hidden)
    valid = torch.ones(rows, dtype=torch.bool, device=rank.device)
    inputs = [LaneInput(one.hidden, one.route, one.weights, valid) for one in given]
    stream, graph = torch.cuda.Stream(rank.device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for at in range(layers):
            rank.record(at, inputs[at], (rows,))
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        answers = [rank.record(at % layers, one, (rows,)) for at, one in enumerate(inputs)]
    found = microseconds(graph.replay, passes, stream, len(given))
    torch.cuda.synchronize(rank.device)
    return found, [answer.clone() for answer in answers]


def check(what: str, ended: tuple[int, int], found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Ends the run where a pass has ended, or an answer is not that of the same step."""
    far = [float((one.float() - two.float()).abs().max()) for one, two in zip(found, right, strict=True)]
    if any(ended) or not max(far) <= BOUND * max(float(one.abs().max()) for one in right):
        worst = [(at, value) for at, value in enumerate(far) if value][:8]
        raise SystemExit(f"{what}: a pass ended by {ended}, or its answers are off, by step: {worst}")
    print(
        json.dumps({"compared": what, "steps with other bits": sum(value > 0 for value in far)}), flush=True
    )
