"""FP8 E4M3 with float32 scales that multiply on decode: 128x128 weight blocks and 1x128 activation groups.

A scale is `max(amax, floor) / 448`; codes are `x / scale`, clamped to ±448 before the cast (a raw cast of
larger values gives NaN or 448 depending on the library), rounded to nearest even, NaN kept. A block at the
edge is smaller, never padded. DeepSeek's `weight_scale_inv` is such a scale: it multiplies, despite its
name.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.format import Format, Part, Parts

E4M3_MAX = 448.0
GROUP_AMAX_FLOOR = 1e-10  # activation groups
BLOCK_AMAX_FLOOR = 1e-12  # weight blocks


def spread(scale: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """Repeats `scale [..., ceil(N/rows), ceil(K/columns)]` over its blocks to `[..., N, K]`."""
    wide = scale.repeat_interleave(columns, dim=-1)[..., : shape[-1]]
    return wide if rows == 1 else wide.repeat_interleave(rows, dim=-2)[..., : shape[-2], :]


def block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each block of `x [..., N, K]`: `[..., ceil(N/rows), ceil(K/columns)]`."""
    *lead, n, k = x.shape
    padded = F.pad(x.abs(), (0, -k % columns, 0, -n % rows))
    tiles = padded.reshape(*lead, _blocks(n, rows), rows, _blocks(k, columns), columns)
    return tiles.amax(dim=(-1, -3))


def _blocks(size: int, span: int) -> int:
    return -(-size // span)


def _encode(rows: int, columns: int, floor: float, x: Tensor) -> Parts:
    x = x.float()
    scale = block_amax(x, rows, columns).clamp_min(floor) / E4M3_MAX
    codes = (x / spread(scale, x.shape, rows, columns)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn), scale


def _decode(rows: int, columns: int, parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale = parts
    return codes.float() * spread(scale, shape, rows, columns)


def _e4m3(name: str, rows: int, columns: int, floor: float) -> Format:
    parts = (Part("codes", torch.float8_e4m3fn, 1, 1), Part("scale", torch.float32, rows, columns))
    return Format(name, 8, parts, partial(_encode, rows, columns, floor), partial(_decode, rows, columns))


FP8_BLOCK = _e4m3("fp8_block128", 128, 128, BLOCK_AMAX_FLOOR)
FP8_GROUP = _e4m3("fp8_group128", 1, 128, GROUP_AMAX_FLOOR)
