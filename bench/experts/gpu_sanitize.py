"""Every expert kernel that runs here, small and under compute-sanitizer: what its tools find is recorded.

Each entry of the table runs with some of its schemes and groupings, with few rows a slot, some and many, with
odd sizes and biases and with even ones, with slots without rows and rows of NaN outside the segments. Every
tensor has an allocation of its own, so that a read past its end is one past an allocation. Answers are also
held to the reference, computed on the CPU. Each tool has a process for each kernel, all at once.
With `--only dispatch` dispatchers over peer memory run instead, in two processes on two GPUs: as ranks, and
as members of which one or both do only one of bringing rows and holding experts. These come one after the
other, since kernels that wait for each other take turns with all others of their GPU.
usage: python -m bench.experts.gpu_sanitize [--tools memcheck] [--kernels triton_fp8] [--seconds 60]
       [--record]
       python -m bench.experts.gpu_sanitize --only dispatch --seconds 900 [--record]   # on two GPUs
       python -m bench.experts.gpu_sanitize --plain         # the cases alone

initcheck reports reads of memory that nothing wrote. A tile of rows is read whole, so it also reports the
undefined rows after a segment, whose products are never stored: its number is information, not a verdict.
racecheck reports the bytes by which Triton's `warp_specialize` tells its warps what to run, though a barrier
of all threads stands between, and so it does in a kernel whose warps only hand barriers to each other: those
are counted apart, by the lines of the functions that specialize.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from zlib import crc32

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from bench.lib import record
from bench.lib.gpu_worker import on_workers, share

sys.path.insert(0, str(record.ROOT / "tests" / "support"))

from error_model import bound_of, settled_rows
from made_experts import Arrival, activation_named, make_scheme

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertShape, Grouping
from moeserve.experts.kernel import KernelEntry, KernelSpec, Prepared
from moeserve.experts.kernels import KERNELS, PINS
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16, FP32

TOOLS = {
    "memcheck": ("--leak-check", "no", "--report-api-errors", "no"),  # of symbols that a binding looks up
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
    "initcheck": (),
}
"""Of compute-sanitizer, with their own options."""

PRINTED = 1000
"""Reports of a process that are printed, and so can be told apart."""

INFORMS = frozenset({"initcheck"})
"""Tools whose number is no verdict."""

COUNTS = (
    (3, 0, 17, 1, 0),
    (9, 0, 33, 16, 24, 1, 17, 12, 20, 8, 30, 16),
    (70, 0, 9, 33),
    (0, 400, 1, 65),
)
"""Rows of each slot: few, some, more and many, since kernels choose their way by them."""

ODD = (290, 192, 130)
"""H, I in kernels that want it in steps, I in others: over the edge of a tile, and not to the next."""

OURS = frozenset({"triton", "cuda.bindings"})
"""Packages that our own kernels are compiled by; who needs another is a library."""

DISPATCHERS: dict[str, tuple[str, ...]] = {
    "nvlink_ll": ("--dispatcher", "nvlink_ll"),
    "nvlink_ll, 1x1": ("--dispatcher", "nvlink_ll", "--members", "1x1"),
    "nvlink_ll, both,lane": ("--dispatcher", "nvlink_ll", "--members", "both,lane"),
    "nvlink_ht": ("--dispatcher", "nvlink_ht"),
    "nvlink_ht, 1x1": ("--dispatcher", "nvlink_ht", "--members", "1x1"),
    "nvlink_ht, both,lane": ("--dispatcher", "nvlink_ht", "--members", "both,lane"),
}
"""Those whose kernels store into other members' memory, by ranks and by members, as arguments of the soak."""

SCHEMES_A_ROW = 6


