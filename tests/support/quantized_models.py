"""Whole models with quantized experts, and the tokens that one process makes of them: `QuantizedModel`.

The checkpoint is complete: transformers' own tensors for everything but the experts, which are written as a
producer writes them. The reference is the same transformers model with its experts replaced by `Experts`,
made of the matrices that the stored numbers mean, or, where activations stay as they are, transformers' own
experts holding these matrices. Nothing of moeserve computes in it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import edit_config, make_checkpoint, rewrite
from quantized import W_NAMES, Producer, expert_of
from quantized_activations import ROUNDINGS, Rounding
from quantized_tensors import Draw, mxfp4
from torch import Tensor, nn
from torch.nn import functional

from moeserve.proto.integrations.transformers import experts_modules

HIDDEN, INNER, EXPERTS, LAYERS = 256, 512, 4, 2
"""Blocks of every format fit four slices of I."""

SIZES = {"hidden": HIDDEN, "inner": INNER, "experts": EXPERTS, "layers": LAYERS}
SPECIAL: Mapping[str, Mapping[str, Any]] = {"deepseek_v4": {"swiglu_limit": 0.5}}  # so that it limits

BETWEEN = 1.5  # spread of gate and up, whatever the weights': experts matter, and few rows saturate
VOCABULARY = 256
NONE = float("nan")  # a scale that there is not

Weights = Mapping[int, tuple[Tensor, Tensor]]
"""Each layer's experts, float32, as transformers holds them: gate_up `[E, 2I, H]`, gate rows first, and down
`[E, H, I]`; for gpt-oss `[E, H, 2I]`, gate and up in turn, and `[E, I, H]`.
"""


class Experts(nn.Module):
    """A layer's experts one by one: SwiGLU in float32, the input of each GEMM rounded as the scheme says.

    With `slices`, a slice of all experts is computed after the other and rows between its GEMMs are rounded
    within it, as ranks that hold slices do. The order of sums matters where rounding follows: a difference in
    the last bit may bring a number to the next code.
    """

    def __init__(self, model: QuantizedModel, layer: int, rounding: Rounding, slices: int) -> None:
        super().__init__()
        self.rounding, self.scales = rounding, model.scales[layer]
        self.limit = float(model.model.config.to_dict().get("swiglu_limit", "inf"))
        gate_up, down = model.weights[layer]
        self.slices = [
            (torch.cat(halves, dim=1), columns.contiguous())
            for *halves, columns in zip(
                *(half.chunk(slices, dim=1) for half in gate_up.chunk(2, dim=1)),
                down.chunk(slices, dim=2),
                strict=True,
            )
        ]

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Mixed rows `[T, H]` of `hidden [T, H]` for a choice `[T, K]`."""
        answer, given = torch.zeros_like(hidden), self.rounding(hidden, self.scales[0])
        for gate_up, down in self.slices:
            partial = torch.zeros_like(hidden)
            for expert in experts.unique().tolist():
                rows, places = (experts == expert).nonzero(as_tuple=True)
                gate, up = (given[rows] @ gate_up[expert].T).chunk(2, dim=-1)
                up = up.clamp(-self.limit, self.limit)
                inner = self.rounding(functional.silu(gate.clamp(max=self.limit)) * up, self.scales[1])
                partial.index_add_(0, rows, inner @ down[expert].T * weights[rows, places, None])
            answer += partial
        return answer


@dataclass(frozen=True, eq=False)
class QuantizedModel:
    """A checkpoint, its transformers model, and what its experts' numbers mean."""

    path: Path
    model: Any  # its experts' weights mean nothing
    weights: Weights
    activations: str  # a key of ROUNDINGS
    scales: Mapping[int, tuple[float, float]]  # static scales of a layer's inputs and inner rows

    def without_experts(self) -> Any:
        """A copy of the model, to be attached to a service."""
        return copy.deepcopy(self.model)

    def alone(self, slices: int = 1, *, activations: str | None = None) -> Any:
        """A copy that computes the experts itself, with the scheme's activations unless others are named."""
        model, named = copy.deepcopy(self.model), activations or self.activations
        for layer, (name, module) in experts_modules(model).items():
            if named == "fp32":
                model.set_experts_implementation("eager")
                for parameter, matrix in zip(("gate_up_proj", "down_proj"), self.weights[layer], strict=True):
                    module.get_parameter(parameter).data = matrix
            else:
                model.set_submodule(name, Experts(self, layer, ROUNDINGS[named], slices))
        return model


