"""Layouts: invertible re-packings of a stored matrix into the tensors that a kernel family, or a file, wants.

A `TensorMove` rearranges one tensor; a `Rearrangement` is the layout that moves each part of a format alone,
and moves compose. Layouts that need more than one part at a time write `pack` and `unpack` themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moeserve.quant.format import Format, Packed, Part


class Layout(Protocol):
    """A bijection between a `Packed` and a kernel's own tensors; no value is rounded on the way.

    Laws: `unpack(pack(p), p)` has the parts of `p` bit for bit, also where a dimension is zero; matrices of a
    stack are packed one by one, so `pack(p.rows(i))` is row i of `pack(p)`; neither way takes more memory
    than what goes in and what comes out. `tests/laws/test_layouts.py` holds every entry of `LAYOUTS` to them.
    """

    @property
    def name(self) -> str:
        """What the layout is called in `LAYOUTS`."""

    @property
    def formats(self) -> frozenset[Format]:
        """The formats that the layout can pack."""

    def refuses(self, packed: Packed) -> str | None:
        """Why `packed` cannot be packed, with the value, or None; its values are not read."""

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        """The tensors by name, each `[..., *]` with the stack first; copies, or the part where it stays.

        ValueError: a format, a size, or a value that the layout does not take.
        """

    def unpack(self, tensors: Mapping[str, Tensor], like: Packed) -> Packed:
        """The inverse of `pack`, in the format and shape of `like`, whose values are not read.

        `like` may lie on the meta device. ValueError: a tensor is missing, or is not what `pack` makes of
        `like`.
        """


class TensorMove(Protocol):
    """An invertible rearrangement of one stored tensor `[..., n, k]`, matrix by matrix, of any device."""

    def forward(self, stored: Tensor) -> Tensor:
        """`stored` rearranged. ValueError: a size that it does not take."""

    def back(self, moved: Tensor, like: Tensor) -> Tensor:
        """The inverse, with the shape and dtype of `like`, whose values are not read."""


Moves = Callable[[Part, torch.Size], Sequence[TensorMove]]
"""The moves of one part of a matrix of logical shape `[..., N, K]`, in their order; none: it stays."""


def no_check(_: Packed) -> None:
    """Accepts every tensor: the layout has no limits on values."""


def no_constants(_: Packed) -> dict[str, Tensor]:
    """Adds no tensors: the layout stores the parts alone."""
    return {}


@dataclass(frozen=True)
class Rearrangement:
    """A layout that moves each part of a format by itself.

    `check` raises ValueError for values that the layout cannot hold; sizes are the moves' own matter.
    `constants` are tensors that follow from format and shape; `pack` adds them, `unpack` does not read them.
    """

    name: str
    formats: frozenset[Format]
    moves: Moves
    names: Mapping[str, str] = field(default_factory=dict)  # a part's tensor, where not called like the part
    check: Callable[[Packed], None] = no_check
    constants: Callable[[Packed], dict[str, Tensor]] = no_constants

    def refuses(self, packed: Packed) -> str | None:
        """Why `packed` cannot be packed, with the value, or None; its values are not read."""
        if packed.format not in self.formats:
            return refused_format(self, packed.format)
        for part, tensor in zip(packed.format.parts, packed.parts, strict=True):
            try:
                self._stages(part, tensor, packed.shape)
            except ValueError as error:
                return f"{self.name} of {packed.format} {list(packed.shape)}, {part.name}: {error}"
        return None

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        """The parts, each moved. ValueError: a format, a size, or a value that the layout does not take."""
        if (reason := self.refuses(packed)) is not None:
            raise ValueError(reason)
        self.check(packed)
        tensors = self.constants(packed)
        for part, tensor in zip(packed.format.parts, packed.parts, strict=True):
            for move in self.moves(part, packed.shape):
                tensor = move.forward(tensor)
            tensors[self.name_of(part)] = tensor
        return tensors

    def unpack(self, tensors: Mapping[str, Tensor], like: Packed) -> Packed:
        """The parts, each moved back. ValueError: a tensor is missing or not what `pack` makes of `like`."""
        if (reason := self.refuses(like)) is not None:
            raise ValueError(reason)
        parts = []
        for part, stored in zip(like.format.parts, like.parts, strict=True):
            stages = self._stages(part, stored, like.shape)
            tensor = taken(self, tensors, self.name_of(part), stages[-1])
            for move, stage in reversed(list(zip(self.moves(part, like.shape), stages, strict=False))):
                tensor = move.back(tensor, stage)
            parts.append(tensor)
        return Packed(like.format, like.shape, tuple(parts))

    def name_of(self, part: Part) -> str:
        """The name of a part's tensor in this layout."""
        return self.names.get(part.name, part.name)

    def _stages(self, part: Part, stored: Tensor, shape: torch.Size) -> list[Tensor]:
        """Shapes and dtypes on the way, as tensors without storage: the part's own first."""
        stages = [torch.empty(stored.shape, dtype=stored.dtype, device="meta")]
        for move in self.moves(part, shape):
            stages.append(move.forward(stages[-1]))
        return stages


def refused_format(layout: Layout, form: Format) -> str:
    """The words for a format that `layout` does not take."""
    return f"{layout.name} does not take {form}, only {', '.join(sorted(map(str, layout.formats)))}"


def taken(layout: Layout, tensors: Mapping[str, Tensor], name: str, expected: Tensor) -> Tensor:
    """The tensor `name`. ValueError: it is missing, or of another shape or dtype than `expected`."""
    if name not in tensors:
        raise ValueError(f"{layout.name} needs the tensor {name}; found {', '.join(tensors) or 'none'}")
    found = tensors[name]
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{layout.name}: {name} must be {expected.dtype} {list(expected.shape)}; "
            f"found {found.dtype} {list(found.shape)}"
        )
    return found


def must_divide(what: str, size: int, by: int) -> None:
    """ValueError unless `size` is a multiple of `by`."""
    if size % by:
        raise ValueError(f"{what}={size} must be a multiple of {by}")
