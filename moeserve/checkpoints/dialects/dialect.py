"""How checkpoints store projections: `Dialect` is one convention, `Storage` what it says of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import SCALAR, StoredMatrix, StoredTensor
from moeserve.quant.format import WHOLE, Packed, Parts, Scheme

Quantization = Mapping[str, Any] | None
"""The quantization part of a model's config; None where it has none."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class StaticScale:
    """The static activation scale of a projection: one number that the checkpoint stores for its inputs.

    A layer is served with one value, the largest over its experts and over gate and up. Rows can then be
    rounded before it is known which experts they go to.
    """

    suffix: str
    reciprocal: bool = False  # stored as the factor that quantizes
    tolerance: float | None = None  # most that gate and up of an expert may differ by; None: any difference

    @property
    def tensor(self) -> StoredTensor:
        """The tensor of the file that holds the scale."""
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return StoredTensor(self.suffix, floats, rows=WHOLE, columns=WHOLE, axes=SCALAR, scale=True)


@dataclass(frozen=True)
class Storage:
    """How a layer's experts are stored: a projection's tensors, and how they become parts of a `Packed`.

    `parts` reads the wanted part of a matrix. Where it is None, the first tensors are the format's parts in
    order, cast to the parts' dtypes. Gate and up of an expert become one matrix
    with the rows of up after those of gate. They share a tensor that has one element for all rows (`shared`).
    Raises ValueError for a format with such a part whose tensors share none.
    """

    scheme: Scheme
    tensors: tuple[StoredTensor, ...]
    parts: Callable[[StoredMatrix], Parts] | None = None
    static: StaticScale | None = None
    turns: bool = True  # stacked tensors may stand as [E, K, N]
    act_order: bool = False  # slices along I are cut in the order of the groups
    uneven: Storage | None = None  # the storage to use where gate does not fill its blocks of rows

    def __post_init__(self) -> None:
        whole = [part.name for part in self.scheme.weights.parts if part.rows == WHOLE]
        if whole and not any(tensor.shared for tensor in self.tensors):
            raise ValueError(
                f"{self.scheme.weights} has {whole[0]} for all rows at once, so a tensor must be shared"
            )

    def fitting(self, inner: int) -> Storage:
        """The storage for an I of `inner`: `uneven` where the rows of up would start within a block."""
        rows = max(part.rows for part in self.scheme.weights.parts)
        return self if self.uneven is None or inner % rows == 0 else self.uneven

    @property
    def everything(self) -> tuple[StoredTensor, ...]:
        """Every tensor that a projection may have, its static scale included."""
        return self.tensors + ((self.static.tensor,) if self.static else ())

    def read(self, matrix: StoredMatrix) -> Packed:
        """Reads the wanted part of `matrix`, `[rows, columns]`. Raises CheckpointError."""
        form = self.scheme.weights
        if self.parts is not None:
            return Packed(form, matrix.size, self.parts(matrix))
        pairs = zip(form.parts, self.tensors, strict=False)
        return Packed(form, matrix.size, tuple(_held(matrix, t, part.dtype) for part, t in pairs))


def _held(matrix: StoredMatrix, tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Reads `tensor` as `dtype`. Raises CheckpointError for values that are beyond float16's range."""
    found = matrix.read(tensor)
    held = cast(found, dtype)
    narrowed = dtype == torch.float16 and found.is_floating_point() and found.dtype != dtype
    if narrowed and (beyond := found[held.isinf() & found.isfinite()]).numel():
        raise CheckpointError(
            f"tensor {matrix.name(tensor)} has values beyond float16, as {beyond[0].item():g}: "
            f"set dtype in config.json to bfloat16"
        )
    return held


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts `tensor` to a part's dtype: bytes keep their bits, other floats are rounded."""
    if tensor.dtype == dtype:
        return tensor
    bytes_ = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
    return tensor.contiguous().view(dtype) if tensor.dtype in bytes_ and dtype in bytes_ else tensor.to(dtype)


def _never(_: Settings, __: LayerNames) -> bool:
    return False


@dataclass(frozen=True)
class Dialect:
    """One way in which checkpoints store the experts' projections, whatever the model family calls them.

    `storage` is given the quantization config, the model's dtype and the layer's names as the file spells
    them; it raises CheckpointError for a setting that no release of the producer means, or that is not
    supported. `skips` tells whether the config leaves the layer's experts unquantized.
    """

    name: str
    reads: str  # the settings that it claims, in the words of the config
    claims: Callable[[Quantization], bool]
    storage: Callable[[Settings, torch.dtype, LayerNames], Storage]
    skips: Callable[[Settings, LayerNames], bool] = _never
