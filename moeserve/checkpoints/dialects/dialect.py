"""How a checkpoint stores projections: `Dialect` is the row, `Storage` what it says of one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.stored import SCALAR, StoredMatrix, StoredTensor
from moeserve.quant.format import WHOLE, Packed, Parts, Scheme

Quantization = Mapping[str, Any] | None
"""The quantization part of a model's config; None where it has none."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class StaticScale:
    """The scale that a checkpoint gives the inputs of each projection, one number.

    One value serves a layer: the largest over its experts, and over gate and up, so that rows can be rounded
    before it is known which experts they go to.
    """

    suffix: str
    reciprocal: bool = False  # stored as the factor that quantizes
    tolerance: float | None = None  # how far gate and up of an expert may differ; None: as they like

    @property
    def tensor(self) -> StoredTensor:
        """The tensor that holds it."""
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return StoredTensor(self.suffix, floats, rows=WHOLE, columns=WHOLE, axes=SCALAR, scale=True)


@dataclass(frozen=True)
class Storage:
    """How a layer's experts are stored: a projection's tensors, and how they become parts of a `Packed`.

    `parts` reads what is wanted of a matrix; None: the first tensors are the format's parts in order, and
    casting them to the parts' dtypes loses nothing. Gate and up of an expert become one matrix, the rows of
    up after those of gate; a tensor with one element for all rows is `shared` by them.
    """

    scheme: Scheme
    tensors: tuple[StoredTensor, ...]
    parts: Callable[[StoredMatrix], Parts] | None = None
    static: StaticScale | None = None
    turns: bool = True  # stacked tensors may stand as [E, K, N]
    act_order: bool = False  # slices along I are cut in the order of the groups
    uneven: Storage | None = None  # in its place where gate and up do not fill their blocks of rows

    def __post_init__(self) -> None:
        whole = [part.name for part in self.scheme.weights.parts if part.rows == WHOLE]
        if whole and not any(tensor.shared for tensor in self.tensors):
            raise ValueError(
                f"{self.scheme.weights} has {whole[0]} for all rows at once, so a tensor must be shared"
            )

    def fitting(self, inner: int) -> Storage:
        """The storage of experts with I of `inner`: rows of up start within a block unless gate fills its."""
        rows = max(part.rows for part in self.scheme.weights.parts)
        return self if self.uneven is None or inner % rows == 0 else self.uneven

    @property
    def everything(self) -> tuple[StoredTensor, ...]:
        """All tensors that a projection may have, its static scale included."""
        return self.tensors + ((self.static.tensor,) if self.static else ())

    def read(self, matrix: StoredMatrix) -> Packed:
        """The wanted part of `matrix`, `[rows, columns]`."""
        form = self.scheme.weights
        if self.parts is not None:
            return Packed(form, matrix.size, self.parts(matrix))
        pairs = zip(form.parts, self.tensors, strict=False)
        return Packed(form, matrix.size, tuple(cast(matrix.read(t), part.dtype) for part, t in pairs))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in a part's dtype: bytes are read as they lie, narrower floats widened."""
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
    reads: str  # what it claims, in the words of the config
    claims: Callable[[Quantization], bool]
    storage: Callable[[Settings, torch.dtype, LayerNames], Storage]
    skips: Callable[[Settings, LayerNames], bool] = _never
