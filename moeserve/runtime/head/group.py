"""`Group`: the members that are connected, the epoch and generation they are in, and how they are told."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from moeserve.dispatch.members import Members
from moeserve.runtime.control.frames import encoded
from moeserve.runtime.control.stream import Message, StreamClosed
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.reception import Seat

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Group:
    """What the coordinator and its changes of the epoch share; the caller of any method holds `lock`."""

    epoch: Epoch
    lock: threading.Condition = field(default_factory=threading.Condition)
    seats: dict[int, Seat] = field(default_factory=dict)  # those that are connected
    generation: int = 0
    newest: int = 0  # generation that members of a head before this one have heard of

    @property
    def members(self) -> Members:
        """Who belongs to the group, by the epoch: connected or awaited."""
        return self.epoch.members

    @property
    def missing(self) -> list[int]:
        """Seats of members that are not connected."""
        return sorted(set(self.members.seats) - set(self.seats))

    @property
    def weights_of(self) -> dict[int, tuple[str, str]]:
        """By owner that is connected: the address at which its process gives experts, and its host."""
        found = ((owner, self.seats.get(seat)) for owner, seat in self._owners())
        return {owner: (seat.weights, seat.host_id) for owner, seat in found if seat is not None}

    def _owners(self) -> list[tuple[int, int]]:
        seats = enumerate(self.members.seat_of_owner)
        return [(owner, seat) for owner, seat in seats if seat is not None]

    def send(self, seat: Seat, message: Message) -> None:
        """Sends to one member. One that cannot be reached is lost: the thread that receives from it ends."""
        self.send_frame(seat, encoded(message))

    def send_frame(self, seat: Seat, frame: bytes) -> None:
        """Sends what was encoded once for several members."""
        try:
            seat.stream.send_bytes(frame)
        except StreamClosed as closed:
            log.info("rank pid %d cannot be reached: %s", seat.pid, closed)
            seat.unreachable = seat.unreachable or str(closed)
            seat.stream.close()

    def broadcast(self, message: Message) -> None:
        """Sends `message` to every connected member."""
        frame = encoded(message)
        for seat in list(self.seats.values()):
            self.send_frame(seat, frame)
