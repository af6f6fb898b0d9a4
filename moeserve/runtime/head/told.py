"""`Told`: how the head tells members of the steps that it orders."""

from __future__ import annotations

from collections.abc import Collection

from moeserve.dispatch.members import Members
from moeserve.runtime.control.frames import encoded
from moeserve.runtime.control.messages import header_message
from moeserve.runtime.control.run_messages import AskedRun, OrderedRun, refused_message, run_message
from moeserve.runtime.head.group import Group
from moeserve.runtime.ordering.in_flight import run_seats
from moeserve.runtime.step import Step


class Told:
    """The `Audience` of the head's order: the group's members, over their streams. The caller of any method
    holds the group's lock.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def members(self) -> Members:
        """Who belongs to the group, by its epoch."""
        return self._group.members

    @property
    def epoch(self) -> int:
        """The number of the epoch that is served."""
        return self._group.epoch.number

    def step(self, step: Step) -> None:
        """Sends a step's header to each member that takes part; it is encoded once for all without a job."""
        group, frames = self._group, dict[tuple[tuple[int, int], ...], bytes]()  # by a member's jobs
        for number in step.seats(group.members):
            header = step.header(group.members.at(number))
            if header.jobs not in frames:
                frames[header.jobs] = encoded(header_message(header, group.generation))
            group.send_frame(group.seats[number], frames[header.jobs])

    def run(self, run: OrderedRun) -> None:
        """Sends a run to each member that takes part."""
        frame = encoded(run_message(run, self._group.generation))
        for number in run_seats(run.asked, self._group.members):
            self._group.send_frame(self._group.seats[number], frame)

    def refuse(self, run: AskedRun, why: str) -> None:
        """Tells the member that asked for a run that there will be none."""
        self._group.send(self._group.seats[run.seat], refused_message(run, self._group.generation, why))

    def company(self, seat: int) -> bool:
        """Tells a member that others wait behind its runs; False where it has left."""
        if seat not in self._group.seats:
            return False
        self._group.send(self._group.seats[seat], {"kind": "company", "generation": self._group.generation})
        return True

    def layers_closed(self, layers: Collection[int]) -> None:
        """Tells all members that steps run of all layers but these."""
        told = {"kind": "open_layers", "generation": self._group.generation, "closed": sorted(layers)}
        self._group.broadcast(told)

    def sooner(self) -> None:
        """Wakes the thread that keeps the pace."""
        self._group.lock.notify_all()
