"""`LogLevels`: what loggers write, as an operator sets it while the service runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.telemetry import logs


class LogLevels:
    """The levels that an operator sets while the service runs, of loggers of the head and of every member."""

    def __init__(self, level: str, coordinator: Coordinator) -> None:
        self._levels = {logs.OWN: level}
        self._coordinator = coordinator
        self._lock = threading.Lock()

    def set(self, logger: str, level: str) -> Mapping[str, str]:
        """Sets a logger's level everywhere; an empty level changes nothing. Returns the level of each logger
        that was set. Raises ValueError naming what is wrong.
        """
        with self._lock:
            if level:
                levels = self._levels | dict([logs.checked_level(logger, level)])
                logs.set_levels(levels)
                self._levels = levels
                self._coordinator.set_log_levels(levels)
            return dict(self._levels)
