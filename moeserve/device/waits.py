"""`GridWait`: how long blocks of a launch wait for each other, and the error when they waited in vain.

A kernel whose blocks wait for each other takes `bound` and `expired` among its arguments. A block that has
waited longer than that sets the word and goes on: the launch ends, its answer means nothing, and the host
finds the word without asking the device.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from moeserve.device.arguments import Argument
from moeserve.device.residency import resident_blocks

_longest = 10.0
"""Seconds that a block waits for the others of its launch at most, until `wait_at_most` says otherwise.

A launch takes milliseconds, and under a sanitizer seconds; a dispatcher waits 30 s for a peer by default.
"""

NANOSECONDS = 10**9

FIELDS = {
    "bound": "u64",  # nanoseconds that a block waits for others at most
    "expired": "u32*",  # the host's: set by a block that waited longer
    "spoiled": "u32*",  # the device's, likewise: see `spoiled_word`
}
"""The arguments of a kernel whose blocks wait for each other."""


def wait_at_most(seconds: float) -> None:
    """Blocks wait for so long, of kernels that are launched or recorded from here on."""
    global _longest
    _longest = seconds


class GridWait:
    """The waits of one kernel on one device."""

    def __init__(self, kernel: str, device: torch.device) -> None:
        self._kernel, self._device = kernel, device
        self._spoiled = spoiled_word(device)
        self._expired, self._word = _words.take()

    def arguments(self) -> dict[str, Argument]:
        """The values of `FIELDS`."""
        return {"bound": int(_longest * NANOSECONDS), "expired": self._expired, "spoiled": self._spoiled}

    def check(self) -> None:
        """Raises RuntimeError if blocks of a launch waited in vain since the last call; waits for nothing."""
        if not self._word[0]:
            return
        self._word[0] = 0
        self._spoiled.zero_()
        raise RuntimeError(
            f"{self._kernel}: blocks of a launch of up to {resident_blocks(self._device)} waited "
            f"{_longest:g} s (step.blocks_seconds) for others that did not run, and its answer is wrong; "
            f"probably another kernel holds multiprocessors of {self._device}: raise "
            "members.held_multiprocessors to as many as it holds"
        )


@cache
def spoiled_word(device: torch.device) -> torch.Tensor:
    """int32 `[1]` on `device`: not 0 while what kernels computed there means nothing, until `check` has said
    so.

    What sends their outputs to others reads it on the device, and sends nothing then.
    """
    return torch.zeros(1, dtype=torch.int32, device=device)


@cache
def grid_wait(kernel: str, device: torch.device) -> GridWait:
    """The waits of `kernel` on `device`, made at its first launch."""
    made = GridWait(kernel, device)
    _made.append(made)
    return made


_made: list[GridWait] = []

MOST_WORDS = 1024  # kernels that wait, of one process


class _Words:
    """The words of all kernels side by side in host memory, so that one look finds whether any is set."""

    def __init__(self) -> None:
        self._all: torch.Tensor | None = None
        self._seen: NDArray[np.int32] | None = None  # of the same memory; a tensor is slow to read
        self._taken = 0

    def take(self) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """A word `[1]` for one kernel more, twice: kernels write the tensor, the host reads the array.

        Raises RuntimeError where there is none left.
        """
        if self._all is None or self._seen is None:
            pinned = torch.cuda.is_available()
            self._all = torch.zeros(MOST_WORDS, dtype=torch.int32, pin_memory=pinned)
            self._seen = self._all.numpy()
        if self._taken == MOST_WORDS:
            raise RuntimeError(f"more than {MOST_WORDS} kernels of this process wait: raise MOST_WORDS")
        here = slice(self._taken, self._taken + 1)
        self._taken += 1
        return self._all[here], self._seen[here]

    @property
    def set(self) -> bool:
        """Whether any is."""
        return self._seen is not None and bool(self._seen[: self._taken].any())


_words = _Words()


def check_waits() -> None:
    """`GridWait.check` for every kernel that was launched or recorded by this process.

    To be asked once an answer is on the host: a recorded launch asks nobody when it is replayed.
    """
    if _words.set:
        for wait in _made:
            wait.check()
