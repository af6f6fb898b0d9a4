"""What callers' GPUs may take of a rank's device memory at most, about: from sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from moeserve.device.machine import Machine
from moeserve.dispatch.mail.layout import ROUNDED, why_not_rounded
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.quant.formats import FP8_GROUP
from moeserve.runtime.planning.layers import first_epoch
from moeserve.runtime.planning.memory import step_bytes
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.sections import BalanceConfig, PassesConfig
from moeserve.runtime.served import Served

GRAPH_STEP_BYTES = 128 << 10
"""Of device memory that CUDA keeps for a recorded step, beside what the step works in: an allowance for some
15 launches of 8 KiB each. A test on a GPU compares it with what recording takes there.
"""

BESIDE_STEP_BYTES = 384 << 10
"""The same of a step beside the short track, whose two GEMMs may be `steps.MOST_PIECES` launches each."""

ROOMS = 2
"""Rows of steps that one memory has room for: those of the next one are taken while a step ends."""

GROWN = 2
"""What is made anew for sizes that double takes twice what the largest size takes, at most."""


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one rank's GPU."""

    mailboxes: int  # of all lanes: `passes.lanes` of `passes.lane_bytes`, of which callers hold a part
    rooms: int  # where rows of a track's steps lie, of two of own lanes and of one of other members'
    pool: int  # what recorded steps of each track work in, one after the other
    graphs: int  # what CUDA keeps of `passes.graph_steps` recorded steps


def rows_wire(plans: Iterable[Plan], rows: int) -> str:
    """In which rows of steps of up to so many may come from callers' GPUs, so that answers have the bits that
    they have without; empty: as they are. It is the wire of all layers, where rows that were rounded to it
    once are not changed when they are rounded again.
    """
    for plan in plans:
        if not _can_be_rounded(plan):
            return ""
        for span in plan.dispatchers:
            if span.wire != FP8_GROUP:
                return ""
            if span.up_to >= rows:
                break
    return ROUNDED


def may_be_rounded(plans: Iterable[Plan]) -> bool:
    """Whether rows may come rounded, whichever of the dispatchers that fit are chosen in the end."""
    return all(
        _can_be_rounded(plan) and any(span.wire == FP8_GROUP for span in plan.fitting) for plan in plans
    )


def _can_be_rounded(plan: Plan) -> bool:
    (rows_are,) = plan.problem.model_format.parts
    return not why_not_rounded(plan.problem.shape.hidden, rows_are.dtype, ROUNDED)


def pass_bytes(
    served: Served, plans: Mapping[int, Plan], machine: Machine, balance: BalanceConfig, passes: PassesConfig
) -> PassBytes | None:
    """What callers' GPUs take at most; None where there are none: on a CPU, on a GPU of another maker, and
    without device lanes.

    It grows with rows of a step, and not with callers beyond their mailboxes: graphs and rooms are shared by
    all steps of a track, which short ones have for themselves (`passes.short_rows`).
    Raises ValueError where redundant experts do not divide over the ranks.
    """
    if not machine.arch.startswith("sm") or not passes.lanes:
        return None
    spans = [
        (plan, span)
        for plan in {id(plan): plan for plan in plans.values()}.values()
        for span in plan.dispatchers
    ]
    checkpoint, slots = served.checkpoint, _slots(served, balance)
    hidden, choice = checkpoint.hidden * served.dtype.itemsize, 8 * checkpoint.top_k
    row = hidden + choice + 4 * checkpoint.num_experts
    rounded = rows_wire(plans.values(), 1) and RowRecord(FP8_GROUP, checkpoint.hidden).nbytes
    in_lane = row - hidden + (rounded or hidden) + hidden  # the last: an answer
    most = max(1, min(served.lane_rows, passes.lane_bytes // in_lane))
    apart = served.mesh.ranks == 1 and all(plan.kernel.apart for plan in plans.values())
    tracks = [most] + [min(most, passes.short_rows)] * bool(apart and passes.short_rows)
    padded = sum(1 << (rows - 1).bit_length() for rows in tracks)
    steps = [
        max(
            (step_bytes(plan, replace(span, up_to=min(span.up_to, rows)), slots) for plan, span in spans),
            default=0,
        )
        for rows in tracks
    ]
    step_graph = BESIDE_STEP_BYTES if len(tracks) > 1 else GRAPH_STEP_BYTES
    recorded, others = bool(passes.graph_steps), hidden + choice + 1 if served.mesh.ranks > 1 else 0
    return PassBytes(
        passes.lanes * passes.lane_bytes,
        GROWN * padded * (ROOMS * (row + 1) + others),
        recorded * GROWN * sum(steps),
        passes.graph_steps * step_graph,
    )


def _slots(served: Served, balance: BalanceConfig) -> int:
    first = first_epoch(replace(served, redundant=balance.redundant_experts))
    return first.placement.slots_per_owner
