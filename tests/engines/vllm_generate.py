"""Runs vLLM once, in this process, and writes what it generated: `python vllm_generate.py JOB.json
ANSWER.json`.

A process of its own for each run: vLLM, with and without the plug-in, changes its classes for good.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import safetensors.torch
import vllm.model_executor.model_loader.weight_utils as weight_utils

READ: dict[str, int] = {}


class Counted:
    """A safetensors file that notes which tensors are read, with their bytes."""

    def __init__(self, file: Any, **options: Any) -> None:
        self._context = safetensors.torch.safe_open(file, **options)

    def __enter__(self) -> Any:
        self._file = self._context.__enter__()
        return self

    def __exit__(self, *ended: Any) -> Any:
        return self._context.__exit__(*ended)

    def get_tensor(self, name: str) -> Any:
        tensor = self._file.get_tensor(name)
        READ[name] = tensor.nbytes
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


weight_utils.safe_open = Counted


def look(worker: Any) -> dict[str, Any]:
    """What a worker's model holds, and what its plug-in asked for."""
    model = worker.model_runner.model
    experts = {
        name: tensor.nbytes
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if "experts." in name and "shared_experts" not in name and tensor.dim() > 1
    }
    found = {
        "experts": experts,
        "layers": len([name for name, _ in model.named_modules() if name.endswith("experts")]),
    }
    try:
        from moeserve.proto.integrations.vllm import op

        counts = op.LAYERS[0].counts
        found |= {
            "calls": counts.calls,
            "begun": counts.begun,
            "rows": counts.rows,
            "repeated": counts.repeated,
            "waited": counts.seconds,
        }
    except (ImportError, IndexError):
        pass
    return found


def reload(address: str, weights: str) -> None:
    """Brings the service to other weights."""
    from moeserve.proto.client import MoeClient

    with MoeClient(address, timeout=60) as client:
        reply = client.reload(weights)
        assert reply.outcome == "reloaded", reply


def reload_in_turn(job: dict[str, Any], ended: threading.Event) -> None:
    """Reloads the service with one checkpoint after the other, over and over until `ended`."""
    for weights in itertools.cycle(job["reloads"]):
        if ended.wait(0.5):
            return
        reload(job["address"], weights)


def note_passes() -> list[list[int]]:
    """The versions that each forward pass sees from now on."""
    from moeserve.proto.integrations.remote_layers import RemoteLayers

    passes: list[list[int]] = []
    ask = RemoteLayers.versions

    def versions(self: RemoteLayers) -> frozenset[int]:
        found = ask(self)
        passes.append(sorted(found))
        return found

    RemoteLayers.versions = versions  # type: ignore[method-assign]
    return passes


def keep_experts() -> None:
    """Does as another plug-in may: layers of its own class, which choose how they compute."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    @RoutedExperts.register_oot(name="RoutedExperts")
    class Own(RoutedExperts):
        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            return UnquantizedFusedMoEMethod(moe_config)


def compute_experts_in_float32() -> None:
    """Experts of this process compute in float32, from their weights as they are, and round answers once."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kind = cpu_moe.CPUUnquantizedExperts
    pack, compute = kind.process_weights_after_loading, kind.apply

    def packed(self: Any, layer: Any) -> None:
        for _, parameter in layer.named_parameters(recurse=False):
            parameter.data = parameter.data.float()
        pack(self, layer)

    def computed(self: Any, output: Any, hidden_states: Any, *arguments: Any, **options: Any) -> None:
        whole = output.float()
        compute(self, whole, hidden_states.float(), *arguments, **options)
        output.copy_(whole)

    kind.process_weights_after_loading, kind.apply = packed, computed
    cpu_moe.X86CPUUnquantizedExperts.isa = kind.isa  # a matrix unit takes no float32


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    if job.get("sabotage") == "another plug-in":
        keep_experts()
    if job.get("exact_experts"):
        compute_experts_in_float32()
    started = time.monotonic()
    llm = LLM(job["model"], skip_tokenizer_init=True, **job["options"])
    loaded = time.monotonic() - started
    sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **job["sampling"])
    begun = time.monotonic()
    rounds, round_seconds = [], []
    passes = note_passes() if "reloads" in job else []
    ended = threading.Event()
    reloading = threading.Thread(target=reload_in_turn, args=(job, ended), daemon=True)
    if "reloads" in job:
        reloading.start()
    for weights in job["rounds"]:
        if weights is not None:
            reload(job["address"], weights)
            time.sleep(job.get("pause", 0))
        round_begun = time.monotonic()
        answers = llm.generate(
            [{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False
        )
        round_seconds.append(time.monotonic() - round_begun)
        rounds.append(
            [
                {
                    "tokens": list(answer.outputs[0].token_ids),
                    "cached": answer.num_cached_tokens,
                    "logprobs": [
                        {str(token): entry.logprob for token, entry in position.items()}
                        for position in answer.outputs[0].logprobs or ()
                    ],
                }
                for answer in answers
            ]
        )
    seconds = time.monotonic() - begun
    ended.set()
    if reloading.is_alive():
        reloading.join(60)
    workers = llm.collective_rpc(look)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "rounds": rounds,
        "workers": workers,
        "read": READ,
        "passes": passes,
        "loaded": loaded,
        "seconds": seconds,
        "round_seconds": round_seconds,
        "memory": memory,
    }


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
