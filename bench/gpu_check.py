"""Two trees on the same GPUs in turns: experts, a layer, dispatch and combine, before and after a change.

    python -m bench.gpu_check --before .carry/before [--seconds 350] [--rounds 2] [--only layer,dispatch]
                             [--out FOLDER] [--record]

The tree before is a checkout in an ignored folder; one whose benches are still scripts (bench/gpu_experts.py)
will do. Both trees are copied first, so that neither's records change, and compile first, at the same time.
Then each round runs both, the second one in reverse order. With two GPUs or more the kinds of experts are
shared out between two of them, and the layer and dispatch and combine run over both; with one GPU only the
experts run. --only names steps (experts, layer, dispatch); without experts nothing is compiled ahead. Each
number is written to `samples.jsonl` under --out as soon as it is known; at the end, and
when the time is over, comes a table of medians, which `table.jsonl` holds too. Exit status 1 where a step
failed or a case is known of one tree alone. `--record` keeps the numbers of whole steps beside those of the
tree before in bench/results/gpu_check.jsonl. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lib.record import ROOT, Result, write

BEFORE, AFTER = "before", "after"
KINDS = (("fp8", "mxfp4"), ("nvfp4", "bf16"))
"""Kinds of experts of a DeepSeek-V3 rank, by GPU."""
TOKENS = "1,32,128,512,16384"
REPEATS = "17"
COMPILERS = 4
COMPILED_IN = "150"
"""Seconds of which a bench of experts takes its part to compile."""
SHOWN = 1500
"""Characters of what a failed step printed that are shown."""
GRACE = 40.0
"""Seconds that a step which was told to end may take to do so; torchrun gives its ranks thirty."""


@dataclass(frozen=True)
class Step:
    """One bench run over one or two GPUs."""

    name: str
    bench: str
    options: tuple[str, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Copies of a checkout without records, one for each GPU: benches that run at once share no file."""

    name: str
    roots: tuple[Path, ...]

    def root(self, step: Step) -> Path:
        """The copy that a step runs in."""
        return self.roots[step.gpus[0]]

    def records(self, step: Step) -> Path:
        """The file that a step writes its records to."""
        return self.root(step) / "bench" / "results" / f"{step.bench}.jsonl"

    def command(self, step: Step) -> list[str]:
        """What runs a step here, with the names that this tree has for benches and options."""
        root = self.root(step)
        module = next((root / "bench").glob(f"*/{step.bench}.py"), None)
        script = module or root / "bench" / f"{step.bench}.py"
        renamed = {} if "--dispatchers" in script.read_text() else {"--dispatchers": "--carriers"}
        options = [renamed.get(option, option) for option in step.options]
        launch = [] if len(step.gpus) == 1 else launcher(len(step.gpus))
        if module is None:
            return [sys.executable, *launch, str(script), *options]
        return [sys.executable, *launch, "-m", f"bench.{module.parent.name}.{module.stem}", *options]

    def numbers(self, step: Step) -> dict[str, tuple[float, str]]:
        """What the records of a bench say: case -> number and unit."""
        path = self.records(step)
        found = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            case = comparable(step.bench, record["case"])
            found[case] = (float(record["ours"]), record["unit"])
            for peer, number in record["peers"].items():
                if peer == f"{case.split(',')[0]} dispatch":
                    found[case.replace("dispatch + combine", "dispatch")] = (float(number), record["unit"])
        return found


def copied(name: str, root: Path, to: Path, count: int) -> Tree:
    """So many copies of a tree. Raises FileNotFoundError where `root` holds no benches."""
    roots = tuple(to / f"{name}-{number}" for number in range(count))
    for copy in roots:
        for part in ("bench", "moeserve"):
            shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return Tree(name, roots)


def comparable(bench: str, case: str) -> str:
    """A case's name without what may differ between trees: the name of the layer's kernel."""
    return re.sub(r", \w+: ", ": ", case) if bench == "gpu_layer" else case


