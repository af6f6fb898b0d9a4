"""The hop: what a call of the service costs beyond the step it runs.

    python -m bench.service.hop [--calls 400]

A service of two ranks, and one of a single rank (a process each, and one for the head), serves one layer of
tiny experts, so that the step is short; over gloo, two ranks' takes milliseconds all the same. A client calls
rank 0's lane with all the rows; rank 1 brings none. In turns:

    echo      a bare Python gRPC server that returns the bytes it is sent, unparsed: as many as the tensors'
    inline    `MoeClient.forward`, tensors in the message
    shared    the same with hidden states already in the lane's shared memory, and the answer written there
    pass      a step of a standing pass of a device lane in host memory, rows and answer where they lie
    lane      as shared, by a client whose calls go over a device lane (LaneClient)
    step      the very same `Rank.step` in as many other processes, back to back: no coordinator, lane or gRPC
    spaced    the same a millisecond after the last one, about as far apart as the service's steps are: a
              small step is slower then
    copy      the two copies that a caller needs whose tensors do not live in shared memory

hop p50 = p50 of the calls - p50 of the step; hop p99 = p99 of the calls - p50 of the step. Beside it stands
the step's mean as rank 0 reports it while it serves. Times are milliseconds. Client and echo keep freed
memory, as ranks do (`moeserve.proto.heap`). A turn counts only where the machine is idle before and after it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch

from bench.lib.checkpoint import Qwen3Moe, write_checkpoint
from bench.lib.quiet import rounds
from bench.lib.record import Result, write
from bench.service.hop_step import BareStep
from bench.service.hops.echo_server import METHOD, OPTIONS
from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.heap import keep_freed_memory
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.tensors import as_torch

BLOCK = 10  # calls of one kind in a row
WARM_UP_BLOCKS = 4
PAUSE_SECONDS = 0.001
SERVE = "-m moeserve serve --launcher local --device cpu --port 0 --metrics-port 0 --enable-expert-parallel"
PHASE_SUMS = re.compile(
    r'moe_step_phase_duration_seconds_(sum|count)\{.*phase="(?:dispatch|compute|combine)".*\} (\S+)'
)


@dataclass(frozen=True)
class Setting:
    """What is served, and what a call brings."""

    rows: int
    hidden: int
    ranks: int = 2
    experts: int = 4
    inner: int = 32
    top_k: int = 2

    @property
    def shape(self) -> tuple[int, int]:
        """Of the hidden states."""
        return self.rows, self.hidden

    def __str__(self) -> str:
        size = f"{self.rows} tokens x {self.hidden} bf16"
        return size if self.ranks == 2 else f"one rank, {size}"


SETTINGS = (
    Setting(8, 2048),
    Setting(256, 7168),
    Setting(8, 2048, ranks=1, experts=2, inner=8, top_k=1),
    Setting(256, 7168, ranks=1, experts=2, inner=8, top_k=1),
)


@dataclass(frozen=True)
class Case:
    """One setting, and the seconds of every call by kind."""

    setting: Setting
    seconds: dict[str, list[float]]
    reported: float  # the step's mean seconds, as rank 0 reports it

    def p(self, kind: str, percent: float) -> float:
        """A percentile of the calls, in milliseconds."""
        return float(np.percentile(self.seconds[kind], percent)) * 1e3

    def hop(self, kind: str, percent: float) -> float:
        """Returns the seconds less the median step."""
        return self.p(kind, percent) - self.p("step", 50)


AIMS: dict[str, tuple[str, Callable[[Case], float]]] = {
    "inline": ("at most 3 x echo", lambda case: 3 * case.p("echo", 50)),
    "shared": ("at most 1 ms", lambda case: 1.0),
    "pass": ("at most 1 ms", lambda case: 1.0),
    "lane": ("at most 1 ms", lambda case: 1.0),
}
"""What the median hop of a kind is to be: in words, and in milliseconds."""


class Child:
    """A process that says where it can be reached, once it is up; ended with its context."""

    def __init__(self, command: list[str], *patterns: str) -> None:
        """`patterns` are looked for in its lines, one after the other; `said` holds what each found."""
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said = [self._find(pattern) for pattern in patterns]

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _find(self, pattern: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.match(pattern, line):
                return found[1]
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()} before it was up")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *ended: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def make_checkpoint(path: Path, setting: Setting) -> None:
    """One Qwen3-MoE layer with random experts in bfloat16."""
    random = torch.Generator().manual_seed(0)
    model = Qwen3Moe(setting.hidden, setting.inner, setting.experts, setting.top_k, layers=1)
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in model.matrices()}
    path.mkdir()
    write_checkpoint(path, model.config(), tensors)


def measure(setting: Setting, args: argparse.Namespace, folder: Path) -> Case:
    """Starts service, echo and bare ranks for one setting, and times them by turns."""
    checkpoint = folder / str(setting).replace(" ", "-")
    make_checkpoint(checkpoint, setting)
    serve = [sys.executable, *SERVE.split(), "--data-parallel-size", str(setting.ranks)]
    serve += ["--checkpoint", str(checkpoint)]
    echo = [sys.executable, "-m", "bench.service.hops.echo_server"]
    with ExitStack() as stack:
        service = stack.enter_context(Child(serve, r"metrics on \S+ (\S+)", r"serving on (\S+)"))
        port = stack.enter_context(Child(echo, r"(\d+)")).said[0]
        bare = BareStep(checkpoint, setting.rows, setting.ranks)
        stack.callback(bare.close)
        client = stack.enter_context(MoeClient(service.said[1], lane=0, transport="inline"))
        kinds = kinds_of(client, f"127.0.0.1:{port}", setting, stack)
        for call in kinds.values():
            timed(call, WARM_UP_BLOCKS * BLOCK)
        bare.run(WARM_UP_BLOCKS * BLOCK, 0.0)
        before = reported(service.said[0])
        seconds: dict[str, list[float]] = {kind: [] for kind in (*kinds, "step", "spaced")}
        for turn in rounds(lambda: one_turn(kinds, bare), -(-args.calls // BLOCK), args.patience):
            for kind, found in turn.items():
                seconds[kind] += found
        took, steps = (after - start for after, start in zip(reported(service.said[0]), before, strict=True))
        return Case(setting, seconds, took / steps)


def one_turn(kinds: dict[str, Callable[[], object]], bare: BareStep) -> dict[str, list[float]]:
    """Seconds of a block of calls of each kind."""
    found = {kind: timed(call, BLOCK) for kind, call in kinds.items()}
    found["step"] = bare.run(BLOCK, 0.0)
    found["spaced"] = bare.run(BLOCK, PAUSE_SECONDS)
    return found


def kinds_of(
    client: MoeClient, echo: str, setting: Setting, stack: ExitStack
) -> dict[str, Callable[[], object]]:
    """What is timed in this process, by name."""
    random, (rows, hidden), top_k = torch.Generator().manual_seed(0), setting.shape, setting.top_k
    x = torch.randn(rows, hidden, generator=random).bfloat16()
    experts = torch.rand(rows, setting.experts, generator=random).argsort(dim=1)[:, :top_k].int().contiguous()
    weights = torch.full((rows, top_k), 1 / top_k)
    body = bytes(x.nbytes + experts.nbytes + weights.nbytes)
    bounce = grpc.insecure_channel(echo, options=OPTIONS).unary_unary(METHOD)
    placed, answer = client.allocate(0, (rows, hidden)), client.allocate(0, (rows, hidden))
    inside, outside = placed.tensor, torch.empty_like(x)
    inside.copy_(x)
    client.forward(0, placed, experts, weights, output=answer)
    if not torch.equal(answer.tensor, client.forward(0, x, experts, weights)):
        raise RuntimeError("the answer in shared memory is another than the inline one")
    lane = stack.enter_context(AttachedLane.attach(client.address, Wanted("hop", rows=rows)))
    run = stack.enter_context(lane.begin([0], standing=True))  # of one step, so that it may rest behind each
    run.post(0, x, Choice(experts, weights))
    told = run.arrived(0)
    if not torch.equal(as_torch(told.storage, told.spec), answer.tensor):
        raise RuntimeError("the answer of a pass is another than the call's")

    by_lanes = stack.enter_context(LaneClient(client.address))
    there, home = by_lanes.place(0, rows)
    there.tensor.copy_(x)
    by_lanes.forward(0, there, experts, weights, output=home)
    if not torch.equal(home.tensor, answer.tensor):
        raise RuntimeError("the answer over a lane is another than the call's")

    def step_of_pass() -> None:
        run.send(0, rows)
        run.arrived(0)

    return {
        "echo": lambda: bounce(body),
        "inline": lambda: client.forward(0, x, experts, weights),
        "shared": lambda: client.forward(0, placed, experts, weights, output=answer),
        "pass": step_of_pass,
        "lane": lambda: by_lanes.forward(0, there, experts, weights, output=home),
        "copy": lambda: (inside.copy_(x), outside.copy_(answer.tensor)),
    }


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of `calls` calls."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def reported(exporter: str) -> tuple[float, float]:
    """Seconds and number of the steps that a rank has run, by its metrics."""
    with urllib.request.urlopen(f"http://{exporter}/metrics", timeout=10) as answer:
        found = PHASE_SUMS.findall(answer.read().decode())
    return sum(float(v) for name, v in found if name == "sum"), max(
        float(v) for n, v in found if n == "count"
    )


def table(case: Case) -> str:
    """One case for people."""
    lines = [
        f"{case.setting}; a step took {case.p('step', 50):.2f} ms, {case.reported * 1e3:.2f} while serving",
        "          call p50     p99    hop p50     p99   hop / echo",
    ]
    for kind in case.seconds:
        line = f"  {kind:<8}{case.p(kind, 50):8.2f}{case.p(kind, 99):8.2f}"
        if kind in AIMS:
            ratio = case.hop(kind, 50) / case.p("echo", 50)
            line += f"   {case.hop(kind, 50):8.2f}{case.hop(kind, 99):8.2f}     {ratio:8.2f}"
            line += f"   aim: {AIMS[kind][0]}"
        lines.append(line)
    return "\n".join(lines)


def results(case: Case) -> list[Result]:
    """One case's hops for the record."""
    size, found = str(case.setting), list[Result]()
    for kind, (_, bound) in AIMS.items():
        for percent in (50, 99):
            peers = {f"echo p{percent}": case.p("echo", percent), f"call p{percent}": case.p(kind, percent)}
            peers |= {"step p50": case.p("step", 50), "spaced step p50": case.p("spaced", 50)}
            peers |= {"step mean while serving": case.reported * 1e3}
            if kind == "shared":
                peers |= {f"copy in and out p{percent}": case.p("copy", percent)}
            rounded = {name: round(value, 3) for name, value in peers.items()}
            hop = round(case.hop(kind, percent), 3)
            case_name = f"{kind}, {size}, p{percent}"
            aim = round(bound(case), 3) if percent == 50 else None
            found.append(Result("hop", case_name, hop, "ms", "lower", aim, rounded))
    return found


def main() -> None:
    """Measures every case, prints it and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=400, help="of each kind and case; 400 by default")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds to wait for a quiet machine, for each"
    )
    parser.add_argument("--dry", action="store_true", help="print only, leave the record as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for setting in SETTINGS:
            cases.append(measure(setting, args, Path(folder)))
            print(table(cases[-1]), flush=True)
    if not args.dry:
        write([result for case in cases for result in results(case)])


if __name__ == "__main__":
    main()
