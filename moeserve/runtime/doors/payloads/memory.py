"""Memory of a region, as the operating system gives it: a sealed memfd, or a named POSIX object."""

import fcntl
import mmap
import os
import re
import stat

from moeserve.proto.tensors import TensorError
from moeserve.proto.texts import quoted
from moeserve.runtime.doors.payloads.errors import UnknownRegion

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SHARED_OBJECTS = "/dev/shm"
KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def sealed_memory(size: int) -> tuple[int, memoryview]:
    """A new memfd of `size` bytes, whole pages, that nobody can resize: its descriptor and its bytes."""
    descriptor = os.memfd_create("moeserve-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return descriptor, memoryview(mmap.mmap(descriptor, size))
    except BaseException:
        os.close(descriptor)
        raise


def named_memory(key: str, offset: int, size: int) -> memoryview:
    """Bytes [offset, offset + size) of the object `key`; whoever owns it can still truncate it.

    Raises TensorError for a key or range that cannot be, UnknownRegion when there is no such object.
    """
    if not KEY.fullmatch(key):
        raise TensorError("key", f"{quoted(key)} is not a name that shm_open takes")
    if offset < 0 or size < 1:
        raise TensorError("size", f"{size} bytes at offset {offset} are no range")
    try:
        path = f"{SHARED_OBJECTS}/{key.removeprefix('/')}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as failed:
        raise UnknownRegion(
            f"key: shared-memory object {quoted(key)} cannot be opened: {failed.strerror}"
        ) from failed
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or offset + size > found.st_size:
            text = f"{size} bytes at offset {offset} leave object {quoted(key)} of {found.st_size} bytes"
            raise TensorError("size", text)
        return memoryview(mmap.mmap(descriptor, offset + size))[offset:]
    finally:
        os.close(descriptor)
