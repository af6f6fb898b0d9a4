"""Thousands of small random cases a scheme against the bounds of the kernels' laws.

For every kernel of our own that this machine runs and every scheme of its entry with rounded rows: samples,
the largest error, the bounds of `tests/support/error_model.py`, and how many samples are over theirs; beside
it, how many are over the constants that were the laws' bounds before. Exit status 1 when one is over its own.

    python -m bench.experts.gpu_law_samples                 # on a GPU; about three minutes
    python -m bench.experts.gpu_law_samples --samples 20    # without one: what runs there, Triton interpreted
    python -m bench.experts.gpu_law_samples --sums          # what sums of E4M3 products lose on this GPU
    python -m bench.experts.gpu_law_samples --bounds --samples 200     # bounds alone, of every kernel

usage: python -m bench.experts.gpu_law_samples [--samples 2000] [--workers 12] [--seconds 200] [--seed 1]
       [--kernels NAME,..] [--schemes TEXT] [--plain] [--bias] [--bounds] [--sums] [--record]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from bench.lib import record

sys.path.insert(0, str(record.ROOT / "tests" / "support"))

import error_model
from made_experts import activation_named, make_scheme
from torch import Tensor

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.experts.kernel import Kernel, KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels import KERNELS
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import BF16, FLOATS, FP32
from moeserve.quant.schemes import SCHEMES, scheme_named

FEW, SOME = (3, 0, 1, 9, 0), (60, 0, 70, 1, 33)
"""Rows of each slot: those of the laws, and those of other tiles and kernels."""

CHUNK = 100
"""Samples that are drawn, packed and judged at once."""

BEFORE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1e-2}
"""The laws' bounds before there was a model, by activation format; 2e-2 for the others, 3e-2 of bf16 sums."""


@dataclass(frozen=True)
class Outcome:
    """What the samples of one kernel and scheme gave."""

    errors: Tensor  # [n]
    bounds: Tensor  # [n]
    before: float
    seconds: float

    @property
    def failures(self) -> int:
        """Samples over their bounds; NaN is over any."""
        return int((~(self.errors <= self.bounds)).sum())

    def __str__(self) -> str:
        typical, largest = self.bounds.median(), self.bounds.max()
        return (
            f"{len(self.errors)} samples, {self.failures} over their bounds, "
            f"{self.over_constant} over {self.before}; "
            f"error {self.errors.median():.1e}, largest {self.errors.max():.4f}; bound {typical:.1e}, "
            f"largest {largest:.4f}; nearest {self.nearest:.2f} of its bound; {self.seconds:.0f} s"
        )

    @property
    def over_constant(self) -> int:
        """Samples over the constant that was the law's bound before there was a model."""
        return int((~(self.errors <= self.before)).sum())

    @property
    def nearest(self) -> float:
        """The largest error as a share of its own bound."""
        return float((self.errors / self.bounds).max())


