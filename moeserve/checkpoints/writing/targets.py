"""What experts can be written as: `TARGETS`, each a row with compressed-tensors' config and tensors.

The inverse of the `compressed_tensors` dialect: what a row writes, the dialect reads back bit for bit.
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

GROUP = 128  # of INT4, unless given
WORD = 8  # 4-bit codes in an int32

FORMAT_VERSION = "0.19.0"
"""The release of compressed-tensors whose files these are."""

Tensors = Mapping[str, Tensor]
"""A projection's tensors by suffix: `weight_packed`, `weight_scale`, ..."""


@dataclass(frozen=True)
class Row:
    """How one format is written: the name of its preset, its rule, and its tensors."""

    preset: str  # of compressed-tensors; also accepted as a name
    about: str
    form: Callable[[int | None, torch.dtype], Format]
    stored: Callable[[Packed, torch.dtype], Tensors]
    multiple: int = 1  # of H and I
    grouped: bool = False  # the user chooses the group size


@dataclass(frozen=True)
class Target:
    """One format that experts can be written in, for a model whose scales are stored in `scale_dtype`."""

    row: Row
    group: int | None  # columns a group, where the user chooses; WHOLE: one a row
    scale_dtype: torch.dtype

    @property
    def form(self) -> Format:
        """The format of the weights, with the rule that they are written by."""
        return self.row.form(self.group, self.scale_dtype)

    @property
    def multiple(self) -> int:
        """What H and I must be a multiple of."""
        return self.row.multiple if self.group is None else max(self.group, self.row.multiple)

    def tensors(self, matrix: Packed) -> Tensors:
        """What is stored of a matrix `[N, K]`, contiguous."""
        found = self.row.stored(matrix, self.scale_dtype)
        return {suffix: tensor.contiguous() for suffix, tensor in found.items()}

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """The `quantization_config`; `ignore` are the modules that stay as they are."""
        preset = PRESETS[self.row.preset]
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
    """The target called `name`, or as its preset, for a model in `dtype`; `group` columns share a scale.

    Scales are bfloat16 where the model is, else float32: float16 has too few exponents for them. ValueError:
    an unknown name, with the known ones; a group size that the format has not.
    """
    presets = {row.preset: known for known, row in TARGETS.items()}
    found = name if name in TARGETS else presets.get(name)
    if found is None:
        known = ", ".join(f"{own} ({row.preset})" for own, row in TARGETS.items())
        raise ValueError(f"experts cannot be written as {name!r}; known: {known}")
    row, scales = TARGETS[found], torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    if not row.grouped:
        if group is not None:
            choosing = ", ".join(own for own, each in TARGETS.items() if each.grouped)
            raise ValueError(f"group size {group}: {found} has none to choose, only {choosing}")
        return Target(row, None, scales)
    group = GROUP if group is None else group
    if group not in INT4:
        known = ", ".join(map(str, sorted(INT4)))
        raise ValueError(f"group size {group} of {found} is not supported; known: {known} ({WHOLE}: a row)")
    return Target(row, group, scales)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of QuantizationArgs, as files have them."""
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


TARGETS: dict[str, Row] = {
    "fp8": Row(
        "FP8_DYNAMIC",
        "E4M3, a scale a row; activations E4M3 a token",
        lambda _, dtype: rules.fp8(FP8_CHANNEL, dtype),
        _scaled,
    ),
    "fp8_block": Row(
        "FP8_BLOCK",
        "E4M3, a scale a 128x128 block; activations E4M3 in groups of 128",
        lambda _, dtype: rules.fp8(FP8_BLOCK, dtype),
        _scaled,
        multiple=128,
    ),
    "nvfp4": Row("NVFP4A16", "NVFP4; activations as they are", lambda *_: rules.NVFP4, _nvfp4, multiple=16),
    "mxfp4": Row(
        "MXFP4A16",
        "MXFP4; activations as they are",
        lambda *_: MXFP4,
        partial(_mx, "weight_packed"),
        multiple=32,
    ),
    "mxfp4_w4a4": Row(
        "MXFP4", "MXFP4; activations too", lambda *_: MXFP4, partial(_mx, "weight_packed"), multiple=32
    ),
    "mxfp8": Row("MXFP8", "MXFP8; activations too", lambda *_: MXFP8, partial(_mx, "weight"), multiple=32),
    "int8": Row(
        "W8A8",
        "INT8, a scale a row; activations INT8 a token",
        lambda _, dtype: rules.int8(dtype),
        _scaled,
    ),
    "int4": Row(
        "W4A16",
        "INT4 in groups; activations as they are",
        partial(_chosen, rules.int4),
        _packed,
        multiple=WORD,
        grouped=True,
    ),
    "int4_asym": Row(
        "W4A16_ASYM",
        "INT4 in groups with zero points; activations as they are",
        partial(_chosen, rules.int4_asymmetric),
        _packed,
        multiple=WORD,
        grouped=True,
    ),
}
"""Every target by name. All are rounded to nearest: nothing is calibrated, so nothing needs data."""
