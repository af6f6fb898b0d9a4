"""`Announcing`: a member's jobs on their way to who orders steps; those that come at once go together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from moeserve.runtime.control.messages import announcement_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.step import Announcement

MOST_TOGETHER = 8
"""Jobs of one message: the first one waits until the last one is checked, some 70 us for each."""


class Announcing:
    """Tells the head of jobs, and of those whose callers have left. Safe from any thread. `order` queues jobs
    of one generation where this member orders its steps itself, and says whether it does.

    A message of its own for each of many callers who come at once costs a call of the system, which gives the
    interpreter up in the middle of their requests, and wakes the head each time.
    """

    def __init__(
        self,
        tell: Callable[[Message], None],
        order: Callable[[Sequence[Announcement]], bool] = lambda jobs: False,
    ) -> None:
        self._tell, self._order = tell, order
        self._lock = threading.Lock()  # over what is kept, also while it is sent
        self._kept: list[Announcement] = []
        self._keeps: int | None = None  # the thread whose jobs are kept

    def announce(self, job: Announcement) -> None:
        """Tells the head of a job: at once, or with those that this thread takes together with it."""
        if self._keeps != threading.get_ident():
            self._say([job])
            return
        with self._lock:
            self._kept.append(job)
            if len(self._kept) >= MOST_TOGETHER:
                self._tell_kept()

    def withdraw(self, generation: int, jobs: list[int]) -> None:
        """Tells the head of jobs whose callers have left, behind all that was announced."""
        with self._lock:
            self._tell_kept()
            self._tell({"kind": "withdraw", "generation": generation, "jobs": jobs})

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread announces meanwhile goes to the head in few messages, the last one at the end. One
        thread at a time: of two, the second one's jobs go at once.
        """
        with self._lock:
            mine = self._keeps is None
            if mine:
                self._keeps = threading.get_ident()
        try:
            yield
        finally:
            if mine:
                with self._lock:
                    self._keeps = None
                    self._tell_kept()

    def _tell_kept(self) -> None:
        kept, self._kept = self._kept, []
        for _, jobs in groupby(kept, key=lambda job: job.generation):
            self._say(list(jobs))

    def _say(self, jobs: Sequence[Announcement]) -> None:
        """Tells of jobs of one generation."""
        if not self._order(jobs):
            self._tell(announcement_message(*jobs))
