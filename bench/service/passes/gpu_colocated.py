"""Two GPUs in two ways: each has attention and a half of the experts, or one has attention, one the experts.

    python -m bench.service.passes.gpu_colocated [--rows 32 128 256 1024] [--attention 0 100 300 1000 -1]
        [--experts 64] [--layers 3] [--dispatcher nvlink_ll] [--load-as SCHEME] [--seconds 150] [--out FILE]

FP8 experts of 7168 x 2048, top-8; a token is a row through a forward pass of 58 layers, which go round the
distinct ones and are a CUDA graph, with other routes each pass. A case is a number of rows and the time that
attention to all of them takes on one GPU: a kernel that fills the GPU and reads its memory. Measured is wall
clock of passes one after another:

    colocated     two processes, a GPU each, in process and without a service: half of the experts, of the
                  rows and of the attention's time; a layer is attention and then experts
    N stages      a caller on the second GPU with the attention, attached to a rank on the first that has
                  all experts; rows and attention in 1, 2 and 3 stages, of which one is with the experts
                  while others have their attention

Attention of -1 takes as long as a layer of all rows does in one stage without any attention: the experts'
time and the hop. Tokens a second are those of both GPUs, halved.

Answers of a last pass are compared: all with those of one stage. All processes are there from the start, and
rest while others are measured. A case makes fewer passes where its share of --seconds is over, and none where
all is; --seconds are those of the cases, after everything has been loaded. Without two GPUs it runs on the
CPU, with tiny experts and no attention, to try the program. Prints a JSON line a case; writes
bench/results/gpu_colocated.jsonl, or FILE.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.lib.record import Result, write
from bench.service.hops.service import TINY, checkpoint_folder
from bench.service.hops.sizes import Sizes, write_checkpoint
from bench.service.passes.gpu.clock import Clock
from bench.service.passes.gpu.colocated import RANKS, Colocated
from bench.service.passes.gpu.loop import EQUAL, LOOP, STAGES
from bench.service.passes.gpu.shares import Batches, LongAttention, Passes, Share, divided, joined, period
from bench.service.passes.gpu.steps import check
from moeserve.runtime.config import Config
from moeserve.runtime.launch.environment import set_environment
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.rank.graphs import padded_rows
from moeserve.torch import Settings, connect

COLOCATED, ONE_STAGE = "colocated", "1 stage"
ATTENTION = (0.0, 100.0, 300.0, 1000.0, EQUAL)  # microseconds, or EQUAL
GRACE = 420.0  # seconds beside --seconds, with loading, after which a run is ended where it hangs


class Case(NamedTuple):
    """What is measured."""

    rows: int
    attention: float  # microseconds of all rows on one GPU, or EQUAL

    @property
    def text(self) -> str:
        """As the record names it, without the machine."""
        took = "as long as a layer" if self.attention == EQUAL else f"{self.attention:g} us"
        return f"{self.rows} rows, attention {took}"


class Split:
    """The caller of a rank that has all experts."""

    def __init__(self, address: str, sizes: Sizes, device: str) -> None:
        self._address, self._sizes, self._device = address, sizes, device
        self._attention = None if device == "cpu" else LongAttention(device)
        self._batches = dict[int, Batches]()  # by stages
        self.attention = 0.0  # microseconds of all rows' attention in the last passes, measured

    def begin(self, rows: int) -> None:
        """From now on passes are of so many rows."""
        self._batches.clear()
        for stages in STAGES:
            share = Share(rows, divided(rows, stages))
            self._batches[stages] = Batches(self._sizes, share, self._device)

    @contextmanager
    def passes(self, stages: int, attention: float) -> Iterator[Passes]:
        """Passes in so many stages, with so many microseconds of attention to all rows. The caller is the
        only one meanwhile, so that its forward passes are launched ahead.
        """
        of = self._batches[stages]
        order = tuple(at % self._sizes.layers for at in range(LOOP))
        settings = Settings(
            "attached",
            self._address,
            name=f"split-{stages}",
            rows=of.most,
            stages=stages,
            device=self._device,
            layers=() if self._device == "cpu" else order,
        )
        if self._attention is not None:
            self.attention = self._attention.set(attention / stages) * stages
        way = connect(settings)
        try:
            made = Passes(way, of, self._attention)
            made.record()
            yield made
        finally:
            way.close()


class Run:
    """One run of the bench."""

    def __init__(self, split: Split, both: Colocated, sizes: Sizes, mode: str, args: argparse.Namespace):
        self._split, self._both, self._sizes, self._mode = split, both, sizes, mode
        self._clock, self._wanted = Clock(args.seconds), args.passes
        self._cases = [Case(rows, attention) for rows in args.rows for attention in args.attention]
        self._left = len(self._cases) * (len(STAGES) + 1)  # measurements
        self._folder = Path(args.folder)
        self.results: list[Result] = []

    def run(self) -> None:
        """All cases, those of few rows first."""
        rows, layer = 0, 0.0
        for case in self._cases:
            if case.rows != rows:
                rows, layer = case.rows, 0.0
                self._split.begin(rows)
                right = self._right(rows)
            attention = layer if case.attention == EQUAL else case.attention
            found = self._measured(case, attention, right)
            if case.attention == 0.0 and ONE_STAGE in found:
                layer = found[ONE_STAGE] * 1e6 / LOOP
            self._tell(case, found)

    def _right(self, rows: int) -> list[Tensor]:
        """Answers of one stage, for as many steps as are not alike; also in a file for the others."""
        with self._split.passes(1, 0.0) as passes:
            right = joined(passes.answers())[: period(self._sizes.layers)]
        torch.save(torch.stack(right).cpu(), self._file(rows))
        return right

    def _file(self, rows: int) -> Path:
        return self._folder / f"right-{rows}.pt"

    def _measured(self, case: Case, attention: float, right: list[Tensor]) -> dict[str, float]:
        """Seconds of a pass in each way for which there was time."""
        found = dict[str, float]()
        if case.attention == EQUAL and not attention:  # nobody knows how long that is
            self._left -= len(STAGES) + 1
            return found
        for stages in STAGES:
            with self._split.passes(stages, attention) as passes:
                if count := self._count(passes.estimated()):
                    name = f"{stages} stages" if stages > 1 else ONE_STAGE
                    found[name] = passes.seconds(count)
                    answers = joined(passes.answers())
                    known = [right[at % len(right)] for at in range(len(answers))]
                    check(f"{case.text}, {name}", (0, 0), answers, known)
        if count := self._count(self._both.prepare(case.rows, attention)):
            found[COLOCATED] = self._both.seconds(count)
            self._both.compare(f"{case.text}, {COLOCATED}", self._file(case.rows))
        return found

    def _count(self, seconds: float) -> int:
        """How many passes the next measurement may make, of which one takes so long."""
        passes = self._clock.passes(self._wanted, seconds, self._left)
        self._left -= 1
        return passes

    def _tell(self, case: Case, found: dict[str, float]) -> None:
        """Prints a case, and keeps it where all ways were measured."""
        rates = {name: case.rows / seconds / RANKS for name, seconds in found.items()}
        layers = {name: round(seconds * 1e6 / LOOP, 1) for name, seconds in found.items()}
        said: dict[str, object] = {
            "case": case.text,
            "attention": round(self._split.attention, 1),
            "tokens/s a GPU": {name: round(rate) for name, rate in rates.items()},
            "us a layer": layers,
        }
        if len(found) <= len(STAGES):
            print(json.dumps(said | {"left out, its time is over": "some or all"}), flush=True)
            return
        best = max((name for name in rates if name != COLOCATED), key=rates.__getitem__)
        ratio = rates[best] / rates[COLOCATED]
        wins, by = (best, ratio) if ratio > 1 else (COLOCATED, 1 / ratio)
        print(json.dumps(said | {"wins": wins, "by": round(by, 3)}), flush=True)
        peers = {name: round(rate, 1) for name, rate in rates.items()}
        peers |= {f"us a layer, {name}": took for name, took in layers.items()}
        made = Result(
            "gpu_colocated",
            f"{case.text}, {self._mode}",
            round(rates[best], 1),
            "tokens/s a GPU, the best number of stages",
            "higher",
            None,
            peers | {"attention": round(self._split.attention, 1)},
        )
        self.results.append(made)


def config_of(folder: Path, load_as: str, on_gpus: bool, lane_rows: int, **more: object) -> Config:
    """Of a rank; `more` are keys with `__` for the dot."""
    given = {
        "model.checkpoint": str(folder),
        "model.load_as": load_as,
        "plan.device": "cuda" if on_gpus else "cpu",
        "step.lane_rows": lane_rows,
        "step.graph_rows": 1024,
        "server.port": 0,
        "server.metrics_port": 0,
    }
    return Config().with_values(given | {key.replace("__", "."): value for key, value in more.items()})


@torch.no_grad()
def main() -> None:
    """Runs the cases and prints their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 256, 1024], help="of all GPUs")
    parser.add_argument("--attention", type=float, nargs="+", default=list(ATTENTION), help="microseconds")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3, help="distinct layers; a pass goes round them")
    parser.add_argument("--dispatcher", default="nvlink_ll", help="of the colocated ranks")
    parser.add_argument("--load-as", default="", help="a scheme that experts are quantized to, such as nvfp4")
    parser.add_argument("--passes", type=int, default=200, help="of a measurement, at most")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the cases, without loading")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + GRACE, exit=True)
    set_environment("127.0.0.1")  # streams of this process must not share connections
    on_gpus = torch.cuda.device_count() > 1
    sizes = Sizes(7168, 2048, args.experts, 8, args.layers) if on_gpus else TINY
    args.attention = sorted(args.attention, key=lambda one: (one == EQUAL, one)) if on_gpus else [0.0]
    home, most = "cuda:1" if on_gpus else "cpu", padded_rows(max(args.rows))
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint_folder(sizes))
        write_checkpoint(folder, sizes)
        args.folder = folder
        halves = config_of(
            folder,
            args.load_as,
            on_gpus,
            padded_rows(-(-max(args.rows) // RANKS)),
            parallel__data_parallel_size=RANKS,
            parallel__enable_expert_parallel=True,
            plan__all2all_backend=args.dispatcher,
        )
        started = time.monotonic()
        both = stack.enter_context(Colocated(halves, sizes, on_gpus, args.seconds + GRACE))
        whole = config_of(folder, args.load_as, on_gpus, most)
        address = stack.enter_context(LocalCluster(whole)).address
        both.loaded()
        print(json.dumps({"loaded": round(time.monotonic() - started, 1)}), flush=True)
        mode = f"two GPUs, {args.load_as or 'fp8'}, {args.dispatcher}" if on_gpus else "the CPU"
        run = Run(Split(address, sizes, home), both, sizes, mode, args)
        try:
            run.run()
        finally:
            if run.results:  # those before a case that is wrong are right
                write(run.results, args.out)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
