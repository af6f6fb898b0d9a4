"""Sleeping until a word in shared memory changes, and waking who sleeps so: Linux's futex.

Who waits for a word of another process would otherwise look at it again and again: each look takes a core
from who is to write it, where there are few. Only hosts write and wake; what a device has written is found
when the sleep is over. Elsewhere than on Linux, on x86-64 and aarch64, a sleep is a sleep, and nobody is
woken.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

import numpy as np

_NUMBERS = {"x86_64": 202, "aarch64": 98}
"""Of the system call, by machine."""

_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_HALF = 2**32 - 1
_WORD = 8

SUPPORTED = sys.platform == "linux" and platform.machine() in _NUMBERS and sys.byteorder == "little"
"""Whether a word can be waited for here."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Words:
    """The words of 64 bits of some shared memory, which stays mapped as long as this is used."""

    def __init__(self, memory: memoryview) -> None:
        """memory: words, of format Q."""
        self._memory = memory
        self._first = np.frombuffer(memory, np.uint64).ctypes.data
        self._call = ctypes.CDLL(None).syscall if SUPPORTED else None
        self._number = ctypes.c_long(_NUMBERS[platform.machine()]) if SUPPORTED else None

    def sleep(self, at: int, seen: int, seconds: float) -> bool:
        """Sleeps until word `at` is not `seen` any more and who wrote it says so, at most so many seconds.

        Returns whether it was woken, or found another word, before they were over. It may be woken for
        nothing. Two words with the same lower halves count as one: the sleep is then as long as it may be.
        """
        if self._call is None:
            time.sleep(seconds)
            return False
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        given = (ctypes.c_void_p(self._first + _WORD * at), _WAIT, ctypes.c_uint32(seen & _HALF))
        woken: bool = self._call(self._number, *given, ctypes.byref(limit), None, 0) == 0
        return woken or self._memory[at] != seen

    def wake(self, at: int) -> None:
        """Wakes who sleeps until word `at` changes."""
        if self._call is not None:
            self._call(
                self._number, ctypes.c_void_p(self._first + _WORD * at), _WAKE, _EVERYBODY, None, None, 0
            )
