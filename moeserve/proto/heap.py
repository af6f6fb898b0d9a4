"""Settings of malloc: the C library keeps the memory of large messages for the next ones.

glibc maps every block over 32 MiB, and at first over 128 KiB, from the kernel and unmaps it when it is
freed; so each message pays for its pages anew. With 256 rows of 7168 bf16 each way this halves the time of
an inline call.
What a burst leaves behind is given back all the same, once the process no longer grows (`Trimming`): glibc
would keep it for ever.
"""

import ctypes
import logging
import os
import platform
import threading

M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

SETTINGS = {
    M_MMAP_THRESHOLD: 64 << 20,
    M_TRIM_THRESHOLD: 512 << 20,
    M_TOP_PAD: 64 << 20,
    M_ARENA_MAX: 1,  # the free end of any other arena could not be given back
}


LOOK_SECONDS = 5.0
"""Between looks whether the process holds more than it did."""

WORTH = 0.04
"""Of what a process held when it was last looked through: so much more, and it is looked through again."""

LOOKS = 5
"""At which free memory is given back, from the first on: threads and connections of a burst end after it."""

log = logging.getLogger(__name__)


def keep_freed_memory() -> bool:
    """Makes malloc keep up to 512 MiB that is free, for blocks up to 64 MiB; False where the C library is not
    glibc.

    It holds for the whole process, so a rank's process does it at its start, and a client only if its
    program says so.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in SETTINGS.items())


class Trimming:
    """A thread that gives free memory back to the system, where the process holds more than it did and grows
    no more. Of live memory nothing changes, and the next large message finds pages as the first one did.
    """

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        self._look_seconds = look_seconds
        self._ended = threading.Event()
        self._libc = ctypes.CDLL(None)  # lets go of the interpreter while a function of it runs

    def start(self) -> bool:
        """Begins; False where the C library is not glibc."""
        if platform.libc_ver()[0] != "glibc":
            return False
        threading.Thread(target=self._run, name="moeserve-heap", daemon=True).start()
        return True

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()

    def _run(self) -> None:
        try:
            held = last = resident_bytes()
            looks = 0  # at which free memory is given back, though the process holds no more than before
            while not self._ended.wait(self._look_seconds):
                now = resident_bytes()
                if now > (1 + WORTH) * held and now <= (1 + WORTH) * last:
                    looks = LOOKS
                if looks:
                    looks -= 1
                    self._libc.malloc_trim(0)
                    held = now = resident_bytes()
                held, last = min(held, now), now
        except Exception:
            log.exception("the thread that gives free memory back ends; what is free stays with this process")


def resident_bytes() -> int:
    """The memory that this process holds now."""
    with open("/proc/self/statm", "rb") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
