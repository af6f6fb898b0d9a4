"""`Wake`: wakes a thread that waits in a selector."""

import os
import threading


class Wake:
    """Registered with a selector, it is readable from `ring` until `clear`.

    `ring` may be called from any thread, with any lock held: it never blocks, and after `close` it does
    nothing.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()  # or a descriptor that was closed and given anew could be written to

    def fileno(self) -> int:
        """The descriptor, for the selector."""
        return self._descriptor

    def ring(self) -> None:
        """Wakes the thread."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Forgets the rings so far; called by the woken thread."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Closes the descriptor, which no selector may wait for any more."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._descriptor)
