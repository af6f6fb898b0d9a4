"""`MemberMessages`: what members say of the generation that they are in, and who of the head hears it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moeserve.proto.texts import clipped, quoted
from moeserve.runtime.control.messages import plans_from, positions_from, reached_from
from moeserve.runtime.control.own_steps import MOST_NUMBER
from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.generations.generations import Generations
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.lone_member import LoneMember
from moeserve.runtime.head.placing.two_phase_commit import TwoPhaseCommit
from moeserve.runtime.head.reception import Seat
from moeserve.runtime.ordering.step_order import StepOrder

log = logging.getLogger(__name__)


class MemberMessages:
    """Takes the messages of one generation after another. The caller holds the group's lock. `layers` are the
    decoder indices of the placement's layers.
    """

    def __init__(
        self,
        group: Group,
        layers: tuple[int, ...],
        generations: Generations,
        steps: StepOrder,
        changes: TwoPhaseCommit,
        lone: LoneMember,
    ) -> None:
        self._lone = lone
        self._group, self._layers = group, layers
        self._generations, self._steps, self._changes = generations, steps, changes
        self.on_serving: Callable[[], None] = lambda: None  # the last member has joined
        self.on_restored: Callable[[], None] = lambda: None  # a member has one more layer, or cannot read it

    def take(self, rank: int, seat: Seat, message: Message) -> None:
        """Takes a member's message about its generation; one about an older generation does not count.

        Raises KeyError, TypeError or ValueError where it is malformed.
        """
        if message.get("generation") != self._group.generation:  # from before an abort
            if message["kind"] == "ordered":  # what it counted until then
                self._lone.told(message, time.monotonic())
                return
            said, now = quoted(message.get("generation")), self._group.generation
            log.info("rank %d spoke of generation %s, and it is %d: that does not count", rank, said, now)
            return
        match message["kind"]:
            case "announce":
                if self._generations.state in ("serving", "joining"):
                    self._steps.announced(rank, message)
            case "run":
                if self._generations.state in ("serving", "joining"):
                    self._steps.asked(rank, message)
            case "withdraw":
                self._steps.withdrawn(rank, message)
            case "done":
                self._steps.done(rank, message)
            case "ordered":
                self._lone.told(message, time.monotonic())
            case "store":
                self._generations.asked(rank, message)
            case "here":
                self._generations.heard(rank, reached_from(message))
            case "prepared":
                self._prepared(rank, seat, message)
            case "joined":
                self._joined(rank, seat, message)
            case "restored":
                self._restored(rank, message)
            case "voted" | "adopted":
                self._changes.message_received(rank, message)
            case "failed":
                for_good = bool(message.get("for_good", False))
                self._generations.failed(rank, str(message["reason"]), for_good=for_good)
            case unknown:
                raise ValueError(f"unknown message {quoted(unknown)} from rank {rank}")

    def _prepared(self, rank: int, seat: Seat, message: Message) -> None:
        """Notes what a member holds, and which layers it has yet to read."""
        if not 0 <= (number := int(message.get("number", 0))) < MOST_NUMBER:
            raise ValueError(f"step {number} is not one of a service")
        self._steps.in_flight.number_from(number)
        seat.bytes_read, seat.weight_bytes = int(message["bytes_read"]), int(message["weight_bytes"])
        self._generations.prepared(rank, positions_from(message, len(self._layers)))

    def _joined(self, rank: int, seat: Seat, message: Message) -> None:
        """Notes a member's plans; with the last one the generation serves."""
        seat.plans, seat.generation = plans_from(message), self._group.generation
        if self._generations.joined(rank):
            self.on_serving()
            self._open_layers()

    def _restored(self, rank: int, message: Message) -> None:
        """Notes that a member holds one more layer, or why it cannot."""
        layers, at = self._generations.layers, int(message["layer"])
        if not 0 <= at < len(self._layers):
            raise ValueError(f"layer {at} in order, of {len(self._layers)}")
        if layers.restored(rank, at, clipped(str(message["why_not"]))):
            log.info("layer %d is served again", self._layers[at])
        if self._generations.state == "serving":
            self._open_layers()
            self.on_restored()

    def _open_layers(self) -> None:
        """Has steps of all layers that nobody lacks experts of."""
        self._steps.close_layers([self._layers[at] for at in self._generations.layers.closed])
