"""`Engines`: the streams and events of a device that copies are made on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from moeserve.runtime.step import Moment


class Engines:
    """The streams and events of a CUDA device. Uploads and downloads have streams of their own."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self._up.device_index
        self._spare: dict[bool, deque[torch.cuda.Event]] = {True: deque(), False: deque()}

    def use(self) -> None:
        """Makes the device this thread's current one."""
        torch.cuda.set_device(self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the engines read and write; it is not given out again while they do."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def uploading(self) -> AbstractContextManager[object]:
        """A context in which the device's work goes to the stream of uploads."""
        return self._on(self._up)

    def downloading(self) -> AbstractContextManager[object]:
        """A context in which it goes to the stream of answers, behind the current stream's work so far."""
        self._down.wait_stream(self._current)
        return self._on(self._down)

    @property
    def _current(self) -> torch.cuda.Stream:
        """The current stream; without a number torch asks for the device, which takes as long as a launch."""
        return torch.cuda.current_stream(self._index)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As `torch.cuda.stream` of this thread's current device, which it asks for in each call."""
        before = self._current
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    def event(self, *, sleeps: bool = False) -> Moment:
        """What the current stream has been given so far.

        sleeps: who waits for it sleeps. It wakes a little later, and holds up no thread that launches work,
        as one does that spins.
        """
        spare = self._spare[sleeps]
        made = spare.popleft() if spare else torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
        made.record(self._current)
        return made

    def reuse(self, event: Moment, *, sleeps: bool) -> None:
        """Takes back an event that has passed and that nobody asks any more; from any thread."""
        self._spare[sleeps].append(event)  # type: ignore[arg-type]

    def follow(self, event: Moment) -> None:
        """The current stream goes on when `event` has passed; the host does not wait."""
        self._current.wait_event(event)  # type: ignore[arg-type]


class HostEngines(Engines):
    """What stands for a device on a CPU: everything has happened at once. For tests of what is above."""

    def __init__(self) -> None:
        self.device = "cpu"

    def use(self) -> None:
        """Does nothing."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Plain host memory."""
        return torch.empty(shape, dtype=dtype)

    def uploading(self) -> AbstractContextManager[object]:
        """Does nothing."""
        return nullcontext()

    def downloading(self) -> AbstractContextManager[object]:
        """Does nothing."""
        return nullcontext()

    def event(self, *, sleeps: bool = False) -> Moment:
        """A moment that has passed."""
        return Passed()

    def reuse(self, event: Moment, *, sleeps: bool) -> None:
        """Does nothing."""

    def follow(self, event: Moment) -> None:
        """Does nothing."""


class Passed:
    """A moment of the past."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """Whether it has passed."""
        return True
