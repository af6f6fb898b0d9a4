"""Four-bit codes in the order a warp group holds them: `pack_codes`, `pack_scales`, and what scales become.

A scale is stored in a byte as five bits of exponent and three of fraction; what all scales of a row share,
the format's outer scale included, is one float32 a row that multiplies the finished sum. NVFP4 and MXFP4
differ in nothing else, so one kernel serves both, and no value is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, DEPTH, STAGE = 64, 128, 256
"""A block of codes is 64 rows x 128; a stage of the ring holds two of them."""

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


def nibbles(codes: Tensor) -> Tensor:
    """`[..., K / 2]` bytes, the even element low, to `[..., K]` codes."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


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
    # e, nb, kb, warp, row 3, row 1-2, row 0, half, lane % 4, word
    # -> half, warp, row 1-2, row 0, lane % 4, row 3, word
    held = held.permute(0, 1, 2, 7, 3, 5, 6, 8, 4, 9)
    return held.reshape(e, words.shape[1], words.shape[3] // 2, 2 * 32, 32).contiguous()


def pack_scales(scales: Tensor) -> Tensor:
    """`scales [e, N, K / 16]` bytes -> `[e, N / 64, K / 256, 8, 32]` int32, padded as the codes are.

    A word is four bytes, turned left by four bits.
    """
    e, n, groups = scales.shape
    scales = F.pad(scales, (0, -groups % 16, 0, -n % ROWS))
    nb, kb = scales.shape[1] // ROWS, scales.shape[2] // 16
    held = scales.view(e, nb, 4, 2, 8, kb, 2, 2, 4)  # warp, row 3, row 0-2, stage, block of K, word, byte
    held = held.permute(0, 1, 5, 6, 2, 4, 3, 7, 8)  # stage, block, warp, row 0-2, row 3, word, byte
    words = held.contiguous().view(torch.int32)
    return (words << 4 | words >> 28 & 15).reshape(e, nb, kb, 8, 32)


def from_e4m3(scales: Tensor) -> tuple[Tensor, Tensor, float]:
    """E4M3 block scales to bytes, where a scale is zero, and the factor they then lack."""
    mantissa, exponent = torch.frexp(scales.float())  # value = mantissa 2^exponent, mantissa in [1/2, 1)
    zero = scales.float() == 0
    byte = (exponent + 8) * 8 + (mantissa * 16 - 8).int()
    return torch.where(zero, 0, byte).to(torch.uint8), zero, 2.0**20


def from_e8m0(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E8M0 scales `[e, N, G]` to bytes, where one is under 2^-30 of its row's largest, and rows' factors."""
    largest = scales.amax(dim=-1, keepdim=True).int()
    below = largest - scales.int()
    byte = (30 - below).clamp_min(0) * 8
    factor = torch.exp2((largest.squeeze(-1) - 128).double()).float()
    factor = torch.where((scales == 255).any(dim=-1), torch.nan, factor)
    return byte.to(torch.uint8), below > 30, factor
