"""Panels: codes of 64 rows by 128 bytes of K, each panel in one piece, for our CUDA C++ kernels.

A box of rows as a checkpoint has them touches as many pages of memory as it has rows, and reading weights is
most of what a step of few rows does: from panels an H200 reads them 4 % faster.

`panels` takes a matrix as one side, `panels_gate_up` its upper and its lower half as two: `[N, K]` becomes
`[sides, n / 64, K / w, 64, w]`, where n is N / sides and w elements are 128 bytes. Both are rounded up, with
zeros past them. One-byte codes are stored as uint8; scales stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.quant.format import Part
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK
from moeserve.quant.layout import Moves, Rearrangement, TensorMove, must_divide

ROWS, BYTES = 64, 128
"""Rows of a panel, bytes of each."""


@dataclass(frozen=True)
class Panels:
    """Codes `[..., sides n, k]` as `[..., sides, n / 64, k / w, 64, w]`, with zeros past the edges."""

    sides: int = 1

    def forward(self, stored: Tensor) -> Tensor:
        """The panels, contiguous. ValueError: the rows do not divide by the sides."""
        must_divide("rows", stored.shape[-2], self.sides)
        plain = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        *lead, rows, k = plain.shape
        own, width = rows // self.sides, BYTES // plain.dtype.itemsize
        down, across = -(-own // ROWS), -(-k // width)
        whole = plain.reshape(*lead, self.sides, own, k)
        if (own, k) != (down * ROWS, across * width):
            padded = plain.new_zeros(*lead, self.sides, down * ROWS, across * width)
            padded[..., :own, :k] = whole
            whole = padded
        split = whole.view(*lead, self.sides, down, ROWS, across, width)
        return split.transpose(-3, -2).contiguous()

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The rows of all sides, without the zeros."""
        *lead, sides, down, across, rows, width = moved.shape
        own, k = like.shape[-2] // self.sides, like.shape[-1]
        whole = moved.transpose(-3, -2).reshape(*lead, sides, down * rows, across * width)
        return whole[..., :own, :k].reshape(like.shape).contiguous().view(like.dtype)


def _moves(sides: int) -> Moves:
    def moves(part: Part, _: torch.Size) -> Sequence[TensorMove]:
        return (Panels(sides),) if part.name == "codes" else ()

    return moves


FORMATS = frozenset({BF16, FP8_BLOCK})

PANELS = Rearrangement("panels", FORMATS, _moves(1))
PANELS_GATE_UP = Rearrangement("panels_gate_up", FORMATS, _moves(2))
