"""`PendingChange`: one change under way, from its preparation until every member serves it. It decides, and
no more.

The owner sends messages and holds a lock; a pending change counts, so that its rules can be tested as a
function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moeserve.runtime.control.orders import StagedCopy
from moeserve.runtime.epoch import Change


class Stage(Enum):
    """The stages of a change, from its preparation to its end."""

    PREPARING = "preparing"  # members copy, and vote; any failure abandons it
    DECIDED = "decided"  # every member had voted: it stands, whatever fails now
    SERVED = "served"  # every member serves it
    ABANDONED = "abandoned"  # nothing has changed


@dataclass(frozen=True)
class Outcome:
    """How a change ended: committed, or abandoned with nothing lost and why."""

    abandoned: str  # why, or empty: committed
    seconds: float = 0.0
    staged: tuple[StagedCopy, ...] = ()  # by all owners


@dataclass(eq=False)
class PendingChange:
    """The votes on one change. Each change has a `number` of its own, so that late votes on an earlier one,
    even to the same epoch, do not count.
    """

    number: int
    change: Change
    seats: tuple[int, ...]  # of the members, who all vote and adopt
    stage: Stage = Stage.PREPARING
    reason: str = ""  # of abandoning it
    voted: dict[int, tuple[StagedCopy, ...]] = field(default_factory=dict)
    adopted: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether nothing more can come of it."""
        return self.stage in (Stage.SERVED, Stage.ABANDONED)

    @property
    def staged(self) -> tuple[StagedCopy, ...]:
        """Every copy that was voted for."""
        return tuple(one for votes in self.voted.values() for one in votes)

    @property
    def missing(self) -> list[int]:
        """Seats that have not voted."""
        return sorted(set(self.seats) - set(self.voted))

    @property
    def behind(self) -> list[int]:
        """Seats that do not serve it yet."""
        return sorted(set(self.seats) - self.adopted)

    def vote(self, seat: int, staged: tuple[StagedCopy, ...], refused: str) -> None:
        """Counts a vote: the last yes decides; a no abandons, as do differing copies of an expert."""
        if self.stage is not Stage.PREPARING:
            return
        if refused:
            self.abandon(f"rank {seat}: {refused}")
            return
        self.voted[seat] = staged
        if self.missing:
            return
        if differing := self._differing():
            self.abandon(f"copies of experts {differing} differ between ranks")
        else:
            self.stage = Stage.DECIDED

    def adopt(self, seat: int) -> None:
        """Notes that a member serves it. Only when all do may its new experts be copied from them."""
        self.adopted.add(seat)
        if self.stage is Stage.DECIDED and self.adopted >= set(self.seats):
            self.stage = Stage.SERVED

    def abandon(self, reason: str) -> None:
        """Drops the change; what was decided stands, and members load it when they form again."""
        if self.stage is Stage.DECIDED:
            self.stage = Stage.SERVED
        elif self.stage is Stage.PREPARING:
            self.stage, self.reason = Stage.ABANDONED, reason

    def _differing(self) -> list[int]:
        """Experts whose copies have not all the same checksum; slices of one always differ."""
        checksums: dict[int, set[str]] = {}
        for one in self.staged:
            checksums.setdefault(one.expert, set()).add(one.checksum)
        sliced = self.change.epoch.mesh.sliced
        return [] if sliced else sorted(expert for expert, found in checksums.items() if len(found) > 1)
