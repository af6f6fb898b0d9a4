"""A checkpoint's pages: how much of it is in memory, and dropping it, also where processes have it mapped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

PROCESS_MADVISE = 440  # the number of the system call, on every architecture
PAGEOUT = 21
LARGEST = 1 << 30  # bytes of one advice


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def drop(files: list[Path], pids: Iterable[int]) -> float:
    """Drops the files from the page cache, mappings of the processes included; what share stays in memory.

    Mapped pages are only given up where this process may advise others (CAP_SYS_NICE).
    """
    names = {str(path.resolve()) for path in files}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _page_out(pid, names)
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return in_memory(files)


def _page_out(pid: int, names: set[str]) -> None:
    """Takes the files' pages from one process; it reads them again where it needs them."""
    libc, handle = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        for base, size in _mapped(pid, names):
            for at in range(base, base + size, LARGEST):
                one = _Range(at, min(LARGEST, base + size - at))
                libc.syscall(PROCESS_MADVISE, handle, ctypes.byref(one), 1, PAGEOUT, 0)
    finally:
        os.close(handle)


def in_memory(files: list[Path]) -> float:
    """The share of the files' pages that is in the page cache."""
    libc, present, pages = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in files:
        size = path.stat().st_size
        count = -(-size // mmap.PAGESIZE)
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, mmap.MAP_PRIVATE) as view:
            vector = (ctypes.c_ubyte * count)()
            whole = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(whole)), ctypes.c_size_t(size), vector)
            del whole  # the view cannot be closed before
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        present += sum(page & 1 for page in vector)
        pages += count
    return present / max(1, pages)


def _mapped(pid: int, names: set[str]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes at which a process has the files mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5] in names:
            begin, end = (int(word, 16) for word in words[0].split("-"))
            yield begin, end - begin
