"""Moves of whole rows, of codes and scales alike: transposed within groups, or two halves exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.quant.layout import must_divide


@dataclass(frozen=True)
class Alternated:
    """The two halves of the rows by turns, `group` rows of each: first half first.

    group 1: r0, r(N/2), r1, r(N/2 + 1), ...
    """

    group: int = 1

    def forward(self, stored: Tensor) -> Tensor:
        """`[..., n, k]` of the same shape. ValueError: n is no multiple of twice the group."""
        must_divide("rows", stored.shape[-2], 2 * self.group)
        return _transposed(stored, (1, 2, stored.shape[-2] // (2 * self.group), self.group))

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The first half above the second."""
        return _transposed(moved, (1, moved.shape[-2] // (2 * self.group), 2, self.group))


@dataclass(frozen=True)
class Separated:
    """The even rows above the odd ones: the inverse of `Alternated`, as a move of its own."""

    def forward(self, stored: Tensor) -> Tensor:
        """`[..., n, k]` of the same shape. ValueError: n is odd."""
        must_divide("rows", stored.shape[-2], 2)
        return Alternated().back(stored, stored)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """Rows of both halves by turns."""
        return Alternated().forward(moved)


@dataclass(frozen=True)
class Shuffled:
    """Within each block of rows, row i goes to (i % (block / 8)) * 8 + i // (block / 8).

    The order in which tensor-core fragments of eight rows write a tile of the transposed output: blocks of 32
    rows for epilogue tiles of 128, of 16 for tiles of 64.
    """

    block: int

    def forward(self, stored: Tensor) -> Tensor:
        """`[..., n, k]` of the same shape. ValueError: n is no multiple of the block."""
        must_divide("rows", stored.shape[-2], self.block)
        return _transposed(stored, (stored.shape[-2] // self.block, 8, self.block // 8, 1))

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The rows in the order in which they were stored."""
        return _transposed(moved, (moved.shape[-2] // self.block, self.block // 8, 8, 1))


@dataclass(frozen=True)
class Exchanged:
    """The second half of the rows above the first."""

    def forward(self, stored: Tensor) -> Tensor:
        """`[..., n, k]` of the same shape. ValueError: n is odd."""
        must_divide("rows", stored.shape[-2], 2)
        *lead, n, k = stored.shape
        return stored.reshape(*lead, 2, n // 2, k).flip(-3).reshape(stored.shape)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The halves exchanged once more, which is the stored order."""
        return self.forward(moved)


def _transposed(rows: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """Rows `[..., a b c d, k]` as `[..., a c b d, k]`, a copy."""
    *lead, n, k = rows.shape
    return rows.reshape(*lead, *sizes, k).transpose(-4, -3).reshape(*lead, n, k)
