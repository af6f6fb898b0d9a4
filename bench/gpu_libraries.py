"""Rows for kernel libraries beside our own rows on one GPU: both GEMMs and the activation, medians.

64 experts of 7168 x 2048 with so many bf16 rows each, a CUDA graph, L2 flushed between replays. Rows
whose package is not importable are left out; a library's first call may compile for a while.
usage: python bench/gpu_libraries.py [--rows 16,512] [--padded 512] [--only "mxfp4 x bf16"]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.machine import this_machine
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats import BF16
from moeserve.quant.schemes import scheme_named

EXPERTS, SHAPE = 64, ExpertShape(7168, 2048, Activation("silu"))
PAIRS = {
    "fp8_block128 x fp8_group128": ("triton_fp8", "deep_gemm", "flashinfer_cutlass"),
    "bf16": ("triton_bf16", "torch_grouped_mm", "deep_gemm", "flashinfer_cutlass"),
    "mxfp4 x bf16": ("triton_fp4", "triton_kernels", "flashinfer_cutlass"),
    "fp8_channel x fp8_token": ("triton_dequant", "torch_scaled_grouped_mm"),
}
"""Ours first, and the libraries it is compared with."""
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


def compare(name: str, numbers: list[int], padded: int) -> None:
    """Prints a line a row of the table of kernels, with the ratio to the first."""
    scheme, here = scheme_named(name), this_machine().modules
    weights = ExpertWeights(matrix(scheme.weights, 4096, 7168), matrix(scheme.weights, 7168, 2048))
    for count in numbers:
        rows = torch.randn(EXPERTS, count, 7168, device="cuda", dtype=torch.bfloat16)
        first = 0.0
        for row in (KERNELS[other] for other in PAIRS[name]):
            grouping = Grouping.PADDED if padded else Grouping.RAGGED
            if not row.modules <= here or grouping not in row.groupings:
                continue
            kernel = row.build(KernelSpec(scheme, SHAPE, torch.bfloat16))
            prepared = kernel.prepare(weights)
            segment = padded or -(-count // row.row_align) * row.row_align
            batch = batch_of(rows, segment, grouping)
            time = median(lambda k=kernel, p=prepared, b=batch: k.apply(p, b))  # type: ignore[misc]
            first = first or time
            print(f"{name}, {count} rows a slot, {row.name}: {time:.0f} us, {time / first:.2f}", flush=True)
            del prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="16,512", help="rows a slot, by commas")
    parser.add_argument("--padded", type=int, default=0, help="PADDED batches of so many rows a slot")
    parser.add_argument("--only", choices=PAIRS, help="one scheme")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else PAIRS:
        compare(name, [int(number) for number in arguments.rows.split(",")], arguments.padded)


if __name__ == "__main__":
    main()
