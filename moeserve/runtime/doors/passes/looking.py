"""`Looking`: a look at a rank's lanes, by a thread of its own or by the one that launches steps."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from moeserve.runtime.doors.passes.announced import AnnouncedLane, Bell
from moeserve.runtime.doors.passes.host_steps import HostSteps
from moeserve.runtime.doors.passes.mail_host import MailHost
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.passes.pauses import LONGEST_LOOK, MOMENT, Bells, Pauses, pause_of
from moeserve.runtime.doors.passes.turns import Company, Turns

log = logging.getLogger(__name__)

COMPANY_SECONDS = 0.5
"""After a call of others waited for a step, in which no forward pass is launched ahead: they would wait for
its caller's attention.
"""

NOTE_SECONDS = 0.001
"""After which it is noted again who wants steps, where several lanes are attached and nobody new does."""

LOOK_SHARE, HURRIED_SHARE = 2.0, 1.0
"""Between two looks at several lanes, of the time that the last one took, where no glance says whether there
is anything to look at; and where a caller's GPU has a step under way, which goes on from the answer at once.
Where nobody else wants steps the next look then comes as soon as it may.
"""

ELSEWHERE_SECONDS = 0.005
"""After a look of the thread that launches steps, until the lanes' own looks again, unless it is told before:
so long may the other one be in a launch.
"""

Pause = tuple[float, Bell | None]
"""Seconds until the next look, and what changes as soon as there is something to look at, if known."""


class Looking:
    """Of one rank. Looks are made by one thread at a time, which holds `turn`."""

    def __init__(self, steps: HostSteps | None) -> None:
        """steps: begins together those of lanes in host memory; None: each is begun as a call."""
        self.turn = threading.Lock()
        self.mail: MailHost | None = None  # makes lanes whose steps are launched ahead; None: none are
        self.others: Callable[[int], bool] = lambda own: False  # whether more calls than that wait for steps
        self.steps, self.pauses = steps, Pauses()
        if steps is not None:
            steps.ended = self.pauses.step_ended
        self._bells = Bells()
        self._noted = -math.inf  # when it was last noted who wants steps
        self._others_at = -math.inf  # when calls were last seen to wait
        self.group_at = -math.inf  # when other lanes of the group last brought rows
        self._calls = False  # whether they have waited lately
        self._there: list[AnnouncedLane] = []  # at the last look
        self._leads: list[AnnouncedLane] = []  # those of them whose steps may be launched ahead
        self._mails: list[MailLane] = []  # those of callers' GPUs
        self._active: list[AnnouncedLane] = []  # lanes whose callers have wanted steps lately
        self._hosts: list[AnnouncedLane] = []  # those of them with rows in host memory
        self._flow: list[MailLane] = []  # those of callers' GPUs, also of whom steps just lie on the device
        self._elsewhere_at = -math.inf  # when the thread that launches steps last asked for a look
        self._next_at = -math.inf  # when the next one of its looks is due, unless a step ends before
        self._back = threading.Lock()  # held until that one says that it looks no more
        self._back.acquire()

    # -- by the lanes' own thread ---------------------------------------------------------------------------

    def await_turn(self) -> bool:
        """Whether the calling thread is to look; after a while it is to ask again."""
        left = self._elsewhere_at + ELSEWHERE_SECONDS - time.monotonic()
        if left <= 0:
            return True
        self._back.acquire(timeout=left)
        return False

    def look(self, lanes: list[AnnouncedLane], leaving: Sequence[AnnouncedLane]) -> Pause:
        """A look at the lanes that are attached, and at those that leave with steps under way."""
        with self.turn:
            return self._look(lanes, leaving, launches=False)

    def rest(self) -> None:
        """Nobody is attached: no lane is kept that was."""
        with self.turn:
            self._there, self._mails, self._leads = [], [], []
            self._active, self._hosts, self._flow = [], [], []
            self._bells.look([])

    # -- by the thread that launches steps -----------------------------------------------------------------

    def look_elsewhere(self, lanes: Callable[[], list[AnnouncedLane]]) -> None:
        """A look at the lanes that are attached, while none leaves, if one is due and no other thread looks.
        lanes: is asked in its turn, as one that has left is closed after a look of the other thread.
        """
        self._elsewhere_at = now = time.monotonic()
        if now < self._next_at and not self.pauses.over:
            return
        if self.turn.acquire(blocking=False):
            try:
                pause, _ = self._look(lanes(), (), launches=True)
            finally:
                self.turn.release()
            self._next_at = time.monotonic() + min(pause, LONGEST_LOOK)

    def back(self) -> None:
        """The thread that launches steps looks no more."""
        self._elsewhere_at = -math.inf
        if self._back.locked():
            self._back.release()

    # -- a look ---------------------------------------------------------------------------------------------

    def _look(self, lanes: list[AnnouncedLane], leaving: Sequence[AnnouncedLane], *, launches: bool) -> Pause:
        """launches: the calling thread does, and waits for no launch."""
        ended = self.pauses.looks()
        if not ended and not leaving and self._bells.quiet(lanes):
            return self._bells.pause, None
        self._bells.look(lanes)
        if self.mail is not None:
            self.mail.looks(launches=launches)
        if lanes is not self._there:
            self._there, self._mails = lanes, [lane for lane in lanes if isinstance(lane, MailLane)]
            self._leads = [lane for lane in lanes if type(lane).ahead is not AnnouncedLane.ahead]
        bell = lanes[0].bell() if len(lanes) == 1 and not leaving else None
        now = time.monotonic()
        if len(lanes) == 1:
            self.note_company(lanes, now)
        stirring = [lane for lane in lanes if lane.stirs(now)]
        if stirring or (self._leads and now - self._noted > NOTE_SECONDS):
            self._look_at(stirring, lanes, now)
        for lane in leaving:
            self.looked(lane, now)
        took = time.monotonic() - now
        if self.mail is not None and not launches:
            self.mail.await_launches(LONGEST_LOOK)
        if not leaving and self._bells.looked(now):
            return self._bells.glance_in(pause_of(lanes, now, MOMENT)), None
        least = 0.0
        if bell is None:  # most looks at several find nothing, and steps want the interpreter
            soon = any(lane.soon for lane in self._leads)
            least = took * (LOOK_SHARE if not soon else HURRIED_SHARE if self._hosts else 0.0)
        pause = pause_of((*lanes, *leaving), now, least)
        rung = bell is not None and lanes[0].rings and not lanes[0].unseen
        return pause, bell if rung else None

    def _look_at(self, stirring: list[AnnouncedLane], lanes: list[AnnouncedLane], now: float) -> None:
        """Looks at those of the lanes that stir, begins what they want, and has others make room for it."""
        if len(lanes) > 1 and now - self._noted > NOTE_SECONDS:
            self.note_company(lanes, now)
        found = [lane for lane in stirring if self.looked(lane, now)]
        if self.steps is not None:
            try:
                self.steps.begin()
            except Exception:  # those steps have failed, and others are to come
                log.exception("steps of device lanes could not be begun")
        if any(lane not in self._active for lane in found):
            self.note_company(lanes, now)
        for lane in self._leads:  # also those whose callers have not wanted a step lately
            if lane.ahead and (company := self.company_of(lane)) is not Company.NONE:
                lane.yield_steps(Company.CALLS if self._waits_for(lane) else company)
        if self._mails:
            Turns.leave(self._mails)

    def _waits_for(self, lane: AnnouncedLane) -> bool:
        """Whether the thread that launches steps waits for what lies on the device."""
        return self.mail is not None and isinstance(lane, MailLane) and self.mail.waits_for(lane)

    def looked(self, lane: AnnouncedLane, now: float) -> bool:
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

    # -- who wants steps ------------------------------------------------------------------------------------

    def company(self) -> None:
        """Others wait behind runs of lanes here, be they callers of this rank; from any thread."""
        self._others_at = time.monotonic()

    def others_came(self) -> None:
        """Other lanes of the group bring rows to what is launched now; from any thread. Two lanes of a group
        whose steps are launched ahead would wait in turns for each other's callers.
        """
        self.group_at = self._others_at = time.monotonic()

    def company_of(self, lane: AnnouncedLane) -> Company:
        """Who but this lane's caller wants steps, as of the last look."""
        if self._calls or _others(self._hosts, lane):
            return Company.CALLS
        if not _others(self._active, lane):
            return Company.NONE
        apart = isinstance(lane, MailLane) and all(
            one.short is not lane.short or one is lane for one in self._flow
        )
        return Company.BESIDE if apart else Company.LANES

    def note_company(self, lanes: list[AnnouncedLane], now: float) -> None:
        """Notes who wants steps."""
        if self.others(sum(lane.under_way for lane in lanes)):
            self._others_at = now
        since = now - COMPANY_SECONDS
        self._calls = self._others_at >= since
        self._active = [lane for lane in lanes if lane.active_at >= since or lane.under_way]
        self._hosts = [lane for lane in self._active if not isinstance(lane, MailLane)]
        self._flow = [
            lane for lane in lanes if isinstance(lane, MailLane) and (lane.soon or lane in self._active)
        ]
        if self.mail is not None:
            self.mail.flow(self._flow)
        self._noted = now


def _others(lanes: list[AnnouncedLane], lane: AnnouncedLane) -> bool:
    """Whether there is another than `lane`; each stands there once."""
    return len(lanes) > 1 or (len(lanes) == 1 and lanes[0] is not lane)
