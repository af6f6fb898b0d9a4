"""`Mail`: a caller's lane as a member's runs have it, and its memory."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.dispatch.mail.kernels import ABORT
from moeserve.dispatch.peers.memory import Mapped
from moeserve.runtime.rank.runs.host_memory import HostMemory
from moeserve.runtime.rank.runs.runs import OwnerLane


@dataclass(eq=False)
class Mail:
    """A lane, and its memory: on the owner's GPU beside the caller's as it is mapped here, or on the host."""

    lane: OwnerLane
    memory: Mapped | HostMemory
    interrupted: bool = False  # since its pass has begun

    def say(self, word: int) -> None:
        """Has its kernels that wait read this word, unless they were interrupted, also at the same time."""
        self.lane.abort[0] = word
        if self.interrupted:
            self.lane.abort[0] = ABORT

    @property
    def handle(self) -> bytes:
        """What the caller needs to map the owner's memory on a GPU; empty where it lies on the host."""
        return b"" if isinstance(self.memory, HostMemory) else bytes(self.memory.handle())

    @property
    def nbytes(self) -> int:
        """Of device memory."""
        return 0 if isinstance(self.memory, HostMemory) else self.memory.mine.nbytes
