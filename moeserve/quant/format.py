"""Number formats as values: `Format`, how a matrix is stored; `Packed`, a stored matrix; `Scheme`, a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, prod

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]

WHOLE = -1
"""A part's `rows` or `columns` where one element covers the full extent of the matrix."""


@dataclass(frozen=True)
class Part:
    """One stored tensor of a format: its dtype, and how much of the matrix one of its elements covers.

    A matrix is the last two dimensions `[N, K]` of a tensor; a part of it has shape
    `[..., ceil(N / rows), ceil(K / columns)]`. Examples: E4M3 codes are 1 x 1, two FP4 codes in a byte 1 x 2,
    a 128x128 block scale 128 x 128, a per-channel scale 1 x WHOLE, four FP6 codes in three bytes 1 x 4/3.
    """

    name: str
    dtype: torch.dtype
    rows: int
    columns: int | Fraction

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this part for a tensor of logical shape `[..., N, K]`."""
        *lead, n, k = shape
        return (*lead, _extent(n, self.rows), _extent(k, self.columns))


def _extent(size: int, span: int | Fraction) -> int:
    if isinstance(span, int):
        return 1 if span == WHOLE else -(-size // span)
    return ceil(size / span)


def _cut(what: str, axis: str, cut: tuple[int, int, int], span: int | Fraction) -> slice:
    """The elements of a part that cover `start:stop` of `size` rows or columns."""
    start, stop, size = cut
    if span == WHOLE:
        return slice(0, 1)
    ends = [Fraction(at) / span for at in (start, stop)]
    for at, end in zip((start, stop), ends, strict=True):
        if end.denominator != 1 and at != size:
            raise ValueError(
                f"a cut at {axis} {at} goes through {what}: multiples of {span} {axis}s are whole"
            )
    return slice(ceil(ends[0]), max(ceil(ends[1]), ceil(ends[0])))


@dataclass(frozen=True)
class Format:
    """How a matrix is stored, with its own reference encode and decode.

    `parts` are the stored tensors: codes first, then scales from fine to coarse. `encode` maps float32
    `[..., N, K]` to them, `decode` maps them and the logical shape back to float32; both are the reference
    that every kernel is judged by, and run on any device. A format is compared by name: one that writes by
    another rule, or holds a constant, is the same format.

    A static format takes its scale from the checkpoint and does not store it: `given` binds that constant
    (float32, one value). Unbound it stands in schemes only; encode and decode raise ValueError.
    """

    name: str
    bits: int  # of one element's code; scales not counted
    parts: tuple[Part, ...]
    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, torch.Size], Tensor]
    given: Callable[[Tensor], Format] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name

    @property
    def row_wise(self) -> bool:
        """Whether rows can travel alone, as a wire format's must: no part is shared between rows."""
        return all(part.rows == 1 for part in self.parts)

    @property
    def block(self) -> tuple[int, int | Fraction]:
        """Rows and columns that share the finest scale; (1, 1) where there is no scale."""
        return (self.parts[1].rows, self.parts[1].columns) if len(self.parts) > 1 else (1, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that codes are stored in."""
        return self.parts[0].dtype

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a tensor of logical shape `[..., N, K]` takes, scales included."""
        return sum(prod(part.shape_of(shape)) * part.dtype.itemsize for part in self.parts)

    def quantize(self, x: Tensor) -> Packed:
        """Stores `x` (float, `[..., N, K]`) in this format. A tensor that is already in it is not copied.

        A tensor without elements has nothing to encode: its parts are zeros, scales of the whole included.
        """
        if x.numel() == 0:
            parts = (torch.zeros(p.shape_of(x.shape), dtype=p.dtype, device=x.device) for p in self.parts)
            return Packed(self, x.shape, tuple(parts))
        return Packed(self, x.shape, self.encode(x))

    def empty(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Packed:
        """Uninitialised storage for a tensor of logical shape `[..., N, K]`."""
        parts = tuple(torch.empty(p.shape_of(shape), dtype=p.dtype, device=device) for p in self.parts)
        return Packed(self, torch.Size(shape), parts)


@dataclass(frozen=True, eq=False)
class Packed:
    """A stored tensor: `parts` in the order of `format.parts`, each of the same rank as `shape`.

    Raises ValueError when a part has another dtype or shape than the format gives it.
    """

    format: Format
    shape: torch.Size
    parts: Parts

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.format.parts):
            names = [part.name for part in self.format.parts]
            raise ValueError(f"{self.format} has parts {names}; {len(self.parts)} were given")
        for part, tensor in zip(self.format.parts, self.parts, strict=True):
            expected = part.shape_of(self.shape)
            if tensor.dtype != part.dtype or tuple(tensor.shape) != expected:
                raise ValueError(
                    f"{self.format} {part.name} of a {list(self.shape)} tensor must be {part.dtype} "
                    f"{list(expected)}; found {tensor.dtype} {list(tensor.shape)}"
                )

    def dequantize(self) -> Tensor:
        """The values, float32, of shape `shape`."""
        return self.format.decode(self.parts, self.shape)

    def rows(self, index: Tensor | slice) -> Packed:
        """The entries `index` of the first dimension: rows of a matrix, or whole matrices of a stack.

        Raises ValueError for rows of a matrix whose format shares a scale between rows.
        """
        if len(self.shape) == 2 and not self.format.row_wise:
            raise ValueError(f"rows of {self.format} share a scale and cannot be taken one by one")
        parts = tuple(part[index] for part in self.parts)
        return Packed(self.format, torch.Size((parts[0].shape[0], *self.shape[1:])), parts)

    def cut(self, rows: slice, columns: slice) -> Packed:
        """The rows and columns (start:stop) of every matrix, as views; scales of the whole stay the whole's.

        Raises ValueError where a cut goes through what an element of a part covers, or the format gives
        columns a group by number, which a cut would change.
        """
        n, k = self.shape[-2:]
        (top, bottom, _), (left, right, _) = rows.indices(n), columns.indices(k)
        if (left, right) != (0, k) and any(part.name == "order" for part in self.format.parts):
            raise ValueError(
                f"columns of {self.format} are not in the order of their groups; sort them first"
            )
        parts = []
        for part, tensor in zip(self.format.parts, self.parts, strict=True):
            down = _cut(f"{self.format} {part.name}", "row", (top, bottom, n), part.rows)
            along = _cut(f"{self.format} {part.name}", "column", (left, right, k), part.columns)
            parts.append(tensor[..., down, along])
        return Packed(
            self.format,
            torch.Size((*self.shape[:-2], max(bottom - top, 0), max(right - left, 0))),
            tuple(parts),
        )

    def with_parts(self, parts: Sequence[Tensor]) -> Packed:
        """This format and matrix size over other storage; the first dimension may differ."""
        return Packed(self.format, torch.Size((parts[0].shape[0], *self.shape[1:])), tuple(parts))

    def to(self, device: torch.device | str) -> Packed:
        """This tensor with every part on `device`."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, codes and scales."""
        return sum(part.nbytes for part in self.parts)

    @property
    def device(self) -> torch.device:
        """The device that holds the parts."""
        return self.parts[0].device


@dataclass(frozen=True)
class Scheme:
    """How an expert computes: the format of its weights and the format its activations are rounded to."""

    weights: Format
    activations: Format

    @property
    def name(self) -> str:
        """One name where both formats agree, else `weights x activations`."""
        same = self.weights == self.activations
        return self.weights.name if same else f"{self.weights.name} x {self.activations.name}"

    def __str__(self) -> str:
        return self.name
