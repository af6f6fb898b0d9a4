"""`GroupView`: what is read of a group: its members, their load, and what would follow if one were lost."""

from __future__ import annotations

import numpy as np

from moeserve.dispatch.members import Member, Members
from moeserve.experts.load import PHASES, Load
from moeserve.runtime.control.messages import load_from
from moeserve.runtime.control.shadowed import Shadowed
from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.generations.ready import Cover, ReadyPlans
from moeserve.runtime.head.generations.returning import Returning
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import Seat


class GroupView:
    """Reads under the group's lock, for any thread; what takes long is computed without it."""

    def __init__(self, group: Group, returning: Returning) -> None:
        self._group, self._returning = group, returning
        self.ready = ReadyPlans(self._shadowed)

    def seats(self) -> dict[int, Seat]:
        """The members that are connected now, by seat, and those that load before they join."""
        with self._group.lock:
            return self._group.seats | self._returning.connected()

    def away(self) -> list[Member]:
        """The members that the group serves without: lost, or loading before they join."""
        with self._group.lock:
            return self._returning.members

    def belonging(self) -> tuple[Members, list[int]]:
        """All members, those that are away with them, and the seats of those that are connected, of whom some
        may load before they join.
        """
        with self._group.lock:
            members = self._group.members
            for member in self._returning.members:
                members = members.plus(member)
            return members, sorted(self._group.seats | self._returning.connected())

    def covers(self) -> dict[int, Cover]:
        """Where the experts of each member that has any would come from, were it lost now; by seat."""
        epoch = self._group.epoch
        owners = [member.seat for member in epoch.members.present if member.owner is not None]
        return {seat: self.ready.covered(epoch, seat) for seat in owners}

    def dispatchers(self) -> set[str]:
        """The names of the dispatchers that members have planned, of all layers."""
        plans = (plan for seat in self.seats().values() for plan in seat.plans.values())
        return {name for _, dispatchers, _ in plans for name in dispatchers.split("+")}

    def load(self) -> Load:
        """Tokens by served layer and logical expert, as far as ranks have reported."""
        return Load(self.load_by_phase().sum(axis=0))

    def load_seen(self) -> Load:
        """The load without what ranks that came again, to another head, had counted before: it only grows."""
        with self._group.lock:
            loads = [
                seat.load if seat.load_before is None else seat.load - seat.load_before
                for seat in self._group.seats.values()
                if seat.load is not None
            ]
        return Load((np.sum(loads, axis=0) if loads else np.zeros(self._load_shape)).sum(axis=0))

    def load_by_phase(self) -> np.ndarray:
        """The load of each of `PHASES`: `[phases, L, E]` float64."""
        with self._group.lock:
            loads = [seat.load for seat in self._group.seats.values() if seat.load is not None]
        return np.asarray(np.sum(loads, axis=0) if loads else np.zeros(self._load_shape))

    def reported(self, seat: Seat, message: Message) -> None:
        """Takes what a member has counted. It is unpacked without the lock, for which steps wait."""
        steps, expert_rows = int(message["steps"]), int(message["expert_rows"])
        load = load_from(message, self._load_shape)
        with self._group.lock:
            if message["generation"] == self._group.generation:
                seat.steps, seat.expert_rows, seat.load = steps, expert_rows, load
                if seat.again and seat.load_before is None:
                    seat.load_before = load

    @property
    def _load_shape(self) -> tuple[int, int, int]:
        placement = self._group.epoch.placement
        return len(PHASES), placement.layers, placement.experts

    def _shadowed(self) -> dict[int, Shadowed]:
        """What members keep in host memory, by seat."""
        return {number: seat.shadowed for number, seat in self.seats().items()}
