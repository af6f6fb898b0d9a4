"""`Scaling`: a running group gets more ranks, or goes on with fewer, while steps run.

New ranks load before they join, as those do that come back. Ranks that leave take no further call; what only
they hold is copied to those that stay, and the group forms without them, between two steps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from moeserve.experts.placement import Placement, slots_within
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.resizing import Resizing, free_seats
from moeserve.runtime.head.rebalancer import Cycle, Rebalancer, Wanted, always

log = logging.getLogger(__name__)

NOTHING_MOVED = Cycle("even")
LEAVING = "the service goes on with fewer ranks"


class CannotScale(RuntimeError):
    """This group cannot have so many ranks; says why, and what would have to be otherwise."""


@dataclass(frozen=True)
class ScaleSeconds:
    """How long what a change of the ranks consists of may take."""

    join: float  # for new ranks to start, load and join; also for the group to form without some
    leaving: float  # calls that come though the topology has no such lane are still taken
    drain: float  # for calls under way on lanes that leave


@dataclass(frozen=True)
class Scaled:
    """What came of it."""

    outcome: str  # scaled, unchanged, abandoned
    reason: str = ""
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    moved: Cycle = NOTHING_MOVED
    seconds: float = 0.0


class Scaling:
    """One change at a time, and none beside a rebalance or reload; each blocks until it is done."""

    def __init__(self, rebalancer: Rebalancer, resizing: Resizing, seconds: ScaleSeconds) -> None:
        self._rebalancer, self._resizing, self._seconds = rebalancer, resizing, seconds

    def scale(self, ranks: int, wanted: Wanted = always) -> Scaled:
        """Has the group go on with so many ranks. Raises CannotScale, and as `Rebalancer.alone` does."""
        started = time.monotonic()
        with self._rebalancer.alone(wanted):
            self._resizing.forget_orphans()
            members = self._rebalancer.coordinator.epoch.members
            if away := sorted(self._resizing.wanted - set(members.seats)):
                raise CannotScale(f"ranks {away} are away; scale once they are back")
            if ranks == len(members):
                return Scaled("unchanged")
            done = self._grown(ranks) if ranks > len(members) else self._shrunk(ranks)
            if done.outcome == "scaled" and (mended := self._rebalancer.mend()).reason:
                log.warning("not all experts that can have a second owner have one: %s", mended.reason)
        why = done.reason and f": {done.reason}"
        log.info("a scale to %d ranks: %s%s", ranks, done.outcome, why)
        return Scaled(
            *(done.outcome, done.reason, done.joined, done.left, done.moved), time.monotonic() - started
        )

    def _grown(self, ranks: int) -> Scaled:
        epoch = self._rebalancer.coordinator.epoch
        if epoch.mesh.sliced:
            raise CannotScale(_sliced(epoch))
        try:
            seats = free_seats(epoch.members, ranks - len(epoch.members))
            self._resizing.expect(seats)
        except ValueError as error:
            raise CannotScale(str(error)) from error
        why = self._resizing.wait_joined(seats, self._seconds.join)
        joined = tuple(self._resizing.settle(seats))
        return Scaled("abandoned" if why else "scaled", why, joined)

    def _shrunk(self, ranks: int) -> Scaled:
        epoch = self._rebalancer.coordinator.epoch
        if epoch.mesh.sliced:
            raise CannotScale(_sliced(epoch))
        seats = sorted(epoch.members.seats)[ranks:]
        try:
            after = self._resizing.epoch_without(seats)
            if self._rebalancer.cover_owners:
                check_covered(after.placement)
            target = _evacuated(epoch, after)
        except ValueError as error:
            raise CannotScale(f"ranks={ranks}: {error}") from error
        moved = self._rebalancer.move_to(target)
        if moved.reason:
            return Scaled("abandoned", f"experts did not move: {moved.reason}", moved=moved)
        self._resizing.leave(seats)
        time.sleep(self._seconds.leaving)
        self._resizing.drain(seats, self._seconds.drain, LEAVING)
        why = self._resizing.retire(seats, self._seconds.join)
        left = tuple(seat for seat in seats if seat not in self._rebalancer.coordinator.epoch.members.seats)
        return Scaled("abandoned" if why else "scaled", why, left=left, moved=moved)


def _sliced(epoch: Epoch) -> str:
    ranks = epoch.mesh.ranks
    return (
        f"each of the {ranks} ranks holds a slice of every expert, and there are as many slices as ranks; "
        f"parallel.enable_expert_parallel serves whole experts"
    )


def check_covered(placement: Placement) -> None:
    """Raises ValueError where the slots do not stand the loss of any one owner."""
    left = sum(placement.room) - max(placement.room)
    if left < placement.experts:
        owners = sum(room > 0 for room in placement.room)
        raise ValueError(
            f"balance.cover_owners = 1: {owners} owners do not stand the loss of one: the others have {left} "
            f"slots a layer for {placement.experts} experts; more ranks, or balance.redundant_experts, do"
        )


def _evacuated(epoch: Epoch, after: Epoch) -> Placement:
    """What ranks that stay hold afterwards, and those that leave still hold now."""
    stay = slots_within(after.placement.room, epoch.placement.slots_per_owner)
    return epoch.placement.with_slots(np.where(stay, after.placement.slots, epoch.placement.slots))
