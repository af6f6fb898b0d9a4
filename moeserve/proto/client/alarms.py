"""Alarms that ring when a time has passed, watched by one thread: what ends a call on a stream in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_SECONDS = 0.02


class Alarms:
    """Alarms are set and unset a thousand times a second and ring almost never: the thread looks every 20 ms.

    The thread starts with the first alarm, and sleeps while there is none.
    """

    def __init__(self) -> None:
        self._set: dict[object, tuple[float, Callable[[], object]]] = {}
        self._any = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def set(self, deadline: float, ring: Callable[[], object]) -> object:
        """Has `ring` called soon after `time.monotonic()` passes `deadline`; returns what `unset` takes."""
        alarm = object()
        self._set[alarm] = (deadline, ring)
        if not self._any.is_set():
            self._any.set()
            self._start()
        return alarm

    def unset(self, alarm: object) -> None:
        """Forgets an alarm, whether it rang or not."""
        self._set.pop(alarm, None)

    def close(self) -> None:
        """Ends the thread; alarms that are set do not ring any more."""
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
            for alarm, (deadline, ring) in list(self._set.items()):
                if deadline <= now:
                    self.unset(alarm)
                    ring()
            self._any.clear()
            if self._set:
                self._any.set()
            time.sleep(TICK_SECONDS)
