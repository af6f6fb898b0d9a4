"""AWQ's tensors (version gemm): codes and zero points in int32 words along N, eight columns interleaved.

`qweight [K, ceil(N / 8)]`, `qzeros [G, ceil(N / 8)]`, `scales [G, N]`. Nibble i of a word holds column
`ORDER[i]` of its eight. Zero points are stored as they are, scales stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles
from moeserve.quant.format import Part
from moeserve.quant.formats.int4 import INT4_ASYMMETRIC
from moeserve.quant.layout import Rearrangement, TensorMove
from moeserve.quant.layouts.pieces import pieces
from moeserve.quant.layouts.words import (
    ColumnsInOrder,
    Nibbles,
    Spare,
    Turned,
    Words,
    read_as,
    zero_points_within,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
EIGHT, INTERLEAVED = Spare(8), ColumnsInOrder(ORDER)
NAMES = {"codes": "qweight", "scale": "scales", "zero": "qzeros"}


@dataclass(frozen=True)
class AcrossRows:
    """4-bit codes `[..., N, ceil(K / 2)]` of K = `columns` as words across rows: int32 `[..., K, N / 8]`."""

    columns: int

    def forward(self, stored: Tensor) -> Tensor:
        """The words; N is padded to a multiple of 8."""
        *lead, n, _ = stored.shape
        words = torch.empty((*lead, self.columns, -(-n // 8)), dtype=torch.int32, device=stored.device)
        for matrix, rows in pieces(stored, 8):
            across = EIGHT.forward(unpack_nibbles(stored[matrix][rows], self.columns).mT)
            own = Words().forward(pack_nibbles(INTERLEAVED.forward(across)))
            words[matrix][:, _eighths(rows)] = own
        return words

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The codes along K again, two a byte: `[..., N, ceil(K / 2)]`."""
        found = torch.empty(like.shape, dtype=like.dtype, device=moved.device)
        for matrix, rows in pieces(found, 8):
            bytes_ = read_as(torch.uint8, moved[matrix][:, _eighths(rows)])
            across = unpack_nibbles(bytes_, 2 * bytes_.shape[-1])
            along = INTERLEAVED.back(across, across)[:, : rows.stop - rows.start].mT
            found[matrix][rows] = pack_nibbles(along)
        return found


def _eighths(rows: slice) -> slice:
    return slice(rows.start // 8, -(-rows.stop // 8))


def _moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
    moves: dict[str, Sequence[TensorMove]] = {
        "codes": (AcrossRows(shape[-1]),),
        "scale": (Turned(),),
        "zero": (Turned(), EIGHT, INTERLEAVED, Nibbles(), Words()),
    }
    return moves[part.name]


AWQ = Rearrangement(
    "awq",
    frozenset(INT4_ASYMMETRIC.values()),
    _moves,
    NAMES,
    check=partial(zero_points_within, "awq", 0),
)
