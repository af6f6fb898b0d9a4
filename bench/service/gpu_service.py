"""The whole service on GPUs: ranks over NCCL, answers against float32 on one GPU, call times, a killed rank.

    python -m bench.service.gpu_service [--launcher local|ray] [--weights bf16|fp8] [--ranks 4]
        [--dispatcher NAME] [--graph-rows N]

Makes a Qwen3-MoE-shaped checkpoint of two layers with random weights. Writes
bench/results/gpu_service.jsonl.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.lib.checkpoint import Qwen3Moe, write_checkpoint
from bench.lib.record import Result, write
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.experts.activation import Activation
from moeserve.proto.client import MoeClient
from moeserve.quant.formats import FP8_BLOCK
from moeserve.runtime.config import Config

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 2048, 768, 64, 8, 2
ERROR_BOUNDS = {"bf16": 1e-2, "fp8": 5e-2}  # relative to float32 from the same weights, activations unrounded
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def make_checkpoint(folder: Path, weights: str) -> None:
    """Writes config and weights as transformers does, and FP8 blocks as DeepSeek does."""
    model = Qwen3Moe(HIDDEN, INNER, EXPERTS, TOP_K, LAYERS)
    torch.manual_seed(0)
    tensors = {}
    for key, shape in model.matrices():
        values = torch.randn(shape) / shape[1] ** 0.5
        if weights == "fp8":
            tensors[key], tensors[f"{key}_scale_inv"] = FP8_BLOCK.quantize(values).parts
        else:
            tensors[key] = values.bfloat16()
    write_checkpoint(folder, model.config(quantization=BLOCKS if weights == "fp8" else None), tensors)


@cache
def decoded(path: Path, layer: int) -> tuple[torch.Tensor, torch.Tensor, Activation]:
    """A layer's weights in float32 on one GPU, and its activation."""
    checkpoint = Checkpoint(path)
    weights = checkpoint.experts(layer, range(EXPERTS)).to("cuda:0")
    return weights.gate_up.dequantize(), weights.down.dequantize(), checkpoint.activation


def reference(path: Path, layer: int, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns the layer's answer in float32, computed on one GPU."""
    gate_up, down, activation = decoded(path, layer)
    hidden, experts, shares = (tensor.to("cuda:0") for tensor in batch)
    answer = torch.zeros(hidden.shape, device="cuda:0")
    for expert in range(EXPERTS):
        rows, place = torch.nonzero(experts == expert, as_tuple=True)
        inner = activation.apply(hidden[rows].float() @ gate_up[expert].T)
        answer.index_add_(0, rows, shares[rows, place, None] * (inner @ down[expert].T))
    return answer.cpu()


def make_batch(rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Hidden states in bf16, experts, weights."""
    random = torch.Generator().manual_seed(seed)
    weights, experts = torch.rand(rows, EXPERTS, generator=random).softmax(1).topk(TOP_K)
    return torch.randn(rows, HIDDEN, generator=random).bfloat16(), experts.int(), weights


def error_of(answer: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error by Frobenius norm; NaN never passes."""
    return float((answer.float() - wanted).norm() / wanted.norm())


def check(client: MoeClient, path: Path, bound: float) -> None:
    """Answers against float32, several sizes, both layers; small steps as launched, recorded and replayed."""
    for rows in (1, 16, 128, 2048):
        for layer in range(LAYERS):
            errors = []
            for turn in range(4):
                batch = make_batch(rows, rows + layer + 100 * turn)
                errors.append(error_of(client.forward(layer, *batch), reference(path, layer, batch)))
            print(f"layer {layer}, {rows} rows: relative error {max(errors):.2e}", flush=True)
            if not max(errors) < bound:
                raise SystemExit(f"relative errors {errors} are over {bound}")


def time_calls(client: MoeClient, setting: str) -> list[Result]:
    """Median milliseconds of a call to one lane, by rows."""
    results = []
    for rows in (8, 256):
        batch = make_batch(rows, 1)
        seconds = []
        for turn in range(120):
            started = time.perf_counter()
            client.forward(turn % LAYERS, *batch, lane=0)
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds[20:]) * 1e3
        print(f"{rows} rows x {HIDDEN}: {median:.2f} ms a call", flush=True)
        case = f"{rows} rows x {HIDDEN}, {setting}"
        results.append(Result("gpu_service", case, median, "ms", "lower"))
    return results


def kill_and_wait(cluster: Any, client: MoeClient, path: Path, bound: float) -> float:
    """Kills a rank; seconds until the group answers again, rightly."""
    victim, started = cluster.pid(1), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    batch = make_batch(64, 7)
    answer = client.forward(0, *batch, timeout=120)
    seconds = time.monotonic() - started
    error = error_of(answer, reference(path, 0, batch))
    print(f"rank 1 killed: right again after {seconds:.1f} s (relative error {error:.2e})", flush=True)
    if not error < bound:
        raise SystemExit(f"relative error {error} after a rank was replaced")
    return seconds


def main() -> None:
    """Runs the service and asks it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--weights", choices=tuple(ERROR_BOUNDS), default="bf16")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dispatcher", default="auto", help="by name; auto: by measured cost")
    parser.add_argument(
        "--graph-rows", type=int, default=Config().step.graph_rows, help="step.graph_rows; 0: no CUDA graphs"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_checkpoint(path, args.weights)
        config = Config().with_values(
            {
                "model.checkpoint": folder,
                "parallel.data_parallel_size": args.ranks,
                "parallel.enable_expert_parallel": True,
                "plan.device": "cuda",
                "plan.all2all_backend": args.dispatcher,
                "step.graph_rows": args.graph_rows,
                "server.port": 0,
                "server.metrics_port": 0,
            }
        )
        if args.launcher == "local":
            from moeserve.runtime.launch.environment import tune_process
            from moeserve.runtime.launch.local_cluster import LocalCluster as Cluster

            tune_process()  # the head lives in this process, as in that of `moeserve serve`
        else:
            from moeserve.runtime.launch.on_ray.ray_cluster import RayCluster as Cluster
        started = time.monotonic()
        with Cluster(config) as cluster, MoeClient(cluster.address, timeout=120) as client:
            print(f"serving after {time.monotonic() - started:.1f} s", flush=True)
            print(client.model().layers[0], flush=True)
            bound = ERROR_BOUNDS[args.weights]
            check(client, path, bound)
            graphs = "graphs" if args.graph_rows else "launched"
            setting = f"{EXPERTS} experts, {args.weights} weights, {args.ranks} ranks, {args.launcher}"
            setting += f", {args.dispatcher}, {graphs}"
            results = time_calls(client, setting)
            seconds = kill_and_wait(cluster, client, path, bound)
            results.append(
                Result("gpu_service", f"killed rank, right again, {setting}", seconds, "s", "lower")
            )
    write(results)


if __name__ == "__main__":
    main()
