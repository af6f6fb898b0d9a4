"""The experts of one rank on one GPU: a whole MLP, from hidden states, ids and weights to the weighted sum.

Each kind of experts runs on the kernel that a plan takes here; the same rows and ids go to all kinds and,
with `--peers`, to other systems' kernels that are importable (gpu_peers.py). Medians of a CUDA graph's
replays behind a flush of the L2 cache. `--workers` compiles everything first, in processes of their own.
usage: python bench/gpu_experts.py [--model deepseek-v3] [--kinds nvfp4,fp8] [--tokens 1,512] [--peers]
       [--workers 14] [--only-compile] [--tune FILE]
Results go to bench/results/gpu_experts.jsonl, those of other models than DeepSeek-V3 to gpu_models.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from math import inf
from multiprocessing import get_context
from pathlib import Path

import gpu_peers
import gpu_rows
import record
import torch
import triton
from gpu_models import MODELS, SCHEMES, Held, Inputs
from torch import Tensor

from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.kernel import Kernel, KernelRow, KernelSpec, Problem
from moeserve.experts.kernels import KERNELS, hopper
from moeserve.experts.kernels.tiles import Tile
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.machine import this_machine
from moeserve.quant.formats import BF16

TABLE = record.ROOT / "moeserve" / "experts" / "kernels" / "tiles" / "h200.json"
AIMED_AT = "deepseek-v3"
AIMS = {
    "nvfp4": {1: 45, 32: 290, 128: 430, 512: 450, 16384: 4700},
    "mxfp4": {512: 450, 16384: 4700},
    "nvfp4_fp8": {16384: 3200},
    "mxfp4_fp8": {16384: 3200},
    "fp8": {1: 45, 32: 425, 128: 690, 512: 700, 16384: 2850},
    "bf16": {1: 45, 512: 1320, 16384: 4500},
}
"""Microseconds of the whole, by kind and tokens."""

SAME = 5e-2
"""Most that a peer's answer may be from ours, relative; else it computes something else and is left out."""


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Microseconds of each call, replayed as a CUDA graph behind a flush of the L2 cache."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    found = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times = []
        for _ in range(repeats):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        found[name] = sorted(a.elapsed_time(b) for a, b in times[3:])[(repeats - 3) // 2] * 1e3
    return found


def row_for(held: Held, kind: str) -> KernelRow:
    """The kernel that a plan takes for `kind` on this machine."""
    problem = Problem(SCHEMES[kind], BF16, held.shape, held.experts, 1, held.top_k, lane_rows=4096)
    machine = this_machine()
    able = (row for row in KERNELS.values() if not row.reference and row.refuses(problem, machine) is None)
    return next(able)


class Experts:
    """One kind's kernel with its weights in a bank."""

    def __init__(self, held: Held, kind: str) -> None:
        self.held, self.scheme, self.row = held, SCHEMES[kind], row_for(held, kind)
        self.kernel: Kernel = self.row.build(KernelSpec(self.scheme, held.shape, torch.bfloat16))
        self.weights = held.weights(kind)
        self.bank = Bank()
        self.bank.load(0, self.kernel, self.weights, range(held.experts))

    def group(self, inputs: Inputs) -> tuple[ExpertBatch, Tensor]:
        wire = self.scheme.activations if self.scheme.activations in self.row.eats else BF16
        return gpu_rows.group(inputs.hidden, inputs.ids, self.held.experts, wire)

    def run(self, inputs: Inputs) -> Tensor:
        batch, places = self.group(inputs)
        return gpu_rows.home(self.kernel.apply(self.bank[0], batch), places, inputs.weights)

    def error(self, inputs: Inputs) -> float:
        """RMS error of the rows against the reference, relative to its RMS."""
        batch, _ = self.group(inputs)
        reference = TorchReference(KernelSpec(self.scheme, self.held.shape, torch.float32))
        wanted = reference.apply(reference.prepare(self.weights), batch)
        return apart(self.kernel.apply(self.bank[0], batch), wanted)


def apart(found: Tensor, wanted: Tensor) -> float:
    """RMS of the difference over that of `wanted`."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


MOST_ROWS = {"1": 0.5, "32": 6, "512": 24, "2048": 96, "16384": None}
"""Tokens a tile is tuned with -> the most rows a slot it then serves."""


def tune(held: Held, arguments: argparse.Namespace) -> None:
    """Times the kernel alone with each tile of the file and writes the fastest into the shipped table."""
    best: dict[str, list[object]] = {}
    for kind, cases in json.loads(Path(arguments.tune).read_text()).items():
        experts = None
        torch.cuda.empty_cache()
        experts = Experts(held, kind)
        rows = best.setdefault("fp4" if kind == "nvfp4" else kind, [])
        for tokens, tiles in cases.items():
            batch, _ = experts.group(held.inputs(int(tokens)))
            times = {tuple(numbers): timed(experts, batch, numbers, arguments.repeats) for numbers in tiles}
            for numbers, time in sorted(times.items(), key=lambda case: case[1]):
                print(f"{kind} {tokens} {list(numbers)}: {time:.1f} us", flush=True)
            rows.append([MOST_ROWS[tokens], min(times, key=lambda numbers: times[numbers])])
    table = {"device": torch.cuda.get_device_name(), "columns": [f.name for f in fields(Tile)], "tiles": best}
    TABLE.write_text(json.dumps(table) + "\n")


def timed(experts: Experts, batch: ExpertBatch, numbers: list[int], repeats: int) -> float:
    """Microseconds of the kernel with one tile; infinite where it does not fit or computes something else."""
    wanted = experts.kernel.apply(experts.bank[0], batch).float()
    shipped, hopper.tile_for = hopper.tile_for, lambda *_: Tile(*numbers)
    try:
        found = experts.kernel.apply(experts.bank[0], batch).float()
        if not float((found - wanted).norm()) <= 1e-3 * float(wanted.norm()):
            print(f"{numbers}: wrong", flush=True)
            return inf
        return medians({"": lambda: experts.kernel.apply(experts.bank[0], batch)}, repeats)[""]
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as refused:
        print(f"{numbers}: {str(refused)[-120:]!r}", flush=True)
        return inf
    finally:
        hopper.tile_for = shipped


Task = tuple[str, str, str]
"""Model, kind, and what is compiled: `ours`, or the name of a peer."""


def compiled(task: Task, tokens: tuple[int, ...]) -> str:
    """Runs one task's kernels once for each size, so that compilers' caches hold them; what was raised."""
    model, kind, what = task
    held = MODELS[model]
    try:
        if what == "ours":
            experts = Experts(held, kind)
            for number in tokens:
                experts.run(held.inputs(number))
        else:
            made = gpu_peers.peers_for(held, kind)[what](held, held.weights(kind))
            for number in tokens:
                made(held.inputs(number))()
        torch.cuda.synchronize()
    except Exception as raised:  # the run goes on: a peer may not be complete here
        return f"{type(raised).__name__}: {str(raised)[:300]!r}"
    finally:
        torch.cuda.empty_cache()
    return ""


def compile_all(cases: Iterable[tuple[Held, str, tuple[int, ...]]], arguments: argparse.Namespace) -> None:
    """`compiled` for all of it in processes of their own, and a line for what failed."""
    tasks: list[tuple[Task, tuple[int, ...]]] = []
    for held, kind, tokens in cases:
        names = list(gpu_peers.peers_for(held, kind)) if arguments.peers else []
        for what in ["ours", *names]:
            sizes = tuple(t for t in tokens if t >= gpu_peers.FROM_TOKENS.get(what, 0))
            apiece = [(t,) for t in sizes] if what == gpu_peers.GEMMS_ONLY else [sizes]  # it compiles long
            tasks += [((held.name, kind, what), some) for some in apiece]
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for (task, tokens), raised in zip(tasks, pool.map(compiled, *zip(*tasks, strict=True)), strict=True):
            if raised:
                print(f"{' '.join(task)} at {tokens}: {raised}", flush=True)


def measure(
    held: Held, kind: str, tokens: tuple[int, ...], arguments: argparse.Namespace
) -> list[record.Result]:
    """Prints a line a size and a peer; what is to be recorded."""
    experts, results = Experts(held, kind), []
    name = f"{held.name} {kind} on {experts.row.name}"
    print(f"{name}: error against the reference {experts.error(held.inputs(32)):.2e}", flush=True)
    peers = made_peers(held, kind, experts) if arguments.peers else {}
    for number in tokens:
        inputs = held.inputs(number)
        batch, _ = experts.group(inputs)
        times = medians(
            {
                "whole": lambda i=inputs: experts.run(i),
                "kernel": lambda b=batch: experts.kernel.apply(experts.bank[0], b),
            },
            arguments.repeats,
        )
        timed_here = {p: m for p, m in peers.items() if number >= gpu_peers.FROM_TOKENS.get(p, 0)}
        found = {peer: peer_time(made, experts, inputs, arguments) for peer, made in timed_here.items()}
        beside = {peer: time for peer, time in found.items() if time is not None}
        active = inputs.ids.unique().numel()
        nbytes, pairs = experts.bank.nbytes * active / held.experts, inputs.ids.numel()
        flops = 2 * pairs * held.shape.hidden * (held.shape.gate_up_rows + held.shape.inner)
        print(
            f"{name} {number:6d} tokens, {active:3d} active: {times['whole']:8.1f} us, "
            f"kernel alone {times['kernel']:8.1f} us, {nbytes / times['whole'] / 1e6:5.2f} TB/s, "
            f"{flops / times['whole'] / 1e6:7.1f} TFLOP/s; "
            + ", ".join(f"{peer} {time:.1f} ({times['whole'] / time:.2f}x)" for peer, time in beside.items()),
            flush=True,
        )
        results += lines(held, kind, (number, inputs.ids.shape[1], active), times, beside)
    return results


def made_peers(held: Held, kind: str, experts: Experts) -> dict[str, gpu_peers.Made]:
    """The importable peers with the same weights; one that cannot be made is said and left out."""
    made = {}
    for name, make in gpu_peers.peers_for(held, kind).items():
        try:
            made[name] = make(held, experts.weights)
        except Exception as raised:  # of a library that is not ours
            print(f"{held.name} {kind}: {name} is left out: {type(raised).__name__}: {str(raised)[:200]!r}")
    return made


def peer_time(
    made: gpu_peers.Made, experts: Experts, inputs: Inputs, arguments: argparse.Namespace
) -> float | None:
    """Microseconds of a peer; None where it fails, or answers something else than we do."""
    try:
        call = made(inputs)
        answer = call()
        if answer is not None and not (off := apart(answer, experts.run(inputs))) <= SAME:
            print(f"a peer's answer is {off:.2f} from ours: left out", flush=True)
            return None
        return round(medians({"": call}, arguments.repeats)[""], 1)
    except Exception as raised:  # of a library that is not ours
        print(f"a peer is left out: {type(raised).__name__}: {str(raised)[:200]!r}", flush=True)
        return None


def lines(
    held: Held, kind: str, size: tuple[int, int, int], times: dict[str, float], peers: dict[str, float]
) -> list[record.Result]:
    """A result for the whole, with its peers and its aim, and one for the kernel alone."""
    tokens, top_k, active = size
    first = held.name == AIMED_AT
    aim = AIMS[kind].get(tokens) if first else None
    bench, before = ("gpu_experts", "") if first else ("gpu_models", f"{held.name}: ")
    case = f"{before}{kind}, {tokens} tokens x {top_k}, {active} of {held.experts} experts active"
    return [
        record.Result(
            bench,
            f"{case}, {part}",
            round(value, 1),
            "us",
            "lower",
            float(aim) if aim and part == "whole" else None,
            peers if part == "whole" else {},
        )
        for part, value in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=AIMED_AT, help=f"of {', '.join(MODELS)}, by commas; or all, or others"
    )
    parser.add_argument("--kinds", default="", help=f"of {', '.join(SCHEMES)}; those of the model")
    parser.add_argument("--tokens", default="", help="of all ranks, by commas; those of the model")
    parser.add_argument("--repeats", type=int, default=33)
    parser.add_argument("--peers", action="store_true", help="time other systems' kernels beside ours")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that compile before anything is timed"
    )
    parser.add_argument("--only-compile", action="store_true", help="and time nothing")
    parser.add_argument("--tune", default="", help="file of tiles to try: kind -> {tokens: [tile]}")
    arguments = parser.parse_args()
    groups = {"all": list(MODELS), "others": [name for name in MODELS if name != AIMED_AT]}
    models = [MODELS[name] for name in groups.get(arguments.model, arguments.model.split(","))]
    if arguments.tune:
        tune(models[0], arguments)
        return
    asked = [kind for kind in arguments.kinds.split(",") if kind]
    sizes = tuple(int(number) for number in arguments.tokens.split(",") if number)
    cases = [
        (held, kind, sizes or held.tokens)
        for held in models
        for kind in held.kinds
        if not asked or kind in asked
    ]
    if arguments.workers:
        compile_all(cases, arguments)
    for held, kind, tokens in [] if arguments.only_compile else cases:
        record.write(measure(held, kind, tokens, arguments))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
