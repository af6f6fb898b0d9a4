"""`make demo`: transformers models whose experts are served by four ranks answer as they do alone.

For each model, dtype and mesh: a checkpoint made by transformers with a fixed seed is served from four CPU
ranks, and the same model loaded without its experts' weights asks them over gRPC.

fp32: greedy tokens equal those of the whole model, logits within 1e-4 of it; and swapping two experts, or
zeroing one layer's answer, changes tokens, so the comparison would notice. bf16: on a given text, the error
of logits against the same weights in fp32 is at most 1.2 times that of transformers' own grouped_mm. Exit
status 1 otherwise, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.lib.record import Result, write
from moeserve.proto.client import MoeClient
from moeserve.proto.integrations.transformers import attach, load
from moeserve.runtime.config import Config
from moeserve.runtime.launch.local_cluster import LocalCluster

LOGIT_BOUND = 1e-4
BF16_BOUND = 1.2
RANKS = 4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 12, 32
TEXTS, TEXT_TOKENS = 16, 64
DEVIATION = 0.15  # with transformers' own 0.02 the experts change no greedy token
VOCABULARY = 256

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}),
    "Mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 128}),
    "gpt-oss": ("GptOss", {"num_local_experts": 8, "intermediate_size": 128, "sliding_window": 64}),
}
"""transformers' class prefix and what a family's config says besides SIZES."""

MESHES: dict[str, dict[str, Any]] = {
    "DP4+EP": {"parallel.data_parallel_size": 4, "parallel.enable_expert_parallel": True},
    "TP4": {"parallel.tensor_parallel_size": 4},
    "TP2xDP2": {"parallel.tensor_parallel_size": 2, "parallel.data_parallel_size": 2},
}
"""Whole experts on each rank, and quarters of every expert on all ranks, by two ways of counting them."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Verdict:
    """What one case showed; `failed` says what does not hold."""

    result: Result
    shown: str
    failed: tuple[str, ...]


class Tampered:
    """A client that swaps two experts of one layer, or zeroes one layer's answer."""

    def __init__(self, client: MoeClient, layer: int, swap: tuple[int, int] | None) -> None:
        self._client, self._layer, self._swap = client, layer, swap

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Any:
        if layer == self._layer and self._swap is None:
            return torch.zeros_like(hidden)
        if layer == self._layer and self._swap is not None:
            one, other = self._swap
            experts = torch.where(experts == one, other, torch.where(experts == other, one, experts))
        return self._client.forward(layer, hidden, experts, weights)

    def model(self) -> Any:
        return self._client.model()


def make_checkpoint(name: str, dtype: torch.dtype, path: Path) -> None:
    """Writes a whole model with random weights of a fixed seed, so large that experts matter."""
    prefix, special = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **special)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, DEVIATION)
    model.to(dtype).save_pretrained(path)


def load_whole(path: Path, dtype: torch.dtype) -> Any:
    """The model with its experts, as transformers alone loads and runs it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="grouped_mm")


def random_tokens(rows: int, columns: int) -> Tensor:
    """Token ids [rows, columns], always the same ones."""
    return torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1))


def greedy(model: Any) -> Tensor:
    """The prompts, each with NEW_TOKENS greedy tokens."""
    prompts = random_tokens(PROMPTS, PROMPT_TOKENS)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    answer: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    return answer


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Teacher-forced logits [rows, columns, VOCABULARY], float32."""
    answer: Tensor = model(tokens).logits.float()
    return answer


def compare_fp32(case: str, whole: Any, remote: Any, client: MoeClient) -> Verdict:
    """Tokens and logits of `remote` beside those of `whole`, and whether tampering shows in the tokens."""
    expected, found = greedy(whole), greedy(remote)
    difference = float((logits(whole, expected) - logits(remote, expected)).abs().max())
    changed = {}
    for what, swap in {"swapping two experts": (0, 1), "zeroing a layer": None}.items():
        attach(remote, Tampered(client, 0, swap))
        changed[what] = int((greedy(remote) != expected).sum())
    failed = [] if torch.equal(expected, found) else ["greedy tokens differ"]
    failed += [] if difference <= LOGIT_BOUND else [f"logits differ by {difference:.1e} > {LOGIT_BOUND}"]
    failed += [f"{what} changes no token" for what, tokens in changed.items() if not tokens]
    same, total = int((expected == found)[:, PROMPT_TOKENS:].sum()), PROMPTS * NEW_TOKENS
    shown = f"{same}/{total} tokens equal, logits within {difference:.1e}; "
    shown += ", ".join(f"{what} changes {tokens}" for what, tokens in changed.items())
    result = Result("demo", case, difference, "max logit difference", "lower", LOGIT_BOUND)
    return Verdict(result, shown, tuple(failed))


