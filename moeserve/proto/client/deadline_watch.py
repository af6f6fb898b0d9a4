"""`DeadlineWatch`: one thread that acts when a deadline has passed. It ends late calls on streams."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

TICK_SECONDS = 0.02


class DeadlineWatch:
    """Deadlines are added and removed a thousand times a second and almost none passes, so the thread looks
    every 20 ms.

    The thread starts with the first deadline, and sleeps while there is none.
    """

    def __init__(self) -> None:
        self._watched: dict[object, tuple[float, Callable[[], object]]] = {}
        self._any = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, deadline: float, act: Callable[[], object]) -> object:
        """Has `act` called soon after `time.monotonic()` passes `deadline`; returns what `remove` takes."""
        entry = object()
        self._watched[entry] = (deadline, act)
        if not self._any.is_set():
            self._any.set()
            self._start()
        return entry

    def remove(self, entry: object) -> None:
        """Forgets a deadline, whether it has passed or not."""
        self._watched.pop(entry, None)

    def close(self) -> None:
        """Ends the thread; nothing is called any more."""
        self._closed = True
        self._any.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="moeserve-deadlines", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while self._any.wait() and not self._closed:
            now = time.monotonic()
            for entry, (deadline, act) in list(self._watched.items()):
                if deadline <= now:
                    self.remove(entry)
                    try:
                        act()
                    except Exception:
                        log.exception("what was to be done after a deadline failed")
            self._any.clear()
            if self._watched:
                self._any.set()
            time.sleep(TICK_SECONDS)
