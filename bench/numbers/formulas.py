"""What the tensors of quantized checkpoints mean: `experts` reads every expert of a folder by formula.

Written from the formats' definitions, over the stored bytes and without moeserve, so that what moeserve reads
can be compared with it. Nothing here is fast, sliced, or checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble

KNOWN_ERROR = {
    "bf16": 0.0,
    "fp8": 0.0275,
    "mxfp8": 0.0275,
    "int8": 0.011,
    "nvfp4": 0.097,
    "mxfp4": 0.12,
    "mxfp6": 0.06,
    "int4": 0.165,
}
"""Largest relative error of a tensor, norm over norm, of random weights after each producer's rounding."""

ONE = re.compile(r".*\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(w[123]|(?:gate|up|down)_proj)\.(.+)")
ALL = re.compile(r".*\.layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)(?:[._](.+))?")
ROLES = {"w1": 0, "w3": 1, "w2": 2, "gate_proj": 0, "up_proj": 1, "down_proj": 2}


@dataclass(frozen=True)
class Expert:
    """One expert by formula; `kind` names its number format."""

    layer: int
    expert: int
    kind: str
    gate_up: Tensor  # [2I, H] float32, gate first
    down: Tensor  # [H, I] float32


def fp6(exponent_bits: int) -> Tensor:
    """The 64 values of an FP6 element, by code."""
    mantissa_bits = 5 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    values = []
    for code in range(32):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor(values + [-value for value in values])


def low_first(words: Tensor, bits: int) -> Tensor:
    """Codes of integers packed along the last dimension, lowest bits first."""
    width = words.element_size() * 8 // bits
    each = [(words >> (bits * place)) & ((1 << bits) - 1) for place in range(width)]
    return torch.stack(each, dim=-1).flatten(-2)


