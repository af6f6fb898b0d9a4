"""Every expert kernel that runs here, small and under compute-sanitizer: what its tools find is recorded.

Each row of the table with some of its schemes, both groupings, odd sizes with biases and even ones, slots
without rows, rows of NaN outside the segments. Every tensor has an allocation of its own, so that a read past
its end is one past an allocation. Answers are also held to the reference, computed on the CPU.
usage: python bench/gpu_sanitize.py                    # runs itself under memcheck, racecheck and initcheck
       python bench/gpu_sanitize.py --tools memcheck [--rows triton_fp8] [--seconds 200] [--record]
       python bench/gpu_sanitize.py --plain            # the cases alone; fills the compilers' caches

initcheck reports reads of memory that nothing wrote. A tile of rows is read whole, so it also reports the
undefined rows after a segment, whose products are never stored: its number is information, not a verdict.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import record
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from made_experts import Arrival, activation_named, make_scheme

from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import KernelRow, KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.machine import this_machine
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16, FP16, FP32

TOOLS = {
    "memcheck": ("--leak-check", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
}
"""Of compute-sanitizer, with their own options."""

COUNTS = ((3, 0, 17, 1, 0), (0, 400, 1, 65))
"""Rows of each slot: for kernels of few rows, and of many."""

ODD = (290, 192, 130)
"""H, I in kernels that want it in steps, I in others: over the edge of a tile, and not to the next."""

OURS = frozenset({"triton", "cuda.bindings"})
"""Packages that our own kernels are compiled by; who needs another is a library."""

SCHEMES_A_ROW = 6
BOUNDS = {BF16: 1e-2, FP16: 1e-2}
FP8_BOUND = 2e-2


@dataclass(frozen=True)
class Case:
    """One step of one kernel."""

    row: KernelRow
    scheme: Scheme
    grouping: Grouping
    counts: tuple[int, ...]
    odd: bool

    def __str__(self) -> str:
        rows, sizes = max(self.counts), "odd sizes" if self.odd else "even sizes"
        return f"{self.row.name}, {self.scheme}, {self.grouping.value}, {sizes}, at most {rows} rows"

    @property
    def shape(self) -> ExpertShape:
        """Odd sizes as far as the row allows, over the edge of a tile."""
        hidden, inner, any_inner = ODD
        wanted = (hidden, any_inner if self.row.multiple_of[1] == 1 else inner) if self.odd else (512, 256)
        fitted = (m * -(-size // m) for m, size in zip(self.row.multiple_of, wanted, strict=True))
        return ExpertShape(*fitted, activation_named("silu"), bias=self.odd)

    def error(self) -> float:
        """RMS error against the reference on the CPU, relative to the reference's RMS."""
        generator = torch.Generator().manual_seed(crc32(str(self).encode()))
        weights = make_scheme(self.shape, len(self.counts), self.scheme, generator)
        align = self.row.row_align
        arrival = Arrival(self.counts, self.grouping, align, spare=2 * align + 1)
        wire = self.scheme.activations if self.scheme.activations in self.row.eats else BF16
        batch = arrival.batch(arrival.rows(self.shape.hidden, generator), self.shape.hidden, wire)
        spec = KernelSpec(self.scheme, self.shape, torch.float32)
        kernel, reference = self.row.build(spec), TorchReference(spec)
        tokens, counts, offsets = (t.to("cuda") for t in (batch.tokens, batch.counts, batch.offsets))
        there = replace(batch, tokens=tokens, counts=counts, offsets=offsets)
        found = kernel.apply(kernel.prepare(weights.to("cuda")), there).cpu()
        wanted = reference.apply(reference.prepare(weights), batch)
        ours, theirs = (torch.cat(arrival.segments(y, batch)).double() for y in (found, wanted))
        return float((ours - theirs).norm() / theirs.norm())

    @property
    def bound(self) -> float:
        """What the laws of kernels allow."""
        return BOUNDS.get(self.scheme.activations, FP8_BOUND)


def cases(names: list[str]) -> Iterator[Case]:
    """Of the rows `names`, or of all of ours that run here."""
    machine = this_machine()
    for row in KERNELS.values():
        able = machine.arch in row.archs and row.modules <= machine.modules
        ours = bool(row.modules) and row.modules <= OURS
        if row.name not in names if names else not (able and ours):
            continue
        schemes = sorted((s for s in row.schemes if s.weights != FP32), key=str)
        for scheme in schemes[:: max(1, -(-len(schemes) // SCHEMES_A_ROW))]:
            for at, grouping in enumerate(sorted(row.groupings, key=lambda g: g.value)):
                for counts in COUNTS:
                    yield Case(row, scheme, grouping, counts, odd=(at + (counts is COUNTS[0])) % 2 == 0)


def run_cases(names: list[str]) -> int:
    """Prints a line a case and how many disagree with the reference, which it returns."""
    wrong, todo = 0, list(cases(names))
    for case in todo:
        found = case.error()
        good = found <= case.bound
        wrong += not good
        print(f"{'ok  ' if good else 'FAIL'} {case}: {found:.2e} of {case.bound:.0e}", flush=True)
    print(f"{len(todo) - wrong} of {len(todo)} cases agree with the reference", flush=True)
    return wrong


def sanitized(tool: str, arguments: argparse.Namespace) -> record.Result | None:
    """The cases under one tool; what it found, or None where it ran into its limit of time."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise SystemExit("compute-sanitizer, which comes with CUDA, is not on the PATH")
    own = [sys.executable, __file__, "--plain", "--rows", arguments.rows]
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--print-limit", "20", *own]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=arguments.seconds
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        print(f"{tool}: no end in {arguments.seconds} s; it printed\n{printed[-3000:]!r}", flush=True)
        return None
    print(f"--- {tool}, exit status {done.returncode}\n{done.stdout[-6000:]}", flush=True)
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    agreed = re.search(r"(\d+) of (\d+) cases agree", done.stdout)
    if not summaries or agreed is None:
        print(f"{tool}: it did not finish", flush=True)
        return None
    aim = None if tool == "initcheck" else 0.0
    case = f"{tool}: {agreed[2]} steps of expert kernels, {agreed[1]} as the reference answers"
    return record.Result("gpu_sanitize", case, float(summaries[-1]), "reports", "lower", aim)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--rows", default="", help="names of kernel rows; all that run here")
    parser.add_argument("--plain", action="store_true", help="without a sanitizer")
    parser.add_argument("--seconds", type=int, default=300, help="most that a tool may take")
    parser.add_argument("--record", action="store_true", help="write what was found into bench/results")
    arguments = parser.parse_args()
    if arguments.plain:
        return int(run_cases([name for name in arguments.rows.split(",") if name]) > 0)
    found = [sanitized(tool, arguments) for tool in arguments.tools.split(",")]
    results = [result for result in found if result is not None]
    if arguments.record and results:
        record.write(results)
    return int(len(results) < len(found) or any(r.aim is not None and r.ours > r.aim for r in results))


if __name__ == "__main__":
    sys.exit(main())
