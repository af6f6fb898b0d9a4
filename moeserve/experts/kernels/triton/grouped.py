# mypy: disable-error-code="import-not-found"
"""One step of a Hopper kernel on the host: the work list, the GEMMs, and what stands between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeserve.device.residency import resident_blocks
from moeserve.experts.batch import ExpertBatch, ExpertShape
from moeserve.experts.kernels.tiles import Tile
from moeserve.experts.kernels.triton import hopper_gemm, rows
from moeserve.experts.kernels.triton.work import most_groups, parameters, work_list

ROWS_OF_A_BLOCK = 64
GROUP = 128

KINDS = {"bf16": 0, "fp8": 1, "fp4": 2}


@dataclass(frozen=True)
class GroupedWeights:
    """One side's weights as the GEMM reads them; `n` output rows a slot."""

    kind: str
    codes: Tensor
    scale: Tensor | None  # fp8: [e, N / 128, K / 128]; fp4: one float32 a row [e, N]
    scale_words: Tensor | None  # fp4: the scales of its groups
    bias: Tensor | None
    n: int


@dataclass(frozen=True)
class GroupedRows:
    """Activations `values [R, K]`: bf16, or E4M3 codes with `scale [K / 128, stride]` float32."""

    values: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class GroupedStep:
    """A batch cut into groups of at most `tile.rows` rows of one slot; nothing is read on the host."""

    batch: ExpertBatch
    capacity: int  # rows of the batch, PADDED ones flat
    tile: Tile

    @property
    def limit(self) -> int:
        """Most groups there can be."""
        return most_groups(self.batch.slots, self.capacity, self.tile.rows)

    @cached_property
    def tiles(self) -> Tensor:
        """The work list, `[4 + 4 limit]` int32."""
        return work_list(self.batch, self.limit, self.tile.rows)

    def gemm(self, x: GroupedRows, weights: GroupedWeights, out_dtype: torch.dtype) -> Tensor:
        """`[R, n]`: each row times the weights of its slot, plus the bias; other rows are not written."""
        tile, kind = self.tile, weights.kind
        out = torch.empty((self.capacity, weights.n), dtype=out_dtype, device=x.values.device)
        blocks = triton.cdiv(weights.n, ROWS_OF_A_BLOCK)
        n_tiles = triton.cdiv(blocks, tile.consumers * tile.blocks)
        scale = out if weights.scale is None else weights.scale
        # no program waits for another: more than run at once would be right too, but take a second round
        programs = resident_blocks(out.device) * tile.programs
        hopper_gemm.grouped_gemm[(min(programs, self.limit * n_tiles),)](
            *_descriptors(x, weights, tile),
            out if x.scale is None else x.scale,
            scale,
            out if weights.bias is None else weights.bias,
            out,
            self.tiles,
            weights.n,
            n_tiles,
            triton.cdiv(x.values.shape[1], tile.depth),
            blocks if kind == "fp4" else weights.n,
            0 if x.scale is None else x.scale.shape[1],
            *(scale.shape[1:] if kind == "fp8" else (1, weights.codes.shape[2])),
            KIND=KINDS[kind],
            BM=tile.rows,
            BK=tile.depth,
            STAGES=tile.stages,
            NC=tile.consumers,
            RB=tile.blocks,
            HAS_BIAS=weights.bias is not None,
            REGISTERS=tile.registers,
            num_warps=4,
            maxnreg=_launch_registers(tile),
        )
        return out

    def activate(self, between: Tensor, shape: ExpertShape, *, fp8: bool) -> GroupedRows:
        """The activation of `between [R, 2I]`: bf16 `[R, I]`, or E4M3 with scales."""
        activation, inner = shape.activation, shape.inner
        rounded = self._rounded(inner, between.device, fp8=fp8)
        scale = rounded.scale if rounded.scale is not None else between
        rows.activate[(self.limit, triton.cdiv(inner, GROUP))](
            between,
            rounded.values,
            scale,
            self.tiles,
            inner,
            scale.shape[1],
            *parameters(activation),
            BM=self.tile.rows,
            ACT=activation.name,
            GATED=activation.gated,
            FP8=fp8,
            LIMITED=activation.limit is not None,
            BOUNDED=activation.linear_beta is not None,
            num_warps=8 if self.tile.rows >= 64 else 4,
        )
        return rounded

    def round(self, x: Tensor) -> GroupedRows:
        """Rows of `x [R, K]` in E4M3 with a scale for every 128."""
        width = x.shape[1]
        rounded = self._rounded(width, x.device, fp8=True)
        assert rounded.scale is not None
        rows.round_rows[(self.limit, triton.cdiv(width, GROUP))](
            x, rounded.values, rounded.scale, self.tiles, width, rounded.scale.shape[1], BM=self.tile.rows
        )
        return rounded

    def _rounded(self, width: int, device: torch.device, *, fp8: bool) -> GroupedRows:
        values = torch.empty(
            (self.capacity, width), dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=device
        )
        return GroupedRows(values, scale_storage(width, self.capacity, device) if fp8 else None)


def scale_storage(width: int, capacity: int, device: torch.device) -> Tensor:
    """`[width / 128, stride]` float32, uninitialised; a tile may read past the last row, so there is room."""
    stride = -(-capacity // 16) * 16 + 256
    return torch.empty((triton.cdiv(width, GROUP), stride), dtype=torch.float32, device=device)


def _launch_registers(tile: Tile) -> int:
    """Registers a thread starts with, so that all warp groups, the copying one included, fit side by side."""
    threads = (tile.consumers + 1) * 128 * tile.programs
    return min(65536 // threads // 8 * 8, 168)


def _descriptors(x: GroupedRows, weights: GroupedWeights, tile: Tile) -> tuple[Any, Any, Any]:
    """Tensor maps of rows, weights and, for codes, of their scales."""
    wide = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=x.values.dtype.itemsize * 8)
    if weights.scale_words is not None:
        words = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32)
        return (
            TensorDescriptor.from_tensor(x.values, [tile.rows, 64], wide),
            TensorDescriptor.from_tensor(weights.codes.view(-1, 32), [64, 32], words),
            TensorDescriptor.from_tensor(weights.scale_words.view(-1, 32), [8, 32], words),
        )
    flat = weights.codes.view(-1, weights.codes.shape[-1])
    return (
        TensorDescriptor.from_tensor(x.values, [tile.rows, tile.depth], wide),
        TensorDescriptor.from_tensor(flat, [ROWS_OF_A_BLOCK, tile.depth], wide),
        x.values,
    )
