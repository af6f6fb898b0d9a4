"""`Registrar`: registers the memory of regions with the CUDA device, so that its copy engines (DMA) read and
write it in place. A copy from or to other host memory goes through the driver's own buffers, at a quarter of
the speed, and the host waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

log = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: registered for every context of the process
CLOSE_SECONDS = 5.0  # within which what is registered has to be given back, when the process ends


class Driver(Protocol):
    """What registers host memory. Each returns why it could not, or an empty text."""

    def register(self, address: int, nbytes: int) -> str:
        """Registers `nbytes` at `address`."""

    def unregister(self, address: int) -> str:
        """Ends the registration of the memory at `address`; may wait for what the device does now."""


class CudaDriver:
    """The CUDA runtime, as torch has loaded it, for one device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str:
        """Registers `nbytes` at `address` for all contexts of this process."""
        return self._said(lambda runtime: runtime.cudaHostRegister(address, nbytes, PORTABLE))

    def unregister(self, address: int) -> str:
        """Ends the registration of the memory at `address`."""
        return self._said(lambda runtime: runtime.cudaHostUnregister(address))

    def _said(self, act: Callable[[Any], Any]) -> str:
        try:
            torch.cuda.set_device(self._device)  # of this thread, which may be any
            status = act(torch.cuda.cudart())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return str(error)
        return "" if int(status) == 0 else f"CUDA error {int(status)} ({status})"


class Registration:
    """Memory that is registered. It stays mapped until `end` has been carried out."""

    def __init__(self, registrar: Registrar, memory: memoryview) -> None:
        self._registrar, self.memory = registrar, memory

    @property
    def address(self) -> int:
        """Where the memory begins."""
        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def end(self, ended: Callable[[], None]) -> None:
        """Has it registered no more, by the registrar's thread; `ended` is called there afterwards.

        No copy by the device may be under way. Returns at once, so that a caller may hold a lock.
        """
        self._registrar.retire(self, ended)


class Registrar:
    """Registers up to `most_bytes`. Memory that cannot be registered is used all the same, but more slowly:
    the reason is logged once. Safe from any thread.
    """

    def __init__(self, driver: Driver, most_bytes: int) -> None:
        self._driver, self._most_bytes = driver, most_bytes
        self._nbytes = 0
        self._refused = False
        self._lock = threading.Lock()
        self._retired: queue.SimpleQueue[tuple[Registration, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="region-registrar", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes that are registered now."""
        return self._nbytes

    def register(self, memory: memoryview) -> Registration | None:
        """Registers all of `memory`; None where it cannot be: then its bytes are copied by the host first."""
        nbytes = memory.nbytes
        with self._lock:
            fits = self._nbytes + nbytes <= self._most_bytes
            self._nbytes += nbytes if fits else 0
        if not fits:
            text = f"{self._nbytes} of server.registered_bytes = {self._most_bytes} are taken"
            self._say(nbytes, text)
            return None
        made = Registration(self, memory)
        why = self._driver.register(made.address, nbytes)
        if why:
            self._let_go(nbytes)
            self._say(nbytes, why)
            return None
        return made

    def retire(self, registration: Registration, ended: Callable[[], None]) -> None:
        """Ends a registration, in the registrar's own thread; `ended` is called there when it is done."""
        self._retired.put((registration, ended))

    def close(self) -> None:
        """Waits until all that was retired is registered no more, and ends the thread."""
        self._retired.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("regions are still registered with the device %g s after their end", CLOSE_SECONDS)

    def _say(self, nbytes: int, why: str) -> None:
        level = logging.DEBUG if self._refused else logging.WARNING
        self._refused = True
        log.log(level, "a region of %d bytes is not registered with the device: %s", nbytes, why)

    def _let_go(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes

    def _run(self) -> None:
        while (retired := self._retired.get()) is not None:
            registration, ended = retired
            nbytes = registration.memory.nbytes
            why = self._driver.unregister(registration.address)
            if why:
                log.error("a region of %d bytes stays registered with the device: %s", nbytes, why)
            self._let_go(nbytes)
            registration.memory = memoryview(b"")
            del registration, retired  # the memory is unmapped with its last reference, after this
            ended()


def registrar_of(device: str, most_bytes: int) -> Registrar | None:
    """What registers regions with the rank's device; None on a CPU, and where no byte may be registered."""
    return Registrar(CudaDriver(device), most_bytes) if device != "cpu" and most_bytes else None
