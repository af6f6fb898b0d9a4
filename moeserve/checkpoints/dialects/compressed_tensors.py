"""compressed-tensors, as llm-compressor writes it: FP8, INT8, INT4, NVFP4, MXFP4 and MXFP8.

The numbers of a layer's group tell how it is stored: the first of `STORED_FORMS` that fits them. Integers
packed in words (`pack-quantized`) are stored as code + 2^(bits - 1). Four-bit integers with quantized inputs
are stored one a byte (`int-quantized`). The global scales of NVFP4 are divisors. Scales are in the model's
dtype, and widening them loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeserve.checkpoints.dialects import forms
from moeserve.checkpoints.dialects.act_order import read_order
from moeserve.checkpoints.dialects.compressed_config import CompressedNumbers, ConfigGroup, group_of
from moeserve.checkpoints.dialects.compressed_transforms import check_transforms
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, StaticScale, Storage
from moeserve.checkpoints.dialects.words import unpacked
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import COLUMNS, Axes, StoredMatrix, StoredTensor
from moeserve.quant.bits import pack_nibbles
from moeserve.quant.format import WHOLE, Format, Parts, Scheme
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.fp8 import FP8_CHANNEL, FP8_GROUP, FP8_STATIC, FP8_TOKEN
from moeserve.quant.formats.int4 import (
    INT4,
    INT4_ACT_ORDER,
    INT4_ASYMMETRIC,
    INT4_ASYMMETRIC_ACT_ORDER,
    MIDDLE,
)
from moeserve.quant.formats.int8 import INT8_CHANNEL, INT8_STATIC, INT8_TOKEN, INT8_TOKEN_ASYMMETRIC
from moeserve.quant.formats.int8_grouped import (
    INT8,
    INT8_ACT_ORDER,
    INT8_ASYMMETRIC,
    INT8_ASYMMETRIC_ACT_ORDER,
)
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4_STATIC
from moeserve.quant.layouts.compressed_ints import COMPRESSED_INTS

TABLES = {
    (4, True, False): INT4,
    (4, False, False): INT4_ASYMMETRIC,
    (4, True, True): INT4_ACT_ORDER,
    (4, False, True): INT4_ASYMMETRIC_ACT_ORDER,
    (8, True, False): INT8,
    (8, False, False): INT8_ASYMMETRIC,
    (8, True, True): INT8_ACT_ORDER,
    (8, False, True): INT8_ASYMMETRIC_ACT_ORDER,
}
"""Formats of packed integers by group size, for (bits, symmetric, with activation order)."""

INPUT_TOLERANCE = 1e-5
INT8_INPUTS = (("int", 8, "token"), ("int", 8, "tensor"))
INT8_NEED = "dynamic int8 inputs per token, or symmetric int8 inputs per tensor"
WORDS, SHAPE = (torch.int32,), (torch.int64, torch.int32)
WORDS_FORMAT = "pack-quantized"
INTEGER_FORMATS = (WORDS_FORMAT, "int-quantized", "naive-quantized")


@dataclass(frozen=True)
class StoredForm:
    """One entry of `STORED_FORMS`: the weights and inputs it fits, and the files' formats that store it."""

    reads: str  # the weights, in the words of the config
    fits: Callable[[CompressedNumbers, CompressedNumbers | None], bool]  # by numbers of weights and of inputs
    storage: Callable[
        [ConfigGroup, CompressedNumbers, Format], Storage | str
    ]  # or, as text, what would be accepted
    formats: tuple[str, ...]


def _claims(quantization: Quantization) -> bool:
    return quantization is not None and quantization.get("quant_method") == "compressed-tensors"


def _skips(settings: Settings, names: LayerNames) -> bool:
    group = group_of(settings, names)
    return group is None or group.weights is None


def _storage(settings: Settings, dtype: torch.dtype, names: LayerNames) -> Storage:
    if settings.get("sparsity_config"):
        raise CheckpointError(f"sparsity_config={settings['sparsity_config']!r} is not supported, only none")
    check_transforms(settings, names)
    group = group_of(settings, names)
    if group is None or group.weights is None:
        raise ValueError(f"{names.module} is not quantized")
    weights = group.weights
    for form in STORED_FORMS:
        if form.fits(weights, group.inputs):
            if group.format not in form.formats:
                accepted = " or ".join(form.formats)
                raise CheckpointError(
                    f"config_groups.{group.name}: weights {weights} in format {group.format!r} are not "
                    f"supported, only in {accepted}"
                )
            found = form.storage(group, weights, FLOATS[dtype])
            if isinstance(found, Storage):
                return found
            raise CheckpointError(f"{_described(group)} are not supported; {form.reads} need {found}")
    supported = "; ".join(form.reads for form in STORED_FORMS)
    raise CheckpointError(f"{_described(group)} are not supported; supported: {supported}")


def _described(group: ConfigGroup) -> str:
    return f"config_groups.{group.name}: weights {group.weights} with inputs {group.inputs}"


