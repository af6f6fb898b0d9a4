"""`Stopping`: lanes take no further call once the service is to stop, and those under way are waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moeserve.runtime.head.draining import Draining
from moeserve.runtime.head.generations.generations import Generations
from moeserve.runtime.head.group import Group

log = logging.getLogger(__name__)

STOPPING = "the service is stopping"


class Stopping:
    """From any thread.

    recovers: whether a head that has started again has yet to hear who is there; under the group's lock.
    """

    def __init__(
        self, group: Group, generations: Generations, draining: Draining, recovers: Callable[[], bool]
    ) -> None:
        self._group, self._generations = group, generations
        self._draining, self._recovers = draining, recovers
        self.reason = ""  # why lanes take no further call, though the group serves
        self.reopened = False  # though they are to take no further call they do, for some time

    def drain(self, seconds: float, reason: str = STOPPING) -> bool:
        """Has lanes begin no further call, and waits until those that have begun are over.

        Steps go on meanwhile. A head that recovers waits for the end of that first: lanes hold calls. Returns
        whether all ended within `seconds`; it does not wait on once a lane is lost with its calls.
        """
        until = time.monotonic() + seconds
        with self._group.lock:
            if self._recovers():
                self._group.lock.wait_for(lambda: not self._recovers() or self._generations.ended, seconds)
                self._draining.note_lanes()
            if not self._generations.holds:
                return True
            left = max(0.0, until - time.monotonic())
            log.info("lanes take no further call, and have %.3g s for those under way: %s", left, reason)
            self._draining.begin(left, reason)
            draining, group = self._draining, self._generations
            self._group.lock.wait_for(lambda: draining.over or draining.lost or not group.holds, left)
            return draining.over and not draining.lost

    def note_lanes(self) -> None:
        """From now on `take_again` is for the calls of lanes that are lost."""
        with self._group.lock:
            self._draining.note_lanes()

    def wait_lost(self, seconds: float) -> None:
        """Returns after so many seconds, and at once where a lane is lost with the calls under way there."""
        with self._group.lock:
            self._group.lock.wait_for(lambda: self._draining.lost or self._generations.ended, seconds)

    def take_again(self) -> list[int]:
        """Where lanes are lost with the calls under way there, has all others take calls again; which."""
        with self._group.lock:
            lost = self._draining.lost if self._generations.holds else []
            if lost:
                self._draining.take_again()
            self.reopened = bool(lost)
            return lost
