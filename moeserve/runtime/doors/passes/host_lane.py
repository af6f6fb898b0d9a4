"""`HostLane`: a lane whose rows lie in host memory, at a rank whose GPU reads and writes that in place.

While nobody else wants steps it is a `MailLane`: its forward passes are launched ahead, and each step waits
on the device for its tag in host memory. With company it is a `DeviceLane`, whose steps begin when their rows
are there: those of several callers for one layer are one. It changes from one to the other only where nothing
of it is under way, so that each step has one that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from moeserve.runtime.doors.passes.announced import AnnouncedLane, LaneMemory, LaneTerms
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.passes.turns import Company

CHECK_SECONDS = 0.5
"""Between two looks whether the group can run steps ahead, after it could not."""


class HostLane(AnnouncedLane):
    """One of its two lanes is at work at a time, and looks at the caller's words. Both say the same to the
    caller: the tags of a pass are counted on, whichever computes its next step.

    may_run: whether the rank and its group can launch steps ahead now.
    """

    def __init__(
        self,
        memory: LaneMemory,
        terms: LaneTerms,
        both: tuple[DeviceLane, MailLane],
        may_run: Callable[[], bool],
    ) -> None:
        super().__init__(memory, terms)
        self._calls, self._runs = both
        self._may_run = may_run
        self._works: DeviceLane | MailLane = self._calls
        self._again = -math.inf  # when to ask once more whether runs can be launched

    @property
    def number(self) -> int:
        """Of the pass that runs; 0: none does."""
        return self._works.number

    @property
    def ahead(self) -> bool:
        """Whether its steps are launched ahead now."""
        return self._works is self._runs

    @property
    def soon(self) -> bool:
        """Whether its caller brings rows as soon as it has the answers that are on their way to it."""
        return self._works.soon

    @property
    def rings(self) -> bool:
        """Whether its caller says when there is something to look at; of runs the device does, too."""
        return self._works.rings

    @property
    def unseen(self) -> bool:
        """Whether its caller may have said something that no look has seen."""
        return self._works.unseen

    def stirs(self, now: float) -> bool:
        """Whether there may be something to look at; of runs there always may."""
        return self._works.stirs(now)

    def pause(self, now: float) -> float:
        """Seconds for which its caller's words need not be looked at."""
        works = self._works.pause(now)
        return works if works == math.inf else min(super().pause(now), works)

    @property
    def under_way(self) -> int:
        """Steps that were begun when their rows were there, and have not ended."""
        return self._works.under_way

    @property
    def announced(self) -> bool:
        """Whether its caller has announced a pass that was not looked at."""
        return self._works.announced

    def detach(self, why: str) -> None:
        """Ends the pass that runs, and begins no other, whichever lane is at work or comes to be."""
        self.detached = self.detached or why
        self._calls.detach(why)
        self._runs.detach(why)

    def yield_steps(self, company: Company) -> None:
        """Others want steps: what waits on the device is left, and comes as calls."""
        if self.ahead:
            self._runs.yield_steps(Company.CALLS)

    def look(self, now: float) -> bool:
        """Does what the caller's words ask for; whether there was anything."""
        wanted = self._runs if self._runs_wanted(now) else self._calls
        self._runs.held, self._calls.held = wanted is not self._runs, wanted is not self._calls
        if wanted is not self._works:
            self.yield_steps(Company.CALLS)
            if (handed := self._works.hand_over()) is not None:
                wanted.take_over(handed)
                self._works = wanted
        return self._works.look(now)

    def _runs_wanted(self, now: float) -> bool:
        """Whether steps are to be launched ahead. A pass whose steps are goes on so while nobody else comes
        and the group lives; one of which nothing is under way when that ends goes on as calls.
        """
        number = self.number
        if self.company() is not Company.NONE or (number and number == self._runs.for_calls):
            return False
        if self.ahead and self._runs.interrupted:
            return False
        goes_on = self.ahead if number else not self.announced
        if goes_on:
            return self.ahead
        if now < self._again:
            return False
        if not self._may_run():
            self._again = now + CHECK_SECONDS
            return False
        return True

    def close(self) -> None:
        """Lets go of its memory once the device can touch it no more; no pass runs any more."""
        self._runs.close()
