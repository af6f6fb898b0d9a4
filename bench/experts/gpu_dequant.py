"""The portable kernel on a CUDA machine: every scheme of its entry against the reference, then its times.

A line a case; a case that raises is reported and the next one runs. Exit status 1 when one failed. Times are
medians of a CUDA graph behind a flush of the L2 cache, 64 experts of 7168 x 2048 with 16 rows each, beside
the reference, which reads counts on the host and is timed by the clock.
usage: python -m bench.experts.gpu_dequant [--seconds 95] [--workers 14] [--no-times] [--schemes TEXT]
       [--record]
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from zlib import crc32

import torch

from bench.lib import record

sys.path.insert(0, str(record.ROOT / "tests" / "support"))

from error_model import bound_of, settled_rows
from made_experts import Arrival, activation_named, make_scheme

from bench.experts.gpu_experts import medians
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels.torch_reference import COMPUTED, TorchReference
from moeserve.experts.kernels.triton_dequant import ENTRY, TritonDequant
from moeserve.quant.format import Packed, Scheme
from moeserve.quant.formats.floats import BF16, FP32
from moeserve.quant.schemes import SCHEMES, scheme_named

ODD, EVEN = (133, 133), (512, 512)  # H = I: both GEMMs are one compiled variant
FEW, SOME, MANY = (3, 0, 1, 9, 0), (70, 0, 33, 1), (200, 0, 130, 1)
"""Rows of each slot, for each of the kernel's cuts."""


@dataclass(frozen=True)
class Case:
    """One scheme and size that is compared with the reference."""

    scheme: Scheme
    grouping: Grouping
    activation: str
    size: tuple[int, int]
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.scheme}, {self.grouping.value}, {self.activation}, {self.size[0]} x {self.size[1]}, "
            f"{max(self.counts)} rows"
        )

    def error(self) -> tuple[float, float]:
        """RMS error against the reference amid rows of NaN, relative to the reference; and its bound."""
        generator = torch.Generator().manual_seed(crc32(str(self).encode()))
        shape = ExpertShape(*self.size, activation_named(self.activation), bias=self.size == ODD)
        weights = make_scheme(shape, len(self.counts), self.scheme, generator).to("cuda")
        arrival = Arrival(self.counts, self.grouping, spare=3)
        wire = FP32 if self.scheme.activations.given else self.scheme.activations
        rows = settled_rows(arrival.rows(shape.hidden, generator), self.scheme, wire, weights)
        batch = arrival.batch(rows, shape.hidden, wire)
        there = ExpertBatch(
            batch.tokens.to("cuda"), batch.grouping, batch.counts.cuda(), batch.offsets.cuda()
        )
        spec = KernelSpec(self.scheme, shape, torch.float32)
        found, wanted = (
            torch.cat(arrival.segments(kernel.apply(kernel.prepare(weights), there), batch)).double()
            for kernel in (TritonDequant(spec), TorchReference(spec))
        )
        carried = arrival.segments(there.tokens.dequantize(), batch)
        bound = bound_of(ENTRY, spec, weights, carried, wire)
        return float((found - wanted).norm() / wanted.norm()), bound


def cases(text: str) -> Iterator[Case]:
    """Every scheme on odd sizes with few rows; some schemes with more rows, other groupings, activations.

    Schemes with fp16 rows are left to two: their kernels are those of bf16 rows but for one dtype.
    """
    schemes = sorted((s for s in ENTRY.schemes if text in s.name), key=str)
    for i, scheme in enumerate(s for s in schemes if s in SCHEMES.values()):
        yield Case(scheme, list(Grouping)[i % 2], "silu", ODD, FEW)
    names = (
        "bf16", "fp16", "fp8_channel x fp8_token", "fp8_block128 x fp8_group128", "int8_channel x int8_token",
        "int4_asym_group64 x bf16", "int4_group32 x bf16", "mxfp4 x bf16", "mxfp6_e3m2", "mxfp8",
        "nvfp4 x nvfp4_static",
    )  # fmt: skip
    picked = [scheme for scheme in map(scheme_named, names) if scheme in schemes]
    for scheme, counts, grouping in itertools.product(picked, (SOME, MANY), Grouping):
        yield Case(scheme, grouping, "silu", EVEN, counts)
    for scheme in schemes:
        if scheme.name in {"int4_group128 x fp16", "mxfp4 x fp16"}:
            yield Case(scheme, Grouping.RAGGED, "silu", ODD, FEW)
    if scheme_named("nvfp4 x bf16") in schemes:
        for activation in sorted(COMPUTED):
            yield Case(scheme_named("nvfp4 x bf16"), Grouping.RAGGED, activation, EVEN, FEW)


def run(number: int, text: str, deadline: float) -> tuple[float, float] | str:
    """Error and bound of one of `cases(text)`, or what it raised. Numbers travel: formats hold functions."""
    if time.time() > deadline:
        return "no time was left"
    try:
        return next(itertools.islice(cases(text), number, None)).error()
    except Exception as raised:  # the run goes on: a compiler may refuse one variant of many
        return f"{type(raised).__name__}: {str(raised)[:300]!r}"


def check(pool: ProcessPoolExecutor, text: str, deadline: float) -> int:
    """Runs the cases in `pool`, since most of the time is compiling; the number that failed."""
    failed = 0
    todo = list(cases(text))
    for case, found in zip(
        todo, pool.map(run, range(len(todo)), itertools.repeat(text), itertools.repeat(deadline)), strict=True
    ):
        good = not isinstance(found, str) and found[0] <= found[1]
        failed += not good
        shown = found if isinstance(found, str) else f"{found[0]:.2e} of {found[1]:.1e}"
        print(f"{'ok  ' if good else 'FAIL'} {case}: {shown}", flush=True)
    print(f"{len(todo) - failed} of {len(todo)} cases agree with the reference", flush=True)
    return failed


