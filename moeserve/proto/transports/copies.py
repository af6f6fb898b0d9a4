"""Copies between arrays in host memory: large ones by several threads."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.proto.host import usable_cores

THREADED_BYTES = 1 << 20
"""Copies of this size on are worth more than one thread."""

FEWEST_THREADS = 2
"""Of which a large copy is worth the wait for each other."""


@cache
def most_threads() -> int:
    """Of one copy: half of the cores. It ends with the last of its threads, and one that shares its core with
    a rank's waits for milliseconds: beside two ranks on 32 cores 14.7 MB take 0.2 ms by 16 threads, 0.16 by
    24, and 8 by 32, which is what torch has by default.
    """
    return max(FEWEST_THREADS, usable_cores() // 2)


def copy_into(into: NDArray[Any], found: NDArray[Any]) -> None:
    """Copies `found` into `into`, alike in dtype and shape; large dense ones by the threads that torch has,
    `most_threads` at most, where the caller's program has imported it: numpy has one.
    """
    if found.nbytes < THREADED_BYTES:
        into[:] = found
        return
    torch = sys.modules.get("torch")
    dense = into.flags.c_contiguous and found.flags.c_contiguous and found.flags.writeable
    if torch is None or not dense:
        into[:] = found
        return
    there, here = (torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in (into, found))
    threads, most = torch.get_num_threads(), most_threads()
    have = _setter() if threads > most else None
    if have is None:
        there.copy_(here)
        return
    have(most)
    try:
        there.copy_(here)
    finally:
        have(threads)


@cache
def _setter() -> Callable[[int], object] | None:
    """Says how many threads the loops of the calling thread have, and of no other one; None where torch has
    none of OpenMP. torch's own function says it of all threads that are yet to call torch, too.
    """
    torch: Any = sys.modules["torch"]
    try:
        (library,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
        loaded = ctypes.PyDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # the one that is there
        found: Callable[[int], object] = loaded.omp_set_num_threads
    except (ValueError, OSError, AttributeError):
        return None
    return found
