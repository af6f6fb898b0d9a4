"""The formats that experts can be written in: `TARGETS`, with compressed-tensors' config and tensors of each.

They are the inverse of the `compressed_tensors` dialect, which reads back bit for bit what they write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.checkpoints.dialects.compressed_config import CLASS_NAME, PRESETS
from moeserve.checkpoints.dialects.forms import divisor_of
from moeserve.checkpoints.writing import rules
from moeserve.quant.bits import pack_nibbles
from moeserve.quant.format import WHOLE, Format, Packed
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_CHANNEL
from moeserve.quant.formats.int4 import INT4
from moeserve.quant.formats.mx import MXFP4, MXFP8

GROUP = 128  # columns of an INT4 group where the user gives none
WORD = 8  # 4-bit codes that an int32 holds

FORMAT_VERSION = "0.19.0"
"""The release of compressed-tensors whose files are written."""

Tensors = Mapping[str, Tensor]
"""Tensors of a projection by suffix: `weight_packed`, `weight_scale`, ..."""


@dataclass(frozen=True)
class TargetFormat:
    """One entry of `TARGETS`: how a format is written.

    `form` makes the format from the group size (None where the user has no choice) and the dtype of scales;
    `stored` makes the tensors of one matrix, with scales in that dtype.
    """

    preset: str  # its name in compressed-tensors; `target_named` takes it too
    about: str  # one line for the help
    form: Callable[[int | None, torch.dtype], Format]
    stored: Callable[[Packed, torch.dtype], Tensors]
    multiple: int = 1  # H and I must be multiples of it
    grouped: bool = False  # the user chooses the group size


@dataclass(frozen=True)
class Target:
    """An entry of `TARGETS` with the user's choices, for a model whose scales are stored in `scale_dtype`."""

    entry: TargetFormat
    group: int | None  # columns a group where the user chooses; WHOLE: one group a row
    scale_dtype: torch.dtype

    @property
    def form(self) -> Format:
        """The number format of the weights; its encoder rounds as files of compressed-tensors are rounded."""
        return self.entry.form(self.group, self.scale_dtype)

    @property
    def multiple(self) -> int:
        """The number that H and I must be multiples of."""
        return self.entry.multiple if self.group is None else max(self.group, self.entry.multiple)

    def tensors(self, matrix: Packed) -> Tensors:
        """Returns the tensors that are stored for a matrix `[N, K]`; all are contiguous."""
        found = self.entry.stored(matrix, self.scale_dtype)
        return {suffix: tensor.contiguous() for suffix, tensor in found.items()}

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """Returns the `quantization_config`; `ignore` names the modules that are not quantized."""
        preset = PRESETS[self.entry.preset]
        weights, inputs = dict(preset["weights"]), preset["input_activations"]
        if self.group is not None:
            whole = {"strategy": "channel", "group_size": None}
            weights |= whole if self.group == WHOLE else {"group_size": self.group}
        group = {
            "format": preset["format"],
            "input_activations": None if inputs is None else _arguments(inputs),
            "output_activations": None,
            "targets": [CLASS_NAME],
            "weights": _arguments(weights) | {"observer": "memoryless_minmax"},
        }
        return {
            "config_groups": {"group_0": group},
            "format": preset["format"],
            "global_compression_ratio": None,
            "ignore": ignore,
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": FORMAT_VERSION,
        }