def write_model(path: Path, family: str, producer: Producer) -> QuantizedModel:
    """Writes a `family` model (a key of checkpoints.CONFIGS) whose experts are `producer`'s.

    A DeepSeek-V4 has the names of its own release, without `model.`.
    """
    producer = in_family(family, producer)
    model = make_checkpoint(family, path, **SIZES, **SPECIAL.get(family, {}))
    tensors: dict[str, Tensor] = {}
    weights, scales = {}, {}
    for layer in range(LAYERS):
        stored = [expert_of(producer, layer, expert, (HIDDEN, INNER)) for expert in range(EXPERTS)]
        own = {name: tensor for named, _ in stored for name, tensor in named.items()}
        gate_up, down = zip(*(matrices for _, matrices in stored), strict=True)
        weights[layer], scales[layer] = (torch.stack(gate_up), torch.stack(down)), static_scales(own)
        tensors |= own
    _save(path, model, weights)
    _replace_experts(path, tensors, "model." if family == "deepseek_v4" else "")
    if producer.config_file is None:
        edit_config(path, quantization_config=producer.config, **producer.model)
    elif producer.config is not None:
        (path / producer.config_file).write_text(json.dumps(producer.config))
    return QuantizedModel(path, model, weights, activations_of(producer.scheme), scales)


def write_gpt_oss(path: Path) -> QuantizedModel:
    """Writes a gpt-oss model with stacked MXFP4 blocks, rows of gate and up in turn."""
    model = make_checkpoint("gpt_oss", path, **SIZES)
    tensors, weights = {}, {}
    for layer in range(LAYERS):
        matrices = []
        for side, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            random = np.random.default_rng((layer, rows))
            made = [mxfp4(Draw(rows, columns, random, random)) for _ in range(EXPERTS)]
            codes, scales = (
                torch.stack([own[part] for own, _ in made]) for part in ("weight", "weight_scale")
            )
            stem = f"model.layers.{layer}.mlp.experts.{side}"
            tensors |= {f"{stem}_blocks": codes.unflatten(-1, (-1, 16)), f"{stem}_scales": scales}
            tensors[f"{stem}_bias"] = model.get_parameter(f"{stem}_bias").detach().clone()
            matrices.append(torch.stack([matrix.T for _, matrix in made]).contiguous())
        weights[layer] = (matrices[0], matrices[1])
    _save(path, model, weights)
    _replace_experts(path, tensors)
    edit_config(path, quantization_config={"quant_method": "mxfp4"})
    return QuantizedModel(path, model, weights, "fp32", dict.fromkeys(weights, (NONE, NONE)))


def _save(path: Path, model: Any, weights: Weights) -> None:
    """Saves the float32 model with norms that suit the size of the experts' weights."""
    with torch.no_grad():
        for layer, (gate_up, _) in weights.items():
            norm = BETWEEN / float(gate_up.std() * HIDDEN**0.5)
            model.model.layers[layer].post_attention_layernorm.weight.fill_(norm)
    model.save_pretrained(path)


def _replace_experts(path: Path, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Puts `tensors` in the place of the experts', and takes `prefix` from all names."""

    def replaced(found: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {name: tensor for name, tensor in found.items() if ".experts." not in name}
        return {name.removeprefix(prefix): tensor for name, tensor in (others | dict(tensors)).items()}

    rewrite(path, replaced)


def in_family(family: str, producer: Producer) -> Producer:
    """The producer with the names that it gives the experts of a family."""
    if family == "deepseek_v4":
        return replace(producer, own_names=W_NAMES, block="ffn")
    if family != "mixtral":
        return producer
    of_transformers = producer.dialect == "compressed_tensors" or "PB_WO" in str(producer.config).upper()
    names = producer.own_names if of_transformers else W_NAMES
    config = json.loads(json.dumps(producer.config).replace(".mlp.", ".block_sparse_moe."))
    return replace(producer, own_names=names, block="block_sparse_moe", config=config)


def activations_of(scheme: str) -> str:
    """The name of a scheme's activation format; a model's own float is float32 here."""
    name = scheme.split(" x ")[-1]
    return "fp32" if name == "bf16" else name


def static_scales(tensors: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest scale of a layer's inputs of gate and up, and of down, as factors that multiply."""
    inputs, inner = [], []
    for name, tensor in tensors.items():
        *_, projection, suffix = name.split(".")
        if suffix in ("input_scale", "input_global_scale"):
            value = tensor.float().reciprocal() if suffix == "input_global_scale" else tensor.float()
            (inner if projection in ("w2", "down_proj") else inputs).append(value.item())
    return max(inputs, default=NONE), max(inner, default=NONE)


def random_tokens(rows: int, columns: int) -> Tensor:
    """Token ids `[rows, columns]`, always the same ones."""
    return torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def greedy(model: Any, prompts: Tensor, new: int) -> Tensor:
    """The prompts, each with `new` greedy tokens."""
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    answer: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    return answer


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Teacher-forced logits `[rows, columns, VOCABULARY]`, float32."""
    answer: Tensor = model(tokens).logits.float()
    return answer
