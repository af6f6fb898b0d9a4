"""`STORED`: random stored projections of each format, as checkpoints have them, for `cross_checks`.

Codes take every value that the format has; scales are float32 where producers' own tools would otherwise
answer in a narrower type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

E4M3_NAN = 0x7F
MIDDLE = {4: 8, 8: 128}


@dataclass
class Draw:
    """Random numbers of one projection `[rows, columns]`."""

    rows: int
    columns: int
    source: torch.Generator

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.source)

    def scales(self, *shape: int) -> Tensor:
        """Float32 of many magnitudes."""
        return torch.exp2(torch.rand(shape, generator=self.source) * 12 - 14)

    def half_scales(self, *shape: int) -> Tensor:
        return self.scales(*shape).half()

    def powers(self, *shape: int) -> Tensor:
        return self.integers(97, 157, *shape).to(torch.uint8)

    def e4m3(self, *shape: int) -> Tensor:
        """Every E4M3 code but NaN."""
        code = self.integers(0, 254, *shape)
        return (code + (code >= E4M3_NAN)).to(torch.uint8).view(torch.float8_e4m3fn)

    def bytes(self, *shape: int) -> Tensor:
        return self.integers(0, 256, *shape).to(torch.uint8)

    def words(self, *shape: int) -> Tensor:
        return self.integers(-(1 << 31), 1 << 31, *shape).to(torch.int32)


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """How one format lies in a checkpoint: the quantization config, and a projection's tensors."""

    quantization: Mapping[str, Any]
    make: Callable[[Draw], Tensors]
    shared: tuple[str, ...] = ()  # tensors that gate and up have in common
    model: Mapping[str, Any] = field(default_factory=dict)


def compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": []}


