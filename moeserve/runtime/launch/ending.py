"""`end_at_last`: a process that has stopped, and does not come to its end, is ended from within."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

LAST_SECONDS = 1.0
"""After that, until the kernel ends what takes the interpreter, too."""


def end_at_last(what: str, seconds: float) -> None:
    """Has this process killed after so many seconds, if it is still there; 0: never. What lies on a device
    may never end, and to free memory there waits for it; a launcher kills such a process, but may be gone.
    By the main thread, or SIGALRM keeps the handler that it has.
    """
    if not seconds:
        return

    def kill() -> None:
        time.sleep(seconds)
        log.error(
            "%s has stopped, and its process has not ended within cluster.end_seconds = %g: it is killed",
            what,
            seconds,
        )
        os.kill(os.getpid(), signal.SIGKILL)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + LAST_SECONDS)
    threading.Thread(target=kill, name="end-at-last", daemon=True).start()
