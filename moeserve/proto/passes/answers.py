"""`Answers`: memory for large answers, which is used again when nobody holds the answer in it any more."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST_BYTES = 1 << 20
"""Of an answer for which memory is kept: the C library keeps that of smaller ones."""

MOST_IDLE_BYTES, IDLE_SECONDS = 256 << 20, 10.0
"""Of all memory that nobody holds; what has waited longer goes with the next call."""

LARGEST_PART = 2
"""Memory is used again for answers that need all of it, or at least one part of so many."""


class Answers:
    """What is kept by one client. Safe to use from any thread.

    The system hands memory over in pages that it clears when they are first written: to copy 58.7 MB, 4,096
    rows of 7168 bf16, there takes half as long again on one host, and several times as long on another. The C
    library gives so much back to it at once, unless `moeserve.proto.heap` has told it otherwise.
    """

    def __init__(self, most_idle: int) -> None:
        """most_idle: answers whose memory is kept while nobody holds them."""
        self._idle: deque[tuple[float, NDArray[np.uint8]]] = deque(maxlen=most_idle)  # with since when
        self._closed = False

    @property
    def idle_bytes(self) -> int:
        """Of memory that nobody holds."""
        return sum(memory.nbytes for _, memory in list(self._idle))

    def empty_like(self, found: NDArray[Any]) -> NDArray[Any]:
        """A dense array to be filled, which is the caller's with all that is made of it."""
        nbytes = found.nbytes
        if nbytes < SMALLEST_BYTES:
            return np.empty_like(found)
        memory = self._fitting(nbytes)
        if memory is None:
            memory = np.empty(nbytes, np.uint8)  # numpy asks for huge pages
        held = np.frombuffer(memory.data, np.uint8, nbytes)  # views of it hold it, and not its memory
        weakref.finalize(held, self._back, memory).atexit = False
        return held.view(found.dtype).reshape(found.shape)

    def close(self) -> None:
        """Lets go of what nobody holds, now and from now on."""
        self._closed = True
        self._idle.clear()

    def _fitting(self, nbytes: int) -> NDArray[np.uint8] | None:
        old = time.monotonic() - IDLE_SECONDS
        for _ in range(len(self._idle)):
            try:
                since, memory = self._idle.popleft()
            except IndexError:  # another thread has it
                break
            if nbytes <= memory.nbytes <= LARGEST_PART * nbytes:
                return memory
            if since > old:
                self._idle.append((since, memory))
        return None

    def _back(self, memory: NDArray[np.uint8]) -> None:
        if self._closed or memory.nbytes > MOST_IDLE_BYTES:
            return
        self._idle.append((time.monotonic(), memory))  # the one that has waited longest goes
        while self.idle_bytes > MOST_IDLE_BYTES:
            try:
                self._idle.popleft()
            except IndexError:  # another thread has it
                break
