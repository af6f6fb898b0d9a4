"""Four-bit codes with their scales behind them, block by block, for our Hopper kernel of E4M3 products.

A block is 64 rows x 128. `[N, K]` becomes uint8 `[N / 64, K / 128, 4096 + 64 x 128 / span]`, padded with
zeros, `span` columns to a scale. In the first 4096 bytes a thread finds its codes of a row, 8 of each 32 of
K, in 16 that follow each other; then come 4 or 8 scales a row.

In the bytes of eight codes, nibbles hold magnitudes in order, of which 3 and 4 (codes 5 and 6) change places;
bit 7 of byte i is the sign of code i, bit 3 that of code 4 + i. Where bit 7 of a scale is set, all signs of
its codes are turned round. Scales are bytes here; the kernel writes them anew before they are packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles
from moeserve.quant.format import Format, Packed
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4_E4M3
from moeserve.quant.layout import refused_format, taken
from moeserve.quant.layouts.pieces import pieces

ROWS, DEPTH = 64, 128
CODE_BYTES = ROWS * DEPTH // 2

HELD = (0, 1, 5, 2, 3, 4, 8, 6, 7, 9)
"""Stack, blocks of rows, warp, row 3, row 0-2, blocks of K, 32 of it, half, lane % 4, code -> as held."""


def pack_blocks(codes: Tensor, scales: Tensor, span: int) -> Tensor:
    """`codes [e, N, K]` below 16 and `scales [e, N, K / span]`, uint8: blocks `[e, N / 64, K / 128, *]`."""
    turned = (scales >> 7).repeat_interleave(span, dim=-1)[..., : codes.shape[2]]
    codes = F.pad(codes ^ turned << 3, (0, -codes.shape[2] % DEPTH, 0, -codes.shape[1] % ROWS))
    e, n, k = codes.shape
    held = codes.view(e, n // ROWS, 4, 2, 8, k // DEPTH, 4, 2, 4, 4).permute(HELD)
    words = _bytes(held.flatten(-2)).flatten(3)
    scales = F.pad(scales, (0, k // span - scales.shape[2], 0, n - scales.shape[1]))
    blocks = scales.view(e, n // ROWS, ROWS, k // DEPTH, DEPTH // span).transpose(2, 3)
    return torch.cat((words, blocks.flatten(3)), -1)


def unpack_blocks(blocks: Tensor, shape: tuple[int, int], span: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_blocks` for matrices `[N, K]`: codes `[e, N, K]`, scales `[e, N, K / span]`."""
    (e, down, across), (n, k) = blocks.shape[:3], shape
    words, scales = blocks[..., :CODE_BYTES], blocks[..., CODE_BYTES:]
    rows = scales.reshape(e, down, across, ROWS, DEPTH // span).transpose(2, 3)
    scales = rows.reshape(e, down * ROWS, across * DEPTH // span)[:, :n, : -(-k // span)]
    eight = _codes(words.reshape(e, down, across, 4, 2, 8, 4, 4, 4))
    halves = eight.view(*eight.shape[:-1], 2, 4)
    order = sorted(range(len(HELD)), key=HELD.__getitem__)
    codes = halves.permute(order).reshape(e, down * ROWS, across * DEPTH)[:, :n, :k]
    return codes ^ (scales >> 7).repeat_interleave(span, dim=-1)[..., :k] << 3, scales


def _exchanged(magnitude: Tensor) -> Tensor:
    """Magnitudes 0..7 of which 5 and 6 change places."""
    return magnitude ^ (magnitude >> 2 & (magnitude >> 1 ^ magnitude) & 1) * 3


def _bytes(eight: Tensor) -> Tensor:
    """Codes `[..., 8]` below 16 -> `[..., 4]` bytes."""
    magnitude, sign = _exchanged(eight & 7), eight & 8
    low = magnitude[..., 0::2] | sign[..., 4:]
    high = magnitude[..., 1::2] | sign[..., :4]
    return low | high << 4


def _codes(four: Tensor) -> Tensor:
    """The inverse of `_bytes`."""
    low, high = four & 15, four >> 4
    magnitude = torch.stack((low & 7, high & 7), dim=-1).flatten(-2)
    return _exchanged(magnitude) | torch.cat((high & 8, low & 8), dim=-1)


@dataclass(frozen=True)
class JoinedBlocks:
    """Codes and scales of a matrix in one tensor, `codes`; what else the format stores stays."""

    name: str
    formats: frozenset[Format]

    def refuses(self, packed: Packed) -> str | None:
        """Why `packed` cannot be packed, or None: any size can."""
        return None if packed.format in self.formats else refused_format(self, packed.format)

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        """The blocks and the other parts. ValueError: a format that it does not take."""
        if (reason := self.refuses(packed)) is not None:
            raise ValueError(reason)
        (codes, scales, *others), span, k = packed.parts, _span(packed.format), packed.shape[-1]
        shape = self._shape(packed)
        blocks = torch.empty(shape, dtype=torch.uint8, device=codes.device)
        for matrix, rows in pieces(codes, ROWS):
            own = unpack_nibbles(codes[matrix][rows], k)[None]
            made = pack_blocks(own, scales[matrix][rows].view(torch.uint8)[None], span)[0]
            blocks[matrix][rows.start // ROWS : -(-rows.stop // ROWS)] = made
        names = (part.name for part in packed.format.parts[2:])
        return {"codes": blocks, **dict(zip(names, others, strict=True))}

    def unpack(self, tensors: Mapping[str, Tensor], like: Packed) -> Packed:
        """The parts again. ValueError: a tensor is missing or of another shape."""
        if (reason := self.refuses(like)) is not None:
            raise ValueError(reason)
        expected = torch.empty(self._shape(like), dtype=torch.uint8, device="meta")
        blocks, (codes, scales, *others) = taken(self, tensors, "codes", expected), like.parts
        found, found_scales = (
            torch.empty(part.shape, dtype=torch.uint8, device=blocks.device) for part in (codes, scales)
        )
        for matrix, rows in pieces(found, ROWS):
            own = blocks[matrix][rows.start // ROWS : -(-rows.stop // ROWS)]
            size = (rows.stop - rows.start, like.shape[-1])
            made, made_scales = unpack_blocks(own[None], size, _span(like.format))
            found[matrix][rows], found_scales[matrix][rows] = pack_nibbles(made[0]), made_scales[0]
        rest = (
            taken(self, tensors, part.name, other)
            for part, other in zip(like.format.parts[2:], others, strict=True)
        )
        return Packed(like.format, like.shape, (found, found_scales.view(scales.dtype), *rest))

    @staticmethod
    def _shape(packed: Packed) -> tuple[int, ...]:
        *lead, n, k = packed.shape
        return (*lead, -(-n // ROWS), -(-k // DEPTH), CODE_BYTES + ROWS * DEPTH // _span(packed.format))


def _span(form: Format) -> int:
    """Columns of a scale."""
    return int(form.parts[1].columns)


HOPPER_W4A8 = JoinedBlocks("hopper_w4a8", frozenset({MXFP4, NVFP4_E4M3}))
