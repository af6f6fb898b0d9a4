"""Codes of four and six bits in bytes, and back: the even, lower column stands in the low bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.elements import pick


def pack_nibbles(codes: Tensor) -> Tensor:
    """4-bit codes `[..., K]` (integers 0..15) as bytes: uint8 `[..., ceil(K / 2)]`, the spare half 0."""
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 `[..., columns]` of 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :columns]


def pack_sextets(codes: Tensor) -> Tensor:
    """6-bit codes `[..., K]` (integers 0..63), four in three bytes: uint8 `[..., ceil(3 K / 4)]`."""
    columns = codes.shape[-1]
    if columns % 4:
        codes = F.pad(codes, (0, -columns % 4))
    a, b, c, d = codes.int().view(*codes.shape[:-1], codes.shape[-1] // 4, 4).unbind(-1)
    packed = torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), dim=-1).to(torch.uint8)
    return packed.flatten(-2)[..., : sextet_bytes(columns)]


def sextet_words(packed: Tensor, columns: int) -> Tensor:
    """Pairs of 6-bit codes `[..., 2 ceil(columns / 4)]` int32, the lower column in the low six bits."""
    words = -(-columns // 4)
    if packed.shape[-1] != 3 * words:
        packed = F.pad(packed, (0, 3 * words - packed.shape[-1]))
    first, middle, last = packed.int().view(*packed.shape[:-1], words, 3).unbind(-1)
    return torch.stack((first | (middle & 15) << 8, middle >> 4 | last << 4), dim=-1).flatten(-2)


def sextet_bytes(columns: int) -> int:
    """Bytes of a row of `columns` 6-bit codes."""
    return -(-3 * columns // 4)


def pick_pairs(entries: Tensor, words: Tensor, columns: int) -> Tensor:
    """Values of pairs of codes `[..., ceil(columns / 2)]` by a table `[entries, 2]`: `[..., columns]`."""
    return pick(entries, words)[..., :columns]
