"""`HostMemory`: memory of a lane that lies on the host, and that the device reads and writes in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class HostMemory:
    """A mailbox and answers that are registered with the device.

    addresses: the host's. let_go: is called once, when nothing on the device can touch them any more.
    """

    addresses: tuple[int, int]
    let_go: Callable[[], None]

    @classmethod
    def of(cls, mailbox: memoryview, answers: memoryview, let_go: Callable[[], None]) -> HostMemory:
        """Both as they are mapped in this process."""
        return cls((_address(mailbox), _address(answers)), let_go)

    def on_device(self) -> tuple[int, int]:
        """Where the current device has both. Raises RuntimeError where it has not mapped them."""
        mailbox, answers = self.addresses
        return _on_device(mailbox), _on_device(answers)

    def close(self) -> None:
        """Lets go of both."""
        self.let_go()


def _on_device(address: int) -> int:
    from cuda.bindings import driver

    status, found = driver.cuMemHostGetDevicePointer(address, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"registered memory of the host is not mapped by the device: {status.name}")
    return int(found)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
