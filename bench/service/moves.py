"""A service under a shifting load while experts move: are answers right, and what does moving cost a step?

    python -m bench.service.moves [--device cpu|cuda] [--seconds 600] [--weights fp32|fp8|nvfp4]
        [--rate BYTES]

Callers ask all the time, and every answer is compared with what one process computes (on GPUs: with what the
service answered before anything moved). Windows in which experts move alternate with windows in which they do
not; a step's time is the group's, from its header to its last rank. Afterwards a rank is killed while it
prepares a move. On CPU the configured policy follows a workload that shifts; on GPUs experts of real size
change places all the time. Writes bench/results/moves.jsonl. Exits 1 when an answer is wrong or a call fails.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from bench.lib.checkpoint import Qwen3Moe, write_checkpoint
from bench.lib.record import Result, write
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.experts.load import Load
from moeserve.experts.placement import Placement
from moeserve.proto.client import MoeClient
from moeserve.quant.formats import FP8_BLOCK
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.runtime.config import Config
from moeserve.runtime.head.rebalancer import Cycle
from moeserve.runtime.launch.environment import tune_process
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.telemetry.metrics import PHASES

TOP_K = 4
WARM = 20  # answers each caller has had before the first window
SETTLE = 1.0  # seconds of each window that are not counted


@dataclass(frozen=True)
class Size:
    """What is served: experts of all ranks, layers, redundant slots, rows of one call."""

    hidden: int
    inner: int
    experts: int
    layers: int
    redundant: int
    rows: int


SIZES = {"cpu": Size(512, 256, 32, 2, 4, 16), "cuda": Size(7168, 2048, 32, 1, 4, 128)}
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


QUANTIZATION = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
}
"""As DeepSeek and ModelOpt write it."""


def make_checkpoint(folder: Path, size: Size, weights: str) -> None:
    """A Qwen3-MoE-shaped checkpoint of random weights: float32, FP8 blocks or NVFP4."""
    model = Qwen3Moe(size.hidden, size.inner, size.experts, TOP_K, size.layers)
    config = model.config("float32" if weights == "fp32" else "bfloat16", QUANTIZATION.get(weights))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(size.layers):
        for expert in range(size.experts):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            both, down = (
                torch.randn(n, k, generator=random, device=device) / k**0.5
                for n, k in ((2 * size.inner, size.hidden), (size.hidden, size.inner))
            )
            tensors |= stored(f"{stem}.down_proj", down, weights)[0]
            for tensor, name in zip(stored("", both, weights), ("gate", "up"), strict=True):
                tensors |= {f"{stem}.{name}_proj{key}": value for key, value in tensor.items()}
    write_checkpoint(folder, config, tensors)


def stored(stem: str, values: torch.Tensor, weights: str) -> tuple[dict[str, torch.Tensor], ...]:
    """A projection's tensors by name, and (of gate and up together) of its two halves."""
    if weights == "fp32":
        parts = {"weight": values}
    elif weights == "fp8":
        parts = dict(zip(("weight", "weight_scale_inv"), FP8_BLOCK.quantize(values).parts, strict=True))
    else:
        packed = NVFP4.quantize(values).parts
        parts = dict(zip(("weight", "weight_scale", "weight_scale_2"), packed, strict=True))
        parts["weight_scale_2"] = parts["weight_scale_2"].reshape(())
    parts = {f"{stem}.{name}": tensor.cpu() for name, tensor in parts.items()}
    if stem:
        return (parts,)
    halves = (
        {key: t if not t.ndim else t.chunk(2)[at].contiguous() for key, t in parts.items()} for at in (0, 1)
    )
    return tuple({key: tensor.clone() for key, tensor in half.items()} for half in halves)


