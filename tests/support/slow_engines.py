"""Engines of no device, whose copies end when a test says so."""

from __future__ import annotations

import threading

from moeserve.runtime.rank.transfers.engines import HostEngines
from moeserve.runtime.step import Moment

SECONDS = 5.0


class Waiting:
    """A moment that passes when the test says so."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> None:
        assert self.passed.wait(SECONDS)

    def query(self) -> bool:
        return self.passed.is_set()


class SlowEngines(HostEngines):
    """Engines whose copies have not ended until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Waiting] = []
        self.passed = False  # whether copies have ended when they are asked for

    def event(self, *, sleeps: bool = False) -> Moment:
        self.moments.append(Waiting())
        if self.passed:
            self.moments[-1].passed.set()
        return self.moments[-1]
