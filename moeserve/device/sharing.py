"""Who else computes on a GPU: `GpuProcesses` counts processes, as NVIDIA's management library (NVML) does,
and `by_service` says whether they compute at once.

Kernels that wait take turns of milliseconds with those of another process, so that whoever launches some asks
before whether its GPU is its own. The library comes with the driver. What it counts inside a container is for
the driver to say: where it counts none, not even this process, nobody knows; where it counts those of the
container alone, a process outside is not seen.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from typing import Any

import torch

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two counts."""

LIBRARY = "libnvidia-ml.so.1"
COUNT = "nvmlDeviceGetComputeRunningProcesses_v3"
_SUCCESS, _TOO_SMALL = 0, 7  # nvmlReturn_t: NVML_SUCCESS, NVML_ERROR_INSUFFICIENT_SIZE


class Unknown(Exception):
    """Nobody knows what processes there are; says why."""


def nvml() -> Any:
    """The library, ready to be asked. Raises Unknown."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as missing:
        raise Unknown(str(missing)) from missing
    code: int = library.nvmlInit_v2()  # it counts how often it is called, and is loaded once
    if code != _SUCCESS:
        raise Unknown(f"nvmlInit_v2 gives {code}")
    return library


def by_service(device: str) -> bool:
    """Whether processes compute at once on this device of torch, `cuda:N`, by NVIDIA's multi-process service
    (MPS), and so does this one. False on a CPU, and where the driver does not know.
    """
    if not device.startswith("cuda"):
        return False
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    status, value = driver.cuDeviceGetAttribute(attribute, torch.device(device).index or 0)
    return bool(status == driver.CUresult.CUDA_SUCCESS and value)


class GpuProcesses:
    """Those of the GPU with this UUID, without `GPU-`. A thread of its own counts, as long as somebody asks:
    a driver that does not answer holds nobody else up.
    """

    def __init__(self, uuid: str, library: Any | None = None) -> None:
        """library: NVML; None: the driver's."""
        self._uuid, self._library = uuid, library
        self._looked, self._looks = -math.inf, False
        self._found: int | str = "it was not asked yet"

    @property
    def alone(self) -> bool:
        """Whether this process, which has begun to compute there, was the only one at the last count. False
        where nobody knows. It waits for nothing.
        """
        now = time.monotonic()
        if not self._looks and now - self._looked >= LOOK_SECONDS:
            self._looks = True
            try:
                threading.Thread(target=self.look, name="gpu-processes", daemon=True).start()
            except RuntimeError as full:  # the process may have no further thread
                self._note(str(full))
        return self._found == 1

    def look(self) -> None:
        """Counts, and logs what has changed."""
        try:
            self._note(self.count())
        except Unknown as why:
            self._note(str(why))
        except Exception as wrong:
            log.exception("the processes of GPU-%s cannot be counted", self._uuid)
            self._note(f"{type(wrong).__name__}: {wrong}")

    def _note(self, found: int | str) -> None:
        """found: how many there are, or why nobody knows."""
        if found != self._found:
            if isinstance(found, int):
                log.info("GPU-%s: %d processes compute there, this one counted", self._uuid, found)
            else:
                log.info("GPU-%s: nobody knows what processes compute there: %s", self._uuid, found)
        self._found, self._looked = found, time.monotonic()
        self._looks = False

    def count(self) -> int:
        """How many there are now. Raises Unknown."""
        self._library = library = self._library or nvml()
        if not hasattr(library, COUNT):
            raise Unknown(f"the driver's NVML has no {COUNT}")
        device, count = ctypes.c_void_p(), ctypes.c_uint(0)
        code = library.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}".encode(), ctypes.byref(device))
        if code != _SUCCESS:
            raise Unknown(f"nvmlDeviceGetHandleByUUID gives {code}")  # it is a part of a GPU, for example
        code = getattr(library, COUNT)(device, ctypes.byref(count), None)
        if code == _SUCCESS:
            raise Unknown("NVML counts none")
        if code != _TOO_SMALL:
            raise Unknown(f"{COUNT} gives {code}")
        return count.value
