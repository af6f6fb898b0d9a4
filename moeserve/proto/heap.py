"""Settings of malloc: the C library keeps the memory of large messages for the next ones.

glibc maps every block over 32 MiB, and at first over 128 KiB, from the kernel and unmaps it when it is
freed; so each message pays for its pages anew. With 256 rows of 7168 bf16 each way this halves the time of
an inline call.
"""

import ctypes
import platform

M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3

SETTINGS = {
    M_MMAP_THRESHOLD: 64 << 20,
    M_TRIM_THRESHOLD: 512 << 20,
    M_TOP_PAD: 64 << 20,
}


def keep_freed_memory() -> bool:
    """Makes malloc keep up to 512 MiB that is free, for blocks up to 64 MiB; False where the C library is not
    glibc.

    It holds for the whole process, so a rank's process does it at its start, and a client only if its
    program says so.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in SETTINGS.items())
