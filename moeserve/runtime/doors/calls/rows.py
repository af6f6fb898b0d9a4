"""`RowAdmission`: which calls a lane takes, by their rows and by when they have to be answered."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moeserve.runtime.doors.calls.callers import Caller, Callers
from moeserve.runtime.doors.calls.pace import FARTHEST, Pace, Slack
from moeserve.runtime.errors import LaneFull

MOST_CALLERS = 512  # that are kept though they hold nothing

MEASURED = ("OK", "DEADLINE_EXCEEDED")
"""How calls end whose time says something of the lane's pace."""

Leave = Callable[[str], None]

HEADROOM = 0.5
"""Of the time until its deadline: a call that would take longer is not let in.

The other half is for what the lane does not see: gRPC tells how long a caller waits from when its call
arrives, so that what it has waited on its way is missing. With 0.8, a way of 0.3 s under a deadline of 1 s
had nearly every answer come too late.
"""

SHORT_SECONDS = 1.0  # after a refusal for lack of room, for which callers have their shares only

LEAST_PART = 16
"""One of so many parts of what a caller has time for is never taken from it for one with less time."""


@dataclass(frozen=True)
class RowLimits:
    """What a lane holds at most, and for how long."""

    rows: int = 65536  # of calls under way; a single one may have more
    seconds: float = 10.0  # that a call may wait for others, whatever its deadline
    due: float = 1.0  # a call is served before those that come so much later (`step.due_seconds`)


@dataclass(eq=False)
class Held:
    """A call that was let in."""

    caller: Caller
    rows: int
    ahead: int  # rows that are served before, also those that came later, and its own
    urgency: float
    entered: float
    seconds: float  # within which it should be answered


@dataclass(slots=True)
class _Asked:
    """A call that wants to be let in."""

    rows: int
    ahead: int  # rows that would be served before, and its own
    own: int  # of these, its caller's
    known: float  # of `ahead`, those for which the pace foretells something
    seconds: float  # within which it should be answered; more where its own rows take long
    deadline: float  # on the clock


