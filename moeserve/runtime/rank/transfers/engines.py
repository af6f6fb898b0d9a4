"""`Engines`: the streams and events of a device that copies are made on."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeserve.device.streams import CurrentStream, raw_stream
from moeserve.runtime.step import Moment

Copy = tuple[int, int, int]
"""The address that bytes are copied to, where they lie, and how many."""


class Engines:
    """The streams and events of a CUDA device. Uploads and downloads have streams of their own."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self._up.device_index
        self._stream = CurrentStream(self._index)
        self._context = _current_context()
        self._spare: dict[bool, deque[torch.cuda.Event]] = {True: deque(), False: deque()}

    def use(self) -> None:
        """Makes the device this thread's current one, for calls of the driver, too: torch does nothing where
        it takes that for granted.
        """
        torch.cuda.set_device(self.device)
        if status := _driver().cuCtxSetCurrent(self._context):
            raise RuntimeError(f"{self.device} cannot be used: cuCtxSetCurrent: CUDA error {status}")

    def settle(self) -> None:
        """Returns when all uploads that were queued so far have ended."""
        self._up.synchronize()

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
        """The current stream."""
        return self._stream.get()

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As `torch.cuda.stream` of this thread's current device, which it asks for in each call."""
        before = self._current
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Queues copies on the current stream, between memory of the device and memory of the host that is
        registered or pinned. Raises RuntimeError where the driver refuses one.

        The calling thread has called `use`, or launched work before. It keeps the interpreter, which torch
        gives up for each copy and each view: where others want it, too, to get it back takes many times as
        long as the driver's call. torch does not know of these copies: whoever asks for one keeps pinned
        memory until it has ended.
        """
        queue, stream = _driver().cuMemcpyAsync, raw_stream(self._index)
        for into, source, nbytes in copies:
            if status := queue(into, source, nbytes, stream):
                raise RuntimeError(f"{nbytes} bytes cannot be copied: cuMemcpyAsync: CUDA error {status}")

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

    def settle(self) -> None:
        """Does nothing."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Plain host memory."""
        return torch.empty(shape, dtype=dtype)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copies at once."""
        for copy in copies:
            ctypes.memmove(*copy)

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


@cache
def _driver() -> Any:
    """The driver, for whose calls ctypes does not give the interpreter up. torch has loaded it."""
    found = ctypes.PyDLL("libcuda.so.1")
    found.cuMemcpyAsync.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    found.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
    return found


def _current_context() -> int:
    """The driver's context of the calling thread, which has made something on the device."""
    found = ctypes.c_void_p()
    if status := _driver().cuCtxGetCurrent(ctypes.byref(found)):
        raise RuntimeError(f"the thread's context is unknown: cuCtxGetCurrent: CUDA error {status}")
    if not found.value:
        raise RuntimeError("this thread has no context of a device")
    return found.value


class Passed:
    """A moment of the past."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """Whether it has passed."""
        return True
