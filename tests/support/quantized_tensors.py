"""Projections of quantized checkpoints, written word by word as their producers write them.

Codes and scales are drawn at random and packed here with numpy integers, so that what a weight must be is
known without unpacking anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Projection = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix, and the matrix `[N, K]` float32 that they mean."""


@dataclass
class Draw:
    """Random numbers of one projection; `common` are the same for gate and up of an expert."""

    rows: int
    columns: int
    own: np.random.Generator
    common: np.random.Generator

    def codes(self, levels: int) -> Tensor:
        return torch.from_numpy(self.own.integers(0, levels, (self.rows, self.columns)))

    def scales(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(self.own.uniform(0.01, 0.02, shape)).to(dtype)

    def factor(self, low: float, high: float) -> Tensor:
        return torch.tensor(self.common.uniform(low, high)).float()

    def e4m3(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.own.normal(0, 40, shape)).float().to(torch.float8_e4m3fn)


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., k]` as int32 words along the last dimension, lowest bits first; the spare codes are 0."""
    each = 32 // bits
    values = codes.numpy().astype(np.uint32)
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % each)])
    shifts = np.arange(each, dtype=np.uint32) * bits
    packed = (values.reshape(*values.shape[:-1], -1, each) << shifts).sum(-1, dtype=np.uint32)
    return torch.from_numpy(packed.view(np.int32))


def pairs(codes: Tensor) -> Tensor:
    """4-bit codes two a byte, the even column in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def wide(scale: Tensor, columns: int, rows: int = 1) -> Tensor:
    return scale.float().repeat_interleave(columns, 1).repeat_interleave(rows, 0)


def power(byte: Tensor) -> Tensor:
    return torch.exp2(byte.float() - 127)


def plain(draw: Draw) -> Projection:
    weight = torch.from_numpy(draw.own.normal(0, 1, (draw.rows, draw.columns))).bfloat16()
    return {"weight": weight}, weight.float()


def fp8_tensor(draw: Draw, shape: tuple[int, ...] = (), *, static: str | None = None) -> Projection:
    codes, scale = draw.e4m3(draw.rows, draw.columns), draw.scales(*shape)
    tensors = {"weight": codes, "weight_scale": scale}
    if static:
        tensors[static] = draw.factor(0.5, 1).reshape(shape)
    return tensors, codes.float() * scale


def fp8_channel(draw: Draw, *, dtype: torch.dtype = torch.bfloat16, flat: bool = False) -> Projection:
    codes, scale = draw.e4m3(draw.rows, draw.columns), draw.scales(draw.rows, 1, dtype=dtype)
    return {"weight": codes, "weight_scale": scale[:, 0] if flat else scale}, codes.float() * scale.float()


def fp8_block(draw: Draw, name: str, *, dtype: torch.dtype, four: bool = False) -> Projection:
    codes = draw.e4m3(draw.rows, draw.columns)
    scale = draw.scales(-(-draw.rows // 128), -(-draw.columns // 128), dtype=dtype)
    stored = scale[:, None, :, None].contiguous() if four else scale
    meant = codes.float() * wide(scale, 128, 128)[: draw.rows, : draw.columns]
    return {"weight": codes, name: stored}, meant


def fp8_block_powers(draw: Draw) -> Projection:
    """As DeepSeek-V4 stores FP8 experts: a power of two for each block, as a byte."""
    codes = draw.e4m3(draw.rows, draw.columns)
    shape = (draw.rows // 128, draw.columns // 128)
    byte = torch.from_numpy(draw.own.integers(119, 122, shape)).to(torch.uint8)
    stored = {"weight": codes, "scale": byte.view(torch.float8_e8m0fnu)}
    return stored, codes.float() * wide(power(byte), 128, 128)


def int8_channel(draw: Draw) -> Projection:
    codes, scale = draw.codes(256) - 128, draw.scales(draw.rows, 1, dtype=torch.bfloat16)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes.float() * scale.float()


def int8_tensor(draw: Draw, static: str) -> Projection:
    codes, scale = draw.codes(256) - 128, draw.scales(1, dtype=torch.bfloat16)
    inputs = draw.factor(0.02, 0.05).reshape(1)  # 127 of them are the largest inputs
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scale, static: inputs}
    return tensors, codes.float() * scale.float()


def mxfp4(draw: Draw, name: str = "weight", scale_name: str = "weight_scale") -> Projection:
    codes = draw.codes(16)
    byte = torch.from_numpy(draw.own.integers(115, 125, (draw.rows, draw.columns // 32))).to(torch.uint8)
    return {name: pairs(codes), scale_name: byte}, E2M1[codes] * wide(power(byte), 32)


def static_mxfp4(draw: Draw) -> Projection:
    tensors, matrix = mxfp4(draw)
    return tensors | {"input_scale": draw.factor(0.5, 1)}, matrix


def mxfp6(draw: Draw, exponent: int) -> Projection:
    """E3M2 or E2M3, by the bits of the exponent; four codes in three bytes."""
    mantissa, bias = 5 - exponent, 2 ** (exponent - 1) - 1
    codes = draw.codes(64)
    magnitude = codes & 31
    top, low = magnitude >> mantissa, (magnitude & ((1 << mantissa) - 1)).float() / (1 << mantissa)
    values = torch.where(top > 0, (1 + low) * torch.exp2(top.float() - bias), low * 2.0 ** (1 - bias))
    values = torch.where(codes >= 32, -values, values)
    byte = torch.from_numpy(draw.own.integers(115, 125, (draw.rows, draw.columns // 32))).to(torch.uint8)
    quads = codes.view(draw.rows, -1, 4)
    word = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    stored = torch.stack((word & 255, word >> 8 & 255, word >> 16), dim=-1).flatten(1).to(torch.uint8)
    return {"weight": stored, "weight_scale": byte}, values * wide(power(byte), 32)


def mxfp8(draw: Draw) -> Projection:
    codes = draw.e4m3(draw.rows, draw.columns)
    byte = torch.from_numpy(draw.own.integers(115, 125, (draw.rows, draw.columns // 32))).to(torch.uint8)
    return {"weight": codes, "weight_scale": byte}, codes.float() * wide(power(byte), 32)


def nvfp4(draw: Draw, *, static: bool = True) -> Projection:
    codes, block = (
        draw.codes(16),
        draw.e4m3(draw.rows, draw.columns // 16).float().abs().to(torch.float8_e4m3fn),
    )
    whole = draw.factor(0.001, 0.002)
    tensors = {"weight": pairs(codes), "weight_scale": block, "weight_scale_2": whole}
    if static:
        tensors["input_scale"] = draw.factor(0.01, 0.02)
    return tensors, E2M1[codes] * wide(block, 16) * whole


def nvfp4_divided(draw: Draw, *, static: bool = True) -> Projection:
    tensors, _ = nvfp4(draw)
    codes, block = tensors["weight"], tensors["weight_scale"]
    whole = draw.factor(500, 1000).bfloat16().float().reshape(1)
    stored = {"weight_packed": codes, "weight_scale": block, "weight_global_scale": whole}
    if static:
        stored["input_global_scale"] = draw.factor(50, 100).reshape(1)
    values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    return stored, values * wide(block, 16) / whole


def compressed_ints(
    draw: Draw, bits: int, group: int, *, asymmetric: bool = False, order: bool = False
) -> Projection:
    middle, groups = 1 << (bits - 1), draw.columns // group
    codes, scale = draw.codes(1 << bits), draw.scales(draw.rows, groups, dtype=torch.bfloat16)
    of = torch.arange(draw.columns) // group
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([draw.rows, draw.columns]),
    }
    zero = torch.full((draw.rows, groups), middle)
    if asymmetric:
        zero = torch.from_numpy(draw.own.integers(0, 1 << bits, (draw.rows, groups)))
        tensors["weight_zero_point"] = words(zero.mT, bits).mT.contiguous()
    if order:
        of = torch.from_numpy(draw.common.permutation(of.numpy()))
        tensors["weight_g_idx"] = of.int()
    return tensors, (codes - zero[:, of]).float() * scale.float()[:, of]


def int4_bytes(draw: Draw, group: int) -> Projection:
    """Signed codes of four bits, one a byte."""
    codes = draw.codes(16) - 8
    scale = draw.scales(draw.rows, draw.columns // group, dtype=torch.bfloat16)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes.float() * wide(scale, group)


def gptq(
    draw: Draw, bits: int = 4, group: int = 128, *, less: int = 1, sym: bool = True, order: bool = False
) -> Projection:
    middle, groups = 1 << (bits - 1), draw.columns // group
    codes, scale = draw.codes(1 << bits), draw.scales(draw.rows, groups, dtype=torch.float16)
    of = torch.arange(draw.columns) // group
    if order:
        of = torch.from_numpy(draw.common.permutation(of.numpy()))
    zero = torch.full((draw.rows, groups), middle)
    if not sym:
        zero = torch.from_numpy(draw.own.integers(less, (1 << bits) + less, (draw.rows, groups)))
    tensors = {
        "qweight": words(codes, bits).mT.contiguous(),
        "qzeros": words((zero - less).mT.contiguous(), bits),
        "scales": scale.mT.contiguous(),
        "g_idx": of.int(),
    }
    return tensors, (codes - zero[:, of]).float() * scale.float()[:, of]


def awq(draw: Draw, group: int = 64) -> Projection:
    groups = draw.columns // group
    codes, scale = draw.codes(16), draw.scales(draw.rows, groups, dtype=torch.float16)
    zero = torch.from_numpy(draw.own.integers(0, 16, (draw.rows, groups)))

    def interleaved(matrix: Tensor) -> Tensor:
        eights = matrix.view(matrix.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.flatten(1), 4)

    tensors = {
        "qweight": interleaved(codes.mT.contiguous()),
        "qzeros": interleaved(zero.mT.contiguous()),
        "scales": scale.mT.contiguous(),
    }
    of = torch.arange(draw.columns) // group
    return tensors, (codes - zero[:, of]).float() * scale.float()[:, of]
