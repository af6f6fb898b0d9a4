"""The experts of one rank on one GPU: a whole MLP, from hidden states, ids and weights to the weighted sum.

Each kind of experts runs on the kernel that a plan takes here; the same rows and ids go to all kinds and,
with `--peers`, to other systems' kernels that are importable (gpu_peers.py). Medians of a CUDA graph's
replays behind a flush of the L2 cache. `--workers` compiles everything first, in processes of their own;
what is timed runs in one process, which is made anew when a kernel hangs or breaks it.
usage: python -m bench.experts.gpu_experts [--model deepseek-v3] [--kinds nvfp4,fp8] [--tokens 1,512]
       [--peers] [--workers 14] [--only-compile] [--seconds 150] [--tune FILE]
Results go to bench/results/gpu_experts.jsonl, those of other models than DeepSeek-V3 to gpu_models.jsonl,
size by size. The aim of other models is 1.05 of the fastest peer that computes the whole.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf
from pathlib import Path

import torch
import triton
from torch import Tensor

from bench.experts import gpu_peers, gpu_rows
from bench.experts.gpu_models import MODELS, SCHEMES, Held, Inputs
from bench.lib import record
from bench.lib.gpu_worker import Failed, Worker, on_workers, said, share
from moeserve.device.machine import this_machine
from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertBatch
from moeserve.experts.kernel import Kernel, KernelSpec, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.support import hopper
from moeserve.experts.kernels.tiles import Tile
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.spans import KernelSpans
from moeserve.quant.formats import BF16
from moeserve.runtime.planning.plan import kernels_that_serve
from moeserve.runtime.sections import AUTO

TABLE = record.ROOT / "moeserve" / "experts" / "kernels" / "tiles" / "h200.json"
AIMED_AT = "deepseek-v3"
AIMS = {
    "nvfp4": {1: 45, 32: 290, 128: 430, 512: 450, 16384: 4700},
    "mxfp4": {512: 450, 16384: 4700},
    "nvfp4_fp8": {16384: 3200},
    "mxfp4_fp8": {16384: 3200},
    "nvfp4_e4m3_fp8": {16384: 3200},
    "fp8": {1: 45, 32: 425, 128: 690, 512: 700, 16384: 2850},
    "bf16": {1: 45, 512: 1320, 16384: 4500},
}
"""Microseconds of the whole, by kind and tokens."""

BEHIND = 1.05
"""Most that another model's time may be of its fastest whole peer's."""

SAME = 5e-2
"""Most that a peer's answer may be from ours, relative; else it computes something else and is left out."""

COMPILING = 0.6
"""The part of the time that compiling may take."""

STALLED = 40.0
"""Seconds that one size of one kind may take before its process is given up."""


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


def kernels_for(held: Held, kind: str, named: str = AUTO) -> KernelSpans:
    """The kernels that a plan takes for `kind` on this machine. Raises LookupError where there is none."""
    problem = Problem(SCHEMES[kind], BF16, held.shape, held.experts, 1, 1, held.top_k, lane_rows=16384)
    machine = this_machine()
    able, _ = kernels_that_serve(problem, machine, KERNELS, named)
    if not able or able[0].reference:
        raise LookupError(f"no kernel computes {SCHEMES[kind]} on {machine.name}")
    return able[0]


class Experts:
    """One kind's kernels with their weights in a bank."""

    def __init__(self, held: Held, kind: str, named: str = AUTO) -> None:
        self.held, self.scheme, self.entry = held, SCHEMES[kind], kernels_for(held, kind, named)
        self.kernel: Kernel = self.entry.build(KernelSpec(self.scheme, held.shape, torch.bfloat16))
        self.weights = held.weights(kind)
        self.bank = Bank()
        self.bank.load(0, self.kernel, self.weights, range(held.experts))

    def group(self, inputs: Inputs) -> tuple[ExpertBatch, Tensor]:
        wire = self.scheme.activations if self.scheme.activations in self.entry.eats else BF16
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


TILED = {"nvfp4": "triton_fp4", "fp8": "triton_fp8", "bf16": "triton_bf16"}
"""Kernels that read the table of tiles, by kind."""

MOST_ROWS = {"1": 0.5, "32": 6, "512": 24, "2048": 96, "16384": None}
"""Tokens a tile is tuned with -> the most rows a slot it then serves."""


