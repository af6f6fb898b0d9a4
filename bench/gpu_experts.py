"""Our expert kernels on one H200 beside peers: a whole MLP, from hidden states, ids and weights to the sum.

Routing is drawn as the peers' own script draws it; the L2 cache is flushed between replays of a CUDA graph;
medians. Peers' numbers are of another run on the same kind of GPU, without a flush.
usage: python bench/gpu_experts.py [--kinds nvfp4,mxfp4,fp8,bf16] [--tokens 1,32,128,512,16384] [--tune FILE]
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

import gpu_rows
import record
import torch
import triton
from torch import Tensor

from moeserve.experts.activation import Activation
from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights
from moeserve.experts.kernel import Kernel, KernelSpec
from moeserve.experts.kernels import KERNELS, hopper
from moeserve.experts.kernels.tiles import Tile
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats import BF16, FP8_BLOCK
from moeserve.quant.formats.fp8 import FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4

TABLE = record.ROOT / "moeserve" / "experts" / "kernels" / "tiles" / "h200.json"

EXPERTS, TOP_K = 64, 2
SHAPE = ExpertShape(7168, 2048, Activation("silu"))

KINDS = {
    "nvfp4": ("triton_fp4", Scheme(NVFP4, BF16)),
    "mxfp4": ("triton_fp4", Scheme(MXFP4, BF16)),
    "fp8": ("triton_fp8", Scheme(FP8_BLOCK, FP8_GROUP)),
    "bf16": ("triton_bf16", Scheme(BF16, BF16)),
}
AIMS = {
    "nvfp4": {1: 45, 32: 290, 128: 430, 512: 450, 16384: 4700},
    "mxfp4": {512: 450, 16384: 4700},
    "fp8": {1: 45, 32: 425, 128: 690, 512: 700, 16384: 2850},
    "bf16": {1: 45, 512: 1320, 16384: 4500},
}
PEERS = {
    "nvfp4": {
        "vLLM Marlin, another run": {1: 58, 8: 167, 32: 411, 128: 593, 512: 849, 2048: 1975, 16384: 11330}
    },
    "mxfp4": {
        "vLLM Marlin, another run": {1: 56, 8: 139, 32: 359, 128: 592, 512: 865, 2048: 1982, 16384: 11584}
    },
    "fp8": {
        "vLLM Triton, another run": {1: 75, 8: 203, 32: 453, 128: 769, 512: 809, 2048: 1133, 16384: 5732},
        "DeepGEMM, two GEMMs only, another run": {32: 735, 128: 741, 512: 758, 2048: 761, 16384: 2584},
    },
    "bf16": {
        "vLLM Triton, another run": {1: 65, 8: 350, 32: 831, 128: 1270, 512: 1403, 2048: 1688, 16384: 7074}
    },
}
"""Microseconds by tokens, measured 2026-11-20 on an H200 in a run of their own."""


def matrix(form: Format, n: int, k: int) -> Packed:
    """Random weights `[EXPERTS, n, k]`, made expert by expert so that they fit beside the others."""
    whole = form.empty((EXPERTS, n, k), "cuda")
    for e in range(EXPERTS):
        one = form.quantize(torch.randn(1, n, k, device="cuda") * 2 / k**0.5)
        for into, part in zip(whole.parts, one.parts, strict=True):
            into[e].view(torch.uint8).copy_(part[0].view(torch.uint8))
    return whole


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


@dataclass(frozen=True)
class Inputs:
    """What a model server would send."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, tokens: int) -> "Inputs":
        hidden = torch.randn(tokens, SHAPE.hidden, device="cuda").bfloat16() * 0.5
        ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, 1).indices.int()
        return cls(hidden, ids, torch.rand(tokens, TOP_K, device="cuda"))


