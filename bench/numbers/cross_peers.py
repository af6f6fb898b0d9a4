"""`PEERS`: decoders that others wrote, by package, for `cross_checks`.

Each takes the tensors of a stored projection and gives its matrix `[N, K]`. Packages are imported where they
are used: no environment holds them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.numbers.cross_stored import STORED
from bench.numbers.formulas import E2M1, low_first, spread

Tensors = Mapping[str, Tensor]
Decode = Callable[[Tensors], Tensor]


@dataclass(frozen=True)
class Peer:
    """Another's decoder of one stored form.

    `reordered` computes the matrix as the peer does where that rounds otherwise; `why` says how. The peer's
    values must then equal it bit for bit, and moeserve's be within `rounding`, relative.
    """

    stored: str
    package: str  # as it is installed
    module: str  # what is imported
    decode: Decode
    why: str = ""
    reordered: Decode | None = None
    rounding: float = 0.0


def compressed_tensors(stored: str) -> Decode:
    """The decompressor of the group's format, in float32."""

    def decode(t: Tensors) -> Tensor:
        base = importlib.import_module("compressed_tensors.compressors.base")
        schemes = importlib.import_module("compressed_tensors.quantization")
        config = dict(STORED[stored].quantization)
        scheme = schemes.QuantizationScheme(**config["config_groups"]["group_0"])
        compressor = base.BaseCompressor.get_value_from_registry(config["format"])
        weight: Tensor = compressor.decompress(dict(t), scheme)["weight"]
        return weight

    return decode


def _qtensor(
    module: str, name: str, codes: str, rows: int = 1
) -> Callable[[Tensors, dict[str, Any]], Tensor]:
    def decode(t: Tensors, keys: dict[str, Any]) -> Tensor:
        kind = getattr(importlib.import_module(f"modelopt.torch.quantization.qtensor.{module}"), name)
        shape = torch.Size((t[codes].shape[0], t[codes].shape[1] * rows))
        values: Tensor = kind(shape, torch.float32, t[codes]).dequantize(dtype=torch.float32, **keys)
        return values

    return decode


def modelopt_fp8(t: Tensors) -> Tensor:
    scale, blocks = t["weight_scale"], {-1: 128, -2: 128} if t["weight_scale"].dim() == 4 else None
    keys = {"scale": scale[:, 0, :, 0] if blocks else scale, "block_sizes": blocks}
    return _qtensor("fp8_tensor", "FP8QTensor", "weight")(t, keys)


def modelopt_nvfp4(t: Tensors) -> Tensor:
    keys = {"scale": t["weight_scale"], "double_scale": t["weight_scale_2"], "block_sizes": {-1: 16}}
    return _qtensor("nvfp4_tensor", "NVFP4QTensor", "weight", 2)(t, keys)


def modelopt_mxfp4(t: Tensors) -> Tensor:
    keys = {"scale": t["weight_scale"], "block_sizes": {-1: 32}}
    return _qtensor("mxfp4_tensor", "MXFP4QTensor", "weight", 2)(t, keys)


def modelopt_mxfp8(t: Tensors) -> Tensor:
    return _qtensor("mxfp8_tensor", "MXFP8QTensor", "weight")(t, {"scale": t["weight_scale"]})


def transformers_fp8(codes: str, scale: str) -> Decode:
    def decode(t: Tensors) -> Tensor:
        module = importlib.import_module("transformers.integrations.finegrained_fp8")
        weight = t[codes].view(torch.int8) if t[codes].dtype == torch.uint8 else t[codes]
        values: Tensor = module.Fp8Dequantize(None)._dequantize_one(weight, t[scale], torch.float32)
        return values

    return decode


def transformers_mxfp4(t: Tensors) -> Tensor:
    module = importlib.import_module("transformers.integrations.mxfp4")
    blocks = t["weight"].unflatten(-1, (-1, 16))[None]
    values: Tensor = module.convert_moe_packed_tensors(blocks, t["weight_scale"][None], dtype=torch.float32)
    return values[0].mT


def gptqmodel(stored: str) -> Decode:
    """The dense weight of GPTQModel's torch layer."""

    def decode(t: Tensors) -> Tensor:
        config = STORED[stored].quantization
        torch_layer = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
        model = importlib.import_module("gptqmodel.utils.model")
        columns, rows = t["g_idx"].numel(), t["qweight"].shape[1]
        layer = torch_layer.TorchLinear(
            bits=config["bits"],
            group_size=config["group_size"],
            sym=config["sym"],
            desc_act=config["desc_act"],
            in_features=columns,
            out_features=rows,
            bias=False,
            register_buffers=True,
        )
        for name, tensor in t.items():
            setattr(layer, name, tensor.float() if name == "scales" else tensor.clone())
        if config.get("checkpoint_format") != "gptq_v2":
            model.convert_gptq_v1_to_v2_format_module(layer, config["bits"], torch.int32)
        layer.post_init()
        values: Tensor = layer.dequantize_weight()
        return values.mT

    return decode


