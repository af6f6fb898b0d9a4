"""vLLM with its experts behind a service beside vLLM alone, on the same cores: tokens a second, and where
time goes.

    .venv-vllm/bin/python -m bench.engines.vllm_throughput [--tokens 64] [--rounds 5] [--record]

A small Qwen3-MoE in bf16, random weights, prompts of 32 tokens; 1 request, and 16 at once. Each engine
generates `--rounds` times, and the best but the first counts. `waiting` is the part of all that time in which
vLLM's forward passes waited for answers of the service; of a call, what passed between its arrival at a lane
and its answer, and the phases of its step, are the service's own metrics. Engine and service share the
machine's cores, and the experts' arithmetic, which vLLM alone does itself, is in the waiting. Run it where
nothing else does; `--record` refuses to write where something else ran.
"""

from __future__ import annotations

import argparse
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


def main() -> int:
    """Prints a line for each number of requests; 1 where an engine failed, or nothing could be recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="that each request generates")
    parser.add_argument("--rounds", type=int, default=5, help="of the same prompts, in each engine")
    parser.add_argument("--record", action="store_true", help="write bench/results/vllm_throughput.jsonl")
    options = parser.parse_args()
    quiet, results = idle(sample=1.0), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, **SIZES)
        for requests in REQUESTS:
            alone = run(path, None, requests, options)
            with house_of(path) as house:
                remote = run(path, house.address, requests, options)
                service = of_a_call(house)
            for answer in (alone, remote):
                if "failed" in answer:
                    print(answer["said"], file=sys.stderr)
                    return 1
            result = compared(requests, requests * options.tokens, alone, remote)
            print(line(requests, result, remote, service), flush=True)
            results.append(result)
    if options.record and not (quiet and idle(sample=1.0)):
        print("other processes keep the machine busy: nothing is recorded", file=sys.stderr)
        return 1
    if options.record:
        write(results)
    return 0


def run(path: Path, address: str | None, requests: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the engine wrote after rounds of the same prompts."""
    asked = [[3 + (7 * i + 13 * j) % 250 for j in range(PROMPT)] for i in range(requests)]
    with tempfile.TemporaryDirectory() as folder:
        return run_engine(
            "vllm_generate.py",
            Path(folder),
            path,
            address,
            {},
            prompts=asked,
            rounds=[None] * options.rounds,
            sampling={"max_tokens": options.tokens},
            options=OPTIONS,
        )


def compared(requests: int, tokens: int, alone: dict[str, Any], remote: dict[str, Any]) -> Result:
    """Tokens a second of the best rounds."""
    ours, theirs = (tokens / min(found["round_seconds"][1:]) for found in (remote, alone))
    return Result(
        "vllm_throughput",
        f"{requests} requests",
        ours,
        "tokens/s",
        "higher",
        peers={"vLLM alone": theirs},
    )


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


def line(requests: int, result: Result, remote: dict[str, Any], service: dict[str, float]) -> str:
    """One line of the table: tokens a second, and where a call's time goes."""
    (worker,) = remote["workers"]
    waiting = worker["waited"] / sum(remote["round_seconds"])
    each = worker["waited"] / worker["calls"] * 1e3
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sorted(service.items()))
    return (
        f"{requests:3} requests: vLLM alone {result.peers['vLLM alone']:7.1f} tokens/s, "
        f"behind moeserve {result.ours:7.1f} ({result.ratio('vLLM alone'):.2f}x); "
        f"waiting {waiting:.0%} of the time, {each:.2f} ms a call; in ms: {parts}"
    )


if __name__ == "__main__":
    sys.exit(main())
