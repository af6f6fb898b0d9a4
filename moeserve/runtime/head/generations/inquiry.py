"""`Inquiry`: nothing goes on, and members are asked how far they are, to know whom the others wait for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from moeserve.runtime.control.reached import Reached

ASK_AT = 0.3
"""Members are asked first after this part of a bound. Who has not answered when all of it has passed is
silent: with 10 s that is 7 s, which is longer than a garbage collection or a library holds an interpreter."""

NEARLY = 0.9  # of a bound has passed: whoever says now that it cannot go on has waited as long as that

ANSWER_SECONDS = 0.5  # for the second answers, which tell how far members are now
SLOW_SECONDS = (
    7.0  # for those that had answered the first question: their interpreter may be held up only now
)


class Standstill(NamedTuple):
    """Something that all members do together, and that has not gone on."""

    what: str  # such as "step 1048577"
    since: float
    bound: float  # seconds
    key: str  # of the configuration, that bounds it


@dataclass(frozen=True)
class Verdict:
    """Why a generation ends, and who is to blame, each with the reason to part with it."""

    reason: str
    guilty: dict[int, str]


class Inquiry:
    """Asks twice: early, for who does not answer at all, and at the bound, for how far everyone is.

    It decides, and nothing else: no thread, no lock, no clock of its own.
    """

    def __init__(self, about: Standstill, seats: Collection[int]) -> None:
        self.about, self._since = about, about.since
        self._seats = frozenset(seats)
        self._answers: dict[int, tuple[int, Reached]] = {}  # by seat: which question, how far
        self._asked, self._asked_at = 0, 0.0
        self._failed = set[int]()  # who said that they cannot go on: they waited, and do so no more
        self.went_on = False  # a member is further than it was at the first question: nothing stands still

    def due(self) -> float:
        """When members are to be asked next, or the verdict is due."""
        if self._asked < 2:
            return self._since + self.about.bound * (ASK_AT, 1.0)[self._asked]
        slow = {seat for seat, (asked, _) in self._answers.items() if asked < 2} - self._failed
        return self._asked_at + (SLOW_SECONDS if slow else ANSWER_SECONDS)

    @property
    def complete(self) -> bool:
        """Whether both questions were asked: at `due` there is a verdict."""
        return self._asked == 2

    def asked(self, now: float) -> None:
        """Notes that members were asked: first, or for how far they are at the bound."""
        if self._asked == 0 or (self._asked == 1 and now >= self._since + NEARLY * self.about.bound):
            self._asked, self._asked_at = self._asked + 1, now

    def answered(self, seat: int, reached: Reached) -> None:
        """Notes an answer: the member's process runs, and is so far."""
        if seat in self._answers and self._answers[seat][1] != reached:
            self.went_on = True
        self._answers[seat] = self._asked, reached

    def failed(self, seat: int) -> None:
        """Notes that a member has said that it cannot go on: nobody waits for it."""
        self._failed.add(seat)

    def again(self, now: float) -> None:
        """Begins anew: something went on, such as one member after another whose interpreter was held up."""
        self._since, self._answers, self._asked, self.went_on = now, {}, 0, False

    def verdict(self) -> Verdict:
        """Those who do not answer are to blame; where all do, those who are behind others.

        Who answered the first question alone may be held up by its interpreter: it is to blame only where all
        others are known to wait.
        """
        about = self.about
        bound = f"{about.key} = {about.bound:g}"
        stands = f"{about.what} does not go on within {bound}"
        waits = self._seats - self._failed
        if silent := waits - set(self._answers):
            return _blaming(silent, f"it does not answer, and {stands}")
        known = {seat: at for seat, (asked, at) in self._answers.items() if seat in waits and asked == 2}
        least = min(known.values(), default=None)
        behind = {seat for seat, reached in known.items() if reached == least}
        if behind and (len(behind) < len(known) or self._failed or len(self._seats) == 1):
            return _blaming(behind, f"{stands}, and it is behind; {least}")
        if slow := waits - set(known):
            return _blaming(slow, f"{stands}, and all others wait")
        return Verdict(f"{stands}, and all ranks are equally far; {least}", {})


def _blaming(seats: Collection[int], why: str) -> Verdict:
    named = ", ".join(f"rank {seat}" for seat in sorted(seats))
    return Verdict(f"{named} is late: {why}", dict.fromkeys(sorted(seats), f"it is late: {why}"))
