"""The host id: processes that have the same one can share memory."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """The id of this process and of all it can share memory with; empty where it can share with none.

    Regions are handed over an abstract Unix socket to the same user only. So the id is made of the kernel's
    boot, the network namespace (which abstract sockets live in; a Kubernetes pod has one) and the user.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {network} {os.geteuid()}".encode()).hexdigest()[:16]
