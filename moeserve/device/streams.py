"""`raw_stream`, `CurrentStream`: torch's current stream, for who launches step after step.

`torch.cuda.current_stream` makes an object of Python each time. Where a thread has slept before, and its
caches are cold, that takes as long as to launch a kernel.
"""

from __future__ import annotations

import torch


def raw_stream(device: int | None = None) -> int:
    """The driver's handle of the calling thread's current stream. device: an index; None: the current one."""
    index = torch._C._cuda_getDevice() if device is None else device
    return int(torch._C._cuda_getCurrentRawStream(index))


class CurrentStream:
    """The current stream of whoever asks, on one device; made anew only where it is another one than before.
    From any thread.
    """

    def __init__(self, device: int | None = None) -> None:
        """device: its index; None: the current one."""
        self._device = device
        self._found: tuple[int, torch.cuda.Stream] | None = None

    def get(self) -> torch.cuda.Stream:
        """The stream."""
        raw, found = raw_stream(self._device), self._found
        if found is None or found[0] != raw:
            found = self._found = raw, torch.cuda.current_stream(self._device)
        return found[1]