class RowAdmission:
    """Lets calls in whose answer will be there in time. Safe from any thread.

    What is not to be met is refused at once: by the rows that are served before, and the pace at which calls
    have lately ended. Callers share what there is room for, as at the whole door (`Admission`); the caller
    with the least time says how much that is, so that one who can wait for long does not fill the lane for
    those who cannot. A lane that holds nothing takes any call, and so learns that its pace is another.
    """

    def __init__(self, limits: RowLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._pace = Pace()
        self._slack = Slack()
        self._largest = 0  # rows of a call that has ended
        self._callers = Callers()
        self._held: dict[Held, None] = {}  # the oldest first
        self._rows = 0
        # urgency and rows of those held since there was none, at most
        self._latest, self._widest = -math.inf, 0
        self._short = -math.inf  # when a call was last refused that others left no room for
        self._stands_still = False
        self._lock = threading.Lock()

    def stand_still(self) -> None:
        """The lane keeps its calls and serves none, or of some layers alone, until `go_on`. How long they
        wait meanwhile, and have waited for whoever was lost, tells nothing of its pace; an answer does.
        """
        with self._lock:
            self._stands_still = True
            self._begin_again()

    def go_on(self) -> None:
        """The lane serves the calls that it holds."""
        with self._lock:
            self._stands_still = False
            self._begin_again()

    def _begin_again(self) -> None:
        """Counts what calls take, of those that are held, from now on."""
        now = self._clock()
        for held in self._held:
            held.entered = now

    @property
    def rows(self) -> int:
        """Rows of the calls that are held now."""
        return self._rows

    def enter(self, peer: str, rows: int, deadline: float) -> Leave:
        """Lets in a call of `rows` from `peer`, to be answered by `deadline` on the clock, inf = whenever.

        Returns what ends it, to be called once with the code that it ended with. Raises LaneFull with the
        time to come back after.
        """
        (held,) = self.enter_all([(peer, rows, deadline)])
        if isinstance(held, LaneFull):
            raise held
        return lambda code: self.leave_all([held], code)

    def enter_all(self, calls: Sequence[tuple[str, int, float]]) -> list[Held | LaneFull]:
        """Lets in calls one after the other, each as `enter` does. Returns of each what `leave_all` takes, or
        how it is refused.
        """
        now, entered = self._clock(), list[Held | LaneFull]()
        try:
            with self._lock:
                if len(calls) > 1 and self._all_fit(calls, now):
                    self._let_all_in(calls, now, entered)
                    return entered
                for call in calls:
                    entered.append(self._entered(now, *call))
        except BaseException:
            self.leave_all([held for held in entered if isinstance(held, Held)], "INTERNAL")
            raise
        return entered

    def leave_all(self, calls: Iterable[Held], code: str) -> None:
        """Calls have ended with a code; of one that had ended before nothing is noted."""
        now = self._clock()
        with self._lock:
            for held in calls:
                if self._held.pop(held, held) is None:
                    self._left(held, code, now)
            self._callers.forget(MOST_CALLERS, now)

    def _all_fit(self, calls: Sequence[tuple[str, int, float]], now: float) -> bool:
        """Whether none of several calls is refused, seen at one look: with the rows of all of them ahead each
        is answered in time, and none is of a caller who holds or asks for more. The lock is held.
        """
        callers, rows, deadline, widest = set[str](), 0, math.inf, 0
        for peer, count, until in calls:
            if peer in callers or self._callers.of(peer).held:
                return False
            callers.add(peer)
            rows, deadline, widest = rows + count, min(deadline, until), max(widest, count)
        all_rows, due = self._rows + rows, now + self.limits.due
        if all_rows > self.limits.rows or deadline < due or self._latest > due:
            return False  # some are served before others
        if max(self._widest, widest) > FARTHEST * self._largest:
            return False
        foretold = self._pace.foretold(all_rows, now)
        if self._rows:
            foretold = max(foretold, self._foretold(all_rows, now))
        return foretold <= HEADROOM * min(deadline - now, self.limits.seconds)

    def _let_all_in(
        self, calls: Sequence[tuple[str, int, float]], now: float, entered: list[Held | LaneFull]
    ) -> None:
        """Lets in calls of which `_all_fit` has said that none is refused. The lock is held.

        entered: what is let in is added there.
        """
        limits, a_row = self.limits, -1.0
        due = now + limits.due
        for peer, rows, deadline in calls:
            caller = self._callers.of(peer)
            seconds = HEADROOM * min(deadline - now, limits.seconds)
            if self._rows:
                a_row = self._a_row(now) if a_row < 0 else a_row
                caller.room = seconds / a_row if a_row else math.inf
            entered.append(self._hold(caller, rows, rows + self._rows, due, (now, seconds)))

    def _entered(self, now: float, peer: str, rows: int, deadline: float) -> Held | LaneFull:
        """The lock is held."""
        caller = self._callers.of(peer)
        urgency = min(deadline, now + self.limits.due)
        ahead, own, known = self._before(caller, rows, urgency)
        seconds = HEADROOM * min(deadline - now, self.limits.seconds)
        asked = _Asked(rows, ahead, own, known, seconds, deadline)
        if self._rows and (why := self._why_not(caller, asked, now)):
            return LaneFull(why, self._callers.refuse(caller, now))
        if self._latest > urgency:
            for other in self._held:
                if other.urgency > urgency:
                    other.ahead += rows
        return self._hold(caller, rows, ahead, urgency, (now, asked.seconds))

    def _with_own(self, asked: _Asked, now: float) -> float:
        """Within which a call should be answered that would wait for too long. What its own rows take is no
        wait: one that alone takes longer than a call may wait would find a lane that holds nothing, or be
        refused until its deadline.
        """
        most = HEADROOM * (asked.deadline - now)
        return max(asked.seconds, min(most, asked.seconds + self._foretold(self._known(asked.rows), now)))

    def _hold(self, caller: Caller, rows: int, ahead: int, urgency: float, when: tuple[float, float]) -> Held:
        """A call is let in; when: now, and the seconds that it has. The lock is held."""
        if not self._held:
            self._latest, self._widest = -math.inf, 0
        self._latest, self._widest = max(self._latest, urgency), max(self._widest, rows)
        held = Held(caller, rows, ahead, urgency, *when)
        self._held[held] = None
        self._rows += rows
        self._callers.enter(caller, rows)
        return held

    def _left(self, held: Held, code: str, now: float) -> None:
        """The lock is held."""
        self._rows -= held.rows
        self._callers.leave(held.caller, held.rows, now)
        if code == "OK" or (code in MEASURED and not self._stands_still):
            self._largest = max(self._largest, held.rows)
            took = now - held.entered
            self._pace.note(held.ahead, took, now, ended=code == "OK")
            self._slack.note(held.ahead, took, held.seconds, now)

    def _before(self, caller: Caller, rows: int, urgency: float) -> tuple[int, int, float]:
        """Rows that would be served before a call ends, its own with them; how many of these are its
        caller's; and for how many the pace foretells something. Nearly always these are all that are held.
        """
        if self._latest <= urgency and self._widest <= FARTHEST * self._largest:
            return rows + self._rows, rows + caller.held, self._known(rows) + self._rows
        before = [held for held in self._held if held.urgency <= urgency]
        ahead = rows + sum(held.rows for held in before)
        own = rows + sum(held.rows for held in before if held.caller is caller)
        return ahead, own, self._known(rows) + sum(self._known(held.rows) for held in before)

    def _why_not(self, caller: Caller, asked: _Asked, now: float) -> str:
        """Why a call is not let in now beside those that are held; empty where it is."""
        most = self.limits.rows
        if self._rows + asked.rows > most:
            held = f"{self._rows} are under way, and server.max_held_rows is {most}"
            return f"{asked.rows} rows do not fit: {held}"
        a_row = self._a_row(now)
        caller.room = room = asked.seconds / a_row if a_row else math.inf
        foretold = max(self._pace.least(asked.known, now), self._foretold(asked.known, now))
        if foretold > asked.seconds:
            asked.seconds = self._with_own(asked, now)
        if foretold > asked.seconds:
            self._refuse_for_time(now)
            return (
                f"{asked.ahead - asked.rows} rows are served before: at this lane's pace a call of "
                f"{asked.rows} rows would take {foretold:.2f} s, and should take {asked.seconds:.2f} s, "
                f"{self._whose(asked, now)}"
            )
        if asked.own == asked.rows or now - self._short > SHORT_SECONDS:
            return ""
        wanting = self._callers.wanting(caller, now)
        if len(wanting) == 1:
            return ""
        limit = min(most, max(min(other.room for other in wanting), room / LEAST_PART))
        share = self._callers.share(caller, wanting, limit)
        others = asked.own - asked.rows  # rows of other calls of its caller
        # rows that alone are more than the share would never come in beside other calls of their caller
        if 2 * asked.ahead > limit and asked.own > share and (asked.rows <= share or others > share):
            self._refuse_for_time(now)
            return (
                f"this caller has {others} rows under way, {asked.rows} more are asked, and its share of "
                f"{limit:.0f} rows, {self._which(limit)}, among {len(wanting)} callers is {share:.0f}; "
                "come back"
            )
        return ""

    def _which(self, limit: float) -> str:
        """What so many rows are, of which callers have shares."""
        known = limit >= self.limits.rows
        return "server.max_held_rows" if known else "as many as the one with the least time has time for"

    def _whose(self, asked: _Asked, now: float) -> str:
        """Which limit a call that would take too long is over, and the way out."""
        left = asked.deadline - now
        if asked.seconds >= HEADROOM * left:
            return f"half of the {left:.2f} s that it has; give it a longer timeout, or fewer rows"
        return (
            f"half of server.queue_seconds = {self.limits.seconds:g} for others, and what its own take; "
            "come back, or raise that"
        )

    def _known(self, rows: int) -> float:
        """Of the rows of one call those for which the pace foretells something: what calls of few rows took
        says little of one with many, and would foretell far too much.
        """
        return min(rows, FARTHEST * self._largest)

    def _foretold(self, rows: float, now: float) -> float:
        """Seconds that a call with so many rows, those ahead of it included, will take: at the pace at which
        calls ended lately, or by how long the oldest that is held has already waited for the rows ahead of
        it. So a lane that has become slow is noticed before a call has ended there.
        """
        waited, ahead = self._oldest(now)
        waiting = waited * min(FARTHEST, rows / ahead)  # how long few rows wait says little of many
        return max(self._pace.a_row(now) * rows, waiting) / self._slack.times

    def _oldest(self, now: float) -> tuple[float, int]:
        """How long the oldest call that is held has waited, and the rows ahead of it, with its own."""
        oldest = next(iter(self._held))
        return 0.0 if self._stands_still else now - oldest.entered, oldest.ahead

    def _a_row(self, now: float) -> float:
        """Seconds a row, by both."""
        waited, ahead = self._oldest(now)
        return max(self._pace.a_row(now), waited / ahead) / self._slack.times

    def _refuse_for_time(self, now: float) -> None:
        self._short = now
        self._slack.refused(next(iter(self._held)).entered, now)
