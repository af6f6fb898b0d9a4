"""One projection as it lies in the file: `StoredTensor` describes its tensors, `StoredMatrix` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from moeserve.checkpoints.nearest import in_its_place
from moeserve.checkpoints.store import DTYPES, CheckpointError, Entry, TensorStore
from moeserve.quant.format import WHOLE
from moeserve.quant.formats.floats import FLOATS

Axes = tuple[str | int, ...]
"""Dimensions of a tensor in the file: "n" is output rows, "k" is input columns, a number is a size."""

MATRIX: tuple[Axes, ...] = (("n", "k"),)
INPUT_MAJOR: tuple[Axes, ...] = (("k", "n"),)
SCALAR: tuple[Axes, ...] = ((), (1,))
ROWS: tuple[Axes, ...] = (("n", "k"), ("n",))
COLUMNS: tuple[Axes, ...] = (("k",),)

E8M0_NAN = 255


@dataclass(frozen=True)
class StoredTensor:
    """One tensor that a projection `[N, K]` (output rows, input columns) has in the file.

    `suffix` follows the projection's name: `experts.3.gate_proj.weight`, and for the stacked tensors of all
    experts `experts.gate_up_proj` for `weight`, `experts.gate_up_proj_scale_inv` for `weight_scale_inv`. One
    element covers `rows` x `columns` of the matrix (WHOLE: all of it). `axes` lists its dimensions in the
    file, the usual ones first; axes that lack "n" or "k" have one element along that side.
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    rows: int = 1
    columns: int | Fraction = 1
    axes: tuple[Axes, ...] = MATRIX
    scale: bool = False  # values must be finite and not negative
    optional: bool = False
    shared: bool = False  # gate and up of an expert must have the same values
    beside: bool = False  # one tensor for all experts and for gate and up; weights are apart

    def name(self, projection: str, *, stacked: bool) -> str:
        """Returns the full name of the tensor of a projection; `stacked`: one tensor holds all experts."""
        if not stacked:
            return f"{projection}.{self.suffix}"
        rest = self.suffix.removeprefix("weight").removeprefix("_")
        return f"{projection}_{rest}" if rest else projection


def bias_name(projection: str, *, stacked: bool) -> str:
    """Returns the full name of the bias of a projection; `stacked`: one tensor holds all experts."""
    return f"{projection}_bias" if stacked else f"{projection}.bias"


