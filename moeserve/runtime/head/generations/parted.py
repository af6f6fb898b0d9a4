"""`Parted`: processes of members that the group has parted with, until they are seen dead."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection

from moeserve.runtime.control.messages import ANY_GENERATION
from moeserve.runtime.head.reception import RankProcess

log = logging.getLogger(__name__)

GONE_LOOK_SECONDS = 0.01  # between looks whether a process that was given up has ended
GONE_REPORT_SECONDS = 5.0  # between words on processes that were killed and do not end


class Parted:
    """The launcher ends them. Until then they may still run, write to memory of those that were in the same
    generation, and hold what the next one needs: `Rendezvous` waits for their ends where that would do harm.
    The caller of any method holds the group's lock.
    """

    def __init__(self) -> None:
        self.joining = ANY_GENERATION  # the newest that this head has told members to join
        self._processes: dict[RankProcess, int] = {}  # and the last generation that each had a part in
        self._lingering: dict[RankProcess, int] = {}  # that go on, and may still be in that generation
        self._report_at = math.inf  # when it is said again that they have not ended
        self._waited_for = False  # it was said that a generation waits for them
        self.said = ""  # of those that do not end, while there are any
        self.on_given_up: Callable[[RankProcess], None] = lambda process: None  # the launcher ends it
        # whether that process has ended, for a launcher to say; None: nobody knows, nor has to be waited for
        self.is_gone: Callable[[RankProcess], bool] | None = None

    def give_up(self, process: RankProcess) -> None:
        """Has the launcher end a process of the newest generation that was joined."""
        self._processes[process] = self.joining
        self.on_given_up(process)

    def linger(self, process: RankProcess) -> None:
        """Notes that a process goes on outside the group, and may yet have to leave that generation."""
        self._lingering[process] = self.joining

    def has_left(self, processes: Collection[RankProcess]) -> None:
        """These have left all generations before the one that forms now."""
        self._lingering = {one: at for one, at in self._lingering.items() if one not in processes}

    @property
    def generations(self) -> list[int]:
        """Those whose members may still write to one another's memory."""
        self._forget_ended()
        return sorted({*self._processes.values(), *self._lingering.values()})

    def includes(self, process: RankProcess) -> bool:
        """Whether that process was given up, and a launcher sees to its end."""
        return process in self._processes and self.is_gone is not None

    def has_ended(self, process: RankProcess, *, unknown: bool) -> bool:
        """Whether a process has ended; `unknown` where there is no launcher to ask."""
        return unknown if self.is_gone is None else self.is_gone(process)

    def all_ended(self) -> bool:
        """Whether none of them runs any more."""
        self._forget_ended()
        return not self._processes

    def _forget_ended(self) -> None:
        self._processes = {
            one: at for one, at in self._processes.items() if not self.has_ended(one, unknown=True)
        }
        self._lingering = {
            one: at for one, at in self._lingering.items() if not self.has_ended(one, unknown=True)
        }
        if not self._processes:
            self._report_at, self.said, self._waited_for = math.inf, "", False

    @property
    def due(self) -> float:
        """When `report` is to be called again; infinite while there is nothing to say."""
        return self._report_at

    def report(self, now: float, *, waits: bool) -> str:
        """Says in the log which processes have not ended, and whether the next generation waits for them;
        returns it again and again where one that was killed does not end, and else nothing.
        """
        if self.all_ended():
            return ""
        processes = sorted(one.pid for one in self._processes)
        text = f"processes {processes}, given up, have not ended"
        if waits:
            text = f"no generation forms before processes {processes}, given up, have ended"
            if not self._waited_for:
                self._waited_for = True
                log.info("%s", text)
        if math.isinf(self._report_at):
            self._report_at = now + GONE_REPORT_SECONDS
        elif self._report_at <= now:
            self._report_at, self.said = now + GONE_REPORT_SECONDS, text
            log.error("%s", text)
            return text
        return ""
