"""Rows rounded to E4M3 with a scale for every 128, and read as bf16: `round.cu` launched."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moeserve.device.nvrtc import Argument, Function, Program
from moeserve.experts.kernels.cuda.steps import defined, source

SOURCES = ("round.cu",)

THREADS = 256
ROWS = THREADS // 32
"""Rows that a block takes at once."""

MOST_ROWS = 256
"""Of a group, where the scales are for rows in a list's order and nothing else is said."""


def widen(codes: Tensor, scale: Tensor) -> Tensor:
    """E4M3 `codes [R, K]` times `scale [R, K / 128]` of any strides, in bf16 `[R, K]`; K a multiple of 8."""
    rows, width = codes.shape
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    given: list[Argument] = [codes, scale, out, rows, width, *scale.stride()]
    function("widen").launch(-(-rows // ROWS), THREADS, given)
    return out


@cache
def function(name: str, most: int = MOST_ROWS, *, wide: bool = False) -> Function:
    """A kernel of `round.cu`, with groups of at most `most` rows; `wide`: codes are bf16."""
    return Program(source(*SOURCES), defined({"MOST": most, "WIDE": wide})).function(name)