def tune(held: Held, arguments: argparse.Namespace) -> None:
    """Times the kernel alone with each tile of the file and writes the fastest into the shipped table."""
    best: dict[str, list[object]] = {}
    for kind, cases in json.loads(Path(arguments.tune).read_text()).items():
        experts = None
        torch.cuda.empty_cache()
        experts = Experts(held, kind, TILED[kind])
        rows = best.setdefault("fp4" if kind == "nvfp4" else kind, [])
        for tokens, tiles in cases.items():
            batch, _ = experts.group(held.inputs(int(tokens)))
            times = {tuple(numbers): timed(experts, batch, numbers, arguments.repeats) for numbers in tiles}
            for numbers, found in sorted(times.items(), key=lambda case: case[1]):
                print(f"{kind} {tokens} {list(numbers)}: {found:.1f} us", flush=True)
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


@dataclass(frozen=True)
class Case:
    """One kind of experts of one model, and the sizes of its steps."""

    model: str
    kind: str
    tokens: tuple[int, ...]

    @property
    def held(self) -> Held:
        return MODELS[self.model]

    def __str__(self) -> str:
        return f"{self.model} {self.kind} at {','.join(map(str, self.tokens))}"


OURS = "ours"


def compiled(case: Case, what: str) -> None:
    """Runs ours, or one peer, once for each size, so that compilers' caches hold what it needs."""
    if what == OURS:
        experts = Experts(case.held, case.kind)
        for number in case.tokens:
            experts.run(case.held.inputs(number))
    else:
        made = gpu_peers.PEERS[case.kind][what].make(case.held, case.held.weights(case.kind))
        for number in case.tokens:
            made(case.held.inputs(number))()
    torch.cuda.synchronize()


def compile_tasks(case: Case, with_peers: bool) -> list[tuple[Case, str]]:
    """What to compile for a case; the sizes of a library that compiles each of them long are tasks apart."""
    tasks = [(case, OURS)]
    for name, peer in gpu_peers.peers_for(case.held, case.kind).items() if with_peers else ():
        sizes = tuple(t for t in case.tokens if t >= peer.least)
        apiece = [(t,) for t in sizes] if "deep_gemm" in peer.needs else [sizes]
        tasks += [(Case(case.model, case.kind, some), name) for some in apiece if some]
    return tasks


def measure_all(
    cases: Sequence[Case], worker: Worker, arguments: argparse.Namespace, deadline: float
) -> None:
    """`measured` for every size; where peers hang or break the process, that and what follows is without."""
    for case in cases:
        peers = arguments.peers
        if peers and (names := gpu_peers.missing(case.held, case.kind)):
            print(f"{case.model} {case.kind}: not importable here: {', '.join(names)}", flush=True)
        for number in case.tokens:
            done, tries = False, 1 + peers
            while not done and tries and (left := deadline - time.monotonic()) > 0:
                try:
                    worker.run(min(left, STALLED), measured, case, number, peers, arguments.repeats)
                    done = True
                except Failed as failed:
                    print(f"{case.model} {case.kind}, {number} tokens, peers={peers}: {failed}", flush=True)
                    peers, tries = False, tries - 1
            if not done and tries:
                print(f"{case.model} {case.kind}, {number} tokens: no time was left", flush=True)


@lru_cache(maxsize=1)
def side(case: Case, with_peers: bool) -> tuple[Experts, dict[str, gpu_peers.Made]]:
    """Ours and the peers with their weights on the GPU; says how far ours is from the reference."""
    held, experts = case.held, Experts(case.held, case.kind)
    error = experts.error(held.inputs(32))
    print(f"{case.model} {case.kind} on {experts.entry.name}: error {error:.2e}", flush=True)
    made = {}
    for name, peer in gpu_peers.peers_for(held, case.kind).items() if with_peers else ():
        try:
            made[name] = peer.make(held, experts.weights)
        except Exception as raised:  # of a library that is not ours
            print(f"{case}: {name} cannot be made: {said(raised)}", flush=True)
    return experts, made


def measured(case: Case, number: int, with_peers: bool, repeats: int) -> None:
    """Times one size of one kind, prints a line and records it."""
    experts, made = side(case, with_peers)
    inputs = case.held.inputs(number)
    batch, _ = experts.group(inputs)
    calls = {
        "whole": lambda: experts.run(inputs),
        "kernel": lambda: experts.kernel.apply(experts.bank[0], batch),
    }
    times = medians(calls, repeats)
    beside = {}
    for name, peer in made.items():
        if number >= gpu_peers.PEERS[case.kind][name].least:
            found = peer_time(f"{case.model} {case.kind} {number}: {name}", peer, experts, inputs, repeats)
            beside |= {} if found is None else {name: found}
    print(line(case, inputs, experts, times, beside), flush=True)
    record.write(results(case, inputs, times, beside))


