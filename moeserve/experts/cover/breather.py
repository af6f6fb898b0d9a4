"""`Breather`: has a thread that plans make room for threads that run steps."""

from __future__ import annotations

import time

BURST_SECONDS, PAUSE_SECONDS = 0.0005, 0.002


class Breather:
    """Pauses a long computation in Python now and then: another thread of the process waits for the
    interpreter's lock for as long as one computes.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def breathe(self) -> None:
        """Sleeps for a moment where this thread has computed for a while; called between its pieces."""
        if time.perf_counter() - self._since > BURST_SECONDS:
            time.sleep(PAUSE_SECONDS)
            self._since = time.perf_counter()