EXPERTS, ROWS = 64, 16
SHAPE = ExpertShape(7168, 2048, Activation("silu"))
TIMED = (
    "bf16", "fp8_tensor x fp8_static", "fp8_channel x fp8_token", "fp8_channel x bf16",
    "fp8_block128 x fp8_group128", "int8_channel x int8_token", "int8_channel x bf16", "int4_group128 x bf16",
    "int4_group32 x bf16", "int4_asym_group128 x bf16", "int4_group128_act_order x bf16",
    "int4_group128 x fp8_token", "int4_fp8_group128 x fp8_token", "mxfp4 x bf16", "mxfp4", "mxfp4 x mxfp8",
    "mxfp4 x fp8_group128", "mxfp6_e3m2", "mxfp8", "nvfp4 x bf16", "nvfp4 x nvfp4_static",
    "nvfp4 x fp8_group128",
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Experts of a real size; all slots hold one random expert, since codes do not change the time."""

    scheme: Scheme
    experts: int

    def matrix(self, n: int, k: int) -> Packed:
        form = self.scheme.weights
        one = form.quantize(torch.randn(1, n, k, device="cuda") * 2 / k**0.5)
        parts = (
            p.view(torch.uint8).expand(self.experts, -1, -1).contiguous().view(p.dtype) for p in one.parts
        )
        return Packed(form, torch.Size((self.experts, n, k)), tuple(parts))

    def weights(self) -> ExpertWeights:
        scale, activations = None, self.scheme.activations
        if activations.given:
            largest = {"fp8_static": 448.0, "int8_static": 127.0, "nvfp4_static": 2688.0}[activations.name]
            scale = torch.full((self.experts,), 16 / largest, device="cuda")
        gate_up = self.matrix(SHAPE.gate_up_rows, SHAPE.hidden)
        return ExpertWeights(
            gate_up, self.matrix(SHAPE.hidden, SHAPE.inner), input_scale=scale, inner_scale=scale
        )

    def batch(self) -> ExpertBatch:
        counts = torch.full((self.experts,), ROWS, dtype=torch.int32, device="cuda")
        offsets = torch.arange(self.experts + 1, dtype=torch.int32, device="cuda") * ROWS
        wire = BF16 if self.scheme.activations.given else self.scheme.activations
        tokens = wire.quantize(torch.randn(self.experts * ROWS, SHAPE.hidden, device="cuda"))
        return ExpertBatch(tokens, Grouping.RAGGED, counts, offsets)

    def microseconds(self) -> tuple[float, float, int]:
        """Returns microseconds of the kernel and of the reference, and the bytes of the weights."""
        weights, batch, spec = self.weights(), self.batch(), KernelSpec(self.scheme, SHAPE, torch.bfloat16)
        kernel, reference = TritonDequant(spec), TorchReference(spec)
        prepared, plain = kernel.prepare(weights), reference.prepare(weights)
        own = medians({"": lambda: kernel.apply(prepared, batch)}, 13)[""]
        reference.apply(plain, batch)
        torch.cuda.synchronize()
        start = time.perf_counter()
        reference.apply(plain, batch)
        torch.cuda.synchronize()
        return own, (time.perf_counter() - start) * 1e6, weights.nbytes


def compiled(name: str) -> str:
    """Compiles what timing `name` needs, into the compiler's cache on disk; what was raised, or nothing."""
    try:
        one = Timed(scheme_named(name), 1)
        kernel = TritonDequant(KernelSpec(one.scheme, SHAPE, torch.bfloat16))
        kernel.apply(kernel.prepare(one.weights()), one.batch())
        torch.cuda.synchronize()
    except Exception as raised:  # as above
        return f"{type(raised).__name__}: {str(raised)[:300]!r}"
    return ""


def time_schemes(pool: ProcessPoolExecutor, text: str, deadline: float) -> list[record.Result]:
    """Prints a line a scheme; what was measured before the deadline."""
    names = [name for name in TIMED if text in name]
    refused = dict(zip(names, pool.map(compiled, names), strict=True))
    pool.shutdown()
    results = []
    for name in names:
        if refused[name] or time.time() > deadline:
            print(f"FAIL time {name}: {refused[name] or 'no time was left'}", flush=True)
            continue
        own, reference, nbytes = Timed(scheme_named(name), EXPERTS).microseconds()
        print(
            f"time {name}: {own:.0f} us, {nbytes / own / 1e6:.2f} TB/s; reference {reference:.0f} us",
            flush=True,
        )
        case = f"{name}, {EXPERTS} experts of 7168 x 2048, {ROWS} rows each, whole step"
        peers = {"torch_reference": round(reference)}
        results.append(record.Result("gpu_dequant", case, round(own, 1), "us", "lower", None, peers))
        torch.cuda.empty_cache()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", default="", help="only schemes whose name holds this text")
    parser.add_argument("--seconds", type=float, default=95, help="no case is begun after this long")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile and check")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--record", action="store_true", help="write the times into bench/results")
    arguments = parser.parse_args()
    start = time.time()
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        part = 1 if arguments.no_times else 0.6
        failed = check(pool, arguments.schemes, start + part * arguments.seconds)
        print(f"checked in {time.time() - start:.0f} s", flush=True)
        results = []
        if not arguments.no_times:
            results = time_schemes(pool, arguments.schemes, start + arguments.seconds)
    if arguments.record and results:
        record.write(results)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
