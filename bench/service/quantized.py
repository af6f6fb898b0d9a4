"""Quantized models whose experts are served by four ranks make the tokens that one process makes.

    python -m bench.service.quantized [--model NAME]    # every way to store experts, in two models
    python -m bench.service.quantized --fixtures FOLDER # real producers' checkpoints, at any depth of FOLDER

Each checkpoint is served from CPU ranks in float32, whole experts on each and slices of every expert on all.
A transformers model that asks them over gRPC must make the greedy tokens that the same model makes alone, its
experts computed by plain arithmetic of what the stored numbers mean, activations rounded as the scheme says,
without moeserve. Logits on these tokens must be within 1e-4 where activations are not rounded. Where they
are, a last bit of a sum may bring a number to its next code, so the bound is a tenth of what leaving them
unrounded moves logits by. To show that the comparison would notice, the lines also tell that, and how many
tokens change when the reference swaps two experts. Exit status 1 where tokens or logits differ, or a swap
changes no token.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
import transformers
from houses import house_config
from quantized import PRODUCERS
from quantized_models import (
    QuantizedModel,
    activations_of,
    greedy,
    logits,
    random_tokens,
    static_scales,
    write_gpt_oss,
    write_model,
)
from safetensors.torch import load_file
from torch import Tensor

from bench.lib.record import Result, write
from bench.numbers.formulas import experts, formula
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.proto.client import MoeClient
from moeserve.proto.integrations.transformers import attach
from moeserve.runtime.launch.local_cluster import LocalCluster

LOGIT_BOUND = 1e-4
DEVIATION = 0.15  # of weights that are drawn
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 12, 16

EP4 = {"parallel__data_parallel_size": 4, "parallel__enable_expert_parallel": True}
MESHES: dict[str, tuple[dict[str, Any], int]] = {
    "DP4+EP": (EP4, 1),
    "TP2xDP2": ({"parallel__tensor_parallel_size": 2, "parallel__data_parallel_size": 2}, 4),
}
"""A mesh's configuration, and how many slices an expert has."""

SMALL_MESHES = {"DP4+EP": MESHES["DP4+EP"], "TP2": ({"parallel__tensor_parallel_size": 2}, 2)}
"""Of experts that are too small for more slices."""

COLUMNS = (11, 36, 30, 12, 8, 7, 9, 8, 12)
HEAD = ("model", "stored as", "scheme", "wire", "mesh", "tokens", "logits", "swapped", "unrounded")


@dataclass(frozen=True)
class Case:
    """One checkpoint: whose it is, how its experts are stored, and what makes it in a folder."""

    model: str
    stored: str
    make: Callable[[Path], QuantizedModel]


@dataclass(frozen=True)
class Verdict:
    """One case on one mesh."""

    case: Case
    scheme: str
    wire: str
    mesh: str
    tokens: tuple[int, int]  # equal, of all
    difference: float  # largest, of logits
    swapped: int  # tokens that change when two experts are swapped
    unrounded: (
        float | None
    )  # largest difference of logits without rounding of activations, where there is any

    @property
    def bound(self) -> float:
        """How far logits may be off."""
        return LOGIT_BOUND if self.unrounded is None else self.unrounded / 10

    @property
    def holds(self) -> bool:
        """Whether the tokens are those of one process, and the comparison would have noticed."""
        equal, total = self.tokens
        return equal == total and self.difference <= self.bound and self.swapped > 0

    def __str__(self) -> str:
        loose = "-" if self.unrounded is None else f"{self.unrounded:.1e}"
        cells = (self.case.model, self.case.stored, self.scheme, self.wire, self.mesh)
        cells += ("{}/{}".format(*self.tokens), f"{self.difference:.1e}", str(self.swapped), loose)
        return line(cells) + ("" if self.holds else "  FAILED")


def line(cells: tuple[str, ...]) -> str:
    """A row of the table."""
    return " ".join(cell.ljust(width) for cell, width in zip(cells, COLUMNS, strict=True)).rstrip()


def made_cases() -> list[Case]:
    """Every producer's storage in the families that it is used for."""
    cases = [
        Case(model, name, partial(write_model, family=family, producer=producer))
        for model, family in (("Qwen3-MoE", "qwen3_moe"), ("Mixtral", "mixtral"))
        for name, producer in PRODUCERS.items()
    ]
    for name, producer in PRODUCERS.items():
        if producer.dialect == "deepseek_fp4" or "expert_dtype" in producer.model:
            cases.append(
                Case("DeepSeek-V4", name, partial(write_model, family="deepseek_v4", producer=producer))
            )
    return [*cases, Case("gpt-oss", "mxfp4 blocks", write_gpt_oss)]


def fixture_cases(folder: Path) -> list[Case]:
    """Every quantized checkpoint in `folder` but gpt-oss, whose biases the formulas do not tell.

    It is among the cases that are made here.
    """
    found = sorted(path.parent for path in folder.rglob("config.json"))
    return [
        Case(path.parent.name, path.name, partial(read_fixture, path))
        for path in found
        if (checkpoint := Checkpoint(path)).quantization is not None and not checkpoint.family.bias
    ]


