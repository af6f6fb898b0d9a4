"""`Parted`: processes of members that the group has parted with, until they are seen dead."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from moeserve.runtime.head.reception import RankProcess

log = logging.getLogger(__name__)

GONE_LOOK_SECONDS = 0.01  # between looks whether a process that was given up has ended
GONE_REPORT_SECONDS = 5.0  # between words on processes that were killed and do not end


class Parted:
    """The launcher ends them. Until then they may still run, and hold what the next generation needs: it is
    for `Generations` to wait for their ends. The caller of any method holds the group's lock.
    """

    def __init__(self) -> None:
        self._processes = set[RankProcess]()
        self._report_at = math.inf  # when it is said again that they have not ended
        self.on_given_up: Callable[[RankProcess], None] = lambda process: None  # the launcher ends it
        # whether that process has ended, for a launcher to say; None: nobody knows, nor has to be waited for
        self.is_gone: Callable[[RankProcess], bool] | None = None

    def give_up(self, process: RankProcess) -> None:
        """Has the launcher end a process."""
        self._processes.add(process)
        self.on_given_up(process)

    def includes(self, process: RankProcess) -> bool:
        """Whether that process was given up, and a launcher sees to its end."""
        return process in self._processes and self.is_gone is not None

    def has_ended(self, process: RankProcess, *, unknown: bool) -> bool:
        """Whether a process has ended; `unknown` where there is no launcher to ask."""
        return unknown if self.is_gone is None else self.is_gone(process)

    def all_ended(self) -> bool:
        """Whether none of them runs any more."""
        self.forget_ended()
        return not self._processes

    def forget_ended(self) -> None:
        """Those that have ended are parted with no more."""
        self._processes = {one for one in self._processes if not self.has_ended(one, unknown=True)}
        if not self._processes:
            self._report_at = math.inf

    def report(self, now: float) -> str:
        """Says in the log whom the next generation waits for; returns it again and again where one that was
        killed does not end, and else nothing.
        """
        processes = sorted(one.pid for one in self._processes)
        text = f"no generation forms before processes {processes}, given up, have ended"
        if math.isinf(self._report_at):
            self._report_at = now + GONE_REPORT_SECONDS
            log.info("%s", text)
        elif self._report_at <= now:
            self._report_at = now + GONE_REPORT_SECONDS
            log.error("%s", text)
            return text
        return ""
