"""`GridWait`: how long blocks of a launch wait for each other, and the error when they waited in vain.

A kernel whose blocks wait for each other takes `bound` and `expired` among its arguments. A block that has
waited longer than that sets the word and goes on: the launch ends, its answer means nothing, and the host
finds the word without asking the device.
"""

from __future__ import annotations

from functools import cache

import torch

from moeserve.device.arguments import Argument
from moeserve.device.residency import resident_blocks

WAIT_SECONDS = 10.0
"""The longest that a block waits for the others of its launch.

A launch takes milliseconds, and under a sanitizer seconds; a dispatcher waits 30 s for a peer by default.
"""

NANOSECONDS = 10**9

FIELDS = {
    "bound": "u64",  # nanoseconds that a block waits for others at most
    "expired": "u32*",  # the host's: set by a block that waited longer
    "spoiled": "u32*",  # the device's, likewise: see `spoiled_word`
}
"""The arguments of a kernel whose blocks wait for each other."""


class GridWait:
    """The waits of one kernel on one device."""

    def __init__(self, kernel: str, device: torch.device) -> None:
        self._kernel, self._device = kernel, device
        self._spoiled = spoiled_word(device)
        self._expired = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._word = self._expired.numpy()  # of the same memory; a tensor is slow to read

    def arguments(self) -> dict[str, Argument]:
        """The values of `FIELDS`."""
        return {"bound": int(WAIT_SECONDS * NANOSECONDS), "expired": self._expired, "spoiled": self._spoiled}

    def check(self) -> None:
        """Raises RuntimeError if blocks of a launch waited in vain since the last call; waits for nothing."""
        if not self._word[0]:
            return
        self._word[0] = 0
        self._spoiled.zero_()
        raise RuntimeError(
            f"{self._kernel}: blocks of a launch of up to {resident_blocks(self._device)} waited "
            f"{WAIT_SECONDS:g} s for others that did not run, and its answer is wrong; probably another "
            f"kernel holds multiprocessors of {self._device}: raise members.held_multiprocessors to as many "
            "as it holds"
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


def check_waits() -> None:
    """`GridWait.check` for every kernel that was launched or recorded by this process.

    To be asked once an answer is on the host: a recorded launch asks nobody when it is replayed.
    """
    for wait in _made:
        wait.check()
