"""Slices of an expert with activation order: cut along I where the groups of `down` are, not its columns.

Groups of `down` are spread over all of I, so a run of columns has parts of every group. Its columns are
sorted by group (stable) and then cut; the rows of gate and up follow, since they make those columns. The
slices' outputs add up to the expert's whatever the order of I is.
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
    """Each column's group, int32 `[1, K]`. CheckpointError: a group that is not there."""
    order = matrix.read(tensor)
    if (wrong := order[(order < 0) | (order >= groups)]).numel():
        raise CheckpointError(
            f"{matrix.name(tensor)} holds the group {wrong[0].item()}, and there are {groups}"
        )
    return order


def cut(gate_up: Sequence[Packed], down: Packed, inner: slice) -> tuple[list[Packed], Packed]:
    """The slice `inner` of a whole expert: gate and up `[inner, H]`, down `[H, inner]`, formats unchanged.

    CheckpointError: groups of `down` that are not all of one size.
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
