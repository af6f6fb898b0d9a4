"""Cores of this machine for those who are measured, and others for those who measure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FEWEST = 6  # cores of a machine whose cores are shared out by default


@dataclass(frozen=True)
class Cores:
    """Cores of the service, and of the load. They are the same where there are few."""

    service: frozenset[int]
    load: frozenset[int]

    @classmethod
    def shared_out(cls, count: int) -> Cores:
        """`count` cores for the service, of those that this process may use; 0: all, for both.

        Raises ValueError where none is left for the load.
        """
        every = sorted(os.sched_getaffinity(0))
        if not count:
            return cls(frozenset(every), frozenset(every))
        if not 0 < count < len(every):
            raise ValueError(f"{count} cores for the service: there are {len(every)}, and the load needs one")
        return cls(frozenset(every[:count]), frozenset(every[count:]))

    @property
    def apart(self) -> bool:
        """Whether the service and the load have cores of their own."""
        return self.service != self.load


def usual(most: int) -> int:
    """Cores for the service alone: half of this process's, at most so many; 0 where it has few."""
    cores = len(os.sched_getaffinity(0))
    return min(most, cores // 2) if cores >= FEWEST else 0


@contextmanager
def on(cores: frozenset[int]) -> Iterator[None]:
    """This thread runs on these cores, and so do processes and threads that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
