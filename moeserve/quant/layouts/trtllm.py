"""TensorRT-LLM's weights: gate and up by turns, rows shuffled for an epilogue tile, scales to follow.

The kernels compute the transposed product, so a tile's epilogue writes rows of the weights; `Shuffled` puts
them where its registers are. Epilogue tiles of 128 rows shuffle within 32, tiles of 64 within 16. Block
scales go the way of their rows and are then interleaved 128x4. Each entry of the table is what one matrix of
one kernel goes through, made of those moves:

- `trtllm_rows_128`, `trtllm_rows_64`: the shuffle alone.
- `trtllm_fp4_gate_up`, `trtllm_fp4_down`: NVFP4, MXFP4 and MXFP8.
- `trtllm_fp8_gate_up`, `trtllm_fp8_down`: FP8 blocks, tile 64, no turns, then BlockMajorK; 128x128 scales
  keep their order but for the halves.
- `trtllm_bf16_gate_up`, `trtllm_bf16_down`: BF16, then BlockMajorK.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.quant.format import WHOLE, Format, Part
from moeserve.quant.formats.floats import BF16, FP16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_BLOCK_UE8M0
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.quant.layout import Rearrangement, TensorMove, must_divide
from moeserve.quant.layouts.block_major import BlockMajor
from moeserve.quant.layouts.gate_up import BY_ROWS
from moeserve.quant.layouts.rows import Alternated, Exchanged, Shuffled
from moeserve.quant.layouts.swizzle import ROWS as SCALE_ROWS
from moeserve.quant.layouts.swizzle import Swizzled

TILE_128, TILE_64 = Shuffled(32), Shuffled(16)
TURNS = (Exchanged(), Alternated())
"""The moves that turn gate rows above up rows into u0, g0, u1, g1, ..."""

FOUR_BITS: frozenset[Format] = frozenset({NVFP4, MXFP4, MXFP8})
FP8_BLOCKS: frozenset[Format] = frozenset({FP8_BLOCK, FP8_BLOCK_UE8M0})
PLAIN: frozenset[Format] = frozenset({BF16, FP16})


def _rows(name: str, formats: frozenset[Format], order: Sequence[TensorMove]) -> Rearrangement:
    def moves(part: Part, _: torch.Size) -> Sequence[TensorMove]:
        return () if part.rows == WHOLE else order

    return Rearrangement(name, formats, moves)


def _block_scaled(name: str, order: Sequence[TensorMove]) -> Rearrangement:
    def moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
        if part.rows == WHOLE:
            return ()
        must_divide("rows", shape[-2], SCALE_ROWS)  # padding would stand between rows that were shuffled
        return (*order, Swizzled()) if part.name == "scale" else order

    return Rearrangement(name, FOUR_BITS, moves)


def _blocks(name: str, halves: Sequence[TensorMove]) -> Rearrangement:
    def moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
        if halves:
            must_divide("rows", shape[-2], 2 * part.rows)
        return (*halves, TILE_64, BlockMajor()) if part.name == "codes" else halves

    return Rearrangement(name, FP8_BLOCKS, moves)


ENTRIES = (
    _rows("trtllm_rows_128", BY_ROWS, (TILE_128,)),
    _rows("trtllm_rows_64", BY_ROWS, (TILE_64,)),
    _block_scaled("trtllm_fp4_gate_up", (*TURNS, TILE_128)),
    _block_scaled("trtllm_fp4_down", (TILE_128,)),
    _blocks("trtllm_fp8_gate_up", (Exchanged(),)),
    _blocks("trtllm_fp8_down", ()),
    _rows("trtllm_bf16_gate_up", PLAIN, (*TURNS, TILE_128, BlockMajor())),
    _rows("trtllm_bf16_down", PLAIN, (TILE_128, BlockMajor())),
)