class Experts:
    """One kind's kernel with its weights in a bank."""

    def __init__(self, kind: str) -> None:
        row, self.scheme = KINDS[kind]
        self.spec = KernelSpec(self.scheme, SHAPE, torch.bfloat16)
        self.kernel: Kernel = KERNELS[row].build(self.spec)
        self.weights = ExpertWeights(
            matrix(self.scheme.weights, SHAPE.gate_up_rows, SHAPE.hidden),
            matrix(self.scheme.weights, SHAPE.hidden, SHAPE.inner),
        )
        self.bank = Bank()
        self.bank.load(0, self.kernel, self.weights, range(EXPERTS))

    def group(self, inputs: Inputs) -> tuple[ExpertBatch, Tensor]:
        return gpu_rows.group(inputs.hidden, inputs.ids, EXPERTS, self.scheme.activations)

    def run(self, inputs: Inputs) -> Tensor:
        batch, places = self.group(inputs)
        return gpu_rows.home(self.kernel.apply(self.bank[0], batch), places, inputs.weights)

    def error(self, inputs: Inputs) -> float:
        """RMS error of the rows against the reference, relative to its RMS."""
        batch, _ = self.group(inputs)
        reference = TorchReference(KernelSpec(self.scheme, SHAPE, torch.float32))
        wanted = reference.apply(reference.prepare(self.weights), batch)
        found = self.kernel.apply(self.bank[0], batch).float()
        return float((found - wanted).norm() / wanted.norm())


MOST_ROWS = {"1": 0.5, "32": 6, "512": 24, "2048": 96, "16384": None}
"""Tokens a tile is tuned with -> the most rows a slot it then serves."""


def tune(arguments: argparse.Namespace) -> None:
    """Times the kernel alone with each tile of the file and writes the fastest into the shipped table."""
    best: dict[str, list[object]] = {}
    for kind, cases in json.loads(Path(arguments.tune).read_text()).items():
        experts = None
        torch.cuda.empty_cache()
        experts = Experts(kind)
        rows = best.setdefault("fp4" if kind == "nvfp4" else kind, [])
        for tokens, tiles in cases.items():
            batch, _ = experts.group(Inputs.of(int(tokens)))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,16384")
    parser.add_argument("--repeats", type=int, default=33)
    parser.add_argument("--tune", default="", help="file of tiles to try: kind -> {tokens: [tile]}")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tune:
        tune(arguments)
        return
    results = []
    for kind, tokens in itertools.product(arguments.kinds.split(","), map(int, arguments.tokens.split(","))):
        if tokens == int(arguments.tokens.split(",")[0]):
            experts = None
            torch.cuda.empty_cache()
            experts = Experts(kind)
            print(f"{kind}: error against the reference {experts.error(Inputs.of(32)):.2e}", flush=True)
        inputs = Inputs.of(tokens)
        batch, _ = experts.group(inputs)
        times = medians(
            {
                "whole": lambda e=experts, i=inputs: e.run(i),
                "kernel": lambda e=experts, b=batch: e.kernel.apply(e.bank[0], b),
            },
            arguments.repeats,
        )
        peers = {name: table[tokens] for name, table in PEERS[kind].items() if tokens in table}
        active = inputs.ids.unique().numel()
        nbytes = experts.bank.nbytes * active / EXPERTS
        flops = 6 * tokens * TOP_K * SHAPE.hidden * SHAPE.inner
        print(
            f"{kind:6s} {tokens:6d} tokens, {active:3d} active: {times['whole']:8.1f} us, "
            f"kernel alone {times['kernel']:8.1f} us, {nbytes / times['whole'] / 1e6:5.2f} TB/s, "
            f"{flops / times['whole'] / 1e6:7.1f} TFLOP/s; peers {peers}",
            flush=True,
        )
        aim = AIMS[kind].get(tokens)
        for part, value in times.items():
            results.append(
                record.Result(
                    "gpu_experts",
                    f"{kind}, {tokens} tokens x {TOP_K}, {active} of {EXPERTS} experts active, {part}",
                    round(value, 1),
                    "us",
                    "lower",
                    float(aim) if aim and part == "whole" else None,
                    peers if part == "whole" else {},
                )
            )
    record.write(results)


if __name__ == "__main__":
    main()
