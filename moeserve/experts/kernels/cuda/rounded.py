"""Rows rounded to E4M3 with a scale for every 128, and read as bf16: `round.cu` launched."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Function, Program
from moeserve.experts.kernels.cuda.steps import defined, source

ROUND = Arguments(
    "RoundArguments",
    x="const u16*",  # [R, width] bf16
    codes="void*",  # [R, width] E4M3, or bf16 of the same values
    scale="float*",  # [groups, blocks, most rows of a group]
    tiles="const int*",  # as `rows.cu` lists them
    width="int",
    blocks="int",  # of 128 columns
)

WIDEN = Arguments(
    "WidenArguments",
    codes="const u8*",  # [rows, width] E4M3
    scale="const float*",  # of row r and block k of 128 columns at r * row_step + k * block_step
    x="u16*",  # [rows, width] bf16
    rows="int",
    width="int",
    row_step="int",
    block_step="int",
)

SOURCES = (ROUND, WIDEN, "round.cu")

THREADS = 256
ROWS = THREADS // 32
"""Rows that a block takes at once."""

MOST_ROWS = 256
"""Of a group, where the scales are for rows in a list's order and nothing else is said."""


def widen(codes: Tensor, scale: Tensor) -> Tensor:
    """E4M3 `codes [R, K]` times `scale [R, K / 128]` of any strides, in bf16 `[R, K]`; K a multiple of 8."""
    rows, width = codes.shape
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    row_step, block_step = scale.stride()
    given: dict[str, Argument] = {
        "codes": codes,
        "scale": scale,
        "x": out,
        "rows": rows,
        "width": width,
        "row_step": row_step,
        "block_step": block_step,
    }
    function("widen", WIDEN).launch(-(-rows // ROWS), THREADS, given)
    return out


@cache
def function(name: str, arguments: Arguments, most: int = MOST_ROWS, *, wide: bool = False) -> Function:
    """A kernel of `round.cu`, with groups of at most `most` rows; `wide`: codes are written as bf16."""
    program = Program(source(*SOURCES), defined({"MOST": most, "WIDE": wide}))
    return program.function(name, arguments)
