"""`Pauses`: how the thread that looks at callers' words waits between two looks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.runtime.doors.passes.announced import AnnouncedLane, Bell

SHORTEST_LOOK, LONGEST_LOOK = 20e-6, 0.002
"""Seconds between two looks. In between, a look comes after an eighth of the time in which nothing was. While
nothing could begin before a step under way has ended, none comes before that: the thread that computes the
step would have to share the interpreter with it.
"""

LONGEST_REST = 0.02
"""Seconds between two looks at a lone caller who rings, and has not for long: an eighth of that time."""

MOMENT = 1e-4
"""Seconds for which a thread sleeps whatever ends meanwhile: to be woken takes a lock more."""


class Pauses:
    """Of one thread at a time; `step_ended` is called by any. A lock: an `Event` makes one for each wait."""

    def __init__(self) -> None:
        self._none_ended = threading.Lock()  # held while no step of a lane has ended since the last look
        self._none_ended.acquire()
        self._rests: Bell | None = None  # for which the thread waits

    def interrupt(self) -> None:
        """Others are to be looked at than those for which the thread waits, if it does."""
        if (rests := self._rests) is not None:
            words, at, _ = rests
            words.wake(at)

    def step_ended(self) -> None:
        """A step of a lane has."""
        with suppress(RuntimeError):  # another one has, too
            self._none_ended.release()

    @property
    def over(self) -> bool:
        """Whether a step has ended since the last look."""
        return not self._none_ended.locked()

    def looks(self) -> bool:
        """A look begins: what ends from now on is seen after it. Whether a step has since the last one."""
        return self._none_ended.acquire(blocking=False)

    def wait(self, seconds: float, bell: Bell | None) -> None:
        """Waits about so long, and where that is more than a moment no longer than until a step ends. bell:
        what changes as soon as there is something to look at, as it was before the look.
        """
        if bell is not None and seconds < math.inf:
            words, at, seen = bell
            began = time.monotonic()
            self._rests = bell
            words.sleep(at, seen, max(LONGEST_LOOK, min(seconds, LONGEST_REST if words.wakes else 0.0)))
            self._rests = None
            if time.monotonic() - began < SHORTEST_LOOK:  # it rings all the time, or did since the look
                time.sleep(SHORTEST_LOOK)
        elif seconds > MOMENT:
            if self._none_ended.acquire(timeout=min(LONGEST_LOOK, seconds)):
                self.step_ended()  # until the next look
        else:
            time.sleep(max(SHORTEST_LOOK, seconds))


class Bells:
    """What the callers of several lanes had rung at the last look: whether anybody has since is seen at a
    glance, where they all ring and none waits for a step. Of one thread, which looks when a step has ended.
    """

    def __init__(self) -> None:
        self.pause = 0.0  # seconds until the next glance
        self._lanes, self._rung = list[AnnouncedLane](), list[int]()
        self._until = -math.inf  # when all are looked at, whether they ring or not

    def look(self, lanes: list[AnnouncedLane]) -> None:
        """A look at these lanes begins: what is rung from now on is not seen by it."""
        self._lanes, self._rung = lanes, [lane.rung for lane in lanes]

    def looked(self, now: float) -> bool:
        """The look that began `now` has ended. Whether glances come before the next one."""
        quiet = len(self._lanes) > 1 and all(lane.silent for lane in self._lanes)
        self._until = now + LONGEST_LOOK if quiet else -math.inf
        return quiet

    def glance_in(self, seconds: float) -> float:
        """The pause before the next glance, where the next look would come after so many seconds."""
        self.pause = max(MOMENT, seconds)
        return self.pause

    def quiet(self, lanes: list[AnnouncedLane]) -> bool:
        """Whether there is nothing to look at."""
        if time.monotonic() >= self._until or lanes != self._lanes:
            return False
        return [lane.rung for lane in lanes] == self._rung


class Glances:
    """What the words of one caller were at the last look, and who else wanted steps: where all is as it was,
    there is nothing to look at. Of one thread, but for `again`.
    """

    def __init__(self, layout: MailboxLayout) -> None:
        self.again = True  # there may be something to look at, whatever the words are
        heads = [layout.header(stage) + m.TAG for stage in range(layout.stages)]
        self._words = (m.ANNOUNCED, m.GIVEN_UP, *heads)
        self._seen: tuple[object, ...] = ()
        self._until = -math.inf  # when it is looked at all the same

    def stirs(self, box: memoryview, others: tuple[object, ...], now: float) -> bool:
        """Whether there may be something to look at, which is done then. box: the mailbox's words of 64 bits.
        others: what else a look depends on.
        """
        seen = (*others, *[box[at] for at in self._words])
        if seen == self._seen and not self.again and now < self._until:
            return False
        self.again, self._seen, self._until = False, seen, now + LONGEST_LOOK
        return True


def pause_of(lanes: Sequence[AnnouncedLane], now: float, least: float) -> float:
    """Seconds until the next look at any of them; `least` at least."""
    first = math.inf
    for lane in lanes:
        first = min(first, lane.pause(now))
        if first <= least:
            return least
    return first if lanes else least
