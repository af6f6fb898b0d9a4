"""`GpuProcesses`: how many processes compute on a GPU, as NVIDIA's management library (NVML) counts them.

Kernels that wait take turns of milliseconds with those of another process, so that whoever launches some asks
before whether its GPU is its own. The library comes with the driver. In a container that does not see the
host's processes it counts none, not even this one, and then nobody knows.
"""

from __future__ import annotations

import ctypes
import logging
import time
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two counts."""

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _TOO_SMALL = 0, 7  # nvmlReturn_t: NVML_SUCCESS, NVML_ERROR_INSUFFICIENT_SIZE


@cache
def _nvml() -> Any | None:
    """The library, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as missing:
        log.info("nobody knows what processes compute on a GPU: %s", missing)
        return None
    code: int = library.nvmlInit_v2()
    if code != _SUCCESS:
        log.info("nobody knows what processes compute on a GPU: nvmlInit gives %d", code)
        return None
    return library


class GpuProcesses:
    """Those of the GPU with this UUID, without `GPU-`."""

    def __init__(self, uuid: str, nvml: Any | None = None) -> None:
        """nvml: the library; None: the driver's."""
        self._uuid, self._nvml = uuid, nvml
        self._looked, self._found = float("-inf"), False

    @property
    def alone(self) -> bool:
        """Whether this process, which has begun to compute there, is the only one, as of up to `LOOK_SECONDS`
        ago. False where nobody knows.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked, self._found = now, self.count() == 1
        return self._found

    def count(self) -> int | None:
        """How many there are now; None where nobody knows."""
        nvml = _nvml() if self._nvml is None else self._nvml
        if nvml is None:
            return None
        device, count = ctypes.c_void_p(), ctypes.c_uint(0)
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}".encode(), ctypes.byref(device)) != _SUCCESS:
            return None  # it is a part of a GPU, for example
        code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), None)
        return count.value if code == _TOO_SMALL else None
