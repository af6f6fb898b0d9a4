"""Slices of an expert with activation order: they are cut along I between groups of `down`.

Groups of `down` are spread over all of I, so consecutive columns belong to many groups. The columns of `down`
are sorted by group (stable) and then cut. The rows of gate and up are put in the same order, since they
compute those columns. The outputs of the slices add up to the expert's in any order of I.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import StoredMatrix, StoredTensor
from moeserve.quant.act_order import in_order
from moeserve.quant.format import WHOLE, Packed


def read_order(matrix: StoredMatrix, tensor: StoredTensor, groups: int) -> Tensor:
    """Reads the group of each column, int32 `[1, K]`. Raises CheckpointError for an unknown group."""
    order = matrix.read(tensor)
    if (wrong := order[(order < 0) | (order >= groups)]).numel():
        raise CheckpointError(
            f"{matrix.name(tensor)} holds the group {wrong[0].item()}, and there are {groups}"
        )
    return order


def cut(gate_up: Sequence[Packed], down: Packed, inner: slice) -> tuple[list[Packed], Packed]:
    """Returns the slice `inner` of an expert, in its formats: gate and up `[inner, H]`, down `[H, inner]`.

    Raises CheckpointError where the groups of `down` differ in size.
    """
    group = int(down.format.parts[1].columns)
    try:
        ordered, places = in_order(down)
    except ValueError as error:
        raise CheckpointError(f"down cannot be sliced: {error}") from error
    units = places[inner]
    size = inner.stop - inner.start
    pieces = []
    for part, tensor in zip(ordered.format.parts, ordered.parts, strict=True):
        start, stop = int(inner.start // part.columns), int(inner.stop // part.columns)
        pieces.append(tensor[:, start:stop].contiguous())
    order = torch.arange(size, dtype=torch.int32)[None] // group
    halves = [
        Packed(
            half.format,
            torch.Size((size, half.shape[1])),
            tuple(
                tensor if part.rows == WHOLE else tensor[units]
                for part, tensor in zip(half.format.parts, half.parts, strict=True)
            ),
        )
        for half in gate_up
    ]
    return halves, Packed(down.format, torch.Size((down.shape[0], size)), (*pieces, order))
