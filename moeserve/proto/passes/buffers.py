"""`AnswerBuffers`: which of a lane's buffers have answers that callers hold, and where the next may go."""

from __future__ import annotations

import os
import weakref
from collections import deque

import numpy as np

from moeserve.proto.passes.memory import LaneMemory
from moeserve.proto.tensors import Plain

BUFFERS = 3
"""Of a lane for large answers: one that the caller holds, one that comes, and one for the call behind it."""

_forks = [0]


def _forked() -> None:
    _forks[0] += 1


os.register_at_fork(before=_forked)


class AnswerBuffers:
    """The buffers of one lane. One thread at a time uses them, and any may let go of an answer.

    A buffer whose answer is held as this process forks is not used again: the child holds it, too.
    """

    def __init__(self, memory: LaneMemory) -> None:
        self._memory = memory
        self._free = deque(range(memory.buffers))  # whose answers nobody holds

    @property
    def next(self) -> int:
        """The one for the next answer."""
        return self._free[0]

    @property
    def spare(self) -> bool:
        """Whether there is one more, so that the next answer may stay in its own."""
        return len(self._free) > 1

    def hand_out(self, like: Plain) -> Plain:
        """The answer in the next buffer, shaped as `like`; the buffer is the caller's with all that is made
        of it. What comes behind it goes to another one.
        """
        buffer = self._free.popleft()
        held = np.frombuffer(self._memory.answer_bytes(buffer, like.spec.nbytes), np.uint8)
        weakref.finalize(held, self._back, buffer, _forks[0]).atexit = False
        return Plain(like.dtype, held.view(like.storage.dtype).reshape(like.storage.shape))

    def _back(self, buffer: int, forks: int) -> None:
        if forks == _forks[0]:
            self._free.append(buffer)
