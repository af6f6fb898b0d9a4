"""`Segments`: many short copies between a device and registered memory of the host, in one launch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from moeserve.device.arguments import Arguments
from moeserve.device.nvrtc import NEEDED_MODULE, CompileError, LaunchError, Program
from moeserve.device.source import source

log = logging.getLogger(__name__)

Copy = tuple[int, int, int]
"""The address that bytes are copied to, where they lie, and how many."""

WORD = 16  # bytes that a thread reads at once; pieces begin and end with whole ones
THREADS, AT_ONCE = 512, 4  # of a block, and words of each; as the kernel has them
MOST_BLOCKS = 16  # of one piece
MOST_PIECES = 64  # of one launch
TABLES = 64
"""Launches after which a table is written again. A step has two of them at most, and few steps are under way:
the first is long over then.
"""

ARGUMENTS = Arguments("SegmentsArguments", table="const uint4*")
SOURCES = (ARGUMENTS, "segments.cu")


def program() -> Program:
    """What is compiled."""
    return Program(source("moeserve.runtime.rank.transfers", *SOURCES))


class Segments:
    """Of one device; one thread uses it. Raises CompileError, LaunchError or ImportError where the kernel
    cannot be had, and LaunchError where the device has registered memory at other addresses than the host.
    """

    def __init__(self, device: str) -> None:
        with torch.cuda.device(device):
            _check_addresses(torch.cuda.current_device())
            function = program().function("copy_segments", ARGUMENTS)
        self._function = ctypes.c_void_p(int(function.handle))
        tables = torch.empty((TABLES, MOST_PIECES, 4), dtype=torch.int64, pin_memory=True)
        self._tables, self._lines = tables, tables.numpy()
        self._packed = [ARGUMENTS.pack({"table": table}) for table in tables]
        self._parameters = [ctypes.pointer(ctypes.c_void_p(ctypes.addressof(one))) for one in self._packed]
        self._next = 0

    @staticmethod
    def fits(copy: Copy) -> bool:
        """Whether a copy is of whole words."""
        into, origin, nbytes = copy
        return not (into | origin | nbytes) % WORD

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Queues copies that fit on a stream of the calling thread's device, in no order. Raises LaunchError
        where the driver refuses.
        """
        for first in range(0, len(copies), MOST_PIECES):
            self._launch(copies[first : first + MOST_PIECES], stream)

    def _launch(self, copies: Sequence[Copy], stream: int) -> None:
        at, self._next = self._next, (self._next + 1) % TABLES
        lines = [(into, origin, nbytes // WORD, 0) for into, origin, nbytes in copies]
        self._lines[at, : len(copies)] = np.array(lines, dtype=np.uint64).view(np.int64)
        most = max(line[2] for line in lines)
        blocks = min(MOST_BLOCKS, -(-most // (THREADS * AT_ONCE)) or 1)
        sizes = blocks, len(copies), 1, THREADS, 1, 1, 0
        if status := _driver().cuLaunchKernel(self._function, *sizes, stream, self._parameters[at], None):
            raise LaunchError(f"{len(copies)} copies cannot be launched: cuLaunchKernel: CUDA error {status}")


def segments_on(device: str) -> Segments | None:
    """What copies short pieces on `device` at once; None where each is to be copied by itself."""
    try:
        return Segments(device)
    except (CompileError, LaunchError, ImportError) as error:
        why = f"{NEEDED_MODULE} is not installed" if isinstance(error, ImportError) else error
        log.info("rows of several callers are copied one by one: %s", why)
        return None


def _check_addresses(device: int) -> None:
    from cuda.bindings import driver

    wanted = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    status, same = driver.cuDeviceGetAttribute(wanted, device)
    if status != driver.CUresult.CUDA_SUCCESS or not same:
        raise LaunchError("the device has registered memory of the host at addresses of its own")


@cache
def _driver() -> Any:
    """The driver, for whose calls ctypes does not give the interpreter up. torch has loaded it."""
    found = ctypes.PyDLL("libcuda.so.1")
    sizes = (ctypes.c_uint,) * 7
    found.cuLaunchKernel.argtypes = ctypes.c_void_p, *sizes, *(ctypes.c_void_p,) * 3
    return found
