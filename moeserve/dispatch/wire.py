"""What travels: the bytes of one row (`WireRecord`), and the formats whose rows can travel alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moeserve.dispatch.routing import Routing
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats import WIRES

ROW_WISE = frozenset(WIRES)
"""Formats whose rows can travel alone: what a dispatcher that moves plain bytes takes."""

ALIGN = 16
"""Fields of a record start at multiples of this many bytes, so that each can be viewed in its own dtype."""


@dataclass(frozen=True)
class WireRecord:
    """Byte layout of one row on the wire: the format's parts, then K slots (int32) and K weights (float32).

    Rows of several lanes stand in one `[rows, nbytes]` uint8 tensor, so a phase needs one collective, and any
    row-wise format travels as bytes (gloo refuses fp8 dtypes).
    """

    wire: Format
    hidden: int
    top_k: int

    @cached_property
    def _fields(self) -> tuple[tuple[torch.dtype, int, int], ...]:
        """(dtype, first byte, bytes) of each part, then of slots and weights."""
        sizes = [(part.dtype, part.shape_of((1, self.hidden))[1]) for part in self.wire.parts]
        fields, at = [], 0
        for dtype, count in (*sizes, (torch.int32, self.top_k), (torch.float32, self.top_k)):
            fields.append((dtype, at, dtype.itemsize * count))
            at += _aligned(dtype.itemsize * count)
        return tuple(fields)

    @property
    def nbytes(self) -> int:
        """Bytes of one row, a multiple of `ALIGN`."""
        _, at, width = self._fields[-1]
        return at + _aligned(width)

    def pack(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Quantizes `hidden [T, H]` and lays it out with its slots and weights: `[T, nbytes]` uint8."""
        records = torch.empty((hidden.shape[0], self.nbytes), dtype=torch.uint8, device=hidden.device)
        sources = (*self.wire.quantize(hidden).parts, routing.slots, routing.weights)
        for (_, at, width), source in zip(self._fields, sources, strict=True):
            records[:, at : at + width] = row_bytes(source)
        return records

    def unpack(self, records: Tensor) -> tuple[Packed, Tensor, Tensor]:
        """Views of `records [R, nbytes]`: tokens `[R, H]`, slots `[R, K]` int32, weights `[R, K]` float32."""
        *parts, slots, weights = self._views(records)
        return Packed(self.wire, torch.Size((records.shape[0], self.hidden)), tuple(parts)), slots, weights

    def _views(self, records: Tensor) -> Iterator[Tensor]:
        for dtype, at, width in self._fields:
            yield records[:, at : at + width].view(dtype)


def row_bytes(table: Tensor) -> Tensor:
    """Bytes of `table [R, C]`, of any dtype and strides, as uint8 `[R, nbytes]`; a view where it can be.

    Torch calls a table contiguous whatever the stride of a dimension of one element, and every stride where
    there is no row; but it takes the bytes of a dtype only where the last stride is 1. A lane without rows in
    a top-1 model's step has such a table, so its strides are set here.
    """
    dense = table.contiguous()
    return dense.as_strided(dense.shape, (dense.shape[1], 1)).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
