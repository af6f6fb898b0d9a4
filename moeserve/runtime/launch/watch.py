"""`ProcessWatch`: which processes of this host do not run, seen from outside of them, and their end.

It reads what the kernel tells of a process, so that neither the process's interpreter nor any of its threads
has a say: one whose interpreter is held up runs, one that was stopped does not. Nothing heavy is imported
here: under Ray each node has a watch in a process of its own.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

STOPPED = ("T", "t")  # by a signal, by a tracer
LOOK_SECONDS = 0.02  # between looks whether a process has ended of which nobody else tells
UNKNOWN = 255  # multiprocessing's exit code where the forkserver has not told
ENDED = ("Z", "X", "x")  # nothing of it runs any more, and nothing can


class Stat(NamedTuple):
    """What the kernel tells of a process."""

    state: str  # one letter, as in proc(5)
    born: int  # ticks after the host's start; with the id it names a process for ever


def stat_of(pid: int, proc: Path = Path("/proc")) -> Stat | None:
    """What the kernel tells of process `pid`; None where it has ended, be it only not yet collected."""
    try:
        told = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    stat = Stat(told[0], int(told[19]))
    return None if stat.state in ENDED else stat


class Child:
    """A process that a forkserver has started. It may outlive the forkserver, which then says nothing of it
    any more: multiprocessing calls it ended, with UNKNOWN, and what the kernel tells counts. Safe to use from
    any thread: of two that ask multiprocessing at once one would be told, and the other be told UNKNOWN.
    """

    def __init__(self, process: BaseProcess) -> None:
        """process: has been started."""
        self._process, self.pid, self._lock = process, process.pid or 0, threading.Lock()
        self._born = stat_of(self.pid)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        with self._lock:
            alive = self._process.is_alive()
        return alive or self._untold

    @property
    def _untold(self) -> bool:
        """Whether it is there, and its forkserver is not."""
        if self.exitcode != UNKNOWN:
            return False
        now, before = stat_of(self.pid), self._born
        return now is not None and before is not None and now.born == before.born

    @property
    def exitcode(self) -> int | None:
        """How it has ended: less than 0 by that signal, UNKNOWN where its forkserver ended first."""
        with self._lock:
            return self._process.exitcode

    @property
    def sentinel(self) -> int | None:
        """What becomes ready when it ends; None where that cannot be told any more."""
        return None if self.exitcode == UNKNOWN else self._process.sentinel

    def kill(self) -> None:
        """Kills it, and never one that took the same id later."""
        with self._lock:
            self._process.kill()
        if self._untold:
            os.kill(self.pid, signal.SIGKILL)

    def join(self, seconds: float) -> None:
        """Waits for its end, at most so many seconds."""
        until = time.monotonic() + seconds
        alive = True
        while alive:
            with self._lock:  # for moments, as others may ask
                self._process.join(max(0.0, min(LOOK_SECONDS, until - time.monotonic())))
                alive = self._process.is_alive() and time.monotonic() < until
        while self._untold and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)


@dataclass
class _Seen:
    """A process as it was found at the last looks."""

    born: int
    stopped: float = math.inf  # when it was first seen stopped, since it last was not


class ProcessWatch:
    """Looks at processes by id. Not thread-safe.

    A process does not run while a signal or a tracer has stopped it. One that wants a processor and gets none
    for a while is not told apart from any other: to kill it would only add to what the host has to do.
    """

    def __init__(
        self,
        read: Callable[[int], Stat | None] = stat_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._seen: dict[int, _Seen] = {}

    def look(self, pids: Iterable[int]) -> dict[int, tuple[float, str] | None]:
        """For each process the seconds for which it has been seen not to run, and why, or 0.0 and nothing.

        None for one that has ended. Those that are not asked about any more are forgotten.
        """
        asked = list(pids)
        self._seen = {pid: seen for pid, seen in self._seen.items() if pid in asked}
        return {pid: self._look(pid) for pid in asked}

    def kill(self, pid: int) -> bool:
        """Kills a process that it has looked at, also a stopped one; whether it has ended. It never kills one
        that took the same id later.
        """
        stat, seen = self._read(pid), self._seen.get(pid)
        if stat is None or (seen is not None and stat.born != seen.born):
            return True
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        return False

    def _look(self, pid: int) -> tuple[float, str] | None:
        now, stat, seen = self._clock(), self._read(pid), self._seen.get(pid)
        if stat is None or (seen is not None and stat.born != seen.born):
            return None  # once it has ended it stays so, whoever has its id now
        if seen is None:
            seen = self._seen[pid] = _Seen(stat.born)
        if stat.state not in STOPPED:
            seen.stopped = math.inf
            return 0.0, ""
        seen.stopped = min(seen.stopped, now)
        return now - seen.stopped, f"it is stopped (state {stat.state})"
