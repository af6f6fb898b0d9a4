"""Moves that pack integer codes into int32 words, lowest bits first, as GPTQ, AWQ and others do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.quant.bits import pack_nibbles, unpack_nibbles
from moeserve.quant.format import Packed
from moeserve.quant.layout import TensorMove, must_divide

BYTES = 4
"""Bytes of a word."""


def read_as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The bytes of each row of `tensor [..., n]` as another dtype; a view where they lie together."""
    flat = tensor.contiguous().flatten()
    if flat.stride(0) != 1:  # one element may count as contiguous whatever its stride, and is then no view
        flat = flat.clone(memory_format=torch.contiguous_format)
    columns = tensor.shape[-1] * tensor.dtype.itemsize // dtype.itemsize
    return flat.view(dtype).view(*tensor.shape[:-1], columns)


@dataclass(frozen=True)
class Words:
    """Bytes `[..., b]` as int32 `[..., ceil(b / 4)]`, the first in the lowest bits, spare ones 0."""

    def forward(self, stored: Tensor) -> Tensor:
        """The words; a view where nothing is spare."""
        bytes_ = stored.view(torch.uint8)
        if stored.shape[-1] % BYTES:
            bytes_ = F.pad(bytes_, (0, -stored.shape[-1] % BYTES))
        return read_as(torch.int32, bytes_)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The bytes of the words, without spare ones, in the dtype of `like`."""
        return read_as(torch.uint8, moved)[..., : like.shape[-1]].contiguous().view(like.dtype)


@dataclass(frozen=True)
class Biased:
    """8-bit codes in two's complement as the code plus 128, uint8."""

    def forward(self, stored: Tensor) -> Tensor:
        """The codes plus 128, 0..255 as uint8."""
        return stored.view(torch.uint8) ^ 0x80

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The codes in two's complement, -128..127."""
        return (moved ^ 0x80).view(like.dtype)


@dataclass(frozen=True)
class Turned:
    """`[..., n, k]` as `[..., k, n]`."""

    def forward(self, stored: Tensor) -> Tensor:
        """The transposed matrix, contiguous: `[..., k, n]`."""
        return stored.mT.contiguous()

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The matrix as it was stored: `[..., n, k]`."""
        return moved.mT.contiguous()


@dataclass(frozen=True)
class Nibbles:
    """Numbers 0..15, one a byte, `[..., n]`, as two a byte, the even ones low."""

    def forward(self, stored: Tensor) -> Tensor:
        """Two numbers a byte, uint8 `[..., ceil(n / 2)]`."""
        return pack_nibbles(stored)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """One number a byte, uint8 `[..., n]`."""
        return unpack_nibbles(moved, like.shape[-1])


@dataclass(frozen=True)
class Less:
    """Numbers 1..16, one a byte, less `by`: what GPTQ's first version stores of zero points."""

    by: int

    def forward(self, stored: Tensor) -> Tensor:
        """The numbers less `by`, 0..15."""
        return stored - self.by

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The numbers as they were, 1..16."""
        return moved + self.by


@dataclass(frozen=True)
class ColumnsInOrder:
    """Within each run of columns as long as `order`, place i takes column `order[i]`."""

    order: tuple[int, ...]

    def forward(self, stored: Tensor) -> Tensor:
        """`[..., n]` of the same shape. ValueError: n is no multiple of a run."""
        must_divide("columns", stored.shape[-1], len(self.order))
        return self._picked(stored, self.order)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """Every column where it was."""
        return self._picked(moved, tuple(map(self.order.index, range(len(self.order)))))

    def _picked(self, columns: Tensor, order: tuple[int, ...]) -> Tensor:
        runs = columns.reshape(*columns.shape[:-1], columns.shape[-1] // len(order), len(order))
        return runs[..., list(order)].reshape(columns.shape)


@dataclass(frozen=True)
class Spare:
    """Columns `[..., n]` with zeros after them, to a multiple of `multiple`."""

    multiple: int

    def forward(self, stored: Tensor) -> Tensor:
        """The columns with zeros after them: `[..., padded n]`."""
        return F.pad(stored, (0, -stored.shape[-1] % self.multiple))

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The columns without the zeros: `[..., n]`."""
        return moved[..., : like.shape[-1]]


@dataclass(frozen=True)
class OneRow:
    """A part with one row for the whole matrix, `[..., 1, k]`, as `[..., k]`."""

    def forward(self, stored: Tensor) -> Tensor:
        """The part without its row dimension: `[..., k]`."""
        return stored.squeeze(-2)

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The part with its row dimension: `[..., 1, k]`."""
        return moved.reshape(like.shape)


def codes(bits: int) -> tuple[TensorMove, ...]:
    """Codes `[..., N, *]` of 4 or 8 bits as words along K, 8-bit ones biased."""
    return (Words(),) if bits == 4 else (Biased(), Words())


def zero_points_within(layout: str, lowest: int, packed: Packed) -> None:
    """ValueError: a zero point below `lowest`, or 16 or more above it, which `layout` cannot store."""
    for part, tensor in zip(packed.format.parts, packed.parts, strict=True):
        if part.name == "zero":
            wrong: Tensor = tensor[(tensor < lowest) | (tensor > lowest + 15)]
            if wrong.numel():
                raise ValueError(
                    f"{layout} stores zero points {lowest}..{lowest + 15}, found {int(wrong.flatten()[0])}"
                )


def repeated(value: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """int32 words that are all `value`, given without sign, where `like` is."""
    signed = value - (value >> 31 << 32)
    return torch.full(tuple(shape), signed, dtype=torch.int32, device=like.device)