def make_batch(size: Size, workload: int, seed: int) -> Batch:
    """Hidden states, chosen experts and weights; each workload has its own few hot experts."""
    random = np.random.default_rng(seed)
    order = np.random.default_rng(workload).permutation(size.experts)
    heat = 1.0 / (1 + np.argsort(order)) ** 0.8
    keys = np.log(heat) + random.gumbel(size=(size.rows, size.experts))
    experts = torch.from_numpy(np.argsort(-keys, axis=1)[:, :TOP_K].astype(np.int32))
    weights = torch.from_numpy(random.dirichlet(np.ones(TOP_K), size.rows).astype(np.float32))
    hidden = torch.from_numpy(random.standard_normal((size.rows, size.hidden)).astype(np.float32))
    return hidden, experts, weights


def alone(path: Path, layer: int, batch: Batch) -> torch.Tensor:
    """One process's answer, float32."""
    checkpoint = Checkpoint(path)
    held = checkpoint.experts(layer, range(checkpoint.num_experts))
    gate_up, down = held.gate_up.dequantize(), held.down.dequantize()
    hidden, experts, weights = batch
    answer = torch.zeros_like(hidden)
    for expert in experts.unique().tolist():
        rows, place = torch.nonzero(experts == expert, as_tuple=True)
        inner = checkpoint.activation.apply(hidden[rows] @ gate_up[expert].T)
        answer.index_add_(0, rows, weights[rows, place, None] * (inner @ down[expert].T))
    return answer


@dataclass
class Caller:
    """One client that asks until it is stopped; every answer is compared."""

    address: str
    lane: int
    asked: Callable[[], list[tuple[int, Batch, torch.Tensor]]]  # what is asked now, with its answers
    bound: float
    stop: threading.Event
    answers: int = 0
    worst: float = 0.0
    failure: str = ""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        at = self.lane
        with MoeClient(self.address, timeout=120, lane=self.lane) as client:
            while not self.stop.is_set():
                calls = self.asked()
                layer, batch, wanted = calls[at % len(calls)]
                at += 1
                try:
                    answer = client.forward(layer, *batch)
                except Exception as error:
                    self.failure = f"a call failed: {error}"
                    return
                error = float((answer.float() - wanted).norm() / wanted.norm())
                self.worst, self.answers = max(self.worst, error), self.answers + 1
                if not error <= self.bound:
                    self.failure = f"a wrong answer: relative error {error:.2e} is over {self.bound:g}"
                    return


