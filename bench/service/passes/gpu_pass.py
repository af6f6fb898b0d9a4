"""Passes of a caller's GPU: the hop of a layer, a decode loop, and two callers; no host between two layers.

    python -m bench.service.passes.gpu_pass [--hop] [--loop] [--callers] [--layers 4] [--experts 64]
        [--passes 1000] [--rows 1 16] [--attention 0 -1] [--stages 1 2 3] [--one-stream] [--computes]
        [--alike] [--load-as SCHEME] [--halves] [--seconds 540] [--out FILE]

One rank with FP8 experts of 7168 x 2048, top-8, and callers whose forward passes are CUDA graphs. Its parts,
all of them where none is named:

    hop       what a layer costs beyond its step, of a forward pass of 56 layers. In one run: `step`, the same
              steps in process, as one graph on the owner's GPU; `prototype`, rows there and back by two
              graphs with flags and nothing else: no experts, no routes, no checks
    loop      a decode loop of 58 steps with other routes each pass: wall clock of passes one after another,
              attention by a kernel that fills its GPU and reads memory, in one, two and three stages;
              beside it `bound`: stages times the longer of attention and experts. Of several stages each has
              a stream for its rows and answers, beside that of attention; with --one-stream all are on one
    callers   a step of 4 rows while another caller has steps of 512; needs two processes. Its rows choose
              experts by chance, so that each step reads more or fewer; with --alike one row chooses each

With two GPUs the rank is a service on one and the callers this process on the other, with one more caller
that is attached and idle. With one GPU caller and owner are two streams of this process, which take from each
other's multiprocessors and memory: that shows what the protocol costs, and not what a link does, and
attention hides nothing there. With one GPU and --halves they are two processes as with two, which compute at
once by NVIDIA's multi-process service, each on half of the multiprocessors; memory is one for both, so that
attention takes from the experts' rate, unless it --computes. The record says which.

Every answer of a last pass is compared with the step's. A case makes fewer passes than --passes where its
share of --seconds is over, and none where all is; it says so. Prints a JSON line a case; writes
bench/results/gpu_pass.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.lib.gpu_clocks import GpuClocks
from bench.lib.mps import Mps
from bench.lib.record import Result, write
from bench.service.hops.service import checkpoint_folder
from bench.service.hops.sizes import Sizes, write_checkpoint
from bench.service.passes.gpu import callers
from bench.service.passes.gpu.clock import Clock
from bench.service.passes.gpu.loop import ATTENTION, STAGES, Batches, Known, Loop, Wanted, known_of
from bench.service.passes.gpu.loop import ROWS as LOOP_ROWS
from bench.service.passes.gpu.steps import batches, check, microseconds, steps_alone
from bench.service.passes.gpu.through_service import home, hop_through, service
from bench.service.passes.gpu.two_streams import TwoStreams
from moeserve.dispatch.mail.kernels import CallerKernels, Given, OwnerKernels, words
from moeserve.dispatch.mail.layout import STEPS, MailLayout, Word
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import set_environment
from moeserve.runtime.launch.torchrun import HostedRank, join_torchrun, leave_torchrun
from moeserve.runtime.rank.runs.runs import PassRuns

DEPTH = 56
ROWS = (1, 16, 128, 1024)
AIMS = {1: 15.0, 16: 18.0, 128: 30.0, 1024: 130.0}
HOP_PASSES = 200  # at most
PARTS = ("hop", "loop", "callers")
GRACE = 120.0  # seconds that a run may take longer than it was told, before it is ended where it hangs


def config_of(folder: Path, load_as: str, short_rows: int = 0, *, halves: bool = False) -> Config:
    """One rank on one GPU. short_rows: of steps that have a track of their own. halves: of it, with callers
    of another process on the other half.
    """
    return Config().with_values(
        {
            "model.checkpoint": str(folder),
            "model.load_as": load_as,
            "plan.device": "cuda",
            "step.graph_rows": 1024,
            "passes.short_rows": short_rows,
            "passes.share_gpu": halves,
            "members.held_multiprocessors": 0 if torch.cuda.device_count() > 1 else 8,
            "server.port": 0,
            "server.metrics_port": 0,
        }
    )


def prototype(rows: int, sizes: Sizes, owner: str, home: str, passes: int) -> list[float]:
    """A layer there and back without a step, by the same kernels but no routes: rows alone."""
    layout = MailLayout(rows, 1, sizes.hidden, sizes.experts, sizes.top_k, torch.bfloat16)
    _see_each_other(owner, home)
    box = torch.zeros(layout.mailbox_bytes, dtype=torch.uint8, device=owner)
    answers = torch.zeros(layout.answers_bytes, dtype=torch.uint8, device=home)
    table, state = words(torch.device(home)), words(torch.device(owner))
    for one in (table, state):
        one[Word.MAILBOX], one[Word.ANSWERS] = box.data_ptr(), answers.data_ptr()
        one[Word.NUMBER], one[Word.PATIENCE] = 1, int(20e9)
    given = batches(sizes, rows, home, DEPTH)
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

    found = microseconds(launch, passes, here, DEPTH)
    torch.cuda.synchronize()
    if int(table[STEPS]) != DEPTH * passes or not all(map(torch.equal, outs, [one.hidden for one in given])):
        raise SystemExit(f"{rows} rows: wrong rows came back")
    return found


def _see_each_other(one: str, other: str) -> None:
    """Has kernels of either GPU reach the memory of the other: torch enables that with its first copy."""
    for source, destination in ((one, other), (other, one)):
        torch.ones(1, device=source).to(destination)


class Run:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        gpus = torch.cuda.device_count()
        if args.halves and gpus > 1:
            raise SystemExit(f"--halves is of one GPU, and here are {gpus}: CUDA_VISIBLE_DEVICES names one")
        self.apart = gpus > 1 or args.halves  # caller and owner are two processes
        self.sizes = sizes_of(args)
        self.owner, self.home = "cuda:0", home()
        halved = "two processes on one GPU, half of it each" if args.halves else "one process on one GPU"
        where = "two processes on two GPUs" if gpus > 1 else halved
        self.mode = f"{where}, {args.load_as or 'fp8'}"
        self.parts = [part for part in PARTS if getattr(args, part)] or list(PARTS)
        self.rows, self.passes = args.rows, args.passes
        self.wanted = Wanted(args.passes, args.attention, args.stages, args.one_stream, args.computes)
        self.config = config_of(folder, args.load_as, args.short_rows, halves=args.halves)
        self.kind = callers.Kind(args.alike, args.short_rows, args.halves)
        self.clock = Clock(args.seconds)
        self.results: list[Result] = []
        self._alone: dict[int, list[float]] = {}
        self._bare: dict[int, list[float]] = {}
        self._known: dict[int, Known] = {}
        self._steps: dict[int, callers.Alone] = {}
        self._right: dict[int, list[Tensor]] = {}

    def in_process(self) -> None:
        """What a rank of this process tells, and with one GPU all."""
        os.environ["LOCAL_RANK"] = "0"
        started = time.monotonic()
        rank = join_torchrun(self.config)
        print(json.dumps({"loaded": round(time.monotonic() - started, 1)}), flush=True)
        runs = PassRuns(rank)
        if "hop" in self.parts:
            for rows in self.rows:
                self._hop(rank, runs, rows)
                gc.collect()  # graphs go while nothing waits on the device, for which that would wait
        if "loop" in self.parts:
            self._loop(rank, runs)
        if "callers" in self.parts and self.apart:
            for rows in (callers.SMALL, callers.BIG):
                given = callers.given_of(self.sizes, rows, self.owner, alike=self.kind.alike)
                found, right = steps_alone(rank, given, self.sizes.layers, min(HOP_PASSES, self.passes))
                self._steps[rows] = callers.Alone(float(np.median(found)), right)
        elif "callers" in self.parts:
            print(json.dumps({"left out, it needs two processes": "callers"}), flush=True)
        del runs
        leave_torchrun(rank)

    def _hop(self, rank: HostedRank, runs: PassRuns, rows: int) -> None:
        sizes, passes = self.sizes, min(HOP_PASSES, self.passes)
        given = batches(sizes, rows, self.owner, DEPTH)
        self._alone[rows], self._right[rows] = steps_alone(rank, given, sizes.layers, passes)
        self._bare[rows] = prototype(rows, sizes, self.owner, self.home, passes)
        if self.apart:
            return
        times = dict[bool, list[float]]()
        for rounded in (False, True):
            both = TwoStreams(runs, rank, sizes, self.home, (rows, 1, DEPTH), rounded=rounded)
            outs, work = _work(both, given, sizes.layers)
            times[rounded] = microseconds(both.launcher(work, announced=False), passes, both.here, DEPTH)
            check(f"hop, {rows} rows", both.ended(), outs, self._right[rows])
            host = float(np.median(both.host)) * 1e6
            both.close()
            del both, work
            gc.collect()
        self._told(rows, times[True], times[False], {"host us a pass": host})

    def _loop(self, rank: HostedRank, runs: PassRuns) -> None:
        rows = [one for one in LOOP_ROWS if one in self.rows]
        self._known = {one: known_of(rank, self.sizes, one) for one in rows}
        if self.apart:
            return
        loop = Loop(self.sizes, self.home, self.mode, self.wanted, self.clock)
        for one in rows:
            of = Batches(self.sizes, one, self.home)
            for case in self.wanted.cases([one]):
                left = len(self.wanted.cases(rows[rows.index(one) :])) - self.wanted.cases([one]).index(case)
                made = loop.on_streams(case, of, self._known[one], (rank, runs), left)
                self.results += [made] if made else []
                gc.collect()

    def through_service(self) -> None:
        """What a service on another GPU tells."""
        layers = self.sizes.layers
        order = tuple(at % layers for at in range(DEPTH))
        with service(self.config, order) as opened:
            for rows in self.rows if "hop" in self.parts else ():
                given = batches(self.sizes, rows, self.home, DEPTH)
                right = [one.to(self.home) for one in self._right[rows]]
                times = list[list[float]]()
                for wire in ("as_they_are", "auto"):
                    way = opened("bench", rows, 1, order, wire)
                    with GpuClocks.of(self.owner) as clocks:
                        found, answers = hop_through(way, given, layers, min(HOP_PASSES, self.passes))
                    way.close()
                    check(f"hop, {rows} rows", (0, 0), answers, right)
                    times.append(found)
                self._told(rows, times[1], times[0], clocks.told)
            if "callers" in self.parts:
                wanted = min(HOP_PASSES, self.passes)
                self.results += callers.compared(
                    opened, self.sizes, self._steps, self.clock, wanted, self.kind
                )
            loop = Loop(self.sizes, self.home, self.mode, self.wanted, self.clock) if self._known else None
            rows_left = list(self._known)
            for one in list(self._known) if loop else ():
                of = Batches(self.sizes, one, self.home)
                for at, case in enumerate(self.wanted.cases([one])):
                    left = len(self.wanted.cases(rows_left)) - at
                    assert loop is not None
                    made = loop.through(case, of, self._known[one], opened, left)
                    self.results += [made] if made else []
                rows_left.remove(one)

    def _told(self, rows: int, found: list[float], plain: list[float], more: dict[str, float]) -> None:
        """The hop of so many rows; `found` are a layer's times through the lane, `plain` those with rows that
        come as they are. The step in process has a spread of its own.
        """
        alone = float(np.median(self._alone[rows]))
        hop = float(np.median(found)) - alone
        peers = {
            "p99": float(np.percentile(found, 99)) - alone,
            "layer": float(np.median(found)),
            "layer, rows as they are": float(np.median(plain)),
            "step": alone,
            "step p99": float(np.percentile(self._alone[rows], 99)),
            "prototype": float(np.median(self._bare[rows])),
        } | more
        made = Result(
            "gpu_pass",
            f"hop, {rows} rows, {self.mode}",
            round(hop, 2),
            "us",
            "lower",
            AIMS[rows] if "two GPUs" in self.mode else None,
            {name: round(value, 2) for name, value in peers.items()},
        )
        print(
            json.dumps({"case": made.case, "hop": made.ours, "aim": made.aim} | dict(made.peers)), flush=True
        )
        self.results.append(made)


def _work(both: TwoStreams, given: list[Given], layers: int) -> tuple[list[Tensor], Callable[[], None]]:
    """A caller's forward pass, and where its answers will be."""
    outs = [torch.empty_like(one.hidden) for one in given]

    def work() -> None:
        for at, (one, out) in enumerate(zip(given, outs, strict=True)):
            both.kernels.bring(0, at % layers, one)
            both.kernels.fetch(0, out)

    return outs, work


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Of the model that is served."""
    return Sizes(7168, 2048, args.experts, 8, args.layers)


@torch.no_grad()
def main() -> None:
    """Runs the parts and prints their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part, and others that are named")
    parser.add_argument("--layers", type=int, default=4, help="distinct layers; a pass goes round them")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--passes", type=int, default=1000, help="of a case, at most")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument(
        "--attention", type=float, nargs="+", default=list(ATTENTION), help="of the loop, us; -1: as experts"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), help="of the loop")
    parser.add_argument(
        "--one-stream", action="store_true", help="of the loop: attention and all stages are on one stream"
    )
    parser.add_argument(
        "--computes", action="store_true", help="of the loop: attention computes, and reads no memory"
    )
    parser.add_argument(
        "--alike", action="store_true", help="of callers: each expert is chosen by one row of the small one"
    )
    parser.add_argument(
        "--short-rows",
        type=int,
        default=0,
        help="passes.short_rows: steps of up to so many overtake larger ones",
    )
    parser.add_argument(
        "--halves", action="store_true", help="caller and owner are two processes on one GPU, by MPS"
    )
    parser.add_argument("--load-as", default="", help="a scheme that experts are quantized to, such as nvfp4")
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + GRACE, exit=True)
    set_environment("127.0.0.1")  # streams of this process, too, must not share connections
    with Mps(50) if args.halves else nullcontext(), checkpoint_folder(sizes_of(args)) as folder:
        run = Run(args, folder)
        write_checkpoint(folder, run.sizes)
        try:
            run.in_process()
            gc.collect()
            torch.cuda.empty_cache()
            if run.apart:
                run.through_service()
        finally:
            if run.results:  # those before a case that is wrong are right
                write(run.results, args.out)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
