"""Runs SGLang's engine once, and writes what it generated: `python sglang_generate.py JOB.json ANSWER.json`.

The model runs in the scheduler's process, which the engine spawns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    import sglang

    started = time.monotonic()
    engine = sglang.Engine(
        model_path=job["model"],
        skip_tokenizer_init=True,
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        max_total_tokens=8192,
        mem_fraction_static=0.1,
        log_level="info",
        **job["options"],
    )
    loaded = time.monotonic() - started
    sampling = {"temperature": 0, "max_new_tokens": job["sampling"]["max_tokens"], "ignore_eos": True}
    rounds = []
    try:
        for weights in rounds_of(job):
            if weights is not None:
                reload(job["address"], weights)
                engine.flush_cache()
            answers = engine.generate(
                input_ids=job["prompts"],
                sampling_params=sampling,
                return_logprob=True,
                top_logprobs_num=job["sampling"]["logprobs"],
            )
            rounds.append([{"tokens": one["output_ids"], "logprobs": positions(one)} for one in answers])
    finally:
        engine.shutdown()
    return {"rounds": rounds, "loaded": loaded}


def rounds_of(job: dict[str, Any]) -> Iterator[str | None]:
    """The weights of each round; where the job names a file, one round after the other while it is there."""
    yield from job["rounds"]
    while "while" in job and Path(job["while"]).exists():
        yield None


def positions(answer: dict[str, Any]) -> list[dict[str, float]]:
    """Log-probabilities of the most probable tokens at each generated position."""
    return [
        {str(token): value for value, token, _ in position}
        for position in answer["meta_info"]["output_top_logprobs"]
    ]


def reload(address: str, weights: str) -> None:
    """Brings the service to other weights."""
    from moeserve.proto.client import MoeClient

    with MoeClient(address, timeout=60) as client:
        reply = client.reload(weights)
        assert reply.outcome == "reloaded", reply


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
