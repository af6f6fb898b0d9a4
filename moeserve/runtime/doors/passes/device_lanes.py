"""`DeviceLanes`: the callers that are attached to this rank, and the thread that looks at their words."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from moeserve.proto import moe_pb2
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.runtime.doors.device_errors import LanesTaken, NameTaken, UnknownLane
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
from moeserve.runtime.doors.passes.mail_host import MailHost
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.passes.pauses import LONGEST_LOOK, MOMENT, Bells, Pauses, pause_of, sleep_finely
from moeserve.runtime.doors.passes.turns import Company, Turns
from moeserve.runtime.doors.payloads import Regions
from moeserve.runtime.doors.payloads.errors import UnknownRegion

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.05
"""Between looks whether the callers' leases are still there."""

COMPANY_SECONDS = 0.5
"""After a call of others waited for a step, in which no forward pass is launched ahead: they would wait for
its caller's attention.
"""

NOTE_SECONDS = 0.001
"""After which it is noted again who wants steps, where several lanes are attached and nobody new does."""

LOOK_SHARE = 2.0
"""Between two looks at several lanes, of the time that the last one took, where no glance says whether there
is anything to look at.
"""

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
        self.steps = steps
        self._regions, self._model, self._limits = regions, model, limits
        self._begin_for = begin_for
        self.mail: MailHost | None = None  # makes lanes whose steps are launched ahead; None: none are
        self.why_no_mail = "this rank computes on the CPU"
        self.others: Callable[[int], bool] = lambda own: False  # whether more calls than that wait for steps
        self._noted = -math.inf  # when it was last noted who wants steps
        self._others_at = -math.inf  # when calls were last seen to wait
        self._calls = False  # whether they have waited lately
        self._active: list[AnnouncedLane] = []  # lanes whose callers have wanted steps lately
        self._hosts: list[AnnouncedLane] = []  # those of them with rows in host memory
        self.on_pass: Callable[[str], None] = lambda status: None  # is told how each pass ended
        self._lanes: dict[str, Attached] = {}  # by the whole name of the mailbox
        self._leaving: list[AnnouncedLane] = []  # with steps under way
        self._coming: set[str] = set()  # names of lanes whose memory is being made
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._pauses, self._bells = Pauses(), Bells()
        if steps is not None:
            steps.ended = self._pauses.step_ended
        self._thread = threading.Thread(target=self._run, name="device-lanes", daemon=True)
        self._thread.start()

    def attach(self, request: moe_pb2.AttachLaneRequest, peer: str) -> moe_pb2.AttachLaneReply:
        """Makes a lane for the caller at `peer`.

        Raises NameTaken, LanesTaken, DeviceRefused, TensorError naming a wrong field, and RegionLimit.
        """
        layout = checked(request, self._model, self._limits, self.mail, self.why_no_mail)
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
                self._changed.notify()
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
        name, size = regions.create(layout.mailbox_bytes, peer)
        try:
            answers, answers_size = regions.create(layout.answers_bytes, peer)
            held = (regions.hold(name, 0, size), regions.hold(answers, 0, answers_size))
        except BaseException:
            with suppress(UnknownRegion):
                regions.release(name)
            raise
        terms = LaneTerms(
            frozenset(model.layers),
            limits.patience,
            limits.answer,
            lambda status: self.on_pass(status),
            ahead=min(limits.ahead, limits.patience / 2),  # the device waits for no longer than its patience
        )
        memory = LaneMemory(name, answers, held, layout, lambda: regions.holds(answers) <= 1)
        handle, wire = b"", ""
        try:
            if self.mail is None or request.device == "cpu":
                lane = self._host_lane(memory, terms, peer)
            else:
                made, handle = self.mail.lane(request, memory, terms)
                made.company, lane, wire = (lambda: self._company(made)), made, made.wire
        except BaseException:
            for one in held:
                one.close()
            for region in (name, answers):
                regions.release(region)
            raise
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
        )
        return lane, reply

    def _host_lane(self, memory: LaneMemory, terms: LaneTerms, peer: str) -> AnnouncedLane:
        """A lane of rows in host memory."""
        calls = DeviceLane(memory, terms, self._begin_for(peer))
        calls.steps, calls.peer, calls.step_ended = self.steps, peer, self._pauses.step_ended
        mail = self.mail
        made = None if mail is None else mail.host_lane(memory, terms, calls)
        if mail is None or made is None:
            return calls

        def company() -> Company:
            found = self._company(made)
            return Company.CALLS if found is Company.NONE and not mail.own_gpu else found

        made.company = company
        return made

    def detach(self, mailbox: str) -> None:
        """Ends the lane of this mailbox. Raises UnknownLane."""
        with self._lock:
            attached = self._lanes.pop(mailbox, None)
            if attached is None:
                text = "no device lane has this mailbox; it was detached, or its caller's lease ended"
                raise UnknownLane(text)
            self._leaving.append(attached.lane)
            self._changed.notify()
        self._leave(attached, "it was detached")

    def attached(self) -> list[moe_pb2.DeviceLaneInfo]:
        """The lanes that are attached, the oldest first."""
        with self._lock:
            there = list(self._lanes.values())
        return [lane_info(one.name, one.device, one.lane) for one in there]

    def company(self) -> None:
        """Other members of the group wait behind runs of lanes here; from any thread."""
        self._others_at = time.monotonic()

    def close(self) -> None:
        """Detaches all lanes and ends the thread."""
        with self._lock:
            there, self._lanes = list(self._lanes.values()), {}
            self._leaving += [attached.lane for attached in there]
            self._closing = True
            self._changed.notify()
        for attached in there:
            self._leave(attached, "the rank is stopping")
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the thread of device lanes did not end within %g s", CLOSE_SECONDS)

    def _company(self, lane: AnnouncedLane) -> Company:
        """Who but this lane's caller wants steps, as of the last look."""
        if self._calls or _others(self._hosts, lane):
            return Company.CALLS
        return Company.LANES if _others(self._active, lane) else Company.NONE

    def _note_company(self, lanes: list[AnnouncedLane], now: float) -> None:
        """Notes who wants steps."""
        if self.others(sum(lane.under_way for lane in lanes)):
            self._others_at = now
        since = now - COMPANY_SECONDS
        self._calls = self._others_at >= since
        self._active = [lane for lane in lanes if lane.active_at >= since or lane.under_way]
        self._hosts = [lane for lane in self._active if not isinstance(lane, MailLane)]
        self._noted = now

    def _room_for(self, name: str) -> None:
        """Raises where the lane cannot be attached beside the others; the lock is held."""
        if self._closing:
            raise LanesTaken(CLOSED)
        if name in self._coming or any(attached.name == name for attached in self._lanes.values()):
            raise NameTaken(f"a device lane named {name!r} is attached here; detach it, or take another name")
        most, retired = self._limits.lanes, 0 if self.mail is None else self.mail.retired
        others = len(self._leaving) + len(self._coming) + retired
        if len(self._lanes) + others >= most:
            more = f", {others} are coming or leaving" if others else ""
            raise LanesTaken(
                f"{len(self._lanes)} device lanes are attached{more}, and passes.lanes is {most}"
            )

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
            self._closing = True
            left = [attached.lane for attached in self._lanes.values()] + self._leaving
        for lane in left:
            lane.detach("the rank is stopping")
        until = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < until and any(lane.in_pass for lane in left):
            time.sleep(LONGEST_LOOK)
            for lane in left:
                self._looked(lane, time.monotonic())
        for lane in left:
            if lane.in_pass:  # a step may touch its memory
                log.error("a device lane is kept: its pass did not end within %g s", CLOSE_SECONDS)
            else:
                self._forget(lane)

    def _look(self) -> None:
        swept = time.monotonic()
        while True:
            with self._lock:
                while not self._lanes and not self._leaving and not self._closing:
                    self._changed.wait()
                if self._closing and not self._leaving:
                    return
                lanes, leaving = [one.lane for one in self._lanes.values()], list(self._leaving)
            ended = self._pauses.looks()
            if not ended and not leaving and self._bells.quiet(lanes):
                self._pauses.wait(self._bells.pause, None)
                continue
            self._bells.look(lanes)
            bell = lanes[0].bell() if len(lanes) == 1 and not leaving else None
            now = time.monotonic()
            if len(lanes) == 1:
                self._note_company(lanes, now)
            stirring = [lane for lane in lanes if lane.stirs(now)]
            if stirring:
                self._look_at(stirring, lanes, now)
            for lane in leaving:
                self._looked(lane, now)
                self._forget_idle(lane)
            if now - swept > SWEEP_SECONDS:
                swept = now
                self._sweep()
            if self.mail is not None:
                self.mail.await_launches(LONGEST_LOOK)
            if not leaving and self._bells.looked(now):
                self._pauses.wait(self._bells.glance_in(pause_of(lanes, now, MOMENT)), None)
                continue
            least = 0.0
            if bell is None:  # of several callers' looks most find nothing, and steps want the interpreter
                least = LOOK_SHARE * (time.monotonic() - now)
            pause = pause_of((*lanes, *leaving), now, least)
            rung = bell is not None and lanes[0].rings and not lanes[0].unseen
            self._pauses.wait(pause, bell if rung else None)

    def _look_at(self, stirring: list[AnnouncedLane], lanes: list[AnnouncedLane], now: float) -> None:
        """Looks at those of the lanes that stir, begins what they want, and has others make room for it."""
        if len(lanes) > 1 and now - self._noted > NOTE_SECONDS:
            self._note_company(lanes, now)
        found = [lane for lane in stirring if self._looked(lane, now)]
        self._begin_steps()
        if any(lane not in self._active for lane in found):
            self._note_company(lanes, now)
        for lane in lanes:  # also those whose callers have not wanted a step lately
            if lane.ahead and (company := self._company(lane)) is not Company.NONE:
                lane.yield_steps(company)
        Turns.leave(lane for lane in lanes if isinstance(lane, MailLane))

    def _begin_steps(self) -> None:
        """Begins together what lanes of the host have found."""
        if self.steps is not None:
            self.steps.begin()

    def _looked(self, lane: AnnouncedLane, now: float) -> bool:
        """Looks at `lane`; whether there was anything. What goes wrong with a lane ends it, and no other."""
        try:
            found = lane.look(now)
            if found:
                lane.active_at = lane.stirred_at = now
            elif lane.soon:
                lane.stirred_at = now
            return found
        except Exception:
            log.exception("a device lane is detached")
            lane.detach("the rank could not read it")
            lane.stirred_at = now
            return True

    def _sweep(self) -> None:
        """Detaches lanes whose caller's lease has ended."""
        with self._lock:
            gone = [
                self._lanes.pop(name)
                for name, attached in list(self._lanes.items())
                if attached.lane.detached or not self._leased(attached.lane.memory)
            ]
            self._leaving += [attached.lane for attached in gone]
        for attached in gone:
            self._leave(attached, attached.lane.detached or "its caller's lease ended")

    def _leased(self, memory: LaneMemory) -> bool:
        return memory.mailbox in self._regions and memory.answers in self._regions

    def _forget_idle(self, lane: AnnouncedLane) -> None:
        """Lets go of a lane that leaves, unless a pass of it has yet to end."""
        if not lane.in_pass:
            with self._lock:
                self._leaving.remove(lane)
            self._forget(lane)

    def _forget(self, lane: AnnouncedLane) -> None:
        """Gives its memory back, which its caller may have done at the same time."""
        lane.close()
        for name in (lane.memory.mailbox, lane.memory.answers):
            with suppress(UnknownRegion):
                self._regions.release(name)


def _others(lanes: list[AnnouncedLane], lane: AnnouncedLane) -> bool:
    """Whether there is another than `lane`; each stands there once."""
    return len(lanes) > 1 or (len(lanes) == 1 and lanes[0] is not lane)
