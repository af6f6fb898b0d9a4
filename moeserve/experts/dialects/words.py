"""Integer codes in int32 words, as GPTQ, AWQ and compressed-tensors pack them, in the formats' order."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AWQ word that holds column 0, 1, ... of its eight."""


def along_last(words: Tensor) -> Tensor:
    """Bytes of words that are packed along the last dimension, lowest bits first: uint8 `[..., 4 words]`."""
    return words.contiguous().view(torch.uint8)


def nibbles(words: Tensor, size: int) -> Tensor:
    """4-bit codes packed along the last dimension: uint8 `[..., size]`."""
    return unpack_nibbles(along_last(words), size)


def bytes_less_128(words: Tensor) -> Tensor:
    """8-bit codes, each stored plus 128, as int8 `[..., 4 words]`."""
    return (along_last(words) ^ 0x80).view(torch.int8)


def awq_nibbles(words: Tensor) -> Tensor:
    """4-bit codes of AWQ words `[..., words]`: uint8 `[..., 8 words]` in the order of the columns."""
    flat = nibbles(words, 8 * words.shape[-1])
    return flat.view(*words.shape, 8)[..., list(AWQ_PLACES)].flatten(-2)


def packed_rows(codes: Tensor) -> Tensor:
    """4-bit codes `[K, N]` as the formats have them: uint8 `[N, K / 2]`."""
    return pack_nibbles(codes.mT.contiguous())