def peer_time(
    name: str, made: gpu_peers.Made, experts: Experts, inputs: Inputs, repeats: int
) -> float | None:
    """Microseconds of a peer; None where it fails, or answers something else than we do.

    Raises what it raised if the GPU's context broke with it.
    """
    try:
        call = made(inputs)
        answer = call()
        off = 0.0 if answer is None else apart(answer, experts.run(inputs))
        if not off <= SAME:
            print(f"{name} is left out, its answer is {off:.2f} from ours", flush=True)
            return None
        found = medians({"": call}, repeats)[""]
        print(f"{name} {found:.1f} us" + ("" if answer is None else f", {off:.1e} from ours"), flush=True)
        return round(found, 1)
    except Exception as raised:  # of a library that is not ours
        print(f"{name} is left out: {said(raised)}", flush=True)
        torch.cuda.synchronize()
        return None


def line(
    case: Case, inputs: Inputs, experts: Experts, times: dict[str, float], beside: dict[str, float]
) -> str:
    """What was measured, for people."""
    held, active, pairs = case.held, inputs.ids.unique().numel(), inputs.ids.numel()
    nbytes = experts.bank.nbytes * active / held.experts
    flops = 2 * pairs * held.shape.hidden * (held.shape.gate_up_rows + held.shape.inner)
    peers = ", ".join(f"{name} {other:.1f} ({times['whole'] / other:.2f}x)" for name, other in beside.items())
    return (
        f"{case.model} {case.kind} on {experts.entry.name} {len(inputs.hidden):6d} rows, {active:3d} active: "
        f"{times['whole']:8.1f} us, kernel alone {times['kernel']:8.1f} us, "
        f"{nbytes / times['whole'] / 1e6:5.2f} TB/s, {flops / times['whole'] / 1e6:7.1f} TFLOP/s; {peers}"
    )


def results(
    case: Case, inputs: Inputs, times: dict[str, float], beside: dict[str, float]
) -> list[record.Result]:
    """A result for the whole, with its peers and its aim; for the first model one for the kernel alone."""
    held, first = case.held, case.model == AIMED_AT
    (rows, top_k), active = inputs.ids.shape, inputs.ids.unique().numel()
    bench, before = ("gpu_experts", "") if first else ("gpu_models", f"{case.model}: ")
    name = f"{before}{case.kind}, {rows} tokens x {top_k}, {active} of {held.experts} experts active"
    aim = AIMS[case.kind].get(rows) if first else fastest(case.kind, beside)
    whole = record.Result(bench, f"{name}, whole", round(times["whole"], 1), "us", "lower", aim, beside)
    kernel = record.Result(bench, f"{name}, kernel", round(times["kernel"], 1), "us", "lower")
    return [whole, kernel] if first else [whole]


def fastest(kind: str, beside: dict[str, float]) -> float | None:
    """`BEHIND` of the fastest peer that computes the whole, in microseconds; None where there is none."""
    whole = [found for name, found in beside.items() if gpu_peers.PEERS[kind][name].whole]
    return round(BEHIND * min(whole), 1) if whole else None


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
    parser.add_argument("--seconds", type=float, default=900, help="no size is begun after so long")
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
        Case(held.name, kind, sizes or held.tokens)
        for held in models
        for kind in held.kinds
        if not asked or kind in asked
    ]
    start = time.monotonic()
    deadline = start + arguments.seconds
    compiling = start + COMPILING * arguments.seconds
    share("triton", "bench.experts.gpu_peers", *(["bench.experts.gpu_shared"] if arguments.peers else []))
    print(f"imported in {time.monotonic() - start:.0f} s", flush=True)
    tasks = [task for case in cases for task in compile_tasks(case, arguments.peers)]
    tasks.sort(key=lambda task: not any(slow in task[1] for slow in ("Marlin", "DeepGEMM")))  # to compile
    worker = on_workers(compiled, tasks, arguments.workers, compiling) if arguments.workers else Worker()
    print(
        f"{len(tasks) if arguments.workers else 0} compiled in {time.monotonic() - start:.0f} s", flush=True
    )
    if not arguments.only_compile:
        measure_all(cases, worker, arguments, deadline)
    worker.close()


if __name__ == "__main__":
    main()
