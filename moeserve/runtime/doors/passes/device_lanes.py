"""`DeviceLanes`: the callers that are attached to this rank, and the thread that looks at their words."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch

from moeserve.proto import moe_pb2
from moeserve.proto.host import sleep_finely, usable_cores
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.tensors import of_torch
from moeserve.proto.transports.awake import SPARE_CORES
from moeserve.runtime.doors.calls.connection_lane import Alone, OwnLanes
from moeserve.runtime.doors.deadlines import Observe
from moeserve.runtime.doors.device_errors import LanesTaken, NameTaken, UnknownLane
from moeserve.runtime.doors.lane_door import LaneDoor
from moeserve.runtime.doors.passes.announced import (
    AnnouncedLane,
    LaneMemory,
    LaneModel,
    LaneTerms,
    lane_info,
)
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits, checked
from moeserve.runtime.doors.passes.device_lane import Begin, DeviceLane
from moeserve.runtime.doors.passes.host_steps import HostSteps
from moeserve.runtime.doors.passes.looking import Looking
from moeserve.runtime.doors.passes.pauses import LONGEST_LOOK
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads import Regions
from moeserve.runtime.doors.payloads.errors import UnknownRegion

log = logging.getLogger(__name__)

LEFT_SECONDS = 0.1
"""At most, for a lane that was detached to leave its place; it stays while a step may touch its memory."""

SWEEP_SECONDS = 0.05
"""Between looks whether the callers' leases are still there."""

CLOSE_SECONDS = 5.0
"""Within which the thread has to end."""

CLOSED = "no device lane is attached any more: the rank is stopping, or has logged why"


@dataclass(frozen=True)
class Attached:
    """A lane with its name and the caller's description."""

    name: str
    device: str
    lane: AnnouncedLane