def _mxfp4(group: ConfigGroup, _: CompressedNumbers, plain: Format) -> Storage | str:
    activations = _mx_inputs(group.inputs, plain)
    if activations is None:
        return "no inputs, or dynamic float4 or float8 inputs in groups of 32"
    return forms.mx(MXFP4, activations, codes="weight_packed")


def _mxfp8(group: ConfigGroup, _: CompressedNumbers, plain: Format) -> Storage | str:
    activations = _mx_inputs(group.inputs, plain)
    if activations not in (plain, MXFP8) or activations is None:
        return "no inputs, or dynamic float8 inputs in groups of 32"
    return forms.mx(MXFP8, activations)


def _mx_inputs(inputs: CompressedNumbers | None, plain: Format) -> Format | None:
    if inputs is None:
        return plain
    if inputs.type == "float" and inputs.group == 32 and inputs.dynamic is True:
        return {4: MXFP4, 8: MXFP8}.get(inputs.bits)
    return None


def _nvfp4(group: ConfigGroup, _: CompressedNumbers, plain: Format) -> Storage | str:
    inputs = group.inputs
    if inputs is None:
        return forms.nvfp4_divided(plain)
    if (inputs.type, inputs.bits, inputs.strategy, inputs.group) != ("float", 4, "tensor_group", 16):
        return "no inputs, or NVFP4 inputs (float4 per tensor_group 16)"
    static = StaticScale("input_global_scale", reciprocal=True)
    return forms.nvfp4_divided(NVFP4_STATIC, static)


def _fp8(group: ConfigGroup, weights: CompressedNumbers, plain: Format) -> Storage | str:
    inputs = group.inputs
    if not weights.symmetric or (inputs is not None and (inputs.type, inputs.bits) != ("float", 8)):
        return "symmetric float8 weights and float8 inputs"
    if weights.strategy == "tensor":
        if inputs is None:
            return forms.per_tensor(FP8_CHANNEL, plain)
        if inputs.strategy != "tensor":
            return "inputs per tensor where weights are"
        if inputs.dynamic:
            return forms.per_tensor(FP8_CHANNEL, FP8_TOKEN)
        static = StaticScale("input_scale", tolerance=INPUT_TOLERANCE)
        return forms.per_tensor(FP8_CHANNEL, FP8_STATIC, static)
    if weights.strategy == "channel":
        if inputs is not None and inputs.strategy != "token":
            return "dynamic inputs per token where weights are per channel"
        return forms.per_channel(FP8_CHANNEL, plain if inputs is None else FP8_TOKEN)
    if weights.strategy == "block" and weights.block == (128, 128):
        if inputs is not None and (inputs.strategy, inputs.group, inputs.dynamic) != ("group", 128, True):
            return "dynamic inputs in groups of 128 where weights are in blocks"
        return forms.fp8_block(plain if inputs is None else FP8_GROUP, "weight_scale")
    return "weights per tensor, per channel or in blocks of (128, 128)"


def _int8(group: ConfigGroup, weights: CompressedNumbers, _: Format) -> Storage | str:
    inputs, stored = group.inputs, {"channel": forms.per_channel, "tensor": forms.per_tensor}
    if weights.strategy not in stored or not weights.symmetric:
        return "symmetric weights per channel or per tensor"
    if inputs is None or (inputs.type, inputs.bits, inputs.strategy) not in INT8_INPUTS:
        return INT8_NEED
    form = stored[weights.strategy]
    if inputs.strategy == "tensor" and inputs.symmetric and not inputs.dynamic:
        static = StaticScale("input_scale", tolerance=INPUT_TOLERANCE)
        return form(INT8_CHANNEL, INT8_STATIC, static)
    if not inputs.dynamic or (inputs.strategy == "tensor" and not inputs.symmetric):
        return INT8_NEED
    return form(INT8_CHANNEL, INT8_TOKEN if inputs.symmetric else INT8_TOKEN_ASYMMETRIC)


def _packed(group: ConfigGroup, weights: CompressedNumbers, plain: Format) -> Storage | str:
    inputs = group.inputs
    span = weights.group if weights.strategy == "group" else WHOLE
    if weights.bits not in (4, 8) or weights.strategy not in ("group", "channel"):
        return "4 or 8 bits in groups or per channel"
    if span not in INT4:
        return f"groups of {', '.join(str(size) for size in INT4 if size != WHOLE)}, or per channel"
    ordered, asymmetric = weights.actorder == "group", not weights.symmetric
    form = TABLES[weights.bits, weights.symmetric, ordered][span]
    if inputs is None and group.format == WORDS_FORMAT:
        return _words(Scheme(form, plain), weights.bits, asymmetric=asymmetric, act_order=ordered)
    if asymmetric or ordered:
        return f"no inputs and format {WORDS_FORMAT} where they have zero points or an activation order"
    if weights.bits == 8:
        return _bytes(Scheme(form, plain), 8)
    if inputs is not None and (inputs.strategy, inputs.bits, inputs.symmetric) != ("token", 8, True):
        return "no inputs, or symmetric dynamic 8-bit inputs per token"
    dynamic = {"int": INT8_TOKEN, "float": FP8_TOKEN}
    activations = plain if inputs is None else dynamic[inputs.type]
    return _integers(group, Scheme(INT4[span], activations), 4)


