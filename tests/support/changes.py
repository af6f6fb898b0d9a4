"""What a group has been: noted as its head changes it, so that nothing passes while a test is held up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 60.0


class Was(NamedTuple):
    """A group at one time."""

    seats: tuple[int, ...]
    state: str
    reason: str


class Changes:
    """All that the group of a house has been since this was made, the earliest first."""

    def __init__(self, house: LocalCluster) -> None:
        self._house = house
        self._all: list[Was] = []
        self._at = 0  # of those that were not looked at yet
        self._more = threading.Condition()
        house.head.on_change = self._note
        self._note()

    def _note(self) -> None:
        now = Was(self._house.head.coordinator.epoch.members.seats, *self._house.state())
        with self._more:
            self._all.append(now)
            self._more.notify_all()

    def until(self, true: Callable[[Was], bool], what: str = "") -> None:
        """Waits until the group has been so, at or after the time that was waited for before."""

        def found() -> bool:
            while self._at < len(self._all):
                if true(self._all[self._at]):
                    return True
                self._at += 1
            return False

        with self._more:
            assert self._more.wait_for(found, SECONDS), f"{what}: {self._all}"
