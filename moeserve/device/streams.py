"""`raw_stream`, `CurrentStream`, `Track`: the stream on which steps are launched, for who launches many.
`stream_for`: streams beside it.

`torch.cuda.current_stream` makes an object of Python each time. Where a thread has slept before, and its
caches are cold, that takes as long as to launch a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def raw_stream(device: int | None = None) -> int:
    """The driver's handle of the calling thread's current stream. device: an index; None: the current one."""
    return int(torch._C._cuda_getCurrentRawStream(_index(device)))


class CurrentStream:
    """The current stream of whoever asks, on one device; made anew only where it is another one than before.
    From any thread.
    """

    def __init__(self, device: int | None = None) -> None:
        """device: its index; None: the current one."""
        self._device = device
        self._found: tuple[tuple[int, int], torch.cuda.Stream] | None = None

    def get(self) -> torch.cuda.Stream:
        """The stream."""
        index = _index(self._device)
        which, found = (index, raw_stream(index)), self._found
        if found is None or found[0] != which:
            found = self._found = which, torch.cuda.current_stream(index)
        return found[1]


def stream_for(work: str, device: str | torch.device) -> torch.cuda.Stream:
    """The stream of this process for one kind of work on a device, the same one each time; from any thread.

    torch has 32 streams, which it gives out in turn. Who takes a new one each time comes to those on which
    others wait, and torch's allocator keeps what is freed for each stream apart: up to 32 times the memory.
    """
    where = torch.device(device)
    return _stream_for(work, _index(None) if where.index is None else where.index)


@cache
def _stream_for(work: str, index: int) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return made


URGENT = -1
"""The priority of a stream; the default one has 0."""

MAIN, SHORT = TRACKS = 0, 1
"""Tracks of a device: steps of one follow one another, those of two may run at the same time."""

_here = threading.local()


def track() -> int:
    """The track for which the calling thread launches or records kernels now; what a kernel keeps between its
    launches is of one track.
    """
    return getattr(_here, "track", MAIN)


def at_once() -> bool:
    """Whether a grid whose blocks wait for each other is to begin when there is room for all of them. Not on
    SHORT: there each block begins where one of the other track's ends, before others of that. A grid that has
    to have all places at once would wait until that track has a gap. All its blocks come to run, since no
    kernel of MAIN waits for one of SHORT, nor begins with a part of blocks that wait for each other.
    """
    return track() == MAIN


SPARED = 1
"""Clusters, or blocks that take a multiprocessor each, that kernels of a track leave to those of the other:
to small ones, each of which would wait for a large one to end, and to one that waits for a caller's rows.
"""


def spared() -> int:
    """By how many a grid that would fill the device is smaller, of what is launched or recorded now."""
    return getattr(_here, "spared", 0)


@contextmanager
def sparing(many: int) -> Iterator[None]:
    """Grids that would fill the device leave room for so many meanwhile."""
    _here.spared = many
    try:
        yield
    finally:
        _here.spared = 0


class Track:
    """A track's stream on one device. Of one thread at a time.

    MAIN is whatever stream is current. SHORT has one of its own, whose kernels go before others: as soon as
    multiprocessors are free they are theirs.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.stream: torch.cuda.Stream | None = None
        if number != MAIN:
            self.stream = torch.cuda.Stream(priority=URGENT)  # type: ignore[no-untyped-call]

    @contextmanager
    def current(self) -> Iterator[None]:
        """What the calling thread launches meanwhile is of this track."""
        if self.stream is None:
            yield
            return
        before = torch.cuda.current_stream(self.stream.device)
        torch.cuda.set_stream(self.stream)
        _here.track = self.number
        try:
            yield
        finally:
            _here.track = MAIN
            torch.cuda.set_stream(before)


def _index(device: int | None) -> int:
    return torch._C._cuda_getDevice() if device is None else device
