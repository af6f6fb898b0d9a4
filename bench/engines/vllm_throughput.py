"""vLLM with its experts behind a service beside vLLM alone, on the same cores: tokens a second, and where
time goes.

    .venv-vllm/bin/python -m bench.engines.vllm_throughput [--tokens 64] [--rounds 5] [--turns 1]
        [--ranks 2] [--record]

A small Qwen3-MoE in bf16, random weights, prompts of 32 tokens; 1 request, and 16 at once. vLLM alone, vLLM
behind a service by messages, and by a device lane take `--turns` turns; in each an engine starts, generates
`--rounds` times, and the best round but the first counts. `waiting` is the part of all that time in which
vLLM's forward passes waited for answers of the service; of a call, what passed between its arrival at a lane
and its answer, and the phases of its step, are the service's own metrics. Engine and service share the
machine's cores, and the experts' arithmetic, which vLLM alone does itself, is in the waiting. Run it where
nothing else does; `--record` refuses to write where something else ran. The machine's load is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
from checkpoints import make_checkpoint
from engine_runs import house_of, run_engine
from prometheus_client.parser import text_string_to_metric_families

from bench.lib.quiet import idle
from bench.lib.record import Result, write
from moeserve.runtime.launch.local_cluster import LocalCluster

SIZES = {"hidden": 512, "inner": 256, "experts": 32, "top_k": 4, "layers": 8}
PROMPT = 32
REQUESTS = (1, 16)
OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 256,
}


MODES = ("remote", "attached")


def main() -> int:
    """Prints a line for each number of requests and mode; 1 where an engine failed, or nothing could be
    recorded.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="that each request generates")
    parser.add_argument("--rounds", type=int, default=5, help="of the same prompts, in each engine")
    parser.add_argument("--turns", type=int, default=1, help="of all engines, one after the other")
    parser.add_argument("--ranks", type=int, default=2, help="of the service; over gloo if more than one")
    parser.add_argument("--record", action="store_true", help="write bench/results/vllm_throughput.jsonl")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds={options.rounds}: the first of 2 or more does not count")
    quiet, results = idle(sample=1.0), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, **SIZES)
        for requests in REQUESTS:
            try:
                results += of_requests(path, requests, options)
            except EngineFailed as failed:
                print(failed, file=sys.stderr)
                return 1
    if options.record and not (quiet and idle(sample=1.0)):
        print("other processes keep the machine busy: nothing is recorded", file=sys.stderr)
        return 1
    if options.record:
        write(results)
    return 0


class EngineFailed(RuntimeError):
    """An engine ended with an error; the text is what it wrote."""


def of_requests(path: Path, requests: int, options: argparse.Namespace) -> list[Result]:
    """Tokens a second of each mode beside vLLM alone, with so many requests at once."""
    alone: list[float] = []
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    where: dict[str, str] = {}
    tokens = requests * options.tokens
    for _ in range(options.turns):
        alone.append(rate(tokens, run(path, None, requests, options)))
        for mode in MODES:
            with house_of(path, options.ranks) as house:
                found = run(path, house.address, requests, options, mode)
                rates[mode].append(rate(tokens, found))
                where[mode] = parts_of(found, of_a_call(house))
    results = [
        Result(
            "vllm_throughput",
            f"{requests} requests, {mode}, {options.ranks} rank{'s' * (options.ranks > 1)}",
            max(rates[mode]),
            "tokens/s",
            "higher",
            peers={"vLLM alone": max(alone)},
        )
        for mode in MODES
    ]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    for mode, result in zip(MODES, results, strict=True):
        turns = " ".join(f"{value:.1f}" for value in rates[mode])
        print(
            f"{requests:3} requests: vLLM alone {result.peers['vLLM alone']:7.1f} tokens/s "
            f"({' '.join(f'{value:.1f}' for value in alone)}), {mode} {result.ours:7.1f} ({turns}), "
            f"{result.ratio('vLLM alone'):.2f}x; {where[mode]}; load {load}",
            flush=True,
        )
    return results


def run(
    path: Path, address: str | None, requests: int, options: argparse.Namespace, mode: str = ""
) -> dict[str, Any]:
    """What the engine wrote after rounds of the same prompts. Raises EngineFailed."""
    asked = [[3 + (7 * i + 13 * j) % 250 for j in range(PROMPT)] for i in range(requests)]
    with tempfile.TemporaryDirectory() as folder:
        found = run_engine(
            "vllm_generate.py",
            Path(folder),
            path,
            address,
            # all cores of this process, for vLLM alone too
            {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "MOESERVE_EXPERTS_MODE": mode},
            prompts=asked,
            rounds=[None] * options.rounds,
            sampling={"max_tokens": options.tokens},
            options=OPTIONS,
        )
    if "failed" in found:
        raise EngineFailed(found["said"])
    return found


def rate(tokens: int, found: dict[str, Any]) -> float:
    """Tokens a second of the best round but the first."""
    return float(tokens / min(found["round_seconds"][1:]))


def of_a_call(house: LocalCluster) -> dict[str, float]:
    """Milliseconds of a call at a lane, and of each phase of a step at a rank, by name."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for target in house.metrics_targets():
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = name_of(family.name, sample.labels)
                if name and sample.name.endswith("_sum"):
                    sums[name] = sums.get(name, 0.0) + sample.value
                elif name and sample.name.endswith("_count"):
                    counts[name] = counts.get(name, 0.0) + sample.value
    return {name: 1e3 * total / counts[name] for name, total in sums.items() if counts[name]}


def name_of(family: str, labels: dict[str, str]) -> str | None:
    """What a histogram of a rank measures, None for others."""
    if family == "moe_step_phase_duration_seconds":
        return labels["phase"]
    if family == "moe_request_duration_seconds" and labels["method"].startswith("Forward"):
        return "at a lane" if "rank" in labels else None
    return None


def parts_of(found: dict[str, Any], service: dict[str, float]) -> str:
    """Where a call's time goes."""
    (worker,) = found["workers"]
    waiting = worker["waited"] / sum(found["round_seconds"])
    each = worker["waited"] / worker["calls"] * 1e3
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sorted(service.items()))
    return f"waiting {waiting:.0%} of the time, {each:.2f} ms a call; in ms: {parts}"


if __name__ == "__main__":
    sys.exit(main())
