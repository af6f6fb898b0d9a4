"""How common formats are stored: one function a format, which returns its `Storage`.

Tensors have their usual names; a dialect that uses another name passes it. Weights with one scale for the
matrix are read as rows that have the same scale, so that gate and up keep scales of their own and no code is
rounded a second time.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from moeserve.checkpoints.dialects.dialect import StaticScale, Storage
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import ROWS, SCALAR, Axes, StoredMatrix, StoredTensor
from moeserve.quant.format import WHOLE, Format, Parts, Scheme
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_GROUP
from moeserve.quant.formats.int8 import INT8_CHANNEL
from moeserve.quant.formats.mx import MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4

E4M3: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
BYTES: tuple[torch.dtype, ...] = (torch.uint8,)
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS: dict[Format, tuple[torch.dtype, ...]] = {FP8_CHANNEL: E4M3, INT8_CHANNEL: (torch.int8,)}


WEIGHT_SCALE = StoredTensor("weight_scale", FLOAT_SCALES, WHOLE, WHOLE, SCALAR, scale=True)
"""The axes of a scale that a whole matrix shares."""


def per_tensor(
    form: Format,
    activations: Format,
    static: StaticScale | None = None,
    scale: StoredTensor = WEIGHT_SCALE,
) -> Storage:
    """Stores 8-bit `weight` with one scale a matrix; `form` is the per-channel format of its element."""
    codes = StoredTensor("weight", EIGHT_BITS[form])

    def parts(matrix: StoredMatrix) -> Parts:
        rows = matrix.read(codes)
        return rows, matrix.read(scale).float().expand(rows.shape[0], 1).contiguous()

    return Storage(Scheme(form, activations), (codes, scale), parts, static)


def per_channel(form: Format, activations: Format, static: StaticScale | None = None) -> Storage:
    """Stores 8-bit `weight` with one `weight_scale` an output row, `[N]` or `[N, 1]`."""
    codes = StoredTensor("weight", EIGHT_BITS[form])
    scale = StoredTensor("weight_scale", FLOAT_SCALES, 1, WHOLE, ROWS, scale=True)
    return Storage(Scheme(form, activations), (codes, scale), static=static)


def fp8_block(
    activations: Format,
    scale: str,
    axes: tuple[Axes, ...] = (("n", "k"),),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    *,
    beside: bool = False,
) -> Storage:
    """Stores E4M3 `weight` with one scale a 128x128 block, under the name `scale`.

    Where I is no multiple of 128, the rows of up start within a block of gate_up. Every row then gets a copy
    of its block's scales, which changes no value.
    """
    rows, columns = FP8_BLOCK.block
    scales = StoredTensor(scale, dtypes, rows, columns, axes, scale=True, beside=beside)
    tensors = (StoredTensor("weight", E4M3), scales)

    def by_row(matrix: StoredMatrix) -> Parts:
        first = matrix.holder(scales).rows.start % rows
        of = (torch.arange(matrix.size[0]) + first) // rows
        return matrix.read(tensors[0]), matrix.read(scales).float()[of]

    uneven = Storage(Scheme(FP8_GROUP, activations), tensors, by_row)
    return Storage(Scheme(FP8_BLOCK, activations), tensors, uneven=uneven)


def mx(
    form: Format,
    activations: Format,
    *,
    codes: str = "weight",
    scale: str = "weight_scale",
    static: StaticScale | None = None,
) -> Storage:
    """Stores codes of an OCP MX format in bytes, and an E8M0 byte for each 32 columns."""
    part = form.parts[0]
    dtypes = E4M3 if form == MXFP8 else (torch.uint8, torch.int8)
    scales = (torch.uint8, torch.float8_e8m0fnu)
    tensors = (
        StoredTensor(codes, dtypes, part.rows, Fraction(part.columns)),
        StoredTensor(scale, scales, 1, 32, scale=True),
    )
    return Storage(Scheme(form, activations), tensors, static=static)


def nvfp4(activations: Format, static: StaticScale | None = None) -> Storage:
    """Stores NVFP4 as ModelOpt does: `weight`, `weight_scale` for 16 columns, `weight_scale_2` for all."""
    scale = StoredTensor("weight_scale_2", (torch.float32,), WHOLE, WHOLE, SCALAR, scale=True, shared=True)
    return Storage(Scheme(NVFP4, activations), (*nvfp4_blocks("weight"), scale), static=static)


def nvfp4_blocks(codes: str) -> tuple[StoredTensor, StoredTensor]:
    """Returns the tensors of NVFP4: E2M1 codes under the name `codes`, and `weight_scale`."""
    return StoredTensor(codes, BYTES, 1, 2), StoredTensor("weight_scale", E4M3, 1, 16, scale=True)


def nvfp4_divided(activations: Format, static: StaticScale | None = None) -> Storage:
    """Stores NVFP4 as compressed-tensors does: `weight_packed`, and `weight_global_scale`, a divisor."""
    codes, scale = nvfp4_blocks("weight_packed")
    divisor = StoredTensor(
        "weight_global_scale", (torch.float32,), WHOLE, WHOLE, SCALAR, scale=True, shared=True
    )

    def parts(matrix: StoredMatrix) -> Parts:
        return matrix.read(codes), matrix.read(scale), reciprocal(matrix.name(divisor), matrix.read(divisor))

    return Storage(Scheme(NVFP4_DIVIDED, activations), (codes, scale, divisor), parts, static)


def reciprocal(name: str, divisor: Tensor) -> Tensor:
    """Returns 1 / divisor in float32. Raises CheckpointError where the divisor is zero, or so small that it
    has none.
    """
    if not (divisor > 0).all():
        raise CheckpointError(f"scale {name} divides, so it must be positive, found 0.0")
    found = divisor.float().reciprocal()
    if found.isinf().any():
        smallest = divisor.min().item()
        raise CheckpointError(f"scale {name} divides, and {smallest:g} has no reciprocal in float32")
    return found


def _decode_divided(parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, factor = parts
    values = NVFP4.decode((codes, scale, torch.ones_like(factor)), shape)
    return values / divisor_of(factor)


def divisor_of(factor: Tensor) -> Tensor:
    """Returns the divisor whose rounded reciprocal is `factor`: one of `DIVISOR_BITS`, else the nearest."""
    exact = factor.double().reciprocal()
    mantissa, exponent = torch.frexp(exact)
    found = exact.float()
    for bits in DIVISOR_BITS:
        short = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).float()
        found = torch.where(short.reciprocal() == factor, short, found)
    return found


DIVISOR_BITS = (11, 8)
"""Significant bits of float16 and bfloat16; divisors of such models have no more."""

NVFP4_DIVIDED = replace(NVFP4, decode=_decode_divided)
"""NVFP4 whose global scale is a rounded reciprocal: decodes as code x scale / divisor, as its producer does.

The producer's divisors are numbers of the model's dtype. A float32 reciprocal gives those of bfloat16 and
float16 back, and values then equal the quotient bit for bit; one in seven float32 divisors is off by a bit.
A kernel that multiplies by the reciprocal is off by one unit in the last place.
"""
