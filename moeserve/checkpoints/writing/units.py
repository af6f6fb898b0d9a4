"""Units of writing a checkpoint: one expert in its new format, or one tensor that is copied or decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.dialects.fp8_block import SCALES
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import DTYPES, CheckpointError, TensorStore
from moeserve.checkpoints.stored import bias_name
from moeserve.checkpoints.writing.shards import Declared
from moeserve.checkpoints.writing.targets import Target
from moeserve.quant.format import Packed
from moeserve.quant.formats.fp8 import FP8_BLOCK

PIECE_BYTES = 64 << 20
INVERSE_SCALE = "_scale_inv"


class Unit(Protocol):
    """A part of the new checkpoint that is made at once."""

    @property
    def declared(self) -> Mapping[str, Declared]:
        """The tensors of the unit, by their names in the new checkpoint."""

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and data of consecutive pieces of each tensor, in order."""


@dataclass(frozen=True)
class Copied:
    """A tensor that is copied."""

    store: TensorStore
    name: str

    @property
    def declared(self) -> Mapping[str, Declared]:
        """The one tensor, with the dtype and shape that the source declares."""
        entry = self.store.entries[self.name]
        return {self.name: Declared(DTYPES[entry.dtype], entry.shape)}

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensor in pieces of as many rows as fit."""
        entry = self.store.entries[self.name]
        if not entry.shape:
            yield self.name, self.store.read(self.name)
            return
        rows = max(1, PIECE_BYTES * entry.shape[0] // max(entry.nbytes, 1))
        for start in range(0, entry.shape[0], rows):
            yield self.name, self.store.read(self.name, slice(start, min(start + rows, entry.shape[0])))


@dataclass(frozen=True)
class Decoded:
    """A matrix in FP8 blocks that is decoded to the model's dtype.

    Raises CheckpointError for a matrix or a scale of another dtype or shape than blocks of 128x128 have.
    """

    store: TensorStore
    name: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        height, columns = self.store.entries[self.name].shape
        rows, across = FP8_BLOCK.block
        blocks = (-(-height // rows), -(-columns // across))
        for name, dtypes, shape in (
            (self.name, FP8_BLOCK.parts[0].dtype, (height, columns)),
            (self.scale, SCALES, blocks),
        ):
            entry, wanted = self.store.entries[name], (dtypes if isinstance(dtypes, tuple) else (dtypes,))
            if DTYPES[entry.dtype] not in wanted or entry.shape != shape:
                codes = " or ".join(code for code, dtype in DTYPES.items() if dtype in wanted)
                raise CheckpointError(
                    f"tensor {name} must be {codes} {list(shape)}, found {entry.dtype} {list(entry.shape)}: "
                    f"beside the experts only FP8 in {rows}x{across} blocks is decoded"
                )

    @property
    def scale(self) -> str:
        """The name of the tensor with a scale for each block."""
        return self.name + INVERSE_SCALE

    @property
    def declared(self) -> Mapping[str, Declared]:
        """The one tensor, of the same name and shape, in the model's dtype."""
        return {self.name: Declared(self.dtype, self.store.entries[self.name].shape)}

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensor in pieces of as many whole rows of blocks as fit.

        Raises CheckpointError for a scale that is not finite or is negative.
        """
        height, columns = self.store.entries[self.name].shape
        block = FP8_BLOCK.block[0]
        rows = max(1, PIECE_BYTES // (4 * block * max(columns, 1))) * block
        for start in range(0, height, rows):
            stop = min(start + rows, height)
            codes = self.store.read(self.name, slice(start, stop)).clone()
            scale = self.store.read(self.scale, slice(start // block, -(-stop // block))).float()
            if not (sound := scale.isfinite() & (scale >= 0)).all():
                worst = scale[~sound].flatten()[0].item()
                raise CheckpointError(f"scale {self.scale} must be finite and not negative, found {worst}")
            matrix = Packed(FP8_BLOCK, codes.shape, (codes, scale))
            yield self.name, matrix.dequantize().to(self.dtype)


@dataclass(frozen=True)
class Expert:
    """One expert in its new format."""

    source: Checkpoint
    target: Target
    names: LayerNames  # names in the new checkpoint, where each expert has tensors of its own
    layer: int
    expert: int
    declared: Mapping[str, Declared]

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor whole. Raises CheckpointError for a value of the source that is not finite."""
        weights = self.source.experts(self.layer, [self.expert])
        both, last = weights.gate_up.dequantize()[0], weights.down.dequantize()[0]
        for side, values in (("gate and up", both), ("down", last)):
            if not all(bound.isfinite() for bound in values.aminmax()):
                where = f"layer {self.layer}, expert {self.expert}: {side}"
                raise CheckpointError(f"{where} of {self.source.path} hold values that are not finite")
        yield from expert_tensors(self.target, self.names.projections(self.expert), both, last)
        if weights.gate_up_bias is None or weights.down_bias is None:
            return
        rows = (*weights.gate_up_bias[0].chunk(2), weights.down_bias[0])
        for projection, bias in zip(self.names.projections(self.expert), rows, strict=True):
            yield bias_name(projection, stacked=False), bias.to(self.source.dtype)


def expert_tensors(
    target: Target, projections: tuple[str, str, str], both: Tensor, last: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Encodes gate, up and down; gate and up are encoded as one matrix and share what the format shares."""
    packed, inner = target.form.quantize(both), both.shape[0] // 2
    columns = slice(0, both.shape[1])
    halves = (packed.cut(rows, columns) for rows in (slice(0, inner), slice(inner, 2 * inner)))
    for projection, matrix in zip(projections, (*halves, target.form.quantize(last)), strict=True):
        for suffix, tensor in target.tensors(matrix).items():
            yield f"{projection}.{suffix}", tensor
