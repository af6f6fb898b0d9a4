"""`Mail`: a caller's lane as a member's runs have it, and its memory."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from moeserve.dispatch.mail.kernels import ABORT
from moeserve.dispatch.peers.memory import Mapped
from moeserve.runtime.rank.runs.host_memory import HostMemory
from moeserve.runtime.rank.runs.runs import OwnerLane

log = logging.getLogger(__name__)

INSIST_SECONDS = 0.01
"""After which streams are released once more, for half of that."""


@dataclass(eq=False)
class Mail:
    """A lane, and its memory: on the owner's GPU beside the caller's as it is mapped here, or on the host."""

    lane: OwnerLane
    memory: Mapped | HostMemory
    release: Callable[[OwnerLane, float], None]  # as `PassRuns.release`
    interrupted: bool = False  # since its pass has begun
    released_at: float = -math.inf

    def say(self, word: int) -> None:
        """Has its kernels that wait read this word, unless they were interrupted, also at the same time; 0:
        nothing. Streams that wait for its tags are released to do so.
        """
        self.lane.abort[0] = word
        if self.interrupted:
            self.lane.abort[0] = ABORT
        if word and self.lane.held:
            self._released(0.0)

    def insist(self, now: float) -> None:
        """Releases streams once more that wait, though a word was said: its caller may write over that."""
        if self.lane.held and self.lane.abort[0] and now - self.released_at > INSIST_SECONDS:
            self._released(INSIST_SECONDS / 2)

    def _released(self, seconds: float) -> None:
        self.released_at = time.monotonic()
        try:
            self.release(self.lane, seconds)
        except Exception:  # as it is said again, and whoever has ended the pass goes on
            log.exception("a lane's stream is not released")

    @property
    def handle(self) -> bytes:
        """What the caller needs to map the owner's memory on a GPU; empty where it lies on the host."""
        return b"" if isinstance(self.memory, HostMemory) else bytes(self.memory.handle())

    @property
    def nbytes(self) -> int:
        """Of device memory."""
        return 0 if isinstance(self.memory, HostMemory) else self.memory.mine.nbytes
