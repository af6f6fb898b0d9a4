"""`Blocks`: the grid of equal blocks over a matrix whose elements share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.format import WHOLE


@dataclass(frozen=True)
class Blocks:
    """Blocks of `rows` x `columns` (WHOLE: the full extent) over a matrix `[..., N, K]`.

    A block at the edge is smaller, never padded: its scale comes from its own values. A tensor of scales is
    `[..., ceil(N / rows), ceil(K / columns)]`.
    """

    rows: int
    columns: int

    def amax(self, x: Tensor) -> Tensor:
        """Largest magnitude of each block of `x`, which has elements; NaN where there is one."""
        return self._tiles(x.abs()).amax(dim=(-1, -3))

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest of each block of `x` and zero, as ranges with a zero point take them."""
        tiles = self._tiles(x)
        return tiles.amin(dim=(-1, -3)).clamp(max=0), tiles.amax(dim=(-1, -3)).clamp(min=0)

    def multiply(self, x: Tensor, scale: Tensor) -> Tensor:
        """`x` times its blocks' scales."""
        spread, tiles = self._broadcast(x, scale)
        return (tiles * spread).view(x.shape)

    def multiply_(self, x: Tensor, scale: Tensor) -> Tensor:
        """`multiply` that may write into `x`, a tensor the caller has just made."""
        spread, tiles = self._broadcast(x, scale)
        return tiles.mul_(spread).view(x.shape)

    def divide(self, x: Tensor, scale: Tensor) -> Tensor:
        """`x` divided by its blocks' scales: the correctly rounded quotient, not a product with 1 / scale."""
        spread, tiles = self._broadcast(x, scale)
        return (tiles / spread).view(x.shape)

    def subtract(self, x: Tensor, offset: Tensor) -> Tensor:
        """`x` less its blocks' offsets."""
        spread, tiles = self._broadcast(x, offset)
        return (tiles - spread).view(x.shape)

    def spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """Repeats `scale` over its blocks to `shape`."""
        n, k = shape[-2:]
        rows, columns = self._sizes(n, k)
        wide = scale.repeat_interleave(columns, dim=-1)[..., :k]
        return wide.repeat_interleave(rows, dim=-2)[..., :n, :] if rows > 1 else wide[..., :n, :]

    def _broadcast(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and elements in shapes that broadcast, without a copy of either where blocks are whole."""
        *lead, n, k = x.shape
        rows, columns = self._sizes(n, k)
        if n % rows or k % columns or x.numel() == 0:
            return self.spread(scale, x.shape), x
        tiles = x.reshape(*lead, n // rows, rows, k // columns, columns)
        return scale[..., :, None, :, None], tiles

    def _tiles(self, x: Tensor) -> Tensor:
        *lead, n, k = x.shape
        rows, columns = self._sizes(n, k)
        if n % rows or k % columns:
            x = F.pad(x, (0, -k % columns, 0, -n % rows))  # zeros: no larger than any magnitude
        return x.reshape(*lead, _count(n, rows), rows, _count(k, columns), columns)

    def _sizes(self, n: int, k: int) -> tuple[int, int]:
        return (
            max(n, 1) if self.rows == WHOLE else self.rows,
            max(k, 1) if self.columns == WHOLE else self.columns,
        )


def _count(size: int, span: int) -> int:
    return 1 if span == WHOLE else -(-size // span)
