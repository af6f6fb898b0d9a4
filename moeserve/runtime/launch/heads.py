"""`Head`: what whoever starts ranks knows of the head, in its own process or in another; `HeadInside`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.launch.head_process import HeadProcess

ENDED = ("failed", "stopped")


class Seated(NamedTuple):
    """A rank that is connected to the head."""

    pid: int
    generation: int  # the last that it joined; 0: none yet


class Head(Protocol):
    """The head, for who starts ranks. Its methods come back at once, and any thread may call them."""

    on_given_up: Callable[[RankProcess], None]
    """Called by a thread of the head's: that process is to be ended."""

    @property
    def token(self) -> str:
        """What the service's processes show each other."""

    @property
    def streams(self) -> str:
        """The address that ranks connect to, `host:port`."""

    @property
    def since(self) -> float:
        """When its process was started, on the monotonic clock: it knows nobody who came before."""

    def seats(self) -> Mapping[int, Seated]:
        """The ranks that are connected now."""

    def state(self) -> tuple[str, str]:
        """The group's state, and the reason for it."""

    def given_up(self, process: RankProcess, why: str) -> None:
        """Tells it of a process that does not run, as was seen from outside."""

    def living(self, processes: Mapping[int, RankProcess]) -> None:
        """Tells it the process of each rank; any other that a rank had has ended."""

    def fail(self, reason: str) -> None:
        """Has the group end as failed."""


class HeadInside:
    """A head in this very process: where it ends, all ends."""

    def __init__(self, head: HeadProcess) -> None:
        self._head, self.since = head, time.monotonic()
        self._living: Mapping[int, RankProcess] = {}
        self.on_given_up: Callable[[RankProcess], None] = lambda process: None
        generations = head.coordinator.generations
        generations.on_given_up = lambda process: self.on_given_up(process)
        generations.is_gone = self._gone

    @property
    def token(self) -> str:
        """What the service's processes show each other."""
        return self._head.token

    @property
    def streams(self) -> str:
        """The address that ranks connect to."""
        return self._head.streams

    def seats(self) -> Mapping[int, Seated]:
        """The ranks that are connected now."""
        return seated(self._head)

    def state(self) -> tuple[str, str]:
        """The group's state, and the reason for it."""
        progress = self._head.coordinator.progress()
        return progress.state, progress.reason

    def given_up(self, process: RankProcess, why: str) -> None:
        """Tells it of a process that does not run."""
        self._head.coordinator.given_up(process, why)

    def living(self, processes: Mapping[int, RankProcess]) -> None:
        """Tells it the process of each rank."""
        self._living = dict(processes)

    def fail(self, reason: str) -> None:
        """Has the group end as failed."""
        self._head.coordinator.fail(reason)

    def _gone(self, process: RankProcess) -> bool:
        return self._living.get(process.rank) != process


def seated(head: HeadProcess) -> dict[int, Seated]:
    """The ranks that are connected to `head`."""
    return {rank: Seated(seat.pid, seat.generation) for rank, seat in head.coordinator.seats().items()}
