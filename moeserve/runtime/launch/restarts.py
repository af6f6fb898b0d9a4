"""`Restarts`: when ranks whose processes ended are started again, and which are ended, for every launcher."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from moeserve.runtime.head.generations.patience import Backoff
from moeserve.runtime.sections import ClusterConfig


class Restarts:
    """When ranks that ended are started again: at once where they had joined a group, else after a pause that
    doubles.

    others_first: seconds for which a rank is not started again while others go on without it.
    """

    def __init__(self, others_first: float, draw: Callable[[], float] = random.random) -> None:
        self._others_first = others_first
        self._backoffs: defaultdict[int, Backoff] = defaultdict(lambda: Backoff(draw))
        self._joined = set[int]()  # ranks whose process has joined a generation
        self._due: dict[int, float] = {}  # rank -> when to start it, of those that ended

    def joined(self, rank: int) -> None:
        """Notes that the rank's process has started as it should."""
        self._joined.add(rank)
        self._backoffs[rank].reset()

    def ended(self, rank: int, now: float, state: str = "") -> float | None:
        """Notes that the rank's process was found dead, and the group's state then.

        Seconds until it is started again the first time that this is said of a process, then None.
        """
        if rank in self._due:
            return None
        pause = self._others_first if state in ("preparing", "joining", "serving") else 0.0
        if rank not in self._joined:
            pause = self._backoffs[rank].next()
        self._joined.discard(rank)
        self._due[rank] = now + pause
        return pause

    def forget(self, rank: int) -> None:
        """Nobody starts this rank again."""
        self._joined.discard(rank)
        self._due.pop(rank, None)
        self._backoffs.pop(rank, None)

    def due(self, rank: int, now: float) -> bool:
        """Whether the rank is to be started now; it then counts as started."""
        if self._due[rank] > now:
            return False
        del self._due[rank]
        return True

    def failures(self, rank: int) -> int:
        """Processes of the rank in a row that joined no group."""
        return self._backoffs[rank].failures


def why_given_up(cluster: ClusterConfig, seen: tuple[float, str], waited: float | None) -> str:
    """Why a living process of a rank is given up; empty while it is not.

    `seen`: for how many seconds it has not run, and why. `waited`: for how many it has not reached the head;
    None where it has.
    """
    seconds, why = seen
    if 0 < cluster.stopped_seconds <= seconds:
        return f"{why} for {seconds:.1f} s, cluster.stopped_seconds = {cluster.stopped_seconds:g}"
    if waited is not None and waited > cluster.begin_seconds:
        return f"it has not reached the head within cluster.begin_seconds = {cluster.begin_seconds:g}"
    return ""