def target_named(name: str, dtype: torch.dtype, group: int | None = None) -> Target:
    """Returns the target called `name`, its own name or its preset's, for a model in `dtype`.

    `group` columns share a scale. Scales are bfloat16 for a bfloat16 model and float32 for any other, since
    float16 has too few exponents for them. Raises ValueError for an unknown name, listing the known ones, and
    for a group size that the format does not have.
    """
    presets = {entry.preset: known for known, entry in TARGETS.items()}
    found = name if name in TARGETS else presets.get(name)
    if found is None:
        known = ", ".join(f"{own} ({entry.preset})" for own, entry in TARGETS.items())
        raise ValueError(f"experts cannot be written as {name!r}; known: {known}")
    entry, scales = TARGETS[found], torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    if not entry.grouped:
        if group is not None:
            choosing = ", ".join(own for own, each in TARGETS.items() if each.grouped)
            raise ValueError(f"group size {group}: {found} has none to choose, only {choosing}")
        return Target(entry, None, scales)
    group = GROUP if group is None else group
    if group not in INT4:
        known = ", ".join(map(str, sorted(INT4)))
        raise ValueError(f"group size {group} of {found} is not supported; known: {known} ({WHOLE}: a row)")
    return Target(entry, group, scales)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns QuantizationArgs with every key that files have, `given` over the defaults."""
    scale = {4: {"tensor_group": "torch.float8_e4m3fn", "group": "torch.uint8"}}
    float4 = scale.get(given["num_bits"], {}) if given["type"] == "float" else {}
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": None,
        "observer_kwargs": {},
        "scale_dtype": float4.get(given["strategy"]),
        "symmetric": True,
        "zp_dtype": None if given.get("symmetric", True) else "torch.int8",
    } | dict(given)


def _scaled(matrix: Packed, dtype: torch.dtype) -> Tensors:
    codes, scale = matrix.parts
    return {"weight": codes, "weight_scale": scale.to(dtype)}


def _mx(codes: str, matrix: Packed, _: torch.dtype) -> Tensors:
    return dict(zip((codes, "weight_scale"), matrix.parts, strict=True))


def _nvfp4(matrix: Packed, _: torch.dtype) -> Tensors:
    codes, scale, factor = matrix.parts
    divisor = divisor_of(factor).flatten()
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor}


def _packed(matrix: Packed, dtype: torch.dtype) -> Tensors:
    codes, scale, *zero = matrix.parts
    tensors = {
        "weight_packed": codes.contiguous().view(torch.int32),
        "weight_scale": scale.to(dtype),
        "weight_shape": torch.tensor(matrix.shape),
    }
    if zero:
        columns = F.pad(zero[0].mT, (0, -zero[0].shape[0] % WORD))
        words = pack_nibbles(columns).flatten().view(torch.int32)
        tensors["weight_zero_point"] = words.view(columns.shape[0], -1).mT
    return tensors


def _chosen(rule: Callable[[int, torch.dtype], Format], group: int | None, dtype: torch.dtype) -> Format:
    return rule(GROUP if group is None else group, dtype)


TARGETS: dict[str, TargetFormat] = {
    "fp8": TargetFormat(
        "FP8_DYNAMIC",
        "E4M3, a scale a row; activations E4M3 a token",
        lambda _, dtype: rules.fp8(FP8_CHANNEL, dtype),
        _scaled,
    ),
    "fp8_block": TargetFormat(
        "FP8_BLOCK",
        "E4M3, a scale a 128x128 block; activations E4M3 in groups of 128",
        lambda _, dtype: rules.fp8(FP8_BLOCK, dtype),
        _scaled,
        multiple=128,
    ),
    "nvfp4": TargetFormat(
        "NVFP4A16", "NVFP4; activations as they are", lambda *_: rules.NVFP4, _nvfp4, multiple=16
    ),
    "mxfp4": TargetFormat(
        "MXFP4A16",
        "MXFP4; activations as they are",
        lambda *_: MXFP4,
        partial(_mx, "weight_packed"),
        multiple=32,
    ),
    "mxfp4_w4a4": TargetFormat(
        "MXFP4", "MXFP4; activations too", lambda *_: MXFP4, partial(_mx, "weight_packed"), multiple=32
    ),
    "mxfp8": TargetFormat(
        "MXFP8", "MXFP8; activations too", lambda *_: MXFP8, partial(_mx, "weight"), multiple=32
    ),
    "int8": TargetFormat(
        "W8A8",
        "INT8, a scale a row; activations INT8 a token",
        lambda _, dtype: rules.int8(dtype),
        _scaled,
    ),
    "int4": TargetFormat(
        "W4A16",
        "INT4 in groups; activations as they are",
        partial(_chosen, rules.int4),
        _packed,
        multiple=WORD,
        grouped=True,
    ),
    "int4_asym": TargetFormat(
        "W4A16_ASYM",
        "INT4 in groups with zero points; activations as they are",
        partial(_chosen, rules.int4_asymmetric),
        _packed,
        multiple=WORD,
        grouped=True,
    ),
}
"""The table of targets by name. All are rounded to nearest without calibration, so none needs data."""
