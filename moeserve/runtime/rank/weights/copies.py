"""Bytes from one place to another at a bounded rate, and the end of patience: `Copier`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from moeserve.device.streams import stream_for
from moeserve.experts.bank import Bank
from moeserve.experts.checksum import Slot

PIECE = 4 << 20  # bytes copied between two looks at the clock, where the rate is bounded


class Abandoned(Exception):
    """The change that was being prepared is not wanted any more."""


class Copier:
    """Copies tensors piece by piece, at most `rate` bytes a second (0: as fast as they go).

    On CUDA it has a stream, so that copies run on the copy engines beside a step's kernels; one thread uses
    it.
    """

    def __init__(self, rate: float, device: str, work: str = "copies") -> None:
        """work: which copiers share a stream: those of the same."""
        if rate < 0:
            raise ValueError(f"a rate of {rate} bytes a second must be 0 (unbounded) or more")
        self._rate = rate
        self._stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self._stream = stream_for(work, device)
        self._free_at = 0.0
        self.abandoned = threading.Event()

    def copy(self, slots: Sequence[tuple[Slot, Slot]]) -> None:
        """Copies every tensor of each source expert into its target's, and waits for them once.

        Raises Abandoned when the change was given up meanwhile.
        """
        with self.stream():
            try:
                for source, target in slots:
                    for name, own in target.items():
                        self._copy(source[name], own)
            finally:  # nothing is read any more when this returns, however it does
                self.wait()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if not self._rate:
            self.spent(target.nbytes)
            target.copy_(source, non_blocking=True)
            return
        given, taken = (t.contiguous().view(-1).view(torch.uint8) for t in (source, target))
        for at in range(0, taken.numel(), PIECE):
            piece = taken[at : at + PIECE]
            piece.copy_(given[at : at + PIECE], non_blocking=True)
            self.spent(piece.numel())

    def stream(self) -> AbstractContextManager[object]:
        """A context in which the device's work goes to the copier's own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def spent(self, size: int) -> None:
        """Waits until `size` more bytes are within the rate. Raises Abandoned."""
        if self.abandoned.is_set():
            raise Abandoned
        if self._rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            if self._free_at - now > 1e-3 and self.abandoned.wait(self._free_at - now):
                raise Abandoned

    def after_commit(self, bank: Bank) -> None:
        """The last commit's copies happen before any later one; steps that are queued need not."""
        if self._stream is not None:
            bank.after_commit(self._stream)

    def wait(self) -> None:
        """Until every copy so far has happened. The thread sleeps: a spinning one would slow the steps'."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()
