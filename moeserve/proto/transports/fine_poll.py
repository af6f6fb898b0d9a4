"""`FinePoll`: waiting for sockets, as `select.poll` does, for parts of a millisecond.

`select.poll` waits for whole milliseconds, which are as long as some steps. A thread that sleeps for the
rest of one is not woken by what it waits for. Linux has ppoll, which takes nanoseconds; elsewhere a wait is
rounded up, and ends as soon as something has come.
"""

from __future__ import annotations

import ctypes
import select
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from moeserve.proto.host import Timespec

Found = list[tuple[int, int]]
"""Descriptors and their events, as of `select.poll`; [] where nothing has come."""


class Descriptor(Protocol):
    """What may be waited for."""

    def fileno(self) -> int:
        """The number of its open file."""


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def _ppoll() -> ctypes._FuncPointer | None:
    """The system's, which gives the interpreter up while it waits; None where there is none."""
    found = getattr(ctypes.CDLL(None), "ppoll", None) if sys.platform == "linux" else None
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)
        found.restype = ctypes.c_int
    return found


_PPOLL = _ppoll()

LONGEST_MS = 100.0
"""Of a wait that is not rounded up: of longer ones a part of a millisecond is little."""


class FinePoll:
    """The same descriptors, waited for again and again by one thread; each has to stay open meanwhile."""

    def __init__(self, descriptors: Sequence[Descriptor], events: int = select.POLLIN) -> None:
        """events: what is waited for, of each."""
        numbers = [one.fileno() for one in descriptors]
        self._poll = select.poll()
        for number in numbers:
            self._poll.register(number, events)
        self._fds = (_PollFd * len(numbers))(*[_PollFd(number, events, 0) for number in numbers])
        self._limit = Timespec()
        self._given = ctypes.byref(self._fds), len(numbers), ctypes.byref(self._limit), None

    def __call__(self, milliseconds: float | None) -> Found:
        """What has come, within so many milliseconds; 0: until now, None: whenever something does. Raises
        OSError.
        """
        if _PPOLL is None or not milliseconds or milliseconds >= LONGEST_MS:
            return self._poll.poll(milliseconds)
        until = time.monotonic() + milliseconds / 1000
        self._limit.nanoseconds = int(milliseconds * 1e6)
        if (count := _PPOLL(*self._given)) >= 0:
            return [(one.fd, one.revents) for one in self._fds if one.revents] if count else []
        # a signal came, whose handler may have changed errno, or something is wrong: poll sees to both
        return self._poll.poll(1000 * max(0.0, until - time.monotonic()))
