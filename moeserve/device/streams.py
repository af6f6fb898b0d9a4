"""`raw_stream`, `CurrentStream`: torch's current stream, for who launches step after step.

`torch.cuda.current_stream` makes an object of Python each time. Where a thread has slept before, and its
caches are cold, that takes as long as to launch a kernel.
"""

from __future__ import annotations

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


def _index(device: int | None) -> int:
    return torch._C._cuda_getDevice() if device is None else device
