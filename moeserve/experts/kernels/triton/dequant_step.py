# mypy: disable-error-code="import-not-found"
"""One step of the portable kernel on the host: rows rounded, two GEMMs, the activation between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from moeserve.experts.batch import ExpertBatch, ExpertShape
from moeserve.experts.kernels.triton import dequant_gemm, rounding, rows
from moeserve.experts.kernels.triton.stored import SUMMED, Rounding, Stored
from moeserve.experts.kernels.triton.work import most_groups, parameters, work_list
from moeserve.quant.layouts.word_codes import WORDS

FINE = {torch.float32: "f32", torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}
"""How fine scales are decoded, by what they are stored as."""


@dataclass(frozen=True)
class Cut:
    """Tile sizes of the GEMM: `rows` of a slot, `outputs` of its weights, `depth` of K at a time."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


CUTS = (Cut(16, 64, 128, 4, 3), Cut(64, 128, 64, 8, 3), Cut(128, 128, 64, 8, 2))
"""By the rows a slot has, few to many; powers of two that divide 128, all of them within 99 KiB."""

WORD_CUTS = (Cut(16, 128, 256, 4, 3), Cut(64, 128, 128, 4, 3), Cut(128, 256, 64, 8, 3))
"""The same, within 160 KiB, for weights in words whose sums are scaled at their end alone."""


def cut_for(rows_per_slot: float, *, words: bool = False) -> Cut:
    """The cut for steps of at most `rows_per_slot` rows a slot on average."""
    cuts = WORD_CUTS if words else CUTS
    return next((cut for cut in cuts if rows_per_slot <= 1.5 * cut.rows), cuts[-1])


@dataclass(frozen=True)
class DequantRows:
    """Activations `values [R, K]`, and float32 scales of every `span` columns (0: all of them, -1: none)."""

    values: Tensor
    scale: Tensor | None = None
    span: int = -1


@dataclass(frozen=True)
class Side:
    """One side's tensors by name, `[e, ...]` each: parts as they are stored, or what `words.of_packed` makes.

    With activation order, `columns [e, K]` int32 says where in a row each column of the sorted weights was.
    """

    stored: Stored
    parts: Mapping[str, Tensor]
    words: bool
    bias: Tensor | None

    def part(self, name: str | None) -> Tensor:
        """A tensor, 8-bit floats as bytes; of one that is not there, codes, which nothing reads."""
        tensor = self.parts["codes" if name is None else name]
        return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _outer(stored: Stored, *, words: bool) -> str:
    """What a scale of the whole sum is of."""
    if words:
        return "row"
    return "none" if stored.outer is None else "row" if stored.outer.rows == 1 else "matrix"


@dataclass(frozen=True)
class DequantStep:
    """A batch cut into groups of at most `cut.rows` rows of one slot; nothing is read on the host."""

    batch: ExpertBatch
    capacity: int  # rows of the batch, PADDED ones flat
    cut: Cut

    @property
    def limit(self) -> int:
        """Most groups there can be."""
        return most_groups(self.batch.slots, self.capacity, self.cut.rows)

    @cached_property
    def tiles(self) -> Tensor:
        """The work list, `[4 + 4 limit]` int32."""
        return work_list(self.batch, self.limit, self.cut.rows)

    def round(self, x: Tensor, how: Rounding, given: Tensor | None, dtype: torch.dtype) -> DequantRows:
        """Rows of `x [R, K]` (any float) rounded, as `dtype`; `given [e]`: the scales of a static format."""
        width = x.shape[1]
        values = torch.empty((self.capacity, width), dtype=dtype, device=x.device)
        columns = triton.cdiv(width, how.x_span) if how.x_span > 0 else 1
        scale = torch.empty((self.capacity, columns), dtype=torch.float32, device=x.device)
        constant = scale if given is None else given
        block = min(1024, max(128, triton.next_power_of_2(width)))
        if how.span:
            rounding.round_blocks[(self.limit, self.cut.rows, triton.cdiv(width, block))](
                x, values, scale, constant, self.tiles, width, how.element, how.rule, how.span, block
            )
        else:
            rounding.round_tokens[(self.limit, self.cut.rows)](
                x, values, scale, constant, self.tiles, width, how.element, how.rule, block
            )
        return DequantRows(values, scale, how.x_span)

    def _in_order(self, x: Tensor, columns: Tensor) -> Tensor:
        """Rows of `x [R, K]`, their columns as the weights of their slots have them."""
        out = torch.empty_like(x)
        rounding.gather_columns[(self.limit, self.cut.rows, triton.cdiv(x.shape[1], 1024))](
            x, out, columns, self.tiles, x.shape[1], 1024
        )
        return out

    def activate(self, between: Tensor, shape: ExpertShape, dtype: torch.dtype) -> Tensor:
        """The activation of `between [R, 2I]`: `[R, I]` of `dtype`."""
        activation, inner = shape.activation, shape.inner
        out = torch.empty((self.capacity, inner), dtype=dtype, device=between.device)
        rows.activate[(self.limit, triton.cdiv(inner, 128))](
            between,
            out,
            between,
            self.tiles,
            inner,
            0,
            *parameters(activation),
            BM=self.cut.rows,
            ACT=activation.name,
            GATED=activation.gated,
            FP8=False,
            LIMITED=activation.limit is not None,
            BOUNDED=activation.linear_beta is not None,
            num_warps=8 if self.cut.rows >= 64 else 4,
        )
        return out

    def gemm(self, x: DequantRows, side: Side, n: int, dtype: torch.dtype) -> Tensor:
        """`[R, n]`: each row times the weights of its slot, plus the bias; other rows are not written."""
        cut, stored, words = self.cut, side.stored, side.words
        out = torch.empty((self.capacity, n), dtype=dtype, device=x.values.device)
        fp8_products = x.values.dtype == torch.float8_e4m3fn
        depth = min(cut.depth, x.span if x.span > 0 else cut.depth, SUMMED if stored.blocks else cut.depth)
        fine = side.part(stored.fine.name if stored.fine else None)
        zero = side.part("zero" if stored.zero else None)
        outer = "outer" if words else stored.outer.name if stored.outer else None
        groups = (fine if stored.fine else zero).shape
        values = self._in_order(x.values, side.parts["columns"]) if stored.ordered else x.values
        dequant_gemm.grouped_gemm[(self.limit, triton.cdiv(n, cut.outputs))](
            values,
            out if x.scale is None else x.scale,
            side.parts["codes"] if fp8_products else side.part("codes"),
            fine,
            zero,
            side.part(outer),
            out if side.bias is None else side.bias,
            out,
            self.tiles,
            n,
            x.values.shape[1],
            side.parts["codes"].shape[-1],
            groups[1] if words and not stored.blocks else groups[2],
            ELEMENT=WORDS[stored.element] if words else stored.element,
            WORDS=words,
            FINE=FINE[stored.fine.dtype] if stored.fine else "none",
            ROWS=stored.fine.rows if stored.fine else 1,
            SPAN=stored.span,
            SUMS=stored.blocks if words else stored.fine is not None and stored.span % depth == 0,
            ZERO=stored.zero is not None,
            OUTER=_outer(stored, words=words),
            X_SPAN=x.span,
            HAS_BIAS=side.bias is not None,
            BM=cut.rows,
            BN=cut.outputs,
            BK=depth,
            STAGES=cut.stages,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        return out