def read_fixture(path: Path, _: Path) -> QuantizedModel:
    """A real producer's checkpoint; everything but the experts is dequantized for the model in front.

    Where a checkpoint has nothing but experts and routers, the rest is drawn at random.
    """
    config = transformers.AutoConfig.from_pretrained(path)
    quantization = config.quantization_config
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    others = dense(path, quantization)
    if "model.embed_tokens.weight" not in others:
        random = torch.Generator().manual_seed(0)
        drawn = (item for item in model.state_dict().items() if item[1].dim() > 1)
        others = {name: torch.randn(t.shape, generator=random) * DEVIATION for name, t in drawn} | others
    missing, strange = model.load_state_dict(others, strict=False)
    if strange or any(".experts." not in name and "norm" not in name for name in missing):
        raise ValueError(f"{path}: {missing} missing and {strange} strange beside the experts")
    stacks: dict[int, list[list[Tensor]]] = {}
    for expert in experts(path):
        sides = stacks.setdefault(expert.layer, [[], []])
        sides[0].append(expert.gate_up)
        sides[1].append(expert.down)
    weights = {layer: (torch.stack(sides[0]), torch.stack(sides[1])) for layer, sides in stacks.items()}
    stored = tensors_of(path)
    scales = {
        layer: static_scales({n: t for n, t in stored.items() if f".layers.{layer}." in n and "experts" in n})
        for layer in weights
    }
    scheme = Checkpoint(path).scheme(min(weights)).name
    return QuantizedModel(path, model, weights, activations_of(scheme), scales)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a checkpoint."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def dense(path: Path, quantization: Mapping[str, object]) -> dict[str, Tensor]:
    """Everything but the experts, float32, under transformers' names."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors_of(path).items():
        if ".experts." not in name:
            module, _, suffix = name.replace(".block_sparse_moe.", ".mlp.").rpartition(".")
            modules.setdefault(module, {})[suffix] = tensor
    plain = (torch.float32, torch.bfloat16, torch.float16)
    answer = {}
    for module, stored in modules.items():
        if set(stored) <= {"weight", "bias"} and all(t.dtype in plain for t in stored.values()):
            answer |= {f"{module}.{suffix}": tensor.float() for suffix, tensor in stored.items()}
        else:
            answer[f"{module}.weight"] = formula(stored, quantization)[1]
    return answer


def fits(path: Path, slices: int) -> bool:
    """Whether so many slices of an expert cut no block of its format."""
    checkpoint = Checkpoint(path)
    try:
        return all(checkpoint.shape(layer, slices).inner for layer in checkpoint.layers)
    except ValueError:
        return False


def swapped(model: QuantizedModel) -> QuantizedModel:
    """Returns the tensors with the first two experts of every layer in each other's place."""
    order = torch.tensor([1, 0, *range(2, next(iter(model.weights.values()))[0].shape[0])])
    return replace(model, weights={n: (up[order], down[order]) for n, (up, down) in model.weights.items()})


def run(case: Case, meshes: Mapping[str, tuple[dict[str, Any], int]]) -> Iterator[Verdict]:
    """One case on each mesh."""
    prompts = random_tokens(PROMPTS, PROMPT_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        model = case.make(Path(folder))
        changed = greedy(swapped(model).alone(), prompts, NEW_TOKENS) != greedy(
            model.alone(), prompts, NEW_TOKENS
        )
        for mesh, (sizes, slices) in meshes.items():
            if not fits(model.path, slices):
                continue
            alone = model.alone(slices)
            tokens = greedy(alone, prompts, NEW_TOKENS)
            wanted = logits(alone, tokens)
            loose = None
            if model.activations != "fp32":
                unrounded = logits(model.alone(slices, activations="fp32"), tokens)
                loose = float((unrounded - wanted).abs().max())
            config = house_config(model.path, model__dtype="fp32", server__metrics_port=-1, **sizes)
            with LocalCluster(config) as house, MoeClient(house.address, timeout=60) as client:
                remote = model.without_experts()
                attach(remote, client)
                found, given = greedy(remote, prompts, NEW_TOKENS), logits(remote, tokens)
                served = client.model().layers[0]
            yield Verdict(
                case,
                served.scheme,
                served.wire,
                mesh,
                (int((found == tokens)[:, PROMPT_TOKENS:].sum()), PROMPTS * NEW_TOKENS),
                float((given - wanted).abs().max()),
                int(changed.sum()),
                loose,
            )


def results(verdicts: list[Verdict]) -> Iterator[Result]:
    """The largest difference of each model and scheme, over all ways to store it and all meshes."""
    alike: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        alike.setdefault(f"{verdict.case.model} {verdict.scheme}", []).append(verdict)
    for case, group in alike.items():
        loose = [verdict.unrounded for verdict in group if verdict.unrounded is not None]
        peers = {"activations left unrounded": min(loose)} if loose else {}
        worst, aim = max(v.difference for v in group), min(v.bound for v in group)
        yield Result("quantized", case, worst, "max logit difference", "lower", aim, peers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixtures", type=Path, help="folder of real producers' checkpoints")
    parser.add_argument("--model", default="", help="cases of this model, as the table has it")
    parser.add_argument("--only", default="", help="cases whose storage has this in it; records nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    cases = made_cases() if options.fixtures is None else fixture_cases(options.fixtures)
    cases = [case for case in cases if options.model in ("", case.model) and options.only in case.stored]
    meshes = MESHES if options.fixtures is None else SMALL_MESHES
    print(line(HEAD), flush=True)
    start, verdicts = time.perf_counter(), []
    for case in cases:
        for verdict in run(case, meshes):
            print(verdict, flush=True)
            verdicts.append(verdict)
    failures = sum(not verdict.holds for verdict in verdicts)
    if verdicts and not failures and not options.only:
        write(results(verdicts))
    held = f"{len(verdicts) - failures} of {len(verdicts)} services made the tokens of one process"
    print(f"{held}; {time.perf_counter() - start:.0f} s")
    return 1 if failures or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