def launcher(ranks: int) -> list[str]:
    """Options of Python that start so many ranks on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]


def steps_for(gpus: int) -> list[list[Step]]:
    """What a round runs: lists of steps, those of one list at the same time, each on GPUs of its own."""
    usual = ("--tokens", TOKENS, "--repeats", REPEATS)
    if gpus < 2:
        return [[Step("experts", "gpu_experts", ("--kinds", ",".join(sum(KINDS, ())), *usual), (0,))]]
    experts = [
        Step(f"experts {'+'.join(kinds)}", "gpu_experts", ("--kinds", ",".join(kinds), *usual), (gpu,))
        for gpu, kinds in enumerate(KINDS)
    ]
    layer = Step("layer", "gpu_layer", ("--schemes", "fp8", "--tokens", "1,128,4096"), (0, 1))
    options = ("--libraries", "--wires", "fp8_group128", "--tokens", "1", "16", "128", "1024", "4096")
    moved = ("--dispatchers", "nvlink_ll", "nvlink_ht", "--record")
    return [experts, [layer], [Step("dispatch", "gpu_a2a", (*options, *moved), (0, 1))]]


def compiling(gpu: int) -> Step:
    """The step that only compiles: experts of all kinds, on one GPU."""
    kinds = ",".join(kind for kinds in KINDS for kind in kinds)
    options = ("--kinds", kinds, "--tokens", TOKENS, "--only-compile")
    options += ("--workers", str(COMPILERS), "--seconds", COMPILED_IN)
    return Step("compile", "gpu_experts", options, (gpu,))


@dataclass
class Check:
    """Runs steps in two trees and keeps what they measured."""

    trees: tuple[Tree, Tree]
    out: Path
    deadline: float  # of the monotonic clock
    samples: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    _longest: dict[str, float] = field(default_factory=dict)

    def compile(self, gpus: int) -> None:
        """Has both trees compile what the experts need, at once, on GPUs of their own if there are two."""
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self.run, self.trees, [compiling(gpu % gpus) for gpu in (0, 1)]))

    def round(self, steps: Sequence[Sequence[Step]], number: int) -> None:
        """Every list of steps in one tree, then in the other; which is first changes from round to round.

        What a step had recorded when it failed counts too.
        """
        trees = self.trees if number % 2 == 0 else self.trees[::-1]
        for together in steps:
            for tree in trees:
                with ThreadPoolExecutor(len(together)) as threads:
                    list(threads.map(self.run, [tree] * len(together), together))
                for step in together:
                    self.keep(tree, step, number)

    def run(self, tree: Tree, step: Step) -> None:
        """Runs a step, unless it took longer before than there is time left, and says how it ended."""
        tree.records(step).unlink(missing_ok=True)
        left = self.deadline - time.monotonic()
        name = f"{tree.name}, {step.name}"
        if left <= self._longest.get(step.name, 0.0):
            print(f"{name}: no time was left", flush=True)
            return
        log, began = self.out / (re.sub(r"\W+", "-", name) + ".log"), time.monotonic()
        gpus = ",".join(map(str, step.gpus))
        paths = {"PYTHONPATH": str(tree.root(step)), "CUDA_VISIBLE_DEVICES": gpus}
        with log.open("w") as printed:
            process = subprocess.Popen(
                tree.command(step),
                cwd=tree.root(step),
                env=os.environ | paths,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = ended(process, left)
        took = time.monotonic() - began
        self._longest[step.name] = max(took, self._longest.get(step.name, 0.0))
        print(f"{name}: exit status {status}, {took:.0f} s", flush=True)
        if status:
            self.failed.append(name)
            print(log.read_text(errors="replace")[-SHOWN:], flush=True)

    def keep(self, tree: Tree, step: Step, number: int) -> None:
        """Appends what a step measured to the samples, and to the file of samples."""
        found = tree.numbers(step)
        with (self.out / "samples.jsonl").open("a") as file:
            for case, (value, unit) in found.items():
                self.samples.setdefault((step.bench, case), {}).setdefault(tree.name, []).append(value)
                self.units[case] = unit
                line = {"bench": step.bench, "case": case, "tree": tree.name, "round": number, "ours": value}
                file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """A line a case: medians of both trees, the samples, and after over before."""
        return [
            {"bench": bench, "case": case, "unit": self.units[case], **compared(found)}
            for (bench, case), found in self.samples.items()
        ]


def compared(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns both medians and their ratio; None where a tree has no sample."""
    before, after = (statistics.median(found[tree]) if found.get(tree) else None for tree in (BEFORE, AFTER))
    ratio = after / before if before and after is not None else None
    return {
        BEFORE: before,
        AFTER: after,
        "ratio": None if ratio is None else round(ratio, 4),
        "samples": {tree: list(found.get(tree, ())) for tree in (BEFORE, AFTER)},
    }


def ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status of a process that has so long; past that its group is ended and the status is 124."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return 124


def spread(many: Sequence[float]) -> str:
    """How far the largest sample is above the smallest."""
    return f"{max(many) / min(many) - 1:.1%}" if many and min(many) > 0 else "-"


def text(lines: Iterable[Mapping[str, Any]]) -> str:
    """The table for people: before, after, ratio, and how far the samples of each lie apart."""
    shown = [f"{'before':>10} {'after':>10} {'ratio':>7}  {'spread':>15}  case"]
    for line in lines:
        cells = ["-" if line[tree] is None else f"{line[tree]:.1f}" for tree in (BEFORE, AFTER)]
        ratio = "-" if line["ratio"] is None else f"{line['ratio']:.3f}"
        apart = " / ".join(spread(line["samples"][tree]) for tree in (BEFORE, AFTER))
        name = f"{line['bench']}: {line['case']}, {line['unit']}"
        shown.append(f"{cells[0]:>10} {cells[1]:>10} {ratio:>7}  {apart:>15}  {name}")
    return "\n".join(shown)


def main() -> int:
    """Compares; 1 where something failed or is known of one tree alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="folder of the tree to compare with")
    parser.add_argument("--seconds", type=float, default=350, help="most that all of it may take")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="steps by name, as layer,dispatch; all when empty")
    parser.add_argument("--gpus", type=int, help="how many to use; those there are, at most two")
    parser.add_argument("--record", action="store_true", help="write whole steps into bench/results")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".carry/gpu_check")))
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    gpus = args.gpus or min(2, seen_gpus())
    if gpus < 1:
        parser.error("there is no GPU here")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "samples.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trees = (
            copied(BEFORE, args.before.resolve(), Path(folder), gpus),
            copied(AFTER, ROOT, Path(folder), gpus),
        )
        check = Check(trees, args.out.resolve(), deadline)
        steps = only(args.only, steps_for(gpus))
        if any(step.bench == "gpu_experts" for together in steps for step in together):
            check.compile(gpus)
        for number in range(args.rounds):
            check.round(steps, number)
    lines = check.lines()
    (args.out / "table.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("\n".join(json.dumps(line) for line in lines), flush=True)
    print(text(lines), flush=True)
    if args.record and (found := recorded(lines)):
        write(found)
    alone = [line["case"] for line in lines if line["ratio"] is None]
    print(
        f"{len(lines)} cases, {len(alone)} without a ratio; failed steps: {check.failed or 'none'}",
        flush=True,
    )
    return int(bool(check.failed or alone or not lines))


def only(names: str, steps: list[list[Step]]) -> list[list[Step]]:
    """The steps whose first word is among `names`, all where there are none. Raises ValueError for others."""
    wanted = {name for name in names.split(",") if name}
    known = {step.name.split()[0] for together in steps for step in together}
    if wanted - known:
        raise ValueError(f"unknown steps {sorted(wanted - known)}; known: {sorted(known)}")
    return [together for together in steps if not wanted or together[0].name.split()[0] in wanted]


WHOLE = re.compile(r"gpu_experts: .*, whole|gpu_layer: .*: layer|gpu_a2a: .*, dispatch \+ combine")
"""Cases that are recorded: what a step takes, and not its phases."""


def recorded(lines: Iterable[Mapping[str, Any]]) -> list[Result]:
    """The whole steps of both trees as results: this tree's number, and as its peer the one before."""
    named = [(f"{line['bench']}: {line['case']}", line) for line in lines if line["ratio"] is not None]
    return [
        Result("gpu_check", name, line[AFTER], line["unit"], "lower", peers={BEFORE: line[BEFORE]})
        for name, line in named
        if WHOLE.fullmatch(name)
    ]


def seen_gpus() -> int:
    """How many GPUs there are, as another process sees them: this one must not touch any."""
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", count], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
