"""Operands with a layout, and what a ragged batch is described by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class FloatType:
    bitwidth_exponent: int
    bitwidth_mantissa: int
    is_signed: bool


FP4 = FloatType(bitwidth_exponent=2, bitwidth_mantissa=1, is_signed=True)


@dataclass
class Storage:
    data: torch.Tensor
    layout: Any = None


@dataclass
class Tensor:
    storage: Storage
    dtype: Any = None
    shape: list[int] | None = None
    shape_max: list[int] | None = None


@dataclass
class RaggedTensorMetadata:
    slice_sizes: torch.Tensor
    slice_offs: torch.Tensor


def make_ragged_tensor_metadata(slice_sizes: torch.Tensor, n_total_rows: int) -> RaggedTensorMetadata:
    assert slice_sizes.dtype == torch.int32 and int(slice_sizes.sum()) <= n_total_rows
    ends = slice_sizes.cumsum(0).int()
    return RaggedTensorMetadata(slice_sizes, torch.cat((torch.zeros(1, dtype=torch.int32), ends)))
