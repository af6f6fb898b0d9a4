"""What the first call costs on one rank, and the first of each size, beside a call that is made again.

    python -m bench.service.first_calls [--device cuda|cpu] [--hidden 2048] [--inner 768] [--experts 64]
                                        [--graph-rows 2048] [--cold]

Serves a random Qwen3-MoE-shaped checkpoint of two layers from one rank and asks it over gRPC, a lane, with
rows 1, 2, 4, ... 4096: the first two calls of a size (a graph is recorded at the second) and the median of
twenty more. Then the same for logits, which `Rank.step` routes on the device, in this process. `--cold` gives
Triton and our own compiled kernels empty caches, so that nothing is left from an earlier run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.lib.checkpoint import Qwen3Moe, write_checkpoint

TOP_K, LAYERS, AGAIN, MOST_ROWS = 8, 2, 20, 4096


def make_checkpoint(folder: Path, sizes: argparse.Namespace) -> None:
    """Config and random bf16 weights as transformers writes them."""
    model = Qwen3Moe(sizes.hidden, sizes.inner, sizes.experts, TOP_K, LAYERS)
    tensors = {name: (torch.randn(shape) / shape[1] ** 0.5).bfloat16() for name, shape in model.matrices()}
    write_checkpoint(folder, model.config(), tensors)


def report(title: str, call: Callable[[int], object], most: int) -> None:
    """One line a size: milliseconds of the first call, the second, and the median of later ones."""
    print(f"{title}\n{'rows':>6} {'first':>9} {'second':>9} {'again':>9}  ms", flush=True)
    rows = 1
    while rows <= most:
        seconds = []
        for _ in range(2 + AGAIN):
            began = time.perf_counter()
            call(rows)
            seconds.append(time.perf_counter() - began)
        first, second, again = seconds[0], seconds[1], statistics.median(seconds[2:])
        print(f"{rows:6d} {first * 1e3:9.2f} {second * 1e3:9.2f} {again * 1e3:9.2f}", flush=True)
        rows *= 2


def over_grpc(folder: str, args: argparse.Namespace) -> None:
    """A service of one rank, as callers see it."""
    from moeserve.proto.client import MoeClient
    from moeserve.runtime.launch.environment import tune_process
    from moeserve.runtime.launch.local_cluster import LocalCluster

    tune_process()
    began = time.perf_counter()
    with LocalCluster(config_of(folder, args)) as cluster, MoeClient(cluster.address, timeout=300) as client:
        print(f"serving after {time.perf_counter() - began:.2f} s", flush=True)

        def call(rows: int) -> object:
            random = torch.Generator().manual_seed(rows)
            weights, experts = torch.rand(rows, args.experts, generator=random).softmax(1).topk(TOP_K)
            hidden = torch.randn(rows, args.hidden, generator=random).bfloat16()
            return client.forward(0, hidden, experts.int(), weights, lane=0)

        report("a call of one lane over gRPC, with choices", call, args.most_rows)


def in_process(folder: str, args: argparse.Namespace) -> None:
    """The rank alone, with router logits; on a GPU each step is waited for."""
    from moeserve.runtime.launch.torchrun import join_torchrun, leave_torchrun
    from moeserve.runtime.step import LaneLogits

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    began = time.perf_counter()
    rank = join_torchrun(config_of(folder, args))
    print(f"\njoined after {time.perf_counter() - began:.2f} s; holds {rank.held_bytes()}", flush=True)
    device = rank.device

    def call(rows: int) -> object:
        valid = torch.ones(rows, dtype=torch.bool, device=device)
        hidden = torch.zeros((rows, args.hidden), dtype=torch.bfloat16, device=device)
        lane = LaneLogits(hidden, torch.zeros((rows, args.experts), device=device), valid)
        answer, _ = rank.step(0, lane, (rows,))
        return answer.cpu()

    report("a step in this process, with logits", call, args.most_rows)
    leave_torchrun(rank)


def config_of(folder: str, args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """One rank on the device asked for."""
    from moeserve.runtime.config import Config

    values = {
        "model.checkpoint": folder,
        "plan.device": args.device,
        "step.graph_rows": args.graph_rows,
        "step.lane_rows": args.most_rows,
        "server.port": 0,
        "server.metrics_port": -1,
    }
    return Config().with_values(values).checked()


def main() -> None:
    """Makes the checkpoint, serves it, and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--most-rows", type=int, default=MOST_ROWS)
    parser.add_argument("--graph-rows", type=int, default=2048, help="step.graph_rows; 0: no CUDA graphs")
    parser.add_argument("--cold", action="store_true", help="with empty caches of compiled kernels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as caches:
        if args.cold:
            os.environ |= {"TRITON_CACHE_DIR": f"{caches}/triton", "MOESERVE_CACHE": f"{caches}/moeserve"}
        make_checkpoint(Path(folder), args)
        over_grpc(folder, args)
        in_process(folder, args)


if __name__ == "__main__":
    main()
