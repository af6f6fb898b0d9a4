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
    if spec.seat not in spec.members.seats:
        raise ValueError(f"seat={spec.seat} is vacant; members have the seats {list(spec.members.seats)}")
    if not 0 <= spec.slots_here <= spec.slots:
        raise ValueError(f"held={spec.held} must lie between 0 and an owner's slot numbers, {spec.slots}")
    if spec.row_align < 1:
        raise ValueError(f"row_align={spec.row_align} must be at least 1")


def check_equal(spec: DispatchSpec, dispatcher: str) -> None:
    """Raises ValueError unless every member is a rank: lane and owner by one number, with all its slots."""
    if not spec.members.equal:
        lanes = sum(member.lane is not None for member in spec.members.present)
        owners = sum(member.owner is not None for member in spec.members.present)
        raise ValueError(
            f"dispatcher {dispatcher} joins ranks that each bring rows and hold experts, and no room for "
            f"others; here are {lanes} lanes and {owners} owners in {spec.ranks} members, with room for "
            f"{spec.members.max_lanes} and {spec.members.max_owners}; use all2allv or allgather_reducescatter"
        )
    if spec.slots_here != spec.slots:
        raise ValueError(
            f"dispatcher {dispatcher} joins ranks with as many slots each; "
            f"rank {spec.rank} holds {spec.slots_here} of {spec.slots}"
        )


def check_lane(spec: DispatchSpec, hidden: Tensor, routing: Routing) -> None:
    """Raises ValueError, before any collective, when a lane's rows are not what header and `spec` say."""
    rows = routing.lane_rows
    if len(rows) != spec.members.max_lanes:
        raise ValueError(
            f"lane_rows {list(rows)} must hold one count for each of {spec.members.max_lanes} lanes"
        )
    if min(rows) < 0 or max(rows) > spec.lane_rows:
        raise ValueError(f"lane_rows {list(rows)} must lie between 0 and a lane's capacity, {spec.lane_rows}")
    own = spec.own_rows(rows)
    expected: tuple[tuple[str, Tensor, list[int], torch.dtype], ...] = (
        ("hidden", hidden, [own, spec.hidden], spec.dtype),
        ("slots", routing.slots, [own, spec.top_k], torch.int32),
        ("weights", routing.weights, [own, spec.top_k], torch.float32),
    )
    for name, tensor, shape, dtype in expected:
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} of seat {spec.seat} must be {dtype} {shape} (the step's header says {own} rows); "
                f"found {tensor.dtype} {list(tensor.shape)}"
            )


def local_slots(spec: DispatchSpec, slots: Tensor) -> Tensor:
    """Global `slots [R, K]` in this member's own numbering, 0 to e - 1; EMPTY where the slot is another's.

    When experts are sliced every owner holds a slice of every slot, and both numberings are one; so they are
    where there is one owner, which has all.
    """
    whole = spec.ranks == 1 and spec.first_slot == 0 and spec.slots_here == spec.slots
    if spec.sliced or whole:
        return slots
    local = slots - spec.first_slot
    return torch.where((local >= 0) & (local < spec.slots_here), local, EMPTY)