def compare_bf16(case: str, whole: Any, remote: Any, exact: Any) -> Verdict:
    """Errors of `remote` and of `whole`, which runs grouped_mm, against `exact`, the same weights in fp32."""
    tokens = random_tokens(TEXTS, TEXT_TOKENS)
    right = logits(exact, tokens)
    ours, theirs = (
        float((logits(model, tokens) - right).square().mean().sqrt()) for model in (remote, whole)
    )
    ratio = ours / theirs
    failed = [] if ratio <= BF16_BOUND else [f"error {ratio:.3f}x grouped_mm's > {BF16_BOUND}x"]
    shown = f"rms error of logits {ours:.4f}, of grouped_mm {theirs:.4f}: {ratio:.3f}x"
    unit, peers = "rms logit error against fp32", {"grouped_mm": theirs}
    return Verdict(
        Result("demo", case, ours, unit, "lower", BF16_BOUND * theirs, peers), shown, tuple(failed)
    )


def run_case(case: str, checkpoint: Path, dtype: torch.dtype, address: str) -> Verdict:
    """Compares a model whose experts are served at `address` with the whole one in `checkpoint`."""
    whole = load_whole(checkpoint, dtype)
    with MoeClient(address) as client:
        remote = load(str(checkpoint), client, dtype=dtype)
        held, total = (sum(weight.numel() for weight in model.parameters()) for model in (remote, whole))
        say(f"{'':7}{case}: the client holds {held:,} of {total:,} parameters")
        if dtype == torch.float32:
            return compare_fp32(case, whole, remote, client)
        return compare_bf16(case, whole, remote, load_whole(checkpoint, torch.float32))


@contextmanager
def launcher(name: str) -> Iterator[Any]:
    """The launcher's class; with `ray`, one Ray instance for all services."""
    if name == "local":
        yield LocalCluster
        return
    import ray

    from moeserve.runtime.launch.on_ray.ray_cluster import RayCluster

    cpus = max(RANKS, os.cpu_count() or 1)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
    ray.init(address="local", num_cpus=cpus, _node_ip_address="127.0.0.1", **quiet)
    try:
        yield RayCluster
    finally:
        ray.shutdown()


def config_for(checkpoint: Path, mesh: Mapping[str, Any]) -> Config:
    """Four CPU ranks on loopback and free ports."""
    fixed = {"model.checkpoint": str(checkpoint), "server.port": 0, "server.metrics_port": -1}
    return Config().with_values(fixed | {"plan.device": "cpu"} | dict(mesh))


def say(text: str) -> None:
    print(text, flush=True)


def run(name: str, meshes: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterator[Verdict]:
    """Every model and dtype on each of `meshes`, with the launcher `name`."""
    with launcher(name) as cluster_class:
        for model, dtype in itertools.product(MODELS, DTYPES):
            checkpoint = folder / f"{model}-{dtype}"
            make_checkpoint(model, DTYPES[dtype], checkpoint)
            for mesh, sizes in meshes.items():
                start = time.perf_counter()
                with cluster_class(config_for(checkpoint, sizes)) as cluster:
                    up = time.perf_counter()
                    verdict = run_case(f"{model} {dtype} {mesh}", checkpoint, DTYPES[dtype], cluster.address)
                    compared = time.perf_counter()
                say_verdict(verdict, up - start, compared - up)
                yield verdict


def say_verdict(verdict: Verdict, starting: float, comparing: float) -> None:
    """Three lines a case, and one for each reason why it failed."""
    say(f"{'FAILED' if verdict.failed else 'ok':7}{verdict.shown}")
    for reason in verdict.failed:
        say(f"{'':7}{reason}")
    say(f"{'':7}{starting:.1f} s until it served, {comparing:.1f} s to compare")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", choices=("ray", "local"), default="ray")
    parser.add_argument("--quick", action="store_true", help="only the first mesh; records nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    start = time.perf_counter()
    meshes = dict(list(MESHES.items())[:1]) if options.quick else MESHES
    say(f"{len(MODELS) * len(DTYPES) * len(meshes)} services of {RANKS} ranks, one after another")
    with tempfile.TemporaryDirectory() as folder:
        verdicts = list(run(options.launcher, meshes, Path(folder)))
    failures = sum(bool(verdict.failed) for verdict in verdicts)
    if not options.quick and not failures:
        write(verdict.result for verdict in verdicts)
    say(f"{len(verdicts) - failures} of {len(verdicts)} cases hold, {time.perf_counter() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
