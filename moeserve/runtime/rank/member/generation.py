"""`MemberGeneration`: the generation that a member is in, from its announcement until the member has left."""

from __future__ import annotations

import logging
import time

from moeserve.runtime.control.reached import Phase
from moeserve.runtime.control.stream import Message
from moeserve.runtime.rank.member.member_group import Meeting, MemberGroup
from moeserve.runtime.rank.rank import Rank

log = logging.getLogger(__name__)

ABORTED = -1  # as a member's generation: none is live


class MemberGeneration:
    """Says which entries count, and joins and leaves the process group and its dispatchers.

    The thread that receives calls `announced`, and `abort`, `close` and `interrupt` while the one that
    executes entries is in any of the other methods. A failed step is told by whoever finishes it.
    """

    def __init__(self, rank: Rank, group: MemberGroup) -> None:
        self._rank, self._group = rank, group
        self.number = 0  # newest that was announced, or ABORTED; entries of older ones are dropped
        self.newest = 0  # of all generations that were announced, aborted ones with them
        # a generation of which an entry failed: others may still be in that step, and gloo ends the process
        # of one that gets the next step's rows in it, so that no further entry of it is executed
        self._failed: int | None = None

    @property
    def live(self) -> int | None:
        """Its number, 0 before any was announced; None once it was aborted."""
        return None if (number := self.number) == ABORTED else number

    def is_live(self, number: int) -> bool:
        """Whether it is that generation, and goes on."""
        return number == self.number

    def announced(self, number: int) -> None:
        """A generation forms: entries of those before it do not count any more."""
        self.number = self.newest = number

    def counts(self, entry: Message) -> bool:
        """Whether an entry is to be executed: it is of the live generation, and none before it has failed."""
        of: int | None = entry.get("generation")
        if of != self.number:
            log.info("%r of generation %s does not count: it was aborted", entry["kind"], of)
            return False
        return of != self._failed

    def fail(self, entry: Message) -> bool:
        """Has no further entry of this one's generation count; False where it was aborted already."""
        if (of := entry.get("generation")) != self.number:
            return False
        self._failed = of
        return True

    # -- joined and left by the thread that executes entries ------------------------------------------------

    def join(self, entry: Message) -> None:
        """Forms the process group with the other members, and makes dispatchers over it.

        Raises RuntimeError where the generation is aborted meanwhile.
        """
        started = time.perf_counter()
        self._rank.progress.join(Phase.GROUP)
        number = entry["generation"]
        meeting = Meeting(entry["group"], number, entry["position"], entry["size"])
        group = self._group.join(meeting, self._rank.device, lambda: self.is_live(number))
        grouped = time.perf_counter()
        self._rank.progress.join(Phase.DISPATCHERS)
        self._rank.free(but=entry["parting"])
        if not self.is_live(number):  # aborted meanwhile, which found nothing to interrupt
            raise RuntimeError("the generation was aborted while memory was freed")
        self._rank.join(group, number)
        log.info(
            "rank %d: joined generation %d, its process group in %.2f s, dispatchers in %.2f s",
            *(self._rank.index, number, grouped - started, time.perf_counter() - grouped),
        )

    def leave(self) -> None:
        """Ends the process group, and keeps of its dispatchers what other members may still write to. No
        other group of the process changes.
        """
        self._rank.leave(keep=True)
        self._group.leave()

    # -- ended by the thread that receives them -------------------------------------------------------------

    def abort(self) -> None:
        """Has no generation be live, until another one is announced."""
        self.number = ABORTED

    def close(self, reason: str) -> None:
        """Ends the waits of a process group that forms."""
        self._group.close(reason)

    def interrupt(self) -> None:
        """Ends the waits of steps for other members."""
        # Nothing waits for a dead rank, which peer memory would do until its patience ends; what goes on
        # without its rows is no answer, and jobs without one are kept, or have been told.
        self._rank.interrupt()
        self._group.interrupt()
