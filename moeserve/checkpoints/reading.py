"""Reads one expert, or a slice of it, into canonical weights: gate and up become one matrix."""

from __future__ import annotations

import torch

from moeserve.checkpoints import load_as
from moeserve.checkpoints.dialects import act_order
from moeserve.checkpoints.dialects.dialect import Storage
from moeserve.checkpoints.layer import ExpertMatrices, StoredLayer
from moeserve.checkpoints.store import CheckpointError
from moeserve.experts.activation import halves
from moeserve.experts.batch import ExpertWeights
from moeserve.quant.format import WHOLE, Format, Packed


def copy_expert(
    stored: StoredLayer, expert: int, inner: slice, weights: ExpertWeights, position: int
) -> None:
    """Reads `expert`, cut to `inner`, into entry `position` of `weights`.

    The down bias goes with the slice that starts at 0. Raises CheckpointError for a file that cannot be read,
    a scale that is not finite or negative, and a scale that gate and up should share and do not.
    """
    storage = stored.storage
    matrices = stored.expert(expert, inner)
    whole = stored.expert(expert, slice(0, stored.inner))
    form = stored.scheme.weights
    if not load_as.keeps(storage.scheme.weights, form):
        gate_up, down = _loaded_as(form, _gate_up(storage, whole), storage.read(whole.down), inner)
    elif storage.act_order and inner != slice(0, stored.inner):
        gate_up, down = act_order.cut(_gate_up(storage, whole), storage.read(whole.down), inner)
    else:
        gate_up, down = _gate_up(storage, matrices), storage.read(matrices.down)
    _copy(gate_up, weights.gate_up, position)
    _copy([down], weights.down, position)
    _copy_biases(matrices, weights, position, first=inner.start == 0)


def _loaded_as(
    form: Format, gate_up: list[Packed], down: Packed, inner: slice
) -> tuple[list[Packed], Packed]:
    """Encodes a whole expert in another format and returns its slice `inner`, with scales of the whole."""
    both, last = load_as.requantized(gate_up, down, form)
    hidden, size = slice(0, down.shape[0]), down.shape[1]
    up = slice(size + inner.start, size + inner.stop)
    return [load_as.cut(both, rows, hidden) for rows in (inner, up)], load_as.cut(last, hidden, inner)


def _gate_up(storage: Storage, matrices: ExpertMatrices) -> list[Packed]:
    """Reads gate and up as two matrices, or up alone of experts without a gate."""
    packed = [storage.read(matrix) for matrix in matrices.gate_up]
    if len(packed) == 1 and not matrices.interleaved:  # experts without a gate
        return packed
    if matrices.interleaved:
        return [_every_second(packed[0], first) for first in (0, 1)]
    for tensor in storage.tensors:
        if tensor.shared and (not tensor.optional or matrices.gate_up[0].has(tensor)):
            found = [matrix.read(tensor) for matrix in matrices.gate_up]
            if not torch.equal(*found):
                place = (found[0] != found[1]).flatten().nonzero()[0].item()
                listed = " and ".join(
                    f"{matrix.name(tensor)}={values.flatten()[int(place)].item():g}"
                    for matrix, values in zip(matrices.gate_up, found, strict=True)
                )
                raise CheckpointError(f"{listed} disagree; gate and up of an expert must have the same")
    return packed


def _every_second(packed: Packed, first: int) -> Packed:
    """Returns rows `first`, `first + 2`, ... of a matrix that interleaves gate and up rows."""
    if any(part.rows not in (1, WHOLE) for part in packed.format.parts):
        raise CheckpointError(
            f"interleaved gate and up rows share blocks of {packed.format}, which have no format of their own"
        )
    parts = tuple(
        tensor[first::2] if part.rows == 1 else tensor
        for part, tensor in zip(packed.format.parts, packed.parts, strict=True)
    )
    return Packed(packed.format, torch.Size((packed.shape[0] // 2, packed.shape[1])), parts)


def _copy(matrices: list[Packed], stack: Packed, position: int) -> None:
    """Writes matrices into `stack[position]`, the rows of one after those of the other."""
    row = 0
    for matrix in matrices:
        for part, tensor, place in zip(matrix.format.parts, matrix.parts, stack.parts, strict=True):
            first = 0 if part.rows == WHOLE else row // part.rows
            place[position, first : first + tensor.shape[0]] = tensor
        row += matrix.shape[0]


def _copy_biases(matrices: ExpertMatrices, weights: ExpertWeights, position: int, *, first: bool) -> None:
    """Reads the biases; the down bias belongs to the `first` slice, and is zero in the others."""
    if weights.gate_up_bias is None or weights.down_bias is None:
        return
    gate_up = torch.cat([matrix.read_bias() for matrix in matrices.gate_up])
    weights.gate_up_bias[position] = halves(gate_up) if matrices.interleaved else gate_up
    if first:
        weights.down_bias[position] = matrices.down.read_bias()
