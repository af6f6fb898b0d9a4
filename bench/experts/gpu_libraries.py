"""Kernels of libraries beside our own on one GPU: both GEMMs and the activation, medians.

64 experts of 7168 x 2048 with so many bf16 rows each, a CUDA graph, L2 flushed between replays. Entries
whose package is not importable are left out; a library's first call may compile for a while, so
`--workers` runs everything once before, in processes of their own.
usage: python -m bench.experts.gpu_libraries [--rows 16,512] [--padded 512] [--only "mxfp4 x bf16"]
       [--workers 14] [--seconds 120] [--record]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from bench.lib import record
from bench.lib.gpu_worker import Failed, Worker, on_workers, share
from moeserve.device.machine import this_machine
from moeserve.device.nvrtc import NEEDED_MODULE
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelSpec, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats import BF16
from moeserve.quant.schemes import scheme_named
from moeserve.runtime.planning.plan import kernels_that_serve

EXPERTS, SHAPE = 64, ExpertShape(7168, 2048, Activation("silu"))
LIBRARIES = {
    "fp8_block128 x fp8_group128": ("deep_gemm", "flashinfer_cutlass"),
    "bf16": ("torch_grouped_mm", "deep_gemm", "flashinfer_cutlass"),
    "mxfp4 x bf16": ("triton_kernels", "flashinfer_cutlass"),
    "fp8_channel x fp8_token": ("torch_scaled_grouped_mm",),
}
"""By scheme, the entries of libraries that ours is compared with."""
OURS = frozenset({"triton", NEEDED_MODULE})
"""Packages that our own kernels are compiled by."""
FLUSHED = 256 << 20


def matrix(form: Format, n: int, k: int) -> Packed:
    """Random weights `[EXPERTS, n, k]`, made expert by expert."""
    whole = form.empty((EXPERTS, n, k), "cuda")
    for e in range(EXPERTS):
        one = form.quantize(torch.randn(1, n, k, device="cuda") * 2 / k**0.5)
        for into, part in zip(whole.parts, one.parts, strict=True):
            into[e].view(torch.uint8).copy_(part[0].view(torch.uint8))
    return whole


def batch_of(rows: Tensor, segment: int, grouping: Grouping) -> ExpertBatch:
    """`rows [EXPERTS, n, H]` at the start of segments of so many rows."""
    count, hidden = rows.shape[1:]
    tokens = torch.zeros(EXPERTS, segment, hidden, dtype=torch.bfloat16, device="cuda")
    tokens[:, :count] = rows
    tokens = tokens if grouping is Grouping.PADDED else tokens.view(-1, hidden)
    offsets = torch.arange(EXPERTS + 1, dtype=torch.int32, device="cuda") * segment
    counts = torch.full((EXPERTS,), count, dtype=torch.int32, device="cuda")
    return ExpertBatch(Packed(BF16, tokens.shape, (tokens,)), grouping, counts, offsets)


def median(call: Callable[[], Tensor], replays: int = 25) -> float:
    """Microseconds of one replay of `call` in a CUDA graph."""
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call()
    for _ in range(replays):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[replays // 2]


@lru_cache(maxsize=1)
def weights_of(name: str) -> ExpertWeights:
    """Random experts of a scheme."""
    form = scheme_named(name).weights
    return ExpertWeights(matrix(form, 4096, 7168), matrix(form, 7168, 2048))


def problem_of(name: str, count: int) -> Problem:
    """A layer whose only rank gets `count` rows in each slot, one expert a token."""
    return Problem(scheme_named(name), BF16, SHAPE, EXPERTS, 1, 1, 1, lane_rows=EXPERTS * count)


def step_of(name: str, entry_name: str, count: int, padded: int) -> Callable[[], Tensor]:
    """One step of a kernel or a family, `count` rows in each slot."""
    (entry, *_), _ = kernels_that_serve(problem_of(name, count), this_machine(), KERNELS, entry_name)
    scheme = scheme_named(name)
    there = torch.Generator("cuda").manual_seed(count)
    rows = torch.randn(EXPERTS, count, 7168, device="cuda", generator=there).bfloat16()
    kernel = entry.build(KernelSpec(scheme, SHAPE, torch.bfloat16))
    prepared = kernel.prepare(weights_of(name))
    segment = padded or -(-count // entry.row_align) * entry.row_align
    batch = batch_of(rows, segment, Grouping.PADDED if padded else Grouping.RAGGED)
    return lambda: kernel.apply(prepared, batch)


def run_once(name: str, entry_name: str, count: int, padded: int) -> None:
    """Has an entry compiled what it needs."""
    step_of(name, entry_name, count, padded)()
    torch.cuda.synchronize()


def timed(name: str, entry_name: str, count: int, padded: int) -> float:
    """Microseconds of an entry's step."""
    return median(step_of(name, entry_name, count, padded))


def entries_here(name: str, count: int, padded: int) -> list[str]:
    """Our own kernels that a plan takes, and the libraries' that take such batches and are importable."""
    grouping = Grouping.PADDED if padded else Grouping.RAGGED
    able, _ = kernels_that_serve(problem_of(name, count), this_machine(), KERNELS)
    fitting = [one for one in able if grouping in one.groupings]
    own = [one.name for one in fitting if all(e.modules and e.modules <= OURS for e in one.entries)]
    return own[:1] + [one.name for one in fitting if one.name in LIBRARIES[name]]


def compare(name: str, count: int, padded: int, worker: Worker, deadline: float) -> list[record.Result]:
    """Prints a line an entry of the table of kernels, with the ratio to the first; what is to be recorded."""
    times: dict[str, float] = {}
    case = f"{name}, {count} rows a slot" + (f", padded to {padded}" if padded else "")
    for entry_name in entries_here(name, count, padded):
        try:
            found = worker.run(deadline - time.monotonic(), timed, name, entry_name, count, padded)
        except Failed as failed:
            print(f"{case}, {entry_name}: {failed}", flush=True)
            continue
        times[entry_name] = round(found, 1)
        first = next(iter(times.values()))
        print(f"{case}, {entry_name}: {found:.0f} us, {found / first:.2f}", flush=True)
    ours, *others = times or [""]
    if ours in LIBRARIES[name] or not others:
        return []
    beside = {other: times[other] for other in others}
    return [record.Result("gpu_libraries", f"{case}, {ours}", times[ours], "us", "lower", None, beside)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="16,512", help="rows a slot, by commas")
    parser.add_argument(
        "--padded", default="0", help="PADDED batches of so many rows a slot, by commas; 0 is RAGGED"
    )
    parser.add_argument("--only", choices=LIBRARIES, help="one scheme")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that compile before anything is timed"
    )
    parser.add_argument("--seconds", type=float, default=600, help="no entry is begun after so long")
    parser.add_argument("--record", action="store_true", help="write the times into bench/results")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    share("triton", "moeserve.experts.kernels")
    names = [arguments.only] if arguments.only else list(LIBRARIES)
    cases = [
        (name, int(count), int(padded))
        for name in names
        for padded in arguments.padded.split(",")
        for count in arguments.rows.split(",")
    ]
    tasks = [(name, entry, *case) for name, *case in cases for entry in entries_here(name, *case)]
    compiling = time.monotonic() + 0.6 * arguments.seconds
    worker = on_workers(run_once, tasks, arguments.workers, compiling) if arguments.workers else Worker()
    for name, count, padded in cases:
        results = compare(name, count, padded, worker, deadline)
        if arguments.record and results:
            record.write(results)
    worker.close()


if __name__ == "__main__":
    main()
