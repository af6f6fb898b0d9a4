"""What it takes to stand the loss of one owner, in slots and bytes: from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moeserve.experts.cover.slots import redundant_for
from moeserve.runtime.epoch import Epoch, shadows_of
from moeserve.runtime.planning.layers import first_epoch
from moeserve.runtime.planning.memory import expert_bytes
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.sections import BalanceConfig
from moeserve.runtime.served import Served


@dataclass(frozen=True)
class CoverBytes:
    """One way to stand a loss: redundant slots over all owners, and what they and shadows take of each.

    Slots are memory of the device, as weights are; shadows are memory of the host, of the owner that has
    most. Bytes are counted as `planned_bytes` counts weights.
    """

    redundant: int
    slot_nbytes: int
    shadow_nbytes: int


@dataclass(frozen=True)
class CoverPlan:
    """What is configured, and the two ways in which the loss of any one owner is covered."""

    configured: CoverBytes  # its shadows count where they are kept, or were
    missing: int  # redundant slots that a loss would need more; 0: the slots stand it
    by_replicas: CoverBytes  # a second replica of every expert: nothing is brought in
    by_shadows: CoverBytes  # the fewest slots, and what they lack in host memory


def cover_plan(served: Served, plans: Mapping[int, Plan], balance: BalanceConfig) -> CoverPlan | None:
    """What covering the loss of one owner takes; None where none can be: slices, or one owner.

    Raises ValueError where redundant experts do not divide over the ranks.
    """
    experts, owners = served.checkpoint.num_experts, served.mesh.owners
    if served.mesh.sliced or owners < 2:
        return None
    sizes = [expert_bytes(plans[layer]) for layer in served.layers]

    def taking(redundant: int, *, covered: bool) -> CoverBytes:
        there = replace(served, redundant=redundant, cover_owners=int(covered))
        epoch = first_epoch(there)
        spare = epoch.placement.room[0] - -(-experts // owners)
        shadows = max(_shadow_nbytes(epoch, owner, sizes) for owner in range(owners))
        return CoverBytes(redundant, spare * sum(sizes), shadows)

    fewest = redundant_for(experts, owners, replicas=False)
    whole = redundant_for(experts, owners, replicas=True)
    return CoverPlan(
        taking(balance.redundant_experts, covered=bool(balance.cover_owners)),
        max(0, fewest - balance.redundant_experts),
        taking(whole, covered=True),
        taking(fewest, covered=True),
    )


def _shadow_nbytes(epoch: Epoch, owner: int, sizes: list[int]) -> int:
    """Bytes of the shadows that `owner` keeps, of experts of these sizes by position."""
    return sum(len(experts) * sizes[at] for at, experts in shadows_of(epoch, owner).items())
