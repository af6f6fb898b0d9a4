"""Activation order, whatever the integers: the part `order` holds each column's group, the files' `g_idx`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.quant.format import WHOLE, Part, Parts

ORDER = Part("order", torch.int32, WHOLE, 1)


def with_order(encode: Callable[[Tensor], Parts], group: int, x: Tensor) -> Parts:
    """The parts of `x` by `encode`, and an order in which groups are runs of `group` columns."""
    order = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) // group
    return (*encode(x), order.expand(*x.shape[:-2], 1, -1).contiguous())


def each_column(scales: Parts, order: Tensor, shape: torch.Size) -> list[Tensor]:
    """Scales and zero points `[..., N, G]` as float32 `[..., N, K]`, by the group of each column."""
    columns = order.long().expand(shape)
    return [part.float().gather(-1, columns) for part in scales]
