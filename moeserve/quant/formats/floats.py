"""Plain floating point: one part, no scale."""

import torch
from torch import Tensor

from moeserve.quant.format import Format, Part, Parts


def _float(name: str, dtype: torch.dtype) -> Format:
    def encode(x: Tensor) -> Parts:
        return (x.to(dtype),)

    def decode(parts: Parts, shape: torch.Size) -> Tensor:
        return parts[0].float()

    return Format(name, dtype.itemsize * 8, (Part("codes", dtype, 1, 1),), encode, decode)


FP32 = _float("fp32", torch.float32)
BF16 = _float("bf16", torch.bfloat16)
FP16 = _float("fp16", torch.float16)

FLOATS = {f.dtype: f for f in (FP32, BF16, FP16)}
"""Plain formats by the torch dtype they store."""
