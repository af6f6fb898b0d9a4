"""vLLM with its experts behind a service beside vLLM alone, on the same cores: tokens a second, and where
time goes.

    .venv-vllm/bin/python -m bench.engines.vllm_throughput [--tokens 64]

A small Qwen3-MoE in bf16, random weights, prompts of 32 tokens; 1 request, and 16 at once. Each engine
generates twice, and the second time counts. `waiting` is the part of that time in which vLLM's forward passes
waited for answers of the service: the calls, the steps, and the experts' arithmetic, which vLLM alone does
itself. Engine and service share the machine's cores. Run it where nothing else does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
from checkpoints import make_checkpoint
from engine_runs import house_of, run_engine

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
    """Prints a line for each number of requests; 1 where an engine failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="that each request generates")
    tokens = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, **SIZES)
        for requests in REQUESTS:
            alone = run(path, None, requests, tokens)
            with house_of(path) as house:
                remote = run(path, house.address, requests, tokens)
            for answer in (alone, remote):
                if "failed" in answer:
                    print(answer["said"], file=sys.stderr)
                    return 1
            print(line(requests, requests * tokens, alone, remote))
    return 0


def run(path: Path, address: str | None, requests: int, tokens: int) -> dict[str, Any]:
    """What the engine wrote after two rounds of the same prompts."""
    asked = [[3 + (7 * i + 13 * j) % 250 for j in range(PROMPT)] for i in range(requests)]
    with tempfile.TemporaryDirectory() as folder:
        return run_engine(
            "vllm_generate.py",
            Path(folder),
            path,
            address,
            {},
            prompts=asked,
            rounds=[None, None],
            sampling={"max_tokens": tokens},
            options=OPTIONS,
        )


def line(requests: int, tokens: int, alone: dict[str, Any], remote: dict[str, Any]) -> str:
    """One line of the table: tokens a second, and the part of the time that was waiting."""
    ours, theirs = remote["round_seconds"][-1], alone["round_seconds"][-1]
    (worker,) = remote["workers"]
    waiting = worker["waited"] / sum(remote["round_seconds"])
    each = worker["waited"] / worker["calls"] * 1e3
    return (
        f"{requests:3} requests: vLLM alone {tokens / theirs:7.1f} tokens/s, "
        f"behind moeserve {tokens / ours:7.1f} "
        f"({theirs / ours:.2f}x); waiting {waiting:.0%} of the time, {each:.2f} ms a call"
    )


if __name__ == "__main__":
    sys.exit(main())
