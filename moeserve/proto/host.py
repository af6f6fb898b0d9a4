"""A process's host: with whom it can share memory there (`host_id`), how many cores it may use, and how short
its sleeps are.

A container with a limit of CPU time (`limits.cpu` in Kubernetes) sees all cores of its host, and is held up
for the rest of a tenth of a second when its threads together have used what it has. A thread for each core of
the host, or one that looks again and again, uses that up.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CPU = "cpu"
"""Of control groups, version 1."""

GROUPS = Path("sys/fs/cgroup")

SET_TIMER_SLACK = 29
"""Of prctl: nanoseconds by which the kernel may wake a thread late, 50,000 by default."""

log = logging.getLogger(__name__)


class Timespec(ctypes.Structure):
    """Linux's: a time that the system is told in nanoseconds."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


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


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use at the same time, at least 1. root: where `proc` and `sys` are."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([float(bound), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """The cores' worth of time that each of this process's control groups has, where that is limited."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return  # no Linux, or no control groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _up(root / GROUPS, path):
                yield from _ratio(group / "cpu.max")
        elif CPU in controllers.split(","):
            for group in _up(root / GROUPS / CPU, path):
                yield from _ratio(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")


def _up(mount: Path, path: str) -> Iterator[Path]:
    """A group and those that it is in; a container may be shown a path of its host, which is not there."""
    group = mount / path.strip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _ratio(*files: Path) -> Iterator[float]:
    """A quota over its period, both in microseconds: of one file, or of two."""
    try:
        quota, period = (word for file in files for word in file.read_text().split())
        if quota != "max" and int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):
        return  # this group has no such limit, or is none of this container's


def sleep_finely() -> None:
    """Has short sleeps of the calling thread take half as long, on Linux."""
    if not sys.platform.startswith("linux"):
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(SET_TIMER_SLACK, 1, 0, 0, 0):
        log.warning("a thread sleeps coarsely: prctl: %s", os.strerror(ctypes.get_errno()))
