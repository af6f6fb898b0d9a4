"""GPTQ: integers packed along K in int32 words `[K / 8, N]`; scales, zero points, activation order.

Version 1 stores zero points less one; version 2 (`checkpoint_format` gptq_v2) stores them unchanged. Files
have a `g_idx`, the group of each column, even where groups are in order (`desc_act` false). Old files have a
`bias` of zeros for experts without biases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.checkpoints.dialects.act_order import read_order
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, Storage
from moeserve.checkpoints.dialects.forms import FLOAT_SCALES
from moeserve.checkpoints.dialects.words import unpacked
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import COLUMNS, INPUT_MAJOR, Axes, StoredMatrix, StoredTensor
from moeserve.quant.format import WHOLE, Format, Parts, Scheme
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.int4 import INT4, INT4_ACT_ORDER, INT4_ASYMMETRIC, INT4_ASYMMETRIC_ACT_ORDER
from moeserve.quant.formats.int8_grouped import INT8, INT8_ACT_ORDER
from moeserve.quant.layouts.gptq import GPTQ, GPTQ_V2, zero_points

LESS = {"gptq": 1, "gptq_v2": 0}
"""How much less than the zero point a file stores, by its checkpoint_format."""
LAYOUTS = {1: GPTQ, 0: GPTQ_V2}
"""The layout of the packed integers, by what zero points are stored less."""
REQUIRED: Mapping[str, type] = {"bits": int, "group_size": int, "desc_act": bool, "sym": bool}
WORDS = (torch.int32,)
ROW_VECTOR: tuple[Axes, ...] = (("n",),)


@dataclass(frozen=True)
class GptqNumbers:
    """The settings of one module in the config."""

    bits: int
    group: int
    act_order: bool
    symmetric: bool
    less: int  # stored zero points are less by this


def _claims(quantization: Quantization) -> bool:
    if quantization is None:
        return False
    if quantization.get("quant_method") is None:
        return "bits" in quantization and "desc_act" in quantization
    return bool(quantization["quant_method"] == "gptq")


def _numbers(settings: Settings) -> GptqNumbers:
    for key, kind in REQUIRED.items():
        value = settings.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"GPTQ's config needs {key} ({kind.__name__}), found {value!r}")
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in LESS:
        raise CheckpointError(f"checkpoint_format={form!r} is not supported, only {', '.join(LESS)}")
    bits, group, symmetric = int(settings["bits"]), int(settings["group_size"]), bool(settings["sym"])
    if (bits, symmetric) not in ((4, True), (4, False), (8, True)):
        accepted = "(4, True), (4, False), (8, True)"
        raise CheckpointError(f"GPTQ with (bits, sym)={(bits, symmetric)} is not supported, only {accepted}")
    if group not in INT4:
        raise CheckpointError(f"group_size={group} is not supported, only {', '.join(map(str, INT4))}")
    ordered = bool(settings["desc_act"]) and group != WHOLE
    return GptqNumbers(bits, group, ordered, symmetric, LESS[form])


def _of_module(settings: Settings, module: str) -> Settings | None:
    """Returns the settings of one module; None where it is not quantized."""
    for pattern, changed in (settings.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            if re.match(pattern[2:], module):
                return None
        elif re.match(pattern.removeprefix("+:"), module):
            return {**settings, **changed}
    listed = settings.get("modules_in_block_to_quantize")
    if not listed:
        return settings
    flat = [name for entry in listed for name in (entry if isinstance(entry, list) else [entry])]
    return settings if any(f".{module}".endswith(f".{name}") for name in flat) else None


def _of_layer(settings: Settings, names: LayerNames) -> GptqNumbers | None:
    found: dict[GptqNumbers | None, str] = {}
    for module in names.modules():
        own = _of_module(settings, module)
        found.setdefault(None if own is None else _numbers(own), module)
    if len(found) > 1:
        listed = " and ".join(f"{module} ({own or 'unquantized'})" for own, module in found.items())
        raise CheckpointError(f"experts of a layer must be quantized alike; these are not: {listed}")
    return next(iter(found))


def _skips(settings: Settings, names: LayerNames) -> bool:
    return _of_layer(settings, names) is None


def _format(numbers: GptqNumbers) -> Format:
    if numbers.bits == 8:
        return (INT8_ACT_ORDER if numbers.act_order else INT8)[numbers.group]
    tables = {
        (True, False): INT4,
        (True, True): INT4_ACT_ORDER,
        (False, False): INT4_ASYMMETRIC,
        (False, True): INT4_ASYMMETRIC_ACT_ORDER,
    }
    return tables[numbers.symmetric, numbers.act_order][numbers.group]


def _storage(settings: Settings, dtype: torch.dtype, names: LayerNames) -> Storage:
    numbers = _of_layer(settings, names)
    if numbers is None:
        raise ValueError(f"{names.module} is not quantized")
    return _words(numbers, Scheme(_format(numbers), FLOATS[dtype]))


def _words(numbers: GptqNumbers, scheme: Scheme) -> Storage:
    each, group = 32 // numbers.bits, numbers.group
    codes = StoredTensor("qweight", WORDS, 1, each, INPUT_MAJOR)
    scale = StoredTensor("scales", FLOAT_SCALES, 1, group, INPUT_MAJOR, scale=True)
    zero = StoredTensor("qzeros", WORDS, each, group, INPUT_MAJOR)
    order = StoredTensor(
        "g_idx", WORDS, WHOLE, 1, COLUMNS, optional=not numbers.act_order, shared=numbers.act_order
    )
    bias = StoredTensor("bias", tuple(FLOATS), 1, WHOLE, ROW_VECTOR, optional=True)

    def parts(matrix: StoredMatrix) -> Parts:
        _check_bias(matrix, bias)
        found = {tensor.suffix: matrix.read(tensor).mT for tensor in (codes, zero)}
        found["scales"] = matrix.read(scale).float().mT
        if numbers.symmetric:
            zeros = zero_points(found["qzeros"], matrix.size[0], numbers.bits, numbers.less)
            _check_middle(matrix.name(zero), zeros, 1 << (numbers.bits - 1))
        if numbers.act_order:
            found["g_idx"] = read_order(matrix, order, found["scales"].shape[0])[0]
        else:
            _check_plain(matrix, order, group)
        return unpacked(LAYOUTS[numbers.less], found, scheme.weights, matrix.size)

    tensors = (codes, scale, zero, order, bias)
    return Storage(scheme, tensors, parts, turns=False, act_order=numbers.act_order)


def _check_middle(name: str, zeros: Tensor, middle: int) -> None:
    if (other := zeros[zeros != middle]).numel():
        raise CheckpointError(
            f"{name} holds the zero point {other[0].item()}, and sym=True needs {middle} everywhere"
        )


def _check_plain(matrix: StoredMatrix, tensor: StoredTensor, group: int) -> None:
    if group == WHOLE or not matrix.has(tensor):
        return
    counted = torch.arange(matrix.columns.start, matrix.columns.stop) // group
    if not torch.equal(matrix.read(tensor)[0].long(), counted):
        raise CheckpointError(
            f"{matrix.name(tensor)} does not count groups of {group}, and desc_act=False says it does"
        )


def _check_bias(matrix: StoredMatrix, tensor: StoredTensor) -> None:
    if matrix.has(tensor) and matrix.read(tensor).any():
        raise CheckpointError(f"{matrix.name(tensor)} is not zero, and the model's experts have no bias")


ENTRY = Dialect(
    name="gptq",
    reads="quant_method gptq with 4 bits, or 8 bits and sym",
    claims=_claims,
    storage=_storage,
    skips=_skips,
)