class Exchange:
    """Experts change places, whatever the load: the most a mover can be asked for."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        """Another placement of the same experts."""
        slots = self._random.permuted(placement.slots, axis=1)
        return placement.with_slots(slots)

    def first(self, placement: Placement, load: Load) -> Placement:
        """Returns the first placement as it is."""
        return placement


@dataclass
class Watch:
    """Step times by window."""

    moving: bool = False
    counted_from: float = 0.0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    untouched: list[float] = field(default_factory=list)  # of still windows before anything had moved

    def step(self, layer: int, seconds: float) -> None:
        """Called by the coordinator when a step ends."""
        if time.monotonic() >= self.counted_from:
            self.seconds[self.moving].append(seconds)
            if not self.seconds[True]:
                self.untouched.append(seconds)

    def begin(self, *, moving: bool) -> None:
        """Begins the next window."""
        self.moving, self.counted_from = moving, time.monotonic() + SETTLE

    def ratio(self, quantile: float) -> tuple[float, float, float]:
        """Seconds with and without moves, and the ratio."""
        moving, still = (float(np.quantile(self.seconds[m], quantile)) for m in (True, False))
        return moving, still, moving / still


def run_windows(
    house: LocalCluster, args: argparse.Namespace, shift: Callable[[int], None]
) -> tuple[Watch, list[Cycle]]:
    """Windows with and without moves, one after the other."""
    watch, cycles = Watch(), []
    house.head.coordinator.observe_steps(watch.step)
    rebalancer, exchange = house.head.rebalancer, Exchange()
    started, window, before = time.monotonic(), 0, phases(house)
    while time.monotonic() - started < args.seconds:
        moving = window % 2 == 1
        watch.begin(moving=moving)
        ends = time.monotonic() + args.window
        while time.monotonic() < ends:
            if moving and args.device == "cuda":
                cycles.append(rebalancer.rebalance(exchange)[1])
            elif moving:
                shift(len(cycles))
                time.sleep(args.look)
                cycles.append(rebalancer.look())
            else:
                time.sleep(0.2)
        window += 1
        seen = phases(house)
        took = {name: (s - before[name][0]) / max(1, n - before[name][1]) for name, (s, n) in seen.items()}
        before = seen
        print(
            f"{'moving' if moving else 'still'}: mean ms by phase",
            {n: round(t * 1e3, 3) for n, t in took.items()},
        )
    watch.counted_from = float("inf")
    return watch, cycles


def phases(house: LocalCluster) -> dict[str, tuple[float, float]]:
    """Seconds and steps by phase since the start, over all ranks, as their exporters say."""
    found: dict[str, tuple[float, float]] = {}
    for address in house.metrics_targets()[1:]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for phase in PHASES:
            pattern = rf'moe_step_phase_duration_seconds_(sum|count){{[^}}]*phase="{phase}"[^}}]*}} (\S+)'
            values = {kind: float(value) for kind, value in re.findall(pattern, text)}
            seconds, steps = found.get(phase, (0.0, 0.0))
            found[phase] = seconds + values.get("sum", 0.0), steps + values.get("count", 0.0)
    return found


def kill_while_preparing(house: LocalCluster, victim: int) -> Cycle:
    """A rank that cannot vote any more is killed: the epoch is abandoned, the group forms again."""
    os.kill(house.pid(victim), signal.SIGSTOP)
    threading.Timer(0.5, lambda: os.kill(house.pid(victim), signal.SIGKILL)).start()
    _, cycle = house.head.rebalancer.rebalance(Exchange())
    house.head.coordinator.wait_serving(120)
    return cycle


def main() -> None:
    """Runs the house, its callers and the windows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--window", type=float, default=15.0)
    parser.add_argument("--look", type=float, default=1.0, help="seconds between looks at the load, on CPU")
    parser.add_argument("--weights", choices=("fp32", "fp8", "nvfp4"), default="fp32")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second into a rank; 0: unbounded")
    parser.add_argument("--staging-slots", type=int, default=2)
    parser.add_argument("--experts", type=int, help="of each layer, over all ranks")
    args = parser.parse_args()
    size = SIZES[args.device]
    size = replace(size, experts=args.experts or size.experts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_checkpoint(path, size, args.weights)
        tune_process()  # the head lives in this process, as in that of `moeserve serve`
        with LocalCluster(config_of(args, path, size)) as house:
            results, wrong = measure(house, args, path, size)
    write(results)
    if wrong:
        print("\n".join(wrong))
        sys.exit(1)


def config_of(args: argparse.Namespace, path: Path, size: Size) -> Config:
    """Four ranks with whole experts and a few spare slots."""
    return Config().with_values(
        {
            "model.checkpoint": str(path),
            "parallel.data_parallel_size": args.ranks,
            "parallel.enable_expert_parallel": True,
            "plan.device": args.device,
            "server.port": 0,
            "server.metrics_port": 0,
            "step.lane_rows": 256,
            "balance.redundant_experts": size.redundant,
            "balance.staging_slots": args.staging_slots,
            "balance.move_bytes_per_second": args.rate,
            "balance.min_tokens": 256,
        }
    )


def measure(
    house: LocalCluster, args: argparse.Namespace, path: Path, size: Size
) -> tuple[list[Result], list[str]]:
    """The windows, then the killed rank; the figures, and what went wrong."""
    workloads, bound = prepared(house, args, path, size)
    now = [0]
    stop = threading.Event()
    callers = [
        Caller(house.address, lane, lambda: workloads[now[0]], bound, stop)
        for lane in range(args.ranks if args.device == "cuda" else 2)
    ]

    def shift(turn: int) -> None:
        now[0] = turn // 3 % len(workloads)  # three looks at each workload

    while not all(caller.answers > WARM or caller.failure for caller in callers):
        time.sleep(0.1)  # kernels are compiled at first use
    watch, cycles = run_windows(house, args, shift)
    killed = kill_while_preparing(house, args.ranks - 1)
    time.sleep(2.0)
    stop.set()
    for caller in callers:
        caller.thread.join(60)
    return figures(args, watch, cycles, callers, killed)


def prepared(
    house: LocalCluster, args: argparse.Namespace, path: Path, size: Size
) -> tuple[list[list[tuple[int, Batch, torch.Tensor]]], float]:
    """Returns each workload's calls with their right answers, and how far an answer may be from them."""
    workloads = [
        [
            (layer, make_batch(size, workload, 100 * workload + at))
            for at in range(6)
            for layer in range(size.layers)
        ]
        for workload in range(4)
    ]
    if args.device == "cpu":
        return [[(layer, b, alone(path, layer, b)) for layer, b in calls] for calls in workloads], 1e-4
    with MoeClient(house.address, timeout=120) as client:
        return [[(layer, b, client.forward(layer, *b)) for layer, b in calls] for calls in workloads], 2e-2


def figures(
    args: argparse.Namespace, watch: Watch, cycles: list[Cycle], callers: list[Caller], killed: Cycle
) -> tuple[list[Result], list[str]]:
    """What the run says, printed and as results."""
    moved = [cycle for cycle in cycles if cycle.outcome == "moved"]
    moves, nbytes = (sum(getattr(cycle, name) for cycle in moved) for name in ("moves", "nbytes"))
    seconds = sum(cycle.seconds for cycle in moved)
    answers = sum(caller.answers for caller in callers)
    setting = f"{args.device}, {args.weights}, {args.ranks} ranks"
    rate = nbytes / seconds / args.ranks / 1e9 if seconds else 0.0
    results = [
        Result("moves", f"rebalances completed under load, {setting}", len(moved), "cycles", "higher", 20),
        Result(
            "moves",
            f"calls failed or wrong, {setting}",
            sum(bool(c.failure) for c in callers),
            "calls",
            "lower",
            0,
        ),
        Result(
            "moves",
            f"bytes into a rank while moving, {setting}",
            rate,
            "GB/s",
            "higher",
            20 if args.device == "cuda" else None,
        ),
    ]
    for name, quantile, aim in (("median", 0.5, 1.05), ("p99", 0.99, 1.25 if args.device == "cpu" else 1.05)):
        moving, still, ratio = watch.ratio(quantile)
        peers = {"moving, ms": moving * 1e3, "still, ms": still * 1e3}
        results.append(
            Result("moves", f"{name} step, moving over still, {setting}", ratio, "x", "lower", aim, peers)
        )
    for result in results:
        print(f"{result.case}: {result.ours:.3f} {result.unit} (aim {result.aim}) {dict(result.peers)}")
    outcomes = {name: sum(c.outcome == name for c in cycles) for name in {c.outcome for c in cycles}}
    print(f"{answers} answers, worst relative error {max(c.worst for c in callers):.2e}; cycles {outcomes}")
    epochs, steps = sum(c.epochs for c in moved), {m: len(v) for m, v in watch.seconds.items()}
    print(f"{moves} experts, {nbytes / 1e6:.1f} MB in {epochs} epochs; steps, moving or not: {steps}")
    print(f"median step before anything had moved: {statistics.median(watch.untouched) * 1e3:.2f} ms")
    print(f"median cycle {statistics.median(c.seconds for c in moved) if moved else 0:.3f} s")
    print(f"killed while preparing: {killed.outcome}, {killed.reason}")
    wrong = [caller.failure for caller in callers if caller.failure]
    if killed.outcome != "abandoned":
        wrong.append(f"the epoch of a killed rank was {killed.outcome}")
    return results, wrong


if __name__ == "__main__":
    main()
