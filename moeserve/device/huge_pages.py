"""Host memory in pages of 2 MiB, for what is large and stays: experts of a rank on the CPU.

When a process ends the kernel takes its pages back, one by one, and closes its sockets after that: nobody
hears meanwhile that it is dead. For 600 MB in pages of 4 KiB that lasts 40 ms, and in pages of 2 MiB 3 ms.
"""

from __future__ import annotations

import logging
import mmap

import torch

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
"""Bytes, of x86-64 and of arm64 with pages of 4 KiB; a kernel with larger ones keeps its small ones here."""


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU, of zeros that take no memory before they are written, in huge pages where the
    kernel gives any; of less than one such page, a plain empty one.

    Raises MemoryError with the bytes where this host has not so much.
    """
    nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"this host has no memory for {nbytes / (1 << 30):.1f} GiB of experts ({error}); more ranks, or "
            "fewer balance.redundant_experts, take less of each, and `moeserve plan` shows how much"
        ) from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    first = -whole.data_ptr() % HUGE_PAGE
    try:  # whole pages alone: one that the last bytes had to themselves would take memory that nobody counts
        memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes // HUGE_PAGE * HUGE_PAGE)
    except OSError as error:  # a kernel without them
        log.debug("experts lie in small pages: %s", error)
    return whole[first : first + nbytes].view(dtype).view(shape)
