"""The host id: processes that have the same one can share memory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """The id of this process and of all it can share memory with; empty where it can share with none.

    Regions are handed over a Unix socket in a folder of the same user. So the id is made of the kernel's
    boot, the folder for temporary files (which containers may share, and seldom do) and the user.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        parent = os.stat(sockets_parent())
    except OSError:
        return ""
    place = f"{parent.st_dev} {parent.st_ino}"
    return hashlib.sha256(f"{boot} {place} {os.geteuid()}".encode()).hexdigest()[:16]


def sockets_parent() -> str:
    """The folder in which processes of a host have a folder of their user for Unix sockets."""
    return tempfile.gettempdir()
