"""Marlin's tiles of 4- and 8-bit integers, with their scales and zero points.

Codes, seen as `[K, N]`, stand in tiles of 16 x 16, four tiles (64 columns) together: 1024 codes in the order
in which the 32 lanes of a warp hold the fragments of four `m16n8k16` products, eight codes of a lane and a
tile at a time. Codes of one word are interleaved (0, 2, 4, 6, 1, 3, 5, 7; of 8 bits 0, 2, 1, 3), so that
pairs are two bytes apart where masks find them. The words are `[K / 16, N b / 2]`.

Scales `[G, N]` are permuted within 64 columns, or within 32 where one group spans K; zero points within 64
and then as codes. K must be a multiple of 16, N of 64. Scales stay float32; a kernel narrows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles
from moeserve.quant.format import WHOLE, Part
from moeserve.quant.layout import Rearrangement, TensorMove, must_divide
from moeserve.quant.layouts.integers import IN_RUNS
from moeserve.quant.layouts.pieces import pieces
from moeserve.quant.layouts.words import (
    Biased,
    ColumnsInOrder,
    Nibbles,
    Turned,
    Words,
    read_as,
    zero_points_within,
)

TILE, COLUMNS = 16, 64
INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
GROUP_ORDER = tuple(i + 8 * j for i in range(8) for j in range(8))
CHANNEL_ORDER = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))


@cache
def tile_order(bits: int) -> Tensor:
    """Which of four tiles' codes, each 16 x 16 row by row, stands at each place: int64 `[1024]`."""
    lane, tile, half, pair, odd = torch.meshgrid(*(torch.arange(n) for n in (32, 4, 2, 2, 2)), indexing="ij")
    row, column = 2 * (lane % 4) + 8 * pair + odd, lane // 4 + 8 * half
    order = (256 * tile + TILE * row + column).flatten()
    interleaved = INTERLEAVED[bits]
    return order.view(-1, len(interleaved))[:, list(interleaved)].flatten()


@dataclass(frozen=True)
class Tiled:
    """Codes `[..., N, *]` along K = `columns` as words of tiles, int32 `[..., K / 16, N bits / 2]`."""

    bits: int
    columns: int

    def forward(self, stored: Tensor) -> Tensor:
        """The words. ValueError: K is no multiple of 16, or N of 64."""
        *lead, n, _ = stored.shape
        must_divide("columns", self.columns, TILE)
        must_divide("rows", n, COLUMNS)
        shape = (*lead, self.columns // TILE, n * self.bits // 2)
        words = torch.empty(shape, dtype=torch.int32, device=stored.device)
        order = tile_order(self.bits).to(stored.device)
        for matrix, rows in pieces(stored, COLUMNS):
            own = stored[matrix][rows]
            each = unpack_nibbles(own, self.columns) if self.bits == 4 else own
            tiles = each.mT.reshape(self.columns // TILE, TILE, each.shape[0] // TILE, TILE).transpose(1, 2)
            fours = _fours(tiles)[..., order].flatten(1)
            packed = pack_nibbles(fours) if self.bits == 4 else fours
            words[matrix][:, self._words(rows)] = Words().forward(packed)
        return words

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The codes along K again, in the shape and dtype of `like`."""
        found = torch.empty(like.shape, dtype=like.dtype, device=moved.device)
        order = tile_order(self.bits).argsort().to(moved.device)
        for matrix, rows in pieces(found, COLUMNS):
            bytes_ = read_as(torch.uint8, moved[matrix][:, self._words(rows)])
            fours = unpack_nibbles(bytes_, 2 * bytes_.shape[-1]) if self.bits == 4 else bytes_
            height, width = fours.shape[0], fours.shape[1] // TILE
            tiles = _fours(fours)[..., order].reshape(height, width // TILE, TILE, TILE)
            along = tiles.transpose(1, 2).reshape(self.columns, width).mT
            found[matrix][rows] = pack_nibbles(along) if self.bits == 4 else along
        return found

    def _words(self, rows: slice) -> slice:
        return slice(rows.start * self.bits // 2, rows.stop * self.bits // 2)


def _fours(tiles: Tensor) -> Tensor:
    """Tiles side by side `[K / 16, *]`, four together: `[K / 16, N / 64, 1024]`."""
    size = TILE * COLUMNS
    return tiles.reshape(tiles.shape[0], tiles.numel() // (tiles.shape[0] * size), size)


def _moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
    if part.name == "codes":
        four = part.dtype == torch.uint8
        return (Tiled(4, shape[-1]),) if four else (Biased(), Tiled(8, shape[-1]))
    if part.name == "zero":
        order = (ColumnsInOrder(GROUP_ORDER), ColumnsInOrder(INTERLEAVED[4]))
        return (Turned(), *order, Nibbles(), Words())
    grouped = part.columns != WHOLE and part.columns < shape[-1]
    return Turned(), ColumnsInOrder(GROUP_ORDER if grouped else CHANNEL_ORDER)


MARLIN = Rearrangement("marlin", IN_RUNS, _moves, check=partial(zero_points_within, "marlin", 0))
