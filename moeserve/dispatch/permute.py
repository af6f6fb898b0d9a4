"""Grouping rows by slot on arrival, and weighing the experts' outputs back into one row each for home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.device.machine import kernels_serve
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.wire import row_bytes
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.quant.format import Packed

MOST_SLOTS = 1024
"""Most slots of a rank that the GPU kernels serve: their programs keep all counts in registers."""


@dataclass(frozen=True, eq=False)
class Homes:
    """The place of each choice of the arrived rows in the batch, and the weight of its output.

    With `starts`, places and weights are flat, `[P]` for the P choices that are here, row by row, and row i
    begins at `starts[i]`. Without, they are `[R, K]`, and a choice that is not here has the place
    `capacity - 1`, a row that no slot owns.
    """

    places: Tensor  # int64
    weights: Tensor  # float32
    starts: Tensor | None  # [R] int64
    rows: int  # R
    capacity: int  # rows of the batch


def row_capacity(rows: int, top_k: int, slots: int, row_align: int) -> int:
    """Most rows of a batch made of `rows` arrived rows, known without reading a count.

    A row goes to a slot at most once (repeated choices are merged before dispatch), so it has at most
    min(top_k, slots) copies; each slot in use may waste row_align - 1 rows. The last row, where there
    are any, is spare: no slot ever owns it.
    """
    if rows == 0:
        return 0
    copies = rows * min(top_k, slots)
    bound = copies + min(slots, copies) * (row_align - 1) + 1
    return -(-bound // row_align) * row_align


def group_rows(
    tokens: Packed, slots: Tensor, weights: Tensor, spec: tuple[int, int]
) -> tuple[ExpertBatch, Homes]:
    """Copies rows into one RAGGED batch in slot order, rows of a slot in order of arrival.

    `tokens [R, H]`, `slots [R, K]` int32 of this rank (EMPTY: not here), `weights [R, K]` float32 (ignored
    where not here), `spec` is (e, row_align). Sizes are exact on the CPU; on a GPU nothing is read on
    the host and the batch has `row_capacity` rows.
    """
    if kernels_serve(slots.device) and 0 < spec[0] <= MOST_SLOTS and slots.shape[0]:
        return _grouped_by_kernels(tokens, slots, weights, spec)
    grouped = _grouped_on_host if slots.is_cpu else _grouped_by_operations
    return grouped(tokens, slots, weights, spec)


def _grouped_by_operations(
    tokens: Packed, slots: Tensor, weights: Tensor, spec: tuple[int, int]
) -> tuple[ExpertBatch, Homes]:
    """`group_rows` by torch's operations, on any device, without reading anything on the host."""
    experts, row_align = spec
    rows, top_k = slots.shape
    here = slots >= 0
    keys = torch.where(here, slots, experts).flatten().long()  # [R * K]; `experts`: not here
    ordered, order = torch.sort(keys, stable=True)
    counts = keys.new_zeros(experts + 1).scatter_add_(0, keys, torch.ones_like(keys))[:experts]
    offsets = keys.new_zeros(experts + 1)
    torch.cumsum((counts + row_align - 1) // row_align * row_align, 0, out=offsets[1:])
    capacity = row_capacity(rows, top_k, experts, row_align)

    shift = F.pad(offsets[:-1] - (counts.cumsum(0) - counts), (0, 1))
    place = torch.arange(rows * top_k, device=slots.device) + shift[ordered]
    place = torch.where(ordered < experts, place, capacity - 1)
    source = keys.new_zeros(capacity).scatter_(0, place, order // max(top_k, 1))
    places = torch.empty_like(place).scatter_(0, order, place).view(rows, top_k)

    batch = ExpertBatch(
        tokens.with_parts([take_rows(part, source) for part in tokens.parts]),
        Grouping.RAGGED,
        counts.int(),
        offsets.int(),
    )
    return batch, Homes(places, torch.where(here, weights, 0.0), None, rows, capacity)


def _grouped_on_host(
    tokens: Packed, slots: Tensor, weights: Tensor, spec: tuple[int, int]
) -> tuple[ExpertBatch, Homes]:
    """`group_rows` by NumPy, whose operations on few rows take a fraction of torch's time."""
    experts, row_align = spec
    rows, top_k = slots.shape
    here = slots.numpy() >= 0
    chosen = np.flatnonzero(here)
    keys = slots.numpy().reshape(-1)[chosen]
    order = np.argsort(keys.astype(np.uint16) if experts < 1 << 16 else keys, kind="stable")
    counts = np.bincount(keys, minlength=experts)
    offsets = np.zeros(experts + 1, dtype=np.int64)
    np.cumsum((counts + row_align - 1) // row_align * row_align, out=offsets[1:])
    place = np.arange(len(keys)) + np.repeat(offsets[:-1] - (counts.cumsum() - counts), counts)
    capacity = int(offsets[-1])
    source = np.zeros(capacity, dtype=np.int64)  # rows that only align a slot copy the first
    source[place] = chosen[order] // max(top_k, 1)
    places = np.empty_like(place)
    places[order] = place
    taken = here.sum(axis=1)

    index = torch.from_numpy(source)
    batch = ExpertBatch(
        tokens.with_parts([take_rows(part, index) for part in tokens.parts]),
        Grouping.RAGGED,
        torch.from_numpy(counts.astype(np.int32)),
        torch.from_numpy(offsets.astype(np.int32)),
    )
    kept, starts = torch.from_numpy(weights.numpy()[here]), torch.from_numpy(taken.cumsum() - taken)
    return batch, Homes(torch.from_numpy(places), kept, starts, rows, capacity)


def no_rows(spec: DispatchSpec) -> tuple[ExpertBatch, Homes]:
    """The batch of a step that brings nothing here. Making it launches work, so it is made once and kept."""
    none = torch.zeros(0, dtype=torch.int64, device=spec.device)
    counts = torch.zeros(spec.slots_here, dtype=torch.int32, device=spec.device)
    offsets = torch.zeros(spec.slots_here + 1, dtype=torch.int32, device=spec.device)
    tokens = spec.wire.empty((0, spec.hidden), spec.device)
    homes = Homes(none, none.float(), none, 0, 0)
    return ExpertBatch(tokens, Grouping.RAGGED, counts, offsets), homes


def _grouped_by_kernels(
    tokens: Packed, slots: Tensor, weights: Tensor, spec: tuple[int, int]
) -> tuple[ExpertBatch, Homes]:
    from moeserve.dispatch.row_kernels import place, spread

    experts, row_align = spec
    rows, top_k = slots.shape
    capacity = row_capacity(rows, top_k, experts, row_align)
    counts, offsets, places = place(slots.contiguous(), experts, row_align, capacity)  # type: ignore[no-untyped-call]
    parts = [spread(_words(part), places, capacity).view(part.dtype) for part in tokens.parts]  # type: ignore[no-untyped-call]
    batch = ExpertBatch(tokens.with_parts(parts), Grouping.RAGGED, counts, offsets)
    return batch, Homes(places, weights.contiguous(), None, rows, capacity)


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows `index [N]` of `table [R, C]`, of any dtype and strides, as a new contiguous `[N, C]`."""
    return _words(table).index_select(0, index).view(table.dtype)


def _words(table: Tensor) -> Tensor:
    """`table [R, C]` as the widest integers that its rows and their stride are made of."""
    raw = table.view(torch.uint8) if table.stride(1) == 1 else row_bytes(table)
    for word in (torch.int64, torch.int32, torch.int16):
        if all(size % word.itemsize == 0 for size in (raw.shape[1], raw.stride(0), raw.storage_offset())):
            return raw.view(word)
    return raw


def weigh_rows(
    outputs: Tensor, homes: Homes, dtype: torch.dtype = torch.float32, place: Tensor | None = None
) -> Tensor:
    """Weighted sum over the choices of each arrived row, in order of choice: `[R, H]`, rounded to `dtype`.

    `outputs [capacity, H]` as the kernel made them; rows that no slot owns enter no sum, even NaN. A row
    with no choice here is zero. Sums are float32, and nothing is added by atomics: the bits repeat.
    place: `[R, H]` of `dtype`, where they are written instead of memory of their own. Raises ValueError for
    another row count.
    """
    if outputs.shape[0] != homes.capacity:
        raise ValueError(f"outputs have {outputs.shape[0]} rows; the dispatched batch has {homes.capacity}")
    if homes.rows == 0 or homes.capacity == 0:
        sums = torch.zeros((homes.rows, outputs.shape[1]), device=outputs.device)
        return rounded(sums, dtype, place)
    if kernels_serve(outputs.device):
        from moeserve.dispatch.row_kernels import weigh

        summed: Tensor = weigh(outputs.contiguous(), homes.places, homes.weights, dtype)  # type: ignore[no-untyped-call]
        return summed if place is None else place.copy_(summed)
    sums = F.embedding_bag(
        homes.places,
        outputs.float(),
        homes.starts,
        mode="sum",
        per_sample_weights=homes.weights,
        padding_idx=None if homes.starts is not None else homes.capacity - 1,
    )
    return rounded(sums, dtype, place)


def rounded(sums: Tensor, dtype: torch.dtype, place: Tensor | None) -> Tensor:
    """`sums` in `dtype`, at `place` where that is given."""
    return sums.to(dtype) if place is None else place.copy_(sums)
