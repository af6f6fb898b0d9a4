"""Four-bit codes and their scales in the order in which a warp group of our Hopper kernels holds them.

A block of codes is 64 rows x 128; `[N, K]` becomes int32 `[N / 64, K / 256, 64, 32]`, padded with zeros.
Codes of a thread stand side by side, their bits spread over a pair of words so that a turn and one mask
(`KEPT`) give sign and magnitude of two codes where bf16 has them.

Scales, one byte for 16 columns, become int32 `[N / 64, K / 256, 8, 32]`: words of four, turned left by four
bits. One of 32 columns stands twice. Scales are bytes here, whatever they mean: before they are packed, the
kernel writes all of them with five bits of exponent and three of fraction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles
from moeserve.quant.format import WHOLE, Part
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.quant.layout import Rearrangement, TensorMove
from moeserve.quant.layouts.pieces import pieces

ROWS, DEPTH, STAGE = 64, 128, 256
"""A block of codes is 64 rows x 128; a stage of a kernel's ring holds two of them."""

GROUP = 16
"""Columns of a scale."""

KEPT = (15, 8, 7, 6)
"""Where sign and magnitude (high to low) of a code stand in a half of a word when it is masked."""

TURNS = ((0, 4, 10, 8), (2, 6, 12, 14))
"""By how many bits a word is turned left before it is masked, by word of a pair and place in it.

The first three places are whole in their word. Of what these leave in both a third word is made: the bits
`REST` of the first word, the others of the second. It holds the last places.
"""


def _left_of(word: int) -> frozenset[int]:
    """Bits of a half of a word, 0 or 1 of its pair, that hold no whole code."""
    return frozenset(range(16)) - {(bit - turn) % 16 for turn in TURNS[word][:3] for bit in KEPT}


REST = sum(0x10001 << bit for bit in _left_of(0))
"""Bits that the first word of a pair gives for the fourth places of both; the others are the second's."""


def _bits() -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int]]]:
    """Word of a pair, place, half and bit of a code -> the word and bit that hold it."""
    for word, turns in enumerate(TURNS):
        for place, turn in enumerate(turns):
            for half in (0, 1):
                for bit, kept in zip((3, 2, 1, 0), KEPT, strict=True):
                    at = (16 * half + kept - turn) % 32
                    yield (word, place, half, bit), (word if place < 3 else 1 - (REST >> at & 1), at)


BITS = dict(_bits())

HELD = (0, 1, 2, 7, 3, 5, 6, 8, 4, 9)
"""Stack, blocks of rows, blocks of K, warp, row 3, row 1-2, row 0, half, lane % 4, word -> as held."""