class DeviceLanes:
    """Attaches and detaches callers, from any thread; a thread of its own begins the steps of their passes.

    A lane ends when it is detached, and when the caller's lease on either of its regions does: the kernel
    closes it with a caller that dies.
    """

    def __init__(
        self,
        regions: Regions,
        model: LaneModel,
        limits: DeviceLaneLimits,
        begin_for: Callable[[str], Begin],
        steps: HostSteps | None = None,
    ) -> None:
        """begin_for: how steps of the caller at a peer are begun as calls. steps: begins together those of
        rows in host memory that it takes; None: all are calls.
        """
        self._regions, self._model, self._limits = regions, model, limits
        self._begin_for = begin_for
        self.why_no_mail = "this rank computes on the CPU"
        self.on_pass: Callable[[str], None] = lambda status: None  # is told how each pass ended
        self._lanes: dict[str, Attached] = {}  # by the whole name of the mailbox
        self._there: list[AnnouncedLane] = []  # the same lanes
        self._leaving: list[AnnouncedLane] = []  # with steps under way
        self._coming: set[str] = set()  # names of lanes whose memory is being made
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._left = threading.Condition(self._lock)
        self._closing = self._failed = False
        self.looking = Looking(steps)
        self._thread = threading.Thread(target=self._run, name="device-lanes", daemon=True)
        self._thread.start()

    def attach(self, request: moe_pb2.AttachLaneRequest, peer: str) -> moe_pb2.AttachLaneReply:
        """Makes a lane for the caller at `peer`.

        Raises NameTaken, LanesTaken, DeviceRefused, TensorError naming a wrong field, and RegionLimit.
        """
        layout = checked(request, self._model, self._limits, self.looking.mail, self.why_no_mail)
        with self._lock:
            self._room_for(request.name)
            self._coming.add(request.name)
        try:  # its memory takes long to make, and others are looked at meanwhile
            lane, reply = self._made(request, layout, peer)
        except BaseException:
            with self._lock:
                self._coming.discard(request.name)
            raise
        with self._lock:
            self._coming.discard(request.name)
            closing = self._closing
            if not closing:
                self._lanes[lane.memory.mailbox] = Attached(request.name, request.device, lane)
                self._there = [*self._there, lane]
                self._tell_thread()
        if closing:
            self._forget(lane)
            raise LanesTaken(CLOSED)
        log.info("%s is attached: %d rows, %d stages", request.name, lane.rows, layout.stages)
        return reply

    def _made(
        self, request: moe_pb2.AttachLaneRequest, layout: MailboxLayout, peer: str
    ) -> tuple[AnnouncedLane, moe_pb2.AttachLaneReply]:
        """A lane with its memory, and what its caller is told."""
        model, limits, regions = self._model, self._limits, self._regions
        with ExitStack() as undo:  # where it fails half-way
            name, size = regions.create(layout.mailbox_bytes, peer)
            undo.callback(self._released, name)
            answers, answers_size = regions.create(layout.answers_bytes, peer)
            undo.callback(self._released, answers)
            box = regions.hold(name, 0, size)
            undo.callback(box.close)
            held = (box, regions.hold(answers, 0, answers_size))
            undo.callback(held[1].close)
            terms = LaneTerms(
                frozenset(model.layers),
                limits.patience,
                limits.answer,
                lambda status: self.on_pass(status),
                # the device waits for no longer than its patience
                ahead=min(limits.ahead, limits.patience / 2),
            )
            memory = LaneMemory(name, answers, held, layout, lambda: regions.holds(answers) <= 1)
            handle, wire = b"", ""
            if self.looking.mail is None or request.device == "cpu":
                lane = self._host_lane(memory, terms, peer)
            else:
                made, handle = self.looking.mail.lane(request, memory, terms)
                made.company_of, lane, wire = self.looking.company_of, made, made.wire
            undo.pop_all()
        reply = moe_pb2.AttachLaneReply(
            mailbox=name,
            answers=answers,
            mailbox_bytes=size,
            answers_bytes=answers_size,
            socket=regions.socket,
            hidden=model.hidden,
            experts=model.experts,
            top_k=model.top_k,
            layers=model.layers,
            patience_seconds=limits.patience,
            mailbox_handle=handle,
            rows_wire=wire,
            goes_ahead=not isinstance(lane, DeviceLane),
        )
        return lane, reply

    def _host_lane(self, memory: LaneMemory, terms: LaneTerms, peer: str) -> AnnouncedLane:
        """A lane of rows in host memory."""
        calls = DeviceLane(memory, terms, self._begin_for(peer))
        calls.steps, calls.peer = self.looking.steps, peer
        calls.step_ended = self.looking.pauses.step_ended
        mail = self.looking.mail
        made = None if mail is None else mail.host_lane(memory, terms, calls)
        if mail is None or made is None:
            return calls

        def company_of(lane: AnnouncedLane) -> Company:
            found = self.looking.company_of(lane)
            return Company.CALLS if found is Company.NONE and not mail.own_gpu else found

        made.company_of = company_of
        return made

    def detach(self, mailbox: str) -> None:
        """Ends the lane of this mailbox. Raises UnknownLane."""
        with self._lock:
            attached = self._lanes.pop(mailbox, None)
            if attached is None:
                text = "no device lane has this mailbox; it was detached, or its caller's lease ended"
                raise UnknownLane(text)
            self._leaves(attached)
            self._tell_thread()
        self._leave(attached, "it was detached")
        with self._lock:  # its caller may attach another one at once
            self._left.wait_for(lambda: attached.lane not in self._leaving, LEFT_SECONDS)

    def for_connections(
        self, which: str, spin: float, door: LaneDoor, dtype: torch.dtype, observe: Observe
    ) -> OwnLanes | None:
        """What data connections of this rank may have of its lanes. which, spin: as `passes.connections` and
        `passes.spin_seconds` have it; by `auto` none where no step is launched before its rows: they would
        save nothing.
        """
        if which == "never" or (which == "auto" and self.looking.mail is None):
            return None
        model, limits = self._model, self._limits
        return OwnLanes(
            self.attach,
            self.detach,
            model.name,
            frozenset(model.layers),
            (model.hidden, model.experts, model.top_k),
            of_torch(str(dtype)).name,
            limits.rows,
            self._regions,
            threading.BoundedSemaphore(limits.lanes // 2),
            lambda: door.stopping,
            observe,
            Alone(lambda: self.looking.group_at),
            launched=which == "auto",
            spin=spin if usable_cores() >= SPARE_CORES else 0.0,
        )

    def attached(self) -> list[moe_pb2.DeviceLaneInfo]:
        """The lanes that are attached, the oldest first."""
        with self._lock:
            there = list(self._lanes.values())
        return [lane_info(one.name, one.device, one.lane) for one in there]

    def look_elsewhere(self) -> None:
        """A look by the thread that launches steps, instead of the lanes' own thread, until `back`. What goes
        wrong is left to that one, which has its say.
        """
        if self._leaving or self._closing or self._failed:
            self.looking.back()
            return
        try:
            self.looking.look_elsewhere(lambda: self._there)
        except Exception:
            self._failed = True
            log.exception("lanes are looked at by their own thread alone")

    def back(self) -> None:
        """The thread that launches steps looks at lanes no more."""
        self.looking.back()

    def close(self) -> None:
        """Detaches all lanes and ends the thread."""
        with self._lock:
            there, self._lanes = list(self._lanes.values()), {}
            for attached in there:
                self._leaves(attached)
            self._closing = True
            self._tell_thread()
        for attached in there:
            self._leave(attached, "the rank is stopping")
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the thread of device lanes did not end within %g s", CLOSE_SECONDS)

    def _room_for(self, name: str) -> None:
        """Raises where the lane cannot be attached beside the others; the lock is held."""
        if self._closing:
            raise LanesTaken(CLOSED)
        if name in self._coming or any(attached.name == name for attached in self._lanes.values()):
            raise NameTaken(f"a device lane named {name!r} is attached here; detach it, or take another name")
        most, retired = self._limits.lanes, 0 if self.looking.mail is None else self.looking.mail.retired
        others = len(self._leaving) + len(self._coming) + retired
        if len(self._lanes) + others >= most:
            more = f", {others} are coming or leaving" if others else ""
            raise LanesTaken(
                f"{len(self._lanes)} device lanes are attached{more}, and passes.lanes is {most}"
            )

    def _tell_thread(self) -> None:
        """The table has changed; the lock is held."""
        self._changed.notify()
        self.looking.pauses.interrupt()

    def _leaves(self, attached: Attached) -> None:
        """A lane is in the table no more; the lock is held."""
        self._there = [lane for lane in self._there if lane is not attached.lane]
        self._leaving.append(attached.lane)

    def _leave(self, attached: Attached, why: str) -> None:
        """Ends a lane that is in the table no more; its memory goes when its steps have ended."""
        log.info("%s is detached: %s", attached.name, why)
        attached.lane.detach(why)

    def _run(self) -> None:
        sleep_finely()
        try:
            self._look()
        except Exception:
            log.exception("the thread of device lanes ends: no attached caller is answered any more")
        with self._lock:
            self._closing, self._there = True, []  # nobody looks at them elsewhere from the next turn on
            left = [attached.lane for attached in self._lanes.values()] + self._leaving
        for lane in left:
            lane.detach("the rank is stopping")
        until = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < until and any(lane.in_pass for lane in left):
            time.sleep(LONGEST_LOOK)
            with self.looking.turn:
                for lane in left:
                    self.looking.looked(lane, time.monotonic())
        with self.looking.turn:
            for lane in left:
                if lane.in_pass:  # a step may touch its memory
                    log.error("a device lane is kept: its pass did not end within %g s", CLOSE_SECONDS)
                else:
                    self._forget(lane)
        with self._lock:
            self._lanes, self._leaving = {}, [lane for lane in left if lane.in_pass]
            self._left.notify_all()
        self.looking.rest()

    def _look(self) -> None:
        swept = time.monotonic()
        while self._awaited():
            if time.monotonic() - swept > SWEEP_SECONDS:
                swept = time.monotonic()
                self._sweep()
            self._look_once()

    def _awaited(self) -> bool:
        """Whether there is a lane to look at, once there is; False: the thread is to end. Who waits for one
        keeps none that was there before, with its memory.
        """
        if not (self._lanes or self._leaving):
            self.looking.rest()
        with self._lock:
            while not (self._lanes or self._leaving or self._closing):
                self._changed.wait()
            return bool(self._leaving) or not self._closing

    def _look_once(self) -> None:
        with self._lock:
            lanes, leaving = self._there, list(self._leaving)
        if leaving or self.looking.await_turn():
            pause = self.looking.look(lanes, leaving)
            for lane in leaving:
                self._forget_idle(lane)
            self.looking.pauses.wait(*pause)

    def _sweep(self) -> None:
        """Detaches lanes whose caller's lease has ended."""
        with self._lock:
            gone = [
                self._lanes.pop(name)
                for name, attached in list(self._lanes.items())
                if attached.lane.detached or not self._leased(attached.lane.memory)
            ]
            for attached in gone:
                self._leaves(attached)
        for attached in gone:
            self._leave(attached, attached.lane.detached or "its caller's lease ended")

    def _leased(self, memory: LaneMemory) -> bool:
        return memory.mailbox in self._regions and memory.answers in self._regions

    def _forget_idle(self, lane: AnnouncedLane) -> None:
        """Lets go of a lane that leaves, unless a pass of it has yet to end."""
        if not lane.in_pass:
            with self._lock:
                self._leaving.remove(lane)
                self._left.notify_all()
            self._forget(lane)

    def _forget(self, lane: AnnouncedLane) -> None:
        """Gives its memory back, which its caller may have done at the same time."""
        lane.close()
        for name in (lane.memory.mailbox, lane.memory.answers):
            self._released(name)

    def _released(self, name: str) -> None:
        with suppress(UnknownRegion):
            self._regions.release(name)
