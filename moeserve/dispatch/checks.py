"""What a lane may bring into a step, and which of the slots it names are this rank's."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.routing import Routing
from moeserve.experts.placement import EMPTY


def check_spec(spec: DispatchSpec) -> None:
    """Raises ValueError when no dispatcher can be built for `spec`."""
    if not spec.wire.row_wise:
        raise ValueError(f"wire {spec.wire}: its rows share a scale and cannot travel alone")
    if not 0 <= spec.rank < spec.ranks:
        raise ValueError(f"rank={spec.rank} must be one of {spec.ranks} ranks, counted from 0")
    if spec.row_align < 1:
        raise ValueError(f"row_align={spec.row_align} must be at least 1")


def check_lane(spec: DispatchSpec, hidden: Tensor, routing: Routing) -> None:
    """Raises ValueError, before any collective, when a lane's rows are not what header and `spec` say."""
    rows = routing.lane_rows
    if len(rows) != spec.ranks:
        raise ValueError(f"lane_rows {list(rows)} must hold one count for each of {spec.ranks} ranks")
    if min(rows) < 0 or max(rows) > spec.lane_rows:
        raise ValueError(f"lane_rows {list(rows)} must lie between 0 and a lane's capacity, {spec.lane_rows}")
    own = rows[spec.rank]
    expected: tuple[tuple[str, Tensor, list[int], torch.dtype], ...] = (
        ("hidden", hidden, [own, spec.hidden], spec.dtype),
        ("slots", routing.slots, [own, spec.top_k], torch.int32),
        ("weights", routing.weights, [own, spec.top_k], torch.float32),
    )
    for name, tensor, shape, dtype in expected:
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} of rank {spec.rank} must be {dtype} {shape} (the step's header says {own} rows); "
                f"found {tensor.dtype} {list(tensor.shape)}"
            )


def local_slots(spec: DispatchSpec, slots: Tensor) -> Tensor:
    """Global `slots [R, K]` in this rank's own numbering, 0 to e - 1; EMPTY where the slot is another rank's.

    When experts are sliced every rank holds a slice of every slot, and both numberings are one.
    """
    if spec.sliced:
        return slots
    local = slots - spec.rank * spec.slots
    return torch.where((local >= 0) & (local < spec.slots), local, EMPTY)