def gptqmodel_awq(t: Tensors) -> Tensor:
    module = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
    values: Tensor = module.dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), 4, 128)
    return values.mT


def torchao_mx(element: str) -> Decode:
    def decode(t: Tensors) -> Tensor:
        module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        kinds = {"fp4": torch.float4_e2m1fn_x2, "fp8": torch.float8_e4m3fn}
        scales = t["weight_scale"].view(torch.float8_e8m0fnu)
        values: Tensor = module.to_dtype(t["weight"], scales, kinds[element], 32, torch.float32)
        return values

    return decode


def _e2m1(t: Tensors) -> Tensor:
    return E2M1[low_first(t["weight_packed" if "weight_packed" in t else "weight"], 4).long()]


def _scales_first(t: Tensors) -> Tensor:
    codes = _e2m1(t)
    return codes * spread(t["weight_scale"].float() * t["weight_scale_2"], codes)


def _divided_first(t: Tensors) -> Tensor:
    codes = _e2m1(t)
    return (codes * spread(t["weight_scale"].float() / t["weight_global_scale"], codes)).bfloat16().float()


def _carried(t: Tensors) -> Tensor:
    """GPTQ v1 with one added to a whole word of zero points: a stored 15 carries into the next."""
    words = t["qzeros"].long() + 0x11111111
    zero = torch.stack([words >> (4 * place) & 15 for place in range(8)], dim=-1).flatten(-2).mT
    groups, codes = t["g_idx"].long(), low_first(t["qweight"].mT.contiguous(), 4)
    return (codes - zero[:, groups]).float() * t["scales"].float().mT[:, groups]


CT, MODELOPT, TRANSFORMERS = "compressed-tensors", "nvidia-modelopt", "transformers"
GPTQMODEL, TORCHAO = "gptqmodel", "torchao"

OF_COMPRESSED_TENSORS = (
    "fp8 per tensor",
    "fp8 per channel",
    "fp8 blocks",
    "int8 per channel",
    "int8 groups of 64, words",
    "int8 groups of 32 with zero points, words",
    "int4 groups of 128, words",
    "int4 per channel, words",
    "int4 groups of 32 with zero points, words",
    "int4 groups of 128, bytes",
    "mxfp8",
)
OF_GPTQMODEL = (
    "gptq groups of 128",
    "gptq v2 with zero points",
    "gptq activation order",
    "gptq 8 bits",
    "gptq 8 bits with activation order",
)


def _ours(stored: str, package: str, decode: Decode) -> Peer:
    return Peer(stored, package, package.removeprefix("nvidia-").replace("-", "_"), decode)


PEERS: tuple[Peer, ...] = (
    *(_ours(stored, CT, compressed_tensors(stored)) for stored in OF_COMPRESSED_TENSORS),
    _ours("mxfp4, weight_packed", CT, compressed_tensors("mxfp4, weight_packed")),
    Peer(
        "nvfp4, divided",
        CT,
        "compressed_tensors",
        compressed_tensors("nvfp4, divided"),
        "divides the block scale before it multiplies the code, and answers in bfloat16",
        _divided_first,
        2.0**-8,
    ),
    _ours("fp8 per tensor", MODELOPT, modelopt_fp8),
    _ours("fp8 blocks, four dimensions", MODELOPT, modelopt_fp8),
    _ours("mxfp4, weight", MODELOPT, modelopt_mxfp4),
    _ours("mxfp8", MODELOPT, modelopt_mxfp8),
    Peer(
        "nvfp4, multiplied",
        MODELOPT,
        "modelopt",
        modelopt_nvfp4,
        "multiplies the two scales before the code",
        _scales_first,
        2.0**-22,
    ),
    _ours("fp8 blocks, weight_scale_inv", TRANSFORMERS, transformers_fp8("weight", "weight_scale_inv")),
    _ours("mxfp4 under fp8", TRANSFORMERS, transformers_fp8("weight", "scale")),
    _ours("mxfp4, weight", TRANSFORMERS, transformers_mxfp4),
    _ours("mxfp8", TRANSFORMERS, transformers_fp8("weight", "weight_scale")),
    *(_ours(stored, GPTQMODEL, gptqmodel(stored)) for stored in OF_GPTQMODEL),
    Peer(
        "gptq groups of 32 with zero points",
        GPTQMODEL,
        "gptqmodel",
        gptqmodel("gptq groups of 32 with zero points"),
        "adds one to whole words of zero points, so that a stored 15 is 0 and carries; here it is 16",
        _carried,
        float("inf"),
    ),
    _ours("awq groups of 128", GPTQMODEL, gptqmodel_awq),
    _ours("mxfp4, weight", TORCHAO, torchao_mx("fp4")),
    _ours("mxfp8", TORCHAO, torchao_mx("fp8")),
)
"""Every decoder to compare with."""
