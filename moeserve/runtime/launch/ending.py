"""`end_at_last`: a process that has stopped, and does not come to its end, is ended from within."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

END_SECONDS = 60.0
"""For a rank's process to end, once it has stopped. What lies on a device may never end, and to free memory
there waits for it; a launcher kills such a process, but may be gone.
"""

LAST_SECONDS = 1.0
"""After that, until the kernel ends what takes the interpreter, too."""


def end_at_last(what: str, seconds: float = END_SECONDS) -> None:
    """Has this process killed after so many seconds, if it is still there. By its main thread, or SIGALRM
    keeps the handler that it has.
    """

    def kill() -> None:
        time.sleep(seconds)
        log.error("%s has stopped, and its process has not ended for %g s: it is killed", what, seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + LAST_SECONDS)
    threading.Thread(target=kill, name="end-at-last", daemon=True).start()