def result_of(kernel: str, outcomes: Sequence[Outcome], seed: int) -> record.Result:
    """What all schemes of a kernel gave, as it is recorded."""
    samples = {len(one.errors) for one in outcomes}
    peers = {
        "over the constant before": float(sum(one.over_constant for one in outcomes)),
        "nearest to its bound": max(one.nearest for one in outcomes),
        "largest error": max(float(one.errors.max()) for one in outcomes),
    }
    each = "/".join(map(str, sorted(samples)))
    case = f"{kernel}, {len(outcomes)} schemes, {each} samples each, seed {seed}"
    over = sum(one.failures for one in outcomes)
    return record.Result("gpu_law_samples", case, over, "samples over the bound", "lower", 0, peers)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Draw:
    """Samples of a kernel and scheme that share a shape, a wire and how rows stand."""

    entry: KernelEntry
    scheme: Scheme
    counts: tuple[int, ...]
    wire: Format
    grouping: Grouping
    bias: bool

    @property
    def shape(self) -> ExpertShape:
        """Returns the laws' shape: odd as far as the entry allows, H over the edge of a block of 128."""
        multiples = zip(self.entry.multiple_of, (133, 19), strict=True)
        hidden, inner = (multiple * -(-size // multiple) for multiple, size in multiples)
        return ExpertShape(hidden, inner, activation_named("silu"), bias=self.bias)

    def places(self) -> tuple[list[int], list[int], list[int]]:
        """Returns which of `[e * most]` rows a batch holds, which of the batch count, and its offsets."""
        most, spare = max(self.counts), 2 * self.entry.row_align + 1
        held: list[int] = []
        real: list[int] = []
        offsets = [0]
        for slot, count in enumerate(self.counts):
            real += range(len(held), len(held) + count)
            own = [slot * most + min(i, most - 1) for i in range(count)]
            room = (
                most + spare
                if self.grouping is Grouping.PADDED
                else -(-count // self.entry.row_align) * self.entry.row_align
            )
            held += own + [0] * (room - count)
            offsets.append(len(held))
        if self.grouping is Grouping.RAGGED:
            held += [0] * spare
        return held, real, offsets

    def judged(self, n: int, generator: torch.Generator, *, run: bool) -> tuple[Tensor, Tensor]:
        """Errors and bounds `[n]` of new samples; errors are 0 if the kernel does not `run`."""
        e, most, where = len(self.counts), max(self.counts), device()
        with torch.device(where):
            weights = make_scheme(self.shape, n * e, self.scheme, generator)
            x = torch.randn(n, e, most, self.shape.hidden, generator=generator)
        scales = None if weights.input_scale is None else weights.input_scale.view(n, e)
        packed = self.wire.quantize(error_model.settled(x, self.scheme, self.wire, scales))
        there = torch.arange(most, device=where) < torch.tensor(self.counts, device=where)[:, None]
        came = self.wire == self.scheme.activations
        there = there.expand(n, e, most)
        cases = error_model.cases_of(
            self.scheme, self.shape.activation, weights, packed.dequantize(), there, came=came
        )
        wanted, bounds = cases.answers_and_bounds(error_model.losses(self.entry, self.scheme))
        if not run:
            return torch.zeros(n), bounds.cpu()
        found = self.found(weights, packed, n)
        wanted = wanted[there].view(n, -1)
        return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).cpu(), bounds.cpu()

    def found(self, weights: ExpertWeights, packed: Packed, n: int) -> Tensor:
        """The kernel's answers, one step a sample: `[n, rows * H]`."""
        held, real, offsets = (torch.tensor(t, device=device()) for t in self.places())
        e, spec = len(self.counts), KernelSpec(self.scheme, self.shape, torch.float32)
        kernel: Kernel = self.entry.build(spec)
        prepared = kernel.prepare(weights)
        counts = torch.tensor(self.counts, dtype=torch.int32, device=device())
        answers = []
        for i in range(n):
            own = {name: t[i * e : (i + 1) * e].clone() for name, t in prepared.per_slot.items()}
            parts = tuple(
                p[i].flatten(0, 1).view(torch.uint8 if p.itemsize == 1 else p.dtype)[held].view(p.dtype)
                for p in packed.parts
            )
            size = (len(held), self.shape.hidden)
            if self.grouping is Grouping.PADDED:
                size = (e, len(held) // e, self.shape.hidden)
                parts = tuple(p.unflatten(0, size[:2]) for p in parts)
            batch = ExpertBatch(
                Packed(packed.format, torch.Size(size), parts), self.grouping, counts, offsets.int()
            )
            answer = kernel.apply(Prepared(own, prepared.shared), batch)
            answers.append(answer.view(-1, self.shape.hidden)[real].flatten())
        return torch.stack(answers).double()


def draws(entry: KernelEntry, scheme: Scheme, *, bias: bool) -> Iterator[Draw]:
    """What samples are drawn by turns: wires and groupings, three of four with few rows."""
    given = scheme.activations.given is not None
    own = FP32 if given else scheme.activations
    wires = [wire for wire in (own, BF16) if wire in entry.eats] or [BF16]
    groupings = sorted(entry.groupings, key=lambda g: g.value)
    for i, counts in enumerate((FEW, FEW, FEW, SOME, FEW, FEW, FEW, SOME)):
        turn = i + i // 4
        biased = bias and turn % 3 == 2 and scheme not in entry.unbiased
        yield Draw(
            entry, scheme, counts, wires[turn % len(wires)], groupings[i // 2 % len(groupings)], biased
        )


def sampled(job: tuple[str, str], deadline: float, options: argparse.Namespace) -> Outcome | str:
    """Samples of one kernel and scheme, named so that the job travels; or what was raised."""
    start = time.time()
    if start > deadline:
        return "no time was left"
    try:
        if device() == "cpu" and not options.bounds:
            interpret()
        entry, scheme = KERNELS[job[0]], scheme_named(job[1])
        generator = torch.Generator(device()).manual_seed(options.seed)
        errors, bounds, done, samples = [], [], 0, options.samples
        plans = list(draws(entry, scheme, bias=options.bias))
        chunk = min(CHUNK, -(-samples // len(plans)))
        while done < samples:
            n = min(chunk, samples - done)
            error, bound = plans[done // chunk % len(plans)].judged(n, generator, run=not options.bounds)
            errors.append(error)
            bounds.append(bound)
            done += n
        plain = 3e-2 if entry.bf16_sums else 2e-2
        before = BEFORE.get(scheme.activations.name, plain)
        return Outcome(torch.cat(errors), torch.cat(bounds), before, time.time() - start)
    except Exception as raised:  # the run goes on, and says so
        return f"{type(raised).__name__}: {str(raised)[:300]!r}"


def interpret() -> None:
    """Has the portable kernel multiply in float32 where the interpreter gets bf16 wrong."""
    import interpreted_dequant

    from moeserve.experts.kernels import triton_dequant

    triton_dequant.product_dtype = interpreted_dequant.interpreted_products
    triton_dequant.fp8_products = lambda _: frozenset({"e4m3"})


def jobs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Kernels and schemes by name: our own kernels that run here."""
    arch = "any" if arguments.bounds else "cpu" if device() == "cpu" else this_machine().arch
    names = [name for name in KERNELS if name.startswith(("cuda_", "triton_")) and name != "triton_kernels"]
    if arch == "cpu":
        names = ["torch_grouped_mm", "torch_reference", "triton_dequant"]
    if arguments.kernels:
        names = arguments.kernels.split(",")
    found = []
    for name in names:
        entry = KERNELS[name]
        if arch not in {"any", "cpu", *entry.archs}:
            continue
        schemes = entry.fewer_schemes.get(arch, entry.schemes) & frozenset(SCHEMES.values())
        plain = [s for s in schemes if s.activations in FLOATS.values()]
        keep = schemes if arguments.plain or name == "torch_grouped_mm" else schemes - set(plain)
        found += [(name, s.name) for s in sorted(keep, key=str) if arguments.schemes in s.name]
    return found


def lost_in_sums() -> None:
    """Prints the standard deviation and the largest of errors of E4M3 sums, relative to S."""
    from moeserve.experts.kernels.support.hopper import step_for
    from moeserve.experts.kernels.triton.grouped import GroupedWeights
    from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

    for k in (144, 1024, 7168):
        x, w = (torch.randn(1, 256, k, device="cuda") for _ in range(2))
        rows, weights = FP8_GROUP.quantize(x[0]), FP8_BLOCK.quantize(w)
        counts = torch.tensor([256], dtype=torch.int32, device="cuda")
        offsets = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
        batch = ExpertBatch(BF16.quantize(x[0]), Grouping.RAGGED, counts, offsets)
        step = step_for("fp8", batch, batch.tokens)
        codes = step.round(rows.dequantize())
        side = GroupedWeights("fp8", weights.parts[0], weights.parts[1], None, None, 256)
        found = step.gemm(codes, side, torch.float32).double()
        a, b = rows.dequantize().double(), weights.dequantize()[0].double()
        off = (found - a @ b.T) / (a.square() @ b.square().T).sqrt()
        print(
            f"E4M3 sums of {k}: {off.std():.2e} of S, mean {off.mean():.1e}, largest {off.abs().max():.1e}; "
            f"the model's {error_model.E4M3_SUM:.2e}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=12 if device() == "cuda" else 1)
    parser.add_argument(
        "--seconds", type=float, default=200, help="no kernel and scheme is begun after this long"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", default="", help="names, with commas; all of ours unless given")
    parser.add_argument("--schemes", default="", help="only schemes whose name holds this text")
    parser.add_argument("--bounds", action="store_true", help="bounds alone; no kernel runs")
    parser.add_argument("--plain", action="store_true", help="also schemes whose rows are plain floats")
    parser.add_argument("--bias", action="store_true", help="a third of the draws with biases")
    parser.add_argument(
        "--sums", action="store_true", help="what sums of E4M3 products lose, and nothing else"
    )
    parser.add_argument("--record", action="store_true", help="write what was found into bench/results")
    arguments = parser.parse_args()
    if arguments.sums:
        lost_in_sums()
        return 0
    todo, failed = jobs(arguments), 0
    outcomes: dict[str, list[Outcome]] = {}
    deadline = time.time() + arguments.seconds
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = [pool.submit(sampled, job, deadline, arguments) for job in todo]
        for (kernel, scheme), one in zip(todo, running, strict=True):
            outcome = one.result()
            failed += isinstance(outcome, str) or outcome.failures > 0
            print(f"{kernel}, {scheme}: {outcome}", flush=True)
            if isinstance(outcome, Outcome):
                outcomes.setdefault(kernel, []).append(outcome)
    print(f"{len(todo) - failed} of {len(todo)} kernels and schemes within their bounds", flush=True)
    if arguments.record and outcomes:
        record.write(result_of(kernel, found, arguments.seed) for kernel, found in outcomes.items())
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