def gptq(bits: int, group: int, **keys: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | keys


def floats(bits: int, strategy: str, **keys: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy} | keys


def ints(bits: int, group: int, **keys: Any) -> dict[str, Any]:
    span = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    return {"num_bits": bits, "type": "int"} | span | keys


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def _fp8(
    scale_shape: Callable[[Draw], tuple[int, ...]], name: str = "weight_scale"
) -> Callable[[Draw], Tensors]:
    return lambda d: {"weight": d.e4m3(d.rows, d.columns), name: d.scales(*scale_shape(d))}


def _blocks(d: Draw) -> tuple[int, ...]:
    return d.rows // 128, d.columns // 128


def _four(d: Draw) -> Tensors:
    rows, columns = _blocks(d)
    return {"weight": d.e4m3(d.rows, d.columns), "weight_scale": d.scales(rows, 1, columns, 1)}


def _int8(d: Draw) -> Tensors:
    codes = d.integers(-128, 128, d.rows, d.columns).to(torch.int8)
    return {"weight": codes, "weight_scale": d.scales(d.rows, 1)}


def _int4_bytes(d: Draw) -> Tensors:
    codes = d.integers(-8, 8, d.rows, d.columns).to(torch.int8)
    return {"weight": codes, "weight_scale": d.scales(d.rows, d.columns // 128)}


def _packed(bits: int, group: int, *, zeros: bool = False) -> Callable[[Draw], Tensors]:
    def make(d: Draw) -> Tensors:
        groups = 1 if group < 0 else d.columns // group
        tensors = {
            "weight_packed": d.words(d.rows, d.columns * bits // 32),
            "weight_scale": d.scales(d.rows, groups),
            "weight_shape": torch.tensor([d.rows, d.columns]),
        }
        return tensors | ({"weight_zero_point": d.words(d.rows * bits // 32, groups)} if zeros else {})

    return make


def _nvfp4(d: Draw) -> Tensors:
    return {
        "weight": d.bytes(d.rows, d.columns // 2),
        "weight_scale": d.e4m3(d.rows, d.columns // 16).float().abs().to(torch.float8_e4m3fn),
        "weight_scale_2": d.scales(1).reshape(()),
    }


def _divided(d: Draw) -> Tensors:
    t = _nvfp4(d)
    divisor = t["weight_scale_2"].reciprocal().bfloat16().float()  # as the producer of bfloat16 models has it
    return {
        "weight_packed": t["weight"],
        "weight_scale": t["weight_scale"],
        "weight_global_scale": divisor[None],
    }


def _mxfp4(codes: str, scale: str = "weight_scale") -> Callable[[Draw], Tensors]:
    return lambda d: {codes: d.bytes(d.rows, d.columns // 2), scale: d.powers(d.rows, d.columns // 32)}


def _mxfp8(d: Draw) -> Tensors:
    return {"weight": d.e4m3(d.rows, d.columns), "weight_scale": d.powers(d.rows, d.columns // 32)}


def _mxfp6(d: Draw) -> Tensors:
    return {"weight": d.bytes(d.rows, d.columns * 3 // 4), "weight_scale": d.powers(d.rows, d.columns // 32)}


def _gptq(bits: int, group: int, *, zeros: bool = False, order: bool = False) -> Callable[[Draw], Tensors]:
    def make(d: Draw) -> Tensors:
        groups, each = d.columns // group, 32 // bits
        of = torch.arange(d.columns) // group
        middle = torch.full((groups, d.rows // each), 0x77777777 if bits == 4 else 0x7F7F7F7F)
        return {
            "qweight": d.words(d.columns // each, d.rows),
            "qzeros": d.words(groups, d.rows // each) if zeros else middle.to(torch.int32),
            "scales": d.half_scales(groups, d.rows),
            "g_idx": (of[torch.randperm(d.columns, generator=d.source)] if order else of).to(torch.int32),
        }

    return make


def _awq(d: Draw) -> Tensors:
    return {
        "qweight": d.words(d.columns, d.rows // 8),
        "qzeros": d.words(d.columns // 128, d.rows // 8),
        "scales": d.half_scales(d.columns // 128, d.rows),
    }


def _quark(dtype: str) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return {"quant_method": "quark", "export": {}, "global_quant_config": {"weight": weight}}


NVFP4 = floats(4, "tensor_group", group_size=16)

STORED: dict[str, Stored] = {
    "fp8 per tensor": Stored(
        compressed("float-quantized", floats(8, "tensor")), _fp8(lambda _: (1,)), ("weight_scale",)
    ),
    "fp8 per channel": Stored(
        compressed("float-quantized", floats(8, "channel")), _fp8(lambda d: (d.rows, 1))
    ),
    "fp8 blocks": Stored(
        compressed("float-quantized", floats(8, "block", block_structure=[128, 128])), _fp8(_blocks)
    ),
    "fp8 blocks, weight_scale_inv": Stored(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _fp8(_blocks, "weight_scale_inv"),
    ),
    "fp8 blocks, four dimensions": Stored(modelopt("FP8_PB_WO"), _four),
    "int8 per channel": Stored(compressed("int-quantized", ints(8, -1), TOKEN), _int8),
    "int8 groups of 64, words": Stored(compressed("pack-quantized", ints(8, 64)), _packed(8, 64)),
    "int8 groups of 32 with zero points, words": Stored(
        compressed("pack-quantized", ints(8, 32, symmetric=False)), _packed(8, 32, zeros=True)
    ),
    "int4 groups of 128, words": Stored(compressed("pack-quantized", ints(4, 128)), _packed(4, 128)),
    "int4 per channel, words": Stored(compressed("pack-quantized", ints(4, -1)), _packed(4, -1)),
    "int4 groups of 32 with zero points, words": Stored(
        compressed("pack-quantized", ints(4, 32, symmetric=False)), _packed(4, 32, zeros=True)
    ),
    "int4 groups of 128, bytes": Stored(compressed("int-quantized", ints(4, 128), TOKEN), _int4_bytes),
    "nvfp4, divided": Stored(
        compressed("nvfp4-pack-quantized", NVFP4),
        _divided,
        ("weight_global_scale",),
    ),
    "nvfp4, multiplied": Stored(
        modelopt("W4A16_NVFP4"),
        _nvfp4,
        ("weight_scale_2",),
    ),
    "mxfp4, weight_packed": Stored(
        compressed("mxfp4-pack-quantized", floats(4, "group", group_size=32)), _mxfp4("weight_packed")
    ),
    "mxfp4, weight": Stored(modelopt("mxfp4"), _mxfp4("weight")),
    "mxfp4 under fp8": Stored(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "store_dtype": "mxfp4"},
        _mxfp4("weight", "scale"),
    ),
    "mxfp8": Stored(
        compressed("mxfp8-quantized", floats(8, "group", group_size=32, scale_dtype="torch.uint8")), _mxfp8
    ),
    "mxfp6 e3m2": Stored(_quark("fp6_e3m2"), _mxfp6),
    "mxfp6 e2m3": Stored(_quark("fp6_e2m3"), _mxfp6),
    "gptq groups of 128": Stored(gptq(4, 128), _gptq(4, 128)),
    "gptq groups of 32 with zero points": Stored(gptq(4, 32, sym=False), _gptq(4, 32, zeros=True)),
    "gptq v2 with zero points": Stored(
        gptq(4, 32, sym=False, checkpoint_format="gptq_v2"), _gptq(4, 32, zeros=True)
    ),
    "gptq activation order": Stored(gptq(4, 64, desc_act=True), _gptq(4, 64, order=True), ("g_idx",)),
    "gptq 8 bits": Stored(gptq(8, 64), _gptq(8, 64)),
    "gptq 8 bits with activation order": Stored(
        gptq(8, 64, desc_act=True), _gptq(8, 64, order=True), ("g_idx",)
    ),
    "awq groups of 128": Stored(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, _awq
    ),
}
"""Stored forms by name."""