SCALES_HELD = (0, 1, 5, 6, 2, 4, 3, 7, 8)
"""Stack, blocks of rows, warp, row 3, row 0-2, stage, block of K, word, byte -> as held."""


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def pack_codes(codes: Tensor) -> Tensor:
    """`codes [e, N, K]` uint8 below 16 -> `[e, N / 64, K / 256, 64, 32]` int32, padded with zeros."""
    e, n, k = codes.shape
    codes = F.pad(codes, (0, -k % STAGE, 0, -n % ROWS))
    blocks = codes.view(e, codes.shape[1] // ROWS, ROWS, codes.shape[2] // DEPTH, 2, 4, 8, 2)
    # .., row, block of K, word of a pair h, place i, column pair p, half: k = 64 h + 16 i + 2 p + half
    words = torch.zeros((*blocks.shape[:4], 2, 8), dtype=torch.int32, device=codes.device)
    for (h, i, half, bit), (word, at) in BITS.items():
        words[..., word, :] |= (blocks[..., h, i, :, half].int() >> bit & 1) << at
    # words [e, nb, row, kb, h, p]: column of the operand = 2 p + h
    held = words.permute(0, 1, 3, 2, 5, 4).reshape(*words.shape[:2], words.shape[3], 4, 2, 4, 2, 2, 4, 2)
    held = held.permute(HELD)
    return held.reshape(e, words.shape[1], words.shape[3] // 2, 2 * 32, 32).contiguous()


def unpack_codes(words: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 `[e, n, k]`."""
    e, down, stages = words.shape[:3]
    held = words.view(e, down, 2 * stages, 2, 4, 4, 2, 4, 2, 2).permute(_inverse(HELD))
    pairs = held.reshape(e, down, 2 * stages, ROWS, 8, 2).permute(0, 1, 3, 2, 5, 4)
    blocks = torch.zeros((e, down, ROWS, 2 * stages, 2, 4, 8, 2), dtype=torch.uint8, device=words.device)
    for (h, i, half, bit), (word, at) in BITS.items():
        blocks[..., h, i, :, half] |= ((pairs[..., word, :] >> at & 1) << bit).to(torch.uint8)
    return blocks.view(e, down * ROWS, 2 * stages * DEPTH)[:, :n, :k]


def pack_scales(scales: Tensor) -> Tensor:
    """`scales [e, N, K / 16]` bytes -> `[e, N / 64, K / 256, 8, 32]` int32, padded as the codes are.

    A word is four bytes, turned left by four bits.
    """
    e, n, groups = scales.shape
    scales = F.pad(scales, (0, -groups % (STAGE // GROUP), 0, -n % ROWS))
    down, stages = scales.shape[1] // ROWS, scales.shape[2] // (STAGE // GROUP)
    held = scales.view(e, down, 4, 2, 8, stages, 2, 2, 4).permute(SCALES_HELD)
    words = held.contiguous().view(torch.int32)
    return (words << 4 | words >> 28 & 15).reshape(e, down, stages, 8, 32)


def unpack_scales(words: Tensor, n: int, groups: int) -> Tensor:
    """The inverse of `pack_scales`: uint8 `[e, n, groups]`."""
    e, down, stages = words.shape[:3]
    bytes_ = (words >> 4 & 0xFFFFFFF | words << 28).contiguous().view(torch.uint8)
    held = bytes_.view(e, down, stages, 2, 4, 8, 2, 2, 4).permute(_inverse(SCALES_HELD))
    return held.reshape(e, down * ROWS, stages * (STAGE // GROUP))[:, :n, :groups]


@dataclass(frozen=True)
class HeldCodes:
    """Two codes a byte along K = `columns`, `[..., N, *]`, as `pack_codes` orders them."""

    columns: int

    def forward(self, stored: Tensor) -> Tensor:
        """Returns the codes packed into words."""
        *lead, n, _ = stored.shape
        shape = (*lead, -(-n // ROWS), -(-self.columns // STAGE), ROWS, 32)
        words = torch.empty(shape, dtype=torch.int32, device=stored.device)
        for matrix, rows in pieces(stored, ROWS):
            codes = unpack_nibbles(stored[matrix][rows], self.columns)
            words[matrix][_blocks(rows)] = pack_codes(codes[None])[0]
        return words

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The codes, two a byte."""
        found = torch.empty(like.shape, dtype=like.dtype, device=moved.device)
        for matrix, rows in pieces(found, ROWS):
            words = moved[matrix][_blocks(rows)]
            codes = unpack_codes(words[None], rows.stop - rows.start, self.columns)[0]
            found[matrix][rows] = pack_nibbles(codes)
        return found


@dataclass(frozen=True)
class HeldScales:
    """Scales of a byte `[..., N, G]` as `pack_scales` orders them, each of them `times` side by side."""

    times: int

    def forward(self, stored: Tensor) -> Tensor:
        """Returns the scales packed into words."""
        *lead, n, groups = stored.shape
        shape = (*lead, -(-n // ROWS), -(-groups * self.times // (STAGE // GROUP)), 8, 32)
        words = torch.empty(shape, dtype=torch.int32, device=stored.device)
        for matrix, rows in pieces(stored, ROWS):
            own = stored[matrix][rows].view(torch.uint8).repeat_interleave(self.times, dim=-1)
            words[matrix][_blocks(rows)] = pack_scales(own[None])[0]
        return words

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The scales, once each."""
        found = torch.empty(like.shape, dtype=torch.uint8, device=moved.device)
        for matrix, rows in pieces(found, ROWS):
            words, groups = moved[matrix][_blocks(rows)], found.shape[-1] * self.times
            scales = unpack_scales(words[None], rows.stop - rows.start, groups)[0]
            found[matrix][rows] = scales[:, :: self.times]
        return found.view(like.dtype)


def _blocks(rows: slice) -> slice:
    """The blocks that hold `rows`, which begin with one."""
    return slice(rows.start // ROWS, -(-rows.stop // ROWS))


def _moves(part: Part, shape: torch.Size) -> Sequence[TensorMove]:
    if part.name == "codes":
        return (HeldCodes(shape[-1]),)
    return () if part.rows == WHOLE else (HeldScales(int(part.columns) // GROUP),)


HOPPER_FP4 = Rearrangement("hopper_fp4", frozenset({NVFP4, MXFP4}), _moves)
