"""How a checkpoint stores projections: `Dialect` is the row, `Storage` what it says of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from moeserve.experts.dialects.store import DTYPES, CheckpointError, Entry, TensorStore
from moeserve.quant.format import WHOLE, Packed, Parts, Scheme
from moeserve.quant.formats.floats import FLOATS

Quantization = Mapping[str, Any] | None
"""The quantization part of a model's config; None where it has none."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor that a projection `[N, K]` (output rows, input columns) has in the file.

    `suffix` follows the projection's name: `experts.3.gate_proj.weight`, and for the stacked tensors of all
    experts `experts.gate_up_proj` for `weight`, `experts.gate_up_proj_scale_inv` for `weight_scale_inv`. One
    element covers `rows` x `columns` of the matrix (WHOLE: all of it).
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    rows: int = 1
    columns: int = 1
    scale: bool = False  # values must be finite and not negative

    def name(self, projection: str, *, stacked: bool) -> str:
        """The tensor's full name for a projection's, `stacked` when all experts stand in one tensor."""
        if not stacked:
            return f"{projection}.{self.suffix}"
        rest = self.suffix.removeprefix("weight").removeprefix("_")
        return f"{projection}_{rest}" if rest else projection


def bias_name(projection: str, *, stacked: bool) -> str:
    """The full name of a projection's bias."""
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

    def entry(self, tensor: StoredTensor) -> Entry:
        """What the header says of `tensor`.

        CheckpointError: it is missing, or its dtype or shape is another.
        """
        return self._checked(self._name(tensor), tensor.dtypes, self.expected(tensor))

    def bias_entry(self) -> Entry:
        """What the header says of the projection's bias, `[N]`. CheckpointError: as `entry`."""
        expected = (self.stack[1], self.shape[0]) if self.stack else (self.shape[0],)
        return self._checked(self.bias, tuple(FLOATS), expected)

    def _checked(self, name: str, dtypes: tuple[torch.dtype, ...], expected: tuple[int, ...]) -> Entry:
        if name not in self.store:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        entry = self.store.entries[name]
        if DTYPES.get(entry.dtype) not in dtypes:
            wanted = " or ".join(code for code, dtype in DTYPES.items() if dtype in dtypes)
            raise CheckpointError(f"tensor {name} must be {wanted}, found {entry.dtype}")
        if entry.shape != expected:
            raise CheckpointError(
                f"tensor {name} must have shape {list(expected)}, found {list(entry.shape)}"
            )
        return entry

    def nbytes(self, tensor: StoredTensor) -> int:
        """Bytes that `tensor` takes in the file for this expert, all rows and columns."""
        return self.entry(tensor).nbytes // (self.stack[1] if self.stack else 1)

    def read(self, tensor: StoredTensor) -> Tensor:
        """The wanted part of `tensor`, `[rows, columns]` in its own units."""
        self.entry(tensor)
        wanted = (_units(self.rows, tensor.rows), _units(self.columns, tensor.columns))
        index = wanted[::-1] if self.transposed else wanted
        name = self._name(tensor)
        found = self.store.read(name, self.stack[0], *index) if self.stack else self.store.read(name, *index)
        if tensor.scale and not (found.isfinite() & (found >= 0)).all():
            worst = found[~(found.isfinite() & (found >= 0))].float().flatten()[0].item()
            raise CheckpointError(f"scale {name} must be finite and not negative, found {worst}")
        return found.mT if self.transposed else found

    def read_bias(self) -> Tensor:
        """The wanted rows of the projection's bias, float32 [rows]."""
        self.bias_entry()
        lead = (self.stack[0],) if self.stack else ()
        return self.store.read(self.bias, *lead, self.rows).float()

    @property
    def bias(self) -> str:
        """Name of the projection's bias."""
        return bias_name(self.projection, stacked=self.stack is not None)

    @property
    def bias_nbytes(self) -> int:
        """Bytes that the bias takes in the file for this expert, all rows."""
        return self.bias_entry().nbytes // (self.stack[1] if self.stack else 1)

    def expected(self, tensor: StoredTensor) -> tuple[int, ...]:
        """The shape that `tensor` has in the file."""
        sizes = (_count(self.shape[0], tensor.rows), _count(self.shape[1], tensor.columns))
        sizes = sizes[::-1] if self.transposed else sizes
        return (self.stack[1], *sizes) if self.stack else sizes

    def _name(self, tensor: StoredTensor) -> str:
        return tensor.name(self.projection, stacked=self.stack is not None)


def _count(size: int, span: int) -> int:
    return 1 if span == WHOLE else ceil(size / span)


def _units(wanted: slice, span: int) -> slice:
    return slice(0, 1) if span == WHOLE else slice(wanted.start // span, ceil(wanted.stop / span))


def as_stored(tensors: Sequence[Tensor]) -> Parts:
    """The tensors are the format's parts already; scales become float32, which loses nothing."""
    return (tensors[0], *(scale.float() for scale in tensors[1:]))


@dataclass(frozen=True)
class Storage:
    """How a layer's experts are stored: a projection's tensors, and how they become parts of a `Packed`.

    `join` makes one matrix of gate [I, K] and up [I, K]; None: the rows of up follow those of gate, part by
    part, which cannot be where a part has one element for all rows (ValueError).
    """

    scheme: Scheme
    tensors: tuple[StoredTensor, ...]
    parts: Callable[[Sequence[Tensor]], Parts] = as_stored
    join: Callable[[Packed, Packed], Packed] | None = None

    def __post_init__(self) -> None:
        shared = [part.name for part in self.scheme.weights.parts if part.rows == WHOLE]
        if shared and self.join is None:
            raise ValueError(
                f"{self.scheme.weights} has {shared[0]} for all rows at once, so it needs a join"
            )

    def read(self, matrix: StoredMatrix) -> Packed:
        """The wanted part of `matrix`, `[rows, columns]`."""
        shape = torch.Size((matrix.rows.stop - matrix.rows.start, matrix.columns.stop - matrix.columns.start))
        return Packed(
            self.scheme.weights, shape, self.parts([matrix.read(tensor) for tensor in self.tensors])
        )


def _never(_: Mapping[str, Any], __: str) -> bool:
    return False


@dataclass(frozen=True)
class Dialect:
    """One way in which checkpoints store the experts' projections, whatever the model family calls them.

    `storage` is given the quantization config and the model's dtype; it raises CheckpointError for a setting
    that no release of the producer means, or that is not supported. `skips` tells whether the config leaves
    the experts module of that name unquantized.
    """

    name: str
    reads: str  # what it claims, in the words of the config
    claims: Callable[[Quantization], bool]
    storage: Callable[[Quantization, torch.dtype], Storage]
    skips: Callable[[Mapping[str, Any], str], bool] = _never
