"""What adapters of other libraries share: rows as a library takes and gives them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import row_bytes
from moeserve.experts.placement import EMPTY
from moeserve.quant.format import Packed


def presented(hidden: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, slots and weights of a lane with at least one row, for libraries that cannot take none.

    An empty lane presents one row of zeros that chooses nothing. Weights of places that choose nothing are 0,
    whatever was given.
    """
    slots = routing.slots
    weights = routing.weights.masked_fill(slots < 0, 0.0)
    if hidden.shape[0]:
        return hidden.contiguous(), slots, weights
    grow = (0, 0, 0, 1)
    return F.pad(hidden, grow), F.pad(slots, grow, value=EMPTY), F.pad(weights, grow)


def widened(table: Tensor, columns: int) -> Tensor:
    """`table [R, C]` with zeros up to `columns`, contiguous, of any dtype."""
    extra = (columns - table.shape[1]) * table.dtype.itemsize
    if not extra:
        return table.contiguous()
    return F.pad(row_bytes(table), (0, extra)).view(table.dtype)


def cropped(table: Tensor, columns: int) -> Tensor:
    """The first `columns` of every row of `table [..., C]`, as a view."""
    return table if table.shape[-1] == columns else table[..., :columns]


def parts_travelling(packed: Packed, hidden: int) -> tuple[Tensor, ...]:
    """The parts of `packed [T, H]` for a row of `hidden` elements: every part grows as the codes do."""
    wide = packed.shape[0], hidden
    return tuple(
        widened(tensor, part.shape_of(wide)[1])
        for part, tensor in zip(packed.format.parts, packed.parts, strict=True)
    )


def parts_arrived(parts: tuple[Tensor, ...], like: DispatchSpec) -> tuple[Tensor, ...]:
    """Parts of arrived rows without what was added for travelling."""
    shape = (1, like.hidden)
    return tuple(
        cropped(tensor, part.shape_of(shape)[1]) for part, tensor in zip(like.wire.parts, parts, strict=True)
    )


def only_first(count: Tensor, slots: Tensor) -> Tensor:
    """Slots of the first `count` rows of `slots [..., R, K]`, EMPTY after them, as `[all rows, K]`.

    `count [..., 1]` is a tensor on the device, one number for each leading place.
    """
    rows = torch.arange(slots.shape[-2], device=slots.device)
    came = rows < count  # [..., R]
    return slots.masked_fill(~came[..., None], EMPTY).view(-1, slots.shape[-1])