@dataclass(frozen=True)
class Case:
    """One step of one kernel."""

    entry: KernelEntry
    scheme: Scheme
    grouping: Grouping
    counts: tuple[int, ...]
    odd: bool

    def __str__(self) -> str:
        rows, sizes = max(self.counts), "odd sizes" if self.odd else "even sizes"
        return f"{self.entry.name}, {self.scheme}, {self.grouping.value}, {sizes}, at most {rows} rows"

    @property
    def shape(self) -> ExpertShape:
        """Odd sizes as far as the entry allows, over the edge of a tile."""
        hidden, inner, any_inner = ODD
        wanted = (hidden, any_inner if self.entry.multiple_of[1] == 1 else inner) if self.odd else (512, 256)
        fitted = (m * -(-size // m) for m, size in zip(self.entry.multiple_of, wanted, strict=True))
        return ExpertShape(*fitted, activation_named(self.activation), bias=self.odd)

    @property
    def activation(self) -> str:
        """Another one for odd sizes, where the entry has it."""
        able = self.entry.fewer_activations.get(self.scheme, self.entry.activations)
        return "swigluoai" if self.odd and "swigluoai" in able else "silu"

    def error(self) -> tuple[float, float]:
        """RMS error against the reference on the CPU, relative to the reference's RMS; and its bound."""
        generator = torch.Generator().manual_seed(crc32(str(self).encode()))
        weights = make_scheme(self.shape, len(self.counts), self.scheme, generator)
        align = self.entry.row_align
        arrival = Arrival(self.counts, self.grouping, align, spare=2 * align + 1)
        wire = self.scheme.activations if self.scheme.activations in self.entry.eats else BF16
        rows = settled_rows(arrival.rows(self.shape.hidden, generator), self.scheme, wire, weights)
        batch = arrival.batch(rows, self.shape.hidden, wire)
        spec = KernelSpec(self.scheme, self.shape, torch.float32)
        kernel, reference = self.entry.build(spec), TorchReference(spec)
        tokens, counts, offsets = (t.to("cuda") for t in (batch.tokens, batch.counts, batch.offsets))
        there = replace(batch, tokens=tokens, counts=counts, offsets=offsets)
        found = kernel.apply(on_gpu(kernel.prepare(weights)), there)
        wanted = reference.apply(reference.prepare(weights), batch)
        ours, theirs = (
            torch.cat([rows.cpu() for rows in arrival.segments(y, batch)]).double() for y in (found, wanted)
        )
        carried = [wire.quantize(own).dequantize() for own in rows]
        bound = bound_of(self.entry, spec, weights, carried, wire)
        return float((ours - theirs).norm() / theirs.norm()), bound


def on_gpu(prepared: Prepared) -> Prepared:
    """`prepared` there; it is made on the CPU, as a sanitizer takes long to load each kernel of torch's."""
    per_slot, shared = (
        {name: tensor.to("cuda") for name, tensor in tensors.items()}
        for tensors in (prepared.per_slot, prepared.shared)
    )
    return Prepared(per_slot, shared)


def entries_here(names: Sequence[str]) -> list[KernelEntry]:
    """The kernels `names`, or all of ours that run here."""
    machine = this_machine()
    if names:
        return [entry for name in names for entry in PINS[name]]
    return [
        entry
        for entry in KERNELS.values()
        if machine.arch in entry.archs
        and entry.modules <= machine.modules
        and entry.modules
        and entry.modules <= OURS
    ]


def cases(names: Sequence[str]) -> Iterator[Case]:
    """Returns for each entry every grouping with every one of `COUNTS`, its schemes by turns."""
    for entry in entries_here(names):
        schemes = sorted((s for s in entry.schemes if s.weights != FP32), key=str)
        schemes = schemes[:: -(-len(schemes) // SCHEMES_A_ROW)]
        ways = product(sorted(entry.groupings, key=lambda g: g.value), COUNTS)
        for at, (grouping, counts) in enumerate(ways):
            turn = at + at // len(COUNTS) if len(schemes) == len(COUNTS) else at
            yield Case(entry, schemes[turn % len(schemes)], grouping, counts, odd=(at + at // 2) % 2 == 0)


def agrees(entry: str, number: int) -> bool:
    """Prints a line for a case of an entry: whether its answer is the reference's."""
    case = list(cases([entry]))[number]
    found, bound = case.error()
    good = found <= bound
    print(f"{'ok  ' if good else 'FAIL'} {case}: {found:.2e} of {bound:.1e}", flush=True)
    return good


def run_cases(names: Sequence[str]) -> int:
    """How many cases disagree with the reference; prints a line for each."""
    torch.set_num_threads(1)
    numbers = {entry.name: len(list(cases([entry.name]))) for entry in entries_here(names)}
    return sum(not agrees(entry, number) for entry, count in numbers.items() for number in range(count))


def compile_cases(entries: Sequence[str], workers: int, deadline: float) -> None:
    """Runs all cases once, in processes of their own, so that compilers' caches hold what they need."""
    share("triton", "moeserve.experts.kernels")
    tasks = [(entry, number) for entry in entries for number in range(len(list(cases([entry]))))]
    on_workers(agrees, tasks, workers, deadline).close()


class Run:
    """The cases of one entry under one tool, in a process or its children, and what is printed there."""

    def __init__(self, tool: str, entry: str, folder: Path) -> None:
        self.tool, self.entry, self._log = tool, entry, folder / f"{tool}-{entry}"
        own = (
            soak(DISPATCHERS[entry])
            if entry in DISPATCHERS
            else [sys.executable, "-m", __spec__.name, "--plain", "--kernels", entry]
        )
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*sanitizer(tool), *own],
                cwd=record.ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, deadline: float) -> bool:
        """Whether it ended by itself before `deadline`, of the monotonic clock."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return False

    def said(self) -> tuple[int, int, int, int]:
        """Cases that agree, cases that do not, reports of the tool so far, and those of Triton's dispatch.

        Prints them.
        """
        printed = self._log.read_text(errors="replace")
        lines = [text for text in printed.splitlines() if text.startswith(("ok  ", "FAIL"))]
        agree = sum(text.startswith("ok") for text in lines)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
        reports = REPORT.split(printed)[1:]
        aside = sum(map(is_dispatch, reports))
        found = int(summary[-1]) if summary else len(reports)
        for text in lines:
            print(f"{self.tool}: {text}", flush=True)
        others = [report for report in reports if not is_dispatch(report)]
        if found - aside or self._process.returncode:
            print(f"{self.tool}, {self.entry}: exit status {self._process.returncode}")
            print(*(report[:SHOWN] for report in others[:3]) if others else printed[-SHOWN:], flush=True)
        return agree, len(lines) - agree, found - aside, aside


REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(?=\S)", re.MULTILINE)
"""Where a report begins; its other lines are indented further."""

ACCESS = re.compile(r" in (\w+\.py):(\d+)")
"""Where in the source a report's accesses are."""

SHOWN = 1200
"""Characters of a report that are shown."""


def is_dispatch(report: str) -> bool:
    """Whether all accesses of a report are in functions that only hand warps their work."""
    places = ACCESS.findall(report.split("Saved host backtrace")[0])
    return bool(places) and all(
        any(int(line) in lines for lines in dispatching(name)) for name, line in places
    )


@cache
def dispatching(name: str) -> list[range]:
    """Lines of the functions that call `warp_specialize` in our file of device code of that name."""
    functions = (
        node
        for file in DEVICE.rglob(name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    return [
        range(function.lineno, (function.end_lineno or function.lineno) + 1)
        for function in functions
        if any(isinstance(n, ast.Attribute) and n.attr == "warp_specialize" for n in ast.walk(function))
    ]


DEVICE = record.ROOT / "moeserve" / "experts" / "kernels"


def soak(dispatcher: Sequence[str]) -> list[str]:
    """The command that has two members take some small steps, each with minutes of patience."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    steps = ["--watched", "--steps", "16", "--lane-rows", "24", "--hidden", "512"]
    return [sys.executable, *launch, "-m", "bench.dispatch.gpu_soak", *dispatcher, *steps]


def sanitizer(tool: str) -> list[str]:
    """The command that a process runs under."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        raise SystemExit("compute-sanitizer, which comes with CUDA, is not on the PATH")
    shown = ["--print-limit", str(PRINTED), "--show-backtrace", "no", "--target-processes", "all"]
    return [found, "--tool", tool, *TOOLS[tool], *shown]


def sanitize(
    tools: Sequence[str], entries: Sequence[str], deadline: float, *, keep: bool
) -> list[record.Result]:
    """Runs all entries under all tools: a line a case, a verdict a pair, recorded if `keep`.

    Kernels run all at once, dispatchers one after the other.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(tool, entry) for tool in tools for entry in entries]
        started = [Run(*pair, Path(folder)) for pair in pairs if pair[1] not in DISPATCHERS]
        later = (Run(*pair, Path(folder)) for pair in pairs if pair[1] in DISPATCHERS)
        for run in chain(started, later):
            ended = run.wait(deadline)
            agree, differ, reports, aside = run.said()
            name = f"{run.tool}, {run.entry}" + ("" if ended else ", stopped before its end")
            of = "members" if run.entry in DISPATCHERS else "steps"
            unit = f"reports in {agree + differ} {of}"
            unit += f", and {aside} of Triton's dispatch" if aside else ""
            print(f"== {name}: {reports} {unit}; {differ} answers differ", flush=True)
            if not ended and not reports and not differ:
                continue  # what did not run to its end has found nothing, and shown nothing
            aim = None if run.tool in INFORMS else 0.0
            results.append(record.Result("gpu_sanitize", name, float(reports), unit, "lower", aim))
            if differ or not agree:
                unit = f"of {agree + differ} {of} differ from the reference"
                results.append(
                    record.Result("gpu_sanitize", f"{name}, answers", float(differ), unit, "lower", 0.0)
                )
            if keep:
                record.write(results)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--kernels", default="", help="kernels or dispatchers, by name; all that run here")
    parser.add_argument(
        "--only",
        choices=["kernels", "dispatch"],
        default="kernels",
        help="of experts, or those that dispatch over peer memory",
    )
    parser.add_argument("--plain", action="store_true", help="in this process, without a sanitizer")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile at first")
    parser.add_argument("--seconds", type=int, default=300, help="most that all of it may take")
    parser.add_argument("--record", action="store_true", help="write what was found into bench/results")
    arguments = parser.parse_args()
    names = [name for name in arguments.kernels.split(",") if name]
    if arguments.plain:
        return int(run_cases(names) > 0)
    deadline = time.monotonic() + arguments.seconds
    entries = [name for name, options in DISPATCHERS.items() if not names or options[1] in names]
    if arguments.only == "kernels":
        entries = [entry.name for entry in entries_here(names)]
        compile_cases(entries, arguments.workers, deadline)
        print(f"compiled with {deadline - time.monotonic():.0f} s left", flush=True)
    results = sanitize(arguments.tools.split(","), entries, deadline, keep=arguments.record)
    return int(not results or any(r.aim is not None and r.ours > r.aim for r in results))


if __name__ == "__main__":
    sys.exit(main())
