"""Sleeping until a word in shared memory changes, and waking who sleeps so: Linux's futex.

Who waits for a word of another process would otherwise look at it again and again: each look takes a core
from who is to write it, where there are few. Only hosts write and wake; what a device has written is found
when the sleep is over. Elsewhere than on Linux, on x86-64 and aarch64, a sleep is a sleep, and nobody is
woken.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import time

import numpy as np

from moeserve.proto.host import Timespec

_NUMBERS = {"x86_64": 202, "aarch64": 98}
"""Of the system call, by machine."""

_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_BITS = 32
_HALF = 2**_BITS - 1
_WORD = 8

SUPPORTED = sys.platform == "linux" and platform.machine() in _NUMBERS and sys.byteorder == "little"
"""Whether a word can be waited for here."""


_NUMBER = ctypes.c_long(_NUMBERS.get(platform.machine(), 0))
_SLEEP = ctypes.CDLL(None, use_errno=True).syscall if SUPPORTED else None
_WAKE_CALL = ctypes.PyDLL(None).syscall if SUPPORTED else None  # too short to give the interpreter up for
if _WAKE_CALL is not None:
    _WAKE_CALL.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
        *3 * (ctypes.c_void_p,),
    )


class Words:
    """The words of 64 bits of some shared memory, which stays mapped as long as this is used.

    The system waits for 32 bits: the lower half of a word, or the upper one where that alone is to change.
    """

    def __init__(self, memory: memoryview) -> None:
        """memory: words, of format Q."""
        self._memory = memory
        self._first = np.frombuffer(memory, np.uint64).ctypes.data

    @property
    def wakes(self) -> bool:
        """Whether who sleeps can be woken."""
        return _SLEEP is not None

    def sleep(self, at: int, seen: int, seconds: float, wanted: int | None = None) -> bool:
        """Sleeps while word `at` is `seen`, until who changes it by `write` does, at most so many seconds.

        wanted: what it is to become, where that is known. Returns whether its sleep ended before they were
        over, be it for nothing.
        """
        if _SLEEP is None:
            time.sleep(seconds)
            return False
        upper = wanted is not None and not (seen ^ wanted) & _HALF
        whole = int(seconds)
        limit = Timespec(whole, int((seconds - whole) * 1e9))
        value = ctypes.c_uint32(seen >> _BITS if upper else seen & _HALF)
        given = ctypes.c_void_p(self._place(at, upper=upper)), _WAIT, value, ctypes.byref(limit), None, 0
        return _SLEEP(_NUMBER, *given) == 0 or ctypes.get_errno() == errno.EAGAIN

    def write(self, at: int, value: int) -> None:
        """Has word `at` be `value`, and wakes who sleeps until it changes."""
        before = self._memory[at]
        self._memory[at] = value
        place = self._first + _WORD * at
        self._wake(place if (before ^ value) & _HALF else place + _WORD // 2)

    def wake(self, at: int) -> None:
        """Wakes who sleeps until word `at` changes, though it has not."""
        self._wake(self._place(at, upper=False))

    def _place(self, at: int, *, upper: bool) -> int:
        return self._first + _WORD * at + (_WORD // 2 if upper else 0)

    @staticmethod
    def _wake(place: int) -> None:
        if _WAKE_CALL is not None:
            _WAKE_CALL(_NUMBER, place, _WAKE, _EVERYBODY, None, None, None)