@dataclass(frozen=True)
class StoredMatrix:
    """One expert's projection as it lies in the file, and the part of it that is wanted."""

    store: TensorStore
    projection: str  # model.layers.0.mlp.experts.3.gate_proj, or model.layers.0.mlp.experts.gate_up_proj
    shape: tuple[int, int]  # [N, K] of the whole matrix, K last even where the file has it transposed
    rows: slice
    columns: slice
    stack: tuple[int, int] | None = None  # (expert, experts) where one tensor holds all experts
    transposed: bool = False  # the file holds [K, N]
    beside: StoredMatrix | None = None  # this matrix in the tensors that are `beside` the weights
    flat: bool = False  # experts follow each other along the first dimension, which they share

    @property
    def size(self) -> torch.Size:
        """Rows and columns of the wanted part."""
        return torch.Size((self.rows.stop - self.rows.start, self.columns.stop - self.columns.start))

    def holder(self, tensor: StoredTensor) -> StoredMatrix:
        """The matrix that `tensor` belongs to: that of the stack of all experts where it is `beside`."""
        return self.beside if tensor.beside and self.beside is not None else self

    def name(self, tensor: StoredTensor) -> str:
        """Returns the full name of `tensor` for this projection."""
        held = self.holder(tensor)
        return tensor.name(held.projection, stacked=held.stack is not None)

    def has(self, tensor: StoredTensor) -> bool:
        """Whether the file has `tensor`, which may be optional."""
        return self.name(tensor) in self.store

    def entry(self, tensor: StoredTensor) -> Entry:
        """Returns the header's entry of `tensor`.

        Raises CheckpointError if it is missing, or its dtype or shape is not as expected.
        """
        return self._checked(self.name(tensor), tensor.dtypes, self.holder(tensor).expected(tensor))

    def bias_entry(self) -> Entry:
        """Returns the header's entry of the bias, `[N]`. Raises CheckpointError as `entry` does."""
        expected = (self.stack[1], self.shape[0]) if self.stack else (self.shape[0],)
        return self._checked(self.bias, tuple(FLOATS), (expected,))

    def _checked(
        self, name: str, dtypes: tuple[torch.dtype, ...], expected: tuple[tuple[int, ...], ...]
    ) -> Entry:
        if name not in self.store:
            raise CheckpointError(
                f"tensor {name} is missing from the checkpoint{in_its_place(name, self.store.entries)}"
            )
        entry = self.store.entries[name]
        if DTYPES.get(entry.dtype) not in dtypes:
            wanted = " or ".join(code for code, dtype in DTYPES.items() if dtype in dtypes)
            raise CheckpointError(f"tensor {name} must be {wanted}, found {entry.dtype}")
        if entry.shape not in expected:
            wanted = " or ".join(str(list(shape)) for shape in expected)
            raise CheckpointError(f"tensor {name} must have shape {wanted}, found {list(entry.shape)}")
        return entry

    def nbytes(self, tensor: StoredTensor) -> int:
        """Bytes of `tensor` in the file for the whole matrix; 0 where an optional one is missing."""
        if tensor.optional and not self.has(tensor):
            return 0
        held = self.holder(tensor)
        whole = self.entry(tensor).nbytes // (held.stack[1] if held.stack else 1)
        return whole * self.shape[0] // held.shape[0]

    def read(self, tensor: StoredTensor) -> Tensor:
        """Reads the wanted part of `tensor`: `[rows, columns]` in its units, then sizes that `axes` state.

        Raises CheckpointError as `entry` does, and for a scale that is not finite or is negative.
        """
        if (held := self.holder(tensor)) is not self:
            return held.read(tensor)
        shapes = self.expected(tensor)
        axes = self._axes(tensor)[shapes.index(self.entry(tensor).shape)]
        wanted = {"n": _units(self.rows, tensor.rows), "k": _units(self.columns, tensor.columns)}
        index = [wanted[axis] if isinstance(axis, str) else slice(None) for axis in axes]
        lead = (self.stack[0],) if self.stack and not self.flat else ()
        if self.flat and self.stack:
            before = self.stack[0] * self._counts(tensor)[axes[0]]
            index[0] = slice(index[0].start + before, index[0].stop + before)
        found = self.store.read(self.name(tensor), *lead, *index)
        if tensor.scale:
            self._check_scale(tensor, found)
        letters = [axis for axis in ("n", "k") if axis in axes]
        rest = [place for place, axis in enumerate(axes) if isinstance(axis, int)]
        order = [axes.index(axis) for axis in letters] + rest
        sizes = [found.shape[axes.index(axis)] if axis in letters else 1 for axis in ("n", "k")]
        sizes += [axis for axis in axes if isinstance(axis, int) and axis != 1]
        return found.permute(order).reshape(sizes)

    def _check_scale(self, tensor: StoredTensor, found: Tensor) -> None:
        name = self.name(tensor)
        if found.dtype in (torch.uint8, torch.float8_e8m0fnu):
            if (found.view(torch.uint8) == E8M0_NAN).any():
                raise CheckpointError(f"scale {name} must be a power of two, found the byte 255 (NaN)")
            return
        values = found.float()
        if not (sound := values.isfinite() & (values >= 0)).all():
            worst = values[~sound].flatten()[0].item()
            raise CheckpointError(f"scale {name} must be finite and not negative, found {worst}")

    def read_bias(self) -> Tensor:
        """Reads the wanted rows of the bias, float32 `[rows]`. Raises CheckpointError as `entry` does."""
        self.bias_entry()
        lead = (self.stack[0],) if self.stack else ()
        return self.store.read(self.bias, *lead, self.rows).float()

    @property
    def bias(self) -> str:
        """The full name of the projection's bias."""
        return bias_name(self.projection, stacked=self.stack is not None)

    @property
    def bias_nbytes(self) -> int:
        """Bytes that all rows of the bias take in the file for this expert."""
        return self.bias_entry().nbytes // (self.stack[1] if self.stack else 1)

    def expected(self, tensor: StoredTensor) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that `tensor` may have in the file."""
        counts = self._counts(tensor)
        shapes = [
            tuple(counts[axis] if isinstance(axis, str) else axis for axis in axes)
            for axes in self._axes(tensor)
        ]
        if self.stack is None:
            return tuple(shapes)
        if self.flat:
            return tuple((self.stack[1] * shape[0], *shape[1:]) for shape in shapes)
        return tuple((self.stack[1], *shape) for shape in shapes)

    def _axes(self, tensor: StoredTensor) -> tuple[Axes, ...]:
        """Returns the dimensions that `tensor` may have; they lack "n" or "k" only for one element."""
        counts = self._counts(tensor)
        several = {axis for axis in ("n", "k") if counts[axis] != 1}
        known = (axes for axes in tensor.axes if several <= set(axes))
        if not self.transposed:
            return tuple(known)
        return tuple(("k", "n") if axes == ("n", "k") else axes for axes in known)

    def _counts(self, tensor: StoredTensor) -> dict[str | int, int]:
        """Returns the elements of `tensor` along "n" and "k"."""
        return {"n": _count(self.shape[0], tensor.rows), "k": _count(self.shape[1], tensor.columns)}


def _count(size: int, span: int | Fraction) -> int:
    return 1 if span == WHOLE else -(-size * span.denominator // span.numerator)


def _units(wanted: slice, span: int | Fraction) -> slice:
    if span == WHOLE:
        return slice(0, 1)
    return slice(wanted.start * span.denominator // span.numerator, _count(wanted.stop, span))