def _integers(group: ConfigGroup, scheme: Scheme, bits: int) -> Storage:
    """Returns the storage of symmetric integers, in words or in bytes as the group's format says."""
    return _words(scheme, bits) if group.format == WORDS_FORMAT else _bytes(scheme, bits)


def _bytes(scheme: Scheme, bits: int) -> Storage:
    """Returns the storage of `weight` int8 `[N, K]`, one code a byte for 4 and 8 bits, with its scales."""
    codes = StoredTensor("weight", (torch.int8,))
    scale = StoredTensor("weight_scale", forms.FLOAT_SCALES, 1, scheme.weights.parts[1].columns, scale=True)

    def parts(matrix: StoredMatrix) -> Parts:
        values, scales = matrix.read(codes), matrix.read(scale).float()
        if bits == 8:
            return values, scales
        if (wrong := values[(values < -MIDDLE) | (values >= MIDDLE)]).numel():
            raise CheckpointError(f"{matrix.name(codes)} holds {wrong[0].item()}, and 4 bits hold -8 to 7")
        return pack_nibbles(values + MIDDLE), scales

    return Storage(scheme, (codes, scale), parts)


def _words(scheme: Scheme, bits: int, *, asymmetric: bool = False, act_order: bool = False) -> Storage:
    """Returns the storage of `weight_packed` int32 `[N, K bits / 32]`, packed along K.

    Scales, the shape and, where asked for, zero points and the activation order are tensors of their own.
    """
    group = scheme.weights.parts[1].columns
    codes = StoredTensor("weight_packed", WORDS, 1, 32 // bits)
    scale = StoredTensor("weight_scale", forms.FLOAT_SCALES, 1, group, scale=True)
    zero = StoredTensor("weight_zero_point", WORDS, 32 // bits, group)
    size: tuple[Axes, ...] = ((2,),)
    shape = StoredTensor("weight_shape", SHAPE, WHOLE, WHOLE, size, optional=True)
    order = StoredTensor("weight_g_idx", WORDS, WHOLE, 1, COLUMNS, shared=True)
    tensors = (codes, scale, shape, *([zero] * asymmetric), *([order] * act_order))

    def parts(matrix: StoredMatrix) -> Parts:
        _check_shape(matrix, shape)
        found = {tensor.suffix: matrix.read(tensor) for tensor in (codes, *([zero] * asymmetric))}
        found["weight_scale"] = matrix.read(scale).float()
        if act_order:
            found["weight_g_idx"] = read_order(matrix, order, found["weight_scale"].shape[1])[0]
        return unpacked(COMPRESSED_INTS, found, scheme.weights, matrix.size)

    return Storage(scheme, tensors, parts, act_order=act_order)


def _check_shape(matrix: StoredMatrix, tensor: StoredTensor) -> None:
    if not matrix.has(tensor):
        return
    found = matrix.read(tensor).flatten().tolist()
    if found != list(matrix.shape):
        raise CheckpointError(f"tensor {matrix.name(tensor)} must hold {list(matrix.shape)}, found {found}")


def _float(bits: int, strategy: str | None = None, group: int | None = None) -> Callable[..., bool]:
    def fits(n: CompressedNumbers, _: CompressedNumbers | None) -> bool:
        grouped = strategy is None or (n.strategy, n.group) == (strategy, group)
        return n.type == "float" and n.bits == bits and grouped

    return fits


def _int8_inputs(weights: CompressedNumbers, inputs: CompressedNumbers | None) -> bool:
    return weights.type == "int" and weights.bits == 8 and inputs is not None


STORED_FORMS = (
    StoredForm(
        "MXFP4 weights (float4 per group 32)", _float(4, "group", 32), _mxfp4, ("mxfp4-pack-quantized",)
    ),
    StoredForm("MXFP8 weights (float8 per group 32)", _float(8, "group", 32), _mxfp8, ("mxfp8-quantized",)),
    StoredForm(
        "NVFP4 weights (float4 per tensor_group 16)",
        _float(4, "tensor_group", 16),
        _nvfp4,
        ("nvfp4-pack-quantized",),
    ),
    StoredForm("FP8 weights (float8)", _float(8), _fp8, ("float-quantized", "naive-quantized")),
    StoredForm("INT8 weights with inputs", _int8_inputs, _int8, ("int-quantized", "naive-quantized")),
    StoredForm("packed integer weights", lambda weights, _: weights.type == "int", _packed, INTEGER_FORMATS),
)

"""The table of what weights and inputs can be stored as; the first that fits is taken."""

ENTRY = Dialect(
    name="compressed_tensors",
    reads="quant_method compressed-tensors",
    claims=_claims,
    storage=_storage,
    skips=_skips,
)
