"""The hop of a device lane between two GPUs: what a layer costs beyond its step, no host between two layers.

    python -m bench.service.passes.gpu_pass [--layers 4] [--passes 200] [--experts 64] [--out FILE]

One rank with FP8 experts of 7168 x 2048, top-8, and one caller whose forward pass of 56 layers is one CUDA
graph: rows are brought, the answer is fetched, layer by layer. In one run:

    step      the same 56 steps in process, as one graph on the owner's GPU: no hop at all
    pass      the caller's graph, through the rank; a pass is launched ahead when its first rows are there
    prototype rows there and back by two graphs with flags and nothing else: no experts, no routes, no checks

With two GPUs the rank is a service on one and the caller this process on the other, with a second caller
that is attached and idle. With one GPU caller and owner are two streams of this process, which take from each
other's multiprocessors: that shows what the protocol costs, and not what a link does.

Every answer of the last pass is compared with the step's. Prints a JSON line a case; writes
bench/results/gpu_pass.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.lib.record import Result, write
from bench.service.gpu_hop import checkpoint_folder
from bench.service.hops.sizes import Sizes, write_checkpoint
from moeserve.dispatch.mail.kernels import CHOICE, CallerKernels, Given, OwnerKernels, words
from moeserve.dispatch.mail.layout import STEPS, MailLayout, Word
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import set_environment
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.launch.torchrun import HostedRank, join_torchrun, leave_torchrun
from moeserve.runtime.rank.runs.runs import PassRuns, Run
from moeserve.runtime.step import LaneInput
from moeserve.torch import Settings, connect
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.ways import Rows

DEPTH = 56
ROWS = (1, 16, 128, 1024)
AIMS = {1: 15.0, 16: 18.0, 128: 30.0, 1024: 130.0}
WARM_UP = 20
PATIENCE = 3.0  # seconds
BOUND = 1e-2  # of the largest value: sums of bf16 in another order


def config_of(folder: Path) -> Config:
    """One rank on one GPU."""
    return Config().with_values(
        {
            "model.checkpoint": str(folder),
            "plan.device": "cuda",
            "step.graph_rows": 1024,
            "members.held_multiprocessors": 0 if torch.cuda.device_count() > 1 else 8,
            "server.port": 0,
            "server.metrics_port": 0,
        }
    )


def batches(sizes: Sizes, rows: int, device: str) -> list[Given]:
    """What each of the layers of a pass gets: other rows and other routes."""
    made = [sizes.batch(rows, 1000 + at) for at in range(DEPTH)]
    return [Given(*(column.to(device) for column in one)) for one in made]


def microseconds(launch: Callable[[], None], times: int, stream: torch.cuda.Stream) -> list[float]:
    """A layer's time of each of so many passes, by the device's clock, one pass right after another."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    with torch.cuda.stream(stream):
        marks[0].record()
        for mark in marks[1:]:
            launch()
            mark.record()
    marks[-1].synchronize()
    found = [first.elapsed_time(then) * 1e3 / DEPTH for first, then in pairwise(marks)]
    return found[min(WARM_UP, times // 2) :]


def steps_alone(
    rank: HostedRank, given: list[Given], layers: int, passes: int
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
    found = microseconds(graph.replay, passes, stream)
    torch.cuda.synchronize(rank.device)
    return found, [answer.clone() for answer in answers]


class TwoStreams:
    """Caller and owner in this process, on one GPU or on two."""

    def __init__(self, rank: HostedRank, sizes: Sizes, rows: int, home: str) -> None:
        self.layout = MailLayout(rows, 1, sizes.hidden, sizes.experts, sizes.top_k, torch.bfloat16)
        box = torch.zeros(self.layout.mailbox_bytes, dtype=torch.uint8, device=rank.device)
        answers = torch.zeros(self.layout.answers_bytes, dtype=torch.uint8, device=home)
        self._held = box, answers
        self.runs = PassRuns(rank)
        addresses = box.data_ptr(), answers.data_ptr()
        self.lane = self.runs.lane(self.layout, addresses, PATIENCE)
        self.table = words(torch.device(home))
        self.table[Word.MAILBOX], self.table[Word.ANSWERS] = addresses
        self.table[Word.NUMBER], self.table[Word.PATIENCE] = 1, int(PATIENCE * 1e9)
        self.kernels = CallerKernels(self.layout, self.table)
        self.there, self.here = torch.cuda.Stream(rank.device), torch.cuda.Stream(home)
        self._steps = tuple((at % sizes.layers, 0) for at in range(DEPTH))
        self._rows, self._begun = rows, False
        self.host = list[float]()  # seconds of each launch of the owner's

    def caller(self, given: list[Given], outs: list[Tensor], layers: int) -> Callable[[], None]:
        """What launches a forward pass of both."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.here):
            for at, (one, out) in enumerate(zip(given, outs, strict=True)):
                self.kernels.bring(0, at % layers, one)
                self.kernels.fetch(0, out)
        flights = []

        def launch() -> None:
            started = time.perf_counter()
            with torch.cuda.stream(self.there):
                begins = 0 if self._begun else 1
                flights.append(
                    self.runs.launch(Run(self.lane, self._steps, self._rows, CHOICE, begins), (1, 1))
                )
                self._begun = True
            self.host.append(time.perf_counter() - started)
            graph.replay()
            if len(flights) > 2:
                flight = flights.pop(0)
                flight.event.synchronize()
                flight.read()

        return launch

    def ended(self) -> tuple[int, int]:
        """How the pass has ended for the caller and for the owner; zeros: it has not."""
        torch.cuda.synchronize()
        told = int(self.table[Word.ENDED]), int(self.lane.state[Word.ENDED])
        if any(told):
            print(json.dumps({"steps": [int(side[STEPS]) for side in (self.table, self.lane.state)]}))
        return told


def check(rows: int, ended: tuple[int, int], found: list[Tensor], right: list[Tensor]) -> None:
    """Ends the run where a pass has ended, or an answer is not that of the same step."""
    far = [float((one.float() - two.float()).abs().max()) for one, two in zip(found, right, strict=True)]
    if any(ended) or not max(far) <= BOUND * max(float(one.abs().max()) for one in right):
        worst = [(at, value) for at, value in enumerate(far) if value][:8]
        raise SystemExit(f"{rows} rows: a pass ended by {ended}, or its answers are off, by step: {worst}")
    print(json.dumps({"rows": rows, "steps with other bits": sum(value > 0 for value in far)}), flush=True)


def prototype(rows: int, sizes: Sizes, owner: str, home: str, passes: int) -> list[float]:
    """A layer there and back without a step, by the same kernels but no routes: rows alone."""
    layout = MailLayout(rows, 1, sizes.hidden, sizes.experts, sizes.top_k, torch.bfloat16)
    box = torch.zeros(layout.mailbox_bytes, dtype=torch.uint8, device=owner)
    answers = torch.zeros(layout.answers_bytes, dtype=torch.uint8, device=home)
    table, state = words(torch.device(home)), words(torch.device(owner))
    for one in (table, state):
        one[Word.MAILBOX], one[Word.ANSWERS] = box.data_ptr(), answers.data_ptr()
        one[Word.NUMBER], one[Word.PATIENCE] = 1, int(20e9)
    given = batches(sizes, rows, home)
    room = Given(*(torch.zeros_like(column, device=owner) for column in given[0]))
    valid = torch.zeros(rows, dtype=torch.bool, device=owner)
    outs = [torch.empty_like(one.hidden) for one in given]
    with torch.cuda.device(home):
        caller, here, calls = CallerKernels(layout, table), torch.cuda.Stream(home), torch.cuda.CUDAGraph()
    with torch.cuda.device(owner):
        keeper, there, steps = OwnerKernels(layout, state), torch.cuda.Stream(owner), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.device(home), torch.cuda.graph(calls, stream=here):
        for one, out in zip(given, outs, strict=True):
            caller.bring(0, 0, one)
            caller.fetch(0, out)
    with torch.cuda.device(owner), torch.cuda.graph(steps, stream=there):
        for _ in given:
            keeper.take(0, 0, room, valid)
            keeper.post(0, room.hidden)

    def launch() -> None:
        with torch.cuda.device(owner), torch.cuda.stream(there):
            steps.replay()
        calls.replay()

    found = microseconds(launch, passes, here)
    torch.cuda.synchronize()
    if int(table[STEPS]) != DEPTH * passes or not all(map(torch.equal, outs, [one.hidden for one in given])):
        raise SystemExit(f"{rows} rows: wrong rows came back")
    return found


@contextmanager
def service(folder: Path, sizes: Sizes, rows: int) -> Iterator[AttachedDevice]:
    """A rank on the first GPU, this process's way from the second, and another caller that is idle."""
    with LocalCluster(config_of(folder)) as cluster:
        given = {"mode": "attached", "address": cluster.address, "device": "cuda:1", "rows": rows}
        order = tuple(at % sizes.layers for at in range(DEPTH))
        idle, way = (connect(Settings(name=name, layers=order, **given)) for name in ("idle", "bench"))
        yield way
        way.close()
        idle.close()


def through_service(
    way: AttachedDevice, given: list[Given], layers: int, passes: int
) -> tuple[list[float], list[Tensor]]:
    """The caller's graph through a service."""
    stream, graph = torch.cuda.Stream("cuda:1"), torch.cuda.CUDAGraph()
    rows = [Rows(one.hidden, one.route, one.weights) for one in given]
    with torch.cuda.stream(stream):
        for _ in range(3):
            for at, one in enumerate(rows):
                way.mixed(at % layers, one)
    way.check()
    with torch.cuda.graph(graph, stream=stream):
        answers = [way.mixed(at % layers, one) for at, one in enumerate(rows)]
    found = microseconds(graph.replay, passes, stream)
    way.check()
    return found, answers


def told(rows: int, mode: str, times: tuple[list[float], ...], **more: float) -> Result:
    """One case; `times` are a layer's, through the lane, without it, and of rows alone."""
    found, step, bare = times
    alone, hop = float(np.median(step)), float(np.median(found) - np.median(step))
    peers = {
        "p99": float(np.percentile(found, 99)) - alone,
        "layer": float(np.median(found)),
        "step": alone,
        "prototype": float(np.median(bare)),
    } | {f"{name} us a pass": value for name, value in more.items()}
    made = Result(
        "gpu_pass",
        f"hop, {rows} rows, {mode}",
        round(hop, 2),
        "us",
        "lower",
        AIMS[rows] if "two GPUs" in mode else None,
        {name: round(value, 2) for name, value in peers.items()},
    )
    print(json.dumps({"case": made.case, "hop": made.ours, "aim": made.aim} | dict(made.peers)), flush=True)
    return made


@torch.no_grad()
def main() -> None:
    """Runs all sizes and prints their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="distinct layers; a pass goes round them")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    set_environment("127.0.0.1")  # streams of this process, too, must not share connections
    two = torch.cuda.device_count() > 1
    sizes = Sizes(7168, 2048, args.experts, 8, args.layers)
    owner, home = "cuda:0", "cuda:1" if two else "cuda:0"
    mode = "two processes on two GPUs" if two else "one process on one GPU"
    results = []
    with checkpoint_folder(sizes) as folder:
        write_checkpoint(folder, sizes)
        os.environ["LOCAL_RANK"] = "0"
        started = time.monotonic()
        rank = join_torchrun(config_of(folder))
        print(json.dumps({"loaded": round(time.monotonic() - started, 1)}), flush=True)
        alone, found, bare = {}, {}, {}
        for rows in args.rows:
            given = batches(sizes, rows, owner)
            alone[rows], right = steps_alone(rank, given, sizes.layers, args.passes)
            bare[rows] = prototype(rows, sizes, owner, home, args.passes)
            if two:
                continue
            both = TwoStreams(rank, sizes, rows, home)
            outs = [torch.empty_like(one.hidden) for one in given]
            found[rows] = microseconds(both.caller(given, outs, sizes.layers), args.passes, both.here)
            check(rows, both.ended(), outs, right)
            host = float(np.median(both.host)) * 1e6
            results.append(told(rows, mode, (found[rows], alone[rows], bare[rows]), host=host))
            del both  # graphs go while nothing waits on the device, for which that would wait
            gc.collect()
        leave_torchrun(rank)
        del rank
        torch.cuda.empty_cache()
        for rows in args.rows if two else ():
            with service(folder, sizes, rows) as way:
                given = batches(sizes, rows, home)
                found[rows], _ = through_service(way, given, sizes.layers, args.passes)
            results.append(told(rows, mode, (found[rows], alone[rows], bare[rows])))
    write(results, args.out)


if __name__ == "__main__":
    main()