def sextets(data: Tensor) -> Tensor:
    """Codes of six bits, four in three bytes, lowest bits first."""
    first, second, third = data.long().unflatten(-1, (-1, 3)).unbind(-1)
    word = first | second << 8 | third << 16
    return torch.stack([(word >> (6 * place)) & 63 for place in range(4)], dim=-1).flatten(-2)


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """`scale` repeated over its blocks to the shape of `like`."""
    if scale.dim() != 2:  # [N], or [N / 128, 1, K / 128, 1]
        scale = scale[:, None] if scale.dim() == 1 else scale[:, 0, :, 0]
    scale = scale.float()
    rows, columns = (-(-size // count) for size, count in zip(like.shape, scale.shape, strict=True))
    if columns > 1 and rows > 1:
        rows = columns = 128
    wide = scale.repeat_interleave(rows, 0)[: like.shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : like.shape[1]]


def power(byte: Tensor) -> Tensor:
    """Returns 2^(byte - 127), the value of an E8M0 scale."""
    return torch.exp2(byte.view(torch.uint8).float() - 127)


def eight_bits(t: Tensors, _: Config) -> Tensor:
    scale = t["weight_scale" if "weight_scale" in t else "weight_scale_inv"]
    values = t["weight"].float()
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return values * spread(power(scale), values)
    return values * (scale.float().flatten() if scale.numel() == 1 else spread(scale, values))


def nvfp4(t: Tensors, _: Config) -> Tensor:
    codes = E2M1[low_first(t["weight_packed" if "weight_packed" in t else "weight"], 4).long()]
    scaled = codes * spread(t["weight_scale"], codes)
    return scaled / t["weight_global_scale"] if "weight_global_scale" in t else scaled * t["weight_scale_2"]


def mxfp4(t: Tensors, _: Config) -> Tensor:
    packed = t["weight_packed" if "weight_packed" in t else "weight"].view(torch.uint8)
    codes = E2M1[low_first(packed, 4).long()]
    return codes * spread(power(t["weight_scale" if "weight_scale" in t else "scale"]), codes)


def mxfp6(exponent_bits: int) -> Callable[[Tensors, Config], Tensor]:
    def values(t: Tensors, _: Config) -> Tensor:
        codes = fp6(exponent_bits)[sextets(t["weight"])]
        return codes * spread(power(t["weight_scale"]), codes)

    return values


def packed(t: Tensors, _: Config) -> Tensor:
    rows, columns = t["weight_shape"].tolist()
    bits = 32 * t["weight_packed"].shape[1] // columns
    codes = low_first(t["weight_packed"], bits)[:, :columns]
    scale = t["weight_scale"].float()
    group = columns // scale.shape[1]
    groups = t["weight_g_idx"].long() if "weight_g_idx" in t else torch.arange(columns) // group
    zero = torch.full(scale.shape, 1 << (bits - 1))
    if "weight_zero_point" in t:
        zero = low_first(t["weight_zero_point"].mT.contiguous(), bits).mT[:rows]
    return (codes - zero[:, groups]).float() * scale[:, groups]


def gptq(t: Tensors, config: Config) -> Tensor:
    less = 0 if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else 1
    groups = t["g_idx"].long()
    bits = 32 * t["qweight"].shape[0] // groups.numel()
    codes = low_first(t["qweight"].mT.contiguous(), bits)
    zero = (low_first(t["qzeros"], bits) + less).mT[: codes.shape[0]]
    return (codes - zero[:, groups]).float() * t["scales"].float().mT[:, groups]


def awq(t: Tensors, _: Config) -> Tensor:
    places = torch.tensor(AWQ_ORDER).argsort()
    codes, zero = (low_first(t[name], 4) for name in ("qweight", "qzeros"))
    codes, zero = (each.view(each.shape[0], -1, 8)[..., places].flatten(1) for each in (codes, zero))
    groups = torch.arange(codes.shape[0]) // (codes.shape[0] // zero.shape[0])
    values: Tensor = (codes - zero[groups]).float() * t["scales"].float()[groups]
    return values.mT


def blocks(t: Tensors, _: Config) -> Tensor:
    codes = E2M1[low_first(t["blocks"], 4).long()].flatten(-2)
    return codes * power(t["scales"]).repeat_interleave(32, -1)


def plain(t: Tensors, _: Config) -> Tensor:
    return t["weight"].float()


def formula(t: Tensors, config: Config) -> tuple[str, Tensor]:
    """The number format's name, and the matrix that the tensors of a projection mean."""
    weight = t.get("weight", t.get("weight_packed", E2M1))
    quarter = "weight" in t and "weight_scale" in t and t["weight_scale"].dim() == 2
    quarter = quarter and 4 * weight.shape[-1] == 3 * 32 * t["weight_scale"].shape[1]
    scaled = "weight_scale" in t or "weight_scale_inv" in t
    powers = scaled and t.get("weight_scale", E2M1).dtype == torch.uint8
    eights = "weight_shape" in t and 4 * weight.shape[-1] == int(t["weight_shape"][1])
    kinds: list[tuple[bool, str, Callable[[Tensors, Config], Tensor]]] = [
        ("blocks" in t, "mxfp4", blocks),
        ("weight_global_scale" in t or "weight_scale_2" in t, "nvfp4", nvfp4),
        ("weight_shape" in t, "int8" if eights else "int4", packed),
        ("g_idx" in t, "int4", gptq),
        ("qzeros" in t, "int4", awq),
        (quarter, "mxfp6", mxfp6(2 if "fp6_e2m3" in json.dumps(config) else 3)),
        (weight.dtype in (torch.uint8, torch.int8) and (powers or "scale" in t), "mxfp4", mxfp4),
        (weight.dtype == torch.int8, "int8", eight_bits),
        (powers, "mxfp8", eight_bits),
        (scaled, "fp8", eight_bits),
        ("weight" in t, "bf16", plain),
    ]
    name, compute = next((name, compute) for fits, name, compute in kinds if fits)
    if name == "int4" and config.get("bits") == 8:
        name = "int8"
    if name == "int8" and "weight" in t and weight.abs().max() <= 8:
        name = "int4"
    return name, compute(t, config)


def settings(path: Path) -> Config:
    """The quantization config of a folder, from config.json or the file beside it."""
    found: Config = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    return found


def experts(path: Path) -> Iterator[Expert]:
    """Every expert of the checkpoint in `path`, in order."""
    config = settings(path)
    single: dict[tuple[int, int], dict[int, dict[str, Tensor]]] = {}
    stacked: dict[int, dict[str, dict[str, Tensor]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if match := ONE.fullmatch(name):
                layer, expert, projection, suffix = match.groups()
                roles = single.setdefault((int(layer), int(expert)), {})
                roles.setdefault(ROLES[projection], {})[suffix] = tensor
            elif match := ALL.fullmatch(name):
                layer, projection, suffix = match.groups()
                stacked.setdefault(int(layer), {}).setdefault(projection, {})[suffix or "weight"] = tensor
    for (layer, expert), roles in sorted(single.items()):
        _add_scales_beside(roles, stacked.get(layer, {}), expert)
        (kind, gate), (_, up), (_, down) = (formula(roles[role], config) for role in range(3))
        yield Expert(layer, expert, kind, torch.cat((gate, up)), down)
    apart = {layer for layer, _ in single}
    for layer, both in sorted(stacked.items()):
        if layer in apart:  # only scales are stacked
            continue
        yield from _stacked(layer, both, path)


def _add_scales_beside(
    roles: Mapping[int, dict[str, Tensor]], stacks: Mapping[str, Tensors], expert: int
) -> None:
    """Gives an expert's projections their scales, where those of all experts are one tensor."""
    for projection, tensors in stacks.items():
        own = tensors["scale_inv"][expert]
        whole = own.shape[0] == 1  # one for gate and up
        halves = (own, own) if whole else own.chunk(2)
        for role, scale in zip((2,) if projection == "down_proj" else (0, 1), halves, strict=False):
            roles[role]["weight_scale_inv"] = own if role == 2 else scale


def _stacked(layer: int, both: Mapping[str, Tensors], path: Path) -> Iterator[Expert]:
    """Experts that stand in one tensor: `[E, 2I, H]`, or `[E, H, 2I]` where a family has it so."""
    model = json.loads((path / "config.json").read_text())
    (kind, gate_up), (_, down) = (
        formula(both[name], settings(path)) for name in ("gate_up_proj", "down_proj")
    )
    turned = kind == "bf16" and model["model_type"] in ("gpt_oss", "llama4_text")
    if turned:
        gate_up, down = gate_up.mT, down.mT
    if model["model_type"] == "gpt_oss":
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
    for expert in range(gate_up.shape[0]):
        yield Expert(layer, expert, kind, gate_up[expert], down[expert])
